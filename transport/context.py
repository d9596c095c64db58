"""What a running function can ask about its call: who called, until when, and whether it should stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from streamrt.callbacks import CallbackPool, Until, add_blocking_hook
from streamrt.errors import DeadlockError
from transport.errors import LocalProtocolError

if TYPE_CHECKING:
    from transport.driver import Driver


class RunningCall:
    """One call of a peer while its function runs here."""

    __slots__ = ("_stop", "call", "deadline", "driver", "function", "reason")

    def __init__(self, driver: Driver, call: int, function: str, deadline: float | None) -> None:
        self.driver = driver
        self.call = call
        self.function = function
        self.deadline = deadline
        self.reason = ""
        self._stop = threading.Event()

    def cancel(self, reason: str) -> None:
        """The caller gave up or is lost.  Does not block the host."""
        self.reason = reason
        self._stop.set()

    @property
    def cancelled(self) -> bool:
        return self._stop.is_set()

    def wait_cancelled(self, timeout: float | None) -> bool:
        """Blocks the host until the call is cancelled (True) or the timeout (False)."""
        return self._stop.wait(timeout)


class _Thread(threading.local):
    executor: CallbackPool | None = None
    agent_thread = False


_call: ContextVar[RunningCall | None] = ContextVar("streamrt_call", default=None)
_thread = _Thread()


@contextmanager
def entered(running: RunningCall, executor: CallbackPool) -> Iterator[None]:
    """Makes the call the current one of this thread."""
    token = _call.set(running)
    previous, _thread.executor = _thread.executor, executor
    try:
        yield
    finally:
        _thread.executor = previous
        _call.reset(token)


def mark_agent_thread(drives: bool) -> None:
    """Whether the calling thread drives connections: a wait on it could never end then, and raises instead."""
    _thread.agent_thread = drives


def _hand_on(until: Until) -> AbstractContextManager[None] | None:
    """Asked before every wait of the runtime: hands the thread's turn on, or refuses on an agent's thread."""
    if _thread.agent_thread:
        raise DeadlockError(
            "this callback runs on the agent's own thread, and waits for what only that thread can bring; "
            "use future.then(...), whose functions may wait"
        )
    return None if _thread.executor is None else _thread.executor.blocking(until)


add_blocking_hook(_hand_on)


def current_call() -> RunningCall:
    """The call that this thread (or task) runs.  Raises `LocalProtocolError` outside one."""
    running = _call.get()
    if running is None:
        raise LocalProtocolError("no call runs here; this is for functions that a peer has called")
    return running


def cancelled() -> bool:
    """Whether the caller of the function which runs here has given up.  Does not touch the device.

    Raises `LocalProtocolError` outside a call.
    """
    return current_call().cancelled
