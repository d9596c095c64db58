"""UCXX's low-level worker, polled: tag messages between two processes, with no thread, no event loop and no protocol.

``Wire.address`` goes to the other process, ``Wire.connect`` takes its own; then both `send` and `receive` arrays of any
library.  Whoever waits progresses the worker in a loop, as fast as the interpreter can.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0  # seconds that one message may take
_LOOKS = 4096  # at a message between two at the clock
_ENVIRONMENT = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_NET_DEVICES": "lo"}


def _libraries() -> tuple[Any, Any]:
    """UCXX's low-level module and its buffers."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # UCX reads it once
    from ucxx._lib import libucxx
    from ucxx._lib.arr import Array

    return libucxx, Array


class Wire:
    """One end.  `rank` is 0 at one end and 1 at the other."""

    ordered = False
    """Whether what is received is there for what its stream does next, rather than once it has been waited for."""

    def __init__(self, rank: int) -> None:
        """Raises `ImportError` where UCXX is not installed."""
        ucx, self._as_buffer = _libraries()
        self._ucx = ucx
        self._tags = [ucx.UCXXTag(number) for number in (rank, 1 - rank)]
        self._worker = ucx.UCXWorker(ucx.UCXContext(feature_flags=(ucx.Feature.TAG,)))
        self._endpoint: Any = None
        self._open: list[Any] = []

    @staticmethod
    def version() -> str:
        """The library and its version.  Raises `ImportError` where it is not installed."""
        libucxx, _ = _libraries()
        from ucxx import __version__

        return f"UCXX {__version__} on UCX {'.'.join(map(str, libucxx.get_ucx_version()))}, low-level worker, polled"

    @property
    def address(self) -> bytes:
        """What the other end connects to."""
        return bytes(self._worker.address)

    def connect(self, address: bytes) -> None:
        """Names the other end."""
        theirs = self._ucx.UCXAddress.create_from_buffer(address)
        self._endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
            self._worker, theirs, endpoint_error_handling=False
        )

    def send(self, array: Any) -> Any:
        """Begins to send a contiguous array, which stays as it is until the result is waited for."""
        return self._opened(self._endpoint.tag_send(self._as_buffer(array), self._tags[0]))

    def receive(self, array: Any) -> Any:
        """Begins to receive into a contiguous array: the next message, in the order in which they are sent."""
        full = self._ucx.UCXXTagMaskFull
        return self._opened(self._worker.tag_recv(self._as_buffer(array), self._tags[1], full))

    def _opened(self, request: Any) -> Any:
        self._open.append(request)
        return request

    def wait(self, request: Any) -> None:
        """Progresses until a message is through.  Raises UCXX's error of it, and `TimeoutError`."""
        self._progress_until(lambda: request.completed)
        request.check_error()
        self._open.remove(request)

    def finish(self) -> None:
        """Progresses until all that was begun is through.  Raises as `wait`."""
        while self._open:
            self.wait(self._open[0])

    def _progress_until(self, done: Callable[[], bool]) -> None:
        progress, limit = self._worker.progress, time.monotonic() + PATIENCE
        while True:
            for _ in range(_LOOKS):
                if done():
                    return
                progress()
            if time.monotonic() > limit:
                raise TimeoutError(f"a message was not through after {PATIENCE:g} s; is the other end there?")
