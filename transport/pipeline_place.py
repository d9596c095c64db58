"""The place of a stage in a pipeline: the worker that serves it, and the next one when that is lost.

Rules:
- A place is refilled by a thread that is there only then: neither the agent's thread, which hears of a loss, nor a
  continuation's, which brings a frame, waits for a process to start.
- Who needs the place meanwhile gets a future of the next worker.  It always ends: with that worker, or with the error
  that says why there is none.
- A worker that is lost before a frame got through it counts against the limit, and so does one that does not start.  A
  frame that gets through ends the count.  Past the limit the place stays empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from streamrt.errors import ClosedError
from transport.errors import PeerLostError

clock = time.monotonic


class Pending(Protocol):
    """What the pipeline uses of a `streamrt.DeviceFuture`."""

    def result(self, timeout: float | None = None) -> Any: ...
    def exception(self, timeout: float | None = None) -> BaseException | None: ...
    def cancelled(self) -> bool: ...
    def cancel(self) -> bool: ...
    def then(self, function: Callable[[Any], Any], /) -> Any: ...
    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...


class Peer(Protocol):
    """What the pipeline uses of a `transport.Peer`."""

    def submit(self, function: Any, /, *arguments: Any, timeout: float | None = None, copy: bool = True) -> Pending: ...
    @property
    def closed(self) -> bool: ...
    @property
    def pid(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Restart:
    """A stage's worker was lost and started again: its process before and after, and when, by `time.monotonic`.

    At `lost` the first call of the old one had ended with the loss, or was refused for it; at `back` the new one was
    ready.
    """

    stage: str
    old_pid: int
    pid: int
    lost: float
    back: float


class Place:
    """Where a stage's calls go.  `restart` starts the next worker and blocks until it is ready; None: there is none."""

    def __init__(self, stage: str, peer: Peer, restart: Callable[[], Peer] | None = None, limit: int = 0) -> None:
        """`limit`: how often in a row a worker is started again, with no frame through in between.

        Does not touch the device.
        """
        self.stage = stage
        self.peer = peer
        self.restarts: list[Restart] = []
        self._restart = restart if limit else None
        self._limit = limit
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._next: Future[Peer] | None = None
        self._thread: threading.Thread | None = None

    @property
    def given_up(self) -> BaseException | None:
        """Why no worker serves this place any more; None while one does, or may again.  Does not touch the device."""
        following = self._next
        return following.exception() if following is not None and following.done() else None

    def served(self, peer: Peer) -> None:
        """A frame got through this worker.  Does not block the host."""
        if self._in_a_row:
            with self._lock:
                if peer is self.peer and self._next is None:
                    self._in_a_row = 0

    def after(self, peer: Peer, cause: BaseException, *, over: bool = False) -> Future[Peer] | None:
        """The worker that follows `peer`, whose call ended with `cause` or was refused with it.

        None where no other will: `peer` is neither lost nor `over` (it takes no more calls, since its device has
        failed), or its place is not refilled.  The first to ask has the next one started.  Does not block the host.
        """
        restart = self._restart
        if restart is None or not (peer.closed or over):
            return None
        with self._lock:
            if self._next is not None:
                return self._next
            following: Future[Peer] = Future()
            if peer is not self.peer:
                following.set_result(self.peer)
                return following
            self._next = following
        if self._in_a_row >= self._limit:
            following.set_exception(_given_up(self.stage, self._limit, cause))
            return following
        arguments = (restart, following, cause, clock())
        refill = threading.Thread(target=self._refill, args=arguments, name="streamrt-restart", daemon=True)
        try:
            refill.start()
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            following.set_exception(error)
        else:
            self._thread = refill
        return following

    def close(self) -> None:
        """Has nothing started from now on; what is being started is for `restart`'s owner to end.  Does not block."""
        self._restart = None

    def join(self) -> None:
        """Waits for the thread that starts a worker, if there is one.  Blocks the host."""
        if self._thread is not None:
            self._thread.join()

    def _refill(self, restart: Callable[[], Peer], following: Future[Peer], cause: BaseException, lost: float) -> None:
        while self._in_a_row < self._limit:
            self._in_a_row += 1
            try:
                peer = restart()
            except ClosedError as error:
                following.set_exception(error)  # who started the workers has ended them
                return
            except Exception as error:  # noqa: BLE001 - what keeps a worker from starting is told to those who wait
                cause = error
                continue
            with self._lock:
                self.restarts.append(Restart(self.stage, self.peer.pid, peer.pid, lost, clock()))
                self.peer, self._next = peer, None
            following.set_result(peer)
            return
        following.set_exception(_given_up(self.stage, self._limit, cause))


def _given_up(stage: str, limit: int, cause: BaseException) -> PeerLostError:
    times = "once" if limit == 1 else f"{limit} times in a row"
    error = PeerLostError(
        f"the worker of stage {stage!r} is not started again: it was, {times}, and lost each time before a frame got"
        f" through; mend the stage, or raise restarts={limit}; the last time: {cause}"
    )
    error.__cause__ = cause
    return error
