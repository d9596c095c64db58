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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

from streamrt import hooks
from streamrt.device import CPU, Device, backend_of, default_device_kind, open_device
from streamrt.errors import ArrayError, CaptureError, LifetimeError, PlacementError
from streamrt.event import Event
from streamrt.guard import as_stream, bring_back, find_current
from streamrt.libraries import Library, StreamKeeper, library_of
from streamrt.libraries.nesting import find_arrays
from streamrt.points import JOINED, note_uses
from streamrt.sides import Entry, Plan, leave, plan_of, plan_of_plain, switch, thread
from streamrt.steps import guarded
from streamrt.stream import Stream
from streamrt.timeline import Point

F = TypeVar("F", bound=Callable[..., Any])

JOIN_EDGE = "guard.join"


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

    __slots__ = ("_arrays", "_device", "_entries", "_mine", "_outer")

    _entries: list[Entry] | None

    def __init__(self, *arrays: Any, device: Device | str | None = None) -> None:
        self._arrays = arrays
        self._device = device
        self._entries = None

    def __enter__(self) -> Stream | None:
        mine = thread.mine
        inner = mine.innermost
        arrays, entries = self._arrays, self._entries
        plain = entries is None and self._device is None and arrays
        if plain and inner is not None and inner.plan.covers(arrays, inner.stream.handle):
            self._entries = _NOTHING
            return inner.stream
        if entries is not None:
            raise LifetimeError("this compute_stream is entered already; make one for each with")
        plan = plan_of_plain(arrays) if plain and inner is None else None
        if plan is not None and plan.on_null_stream():
            side = mine.side(plan.device)
            entry = Entry(plan, side.stream, side.callers, side)
            entry.fence_in()
            entry.exchange()
            entries = [entry]
        else:
            entries = _open(_inputs(arrays, self._device))
        self._entries = entries
        if not entries:
            return None
        self._mine = mine
        self._outer = inner
        mine.innermost = entry = entries[-1]
        return entry.stream

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        entries = self._entries
        if not entries:
            self._entries = None
            return
        mine = self._mine
        if thread.mine is not mine:
            raise LifetimeError(
                "a compute_stream is left on a thread that did not enter it; decorate coroutines and generators with "
                "@on_side_stream"
            )
        self._entries = None
        mine.innermost = self._outer
        leave(entries)

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
            plan, handle = entry.plan, entry.stream.handle
            if any(reader() != handle for reader in plan.readers):
                found += find_current(plan.device, plan.movable)
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


_NOTHING: list[Entry] = []


class _Inputs(NamedTuple):
    """What a guard's inputs say.

    `libraries`: by device, the library of the first array there, the first array's device first; `joins`: the arrays
    that no current stream stands for; `marks`: what the caller named beside an array.
    """

    libraries: dict[Device, Library | None]
    joins: list[tuple[Library, Any, Device]]
    marks: list[Stream | Event | Point]


def _inputs(arrays: tuple[Any, ...], device: Device | str | None) -> _Inputs:
    """Looks into everything.  Raises `ArrayError`, `PlacementError` for what is none."""
    found = _Inputs({}, [], [])
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
                found.joins.append((library, array, here))
            elif here.kind == "cuda":
                plan_of(here).learn(array, library)
        if mark is not None:
            found.marks.append(_mark(mark, first or CPU))
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


def _open(inputs: _Inputs) -> list[Entry]:
    """Chooses each device's stream, joins, and makes them current; the first device last, for it becomes current."""
    entries = [_entry(device, library) for device, library in reversed(inputs.libraries.items())]
    for entry in entries:
        _check_capture(entry, inputs)
    for entry in entries:
        entry.fence_in()
        _join(entry, inputs)
    for entry in entries:
        for other in entries:
            if other is not entry:
                entry.wait_for(other)
    switch(entries)
    return entries


def _entry(device: Device, library: Library | None) -> Entry:
    plan = plan_of(device)
    callers = _callers(plan)
    decides = callers[0] if len(callers) == 1 else _deciding(callers, plan, library)
    if not _is_default(decides):
        return Entry(plan, decides, callers, None)
    side = thread.mine.side(device)
    return Entry(plan, side.stream, callers, side)


def _join(entry: Entry, inputs: _Inputs) -> None:
    """The stream waits for what no caller's stream stands for."""
    if JOIN_EDGE in hooks.dropped:
        return
    for mark in inputs.marks:
        entry.stream.wait(mark, edge=JOIN_EDGE)
    for library, array, device in inputs.joins:
        if device is entry.plan.device:
            library.join(array, entry.stream)


def _callers(plan: Plan) -> list[Stream]:
    """The distinct current streams of the keepers that can be moved."""
    device = plan.device
    found: dict[Any, Stream] = {}
    for keeper in plan.movable:
        stream = keeper.current_stream(device)
        if stream is not None:
            found.setdefault(stream.key, stream)
    return list(found.values()) or [Stream.borrow(device.backend.current_stream(device.index), device)]


def _deciding(callers: list[Stream], plan: Plan, library: Library | None) -> Stream:
    """The current stream that says whether to stay: that of the first array's library; where that has none, one that is
    not the default stream, if any is."""
    if library is not None and library in plan.movable:
        return library.current_stream(plan.device) or callers[0]
    return next((caller for caller in callers if not _is_default(caller)), callers[0])


def _is_default(stream: Stream) -> bool:
    """Null, legacy and per-thread on a GPU; the stream that a thread begins with on the host backend."""
    return stream.handle == 0 or (stream.handle <= 2 and stream.device.kind == "cuda")


def _check_capture(entry: Entry, inputs: _Inputs) -> None:
    """A wait for what is outside of a capture would break it."""
    stream = entry.stream
    if not stream.capturing:
        return
    streams = [mark for mark in (*entry.callers, *inputs.marks) if isinstance(mark, Stream)]
    outside: list[object] = [mark for mark in streams if not mark.capturing]
    outside += [array for _, array, device in inputs.joins if device is entry.plan.device]
    if outside:
        raise CaptureError(
            f"{stream!r} captures a graph, and an input waits on work outside of it (a {type(outside[0]).__name__}); "
            "wait for that work before the capture begins"
        )


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
