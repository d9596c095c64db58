"""Graphs on both backends: what is captured, what is refused, and what lives how long."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from device_arrays import ON_ONE, WATCHDOG, copy_on, double, eventually, fill_on, make, opened, read

import streamrt
from streamrt import arrays, hooks, memory
from streamrt.compute import compute_stream
from streamrt.device import Device
from streamrt.errors import ArrayError, CaptureError, DeviceError, PlacementError
from streamrt.future import DeviceFuture
from streamrt.graph import Graph, capture
from streamrt.guard import current_stream, run_on, using
from streamrt.kernels import copy_many
from streamrt.libraries import library
from streamrt.pool import StreamPool, stream_pool
from streamrt.segment import Segment, Word
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, schedules, without
from streamrt.timeline import Timeline

EVERY: list[Any] = [f"host:0 {name}" for name in ("eager", "threads", "lazy")]
EVERY += [pytest.param(f"host:0 {name}", marks=pytest.mark.whole) for name in ("random", "priority")]
EVERYWHERE = [*EVERY, pytest.param("cuda:0", marks=pytest.mark.gpu)]

FEW = [EVERY[0], EVERY[2], EVERYWHERE[-1]]
"""For memory, of which a schedule changes little: each collection of garbage takes as long as there are objects."""


@pytest.fixture(params=EVERYWHERE)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each device, the host's under every schedule."""
    name, _, schedule = request.param.partition(" ")
    found = opened(name)
    if not schedule:
        yield found
        return
    with schedules(schedule, 7):
        yield found


@contextmanager
def leased(device: Device) -> Iterator[Stream]:
    """A stream of the pool, current."""
    with stream_pool(device).lease() as lease, using(lease.stream):
        yield lease.stream


def increment(array: Any) -> None:
    array += 1


def increment_on(stream: Stream, array: Any) -> None:
    stream.launch(increment, array, reads=(array,), writes=(array,))


def double_on(stream: Stream, target: Any, source: Any) -> None:
    stream.launch(double, target, source, reads=(source,), writes=(target,))


def plus(one: Any, other: Any, out: Any) -> None:
    out[...] = one + other


def add_on(stream: Stream, target: Any, source: Any) -> None:
    stream.launch(plus, target, source, target, reads=(target, source), writes=(target,))


def values(stream: Stream, *each: Any) -> list[float]:
    """The first elements, once the stream is done; all elements are the same."""
    stream.synchronize(WATCHDOG)
    found = [read(array) for array in each]
    assert all((array == array[0]).all() for array in found)
    return [float(array[0]) for array in found]


def address(array: Any) -> int:
    return arrays.describe(array).address


# what is captured


def test_what_is_no_function_is_not_captured() -> None:
    with pytest.raises(TypeError, match=r"3 is no function; capture\(function, \*arrays\)"):
        streamrt.capture(3)  # type: ignore[arg-type]


def test_b08_a_fork_to_a_pool_stream_is_part_of_the_graph(device: Device) -> None:
    """pytorch/pytorch#114320, cupy/cupy#4567: three replays from a=0 give a=3, b=6."""
    with leased(device) as stream:
        a, b = make(stream, 0.0), make(stream, 0.0)

        def step(a: Any, b: Any) -> Any:
            increment_on(stream, a)
            with stream_pool(device).lease() as side:
                side.stream.wait(stream)
                double_on(side.stream, b, a)
                stream.wait(side.stream)
            return b

        graph = capture(step, a, b)
        assert values(stream, a, b) == [1.0, 2.0], "the warm-up, and nothing else"
        fill_on(stream, a, 0.0)
        for _ in range(3):
            graph.replay()
        assert values(stream, a, graph.result) == [3.0, 6.0]
        assert graph.result is b
        assert (graph.device, len(graph.arguments)) == (device, 2)


def test_b08_unjoined_work_is_an_error_and_every_pool_stream_serves_again(device: Device) -> None:
    """pytorch/pytorch#114320, deepseek-ai/DeepEP#62: the capture fails, and leaves streams that seem to capture."""
    pool = stream_pool(device)
    with leased(device) as stream:
        a, b = make(stream, 1.0), make(stream, 0.0)

        def forget(a: Any, b: Any) -> None:
            with pool.lease() as side:
                side.stream.wait(stream)
                double_on(side.stream, b, a)

        with pytest.raises(CaptureError, match="joined"):
            capture(forget, a, b, warmup=0)
        assert not stream.capturing
        assert current_stream(device) == stream
        leases = [pool.lease() for _ in range(pool.statistics().created)]
        for each in {lease.stream for lease in leases} | {stream}:
            assert not each.capturing
            fill_on(each, b, 5.0)
            assert values(each, b) == [5.0]
        for lease in leases:
            lease.release()
        graph = capture(increment_on, stream, a)
        graph.replay()
        assert values(stream, a) == [3.0]


def test_an_exception_ends_the_capture_and_restores_everything(device: Device) -> None:
    with leased(device) as stream:
        a = make(stream, 0.0)
        other = Stream(device)

        def fail(a: Any) -> None:
            increment_on(stream, a)
            other.wait(stream)
            using(other).__enter__()
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            capture(fail, a, warmup=0)
        assert not stream.capturing
        assert not other.capturing
        assert current_stream(device) == stream
        assert gc.isenabled()
        increment_on(other, a)
        other.synchronize(WATCHDOG)
        assert values(stream, a) == [1.0]
        graph = capture(increment_on, stream, a, warmup=0)
        graph.replay()
        assert values(stream, a) == [2.0]


def test_the_function_may_leave_another_stream_current(device: Device) -> None:
    with leased(device) as stream:
        a, other = make(stream, 0.0), Stream(device)

        def leave(a: Any) -> None:
            increment_on(stream, a)
            using(other).__enter__()

        graph = capture(leave, a, warmup=0)
        assert current_stream(device) == stream
        graph.replay()
        assert values(stream, a) == [1.0]


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_the_warm_up_runs_for_real(device: Device, warmup: int) -> None:
    with leased(device) as stream:
        a = make(stream, 0.0)
        calls = []

        def step(a: Any) -> None:
            calls.append(stream.capturing)
            increment_on(stream, a)

        capture(step, a, warmup=warmup)
        assert calls == [False] * warmup + [True]
        assert values(stream, a) == [float(warmup)]
        with pytest.raises(ArrayError, match="negative"):
            capture(step, a, warmup=-1)


def test_plain_code_runs_once_and_is_not_in_the_graph(device: Device) -> None:
    with leased(device) as stream:
        a = make(stream, 0.0)
        calls: list[int] = []

        def step(a: Any) -> int:
            calls.append(1)
            increment_on(stream, a)
            return len(calls)

        graph = capture(step, a, warmup=0)
        for _ in range(3):
            graph.replay()
        assert values(stream, a) == [3.0]
        assert (calls, graph.result) == ([1], 1)


def test_a_graph_is_replayed_on_any_stream_in_the_order_of_the_calls(device: Device) -> None:
    """New contents wait for the replay before, on another stream; without the edge that one finds them instead."""

    def run() -> list[float]:
        first, second, third = Stream(device), Stream(device), Stream(device)
        a, b = make(first, 1.0), make(first, 0.0)
        new = make(second, 5.0)
        with using(first):
            graph = capture(add_on, first, b, a)
            graph.replay()
            fill_on(first, b, 0.0)
            first.synchronize(WATCHDOG)
            with Latch(first):
                graph.replay()
                with using(second), assert_no_host_sync():
                    graph.replay(None, new)
                if "graph.order" in hooks.dropped:
                    if device.kind == "host":
                        second.synchronize(WATCHDOG)
                    with using(third):  # a GPU's driver lets the graph itself wait
                        eventually(lambda: read(a)[0] == 5.0, "the copy")
        first.synchronize(WATCHDOG)
        return values(second, b)

    assert run() == [6.0]
    with without("graph.order"):
        assert run() == [10.0]


def test_a_replay_elsewhere_does_not_overtake_who_reads_the_result(device: Device) -> None:
    """The second replay waits for what follows the first on its stream, not for that replay alone."""

    def run() -> list[float]:
        first, second = Stream(device), Stream(device)
        a, b, seen = make(first, 0.0), make(first, 0.0), make(first, 0.0)
        one, two = make(first, 1.0), make(first, 2.0)
        with using(first):
            graph = capture(copy_on, first, b, a, warmup=0)
            graph.replay(None, one)
            first.synchronize(WATCHDOG)
            with Latch(first):
                copy_on(first, seen, b)
                with using(second), assert_no_host_sync():
                    graph.replay(None, two)
                if "graph.order" in hooks.dropped:
                    second.synchronize(WATCHDOG)
        second.synchronize(WATCHDOG)
        assert values(second, b) == [2.0]
        return values(first, seen)

    assert run() == [1.0]
    with without("graph.order"):
        assert run() == [2.0]


def test_two_graphs_and_what_lies_between_run_in_stream_order(device: Device) -> None:
    with compute_stream(device=device) as found:
        assert found is not None
        stream: Stream = found
        a, b = make(stream, 0.0), make(stream, 0.0)
        one = capture(increment_on, stream, a, warmup=0)
        two = capture(double_on, stream, b, a, warmup=0)
        for _ in range(2):
            one.replay()
            two.replay()
            copy_on(stream, a, b)
        assert values(stream, a, b) == [6.0, 6.0]  # 1, 2, 3, 6


# new contents


def test_new_contents_are_copied_in_stream_order(device: Device) -> None:
    with leased(device) as stream:
        a, b, out = make(stream, 0.0), make(stream, 0.0), make(stream)

        def total(a: Any, b: Any) -> Any:
            copy_on(stream, out, a)
            add_on(stream, out, b)
            return out

        graph = capture(total, a, b)
        x, y = make(stream, 3.0), make(stream, 4.0)
        wide = make(stream, 8.0, n=512)
        with Latch(stream):
            fill_on(stream, x, 5.0)  # what comes before counts, what comes after does not
            graph.replay(x, y)
            fill_on(stream, x, 100.0)
            fill_on(stream, y, 100.0)
            del y
        assert values(stream, out, a, b) == [9.0, 5.0, 4.0]
        graph.replay(None, wide[::2])
        graph.replay(a, None)
        assert values(stream, out, b) == [13.0, 8.0]


def test_new_contents_may_be_dropped_at_once(device: Device) -> None:
    with leased(device) as stream:
        a, b = make(stream, 1.0), make(stream, 0.0)
        graph = capture(double_on, stream, b, a, warmup=0)
        new = arrays.array(np.full(256, 4.0, np.float32), device)
        where = address(new)
        stream.synchronize(WATCHDOG)
        with Latch(stream):
            graph.replay(None, new)
            del new
            gc.collect()
            others = [arrays.empty(256, "float32", device) for _ in range(16)]
            for other in others:
                if device.kind == "host":
                    assert address(other) != where
                    other[...] = 9.0
                else:  # the pool gives memory back in the order of this stream
                    fill_on(stream, other, 9.0)
        assert values(stream, b) == [8.0]


@pytest.mark.parametrize("device", FEW, indirect=True)
def test_new_contents_are_kept_where_the_launch_fails(device: Device) -> None:
    """Their copies are enqueued by then, and the next replay on another stream comes behind them."""

    class Failing:
        def launch(self, stream: int) -> None:
            raise DeviceError("no launch", code=1)

    with leased(device) as stream:
        a, b = make(stream, 1.0), make(stream, 0.0)
        graph = capture(double_on, stream, b, a, warmup=0)
        new, newer = make(stream, 4.0), make(stream, 5.0)
        stream.synchronize(WATCHDOG)
        watched, other, working = weakref.ref(new), Stream(device), graph._captured.executable
        with Latch(stream):
            graph._captured.executable = Failing()
            with pytest.raises(DeviceError, match="no launch"):
                graph.replay(None, new)
            graph._captured.executable = working
            del new
            settle()
            assert watched() is not None
            with using(other):
                graph.replay(None, newer)
            assert not other.query()
        eventually(lambda: settle() is None and watched() is None, "dropping the new contents")
        assert values(other, b) == [10.0]


MOVES: dict[str, Callable[[Any, Any], object]] = {
    "data": lambda x, other: setattr(x, "data", other),
    "set_": lambda x, other: x.set_(other),
}


@pytest.mark.parametrize("where", ON_ONE)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("as_argument", [True, False])
def test_an_array_of_torch_that_is_given_other_memory(where: str, move: str, as_argument: bool) -> None:
    """The graph keeps the memory of the capture, and no replay works on it unnoticed."""
    pytest.importorskip("torch")
    device = opened(where)
    if not library("torch").holds("float32", device):
        pytest.skip(library("torch").refusal("float32", device) or "")

    def tensor(value: float) -> Any:
        return arrays.array(np.full(ODD, value, np.float32), device, arrays="torch")

    with leased(device) as stream:
        x, out = tensor(3.0), tensor(0.0)
        taken, into = x.data_ptr(), out.data_ptr()

        def copied(x: Any) -> None:
            stream.copy(into, x.data_ptr(), 4 * ODD)

        def step(given: Any = x) -> None:
            copied(given)

        graph = capture(copied, x, warmup=0) if as_argument else capture(step, device=device, warmup=0)
        graph.replay()
        MOVES[move](x, tensor(7.0))
        which = "argument 0" if as_argument else "the function refers to"
        for new in ((), (tensor(9.0),))[: 1 + as_argument]:
            with pytest.raises(ArrayError, match=rf"{which} .*other memory"):
                graph.replay(*new)
        settle()
        others = [tensor(5.0) for _ in range(64)]
        assert taken not in {other.data_ptr() for other in others}
        stream.synchronize(WATCHDOG)
        assert float(arrays.to(out, "cpu")[0]) == 3.0


def test_one_of_many_arrays_that_is_given_other_memory_is_noticed() -> None:
    """A replay looks at a share of them, and always at those that it writes to."""
    torch = pytest.importorskip("torch")
    device = opened("host:0")
    with leased(device) as stream:
        many = [arrays.array(torch.zeros(4), device, arrays="torch") for _ in range(100)]
        other = arrays.array(torch.zeros(4), device, arrays="torch")
        graph = capture(lambda *each: increment_on(stream, each[0].numpy()), *many, warmup=0)
        many[90].data = other
        with pytest.raises(ArrayError, match=r"argument 90 .*other memory"):
            graph.replay(*[None] * 90, other.clone(), *[None] * 9)
        refusals = []
        for _ in range(7):
            try:
                graph.replay()
            except ArrayError as error:
                refusals.append(str(error).partition(" (")[0])
        assert refusals == ["argument 90"]


def test_what_does_not_fit_is_refused_before_anything_is_enqueued(device: Device) -> None:
    with leased(device) as stream:
        a, b = make(stream, 1.0), make(stream, 2.0)
        half = make(stream, 9.0, n=128)
        graph = capture(double_on, stream, b, a, warmup=0)
        good = make(stream, 7.0)
        stream.synchronize(WATCHDOG)
        plain = np.zeros(256, np.float32)
        integers = a.astype("int32")
        stream.synchronize(WATCHDOG)
        enqueued: list[hooks.Record] = []
        remove = hooks.listen(enqueued.append)
        try:
            for wrong, error, says in (
                ((good,), ArrayError, "1 arrays for 2"),
                ((good, half), ArrayError, r"static, and float32\[128\]"),
                ((good, integers), ArrayError, "int32"),
                ((good, [1.0]), ArrayError, "takes an array, not list"),
                ((good, plain), PlacementError, "move it with streamrt.to"),
                ((good, b), ArrayError, "overlap"),
                ((a, b), ArrayError, "argument 0 overlap"),
                ((None, b), ArrayError, "argument 1 overlap"),
            ):
                with pytest.raises(error, match=says):
                    graph.replay(*wrong)
        finally:
            remove()
        assert enqueued == []
        holes = make(stream, 1.0, n=512)[::2]
        with pytest.raises(ArrayError, match="has holes"):
            capture(double_on, stream, b, holes, warmup=0).replay(None, good)
        graph.replay(None, good)
        assert values(stream, b) == [14.0]


# what is refused, and what is not


class Setting:
    """What the operations of the table work with: the capturing stream, another one, and arrays."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.device = stream.device
        self.outside = Stream(self.device)
        self.mark = self.outside.record()
        self.event = streamrt.Event(self.device)
        self.x, self.y = make(stream, 1.0), make(stream, 0.0)
        self.spare = make(stream, 4.0)
        self.word = Word(Segment.create(4096, "graph"), 0, 32)
        self.timeline = Timeline(self.word)
        self.point = self.timeline.signal(self.outside)
        self.future: DeviceFuture[Any] = DeviceFuture()
        self.future.set_result(self.spare, streams=[self.outside])
        self.graph = capture(increment_on, stream, self.spare, warmup=0)
        stream.synchronize(WATCHDOG)
        self.outside.synchronize(WATCHDOG)

    def forked(self) -> None:
        side = Stream(self.device)
        side.wait(self.stream.record())
        copy_on(side, self.spare, self.x)
        self.stream.wait(side.record())

    def leased(self) -> None:
        with stream_pool(self.device).lease(exclusive=True) as lease:
            lease.stream.wait(self.stream)
            copy_on(lease.stream, self.spare, self.x)
            self.stream.wait(lease.stream)

    def dropped(self) -> None:
        temporary = make(self.stream)
        copy_on(self.stream, temporary, self.x)
        memory.use(temporary, self.stream)
        del temporary
        gc.collect()
        memory.drain(everything=True)

    def completed(self) -> None:
        future: DeviceFuture[Any] = DeviceFuture()
        future.set_result(self.x)
        future.result(WATCHDOG)

    def computed(self) -> None:
        with compute_stream(self.x) as stream:
            assert stream == self.stream
            copy_on(stream, self.spare, self.x)


CAPTURED: dict[str, Callable[[Setting], object]] = {
    "copy": lambda s: s.stream.copy(address(s.spare), address(s.x), 64),
    "copy_many": lambda s: copy_many(s.stream, [(address(s.spare), address(s.x), 64)]),
    "zero": lambda s: s.stream.zero(address(s.spare), 64),
    "launch": lambda s: copy_on(s.stream, s.spare, s.x),
    "record": lambda s: s.stream.record(),
    "wait for itself": lambda s: s.stream.wait(s.stream),
    "wait for its own event": lambda s: s.stream.wait(s.stream.record()),
    "fork and join": Setting.forked,
    "a lease": Setting.leased,
    "run_on": lambda s: run_on(Stream(s.device), copy_on, current_stream(s.device), s.spare, s.x),
    "compute_stream": Setting.computed,
    "memory, used and dropped": Setting.dropped,
    "a new stream and event": lambda s: Stream(s.device).record(),
    "query elsewhere": lambda s: s.outside.query() and s.mark.query(),
    "synchronize elsewhere": lambda s: (s.outside.synchronize(WATCHDOG), s.mark.synchronize(WATCHDOG)),
    "work elsewhere": lambda s: increment_on(s.outside, s.spare),
}
REFUSED: dict[str, Callable[[Setting], object]] = {
    "query": lambda s: s.stream.query(),
    "synchronize": lambda s: s.stream.synchronize(WATCHDOG),
    "query of an event inside": lambda s: s.stream.record().query(),
    "synchronize of an event inside": lambda s: s.stream.record().synchronize(WATCHDOG),
    "require of an event inside": lambda s: s.stream.record().require(),
    "wait for an event outside": lambda s: s.stream.wait(s.mark),
    "wait for a stream outside": lambda s: s.stream.wait(s.outside),
    "wait for a stream outside by an event": lambda s: s.stream.wait_by(s.event, s.outside),
    "a wait of the default stream": lambda s: Stream.borrow(0, s.device).wait(s.stream),
    "wait for a point": lambda s: s.stream.wait(s.point),
    "signal": lambda s: s.timeline.signal(s.stream),
    "a latch": lambda s: Latch(s.stream),
    "a snapshot": lambda s: memory.snapshot([s.x]),
    "a future's result": Setting.completed,
    "the result of a future": lambda s: s.future.result(WATCHDOG),
    "an input of another stream": lambda s: compute_stream((s.x, s.outside)).__enter__(),
    "to ordinary memory": lambda s: arrays.to(s.x, "cpu"),
    "from ordinary memory": lambda s: arrays.array(np.ones(4, np.float32), s.device),
    "a capture": lambda s: capture(increment_on, s.stream, s.x, warmup=0),
    "a capture of another stream": lambda s: using(s.outside)(capture)(increment_on, s.outside, s.x, warmup=0),
    "a replay": lambda s: s.graph.replay(),
}


@pytest.mark.parametrize("operation", CAPTURED)
def test_an_operation_that_may_be_part_of_a_capture(device: Device, operation: str) -> None:
    with leased(device) as stream:
        setting = Setting(stream)

        def step(x: Any, y: Any) -> None:
            CAPTURED[operation](setting)
            double_on(stream, y, x)

        graph = capture(step, setting.x, setting.y, warmup=0)
        graph.replay()
        graph.replay()
        assert values(stream, setting.y) == [2.0]
        setting.outside.synchronize(WATCHDOG)


@pytest.mark.parametrize("operation", REFUSED)
def test_an_operation_that_is_refused_leaves_the_capture_be(device: Device, operation: str) -> None:
    with leased(device) as stream:
        setting = Setting(stream)
        seen = []

        def step(x: Any, y: Any) -> None:
            increment_on(stream, x)
            with pytest.raises(CaptureError) as caught:
                REFUSED[operation](setting)
            seen.append(str(caught.value))
            assert stream.capturing
            double_on(stream, y, x)

        graph = capture(step, setting.x, setting.y, warmup=0)
        graph.replay()
        assert values(stream, setting.x, setting.y) == [2.0, 4.0]
        assert len(seen) == 1
        if operation != "a capture of another stream":  # that one is real work, outside
            assert not setting.outside.capturing
        if operation not in ("a latch", "an input of another stream", "a replay"):
            REFUSED[operation](setting)  # outside of a capture it is what it always was


def test_an_event_of_a_capture_marks_nothing_outside(device: Device) -> None:
    with leased(device) as stream:
        a = make(stream, 0.0)
        event, other = streamrt.Event(device), streamrt.Event(device)

        def step(a: Any) -> None:
            increment_on(stream, a)
            stream.record(event)
            stream.record(other)

        graph = capture(step, a, warmup=0)
        for wrong in (event.query, event.require, lambda: event.synchronize(WATCHDOG)):
            with pytest.raises(CaptureError, match="recorded inside a capture"):
                wrong()
        with pytest.raises(CaptureError, match="has ended"):
            stream.wait(event)
        graph.replay()
        stream.record(event)
        event.synchronize(WATCHDOG)
        Stream(device).wait_by(other, stream)
        other.synchronize(WATCHDOG)
        assert values(stream, a) == [1.0]


def test_an_event_of_a_capture_keeps_nothing_of_it(device: Device) -> None:
    with leased(device) as stream:
        a = make(stream, 0.0)
        watched, event = weakref.ref(a), streamrt.Event(device)

        def step(a: Any) -> None:
            increment_on(stream, a)
            stream.record(event)

        capture(step, a, warmup=0)
        del a
        eventually(lambda: gc.collect() >= 0 and watched() is None, "dropping the argument")
        with pytest.raises(CaptureError):
            event.query()


def test_what_can_be_captured_at_all(device: Device) -> None:
    with using(Stream.borrow(0, device)):
        a = make(Stream(device), 0.0)
        with pytest.raises(CaptureError, match="compute_stream"):
            capture(increment, a)
    with leased(device) as stream:
        for nothing in ((), (np.zeros(4),), ("text", 1)):
            with pytest.raises(PlacementError, match="device="):
                capture(lambda *_: None, *nothing)
        with pytest.raises(PlacementError, match="cpu has no streams"):
            capture(lambda: None, device="cpu")
        graph = capture(lambda: increment_on(stream, a), device=device, warmup=0)
        graph.replay()
        assert values(stream, a) == [1.0]
        assert graph.arguments == ()


def test_a_capturing_stream_is_not_leased(device: Device) -> None:
    """pytorch/pytorch#114320: on both backends."""
    pool = StreamPool(device, 2)
    first, second = pool.lease(), pool.lease()
    with using(first.stream):
        a = make(first.stream, 0.0)

        def step(a: Any) -> None:
            first.release()
            second.release()
            for _ in range(4):
                with pool.lease() as lease:
                    assert lease.stream == second.stream
            increment_on(first.stream, a)

        graph = capture(step, a, warmup=0)
        with pool.lease() as one, pool.lease() as two:
            assert {one.stream, two.stream} == {first.stream, second.stream}
        graph.replay()
        assert values(first.stream, a) == [1.0]


# what lives how long

ODD = 6000  # elements: no other test's memory is of this size


def handed_out(stream: Stream, n: int = 512) -> set[int]:
    """The addresses of as many new arrays of the size of `make`, of all that was given back."""
    settle()
    return {address(array) for array in [make(stream, n=ODD) for _ in range(n)]}


def settle() -> None:
    """Gives back what nobody uses any more."""
    gc.collect()
    memory.drain(everything=True)
    memory.drain(everything=True)


def through_a_temporary(stream: Stream, a: Any) -> tuple[Graph[Any], list[int]]:
    """A graph whose result is twice the argument, and where its temporary was."""
    where: list[int] = []

    def step(a: Any) -> Any:
        temporary, result = memory.allocate(stream.device, 4 * ODD, stream), make(stream, n=ODD)
        stream.copy(temporary.address, address(a), 4 * ODD)  # by addresses: no closure keeps it
        stream.copy(address(result), temporary.address, 4 * ODD)
        double_on(stream, result, result)
        where.append(temporary.address)
        return result

    return capture(step, a, warmup=0), where


@pytest.mark.parametrize("device", FEW, indirect=True)
def test_temporaries_are_nobody_elses_while_the_graph_lives(device: Device) -> None:
    """The same memory is handed out at once when the graph is gone, so it was free."""
    with leased(device) as stream:
        a = make(stream, 1.0, n=ODD)
        graph, where = through_a_temporary(stream, a)
        assert where[0] not in handed_out(stream)
        for array in [make(stream, n=ODD) for _ in range(64)]:
            fill_on(stream, array, 9.0)
        graph.replay()
        assert values(stream, graph.result) == [2.0]
        del graph, array
        eventually(lambda: where[0] in handed_out(stream), "giving the temporary back")


@pytest.mark.parametrize("device", FEW, indirect=True)
def test_a_graph_that_is_dropped_while_it_runs_keeps_its_memory(device: Device) -> None:
    with leased(device) as stream:
        a, out = make(stream, 1.0, n=ODD), make(stream, 0.0, n=ODD)
        watched = weakref.ref(a)
        other = Stream(device)
        graph, where = through_a_temporary(stream, a)
        handed_out(other)  # takes what it needs from the driver before the latch
        with using(other), Latch(other) as latch:
            graph.replay()
            copy_on(other, out, graph.result)
            taken = address(graph.result)
            del graph, a
            gc.collect()
            memory.drain(everything=True)
            assert watched() is not None
            assert not {where[0], taken} & (handed_out(stream) | handed_out(other))
            latch.open()
        assert values(other, out) == [2.0]
        eventually(lambda: {where[0], taken} <= handed_out(stream, 2048), "giving the memory back")
        assert watched() is None


@pytest.mark.parametrize("device", FEW, indirect=True)
def test_the_result_outlives_the_graph(device: Device) -> None:
    with leased(device) as stream:
        a = make(stream, 2.0, n=ODD)
        graph, where = through_a_temporary(stream, a)
        graph.replay()
        result = graph.result
        stream.synchronize(WATCHDOG)
        del graph
        eventually(lambda: where[0] in handed_out(stream), "giving the temporary back")
        assert address(result) not in handed_out(stream)
        for array in [make(stream, n=ODD) for _ in range(64)]:
            fill_on(stream, array, 9.0)
        assert values(stream, result) == [4.0]


@pytest.mark.parametrize("device", FEW, indirect=True)
def test_a_graph_keeps_what_the_function_lets_go_of(device: Device) -> None:
    """An array of its closure, which is given another value."""
    with leased(device) as stream:
        a, out = make(stream, 1.0, n=ODD), make(stream, 0.0, n=ODD)
        weights: Any = make(stream, 3.0, n=ODD)
        where = address(weights)

        def step(a: Any) -> None:
            stream.copy(address(out), address(weights), 4 * ODD)
            add_on(stream, out, a)

        graph = capture(step, a)
        weights = None
        assert where not in handed_out(stream)
        for array in [make(stream, n=ODD) for _ in range(64)]:
            fill_on(stream, array, 9.0)
        graph.replay()
        assert values(stream, out) == [4.0]


class Engine:
    """It keeps the graph of a method of its own, so the graph refers to itself."""

    def __init__(self, stream: Stream, a: Any) -> None:
        self.stream = stream
        self.weights, self.out = make(stream, 3.0, n=ODD), make(stream, 0.0, n=ODD)
        self.graph: Graph[None] = capture(self.forward, a)

    def forward(self, a: Any) -> None:
        copy_on(self.stream, self.out, self.weights)
        add_on(self.stream, self.out, a)


@pytest.mark.parametrize("device", FEW, indirect=True)
def test_an_engine_with_a_graph_of_its_own_lives_as_long_as_its_replays(device: Device) -> None:
    with leased(device) as stream:
        a, seen = make(stream, 1.0, n=ODD), make(stream, 0.0, n=ODD)
        engine = Engine(stream, a)
        other = Stream(device)
        watched, kept = weakref.ref(engine), {address(engine.weights), address(engine.out)}
        with using(other), Latch(other):
            engine.graph.replay()
            copy_on(other, seen, engine.out)
            memory.use(engine.out, other)
            del engine
            assert not kept & handed_out(stream)
            assert watched() is not None
        assert values(other, seen) == [4.0]
        eventually(lambda: settle() is None and watched() is None, "dropping the engine")


@pytest.mark.parametrize("device", FEW, indirect=True)
def test_nothing_is_left_of_graphs(device: Device) -> None:
    with leased(device) as stream:
        a = make(stream, 0.0, n=ODD)
        engines: list[weakref.ref[Engine]] = []

        def once() -> None:
            graph, _ = through_a_temporary(stream, a)
            graph.replay(None)
            engine = Engine(stream, a)
            engines.append(weakref.ref(engine))
            engine.graph.replay(a)
            with using(Stream(device)):
                engine.graph.replay()
            with pytest.raises(CaptureError):
                capture(lambda a: stream.query(), a, warmup=0)

        once()
        stream.synchronize(WATCHDOG)
        settle()
        before = memory.statistics()
        for _ in range(5):
            once()
        stream.synchronize(WATCHDOG)

        def all_back() -> bool:
            settle()
            now = memory.statistics()
            gone = not any(engine() for engine in engines)
            return gone and now.live <= before.live and now.held_arrays <= before.held_arrays

        eventually(all_back, "giving everything back")
        assert not device.backend.captures.active


# other threads


@pytest.mark.parametrize("where", ON_ONE)
def test_other_threads_work_while_one_captures(where: str) -> None:
    """Copies, events, leases, memory and drains of another thread, before, in and after a capture, on other streams."""
    device = opened(where)
    stop = threading.Event()
    rounds: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            device.backend.agent_thread(device.index)
            with leased(device) as stream:
                a, b = make(stream, 1.0), make(stream, 0.0)
                while not stop.is_set():
                    copy_on(stream, b, make(stream, 2.0))
                    memory.use(a, stream)
                    stream.record().synchronize(WATCHDOG)
                    assert values(stream, b) == [2.0]
                    rounds.append(1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with leased(device) as stream:
            a = make(stream, 0.0)

            def step(a: Any) -> None:
                before = len(rounds)
                increment_on(stream, a)
                while len(rounds) < before + 4 and not failures:
                    increment_gap.wait(0.001)
                increment_on(stream, a)

            increment_gap = threading.Event()
            for _ in range(3):
                graph = capture(step, a, warmup=0)
                graph.replay()
            assert values(stream, a) == [6.0]
    finally:
        stop.set()
        for thread in threads:
            thread.join(WATCHDOG)
    assert failures == []


def test_two_threads_capture_at_once(device: Device) -> None:
    if device.kind == "host" and not device.backend.machine.schedule.threaded:  # type: ignore[attr-defined]
        pytest.skip("one thread drives this schedule")
    both = threading.Barrier(2)
    results: list[float] = []

    def work() -> None:
        with leased(device) as stream:
            a = make(stream, 0.0)

            def step(a: Any) -> None:
                both.wait(WATCHDOG)
                increment_on(stream, a)
                both.wait(WATCHDOG)

            graph = capture(step, a, warmup=0)
            graph.replay()
            results.extend(values(stream, a))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG)
    assert results == [1.0, 1.0]
    assert gc.isenabled()


@contextmanager
def capture_before_the_next_record(stream: Stream) -> Iterator[threading.Event]:
    """Another thread captures on the stream from this thread's next record there until the event is set."""
    began, go = threading.Event(), threading.Event()
    plain, here = Stream.record, threading.get_ident()
    spare = memory.allocate(stream.device, 64, stream)

    def step() -> None:
        stream.zero(spare.address, 64)
        began.set()
        go.wait(WATCHDOG)

    def work() -> None:
        with using(stream):
            capture(step, device=stream.device, warmup=0)

    thread = threading.Thread(target=work)

    def record(self: Stream, event: Any = None) -> Any:
        if self == stream and threading.get_ident() == here and not began.is_set():
            thread.start()
            assert began.wait(WATCHDOG)
        return plain(self, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "record", record)
        try:
            yield go
        finally:
            go.set()
            if thread.ident is not None:
                thread.join(WATCHDOG)


@pytest.mark.parametrize("where", ON_ONE)
@pytest.mark.parametrize("kind", ["an object", "a buffer"])
def test_a_capture_may_begin_while_memory_is_given_back(where: str, kind: str) -> None:
    """The record that was to say when is part of the capture then, and another is made when that is over."""
    device = opened(where)

    class Kept:
        pass

    stream, other = Stream(device), Stream(device)
    with using(stream):  # whoever captures is ready before the latch
        capture(increment_on, stream, make(stream, 0.0))
    kept: Any = Kept() if kind == "an object" else memory.allocate(device, 4 * ODD, stream)
    gone = weakref.ref(kept)
    where_from = 0 if kind == "an object" else kept.address
    with Latch(stream):
        memory.hold(kept, stream) if kind == "an object" else kept.use(stream)
        if kind == "a buffer":
            kept.use(other)
            with Latch(other), capture_before_the_next_record(other) as go:
                del kept
                memory.drain(everything=True)
                memory.allocate(device, 16, stream)
                go.set()
        else:
            with capture_before_the_next_record(stream) as go:
                del kept
                memory.drain(everything=True)
                memory.allocate(device, 16, other)
                assert gone() is not None
                go.set()
        for _ in range(3):
            memory.allocate(device, 16, other)
    eventually(lambda: settle() is None and gone() is None, "giving it back")
    if where_from:
        eventually(lambda: where_from in handed_out(stream, 2048), "giving the buffer back")


@pytest.mark.parametrize("where", ON_ONE)
def test_a_capture_may_begin_while_a_graph_is_replayed(where: str) -> None:
    """That replay may be part of the other graph, and says so; the next ones are none of its business."""
    device = opened(where)
    stream, other = Stream(device), Stream(device)
    a = make(stream, 0.0)
    with using(stream):
        graph = capture(increment_on, stream, a, warmup=0)
        graph.replay()
        with capture_before_the_next_record(stream) as go:
            with pytest.raises(CaptureError, match="another thread captures"):
                graph.replay()
            with using(other), pytest.raises(CaptureError, match="another thread captures"):
                graph.replay()
            go.set()
    with using(other):
        before = values(stream, a)[0]
        graph.replay()
    with using(stream):
        graph.replay()
    assert values(stream, a) == [before + 2]


# the host backend's own


def test_a_failed_operation_fails_the_streams_of_its_replay() -> None:
    device = opened("host:0")

    def fail() -> None:
        raise ZeroDivisionError("in the graph")

    stream, other = Stream(device), Stream(device)

    def step() -> None:
        side = Stream(device)
        side.wait(stream)
        side.launch(fail)
        stream.wait(side)

    with schedules("threads"):
        with using(stream):
            graph = capture(step, device=device, warmup=0)
        with using(other):
            graph.replay()
        with pytest.raises(DeviceError, match="ZeroDivisionError"):
            other.synchronize(WATCHDOG)
        assert stream.query()


def test_what_enqueues_nothing_is_no_graph() -> None:
    """Plain code runs at once on the host backend; a graph of nothing would do nothing, in silence."""
    device = opened("host:0")

    def steps(a: Any) -> Iterator[None]:
        yield increment(a)

    async def coroutine(a: Any) -> None:
        increment(a)

    with leased(device) as stream:
        a = make(stream, 1.0)
        with pytest.raises(CaptureError, match="launch"):
            capture(increment, a)
        for stepwise in (steps, coroutine):
            with pytest.raises(CaptureError, match="step by step"):
                capture(stepwise, a)
        assert not stream.capturing


def test_jax_is_refused() -> None:
    """It computes on streams of its own, so what it does would be outside of the graph."""
    jax = pytest.importorskip("jax")
    device = opened("host:0")
    with leased(device) as stream:
        a = make(stream, 1.0)
        theirs = jax.numpy.ones(4)
        with pytest.raises(CaptureError, match=r"convert the array before"):
            capture(lambda a, b: None, a, theirs)
        with pytest.raises(CaptureError, match=r"convert the array before"):
            capture(lambda a: theirs, a)
        with pytest.raises(CaptureError, match="convert the array before"):
            capture(lambda a: arrays.convert(a, "jax"), a, warmup=0)
        with pytest.raises(CaptureError, match="returned a JAX array"):
            capture(lambda a: jax.numpy.ones(4), a, warmup=0)
        assert not stream.capturing
        shown = arrays.convert(make(stream, 5.0), "jax")
        graph = capture(increment_on, stream, a, warmup=0)
        graph.replay(None, shown) if len(graph.arguments) > 1 else graph.replay(shown)
        assert values(stream, a) == [6.0]
