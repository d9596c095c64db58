"""The CUDA backend behind the `Backend` Protocol: raw calls of the CUDA runtime on integer handles.

Rules:

- The null stream is only ever used for somebody who has it current; nothing of our own goes there.
- Host waits poll the status, so that Ctrl-C and a sticky error get through; they never call a blocking driver function.
- Queries run in relaxed capture mode: a query during somebody's graph capture would otherwise break the capture.
- Handles dropped by finalisers go to a queue; they are destroyed at the next creation, streams only once they are idle.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cupy
from cupy.cuda import get_current_stream, runtime

from streamrt import captures, hooks
from streamrt.captures import Captures, Recorder
from streamrt.cuda import ipc, kernels, memops
from streamrt.cuda.current import (
    DEFAULT_HANDLES,
    CUDARuntimeError,
    activated,
    check_status,
    cupy_stream,
    exchange_capture_mode,
    fail,
    is_current,
    made_current,
)
from streamrt.cuda.graph import CaptureMemory, CupyRecorder
from streamrt.device import Allocation, Block, DeviceInfo, ExportedMemory, LatchHandle, StreamKey
from streamrt.errors import CaptureError, DeviceError, ExhaustedError
from streamrt.segment import Segment, Word

_NON_BLOCKING = 1
_ROOM = 100
_DISABLE_TIMING = 2
_MEMCPY_HOST_TO_DEVICE = 1
_MEMCPY_DEFAULT = 4
_ENGINE_BYTES = 28 << 10
"""From here on a copy of pinned memory to the device goes by a copy engine.  Less is sent by the channel of what
computes, and of two processes on one GPU only one has that at a time: each turn takes 135 us (seen on an H200 with CUDA
13, where the bound lies between 24 and 28 KiB).  As two rows it goes by the copy engine, whatever its size."""
_CAPTURED_EVENT = (907, 1)
"""What a query says of an event whose newest record is part of a capture that somebody else began:
cudaErrorCapturedEvent while that goes on, cudaErrorInvalidValue (of CUDA 13's driver) once it has ended."""
_DEVICE_MEMORY = (2, 3)  # device and managed, as pointer attributes call them
_SPIN_SECONDS = 200e-6  # a sleep takes longer than it was asked for, by some 60 us
_LONGEST_SLEEP = 1e-3


class _Thread(threading.local):
    """Whether the calling thread is one of the runtime's own, which cannot disturb a capture, or inside `quiet`; and
    where its memory comes from while it captures."""

    agent = False
    quiet = False
    memory: CaptureMemory | None = None


class _Uncaptured:
    """Relaxed capture mode for the calling thread inside a ``with``; nothing on the runtime's own threads."""

    __slots__ = ("_before", "_thread")

    def __init__(self, thread: _Thread) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        thread = self._thread
        self._before = None if thread.agent or thread.quiet else exchange_capture_mode("RELAXED")

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            memops.driver().cuThreadExchangeStreamCaptureMode(self._before)


class _Quiet(_Uncaptured):
    """The same around many queries, each of which then leaves the mode alone."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        if self._before is not None:
            self._thread.quiet = True

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            self._thread.quiet = False
        super().__exit__(*exc)


class CudaBackend:
    """The GPUs that this process sees, ``cuda:0`` ..., through CuPy."""

    kind = "cuda"

    def __init__(self) -> None:
        """Made by `streamrt.cuda.create_backend`.  Does not block the host."""
        self._count = int(runtime.getDeviceCount())
        self._infos: dict[int, DeviceInfo] = {}
        self._uuids: dict[int, str] = {}
        self._streams: dict[int, int] = {}
        self._private: dict[int, int] = {}
        self._dead_streams: deque[int] = deque()
        self._dead_events: deque[int] = deque()
        self._dead_graphs: deque[Any] = deque()
        self._destroying = threading.Lock()  # held while handles are destroyed, or asked for that may be
        self._bases: dict[tuple[int, int], int] = {}
        self._pool = cupy.get_default_memory_pool()
        self._thread = _Thread()
        self.captures = Captures()
        self._open_lock = threading.Lock()
        self._default = int(cupy.cuda.Stream.ptds.ptr) if _ptds_enabled() else 1

    def device_count(self) -> int:
        return self._count

    def open(self, index: int) -> DeviceInfo:
        with self._open_lock:
            if index not in self._infos:
                try:
                    self._infos[index] = self._open(index)
                except CUDARuntimeError as error:
                    fail(error, f"opening cuda:{index}")
            return self._infos[index]

    def _open(self, index: int) -> DeviceInfo:
        with activated(index):
            _make_room_for_streams()
            stream = self._private[index] = int(runtime.streamCreateWithFlags(_NON_BLOCKING))
            kernels.load(index, stream)
            self.synchronize_stream(index, stream, None)
            properties = runtime.getDeviceProperties(index)
        kernels.enable_peers([*self._infos, index])
        can = memops.support(index)
        try:
            passed = memops.self_test(index)
        except DeviceError:
            passed = False
        name = properties["name"]
        return DeviceInfo(
            name=name.decode() if isinstance(name, bytes) else str(name),
            uuid=self.uuid(index),
            total_bytes=int(properties["totalGlobalMem"]),
            wait32=can.wait32,
            wait64=can.wait64,
            self_test=passed,
        )

    def uuid(self, index: int) -> str:
        found = self._uuids.get(index)
        if found is None:
            try:
                uuid = runtime.getDeviceProperties(index).get("uuid", b"")
                found = uuid.hex() if isinstance(uuid, bytes) and uuid else str(runtime.deviceGetPCIBusId(index))
            except CUDARuntimeError as error:
                fail(error, f"asking for the UUID of cuda:{index}")
            self._uuids[index] = found
        return found

    def activate(self, index: int) -> AbstractContextManager[None]:
        return activated(index)

    # streams

    def device_reader(self) -> Callable[[], int]:
        reader: Callable[[], int] = runtime.getDevice
        return reader

    @property
    def current_device(self) -> int:
        return int(runtime.getDevice())

    def create_stream(self, index: int, priority: int) -> int:
        self._destroy_dead()
        try:
            with activated(index), _Uncaptured(self._thread):
                handle = int(runtime.streamCreateWithPriority(_NON_BLOCKING, priority))
        except CUDARuntimeError as error:
            fail(error, f"creating a stream on cuda:{index}")
        self._streams[handle] = index
        return handle

    def destroy_stream(self, index: int, stream: int) -> None:
        self._dead_streams.append(stream)

    def _destroy_dead(self) -> None:
        """Destroys what finalisers gave up: events at once, streams when idle, for a handle can come back at once.

        Not while another thread does so, or looks at the streams: a destroyed handle that is asked for crashes.
        """
        if not self._destroying.acquire(blocking=False):
            return
        try:
            with _Quiet(self._thread):
                for _ in range(len(self._dead_graphs)):
                    graph = self._dead_graphs.popleft()
                    if sys.getrefcount(graph) > 2:  # a garbage cycle that is kept for a moment yet, see `Graph.__del__`
                        self._dead_graphs.append(graph)
                    del graph
                while self._dead_events:
                    runtime.eventDestroy(self._dead_events.popleft())
                for _ in range(len(self._dead_streams)):
                    stream = self._dead_streams.popleft()
                    index = self._streams.get(stream, 0)
                    if not self.capturing(index, stream) and self._done(index, stream):
                        self._streams.pop(stream, None)
                        runtime.streamDestroy(stream)
                    else:
                        self._dead_streams.append(stream)
        except CUDARuntimeError as error:
            fail(error, "destroying a handle")
        finally:
            self._destroying.release()

    def streams(self, index: int) -> list[int]:
        dead = set(self._dead_streams)
        return [handle for handle, owner in list(self._streams.items()) if owner == index and handle not in dead]

    def stream_key(self, index: int, stream: int) -> StreamKey:
        handle = self._default if stream == 0 else stream
        return ("cuda", index, handle, threading.get_ident()) if handle == 2 else ("cuda", index, handle)

    def current_stream(self, index: int) -> int:
        return int(get_current_stream(index).ptr)

    def set_current_stream(self, index: int, stream: int, owner: object) -> None:
        with activated(index):
            cupy_stream(index, stream, owner).use()

    def current_owner(self, index: int) -> object:
        return get_current_stream(index)

    def agent_thread(self, index: int) -> None:
        runtime.setDevice(index)  # else the first call of the thread makes a context on device 0
        if not self._thread.agent:
            exchange_capture_mode("THREAD_LOCAL")
            self._thread.agent = True

    def quiet(self) -> AbstractContextManager[None]:
        return _Quiet(self._thread)

    def query_stream(self, index: int, stream: int) -> bool:
        self._refuse(index, stream, captures.QUERY)
        return self._done(index, stream)

    def _refuse(self, index: int, stream: int, doing: str) -> None:
        """Asks the driver, for others capture too, and what no graph can hold would end their capture.  There is no
        cheaper way: a query of a capturing stream does not say so before it has ended the capture."""
        if self.capturing(index, stream):
            raise CaptureError(f"stream {stream:#x} of cuda:{index} captures a graph, and {doing}")

    def _done(self, index: int, stream: int) -> bool:
        """Whether a stream that does not capture has nothing to do."""
        with _Uncaptured(self._thread):
            if stream in DEFAULT_HANDLES and not is_current(index):
                with activated(index):
                    status = runtime.streamQuery(stream)
            else:
                status = runtime.streamQuery(stream)
        return status == 0 or check_status(status, "work on stream {:#x} of cuda:{}", stream, index)

    def synchronize_stream(self, index: int, stream: int, timeout: float | None) -> bool:
        def done() -> bool:
            self._refuse(index, stream, captures.SYNCHRONIZE)  # each time: a capture may begin meanwhile
            return self._done(index, stream)

        return _poll(done, timeout)

    # graphs

    def capturing(self, index: int, stream: int) -> bool:
        if stream in (0, 1):
            return False  # the legacy stream cannot; asking while another stream captures would break that capture
        try:
            if stream == 2 and not is_current(index):  # which stream that is depends on the current device
                with activated(index):
                    return bool(runtime.streamIsCapturing(stream))
            return bool(runtime.streamIsCapturing(stream))
        except CUDARuntimeError as error:
            fail(error, f"asking stream {stream:#x} of cuda:{index} whether it captures")
        except RuntimeError:
            return True  # so CuPy says that the capture is invalid, and it has not been ended yet

    def recorder(self, index: int, stream: int) -> Recorder:
        if self._dead_graphs:
            self._destroy_dead()
        return CupyRecorder(
            index, stream, lambda: self.capturing(index, stream), lambda: _Uncaptured(self._thread), self._dead_graphs
        )

    @contextmanager
    def keeping(self, index: int, kept: list[object]) -> Iterator[None]:
        memory = CaptureMemory(kept, lambda: _Uncaptured(self._thread))
        thread = self._thread
        before = (thread.memory, thread.agent)
        thread.memory, thread.agent = memory, False  # a thread that captures can disturb its own capture
        try:
            with cupy.cuda.using_allocator(memory.malloc):
                yield
        finally:
            memory.end()
            thread.memory, thread.agent = before

    def _key_captured(self, index: int, stream: int) -> StreamKey:
        """The stream's key; one that somebody else's events brought into the calling thread's capture is noted."""
        key = self.stream_key(index, stream)
        if self.captures.active and self.captures.of(key) is None and self.capturing(index, stream):
            capture = self.captures.of_thread()
            if capture is not None:
                self.captures.join(key, capture)
        return key

    # events

    def create_event(self, index: int) -> int:
        if self._dead_events or self._dead_streams or self._dead_graphs:
            self._destroy_dead()
        try:
            with activated(index), _Uncaptured(self._thread):
                return int(runtime.eventCreateWithFlags(_DISABLE_TIMING))
        except CUDARuntimeError as error:
            fail(error, f"creating an event on cuda:{index}")

    def destroy_event(self, index: int, event: int) -> None:
        self.captures.forget_event(event)
        self._dead_events.append(event)

    def record_event(self, index: int, event: int, stream: int) -> None:
        if self.captures.active or self.captures.events:
            self.captures.recorded(event, self._key_captured(index, stream))
        try:
            if stream in DEFAULT_HANDLES and not is_current(index):
                with activated(index):
                    runtime.eventRecord(event, stream)
            else:
                runtime.eventRecord(event, stream)
        except CUDARuntimeError as error:
            fail(error, f"recording an event on stream {stream:#x} of cuda:{index}")

    def wait_event(self, index: int, stream: int, event: int) -> None:
        if self.captures.active or self.captures.events:
            self.captures.waiting(self._key_captured(index, stream), event)
        try:
            if stream in DEFAULT_HANDLES and not is_current(index):
                with activated(index):
                    runtime.streamWaitEvent(stream, event)
            else:
                runtime.streamWaitEvent(stream, event)
        except CUDARuntimeError as error:
            fail(error, f"making stream {stream:#x} of cuda:{index} wait for an event")

    def order(self, index: int, event: int, first: int, then: int) -> None:
        known = self.captures
        if known.active or known.events or ((first < 3 or then < 3) and runtime.getDevice() != index):
            self.record_event(index, event, first)
            self.wait_event(index, then, event)
            return
        try:
            runtime.eventRecord(event, first)
            runtime.streamWaitEvent(then, event)
        except CUDARuntimeError as error:
            fail(error, f"ordering stream {then:#x} of cuda:{index} behind stream {first:#x}")

    def query_event(self, index: int, event: int) -> bool:
        if self.captures.events:
            self.captures.refuse_event(event)
        thread = self._thread
        if thread.agent or thread.quiet:
            status = runtime.eventQuery(event)
        else:
            with _Uncaptured(thread):
                status = runtime.eventQuery(event)
        if status in _CAPTURED_EVENT:
            raise CaptureError(captures.EVENT)
        return status == 0 or check_status(status, "work before an event of cuda:{}", index)

    def synchronize_event(self, index: int, event: int, timeout: float | None) -> bool:
        return _poll(lambda: self.query_event(index, event), timeout)

    def require(self, index: int, event: int) -> None:
        if self.captures.events:
            self.captures.refuse_event(event)

    # words

    def map_segment(self, index: int, segment: Segment) -> None:
        self._bases[index, id(segment)] = memops.register(segment, index)

    def unmap_segment(self, segment: Segment) -> None:
        for key in [key for key in list(self._bases) if key[1] == id(segment)]:
            del self._bases[key]
        memops.unregister(segment)

    def _word_address(self, index: int, word: Word) -> int:
        base = self._bases.get((index, id(word.segment)))
        if base is None:
            self.map_segment(index, word.segment)
            base = self._bases[index, id(word.segment)]
        return base + word.offset

    def write_word(self, index: int, stream: int, word: Word, value: int) -> None:
        if self.captures.active:
            self.captures.refuse(self._key_captured(index, stream), captures.WORD)
        address = self._word_address(index, word)
        with activated(index):
            memops.write_word(stream, address, value & ((1 << word.bits) - 1), word.bits)

    def wait_word(self, index: int, stream: int, word: Word, value: int) -> None:
        if self.captures.active:
            self.captures.refuse(self._key_captured(index, stream), captures.WORD)
        address = self._word_address(index, word)
        with activated(index):
            memops.wait_word(stream, address, value & ((1 << word.bits) - 1), word.bits)

    # memory

    def allocate(self, index: int, nbytes: int, stream: int) -> Block:
        memory = self._thread.memory
        malloc = self._pool.malloc if memory is None else memory.malloc
        try:
            if runtime.getDevice() == index and get_current_stream(index).ptr == stream:
                pointer = malloc(max(nbytes, 1))
            else:
                with made_current(index, stream):
                    pointer = malloc(max(nbytes, 1))
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise ExhaustedError(f"cuda:{index} has no {nbytes} bytes left: {error}; release arrays") from error
        except CUDARuntimeError as error:
            fail(error, f"allocating {nbytes} bytes on cuda:{index}")
        if hooks.listeners:
            hooks.emit(hooks.Allocated(f"cuda:{index}", pointer.ptr, nbytes, self.stream_key(index, stream)))
        return Block(int(pointer.ptr), nbytes, pointer, in_order=True)

    def allocate_pinned(self, nbytes: int) -> Block:
        try:
            if self._thread.memory is None:
                pointer = cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
            else:
                with _Uncaptured(self._thread):
                    pointer = cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
                self._thread.memory.keep(pointer)
        except CUDARuntimeError as error:
            fail(error, f"allocating {nbytes} pinned bytes")
        return Block(int(pointer.ptr), nbytes, pointer)

    def export_memory(self, index: int, nbytes: int) -> ExportedMemory:
        return ipc.export(index, nbytes, functools.partial(self._idle, index))

    def allocation(self, index: int, address: int) -> Allocation | None:
        return ipc.allocation(address)

    def export_allocation(self, index: int, allocation: Allocation) -> bytes:
        return ipc.export_allocation(index, allocation)

    def import_memory(self, index: int, handle: bytes, nbytes: int, unmapped: Callable[[], None]) -> Block:
        return ipc.import_(index, handle, nbytes, unmapped, functools.partial(self._idle, index))

    def idle(self) -> bool:
        return all(map(self._idle, list(self._infos)))

    def _idle(self, index: int) -> bool:
        """Whether no latch is closed and the streams that were made here, also those given up, have nothing to do."""
        if kernels.latches_closed():
            return False
        with self._destroying:
            streams = [stream for stream, owner in list(self._streams.items()) if owner == index]
            return all(self.capturing(index, stream) or self._done(index, stream) for stream in streams)

    def copy(self, index: int, stream: int, destination: int, source: int, nbytes: int) -> None:
        self.copy_many(index, stream, ((destination, source, nbytes),))

    def copy_many(self, index: int, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        if hooks.listeners:
            self._tell_of_pageable(copies)
        try:
            if stream in DEFAULT_HANDLES and not is_current(index):
                with activated(index):
                    for destination, source, nbytes in copies:
                        runtime.memcpyAsync(destination, source, nbytes, _MEMCPY_DEFAULT, stream)
            else:
                for destination, source, nbytes in copies:
                    runtime.memcpyAsync(destination, source, nbytes, _MEMCPY_DEFAULT, stream)
        except CUDARuntimeError as error:
            fail(error, f"copying on stream {stream:#x} of cuda:{index}")

    def upload(self, index: int, stream: int, destination: int, source: int, nbytes: int) -> None:
        if nbytes >= _ENGINE_BYTES or nbytes % 2:
            self.copy(index, stream, destination, source, nbytes)
            return
        row = nbytes // 2  # as two rows
        try:
            if stream in DEFAULT_HANDLES and not is_current(index):
                with activated(index):
                    runtime.memcpy2DAsync(destination, row, source, row, row, 2, _MEMCPY_HOST_TO_DEVICE, stream)
            else:
                runtime.memcpy2DAsync(destination, row, source, row, row, 2, _MEMCPY_HOST_TO_DEVICE, stream)
        except CUDARuntimeError as error:
            fail(error, f"copying on stream {stream:#x} of cuda:{index}")

    def zero(self, index: int, stream: int, address: int, nbytes: int) -> None:
        try:
            if stream in DEFAULT_HANDLES and not is_current(index):
                with activated(index):
                    runtime.memsetAsync(address, 0, nbytes, stream)
            else:
                runtime.memsetAsync(address, 0, nbytes, stream)
        except CUDARuntimeError as error:
            fail(error, f"clearing memory on stream {stream:#x} of cuda:{index}")

    def _tell_of_pageable(self, copies: Sequence[tuple[int, int, int]]) -> None:
        if any(self._memory_type(address)[0] == 0 for copy in copies for address in copy[:2]):
            hooks.emit(hooks.Synchronized("a copy from or to pageable memory"))

    def _memory_type(self, address: int) -> tuple[int, int]:
        """The kind of memory (0 for plain) and its device; asked with an open device current, so none is opened."""
        try:
            opened = next(iter(self._infos), None)
            if opened is None:
                attributes = runtime.pointerGetAttributes(address)
            else:
                with activated(opened):
                    attributes = runtime.pointerGetAttributes(address)
        except CUDARuntimeError as error:
            fail(error, f"asking whose memory {address:#x} is")
        return int(attributes.type), int(attributes.device)

    def device_of(self, address: int) -> int | None:
        kind, device = self._memory_type(address)
        return device if kind in _DEVICE_MEMORY else None

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
        if hooks.listeners:
            name = getattr(function, "__name__", type(function).__name__)
            hooks.emit(hooks.Launched(self.stream_key(index, stream), name, _extents(reads), _extents(writes)))
        try:
            with made_current(index, stream):
                function(*args)
        except CUDARuntimeError as error:
            fail(error, f"launching on stream {stream:#x} of cuda:{index}")

    def latch(self, index: int, stream: int) -> LatchHandle:
        self._refuse(index, stream, captures.LATCH)
        return kernels.CudaLatch(index, stream)


def _ptds_enabled() -> bool:
    from cupy_backends.cuda.stream import get_default_stream_ptr

    return int(get_default_stream_ptr()) == 2


def _make_room_for_streams() -> None:
    """Makes and destroys `_ROOM` streams of the current device, so that the driver has room for as many.

    Where it has none left, making another blocks the host until the device is idle (seen on an H200 with CUDA 13: the
    35th and the 120th of a process): for ever, where what runs there waits for this host.  Takes some milliseconds.
    """
    handles = [runtime.streamCreateWithFlags(_NON_BLOCKING) for _ in range(_ROOM)]
    for handle in handles:
        runtime.streamDestroy(handle)


def _poll(done: Callable[[], bool], timeout: float | None) -> bool:
    """Asks until done or the timeout: spins at first, then sleeps for a twentieth of the time waited, 1 ms at most."""
    if done():
        return True
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        if timeout is not None and waited >= timeout:
            return done()
        if waited > _SPIN_SECONDS:
            time.sleep(min(waited / 20, _LONGEST_SLEEP))
        if done():
            return True


def _extents(arrays: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((int(array.__cuda_array_interface__["data"][0]), int(array.nbytes)) for array in arrays)
