"""Graphs: what a function enqueues, captured once and enqueued again as often as wanted, at the price of one launch.

    with streamrt.compute_stream(x):
        graph = streamrt.capture(function, x)
        graph.replay()  # on the current stream; graph.result holds what the function returned

Rules:

- What is enqueued on the current stream is captured, and what is on streams that wait for it (forks); these must be
  joined again before the function returns.  Plain code runs once, at the capture, and is not part of the graph.
- A replay works on the memory of the capture: the arguments, the result and all between are *static*.  What the capture
  refers to lives as long as the graph, and as long as a replay runs; the result's arrays keep their own memory.
- Replays of one graph run one after the other, in the order of the calls, on whatever streams.  One on another stream
  than the replay before waits for all that is on that stream by then, so for whoever reads the result there.
- What cannot be part of a graph raises `CaptureError` and leaves the capture be.  An exception of the function ends the
  capture, and everything is as it was.

On GPUs the capture is of the calling thread only (thread-local mode), so other threads may go on.  The host backend
records the operations of the runtime (copies, `zero`, `launch`, records and waits), with the same refusals.  JAX cannot
be captured: it has streams of its own.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from streamrt import buffers, forks
from streamrt.captures import NESTED, Capture, Executable, Recorder
from streamrt.device import Device, open_device
from streamrt.errors import ArrayError, CaptureError, DeviceError, PlacementError
from streamrt.event import Event
from streamrt.graph_inputs import Static, memory_of
from streamrt.guard import current_stream, using
from streamrt.libraries import library_of, loaded
from streamrt.libraries.nesting import find_arrays
from streamrt.points import names
from streamrt.sides import plan_of
from streamrt.stream import Stream

T = TypeVar("T")

ORDER_EDGE = "graph.order"
_JAX = (
    "JAX computes on streams of its own, which no capture holds: convert the array before with streamrt.convert(array, "
    "'cupy'), or 'numpy' on the host backend"
)
_DEFAULT_STREAMS = {"cuda": (0, 1, 2), "host": (0,)}


_replayed_on: dict[int, Stream] = {}
"""Of each graph that was replayed, by its id, the stream of the last time.  Not on the graph alone: where the collector
ends a graph and its stream at once, there would be nothing left to record on."""


class _Captured:
    """What must live as long as the graph or any replay of it.  Mostly it leads back to the graph, as where an object
    keeps the graph of a method of its own; so nothing global refers to it for longer than a replay runs."""

    __slots__ = ("executable", "kept")

    def __init__(self, executable: Executable, kept: list[object]) -> None:
        self.executable = executable
        self.kept = kept


class Graph(Generic[T]):
    """A captured function: `device`, `arguments` (the arrays among the captured arguments, in the order of
    `find_arrays`) and `result`, what the function returned.

    It may be dropped at any time, also while it runs; the arrays of `result` may be kept on their own.
    """

    __slots__ = (
        "__weakref__",
        "_captured",
        "_last",
        "_lock",
        "_on",
        "_static",
        "arguments",
        "device",
        "result",
    )

    def __init__(
        self, device: Device, arguments: tuple[Any, ...], result: T, captured: _Captured, static: Static, stream: Stream
    ) -> None:
        """Made by `capture`.  Enqueues on `stream` a record."""
        self.device = device
        self.arguments = arguments
        self.result = result
        self._static = static
        self._lock = threading.Lock()
        forks.renew(self, _lock=threading.Lock)
        self._on = stream
        self._last = _record_on(stream)  # memory that the capture took was free in the order of this stream
        self._captured = captured

    def replay(self, *arrays: Any) -> None:
        """Enqueues the graph on the current stream of its device, behind the replay before and what followed it on its
        stream.

        `arrays`, none or one for each of `arguments`, are copied into these first, in stream order; None leaves one as
        it is.  They are of the same shape and dtype and on the same device, of any library, and may be changed in
        stream order or dropped as soon as this returns.  Does not block the host.  Raises, with nothing enqueued,
        `ArrayError` or `PlacementError` for an array that does not fit, `ArrayError` where an array of the capture has
        been given other memory, `CaptureError` inside of a capture and where the stream of the replay before captures.
        """
        stream = _current(self.device)
        if stream.capturing:
            raise CaptureError(NESTED)
        self._static.check()
        inputs = self._static.inputs(arrays, self.device) if arrays else []
        kept: list[object] = [self._captured, *inputs]
        with self._lock:
            if stream.key != self._on.key:
                stream.wait(self._mark(), edge=ORDER_EDGE)
            try:
                for one in inputs:
                    kept.append(one.enqueue(stream))
                self._captured.executable.launch(stream.handle)
            except BaseException:
                with suppress(DeviceError, CaptureError):  # the first error says why
                    self._enqueued(stream, kept)
                raise
            self._enqueued(stream, kept)
        buffers.drain()

    def _mark(self) -> Event:
        """What a replay on another stream waits for: all that is on the last replay's stream now."""
        on = self._on
        if id(self) not in _replayed_on or on.device.backend.stream_key(on.device.index, on.handle) != on.key:
            return self._last  # nobody has read a result yet; or another thread's default stream, unreachable from here
        return _record_on(on)

    def _enqueued(self, stream: Stream, kept: list[object]) -> None:
        """Notes where the graph was enqueued, or a part of what comes before it, and keeps what that works with."""
        self._last = _record_on(stream)
        self._on = _replayed_on[id(self)] = stream
        buffers.hold_until(kept, self._last, stream)

    def __del__(
        self, streams: dict[int, Stream] = _replayed_on, leave: Callable[[object, Stream], None] = buffers.leave
    ) -> None:
        stream = streams.pop(id(self), None)
        if stream is not None:
            leave(self._captured, stream)  # what follows the last replay may read what it has written

    def __repr__(self) -> str:
        return f"<Graph of {self.device}, {len(self.arguments)} arguments>"


def capture(
    function: Callable[..., T], *arguments: Any, warmup: int = 1, device: Device | str | None = None
) -> Graph[T]:
    """Captures what ``function(*arguments)`` enqueues on the current stream of a device, and returns it as a `Graph`.

    The device is that of the arrays among the arguments, unless `device` names one.  The function runs `warmup` times
    before, for real, on the same stream: kernels that are not loaded yet cannot be loaded during a capture.  Then it
    runs once more, and what it enqueues is kept and not run, so the arrays of `result` hold nothing before a replay.
    With keywords, use `functools.partial`.

    The graph keeps the arguments, and the arrays in the function's closure, defaults, bound object and global names;
    arrays that the function finds otherwise are yours to keep.  What counts is the memory that they have at the
    capture: one that is given other memory afterwards (``x.data =``, ``Module.to``, ``set_``, ``resize_``) makes
    replays an error (each looks at 16 arrays in turn, and at those that it writes to), and one whose name goes to
    another (``load_state_dict(assign=True)``) is still what is used.

    Memory that is taken meanwhile, from CuPy, torch or the runtime, is the graph's; numba's allocations cannot be
    captured, and its kernels only where they are given the stream.  Collecting garbage waits meanwhile, for finalisers
    might free what a capture forbids to free.

    Enqueues on the current stream what the warm-up enqueues.  Does not block the host.  Raises `PlacementError` where
    the device is not clear; `CaptureError` on a default stream (take one by `compute_stream` or `using`), for a JAX
    array, inside of a capture, and where forked work is not joined; what the function raises.  (pytorch#114320,
    cupy#4567)
    """
    if not callable(function):
        raise TypeError(f"{function!r} is no function; capture(function, *arrays) captures what a call of it enqueues")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise CaptureError(
            f"{function!r} runs step by step, and a call of it enqueues nothing; capture a plain function"
        )
    if warmup < 0:
        raise ArrayError(f"warmup={warmup} is negative; 0 captures at once")
    referred = _referred(function)
    arrays = find_arrays(arguments)
    for array in (*arrays, *referred):
        if (owner := library_of(array)) is not None and owner.name == "jax":
            raise CaptureError(f"the function refers to a JAX array; {_JAX}")
    where = _device(device, arrays)
    stream = _current(where)
    if stream.handle in _DEFAULT_STREAMS[where.kind]:
        raise CaptureError(
            f"the default stream of {where} is current, and it cannot be captured; capture inside of "
            "`with streamrt.compute_stream(...)`, or of `using` with a stream of a pool"
        )
    if stream.capturing or where.backend.captures.of_thread() is not None:
        raise CaptureError(NESTED)
    for _ in range(warmup):
        function(*arguments)
    used = [*arrays, *referred]
    kept: list[object] = [function, arguments, used, memory_of(used)]
    executable, result = _record(stream, lambda: function(*arguments), kept)
    kept.append(memory_of(used))  # the function itself may have given them other memory
    for array in find_arrays(result):
        if (owner := library_of(array)) is not None and owner.name == "jax":
            raise CaptureError("the function returned a JAX array, which no capture holds; return one of CuPy or torch")
    if executable.empty:
        raise CaptureError(
            f"{function!r} has enqueued nothing on {stream!r}: plain code runs at once on {where} and is no part of a "
            "graph; enqueue it with streamrt.current_stream(device).launch(function, ...)"
        )
    kept.append(result)
    static = Static(tuple(arrays), referred)
    return Graph(where, tuple(arrays), result, _Captured(executable, kept), static, stream)


def _record_on(stream: Stream) -> Event:
    event = buffers.record_outside(stream)
    if event is None:
        raise CaptureError(
            f"another thread captures a graph on {stream!r}, where this one was enqueued last; replay after that "
            "capture, and give each thread a stream of its own"
        )
    return event


def _record(stream: Stream, call: Callable[[], T], kept: list[object]) -> tuple[Executable, T]:
    """Runs `call` under capture; everything is as it was afterwards, whatever happens."""
    device = stream.device
    backend = device.backend
    recorder = _recorder(stream)
    buffers.drain()
    under_way: Capture | None = None
    with _no_collection(), using(stream), backend.keeping(device.index, kept):
        try:
            try:
                with using(stream):  # what the function makes current is undone before the end
                    under_way = backend.captures.begin(stream.key, recorder)
                    recorder.begin()
                    result = call()
            except BaseException:
                recorder.abort()
                raise
            return recorder.end(), result
        finally:
            if under_way is not None:
                backend.captures.end(under_way)


def _recorder(stream: Stream) -> Recorder:
    if stream.device.kind == "cuda":
        for library in loaded():
            recorder = library.recorder(stream)
            if recorder is not None:
                return recorder
    return stream.device.backend.recorder(stream.device.index, stream.handle)


def _current(device: Device) -> Stream:
    """The one stream that is current in all libraries; numba's default stream, which cannot be moved, aside."""
    plan = plan_of(device)
    if not plan.movable:
        return current_stream(device)
    stream = plan.movable[0].current_stream(device)
    handle = None if stream is None else stream.handle
    if stream is not None and all(reader() == handle for reader in plan.readers):
        return stream
    found = plan.current_streams()  # by keys: one stream may have several handles
    if len(found) > 1:
        raise CaptureError(
            f"the libraries have different streams current on {device}: {found}; make one current in all of them with "
            "streamrt.using or compute_stream"
        )
    return found[0]


def _device(device: Device | str | None, arrays: Sequence[Any]) -> Device:
    used = {library.device_of(array) for array in arrays if (library := library_of(array)) is not None}
    used = {one for one in used if one.has_streams}
    if device is not None:
        where = open_device(device)
        if not where.has_streams:
            raise PlacementError("cpu has no streams to capture; use 'host:0' or 'cuda:0'")
        return where
    if len(used) != 1:
        on = names(used) if used else "no device with streams"
        raise PlacementError(f"the arguments are on {on}; say with device= whose current stream is captured")
    return open_device(used.pop())


def _referred(function: Callable[..., Any]) -> list[Any]:
    """The arrays that the function refers to by itself, as far as can be seen, so that it may let go of them."""
    found: list[Any] = []
    while isinstance(function, functools.partial):
        found += find_arrays((function.args, function.keywords))
        function = function.func
    if isinstance(function, types.MethodType):
        found += find_arrays(function.__self__)
        function = function.__func__
    elif not isinstance(function, types.FunctionType):
        found += find_arrays(function)  # an object that can be called
    if isinstance(function, types.FunctionType):
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        found += find_arrays((cells, function.__defaults__, function.__kwdefaults__))
        there = function.__globals__
        found += [there[name] for name in function.__code__.co_names if library_of(there.get(name)) is not None]
    return found


def _of_this_thread() -> list[int]:
    """In a forked child only the pauses of the thread that forked go on."""
    mine = [thread for thread in _pausing if thread == threading.get_ident()]
    if _pausing and not mine and _resume:
        gc.enable()
    return mine


_collecting = threading.Lock()
_pausing: list[int] = []  # the threads that capture, by their identifiers
_resume = False
forks.renew(sys.modules[__name__], _collecting=threading.Lock, _pausing=_of_this_thread)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection by itself inside, in the whole process: a finaliser may free memory or destroy a handle,
    which the driver takes for part of the capture and forbids."""
    global _resume
    with _collecting:
        if not _pausing:
            _resume = gc.isenabled()
            gc.disable()
        _pausing.append(threading.get_ident())
    try:
        yield
    finally:
        with _collecting:
            _pausing.remove(threading.get_ident())
            if not _pausing and _resume:
                gc.enable()
