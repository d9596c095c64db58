"""NCCL's send and receive through CuPy, between two processes that have a GPU each.

Both ends have the same `address`: rank 0 makes it, and `connect` gives it to the other.  All is enqueued on the stream
that is current.
"""

from __future__ import annotations

import os
from typing import Any


class Wire:
    """One end, of rank 0 or 1, on the current device."""

    ordered = True

    def __init__(self, rank: int) -> None:
        """Raises `ImportError` where CuPy has no NCCL."""
        from cupy.cuda import get_current_stream, nccl

        if not nccl.available:
            raise ImportError("this CuPy has no NCCL")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        self._nccl, self._current = nccl, get_current_stream
        self._rank = rank
        self._id = nccl.get_unique_id() if rank == 0 else ()
        self._communicator: Any = None

    @staticmethod
    def version() -> str:
        """The library and its version.  Raises `ImportError` where CuPy has no NCCL."""
        from cupy.cuda import nccl

        if not nccl.available:
            raise ImportError("this CuPy has no NCCL")
        number = nccl.get_version()
        return f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100}, send and receive"

    @property
    def address(self) -> Any:
        """What rank 1 connects to."""
        return self._id

    def connect(self, address: Any) -> None:
        """Makes the communicator, when both ends have come to this.  Blocks until then."""
        self._communicator = self._nccl.NcclCommunicator(2, address or self._id, self._rank)

    def send(self, array: Any) -> None:
        """Enqueues the sending of a contiguous array."""
        self._enqueue(self._communicator.send, array)

    def receive(self, array: Any) -> None:
        """Enqueues the receiving into a contiguous array."""
        self._enqueue(self._communicator.recv, array)

    def _enqueue(self, operation: Any, array: Any) -> None:
        operation(array.data.ptr, array.nbytes, self._nccl.NCCL_INT8, 1 - self._rank, self._current().ptr)

    def wait(self, request: None) -> None:
        """Nothing: the stream's order is enough."""

    def finish(self) -> None:
        """Waits for the current stream."""
        self._current().synchronize()
