"""The guard of engines: work leaves the default stream, with one fence in and one out.

Engines (TensorRT's, a library's graph, a kernel that somebody compiled) do badly on the default stream, and those that
take a stream of their own synchronise around each call.  `compute_stream` looks at what is current:

1. On the default stream, a side stream of the thread waits for it and for what each input waits on, and becomes current
   in all loaded libraries; at the end the default stream waits for the side stream, and everything is as it was.
2. On any other stream the work stays there: only the inputs are joined.  (Libraries that are on different streams are
   moved to the one that decides, that of the first input's library, and fenced.)
3. Inputs of several streams, libraries and devices are all joined; where only the caller knows what an array waits on,
   ``(array, stream)`` says it.

So a guard inside a guard finds itself on the side stream and does nothing, and a program with many breaks between its
engines is fenced once.  (pytorch/TensorRT#3977, #4232)

The side stream belongs to its thread, and nobody else is lent it.  That is what makes it safe to drop, anywhere on that
thread, an array that was allocated on it: its memory goes back to the side stream, which waits for the default stream
before it runs anything again.  What other streams or threads do with such an array wants `streamrt.use`, or
`on_side_stream`, which does that with what the function returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from streamrt import hooks
from streamrt.device import Device
from streamrt.entries import bring_back, leave, tell
from streamrt.errors import CaptureError, LifetimeError
from streamrt.guard import ENTER_EDGE, find_current
from streamrt.guard_inputs import Inputs, arguments_of, inputs_of
from streamrt.libraries import Library, StreamKeeper
from streamrt.points import note_uses
from streamrt.sides import (
    NOWHERE,
    Entry,
    Group,
    Mine,
    Opened,
    Plan,
    make_current,
    plan_of,
    plan_of_plain,
    switch,
    thread,
)
from streamrt.steps import guarded
from streamrt.stream import Stream

F = TypeVar("F", bound=Callable[..., Any])

JOIN_EDGE = "guard.join"


class compute_stream:
    """Inside the ``with``, work on a side stream where the current one is the default stream, else where it is.

    `arrays` are the inputs, in any nesting; ``(array, mark, ...)`` adds what only the caller knows of one: streams
    (ours or objects with ``__cuda_stream__``), events or points.  `device` says where the work is to run if that is not
    the first array's device; with no array at all it is the current device.  Yields the `Stream` that is current there,
    None where all inputs are in ordinary memory, which has no streams: then nothing is done.

    Enqueues, on the default stream of each device concerned, a record, and on the side stream a wait for it (edge
    "guard.enter") and for what the inputs wait on ("guard.join"); at the end the same the other way ("guard.exit"),
    also after an exception.  With inputs on several devices each has its guard, and their streams wait for each other.
    Does not block the host.  Afterwards the current device, its stream and those of the devices concerned are exactly
    as they were, also if the body changed them.

    Coroutines and generators are guarded by `on_side_stream`, step by step.  Raises, with nothing changed, `ArrayError`
    for what is no array, `CaptureError` where a graph is captured and an input waits on work outside of it,
    `LifetimeError` if it is entered twice; and at the exit if it is left by another thread, where it changes nothing,
    or after a guard around it, where it orders the callers' streams all the same, unless an exception is on its way,
    which is given a note.
    """

    __slots__ = ("_arrays", "_device", "_mine", "_opened")

    _mine: Mine | None
    _opened: Opened | None

    def __init__(self, *arrays: Any, device: Device | str | None = None) -> None:
        self._arrays = arrays
        self._device = device
        self._opened = self._mine = None

    def __enter__(self) -> Stream | None:
        mine = thread.mine
        inner, arrays = mine.innermost, self._arrays
        if self._opened is not None:
            raise LifetimeError("this compute_stream is entered already; make one for each with")
        plan = None
        if arrays and self._device is None:
            if inner is None:
                plan = plan_of_plain(arrays)
            elif inner.plan.covers(arrays, inner.handle):
                self._opened = inner
                inner.shared += 1
                return inner.stream
        opened: Opened
        if plan is not None and not plan.fenced and plan.same(0):  # what most guards find
            side = mine.side(plan.device)
            opened = entry = Entry(plan, side.stream, side.callers, side)
            side.stream.wait_by(side.event, side.callers[0], edge=ENTER_EDGE)
            entry.exchange()
        else:
            opened = _open(inputs_of(arrays, self._device))
            if opened is NOWHERE:
                self._opened = opened
                return None
        self._opened, self._mine = opened, mine
        opened.outer = inner
        mine.innermost = opened
        mine.stack.append((self, None))
        return opened.stream

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        opened, mine = self._opened, self._mine
        if opened is None:
            raise LifetimeError("this compute_stream is left, and was not entered")
        if mine is None:  # it did nothing, but the body may have changed what is current
            if not (opened.plan.same(opened.handle) or opened.closed):
                if not thread.mine.is_inside(opened):
                    tell(f"{self!r} is left on a thread that did not enter it", error)
                    return
                make_current(opened)
            opened.shared -= 1  # which nobody asks of `NOWHERE`
            self._opened = None
            return
        if thread.mine is not mine:
            tell(f"{self!r} is left on a thread that did not enter it", error)
            return
        stack = mine.stack
        if stack and stack[-1][0] is self:
            stack.pop()
            self._opened = self._mine = None
            outer = opened.outer
            if mine.innermost is opened and (outer is None or not outer.closed):
                mine.innermost = outer
            else:  # guards of generators are left in another order
                opened.closed = True
                mine.forget_closed()
            opened.leave()
        elif any(guard is self for guard, _ in stack):
            try:
                leave(stack, self, error)
            finally:
                self._opened = self._mine = None
        else:
            self._leave_late(opened, mine, error)

    def found(self) -> list[tuple[StreamKeeper, Any]]:
        """What it found, on all its devices.  Does not touch the device."""
        opened = self._opened
        return [token for entry in opened.entries for token in entry.tokens] if opened is not None else []

    def unwind(self) -> None:
        """Leaves it, on its thread, with a guard around it; its own exit has nothing to bring back any more.

        Enqueues what the exit does.  Does not block the host.
        """
        opened, mine = self._opened, self._mine
        assert opened is not None
        assert mine is not None
        opened.closed = True
        mine.forget_closed()
        opened.leave()

    def _leave_late(self, opened: Opened, mine: Mine, error: object) -> None:
        """A guard around it was left before, and this one with it: what its callers see is ordered all the same."""
        self._opened = self._mine = None
        opened.closed = True
        mine.forget_closed()
        opened.fence()
        tell(f"{self!r} is left after a guard around it", error)

    def is_over(self) -> bool:
        """Whether it was left with a guard around it, so that its exit would have nothing to do.

        Does not touch the device.
        """
        return self._opened is not None and self._opened.closed

    def __repr__(self) -> str:
        state = "" if self._opened is None else ", entered"
        return f"<compute_stream of {len(self._arrays)} inputs{state}>"

    def is_innermost(self) -> bool:
        """Whether it is entered, on this thread, with what it made current still current and no guard open inside it.

        Does not touch the device.
        """
        opened, mine = self._opened, self._mine
        if opened is None or not opened.plan.same(opened.handle):
            return False
        return mine is None or (mine is thread.mine and mine.innermost is opened and not opened.shared)

    # a function's steps: see `streamrt.steps`

    def suspend(self) -> list[tuple[StreamKeeper, Any]]:
        """What the body has current beyond the guard: nothing if that is what the guard made current.

        Does not touch the device.
        """
        opened = self._opened
        if opened is None or opened.plan.same(opened.handle):
            return []
        return [one for entry in opened.entries for one in find_current(entry.plan.device, entry.plan.movable)]

    def resume(self, suspended: list[tuple[StreamKeeper, Any]]) -> None:
        """Makes that current again.  Does not touch the device."""
        bring_back(suspended)

    def gives(self, value: object) -> None:
        """Notes that the callers' streams use the memory of a function's result, so that it may be dropped at any time
        and on any thread.  Does not touch the device."""
        opened = self._opened
        for entry in opened.entries if opened is not None and self._mine is not None else ():
            for caller in entry.callers:
                if caller is not entry.stream:
                    note_uses(value, caller, owner=entry.stream)


def _open(inputs: Inputs) -> Opened:
    """Chooses each device's stream, joins, and makes them current; the first device last, for it becomes current."""
    entries = [_entry(device, library) for device, library in reversed(inputs.libraries.items())]
    if not entries:
        return NOWHERE
    _check_captures(entries, inputs)
    for entry in entries:
        entry.fence_in()
        _join(entry.stream, inputs)
    for entry in entries:
        for other in entries:
            if other is not entry:
                entry.wait_for(other)
    switch(entries, inputs.numba)
    return entries[0] if len(entries) == 1 else Group(tuple(entries))


def _entry(device: Device, library: Library | None) -> Entry:
    plan = plan_of(device)
    callers = plan.current_streams()
    decides = callers[0] if len(callers) == 1 else _deciding(callers, plan, library)
    if not _is_default(decides):
        if len(callers) > 1 and decides.capturing:  # what the other libraries did before can be no part of it
            callers = [caller for caller in callers if caller is decides or caller.capturing]
        return Entry(plan, decides, callers, None)
    side = thread.mine.side(device)
    if decides.handle == 2:
        side.passed_on = False
    return Entry(plan, side.stream, callers, side)


def _join(stream: Stream, inputs: Inputs) -> None:
    """The stream waits for what no caller's stream stands for, and is noted as a user of that memory."""
    if JOIN_EDGE in hooks.dropped:
        return
    for arrays, mark, library, device in inputs.joins:
        if mark is not None:
            stream.wait(mark, edge=JOIN_EDGE)
        elif library is not None and device is stream.device:
            for array in arrays:
                library.join(array, stream)
        note_uses(arrays, stream, owner=mark if isinstance(mark, Stream) else None)


def _deciding(callers: list[Stream], plan: Plan, library: Library | None) -> Stream:
    """The current stream that says whether to stay: that of the first array's library; where that has none, one that is
    not the default stream, if any is.  One of the callers."""
    if library is not None and library in plan.movable:
        current = library.current_stream(plan.device)
        return next((caller for caller in callers if caller == current), callers[0])
    return next((caller for caller in callers if not _is_default(caller)), callers[0])


def _is_default(stream: Stream) -> bool:
    """Null, legacy and per-thread on a GPU; the stream that a thread begins with on the host backend."""
    return stream.handle == 0 or (stream.handle <= 2 and stream.device.kind == "cuda")


def _check_captures(entries: list[Entry], inputs: Inputs) -> None:
    """What is captured and what is not cannot wait for each other."""
    streams = [stream for entry in entries for stream in (entry.stream, *entry.callers)]
    streams += [join.mark for join in inputs.joins if isinstance(join.mark, Stream)]
    captured = [stream.capturing for stream in streams]
    if not any(captured):
        return
    outside: list[object] = [stream for stream, inside in zip(streams, captured, strict=True) if not inside]
    outside += [join.library.name for join in inputs.joins if join.library is not None]
    if outside:
        raise CaptureError(
            f"{streams[captured.index(True)]!r} captures a graph, and what an input waits on, or another device's or "
            f"library's current stream, is outside of it ({outside[0]}); wait for that work before the capture begins, "
            "and make one stream current in all libraries with streamrt.using"
        )


@overload
def on_side_stream(function: F, /, *, device: Device | str | None = None) -> F: ...
@overload
def on_side_stream(*, device: Device | str | None = None) -> Callable[[F], F]: ...


def on_side_stream(function: Any = None, /, *, device: Device | str | None = None) -> Any:
    """Runs each call of an engine, or of any function, under `compute_stream` of the arrays among its arguments.

    Arguments are looked into as far as they are containers or dataclasses: what a method's ``self`` holds is its own
    business.  What the function returns is ordered on the streams that were current at the call, and its memory is safe
    there: the arrays, and views of them, may be dropped at any time and on any thread, although they were allocated on
    the side stream.  Coroutine functions, generator functions and async generator functions are guarded step by step,
    each step with a fence of its own, and what they yield is a result.  ``@on_side_stream(device=...)`` says where the
    work is to run.

    Enqueues as `compute_stream` does.  Does not block the host.  Raises `LifetimeError` where a plain function returns
    a coroutine, which would run outside of the guard.
    """
    if function is None:
        return lambda decorated: on_side_stream(decorated, device=device)
    return guarded(function, lambda args, kwargs: compute_stream(*arguments_of((args, kwargs)), device=device))
