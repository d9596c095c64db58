"""What a running function can ask about its call: who called, until when, and whether it should stop."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

from streamrt.callbacks import CallbackPool, Until, add_blocking_hook
from streamrt.errors import DeadlockError
from streamrt.timeline import Point
from transport.errors import LocalProtocolError, PeerLostError
from transport.lead import Lead

if TYPE_CHECKING:
    from transport.driver import Driver


class RunningCall:
    """One call of a peer while its function runs here."""

    __slots__ = ("call", "cancelled", "deadline", "driver", "function", "points", "reason")

    def __init__(self, driver: Driver, call: int, function: str, deadline: float | None) -> None:
        self.driver = driver
        self.call = call
        self.function = function
        self.deadline = deadline
        self.reason = ""
        self.cancelled = False
        self.points: tuple[Point, ...] = ()
        """The caller's points behind which the arguments are there, in stream order."""

    def lost(self) -> PeerLostError | None:
        """The error of arguments whose bytes never came, None where they did or still may.  Does not touch the device.

        Ask it once they should be there.
        """
        if not self.points or not any(point.lost for point in self.points):
            return None
        return PeerLostError(
            f"{self.function} for {self.driver.name!r}: the caller was lost before its arguments were there"
        )

    def cancel(self, reason: str) -> None:
        """The caller gave up or is lost.  Does not block the host."""
        self.reason = reason
        self.cancelled = True


class _Thread(threading.local):
    executor: CallbackPool | None = None
    leads = False  # and would have to bring itself what it waited for
    lead: Lead | None = None


_call: ContextVar[RunningCall | None] = ContextVar("streamrt_call", default=None)
_thread = _Thread()


class entered:
    """Makes the call the current one of this thread, inside a ``with``."""

    __slots__ = ("_executor", "_previous", "_running", "_token")

    def __init__(self, running: RunningCall, executor: CallbackPool) -> None:
        self._running = running
        self._executor = executor
        self._previous: CallbackPool | None = None
        self._token: Token[RunningCall | None] | None = None

    def __enter__(self) -> None:
        self._token = _call.set(self._running)
        self._previous, _thread.executor = _thread.executor, self._executor

    def __exit__(self, *error: object) -> None:
        _thread.executor = self._previous
        if self._token is not None:
            _call.reset(self._token)


def set_leading(role: Lead | None) -> None:
    """Whether the calling thread leads an agent: a wait on it could never end then, and raises instead."""
    _thread.leads = role is not None
    _thread.lead = role


class driving:
    """A thread that is not the agent's reads a connection, inside a ``with``: a wait in a callback raises, as there.

    One may be used many times.  Whoever may be interrupted at its edge, by Ctrl-C, leaves it once more.
    """

    __slots__ = ("_previous",)

    def __init__(self) -> None:
        self._previous = _thread.leads

    def __enter__(self) -> None:
        _thread.leads = True

    def __exit__(self, *error: object) -> None:
        _thread.leads = self._previous


class running_while_leading:
    """A function runs on the leading thread, inside a ``with``: before it waits for something of the runtime it gives
    the lead away."""

    __slots__ = ("_role",)

    def __init__(self, role: Lead) -> None:
        self._role = role

    def __enter__(self) -> None:
        _thread.leads = False

    def __exit__(self, *error: object) -> None:
        _thread.leads = self._role.mine


def _hand_on(until: Until) -> AbstractContextManager[None] | None:
    """Asked before every wait of the runtime: hands the thread's turn on, or refuses on an agent's thread."""
    if _thread.leads:
        raise DeadlockError(
            "this callback runs on the agent's own thread, and waits for what only that thread can bring; "
            "use future.then(...), whose functions may wait"
        )
    if _thread.lead is not None:
        _thread.lead.leave()
    return None if _thread.executor is None else _thread.executor.blocking(until)


add_blocking_hook(_hand_on)


def running_call() -> RunningCall | None:
    """The call that this thread (or task) runs, None outside one.  Does not touch the device."""
    return _call.get()


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
