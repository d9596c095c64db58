"""What every backend must do: one suite, which the host backend and the CUDA backend pass alike.

Order is shown with latches: work behind a closed door has not run, so whoever waits for it has not run either.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
from device_bytes import WATCHDOG, empty, fill, get, opened, peek, pinned, put

from streamrt import hooks
from streamrt.device import Device, device_info, open_device
from streamrt.errors import CaptureError, DeviceError, PlacementError
from streamrt.event import Event, event_pool
from streamrt.kernels import copy_many, latch
from streamrt.segment import Segment, Word
from streamrt.stream import Stream
from streamrt.testing import Latch
from streamrt.timeline import Point, Timeline

BOTH = [pytest.param("host:0", id="host"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]
PAIRS = [
    pytest.param(("host:0", "host:1"), id="host"),
    pytest.param(("cuda:0", "cuda:1"), id="cuda", marks=pytest.mark.gpu2),
]


@pytest.fixture(params=BOTH)
def device(request: pytest.FixtureRequest) -> Device:
    return opened(request.param)


@pytest.fixture(params=PAIRS)
def two(request: pytest.FixtureRequest) -> tuple[Device, Device]:
    first, second = request.param
    return opened(first), opened(second)


# order


def test_a_stream_runs_its_work_in_order(device: Device) -> None:
    stream = Stream(device)
    block = empty(stream, 1 << 16)
    copies = [empty(stream, 1 << 16) for _ in range(20)]
    with Latch(stream):
        for value, copy in enumerate(copies):
            fill(stream, block, value)
            stream.copy(copy.address, block.address, copy.nbytes)
        assert not stream.query()
    assert [get(stream, copy)[-1] for copy in copies] == list(range(20))


def test_nothing_behind_a_closed_latch_runs(device: Device) -> None:
    stream, other = Stream(device), Stream(device)
    block = put(stream, bytes(1000))
    door = Latch(stream)
    fill(stream, block, 7)
    mark = stream.record()
    assert not stream.query()
    assert not mark.query()
    assert get(other, block) == bytes(1000)
    door.open()
    mark.synchronize(WATCHDOG)
    assert get(other, block) == b"\x07" * 1000
    assert door.opened


def test_streams_are_not_ordered_by_themselves(device: Device) -> None:
    held, free = Stream(device), Stream(device)
    with Latch(held):
        fill(free, put(free, bytes(64)), 1)
        free.synchronize(WATCHDOG)
        assert not held.query()


def test_an_event_orders_two_streams(device: Device) -> None:
    first, second = Stream(device), Stream(device)
    block, seen = put(first, bytes(4096)), put(first, bytes(4096))
    with Latch(first):
        fill(first, block, 9)
        second.wait(first.record())
        second.copy(seen.address, block.address, 4096)
        assert not second.query()
    assert get(second, seen) == b"\x09" * 4096


def test_without_the_wait_the_second_stream_does_not_wait(device: Device) -> None:
    """Calibrates the test above: it shows the wait, and no order that is there anyway."""
    first, second = Stream(device), Stream(device)
    block, seen = put(first, bytes(4096)), put(first, bytes(4096))
    with Latch(first):
        fill(first, block, 9)
        first.record()
        second.copy(seen.address, block.address, 4096)
        assert get(second, seen) == bytes(4096)


def test_an_event_orders_two_devices(two: tuple[Device, Device]) -> None:
    first, second = Stream(two[0]), Stream(two[1])
    block, seen = put(first, bytes(4096)), put(second, bytes(4096))
    with Latch(first):
        fill(first, block, 5)
        second.wait(first)
        second.copy(seen.address, block.address, 4096)
        assert not second.query()
    assert get(second, seen) == b"\x05" * 4096


def test_a_chain_over_many_streams(device: Device) -> None:
    streams = [Stream(device) for _ in range(64)]
    blocks = [put(stream, bytes(256)) for stream in streams]
    with Latch(streams[0]):
        fill(streams[0], blocks[0], 3)
        for k in range(1, 64):
            streams[k].wait(streams[k - 1], edge="chain")
            streams[k].copy(blocks[k].address, blocks[k - 1].address, 256)
        assert not any(stream.query() for stream in streams)
    assert get(streams[-1], blocks[-1]) == b"\x03" * 256


def test_many_streams_join_in_one(device: Device) -> None:
    streams, last = [Stream(device) for _ in range(16)], Stream(device)
    doors = [Latch(stream) for stream in streams]
    for stream in streams:
        last.wait(stream)
    mark = last.record()
    for door in doors[:-1]:
        door.open()
    for stream in streams[:-1]:
        stream.synchronize(WATCHDOG)
    assert not mark.query()
    doors[-1].open()
    mark.synchronize(WATCHDOG)


def test_a_latch_of_kernels_is_the_same(device: Device) -> None:
    stream = Stream(device)
    door = latch(stream)
    assert not stream.query()
    door.open()
    door.open()
    stream.synchronize(WATCHDOG)


# events


def test_a_wait_binds_the_record_that_is_newest_when_it_is_called(device: Device) -> None:
    done, held, waiter, late = (Stream(device) for _ in range(4))
    event = done.record()
    waiter.wait(event)
    with Latch(held):
        held.record(event)
        late.wait(event)
        waiter.synchronize(WATCHDOG)
        assert not late.query()
    late.synchronize(WATCHDOG)


def test_a_later_record_elsewhere_does_not_release_an_earlier_wait(device: Device) -> None:
    held, other, waiter = Stream(device), Stream(device), Stream(device)
    event = Event(device)
    with Latch(held):
        held.record(event)
        waiter.wait(event)
        other.record(event)
        event.synchronize(WATCHDOG)
        other.synchronize(WATCHDOG)
        assert event.query()
        assert not waiter.query()
    waiter.synchronize(WATCHDOG)


def test_a_wait_for_an_event_that_was_never_recorded_orders_nothing(device: Device) -> None:
    stream, event = Stream(device), Event(device)
    assert event.query()
    event.synchronize(0)
    stream.wait(event)
    device.backend.wait_event(device.index, stream.handle, device.backend.create_event(device.index))
    stream.synchronize(WATCHDOG)


def test_an_event_handle_comes_back_to_its_pool(device: Device) -> None:
    pool = event_pool(device)
    stream = Stream(device)
    for _ in range(4):
        stream.record()
    gc.collect()
    before = pool.statistics()
    for _ in range(50):
        assert pool.lease().version == 0
        stream.record()
    assert pool.statistics() == before


def test_a_dropped_event_leaves_its_wait_in_place(device: Device) -> None:
    held, waiter, other = Stream(device), Stream(device), Stream(device)
    with Latch(held):
        event = held.record()
        waiter.wait(event)
        del event
        gc.collect()
        for _ in range(200):  # uses the handle again, most likely
            other.record()
        assert not waiter.query()
    waiter.synchronize(WATCHDOG)


def test_an_event_is_recorded_on_its_own_device_only(two: tuple[Device, Device]) -> None:
    with pytest.raises(PlacementError, match="belongs to"):
        Stream(two[1]).record(Event(two[0]))


# query and synchronize


def test_synchronize_ends_at_its_timeout(device: Device) -> None:
    stream = Stream(device)
    with Latch(stream):
        mark = stream.record()
        with pytest.raises(TimeoutError):
            stream.synchronize(0.01)
        with pytest.raises(TimeoutError):
            mark.synchronize(0.01)
    mark.synchronize(WATCHDOG)
    stream.synchronize(0)
    assert stream.query()


def test_synchronize_can_be_interrupted(device: Device) -> None:
    stream = Stream(device)
    door = Latch(stream)
    inside = threading.Event()

    def interrupt() -> None:
        inside.wait(WATCHDOG)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    remove = hooks.listen(lambda record: inside.set())
    try:
        with pytest.raises(KeyboardInterrupt):
            stream.synchronize(WATCHDOG)
        assert not door.opened
        assert not stream.query()
    finally:
        remove()
        door.open()
        helper.join()
    stream.synchronize(WATCHDOG)


def test_several_threads_enqueue_on_one_stream(device: Device) -> None:
    stream = Stream(device)
    blocks = [put(stream, bytes(64)) for _ in range(8)]

    def work(number: int) -> None:
        for value in range(50):
            fill(stream, blocks[number], value)
        stream.synchronize(WATCHDOG)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {get(stream, block) for block in blocks} == {bytes([49]) * 64}


# failures


def name_of(stream: Stream) -> str:
    """As messages of the host backend name a stream."""
    return f"stream {stream.device}#{stream.handle}"


def test_a_failure_is_sticky_and_raised_by_query_and_synchronize_on_the_host() -> None:
    """Host only: on a GPU a failure ends the whole process's device (the next test)."""
    device = open_device("host:3")
    stream, waiter = Stream(device), Stream(device)

    def broken() -> None:
        raise ZeroDivisionError("no such kernel")

    ran: list[int] = []
    stream.launch(broken)
    mark = stream.record()
    waiter.wait(mark)
    with pytest.raises(DeviceError):  # what would be dropped is refused
        waiter.launch(ran.append, 1)
    for _ in range(2):
        for ask in (stream.query, stream.synchronize, mark.query, mark.synchronize, waiter.query, waiter.synchronize):
            with pytest.raises(DeviceError, match="ZeroDivisionError: no such kernel") as caught:
                ask()
            assert caught.value.name == "ZeroDivisionError"
            cause, said = caught.value.__cause__, str(caught.value)
            assert isinstance(cause, ZeroDivisionError)
            assert cause.__traceback__ is not None
            assert f"the function 'broken', launched on the virtual device host:3 ({name_of(stream)}), raised" in said
            assert "mend that, and make a new stream" in said
            assert "GPU" not in said
    with pytest.raises(DeviceError):
        stream.launch(ran.append, 2)
    late = stream.record()
    with pytest.raises(DeviceError):
        late.synchronize(WATCHDOG)
    assert ran == []
    Stream(device).synchronize(WATCHDOG)


@pytest.mark.gpu
def test_a_failure_is_sticky_on_a_gpu() -> None:
    """CuPy's `Event.done` takes every error for "not yet"; ours raises it.  In a process of its own, which it ends."""
    program = """
        import cupy
        from streamrt.device import open_device
        from streamrt.errors import DeviceError
        from streamrt.stream import Stream
        device = open_device("cuda:0")
        stream = Stream(device)
        bad = cupy.RawKernel('extern "C" __global__ void bad(long long* p) { *(volatile long long*)8 = 1; }', "bad")
        stream.launch(bad, (1,), (1,), (cupy.int64(0),))
        mark = stream.record()
        for ask in (stream.synchronize, stream.query, mark.query, mark.synchronize):
            try:
                ask()
            except DeviceError as error:
                print(error.code, error.name)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=90, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert all(line.split()[0] in ("700", "716", "717") for line in lines), lines


# words


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("start", ["zero", "half", "full"])
def test_points_order_streams_also_where_the_word_wraps(device: Device, bits: int, start: str) -> None:
    info = device_info(device)
    if bits == 64 and not info.wait64:
        pytest.skip("the device's streams cannot wait on 64-bit words")
    first = {"zero": 0, "half": 2 ** (bits - 1) - 100, "full": 2**bits - 100}[start]
    producer, consumer = Stream(device), Stream(device)
    with Segment.create(4096) as segment:
        device.backend.map_segment(device.index, segment)
        timeline = Timeline(Word(segment, 64, bits), first)
        slots, out = put(producer, bytes(200)), put(producer, bytes(200))
        sources = pinned(device, bytes(range(200)))
        with Latch(producer):
            for k in range(200):
                producer.copy(slots.address + k, sources.address + k, 1)
                point = timeline.signal(producer)
                consumer.wait(point, edge="point")
                consumer.copy(out.address + k, slots.address + k, 1)
            assert not consumer.query()
            assert not point.reached()
        assert get(consumer, out) == bytes(range(200))
        assert point.reached()
        device.backend.unmap_segment(segment)


def test_a_host_store_releases_a_waiting_stream(device: Device) -> None:
    stream = Stream(device)
    with Segment.create(4096) as segment:
        device.backend.map_segment(device.index, segment)
        word = Word(segment, 0)
        stream.wait(Point(word, 5))
        mark = stream.record()
        word.store(4)
        assert not mark.query()
        word.store(6)
        mark.synchronize(WATCHDOG)
        device.backend.unmap_segment(segment)


def test_a_point_that_was_reached_holds_nobody_up(device: Device) -> None:
    stream = Stream(device)
    with Segment.create(4096) as segment:
        device.backend.map_segment(device.index, segment)
        device.backend.map_segment(device.index, segment)
        timeline = Timeline(Word(segment, 128))
        stream.wait(timeline.last)
        point = timeline.signal(stream)
        stream.wait(point)
        stream.synchronize(WATCHDOG)
        assert point.spin(0)
        device.backend.unmap_segment(segment)


def test_points_order_streams_of_two_devices(two: tuple[Device, Device]) -> None:
    producer, consumer = Stream(two[0]), Stream(two[1])
    with Segment.create(4096) as segment:
        for each in two:
            each.backend.map_segment(each.index, segment)
        timeline = Timeline(Word(segment, 0), 2**32 - 2)
        block, seen = put(producer, bytes(512)), put(consumer, bytes(512))
        for value in range(1, 6):
            with Latch(producer):
                fill(producer, block, value)
                consumer.wait(timeline.signal(producer))
                consumer.copy(seen.address, block.address, 512)
                assert not consumer.query()
            assert get(consumer, seen) == bytes([value]) * 512
        two[0].backend.unmap_segment(segment)


# memory


def test_copies_between_every_kind_of_memory(device: Device) -> None:
    stream = Stream(device)
    data = os.urandom(100_003)
    source, landing = pinned(device, data), pinned(device, bytes(len(data)))
    first, second = empty(stream, len(data)), empty(stream, len(data))
    stream.copy(first.address, source.address, len(data))
    stream.copy(second.address, first.address, len(data))
    stream.copy(landing.address, second.address, len(data))
    stream.copy(0, 0, 0)
    stream.synchronize(WATCHDOG)
    assert peek(landing) == data


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 254, 4097, 8192, (28 << 10) - 2, 28 << 10, 65536])
def test_pinned_memory_is_uploaded_in_stream_order_whatever_its_size(device: Device, nbytes: int) -> None:
    stream, data = Stream(device), os.urandom(nbytes + 2)
    source, target = pinned(device, data), put(stream, bytes(nbytes + 2))
    before = peek(source)
    with Latch(stream):
        stream.upload(target.address, source.address, nbytes)
        assert not stream.query() or not nbytes
    assert get(stream, target) == data[:nbytes] + bytes(2)
    assert peek(source) == before


def test_copies_between_devices(two: tuple[Device, Device]) -> None:
    here, there = Stream(two[0]), Stream(two[1])
    data = os.urandom(1 << 20)
    block, other = put(here, data), empty(there, 1 << 20)
    there.synchronize(WATCHDOG)
    here.copy(other.address, block.address, 1 << 20)  # pushed by the owner
    here.synchronize(WATCHDOG)
    assert get(there, other) == data
    fill(there, other, 0)
    there.copy(other.address, block.address, 1 << 20)  # pulled by the reader
    assert get(there, other) == data


def test_memory_becomes_zero_in_stream_order(device: Device) -> None:
    stream = Stream(device)
    data = os.urandom(1000)
    source, target = put(stream, data), put(stream, bytes(1000))
    with Latch(stream):
        stream.zero(source.address + 100, 800)
        stream.copy(target.address, source.address, 1000)
        stream.zero(target.address, 0)
    assert get(stream, target) == data[:100] + bytes(800) + data[900:]


def test_copy_many_is_one_call_for_many_pieces(device: Device) -> None:
    stream = Stream(device)
    data = os.urandom(5000)
    source, target = put(stream, data), put(stream, bytes(5000))
    cuts = [0, 1, 3, 3, 64, 100, 1000, 4999, 5000]
    copy_many(stream, [(target.address + a, source.address + a, b - a) for a, b in itertools.pairwise(cuts)])
    assert get(stream, target) == data
    copy_many(stream, [])
    with pytest.raises(ValueError, match="fewer than 0"):
        copy_many(stream, [(target.address, source.address, -1)])


def test_memory_is_aligned_and_known_by_its_address(device: Device) -> None:
    stream = Stream(device)
    alignment = 64 if device.kind == "host" else 256
    blocks = [empty(stream, nbytes) for nbytes in (0, 1, 63, 64, 1000, 1 << 20)]
    for block in blocks:
        assert block.address % alignment == 0
        assert device.backend.device_of(block.address) == device.index
        assert device.backend.device_of(block.address + max(block.nbytes, 1) - 1) == device.index
    assert len({block.address for block in blocks}) == len(blocks)


def test_other_memory_is_on_no_device(device: Device) -> None:
    assert device.backend.device_of(device.backend.allocate_pinned(64).address) is None
    plain = bytearray(64)
    assert device.backend.device_of(id(plain)) is None


def test_memory_of_two_devices_is_told_apart(two: tuple[Device, Device]) -> None:
    blocks = [empty(Stream(each), 4096) for each in two]
    assert [two[0].backend.device_of(block.address) for block in blocks] == [two[0].index, two[1].index]


def test_a_dropped_block_is_given_out_again_on_its_stream(device: Device) -> None:
    stream = Stream(device)
    block = empty(stream, 3 << 20)
    address = block.address
    del block
    gc.collect()
    assert empty(stream, 3 << 20).address == address


def test_an_exported_allocation_is_found_by_any_address_in_it(device: Device) -> None:
    backend, index = device.backend, device.index
    memory, other = backend.export_memory(index, 1 << 21), backend.export_memory(index, 1 << 21)
    assert backend.device_of(memory.address + 100) == index
    found = backend.allocation(index, memory.address)
    assert found is not None
    assert found.address <= memory.address
    assert found.address + found.nbytes >= memory.address + (1 << 21)
    assert backend.allocation(index, memory.address + (1 << 20) + 3) == found
    beside = backend.allocation(index, other.address)
    assert beside is not None
    assert beside.identity != found.identity
    assert len(backend.export_allocation(index, found)) == len(memory.handle)
    ordinary = backend.allocate_pinned(100)
    assert backend.allocation(index, ordinary.address) is None


# work


def test_launch_runs_with_its_stream_and_device_current(two: tuple[Device, Device]) -> None:
    device = two[1]
    backend = device.backend
    before = [backend.current_stream(each.index) for each in two]
    stream = Stream(device)
    seen: list[int] = []
    stream.launch(lambda: seen.append(backend.current_stream(device.index)))
    stream.synchronize(WATCHDOG)
    assert seen == [stream.handle]
    assert [backend.current_stream(each.index) for each in two] == before


def test_launches_are_ordered_with_copies(device: Device) -> None:
    stream = Stream(device)
    block, first, second = (put(stream, bytes(1 << 12)) for _ in range(3))
    with Latch(stream):
        fill(stream, block, 1)
        stream.copy(first.address, block.address, 1 << 12)
        fill(stream, block, 2)
        stream.copy(second.address, block.address, 1 << 12)
    assert (get(stream, first)[0], get(stream, second)[0]) == (1, 2)


def test_activate_restores_the_device_also_after_an_error(two: tuple[Device, Device]) -> None:
    backend = two[0].backend
    index = two[1].index
    with pytest.raises(ZeroDivisionError), backend.activate(index):
        assert _current_device(two[1]) == index
        with backend.activate(two[0].index):
            assert _current_device(two[0]) == two[0].index
        assert _current_device(two[1]) == index
        raise ZeroDivisionError
    assert _current_device(two[0]) == 0


def _current_device(device: Device) -> int:
    if device.kind == "host":
        return int(device.backend.current_device)  # type: ignore[attr-defined]
    from cupy.cuda import runtime

    return int(runtime.getDevice())


# current streams


def test_the_current_stream_is_per_thread_and_per_device(two: tuple[Device, Device]) -> None:
    backend = two[0].backend
    default = backend.current_stream(two[0].index)
    first, second = Stream(two[0]), Stream(two[1])
    owner = backend.current_owner(two[0].index), backend.current_owner(two[1].index)
    backend.set_current_stream(two[0].index, first.handle, first)
    try:
        assert backend.current_stream(two[0].index) == first.handle
        assert backend.current_stream(two[1].index) != first.handle
        backend.set_current_stream(two[1].index, second.handle, second)
        assert backend.current_stream(two[0].index) == first.handle
        elsewhere: list[int] = []
        thread = threading.Thread(target=lambda: elsewhere.append(backend.current_stream(two[0].index)))
        thread.start()
        thread.join()
        assert elsewhere == [default]
    finally:
        for each, kept in zip(two, owner, strict=True):
            backend.set_current_stream(each.index, default, kept)
    assert backend.current_stream(two[0].index) == default


def test_b06_a_stream_that_is_current_somewhere_lives(device: Device) -> None:
    """cupy/cupy#5251: both threads drop their reference to a stream that is current in both; one destroys it."""
    backend = device.backend
    stream = Stream(device)
    watch = weakref.ref(stream)
    blocks = [put(stream, bytes(64)) for _ in range(2)]
    keep = [stream]
    set_up, dropped = threading.Barrier(3), threading.Event()
    results: list[bytes] = []

    def work(number: int) -> None:
        before = backend.current_stream(device.index), backend.current_owner(device.index)
        backend.set_current_stream(device.index, keep[0].handle, keep[0])
        set_up.wait(WATCHDOG)
        dropped.wait(WATCHDOG)
        current = Stream.borrow(backend.current_stream(device.index), device)
        fill(current, blocks[number], 1 + number)
        results.append(get(current, blocks[number]))
        backend.set_current_stream(device.index, *before)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    set_up.wait(WATCHDOG)
    keep.clear()
    del stream
    gc.collect()
    assert watch() is not None
    dropped.set()
    for thread in threads:
        thread.join()
    assert sorted(results) == [b"\x01" * 64, b"\x02" * 64]
    gc.collect()
    assert watch() is None


# identity and capture


def test_keys_name_queues_and_not_objects(two: tuple[Device, Device]) -> None:
    stream = Stream(two[0])
    again = Stream.borrow(stream.handle, two[0], owner=stream)
    assert again == stream
    assert hash(again) == hash(stream)
    assert Stream(two[0]) != stream
    backend = two[0].backend
    assert backend.stream_key(two[0].index, 0) != backend.stream_key(two[1].index, 0)


@pytest.mark.gpu
def test_null_legacy_and_per_thread_handles_are_normalised() -> None:
    """pytorch/pytorch#67618: 0 and 1 are one stream, 2 is another in every thread.  Numbers that only CUDA has."""
    device = open_device("cuda:0")
    key = device.backend.stream_key
    assert key(0, 0) == key(0, 1)
    assert key(0, 2) != key(0, 1)
    keys: list[object] = []
    thread = threading.Thread(target=lambda: keys.append(key(0, 2)))
    thread.start()
    thread.join()
    assert keys != [key(0, 2)]


def test_an_idle_stream_is_not_capturing(device: Device) -> None:
    assert not Stream(device).capturing
    assert not Stream.borrow(0, device).capturing


@pytest.mark.gpu
def test_queries_elsewhere_do_not_break_a_capture() -> None:
    """pytorch/pytorch#114320.  Only CUDA has graphs: a query in a thread beside it, in global capture mode."""
    from cupy.cuda import runtime

    device = open_device("cuda:0")
    stream, other = Stream(device), Stream(device)
    block = put(stream, bytes(64))
    mark = other.record()
    runtime.streamBeginCapture(stream.handle, runtime.streamCaptureModeGlobal)
    assert stream.capturing
    failures: list[BaseException] = []

    def agent() -> None:
        try:
            device.backend.agent_thread(device.index)
            assert mark.query()
            assert other.query()
            assert Stream(device).record().query() in (True, False)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=agent)
    thread.start()
    thread.join()
    assert mark.query()
    fill(stream, block, 4)
    graph = runtime.streamEndCapture(stream.handle)
    assert failures == []
    assert not stream.capturing
    executable = runtime.graphInstantiate(graph)
    runtime.graphLaunch(executable, stream.handle)
    assert get(stream, block) == b"\x04" * 64


@pytest.mark.gpu
def test_a_latch_is_refused_in_a_capture() -> None:
    """Only CUDA has graphs: a latch would be replayed with the graph, closed for ever."""
    from cupy.cuda import runtime

    stream = Stream("cuda:0")
    runtime.streamBeginCapture(stream.handle, runtime.streamCaptureModeRelaxed)
    try:
        with pytest.raises(CaptureError):
            Latch(stream)
    finally:
        runtime.graphDestroy(runtime.streamEndCapture(stream.handle))
    stream.synchronize(WATCHDOG)
