"""The schedules of the host backend: replay, poison, deadlocks, threads, failures."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections import deque

import numpy as np
import pytest
from device_bytes import WATCHDOG, empty, fill, get, pinned, put
from rpc_processes import until

import streamrt
from streamrt.device import Device, open_device
from streamrt.errors import DeadlockError, DeviceError, LifetimeError
from streamrt.host import backend
from streamrt.host.memory import POISON
from streamrt.host.scheduler import Machine, Operation, Queue
from streamrt.host.schedules import Eager
from streamrt.segment import Segment, Word
from streamrt.stream import Stream
from streamrt.testing import Latch, schedules, without
from streamrt.timeline import Point, Timeline

REPLAYING = ["lazy", "random", "priority"]
ALL = ["eager", "threads", *REPLAYING]


@pytest.fixture
def device() -> Device:
    return open_device("host:0")


def program(device: Device) -> list[int]:
    """Three streams with a few edges, and what one of the legal orders did."""
    streams = [Stream(device) for _ in range(3)]
    order: list[int] = []
    for turn in range(4):
        for number, stream in enumerate(streams):
            stream.launch(order.append, 10 * turn + number)
        streams[turn % 3].wait(streams[(turn + 1) % 3])
    for stream in streams:
        stream.synchronize(WATCHDOG)
    return order


@pytest.mark.parametrize("name", ALL)
def test_every_schedule_keeps_the_order_of_streams_and_edges(device: Device, name: str) -> None:
    with schedules(name, 3):
        order = program(device)
    assert sorted(order) == sorted(10 * turn + number for turn in range(4) for number in range(3))
    for number in range(3):
        mine = [entry for entry in order if entry % 10 == number]
        assert mine == sorted(mine)
    for turn in range(3):  # after turn t, stream t waits for what stream t + 1 had then
        waiter, other = turn % 3, (turn + 1) % 3
        assert order.index(10 * (turn + 1) + waiter) > order.index(10 * turn + other)


@pytest.mark.parametrize("name", REPLAYING)
def test_the_same_seed_replays_the_same_trace(device: Device, name: str) -> None:
    runs = []
    for _ in range(2):
        with schedules(name, 11) as schedule:
            runs.append((program(device), list(schedule.trace)))
    assert runs[0] == runs[1]
    assert runs[0][1]


@pytest.mark.parametrize("name", ["random", "priority"])
def test_different_seeds_give_different_traces(device: Device, name: str) -> None:
    traces = set()
    for seed in range(8):
        with schedules(name, seed) as schedule:
            program(device)
            traces.add(tuple(schedule.trace))
    assert len(traces) > 4


def test_lazy_runs_nothing_that_nobody_needs(device: Device) -> None:
    with schedules("lazy"):
        needed, other = Stream(device), Stream(device)
        ran: list[str] = []
        needed.launch(ran.append, "needed")
        other.launch(ran.append, "other")
        needed.launch(ran.append, "needed too")
        mark = needed.record()
        needed.launch(ran.append, "after the mark")
        assert ran == []
        mark.synchronize()
        assert ran == ["needed", "needed too"]
        other.wait(needed)
        other.synchronize()
        assert ran == ["needed", "needed too", "other", "after the mark"]


def pull(producer: Stream, consumer: Stream) -> bytes:
    """What the consumer's stream sees of what the producer's has written."""
    block, seen = empty(producer, 64), empty(consumer, 64)
    fill(producer, block, 1)
    consumer.wait(producer, edge="pull")
    consumer.copy(seen.address, block.address, 64)
    return get(consumer, seen)


@pytest.mark.parametrize("name", REPLAYING)
@pytest.mark.parametrize("seed", range(5))
def test_with_its_wait_the_reader_is_right_under_every_seed(device: Device, name: str, seed: int) -> None:
    with schedules(name, seed):
        assert pull(Stream(device), Stream(device)) == b"\x01" * 64


@pytest.mark.parametrize("name", REPLAYING)
def test_poison_shows_a_missing_wait_as_wrong_bytes(device: Device, name: str) -> None:
    seen = set()
    for seed in range(1 if name == "lazy" else 20):
        with schedules(name, seed), without("pull"):
            seen.add(pull(Stream(device), Stream(device)))
    assert bytes([POISON]) * 64 in seen


def test_freed_memory_is_poisoned_and_reused_at_once(device: Device) -> None:
    with schedules("lazy"):
        stream, reader = Stream(device), Stream(device)
        block = put(stream, b"\x05" * 4096)
        address, landing = block.address, pinned(device, bytes(4096))
        reader.copy(landing.address, address, 4096)  # in flight, and nobody keeps the block: the bug
        del block
        gc.collect()
        again = empty(stream, 4096)
        assert again.address == address
        reader.synchronize()
        reader.copy(landing.address, landing.address, 4096)
        assert get(reader, landing) == bytes([POISON]) * 4096


def test_eager_and_threads_do_not_poison(device: Device) -> None:
    with schedules("lazy"):
        pass
    stream = Stream(device)
    block = put(stream, b"\x05" * 12288)
    address = block.address
    del block
    gc.collect()
    again = empty(stream, 12288)
    assert again.address == address
    assert get(stream, again) == b"\x05" * 12288


@pytest.mark.parametrize("name", REPLAYING)
def test_a_global_deadlock_names_who_waits_for_what(device: Device, name: str) -> None:
    with pytest.raises(DeadlockError, match="0x") as caught, Segment.create(4096) as segment:
        with schedules(name):
            first, second = Stream(device), Stream(device)
            one, two = Timeline(Word(segment, 0)), Timeline(Word(segment, 64))
            first.wait(Point(two.word, 1))
            one.signal(first)
            second.wait(Point(one.word, 1))
            two.signal(second)
            second.synchronize()
    text = str(caught.value)
    assert text.count("waits for word") == 2
    assert f"#{first.handle} " in text
    assert f"#{second.handle} " in text


def test_a_closed_latch_is_a_deadlock_for_a_replaying_schedule(device: Device) -> None:
    with pytest.raises(DeadlockError, match="a closed latch"), schedules("random"):
        stream = Stream(device)
        Latch(stream)
        stream.synchronize()
    Stream(device).synchronize(WATCHDOG)


@pytest.mark.parametrize("name", REPLAYING)
def test_a_query_makes_progress_so_that_polling_ends(device: Device, name: str) -> None:
    with schedules(name, 1):
        stream, other = Stream(device), Stream(device)
        for _ in range(5):
            other.launch(len, ())
        stream.wait(other)
        mark = stream.record()
        for _ in range(100):
            if mark.query():
                break
        assert mark.query()


def test_what_is_still_queued_runs_at_the_end(device: Device) -> None:
    ran: list[int] = []
    with schedules("lazy"):
        Stream(device).launch(ran.append, 1)
        assert ran == []
    assert ran == [1]


def test_a_body_that_fails_leaves_nothing_behind(device: Device) -> None:
    ran: list[int] = []
    with pytest.raises(ZeroDivisionError), schedules("lazy"):
        stream = Stream(device)
        stream.launch(ran.append, 1)
        raise ZeroDivisionError
    stream.synchronize(WATCHDOG)
    with schedules("random"):
        pass
    assert ran == []


@pytest.mark.parametrize("name", ALL)
def test_a_failure_reaches_those_who_wait_and_nobody_hangs(device: Device, name: str) -> None:
    def broken() -> None:
        raise ZeroDivisionError("bad kernel")

    with schedules(name, 2):
        stream, waiter, other = Stream(device), Stream(device), Stream(device)
        stream.launch(broken)
        waiter.wait(stream)
        mark = waiter.record()
        for ask in (mark.synchronize, waiter.synchronize, stream.synchronize, mark.synchronize):
            with pytest.raises(DeviceError, match="bad kernel"):
                ask(WATCHDOG)
        other.launch(len, ())
        other.synchronize(WATCHDOG)


def test_threads_run_operations_on_the_pump_thread(device: Device) -> None:
    where: list[str] = []
    with schedules("threads"):
        stream = Stream("host:1")
        stream.launch(lambda: where.append(threading.current_thread().name))
        stream.synchronize(WATCHDOG)
    assert where == ["streamrt-host-1"]


@pytest.mark.parametrize("launched", [False, True])
def test_eager_does_not_return_before_a_copy_that_another_thread_is_in_front_of(
    device: Device, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain code may write to the source at once.  A function may take any time, and call this thread: it is not
    waited for."""
    stream, begun, go = Stream(device), threading.Event(), threading.Event()
    source, first, second = put(stream, bytes([7]) * 64), empty(stream, 64), empty(stream, 64)
    usual = backend.move

    def slow() -> None:
        begun.set()
        assert go.wait(WATCHDOG)

    def move(destination: int, source: int, nbytes: int) -> None:
        if destination == first.address:
            slow()
        usual(destination, source, nbytes)

    monkeypatch.setattr(backend, "move", move)
    with Latch(stream):
        stream.launch(slow) if launched else stream.copy(first.address, source.address, 64)
    assert begun.wait(WATCHDOG)  # on the device's own thread
    if launched:
        stream.copy(second.address, source.address, 64)
        assert not stream.query()
        go.set()
    else:
        later = threading.Timer(0.1, go.set)  # when this thread waits for the copy
        later.start()
        stream.copy(second.address, source.address, 64)
        ctypes.memset(source.address, 0, 64)
        later.join()
    assert get(stream, second) == bytes([7]) * 64


def test_eager_runs_on_the_caller_where_nothing_holds_it_up(device: Device) -> None:
    where: list[threading.Thread] = []
    stream = Stream(device)
    stream.launch(lambda: where.append(threading.current_thread()))
    assert where == [threading.current_thread()]


def test_a_hundred_streams_under_threads(device: Device) -> None:
    with schedules("threads"):
        streams = [Stream(f"host:{k % 4}") for k in range(100)]
        order: list[int] = []
        for k, stream in enumerate(streams):
            if k:
                stream.wait(streams[k - 1])
            stream.launch(order.append, k)
        streams[-1].synchronize(WATCHDOG)
    assert order == list(range(100))


def test_a_schedule_is_not_changed_under_pending_work(device: Device) -> None:
    from streamrt.host.schedules import create

    stream = Stream(device)
    with Latch(stream):
        with pytest.raises(LifetimeError, match="still hold work"):
            device.backend.use_schedule(create("lazy"))  # type: ignore[attr-defined]
    stream.synchronize(WATCHDOG)


def test_an_idle_hook_lets_a_simulation_go_on(device: Device) -> None:
    """What an agent on the same thread does when no stream can: here, it writes the word that a stream waits for."""
    with schedules("lazy"), Segment.create(4096) as segment:
        stream, word = Stream(device), Word(segment, 0)
        stream.wait(Point(word, 3))

        def agent() -> bool:
            if word.load() == 3:
                return False
            word.store(word.load() + 1)
            return True

        hooks = device.backend.machine.idle_hooks  # type: ignore[attr-defined]
        hooks.append(agent)
        try:
            stream.synchronize()
        finally:
            hooks.remove(agent)
        assert word.load() == 3


def test_who_enqueues_inside_of_a_copy_does_not_wait_for_it() -> None:
    """As a finaliser or a signal's handler may, on the thread that runs the copy."""
    machine, queue, ran = Machine(Eager()), Queue(0, 1), []

    def run() -> None:
        machine.enqueue(queue, Operation("copy", lambda: ran.append("inner")))
        ran.append("outer")

    thread = threading.Thread(target=machine.enqueue, args=(queue, Operation("copy", run)), daemon=True)
    thread.start()
    thread.join(WATCHDOG)
    assert not thread.is_alive(), "it waits for itself"
    assert machine.block(lambda: len(ran) == 2, WATCHDOG, poll=False)
    assert ran == ["outer", "inner"]


def test_who_enqueues_waits_for_what_comes_before_and_for_nothing_behind() -> None:
    machine, queue, done = Machine(Eager()), Queue(0, 1), []
    gates = [threading.Event(), threading.Event()]

    def enqueue(name: str, gate: threading.Event | None) -> threading.Thread:
        def run() -> None:
            if gate is not None:
                gate.wait(WATCHDOG)
            done.append(name)

        thread = threading.Thread(target=machine.enqueue, args=(queue, Operation("copy", run)), daemon=True)
        waiting = len(queue.operations)
        thread.start()
        until(lambda: len(queue.operations) > waiting or queue.running is not None, name)
        return thread

    before = enqueue("before", gates[0])
    mine = enqueue("mine", None)
    until(lambda: len(queue.operations) == 1, "mine to be enqueued")
    behind = enqueue("behind", gates[1])
    until(lambda: len(queue.operations) == 2, "both to be enqueued")
    assert mine.is_alive()
    gates[0].set()
    mine.join(WATCHDOG)
    assert not mine.is_alive()
    assert done == ["before", "mine"]
    gates[1].set()
    for thread in (before, behind):
        thread.join(WATCHDOG)
    assert done == ["before", "mine", "behind"]


def test_a_stream_is_not_idle_between_taking_an_operation_and_running_it() -> None:
    """Whoever asks then would give back memory that the operation is about to use."""
    machine, queue, idle = Machine(Eager()), Queue(0, 1), []

    class Watched(deque[Operation]):
        def popleft(self) -> Operation:
            operation = super().popleft()
            idle.append(queue.idle)
            return operation

    queue.operations = Watched()
    machine.enqueue(queue, Operation("copy", lambda: idle.append(queue.idle)))
    assert idle == [False, False]
    assert queue.idle


@pytest.mark.parametrize("name", ["lazy", "random", "priority"])
def test_threads_that_drive_one_schedule_are_told_of_no_deadlock(name: str) -> None:
    """What one waits for another may be running at that moment: that is neither a deadlock nor a timeout."""
    faults: list[BaseException] = []

    def work(start: float) -> None:
        try:
            for k in range(5):
                stream, default = Stream("host:0"), streamrt.current_stream("host:0")
                x = streamrt.array(np.full(1000, start + k), device="host:0")
                stream.wait(default)
                with streamrt.using(stream):
                    y = streamrt.empty(1000, "float64", device="host:0")
                    stream.launch(lambda y, x: np.copyto(y, x * 2), y, x, reads=(x,), writes=(y,))
                streamrt.use(x, stream)
                stream.synchronize(WATCHDOG)
                assert streamrt.to(y, "cpu")[0] == 2 * (start + k)
        except BaseException as fault:
            faults.append(fault)

    for seed in range(40):
        with schedules(name, seed):
            threads = [threading.Thread(target=work, args=(float(number),)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert faults == []
