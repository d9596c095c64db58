"""One of UCX's messages on its way, and the end that it goes to or comes from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from streamrt.device import Device
from transport.channels import retired
from transport.channels.ucx import close_endpoint

QUARANTINE_SECONDS = 1.0  # after a message was ended in the middle: a device may still be copying


class End:
    """The UCX worker of a peer's process; connections to one process share it."""

    __slots__ = ("address", "close_at", "endpoint", "error", "users")

    def __init__(self, address: bytes) -> None:
        self.address = address
        self.users = 0
        self.error = ""
        """Why nothing can be sent there."""
        self.close_at = 0.0
        """When it is closed at the latest, where nobody uses it any more."""
        self.endpoint: Any = None
        """UCX's, once it is needed."""

    @property
    def alive(self) -> bool:
        """Whether anything can come from there, as far as UCX knows."""
        return not self.error and (self.endpoint is None or bool(self.endpoint.alive))

    def close(self, reason: str) -> None:
        """Ends what is on its way there.  Blocks the host for a fraction of a second at most."""
        self.error = self.error or reason
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is not None:
            close_endpoint(endpoint)


class Message:
    """One message on its way.  What becomes of it is written by the worker's thread, which then calls `changed`."""

    def __init__(
        self,
        end: End,
        tag: int,
        receipt: int,
        *,
        address: int,
        nbytes: int,
        device: Device,
        memory: object,
        ready: Callable[[], bool],
        changed: Callable[[], None],
        gone: Callable[[], bool],
    ) -> None:
        """`memory` is kept as long as UCX may touch the bytes, `receipt` is the tag under which the receiver says that
        they need not be kept; `ready` says whether UCX may touch them, `gone` whether the peer's process has ended.

        Does not touch the device.
        """
        self.end = end
        self.tag = tag
        self.receipt = receipt
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.ready = ready
        self.changed = changed
        self.posted = False
        """UCX has it."""
        self.done = False
        """Its bytes are there, and the receiver has said so."""
        self.error = ""
        """Why they are not."""
        self.wanted = True
        """Whether anybody waits for it."""
        self.request: Any = None
        """UCX's, while it may touch the bytes."""
        self._memory: object = memory
        self._gone = gone

    def fail(self, error: str) -> None:
        """It does not come; UCX does not touch its memory.  Does not touch the device."""
        self.error = error
        self._memory = None

    def let_go(self) -> None:
        """UCX does not touch the memory any more.  Does not touch the device."""
        self._memory = None

    def quarantine(self) -> None:
        """UCX has ended it in the middle: keeps a GPU's memory until nobody can touch it any more, neither a copy that
        the device still runs nor the peer, who may have it mapped.  Ordinary memory UCX copies itself, in calls of this
        process.  Does not block the host.
        """
        memory, self._memory = self._memory, None
        if self.device.kind != "cuda":
            return
        since, gone = time.monotonic(), self._gone
        retired.keep(memory, lambda: time.monotonic() - since > QUARANTINE_SECONDS and gone(), _nothing)


def _nothing() -> None:
    """Nobody waits for what was kept."""
