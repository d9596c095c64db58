"""The host backend behind the `Backend` Protocol.

Operations of the runtime (copies, signals, waits) and functions given to `launch` are queued; plain code touches host
memory at once.  `require` is what makes the two meet: it runs what a ready point needs, and nothing else.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from streamrt import captures, hooks
from streamrt.captures import Capture, Captures, Recorder
from streamrt.device import Allocation, Block, DeviceInfo, ExportedMemory, LatchHandle, StreamKey
from streamrt.errors import LifetimeError, PlacementError, StreamrtError
from streamrt.host.exported import HostExports
from streamrt.host.graph import HostRecorder
from streamrt.host.memory import HostMemory
from streamrt.host.scheduler import (
    LAUNCH,
    EventNeed,
    EventState,
    LatchNeed,
    LatchState,
    Machine,
    Operation,
    Queue,
    WordNeed,
    check,
)
from streamrt.host.schedules import Eager, Schedule
from streamrt.moves import move
from streamrt.segment import Segment, Word

DEFAULT_DEVICES = 8  # virtual devices cost nothing until they are used; STREAMRT_HOST_DEVICES sets another number

_NULL: tuple[int, object] = (0, None)  # the current stream of a thread that has set none
_Found = tuple[int, tuple[tuple[int, tuple[int, object]], ...]]

FINISH_SECONDS = 10.0  # how long `finish` waits for the pump threads before it says what is stuck


def _count_of_devices() -> int:
    wanted = os.environ.get("STREAMRT_HOST_DEVICES", "") or str(DEFAULT_DEVICES)
    if not wanted.isdecimal() or not int(wanted):
        raise PlacementError(f"STREAMRT_HOST_DEVICES={wanted!r}: set it to a number of virtual devices, 1 at least")
    return int(wanted)


class _Current(threading.local):
    """A thread's current device, and its current stream by device, each with what keeps that stream alive; `kept` is
    where it puts the memory that it takes while it captures."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, tuple[int, object]] = {}
        self.kept: list[object] | None = None


class HostBackend:
    """Virtual devices ``host:0`` ... on the process's own threads."""

    kind = "host"

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.exports = HostExports(self.memory)
        self.machine = Machine(Eager())
        self.captures = Captures()
        self._queues: dict[tuple[int, int], Queue] = {}
        self._events: dict[int, EventState] = {}
        self._numbers = itertools.count(1)
        self._current = _Current()
        self._count = _count_of_devices()

    def use_schedule(self, schedule: Schedule) -> Schedule:
        """Replaces the schedule and returns the one before; every queue must be empty.  Does not block the host."""
        if self.machine.pending_queues():
            raise LifetimeError("streams of the host backend still hold work; synchronize them before a new schedule")
        previous = self.machine.schedule
        self.machine.schedule = schedule
        self.memory.poison = not schedule.threaded
        return previous

    def finish(self) -> None:
        """Runs what is queued.  Blocks the host.  Raises `DeadlockError`, or `LifetimeError` under threads."""
        timeout = FINISH_SECONDS if self.machine.schedule.threaded else None
        while queues := self.machine.pending_queues():
            if not self.machine.wait(lambda queue=queues[0]: queue.idle, queues[0], timeout):  # type: ignore[misc]
                raise LifetimeError(
                    f"{queues[0]} still held work after {FINISH_SECONDS} s; open its latches and signals"
                )

    def abandon(self) -> None:
        """Drops everything that is queued and not running.  Does not block the host."""
        self.machine.abandon()

    def device_count(self) -> int:
        return self._count

    def open(self, index: int) -> DeviceInfo:
        self._queue(index, 0)
        return DeviceInfo(
            name="virtual device",
            uuid=self.uuid(index),
            total_bytes=0,
            wait32=True,
            wait64=True,
            self_test=True,
        )

    def uuid(self, index: int) -> str:
        return f"host-{os.getpid()}-{index}"

    @contextmanager
    def activate(self, index: int) -> Iterator[None]:
        previous, self._current.device = self._current.device, index
        try:
            yield
        finally:
            self._current.device = previous

    def device_reader(self) -> Callable[[], int]:
        """A function that tells the calling thread's current device.  Does not touch the device."""
        return lambda: self._current.device

    @property
    def current_device(self) -> int:
        """The index of the calling thread's current virtual device.  Does not touch the device."""
        return self._current.device

    def set_current_device(self, index: int) -> None:
        """Makes a virtual device current for the calling thread.  Does not touch the device."""
        self._current.device = index

    def save(self, index: int) -> _Found:
        """What the calling thread has current: its device, that one's stream and the stream of `index`.

        Does not touch the device.
        """
        now, streams = self._current.device, self._current.streams
        if now == index:
            return (now, ((now, streams.get(now, _NULL)),))
        return (now, ((index, streams.get(index, _NULL)), (now, streams.get(now, _NULL))))

    def restore(self, found: _Found) -> None:
        """Makes current what `save` found.  Does not touch the device."""
        self._current.device, streams = found
        self._current.streams.update(streams)

    # streams

    def _queue(self, index: int, stream: int) -> Queue:
        queue = self._queues.get((index, stream))
        if queue is None:
            if stream != 0:
                raise LifetimeError(
                    f"host:{index} has no stream #{stream}; it was destroyed or belongs to another device"
                )
            queue = self._queues.setdefault((index, 0), Queue(index, 0))
        return queue

    def create_stream(self, index: int, priority: int) -> int:
        number = next(self._numbers)
        self._queues[index, number] = Queue(index, number)
        return number

    def destroy_stream(self, index: int, stream: int) -> None:
        self._queues.pop((index, stream), None)  # what is queued still runs: the machine holds the queue

    def streams(self, index: int) -> list[int]:
        return [number for owner, number in list(self._queues) if owner == index]

    def stream_key(self, index: int, stream: int) -> StreamKey:
        return ("host", index, stream)

    def current(self, index: int) -> tuple[int, object]:
        """The calling thread's current stream, and what keeps it alive.  Does not touch the device."""
        return self._current.streams.get(index, _NULL)

    def current_stream(self, index: int) -> int:
        return self._current.streams.get(index, _NULL)[0]

    def set_current_stream(self, index: int, stream: int, owner: object) -> None:
        self._current.streams[index] = (stream, owner)

    def current_owner(self, index: int) -> object:
        return self._current.streams.get(index, _NULL)[1]

    def agent_thread(self, index: int) -> None:
        self._current.device = index

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    def query_stream(self, index: int, stream: int) -> bool:
        self._refuse(index, stream, captures.QUERY)
        queue = self._queue(index, stream)
        check(queue)
        done = queue.idle
        if not done:
            self.machine.schedule.nudge(self.machine, queue)
        return done

    def synchronize_stream(self, index: int, stream: int, timeout: float | None) -> bool:
        self._refuse(index, stream, captures.SYNCHRONIZE)
        queue = self._queue(index, stream)
        done = self.machine.wait(lambda: queue.idle, queue, timeout)
        check(queue)
        return done

    # graphs

    def capturing(self, index: int, stream: int) -> bool:
        return self._capture(index, stream) is not None

    def recorder(self, index: int, stream: int) -> Recorder:
        return HostRecorder(self.machine, self._queue, self._numbers, index, stream)

    @contextmanager
    def keeping(self, index: int, kept: list[object]) -> Iterator[None]:
        previous, self._current.kept = self._current.kept, kept
        try:
            yield
        finally:
            self._current.kept = previous

    def _kept(self, block: Block) -> Block:
        if self._current.kept is not None:
            self._current.kept.append(block.owner)
        return block

    def _capture(self, index: int, stream: int) -> Capture | None:
        return self.captures.of(self.stream_key(index, stream)) if self.captures.active else None

    def _refuse(self, index: int, stream: int, doing: str) -> None:
        if self.captures.active:
            self.captures.refuse(self.stream_key(index, stream), doing)

    def _enqueue(self, index: int, stream: int, operation: Operation) -> None:
        """Appends to the stream's queue, or to the graph that it captures."""
        queue = self._queue(index, stream)
        capture = self._capture(index, stream)
        if capture is None:
            check(queue)  # else what is enqueued would be dropped in silence, and its memory shown as it was
            self.machine.enqueue(queue, operation)
        else:
            _recorder_of(capture).add(queue, operation)

    # events

    def create_event(self, index: int) -> int:
        number = next(self._numbers)
        self._events[number] = EventState(number)
        return number

    def destroy_event(self, index: int, event: int) -> None:
        self._events.pop(event, None)
        self.captures.forget_event(event)

    def record_event(self, index: int, event: int, stream: int) -> None:
        queue, state = self._queue(index, stream), self._events[event]
        if self.captures.active or self.captures.events:
            capture = self.captures.recorded(event, self.stream_key(index, stream))
            if capture is not None:
                _recorder_of(capture).record(queue, event)
                return
        self.machine.record(queue, state)

    def wait_event(self, index: int, stream: int, event: int) -> None:
        state = self._events[event]
        if self.captures.active or self.captures.events:
            queue = self._queue(index, stream)
            capture = self.captures.waiting(self.stream_key(index, stream), event)
            if capture is not None:
                _recorder_of(capture).wait(queue, event)
                return
        if state.complete() and not state.failed:
            return
        need = EventNeed(state, state.recorded)
        self.machine.enqueue(self._queue(index, stream), Operation("wait for event", None, need, detail=need))

    def order(self, index: int, event: int, first: int, then: int) -> None:
        self.record_event(index, event, first)
        self.wait_event(index, then, event)

    def query_event(self, index: int, event: int) -> bool:
        if self.captures.events:
            self.captures.refuse_event(event)
        state = self._events[event]
        done = state.complete()
        if not done:
            self.machine.schedule.nudge(self.machine, EventNeed(state, state.recorded))
        check(state)
        return done

    def synchronize_event(self, index: int, event: int, timeout: float | None) -> bool:
        if self.captures.events:
            self.captures.refuse_event(event)
        state = self._events[event]
        need = EventNeed(state, state.recorded)
        done = state.complete() or self.machine.wait(need.met, need, timeout)
        check(state)
        return done

    def require(self, index: int, event: int) -> None:
        self.synchronize_event(index, event, None)

    # words

    def map_segment(self, index: int, segment: Segment) -> None:
        return None

    def unmap_segment(self, segment: Segment) -> None:
        return None

    def idle(self) -> bool:
        return True  # no driver waits for anything

    def write_word(self, index: int, stream: int, word: Word, value: int) -> None:
        self._refuse(index, stream, captures.WORD)

        def store() -> None:
            word.store(value)
            self.machine.changed()

        detail = f"{word.address:#x} = {value}"
        operation = Operation("signal", store, detail=detail, signals=word.address)
        self.machine.enqueue(self._queue(index, stream), operation)

    def wait_word(self, index: int, stream: int, word: Word, value: int) -> None:
        self._refuse(index, stream, captures.WORD)
        need = WordNeed(word, value)
        self.machine.enqueue(self._queue(index, stream), Operation("wait for word", None, need, detail=need))

    # memory

    def allocate(self, index: int, nbytes: int, stream: int) -> Block:
        return self._kept(self.memory.allocate(index, nbytes))

    def allocate_pinned(self, nbytes: int) -> Block:
        return self._kept(self.memory.allocate(-1, nbytes))

    def export_memory(self, index: int, nbytes: int) -> ExportedMemory:
        return self.exports.export(index, nbytes)

    def allocation(self, index: int, address: int) -> Allocation | None:
        return self.exports.allocation(address)

    def export_allocation(self, index: int, allocation: Allocation) -> bytes:
        return self.exports.export_allocation(allocation)

    def import_memory(self, index: int, handle: bytes, nbytes: int, unmapped: Callable[[], None]) -> Block:
        return self.exports.import_(index, handle, nbytes, unmapped)

    def copy(self, index: int, stream: int, destination: int, source: int, nbytes: int) -> None:
        def run() -> None:
            move(destination, source, nbytes)

        self._enqueue(index, stream, Operation("copy", run, detail=f"{nbytes} bytes"))

    def copy_many(self, index: int, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        pieces = tuple(copies)

        def run() -> None:
            for piece in pieces:
                move(*piece)

        self._enqueue(index, stream, Operation("copy", run, detail=f"{len(pieces)} pieces"))

    def upload(self, index: int, stream: int, destination: int, source: int, nbytes: int) -> None:
        self.copy(index, stream, destination, source, nbytes)

    def zero(self, index: int, stream: int, address: int, nbytes: int) -> None:
        def clear() -> None:
            ctypes.memset(address, 0, nbytes)

        self._enqueue(index, stream, Operation("zero", clear, detail=f"{nbytes} bytes"))

    def device_of(self, address: int) -> int | None:
        index = self.memory.device_of(address)
        return None if index is None or index < 0 else index

    # work

    def launch(
        self,
        index: int,
        stream: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        reads: Sequence[Any],
        writes: Sequence[Any],
    ) -> None:
        self._queue(index, stream)  # raises where there is no such stream
        name = getattr(function, "__name__", type(function).__name__)

        def run() -> None:
            previous = self._current.streams.get(index)
            self._current.streams[index] = (stream, None)
            try:
                with self.activate(index):
                    function(*args)
            finally:
                if previous is None:
                    self._current.streams.pop(index, None)
                else:
                    self._current.streams[index] = previous

        if hooks.listeners:
            hooks.emit(hooks.Launched(self.stream_key(index, stream), name, _extents(reads), _extents(writes)))
        self._enqueue(index, stream, Operation(f"{LAUNCH}{name}", run))

    def latch(self, index: int, stream: int) -> LatchHandle:
        self._refuse(index, stream, captures.LATCH)
        state = LatchState(self.machine)
        self.machine.enqueue(self._queue(index, stream), Operation("latch", None, LatchNeed(state)))
        return state


def _recorder_of(capture: Capture) -> HostRecorder:
    return cast("HostRecorder", capture.recorder)


def _extents(arrays: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    found = []
    for array in arrays:
        interface = getattr(array, "__array_interface__", None)
        if interface is None:
            raise StreamrtError(f"reads= and writes= take host arrays, not {type(array).__name__}")
        found.append((int(interface["data"][0]), int(getattr(array, "nbytes", 0))))
    return tuple(found)
