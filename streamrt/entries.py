"""The guards that are open on a thread, and what becomes of one that is left out of order.

Guards are left in the reverse order of their entries; a ``with`` does that by itself, unless it is held across a
``yield`` or an ``await`` and others enter and leave meanwhile.  Then each guard would bring back what it found, which
is another one's stream.  So a guard that is left takes those with it that were entered inside it and are still open,
the innermost first, and what it found is current again; that is logged, since code that merely never leaves a guard
does no harm.  Whoever leaves one of those afterwards changes nothing, and is told.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from streamrt.errors import LifetimeError
from streamrt.log import Log

if TYPE_CHECKING:
    from streamrt.libraries import StreamKeeper

_log = Log(__name__)

REMEDY = (
    "leave guards in the reverse order of their entries, on the thread that entered them; decorate coroutines and "
    "generators with @using(...) or @on_side_stream, which guard each step, and hold no guard across await or yield"
)

Found = list[tuple["StreamKeeper", Any]]
"""What is current: each keeper with its token."""
Stack = list[tuple[Any, Any]]
"""Guards, each with what it `Found`, the innermost last; None where the guard's own ``unwind()`` brings that back and
``found()`` tells it."""


class _Entries(threading.local):
    def __init__(self) -> None:
        self.stack: Stack = []


_entries = _Entries()


def open_entries() -> Stack:
    """The calling thread's open guards; always the same list on a thread.  Does not touch the device."""
    return _entries.stack


def bring_back(tokens: Found) -> None:
    """Restores in reverse order; one keeper that fails does not keep the others from it."""
    failure: BaseException | None = None
    for keeper, token in reversed(tokens):
        try:
            keeper.restore(token)
        except BaseException as error:  # noqa: BLE001 - raised below, when all had their turn
            failure = failure or error
    if failure is not None:
        raise failure


def set_aside(entries: Stack) -> None:
    """Open guards of a body that is suspended: while others run on the thread, libraries do not go back to what these
    have pushed.  What is current does not change."""
    for guard, found in reversed(entries):
        for keeper, token in reversed(guard.found() if found is None else found):
            keeper.set_aside(token)


def take_up(entries: Stack) -> None:
    """Undoes `set_aside`, on the same thread, inside what guards the body's next step."""
    for guard, found in entries:
        for keeper, token in guard.found() if found is None else found:
            keeper.take_up(token)


def leave(stack: Stack, guard: object, error: object) -> None:
    """Takes a guard's innermost entry off its thread's stack and brings back what it found, wherever it lies.

    With an exception on its way (`error`) raises nothing of its own but what `tell` says.  Raises `LifetimeError` for a
    guard that is not there.
    """
    at = len(stack) - 1
    while at >= 0 and stack[at][0] is not guard:
        at -= 1
    if at < 0:
        tell(f"{guard!r} is left on a thread that did not enter it, or after a guard around it", error)
        return
    try:
        if at + 1 < len(stack):
            _leave_inner(stack, at + 1, guard, error)
    finally:
        _leave_innermost(stack)


def _leave_inner(stack: Stack, depth: int, guard: object, error: object) -> None:
    """Leaves all guards above that depth, the innermost first, because `guard` around them is left.

    One that fails does not keep the others from it.  Logs them, unless an exception is on its way, which may have ended
    their users.
    """
    if error is None:
        _log.warning(
            "%r is left while %s, entered inside it, is open, and takes that with it; %s",
            guard,
            " and ".join([repr(inner) for inner, _ in stack[depth:]]),
            REMEDY,
        )
    failure: BaseException | None = None
    while len(stack) > depth:
        try:
            _leave_innermost(stack)
        except BaseException as failed:  # noqa: BLE001 - raised below, when all had their turn
            failure = failure or failed
    if failure is not None:
        raise failure


def _leave_innermost(stack: Stack) -> None:
    guard, found = stack.pop()
    if found is None:
        guard.unwind()
    else:
        bring_back(found)


def tell(text: str, error: object) -> None:
    """Raises a `LifetimeError` with the remedy; where an exception is on its way, logs it and leaves it a note."""
    text = f"{text}; nothing was brought back: {REMEDY}"
    if error is None:
        raise LifetimeError(text)
    _log.warning("%s", text)
    if isinstance(error, BaseException):
        error.add_note(text)
