"""`compute_stream` and `on_side_stream`: the three cases, what they bring back, and what they refuse.

All but the last section runs the same on the host backend and on a GPU; other libraries are in test_compute_gpu.py.
"""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from device_arrays import ON_ONE, WATCHDOG, copy_on, fill_on, home, make, read
from device_bytes import opened

from streamrt import hooks, memory
from streamrt.compute import compute_stream, on_side_stream
from streamrt.device import CPU, Device
from streamrt.errors import ArrayError, LifetimeError, PlacementError
from streamrt.event import Event
from streamrt.guard import current_stream, run_on, using
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, live_resources, schedules, without


@pytest.fixture(params=ON_ONE)
def device(request: pytest.FixtureRequest) -> Device:
    return opened(request.param)


def default_stream(device: Device) -> Stream:
    return Stream.borrow(0, device)


def doubled(target: Any, source: Any) -> None:
    target[...] = source
    target += source


def double_on(stream: Stream, target: Any, source: Any) -> None:
    stream.launch(doubled, target, source, reads=(source,), writes=(target,))


def values(array: Any) -> list[float]:
    return sorted(set(np.asarray(read(array)).ravel().tolist()))


def edges(records: list[hooks.Record]) -> list[str]:
    return [record.edge for record in records if isinstance(record, hooks.Waited)]


class Waits:
    """What waits were enqueued inside a ``with``."""

    def __enter__(self) -> list[hooks.Record]:
        self.seen: list[hooks.Record] = []
        self.remove = hooks.listen(self.seen.append)
        return self.seen

    def __exit__(self, *exc: object) -> None:
        self.remove()


def load(device: Device) -> None:
    """Every kernel once, so that no first launch waits for a latch."""
    stream = Stream(device)
    x, y = make(stream, 1), make(stream, 1)
    double_on(stream, y, x)
    copy_on(stream, y, x)
    stream.synchronize(WATCHDOG)
    with compute_stream(x) as side:
        assert side is not None
        double_on(side, y, x)
    default_stream(device).synchronize(WATCHDOG)
    Latch(stream).open()
    stream.synchronize(WATCHDOG)


# 1. on the default stream


def input_side(device: Device, *, drop: str = "") -> list[float]:
    """The default stream is held up before it fills the input; the engine doubles it on the side stream."""
    default, other = default_stream(device), Stream(device)
    x, y = make(other, 1), make(other, 0)
    with Latch(default) as latch:
        fill_on(default, x, 3)
        with without(drop) if drop else nullcontext(), assert_no_host_sync(), compute_stream(x) as side:
            assert side is not None
            assert side != default
            assert current_stream(device) == side
            double_on(side, y, x)
        assert current_stream(device) == default
        if drop:
            side.synchronize(WATCHDOG)
        latch.open()
    default.synchronize(WATCHDOG)
    return values(y)


def test_case_1_the_side_stream_waits_for_the_default_stream(device: Device) -> None:
    """pytorch/TensorRT#3977: an engine beside the default stream reads what that one has still to write."""
    load(device)
    assert input_side(device) == [6.0]
    assert input_side(device, drop="guard.enter") == [2.0]


def output_side(device: Device, *, drop: str = "") -> list[float]:
    """The side stream is held up before the engine writes; the default stream copies what it wrote."""
    default, other = default_stream(device), Stream(device)
    x, y, z = make(other, 3), make(other, 1), make(other, 0)
    with without(drop) if drop else nullcontext(), compute_stream(x) as side:
        assert side is not None
        latch = Latch(side)
        double_on(side, y, x)
    with latch:
        copy_on(default, z, y)
        if drop:
            default.synchronize(WATCHDOG)
        latch.open()
    default.synchronize(WATCHDOG)
    side.synchronize(WATCHDOG)
    return values(z)


def test_case_1_the_default_stream_waits_for_the_side_stream(device: Device) -> None:
    """pytorch/TensorRT#3977, #4232."""
    load(device)
    assert output_side(device) == [6.0]
    assert output_side(device, drop="guard.exit") == [1.0]


MANY = 1000  # more threads with side streams than a run of all tests leaves behind


def test_the_side_stream_is_the_threads_own_and_stays(device: Device) -> None:
    x = make(Stream(device), 1)
    with compute_stream(x) as first:
        pass
    with compute_stream(x) as second:
        pass
    assert first is second

    def elsewhere() -> Any:
        with compute_stream(x) as side:
            return side

    with ThreadPoolExecutor(1) as executor:
        third = executor.submit(elsewhere).result(WATCHDOG)
    assert third != first
    for _ in range(MANY):  # that thread has ended: another one takes its stream, after those of threads before it
        with ThreadPoolExecutor(1) as executor:
            if executor.submit(elsewhere).result(WATCHDOG) is third:
                break
    else:
        raise AssertionError("no thread took the stream of one that has ended")


# 2. on another stream


def test_case_2_on_another_stream_nothing_is_done(device: Device) -> None:
    x = make(Stream(device), 1)
    mine = Stream(device)
    with using(mine), Waits() as seen:
        with compute_stream(x) as stream:
            assert stream == mine
            assert current_stream(device) == mine
        assert current_stream(device) == mine
    assert seen == []


def test_many_breaks_are_fenced_once(device: Device) -> None:
    """pytorch/TensorRT#3977: eight engines, seven breaks, one fence in and one out."""
    x = make(Stream(device), 1)
    with Waits() as seen, compute_stream(x) as side:
        for _ in range(8):
            with compute_stream(x) as inner:
                assert inner == side
                with compute_stream(x):
                    pass
            assert current_stream(device) == side
    assert edges(seen) == ["guard.enter", "guard.exit"]
    assert current_stream(device) == default_stream(device)


def test_a_guard_inside_follows_what_the_body_made_current(device: Device) -> None:
    x = make(Stream(device), 1)
    mine = Stream(device)
    with compute_stream(x) as side:
        with using(mine), compute_stream(x) as inner:
            assert inner == mine
        with using(default_stream(device)), compute_stream(x) as again:  # back on the default stream: fenced again
            assert again == side
        assert current_stream(device) == side


# 3. several streams


MARKS = ["stream", "event"]


def marked(device: Device, kind: str, *, drop: str = "") -> list[float]:
    """The second input is written by a stream that only the caller knows, and that one is held up."""
    default, writer, other = default_stream(device), Stream(device), Stream(device)
    a, b, y = make(other, 1), make(other, 1), make(other, 0)
    with Latch(writer) as latch:
        fill_on(writer, b, 5)
        mark: Stream | Event = writer if kind == "stream" else writer.record()
        with assert_no_host_sync(), without(drop) if drop else nullcontext(), compute_stream(a, (b, mark)) as side:
            assert side is not None
            double_on(side, y, b)
        if drop:
            side.synchronize(WATCHDOG)
        latch.open()
    default.synchronize(WATCHDOG)
    writer.synchronize(WATCHDOG)
    return values(y)


@pytest.mark.parametrize("kind", MARKS)
def test_case_3_inputs_of_streams_that_only_the_caller_knows(device: Device, kind: str) -> None:
    """pytorch/TensorRT#3977, case 3: there the caller had to wait for his streams by hand."""
    load(device)
    assert marked(device, kind) == [10.0]
    assert marked(device, kind, drop="guard.join") == [2.0]


@pytest.mark.parametrize("kind", MARKS)
def test_case_3_also_on_a_stream_that_is_not_the_default_one(device: Device, kind: str) -> None:
    load(device)
    mine = Stream(device)
    with using(mine):
        writer, other = Stream(device), Stream(device)
        a, b, y = make(other, 1), make(other, 1), make(other, 0)
        with Latch(writer) as latch:
            fill_on(writer, b, 5)
            mark: Stream | Event = writer if kind == "stream" else writer.record()
            with compute_stream(a, (b, mark)) as stream:
                assert stream == mine
                double_on(mine, y, b)
            assert not mine.query()
            latch.open()
        mine.synchronize(WATCHDOG)
    assert values(y) == [10.0]


def across_devices(kind: str, *, drop: str = "") -> list[float]:
    """An input on each of two devices; both default streams are held up before they fill theirs."""
    zero, one = opened(f"{kind}:0"), opened(f"{kind}:1")
    here, there = default_stream(zero), default_stream(one)
    x, y, z = make(Stream(zero), 1), make(Stream(one), 1), make(Stream(zero), 0)

    def add(target: Any, a: Any, b: Any) -> None:
        target[...] = a
        target += b

    with Latch(here) as first, Latch(there) as second:
        fill_on(here, x, 3)
        fill_on(there, y, 4)
        with without(drop) if drop else nullcontext(), assert_no_host_sync(), compute_stream(x, y) as side:
            assert side is not None
            assert side.device == zero
            assert current_stream(one) != there
            side.launch(add, z, x, y, reads=(x, y), writes=(z,))
        assert (current_stream(zero), current_stream(one)) == (here, there)
        if drop:
            side.synchronize(WATCHDOG)
        first.open()
        assert not there.query()
        second.open()
    there.synchronize(WATCHDOG)
    here.synchronize(WATCHDOG)
    return values(z)


def test_case_3_inputs_of_several_devices() -> None:
    assert across_devices("host") == [7.0]
    assert across_devices("host", drop="guard.enter") == [2.0]


def test_the_exit_of_several_devices_orders_every_default_stream() -> None:
    """What the first device's stream wrote into the second one's memory is there for that one's default stream."""
    zero, one = opened("host:0"), opened("host:1")
    x, y = make(Stream(zero), 3), make(Stream(one), 1)
    with compute_stream(x, y) as side:
        assert side is not None
        latch = Latch(side)
        double_on(side, y, x)
    there = default_stream(one)
    assert not there.query()
    latch.open()
    there.synchronize(WATCHDOG)
    assert values(y) == [6.0]


@pytest.mark.parametrize("schedule", ["lazy", "random", "priority"])
def test_the_three_cases_under_schedules(schedule: str) -> None:
    """Whatever runs first the values are right; and without one of the edges some seed shows it."""

    def run(seed: int, read_on: str = "default") -> list[float]:
        with schedules(schedule, seed):
            zero = opened("host:0")
            default, writer, other = default_stream(zero), Stream(zero), Stream(zero)
            a, b, y, z = make(other, 1), make(other, 1), make(other, 0), make(other, 0)
            for value in (9, 9, 9, 9, 3):  # so that a side stream that does not wait has many chances to be early
                fill_on(default, a, value)
            fill_on(writer, b, 5)

            def add(target: Any, first: Any, second: Any) -> None:
                target[...] = first
                target += second

            with compute_stream(a, (b, writer)) as side:
                assert side is not None
                side.launch(add, y, a, b, reads=(a, b), writes=(y,))
                with compute_stream(y):  # a break
                    double_on(side, y, y)
            if read_on == "side":  # which needs nothing of the default stream but what the entry says
                side.record().require()
                return values(y)
            copy_on(default, z, y)
            default.record().require()
            return values(z)

    seeds = range(25)
    for read_on in ("default", "side"):
        assert all(run(seed, read_on) == [16.0] for seed in seeds)
    for edge, read_on in (("guard.enter", "side"), ("guard.join", "side"), ("guard.exit", "default")):
        with without(edge):
            assert any(run(seed, read_on) != [16.0] for seed in seeds), edge


# what is brought back


def test_after_an_exception_everything_is_as_it_was_and_ordered(device: Device) -> None:
    load(device)
    default = default_stream(device)
    x, y = make(Stream(device), 3), make(Stream(device), 1)
    latches = []

    def fail() -> None:
        with compute_stream(x) as side:
            assert side is not None
            latches.append(Latch(side))
            double_on(side, y, x)
            raise KeyError("engine")

    with pytest.raises(KeyError, match="engine"):
        fail()
    assert current_stream(device) == default
    assert not default.query()
    latches[0].open()
    default.synchronize(WATCHDOG)
    assert values(y) == [6.0]


def test_after_an_exception_in_a_guard_inside_a_guard(device: Device) -> None:
    x = make(Stream(device), 1)
    with compute_stream(x) as side:
        with pytest.raises(KeyError), compute_stream(x):
            raise KeyError
        assert current_stream(device) == side
    assert current_stream(device) == default_stream(device)


def test_the_body_may_change_what_is_current(device: Device) -> None:
    x = make(Stream(device), 1)
    with compute_stream(x):
        leaving = using(Stream(device))
        leaving.__enter__()
    assert current_stream(device) == default_stream(device)


@pytest.mark.parametrize("case", ["on a stream", "inside a guard", "inside a guard, device named"])
def test_the_body_may_change_what_is_current_also_where_nothing_is_fenced(device: Device, case: str) -> None:
    x = make(Stream(device), 1)
    mine, other = Stream(device), Stream(device)
    named = device if case.endswith("named") else None
    with using(mine) if case == "on a stream" else compute_stream(x):
        before = current_stream(device)
        with compute_stream(x, device=named):
            using(other).__enter__()
        assert current_stream(device) == before
        with pytest.raises(KeyError), compute_stream(x, device=named):
            using(other).__enter__()
            raise KeyError
        assert current_stream(device) == before
    assert current_stream(device) == default_stream(device)


@pytest.mark.parametrize("case", ["on the default stream", "on a stream", "inside a guard"])
def test_the_device_is_current_inside_and_brought_back(case: str) -> None:
    zero, backend = opened("host:0"), opened("host:0").backend
    x = make(Stream(zero), 1)
    outer: Any = {"on a stream": using(Stream(zero)), "inside a guard": compute_stream(x)}.get(case, nullcontext())
    with outer, backend.activate(1):
        with compute_stream(x):
            assert backend.current_device == 0
            with backend.activate(1), compute_stream(x):
                assert backend.current_device == 0
            using(Stream("host:2")).__enter__()
            assert backend.current_device == 2
        assert backend.current_device == 1


def test_many_breaks_of_two_devices_are_fenced_once() -> None:
    zero, one = opened("host:0"), opened("host:1")
    x, y = make(Stream(zero), 1), make(Stream(one), 1)
    with Waits() as seen, compute_stream(x, y):
        first = len(edges(seen))
        for _ in range(8):
            with compute_stream(x, y), compute_stream(y, x):
                pass
        assert len(edges(seen)) == first


def test_guards_of_generators_that_are_left_in_another_order(device: Device) -> None:
    """The thread does not take a guard that is closed for one that is open."""
    x = make(Stream(device), 1)

    def steps() -> Iterator[None]:
        with compute_stream(x):
            yield

    first, second = steps(), steps()
    next(first)
    next(second)
    first.close()
    second.close()
    with using(default_stream(device)), Waits() as seen, compute_stream(x):
        pass
    assert edges(seen) == ["guard.enter", "guard.exit"]


def test_a_default_stream_that_has_failed_by_a_guards_exit_tells_whose_error_it_was() -> None:
    """Host only, where what a launched function raises is its stream's failure.  It lasts: in a process of its own."""
    program = """
import streamrt
def engine():
    raise KeyError("no such layer")
def show():
    try:
        streamrt.Stream.borrow(0, "host:2").synchronize(60)
    except streamrt.DeviceError as error:
        return error
with streamrt.compute_stream(device="host:2") as side:
    side.launch(engine)
error = show()
print(error, repr(error.__cause__))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WATCHDOG, check=True)
    assert re.fullmatch(
        r"stream host:2#0 failed: the function 'engine', launched on the virtual device host:2 \(stream host:2#\d+\), "
        r"raised KeyError: 'no such layer'; mend that, and start the process again, for this is the default stream "
        r"KeyError\('no such layer'\)\n",
        done.stdout,
    )


@pytest.mark.parametrize("first", ["using", "compute_stream"])
def test_guards_that_are_left_in_the_order_of_their_entries(
    device: Device, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first exit brings back what was, and says so; the second one, which would bring back the first one's stream,
    brings back nothing and raises."""
    x = make(Stream(device), 1)
    guards: list[Any] = [using(Stream(device)), compute_stream(x)]
    a, b = guards if first == "using" else guards[::-1]
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert current_stream(device) == default_stream(device)
    assert "decorate coroutines and generators" in caplog.text
    with pytest.raises(LifetimeError, match="decorate coroutines and generators"):
        b.__exit__(None, None, None)
    assert current_stream(device) == default_stream(device)
    with compute_stream(x) as side:  # the thread's guards are all closed
        assert side != default_stream(device)
    assert current_stream(device) == default_stream(device)


def test_every_fence_out_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that refuses one does not keep the other devices' streams from being ordered."""
    zero, one = opened("host:0"), opened("host:1")
    x, y = make(Stream(zero), 1), make(Stream(one), 1)
    guard = compute_stream(x, y)
    guard.__enter__()
    usual, calls = Stream.wait_by, []

    def refuse_once(self: Stream, event: Event, other: Stream, *, edge: str = "") -> None:
        calls.append(self)
        if len(calls) == 1:
            raise OSError("the driver refuses")
        usual(self, event, other, edge=edge)

    monkeypatch.setattr(Stream, "wait_by", refuse_once)
    with pytest.raises(OSError, match="refuses"):
        guard.__exit__()
    assert len(calls) == 4
    assert current_stream(zero) == default_stream(zero)


def test_a_failing_entry_changes_nothing(device: Device) -> None:
    x = make(Stream(device), 1)

    class Broken:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (7, 1)

    guard = compute_stream((x, Broken()))
    with Waits() as seen, pytest.raises(Exception, match="version"):
        guard.__enter__()
    assert current_stream(device) == default_stream(device)
    assert seen == []


def test_threads_have_a_side_stream_each(device: Device) -> None:
    """Of each thread that enters, at once with others, the entry stream is current again; also after an exception."""
    x = make(Stream(device), 1)
    barrier = threading.Barrier(4)

    def work(number: int) -> Any:
        mine = Stream(device) if number % 2 else None
        with using(*([mine] if mine else [])):
            before = current_stream(device)
            with pytest.raises(KeyError), compute_stream(x) as side:
                barrier.wait(WATCHDOG)
                assert current_stream(device) == side
                barrier.wait(WATCHDOG)
                raise KeyError
            assert current_stream(device) == before
            return side

    with ThreadPoolExecutor(4) as executor:
        sides = list(executor.map(work, range(4)))
    assert len(set(sides)) == 4


def test_nothing_is_leaked(device: Device) -> None:
    x = make(Stream(device), 1)
    engine = on_side_stream(lambda value: value)
    with compute_stream(x):
        engine(x)
    gc.collect()
    memory.drain(everything=True)
    before = live_resources()
    for _ in range(20):
        with compute_stream(x), compute_stream(x):
            pass
        engine(x)
    assert live_resources() - before == {}


# misuse


def test_an_object_is_entered_once_at_a_time(device: Device) -> None:
    guard = compute_stream(make(Stream(device), 1))
    with guard, pytest.raises(LifetimeError, match="entered already"):
        guard.__enter__()
    with guard:  # and again after that
        pass


def test_leaving_on_another_thread_is_an_error(device: Device) -> None:
    guard = compute_stream(make(Stream(device), 1))
    guard.__enter__()
    with ThreadPoolExecutor(1) as executor:
        error = executor.submit(guard.__exit__).exception(WATCHDOG)
    assert isinstance(error, LifetimeError)
    assert "on_side_stream" in str(error)
    guard.__exit__()
    assert current_stream(device) == default_stream(device)


@pytest.mark.parametrize("wrong", ["stream", "event", "device", "name", "number", "none", "object"])
def test_what_is_no_input(device: Device, wrong: str) -> None:
    value: Any = {
        "stream": Stream(device),
        "event": Stream(device).record(),
        "device": device,
        "name": str(device),
        "number": 5,
        "none": None,
        "object": object(),
    }[wrong]
    with pytest.raises(ArrayError, match=r"\(array, stream\)"), compute_stream(value):
        pass
    with pytest.raises(PlacementError, match="no device"), compute_stream(device="gpu"):
        pass


def test_ordinary_memory_has_no_streams() -> None:
    with Waits() as seen, compute_stream(np.ones(3), [np.zeros(2), 5, None]) as stream:
        assert stream is None
    assert seen == []
    with pytest.raises(PlacementError, match="cpu"), compute_stream(device=CPU):
        pass


def test_with_no_array_it_is_the_current_device(device: Device) -> None:
    with compute_stream(device=device) as side:
        assert side is not None
        assert side.device == device
        assert side != default_stream(device)
    with device.backend.activate(device.index), compute_stream() as side:
        assert side is not None
        assert side.device == device


def test_a_mark_is_never_passed_over(device: Device) -> None:
    """Beside an array in any nesting it is waited for; anywhere else it is an error."""
    x, y = make(Stream(device), 1), make(Stream(device), 1)
    writers = [Stream(device), Stream(device)]
    with Latch(writers[0]) as one, Latch(writers[1]) as two:
        for inputs in ([(x, *writers)], [{"x": [(x, writers[0])], "y": (y, writers[1])}], [((x, y), *writers)]):
            with Waits() as seen, compute_stream(*inputs) as side:
                assert side is not None
                assert not side.query()
            assert edges(seen).count("guard.join") >= 2
        one.open()
        two.open()
    default_stream(device).synchronize(WATCHDOG)
    for wrong in ((x, y, writers[0]), [writers[0]], {"x": (writers[0], x)}, (x, writers[0].record), (x, 3), (x, None)):
        with pytest.raises(ArrayError, match=r"\(array, stream\)"), compute_stream(wrong):
            pass


def test_ordinary_memory_that_a_stream_fills(device: Device) -> None:
    """Pinned memory has no streams; the mark beside it says where to work."""
    writer = Stream(device)
    with Latch(writer) as latch:
        with compute_stream((np.ones(3), writer)) as side:
            assert side is not None
            assert side.device == device
            assert not side.query()
        latch.open()
    default_stream(device).synchronize(WATCHDOG)


def test_left_without_being_entered(device: Device) -> None:
    with pytest.raises(LifetimeError, match="not entered"):
        compute_stream(make(Stream(device), 1)).__exit__()


def test_whether_a_guard_is_the_innermost(device: Device) -> None:
    x = make(default_stream(device), 1)
    outer, inner = compute_stream(x), compute_stream(x)
    assert not outer.is_innermost()
    with outer:
        assert outer.is_innermost()
        with inner:
            assert (outer.is_innermost(), inner.is_innermost()) == (False, True)
        assert (outer.is_innermost(), inner.is_innermost()) == (True, False)
        with using(Stream(device)):
            assert not outer.is_innermost()
            with compute_stream(device=device):
                assert not outer.is_innermost()
        with pytest.raises(KeyError), compute_stream(x):
            raise KeyError
        assert outer.is_innermost()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(outer.is_innermost).result(WATCHDOG)
    assert not outer.is_innermost()


# on_side_stream


def test_an_engines_result_is_ordered(device: Device) -> None:
    """Stability-AI/stable-audio-3#80, pytorch/TensorRT#4232: fenced in and out, and the host does not wait."""
    load(device)
    default = default_stream(device)
    x, y, z = make(Stream(device), 1), make(Stream(device), 0), make(Stream(device), 0)

    @on_side_stream
    def engine(value: Any, *, into: Any) -> Any:
        double_on(current_stream(device), into, value)
        return into

    with Latch(default) as latch:
        fill_on(default, x, 3)
        with assert_no_host_sync():
            assert engine(x, into=y) is y
        copy_on(default, z, y)
        latch.open()
    default.synchronize(WATCHDOG)
    assert values(z) == [6.0]
    assert engine.__name__ == "engine"


def reused(device: Device, guard: Any) -> list[float]:
    """A result is read by the default stream, which is held up, and dropped inside the next guard, which fills what it
    allocates there."""
    load(device)
    default = default_stream(device)

    def engine(value: Any) -> Any:
        side = current_stream(device)
        made = home(device).empty((256,), "float32", device)
        double_on(side, made, value)
        return made

    x, z = make(Stream(device), 3), make(Stream(device), 0)
    y = guard(engine)(x)
    with compute_stream(x) as side:
        assert side is not None
        with Latch(default) as latch:
            copy_on(default, z, y)
            del y
            fresh = [home(device).empty((256,), "float32", device) for _ in range(4)]
            for one in fresh:
                fill_on(side, one, 99)
            side.synchronize(WATCHDOG)
            latch.open()
        default.synchronize(WATCHDOG)
    return values(z)


@pytest.mark.gpu
def test_a_results_memory_is_safe_where_the_caller_uses_it() -> None:
    """cupy/cupy#8068: CuPy gives memory back to the stream that allocated it, whoever uses it."""

    def plain(engine: Any) -> Any:
        def run(value: Any) -> Any:
            with compute_stream(value):
                return engine(value)

        return run

    device = opened("cuda:0")
    assert reused(device, on_side_stream) == [6.0]
    assert reused(device, plain) == [99.0]  # what the decorator is for


def test_the_callers_stream_is_a_user_of_the_results_memory(device: Device) -> None:
    """cupy/cupy#8068: dropped while the caller's stream is held up, the memory is kept; afterwards it goes back."""
    load(device)
    default = default_stream(device)

    @on_side_stream
    def engine(value: Any) -> Any:
        made = make(current_stream(device))
        double_on(current_stream(device), made, value)
        return [made]

    x, z = make(Stream(device), 3), make(Stream(device), 0)
    before = memory.statistics().live
    with Latch(default) as latch:
        (y,) = engine(x)
        copy_on(default, z, y)
        del y
        assert memory.statistics().live == before + 1024
        latch.open()
    default.synchronize(WATCHDOG)
    assert values(z) == [6.0]
    assert memory.statistics().live == before


def test_a_view_of_a_result_keeps_its_memory(device: Device) -> None:
    """The result is dropped, and a view of it is read by the caller's stream, which is held up."""
    load(device)
    default = default_stream(device)

    @on_side_stream
    def engine(value: Any) -> Any:
        made = make(current_stream(device))
        double_on(current_stream(device), made, value)
        return made[16:]

    x, z = make(Stream(device), 3), make(Stream(device), 0)
    before = memory.statistics().live
    with Latch(default) as latch:
        view = engine(x)[16:]
        copy_on(default, z[32:], view)
        memory.drain(everything=True)
        del view
        assert memory.statistics().live == before + 1024
        latch.open()
    default.synchronize(WATCHDOG)
    assert values(z[32:]) == [6.0]
    assert memory.statistics().live == before


def test_an_input_that_only_the_caller_knows_is_kept_for_the_side_stream(device: Device) -> None:
    """cupy/cupy#8068: dropped while the side stream is held up, its memory stays, although its own stream is idle."""
    load(device)
    writer = Stream(device)
    x, y = make(writer, 3), make(Stream(device), 0)
    before = memory.statistics().live
    with compute_stream((x, writer)) as side:
        assert side is not None
        latch = Latch(side)
        double_on(side, y, x)
        del x
    with latch:
        assert memory.statistics().live == before
        latch.open()
    default_stream(device).synchronize(WATCHDOG)
    assert values(y) == [6.0]
    assert memory.statistics().live == before - 1024


def test_what_a_method_holds_is_not_its_argument() -> None:
    zero = opened("host:0")
    x = make(Stream(zero), 1)

    class Engine:
        def __init__(self) -> None:
            self.elsewhere = make(Stream(opened("host:1")), 1)

        @on_side_stream
        def run(self, value: Any) -> int:
            return zero.backend.current_device

    with Waits() as seen:
        assert Engine().run([x]) == 0
    assert edges(seen) == ["guard.enter", "guard.exit"]


def test_objects_that_can_be_called_are_guarded_as_what_they_are(device: Device) -> None:
    x = make(Stream(device), 1)

    class Coroutine:
        async def __call__(self, value: Any) -> Stream:
            await asyncio.sleep(0)
            return current_stream(device)

    class Generator:
        def __call__(self, value: Any) -> Iterator[Stream]:
            yield current_stream(device)

    class Plain:
        def __call__(self, value: Any) -> Stream:
            return current_stream(device)

    default = default_stream(device)
    assert asyncio.run(on_side_stream(Coroutine())(x)) != default
    assert next(on_side_stream(Generator())(x)) != default
    assert on_side_stream(Plain())(x) != default
    with pytest.raises(LifetimeError, match="decorate the coroutine function"):
        on_side_stream(lambda value: Coroutine()(value))(x)
    assert current_stream(device) == default


@pytest.mark.parametrize("case", ["on the default stream", "on a stream", "inside a guard"])
def test_between_steps_others_have_what_they_had(device: Device, case: str) -> None:
    """Also where the guard has nothing to do; and what the body made current is current in its next step."""
    x = make(Stream(device), 1)
    own = Stream(device)

    @on_side_stream
    def engine(value: Any) -> Iterator[Stream]:
        with using(own):
            yield current_stream(device)
            yield current_stream(device)

    outer: Any = {"on a stream": using(Stream(device)), "inside a guard": compute_stream(x)}.get(case, nullcontext())
    with outer:
        here = current_stream(device)
        steps = engine(x)
        assert next(steps) == own
        assert current_stream(device) == here
        assert next(steps) == own
        assert current_stream(device) == here
        steps.close()
        assert current_stream(device) == here


def test_a_coroutine_is_guarded_step_by_step(device: Device) -> None:
    x = make(Stream(device), 1)
    seen: list[Any] = []

    @on_side_stream
    async def engine(value: Any) -> Any:
        seen.append(current_stream(device))
        await asyncio.sleep(0)
        seen.append(current_stream(device))
        return value

    async def main() -> Any:
        task = asyncio.ensure_future(engine(x))
        await asyncio.sleep(0)  # the coroutine is suspended: here everything is as it was
        assert current_stream(device) == default_stream(device)
        return await task

    with Waits() as waits:
        assert asyncio.run(main()) is x
    assert len(set(seen)) == 1
    assert seen[0] != default_stream(device)
    assert edges(waits)[:2] == ["guard.enter", "guard.exit"]
    assert edges(waits).count("guard.enter") == edges(waits).count("guard.exit") >= 2


def test_a_coroutine_whose_caller_moves_to_another_stream_follows_it(device: Device) -> None:
    """Each step is guarded by what is current at it: on a stream of its own the side stream is not current again."""
    x = make(Stream(device), 1)
    mine = Stream(device)

    @on_side_stream
    def engine(value: Any) -> Iterator[Any]:
        while True:
            yield current_stream(device)

    steps = engine(x)
    first = next(steps)
    with using(mine):
        assert next(steps) == mine
    assert next(steps) == first
    steps.close()


def test_generators_keep_their_own_guards_between_steps(device: Device) -> None:
    x = make(Stream(device), 1)
    own = Stream(device)

    @on_side_stream
    def engine(value: Any) -> Iterator[Any]:
        with using(own):
            yield current_stream(device)
            yield current_stream(device)
        yield current_stream(device)

    steps = engine(x)
    assert next(steps) == own
    assert current_stream(device) == default_stream(device)
    assert next(steps) == own
    assert next(steps) not in (own, default_stream(device))
    assert list(steps) == []
    assert current_stream(device) == default_stream(device)


def test_an_async_generators_values_are_results(device: Device) -> None:
    load(device)
    default = default_stream(device)
    x = make(Stream(device), 3)

    @on_side_stream
    async def engine(value: Any) -> AsyncIterator[Any]:
        for _ in range(2):
            made = make(current_stream(device))
            double_on(current_stream(device), made, value)
            yield made
            await asyncio.sleep(0)

    async def main() -> list[Any]:
        found = []
        async for made in engine(x):
            assert current_stream(device) == default
            z = make(Stream(device), 0)
            copy_on(default, z, made)
            found.append(z)
        return found

    found = asyncio.run(main())
    default.synchronize(WATCHDOG)
    assert [values(one) for one in found] == [[6.0], [6.0]]


def test_a_device_may_be_named(device: Device) -> None:
    @on_side_stream(device=device)
    def where() -> Stream:
        return current_stream(device)

    assert where() != default_stream(device)

    @on_side_stream
    def method(self: object, number: int) -> Stream:
        return current_stream(device)

    with device.backend.activate(device.index):
        assert method(object(), 3) != default_stream(device)


def test_beside_run_on(device: Device) -> None:
    """`run_on` inside a guard is fenced to the side stream."""
    load(device)
    x, y = make(Stream(device), 3), make(Stream(device), 0)
    private = Stream(device)
    with compute_stream(x) as side:
        assert side is not None
        latch = Latch(private)
        run_on(private, double_on, private, y, x)
        assert not side.query()
        latch.open()
    default_stream(device).synchronize(WATCHDOG)
    assert values(y) == [6.0]
