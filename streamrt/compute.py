"""The guard of engines: work leaves the default stream, with one fence in and one out.

Engines (TensorRT's, a library's graph, a kernel that somebody compiled) do badly on the default stream, and those that
take a stream of their own synchronise around each call.  `compute_stream` looks at what is current:

1. On the default stream, a side stream of the thread waits for it and for what each input waits on, and becomes current
   in all loaded libraries; at the end the default stream waits for the side stream, and everything is as it was.
2. On any other stream the work stays there: only the inputs are joined.
3. Inputs of several streams, libraries and devices are all joined; where only the caller knows what an array waits on,
   ``(array, stream)`` says it.

So a guard inside a guard finds itself on the side stream and does nothing, and a program with many breaks between its
engines is fenced once.  (pytorch/TensorRT#3977, #4232)

The side stream belongs to its thread, and nobody else is lent it.  That is what makes it safe to drop, anywhere on that
thread, an array that was allocated inside: its memory goes back to the side stream, which waits for the default stream
before it runs anything again.  What other streams or threads do with such an array wants `streamrt.use`.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

from streamrt import forks, hooks
from streamrt.device import CPU, Device, backend_of, default_device_kind, open_device
from streamrt.errors import ArrayError, CaptureError, LifetimeError, PlacementError
from streamrt.event import Event
from streamrt.guard import ENTER_EDGE, EXIT_EDGE, as_stream, bring_back, find_current, keepers
from streamrt.libraries import Library, StreamKeeper, library_of
from streamrt.libraries.nesting import find_arrays
from streamrt.points import JOINED, note_uses
from streamrt.pool import lasting_stream
from streamrt.steps import guarded
from streamrt.stream import Stream
from streamrt.timeline import Point

F = TypeVar("F", bound=Callable[..., Any])

JOIN_EDGE = "guard.join"


class _Side:
    """A thread's side stream of a device, and the event of its fences."""

    __slots__ = ("event", "stream")

    def __init__(self, stream: Stream, event: Event) -> None:
        self.stream = stream
        self.event = event

    def __del__(self) -> None:  # the thread has ended: the next one takes it
        _left.append((self.stream, self.event))


class _Thread(threading.local):
    """A thread's side streams, and the innermost guard that is open on it and has changed what is current."""

    def __init__(self) -> None:
        self.sides: dict[Device, _Side] = {}
        self.innermost: _Entry | None = None


_left: deque[tuple[Stream, Event]] = deque()
_thread = _Thread()
forks.renew(sys.modules[__name__], _thread=_Thread, _left=deque)


def _side(device: Device) -> _Side:
    side = _thread.sides.get(device)
    if side is None:
        for _ in range(len(_left)):
            try:
                kept = _left.popleft()
            except IndexError:  # another thread took it
                break
            if kept[0].device is device:
                break
            _left.append(kept)
        else:
            kept = lasting_stream(device)
        side = _thread.sides[device] = _Side(*kept)
    return side


class _Plan:
    """What there is to ask and to change on a device while the loaded libraries are the same.

    `movable`: the keepers whose current stream can be set; `fenced`: those whose streams can only be fenced (numba).
    """

    __slots__ = ("device", "fenced", "movable", "there")

    def __init__(self, device: Device, there: tuple[StreamKeeper, ...]) -> None:
        self.device = device
        self.there = there
        self.movable = tuple(one for one in there if one.current_handle(device) is not None)
        self.fenced = tuple(one for one in there if one not in self.movable and one.current_stream(device) is not None)


_plans: dict[Device, _Plan] = {}


def _plan(device: Device) -> _Plan:
    there = keepers(device)
    plan = _plans.get(device)
    if plan is None or plan.there is not there:
        plan = _plans[device] = _Plan(open_device(device), there)
    return plan


class _Entry:
    """What one guard found on a device and has to bring back: the streams of the callers, and what was current."""

    __slots__ = ("callers", "event", "plan", "side", "stream", "tokens")

    def __init__(self, plan: _Plan, stream: Stream, callers: list[Stream], side: _Side | None) -> None:
        self.plan = plan
        self.stream = stream
        self.callers = callers
        self.side = side
        self.event: Event | None = None if side is None else side.event
        self.tokens: list[tuple[StreamKeeper, Any]] = []

    @property
    def moves(self) -> bool:
        """Whether what is current changes for anybody."""
        return self.side is not None or len(self.callers) > 1

    def switch(self) -> None:
        """Makes the stream current in all keepers."""
        device = self.plan.device
        self.tokens = find_current(device, self.plan.movable)
        for keeper in self.plan.there:
            token = keeper.set_current_stream(device, self.stream)
            if token is not None:
                self.tokens.append((keeper, token))

    def fence(self) -> None:
        """Lets numba's launches, which go to the default stream, come behind what is on the stream."""
        for keeper in self.plan.fenced:
            token = keeper.set_current_stream(self.plan.device, self.stream)
            if token is not None:
                self.tokens.append((keeper, token))

    def mark(self) -> Event:
        """Enqueues on the stream a record of what is there now."""
        self.event = self.stream.record(self.event)
        return self.event

    def covers(self, arrays: tuple[Any, ...]) -> bool:
        """Whether all arrays are ordered by what is current, and that is still what this guard made current."""
        device = self.plan.device
        for array in arrays:
            library = _plain.get(type(array))
            if library is None or library not in self.plan.movable or library.device_index(array) != device.index:
                return False
        handle = self.stream.handle
        for keeper in self.plan.movable:
            if keeper.current_handle(device) != handle:
                return False
        return not self.plan.fenced


_plain: dict[type, Library] = {}
"""The classes of arrays that are ready where their library works now, on the device that they tell quickly."""


class compute_stream:
    """Inside the ``with``, work on a side stream where the current one is the default stream, else where it is.

    `arrays` are the inputs, in any nesting; ``(array, mark)`` adds what only the caller knows of one: a stream (ours or
    an object with ``__cuda_stream__``), an event or a point.  `device` says where the work is to run if that is not the
    first array's device; with no array at all it is the current device.  Yields the `Stream` that is current there,
    None where all inputs are in ordinary memory, which has no streams.

    Enqueues, on the default stream of each device concerned, a record, and on the side stream a wait for it (edge
    "guard.enter") and for what the inputs wait on ("guard.join"); at the end the same the other way ("guard.exit"),
    also after an exception.  With inputs on several devices each has its guard, and their streams wait for each other.
    Does not block the host.  Afterwards current devices and streams are exactly as they were, also if the body changed
    them.

    A function that is a coroutine or a generator is guarded by `on_side_stream`, step by step.  Raises, with nothing
    changed, `ArrayError` for what is no array, `CaptureError` where the current stream captures a graph and an input
    waits on work outside of it, `LifetimeError` if it is entered twice or left by another thread.
    """

    __slots__ = ("_arrays", "_device", "_entries", "_outer", "_owner")

    _entries: list[_Entry] | None

    def __init__(self, *arrays: Any, device: Device | str | None = None) -> None:
        self._arrays = arrays
        self._device = device
        self._entries = None

    def __enter__(self) -> Stream | None:
        if self._entries is not None:
            raise LifetimeError("this compute_stream is entered already; make one for each with")
        inner = _thread.innermost
        if inner is not None and self._device is None and self._arrays and inner.covers(self._arrays):
            self._entries = _NOTHING
            return inner.stream
        inputs = (self._device is None and _plain_inputs(self._arrays)) or _inputs(self._arrays, self._device)
        entries: list[_Entry] = []
        try:
            for device in reversed(inputs.libraries):  # the first one last: its device is the current one
                entries.append(_enter(device, inputs))
            if len(entries) > 1:
                _join_each_other(entries)
        except BaseException:
            for entry in reversed(entries):
                bring_back(entry.tokens)
            raise
        self._entries = entries
        if not entries:
            return None
        self._owner = threading.get_ident()
        self._outer = inner
        _thread.innermost = entries[-1]
        return entries[-1].stream

    def __exit__(self, *exc: object) -> None:
        entries = self._entries
        if not entries:
            self._entries = None
            return
        if self._owner != threading.get_ident():
            raise LifetimeError(
                "a compute_stream is left on a thread that did not enter it; decorate coroutines and generators with "
                "@on_side_stream"
            )
        self._entries = None
        _thread.innermost = self._outer
        try:
            bring_back([token for entry in entries for token in entry.tokens])
        finally:
            if len(entries) > 1 or entries[0].moves:
                _leave(entries)

    def __repr__(self) -> str:
        state = "" if self._entries is None else ", entered"
        return f"<compute_stream of {len(self._arrays)} inputs{state}>"

    # a function's steps: see `streamrt.steps`

    def suspend(self) -> list[tuple[StreamKeeper, Any]]:
        """What the body has current beyond the guard: nothing if that is what the guard made current.

        Does not touch the device.
        """
        found = []
        for entry in self._entries or ():
            device, handle = entry.plan.device, entry.stream.handle
            if any(one.current_handle(device) != handle for one in entry.plan.movable):
                found += find_current(device, entry.plan.movable)
        return found

    def resume(self, suspended: list[tuple[StreamKeeper, Any]]) -> None:
        """Makes that current again.  Does not touch the device."""
        bring_back(suspended)

    def gives(self, value: object) -> None:
        """Notes that the callers' streams use the memory of a function's result, so that it may be dropped at any time
        and on any thread.  Does not touch the device."""
        for entry in self._entries or ():
            if entry.side is not None:
                for caller in entry.callers:
                    note_uses(value, caller, owner=entry.stream)


_NOTHING: list[_Entry] = []
_NULL = {0}


class _Inputs(NamedTuple):
    """What a guard's inputs say.

    `libraries`: by device, the library of the first array there, the first array's device first; `joins`: the arrays
    that no current stream stands for; `marks`: what the caller named beside an array.
    """

    libraries: dict[Device, Library | None]
    joins: Sequence[tuple[Library, Any, Device]]
    marks: Sequence[Stream | Event | Point]


def _plain_inputs(arrays: tuple[Any, ...]) -> _Inputs | None:
    """What most inputs are, quickly: arrays on one GPU, each ready where its library works."""
    first: Library | None = None
    index = -1
    for array in arrays:
        library = _plain.get(type(array))
        if library is None:
            return None
        at = library.device_index(array)
        if first is None:
            first, index = library, at
        elif at != index:
            return None
    return None if index < 0 else _Inputs({Device("cuda", index): first}, (), ())


def _inputs(arrays: tuple[Any, ...], device: Device | str | None) -> _Inputs:
    """Looks into everything.  Raises `ArrayError`, `PlacementError` for what is none."""
    found = _Inputs({}, [], [])
    joins: Any = found.joins
    marks: Any = found.marks
    if device is not None:
        where = open_device(device)
        if not where.has_streams:
            raise PlacementError("cpu has no streams to work on; use 'host:0' or 'cuda:0'")
        found.libraries[where] = None
    elif not arrays:
        kind = default_device_kind()
        found.libraries[open_device(Device(kind, backend_of(kind).current_device))] = None
    for item in arrays:
        mark = None
        if type(item) is tuple and len(item) == 2 and _is_mark(item[1]):
            item, mark = item
        first = None
        for array in _arrays_of(item):
            library: Any = library_of(array)
            here = library.device_of(array)
            first = first or here
            if here.has_streams and found.libraries.get(here) is None:
                found.libraries[here] = library
            if library.name in JOINED:
                joins.append((library, array, here))
            elif here.kind == "cuda":
                _plain[type(array)] = library
        if mark is not None:
            marks.append(_mark(mark, first or CPU))
    return found


def _arrays_of(item: Any) -> Sequence[Any]:
    if library_of(item) is not None:
        return (item,)
    if isinstance(item, (Device, str)) or _is_mark(item):
        raise ArrayError(
            f"{item!r} is no array; write (array, stream) for what an array waits on, device= for where to work, and "
            "using(stream) to make a stream current"
        )
    return find_arrays(item)


def _is_mark(value: object) -> bool:
    return isinstance(value, (Stream, Event, Point)) or hasattr(value, "__cuda_stream__")


def _mark(value: Any, device: Device) -> Stream | Event | Point:
    if isinstance(value, (Stream, Event, Point)):
        return value
    index = getattr(getattr(value, "device", None), "index", getattr(value, "device_id", None))
    if (not isinstance(index, int) or index < 0) and device.has_streams:  # it does not say: the array's, then
        return Stream.borrow(value, device)
    return as_stream(value)


def _enter(device: Device, inputs: _Inputs) -> _Entry:
    """One device: chooses the stream, joins, and makes it current."""
    plan = _plan(device)
    callers = _callers(plan)
    decides = callers[0] if len(callers) == 1 else _deciding(callers, plan, inputs.libraries[device])
    side = _side(device) if _is_default(decides) else None
    entry = _Entry(plan, decides if side is None else side.stream, callers, side)
    stream = entry.stream
    if inputs.marks or inputs.joins or len(callers) > 1 or _thread.innermost is not None:
        _check_capture(stream, callers, inputs, device)
    for caller in callers:
        if caller.key != stream.key:
            stream.wait(caller.record(entry.event), edge=ENTER_EDGE)
    if JOIN_EDGE not in hooks.dropped:
        for mark in inputs.marks:
            stream.wait(mark, edge=JOIN_EDGE)
        for library, array, where in inputs.joins:
            if where is device:
                library.join(array, stream)
    try:
        if entry.moves:
            entry.switch()
        elif plan.fenced:
            entry.fence()
    except BaseException:
        bring_back(entry.tokens)
        raise
    return entry


def _callers(plan: _Plan) -> list[Stream]:
    """The distinct current streams of the keepers that can be moved."""
    device = plan.device
    handles = {keeper.current_handle(device) for keeper in plan.movable}
    if handles == _NULL:
        return [Stream.borrow(0, device)]
    found: dict[Any, Stream] = {}
    for keeper in plan.movable:
        stream = keeper.current_stream(device)
        if stream is not None:
            found.setdefault(stream.key, stream)
    return list(found.values()) or [Stream.borrow(device.backend.current_stream(device.index), device)]


def _deciding(callers: list[Stream], plan: _Plan, library: Library | None) -> Stream:
    """The current stream that says whether to stay: that of the first array's library; where that has none, one that is
    not the default stream, if any is."""
    if library is not None and library in plan.movable:
        return library.current_stream(plan.device) or callers[0]
    return next((caller for caller in callers if not _is_default(caller)), callers[0])


def _is_default(stream: Stream) -> bool:
    """Null, legacy and per-thread on a GPU; the stream that a thread begins with on the host backend."""
    return stream.handle == 0 or (stream.handle <= 2 and stream.device.kind == "cuda")


def _check_capture(stream: Stream, callers: list[Stream], inputs: _Inputs, device: Device) -> None:
    """A wait for what is outside of a capture would break it."""
    if not stream.capturing:
        return
    outside: list[object] = [
        mark for mark in (*callers, *inputs.marks) if isinstance(mark, Stream) and not mark.capturing
    ]
    outside += [array for _, array, where in inputs.joins if where is device]
    if outside:
        raise CaptureError(
            f"{stream!r} captures a graph, and an input waits on work outside of it (a {type(outside[0]).__name__}); "
            "wait for that work before the capture begins"
        )


def _join_each_other(entries: list[_Entry]) -> None:
    marks = [(entry.stream.key, entry.mark()) for entry in entries]
    for entry in entries:
        for key, mark in marks:
            if key != entry.stream.key:
                entry.stream.wait(mark, edge=ENTER_EDGE)


def _leave(entries: list[_Entry]) -> None:
    """Every caller's stream waits for every stream that the body worked on."""
    for entry in entries:
        event = entry.mark()
        for other in entries:
            for caller in other.callers:
                if caller.key != entry.stream.key:
                    caller.wait(event, edge=EXIT_EDGE)


@overload
def on_side_stream(function: F, /, *, device: Device | str | None = None) -> F: ...
@overload
def on_side_stream(*, device: Device | str | None = None) -> Callable[[F], F]: ...


def on_side_stream(function: Any = None, /, *, device: Device | str | None = None) -> Any:
    """Runs each call of an engine, or of any function, under `compute_stream` of the arrays among its arguments.

    What it returns is ordered on the streams that were current at the call, and its memory is safe there: the arrays
    may be dropped at any time and on any thread, although they were allocated on the side stream.  Coroutine
    functions, generator functions and async generator functions are guarded step by step, each step with a fence of its
    own, and what they yield is a result.  ``@on_side_stream(device=...)`` says where the work is to run.

    Enqueues as `compute_stream` does.  Does not block the host.
    """
    if function is None:
        return lambda decorated: on_side_stream(decorated, device=device)
    return guarded(function, lambda args, kwargs: compute_stream(*find_arrays((args, kwargs)), device=device))
