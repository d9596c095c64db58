"""Graphs through CuPy, and the memory of a capture.

A capture is of the calling thread only (thread-local mode), so that other threads may go on with what a capture of
theirs would forbid.  The stream object that is current in CuPy begins it, since that keeps what `launch_host_func` is
given.

CuPy's graph keeps no arrays, and its pool hands a freed block to whoever comes next on the stream.  So while a capture
runs, the thread's allocations go through `CaptureMemory`: blocks of the pool that was in use, which what is captured
later may use again in the order of its stream, and which nobody else gets before the graph and the arrays in them are
gone.  The pool may have to ask the driver for more, which thread-local mode forbids: relaxed mode for that moment, as
torch's allocator does it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cupy
from cupy.cuda import runtime

from streamrt.captures import Executable, not_ended
from streamrt.cuda.current import DEFAULT_HANDLES, CUDARuntimeError, activated, cupy_stream, fail

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_UNIT = 512  # what CuPy's pool rounds to


class _Lent:
    """A block that is in use inside the capture: until its end it may be used again there."""

    __slots__ = ("block", "memory", "place")

    def __init__(self, block: Any, memory: CaptureMemory, place: tuple[int, int, int]) -> None:
        self.block = block
        self.memory = memory
        self.place = place

    def __del__(self) -> None:
        free = self.memory.free
        if free is not None:
            free[self.place].append(self.block)


class CaptureMemory:
    """CuPy's allocator for one capture; `kept` keeps all that it took from the one that was in use before."""

    def __init__(self, kept: list[object], uncaptured: Callable[[], AbstractContextManager[None]]) -> None:
        """Made by `CudaBackend.keeping`.  Does not block the host."""
        self._take = cupy.cuda.get_allocator()
        self._kept = kept
        self._uncaptured = uncaptured
        self.free: defaultdict[tuple[int, int, int], deque[Any]] | None = defaultdict(deque)

    def malloc(self, size: int) -> Any:
        """Memory for the current stream of the current device.  May block the host, as any allocation."""
        size = max(int(size), 1)
        rounded = -(-size // _UNIT) * _UNIT
        device = int(runtime.getDevice())
        place = (device, int(cupy.cuda.get_current_stream().ptr), rounded)
        if self.free is not None and self.free[place]:
            block = self.free[place].popleft()
        else:
            with self._uncaptured():
                block = self._take(rounded)
            self._kept.append(block)
        memory = cupy.cuda.UnownedMemory(block.ptr, size, _Lent(block, self, place), device)
        return cupy.cuda.MemoryPointer(memory, 0)

    def end(self) -> None:
        """The capture is over: what is dropped from now on is kept by the graph alone.  Does not touch the device."""
        self.free = None
        self._kept = []

    def keep(self, memory: object) -> None:
        """Keeps what was taken elsewhere.  Does not touch the device."""
        self._kept.append(memory)


class CupyRecorder:
    """A capture by CuPy's stream object."""

    def __init__(
        self,
        index: int,
        stream: int,
        capturing: Callable[[], bool],
        uncaptured: Callable[[], AbstractContextManager[None]],
        dead: deque[Any],
    ) -> None:
        """Made by `CudaBackend.recorder`.  Does not touch the device."""
        self._index, self._capturing, self._uncaptured, self._dead = index, capturing, uncaptured, dead
        self._handle = stream
        self._stream: Any = None

    def begin(self) -> None:
        self._stream = cupy.cuda.get_current_stream(self._index)
        if self._stream.ptr != self._handle:
            self._stream = cupy_stream(self._index, self._handle)
        try:
            with activated(self._index):
                self._stream.begin_capture(runtime.streamCaptureModeThreadLocal)
        except CUDARuntimeError as error:
            fail(error, f"beginning a capture of stream {self._handle:#x} of cuda:{self._index}")

    def end(self) -> Executable:
        try:
            with activated(self._index):
                graph = self._stream.end_capture()
        except CUDARuntimeError as error:
            self.abort()
            raise not_ended(error) from error
        return CupyExecutable(self._index, graph, self._dead)

    def abort(self) -> None:
        """Ends the capture, whoever began it, if there still is one."""
        if not self._capturing():
            return
        try:
            with activated(self._index):
                graph = runtime.streamEndCapture(self._handle)
        except CUDARuntimeError:
            return  # it was invalid, and is over now
        if graph:
            with self._uncaptured():
                runtime.graphDestroy(graph)


class CupyExecutable:
    """A graph of CuPy's.  The driver's handle goes when nothing is captured on the thread that destroys it."""

    __slots__ = ("_dead", "_graph", "_index")

    def __init__(self, index: int, graph: Any, dead: deque[Any]) -> None:
        """Made by `CupyRecorder.end`.  Does not touch the device."""
        self._index, self._graph, self._dead = index, graph, dead

    empty = False  # not known: the library says so by itself, if it does

    def launch(self, stream: int) -> None:
        try:
            if stream in DEFAULT_HANDLES:
                with activated(self._index):
                    self._graph.launch(cupy_stream(self._index, stream))
            else:
                self._graph.launch(cupy_stream(self._index, stream))
        except CUDARuntimeError as error:
            fail(error, f"launching a graph on stream {stream:#x} of cuda:{self._index}")

    def __del__(self) -> None:
        graph = getattr(self, "_graph", None)
        if graph is not None:
            self._dead.append(graph)
