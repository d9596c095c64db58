"""The pipeline over fake workers: threads of this process that have a peer's surface, driven by latches."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import transport
from streamrt.callbacks import DEFAULT_THREADS
from streamrt.errors import ClosedError
from streamrt.future import DeviceFuture
from transport.errors import LocalProtocolError, PeerLostError
from transport.pipeline import StageError, pipeline, stage
from transport.stage_times import Meter

WATCHDOG = 20.0


class FakeFuture(Future[Any]):
    """A future with `then`, run on a pool that only forwards."""

    forwarder: ThreadPoolExecutor

    def then(self, function: Callable[[Any], Any]) -> Future[Any]:
        """Calls `function` with the value on the forwarder, if there is a value."""
        child: Future[Any] = Future()

        def run(value: Any) -> None:
            try:
                child.set_result(function(value))
            except Exception as error:
                child.set_exception(error)

        def forward(done: Future[Any]) -> None:
            if done.cancelled():
                child.cancel()
            elif (error := done.exception()) is not None:
                child.set_exception(error)
            else:
                self.forwarder.submit(run, done.result())

        self.add_done_callback(forward)
        return child


class FakePeer:
    """One worker thread that serves calls in their order, as a worker of one thread does."""

    future_class = FakeFuture
    closed = False
    pid = 0

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.forwarder = ThreadPoolExecutor(1)
        self.calls: list[FakeFuture] = []
        self.copied: list[bool] = []
        self.refuse: Exception | None = None

    def submit(self, function: Any, /, *arguments: Any, timeout: float | None = None, copy: bool = True) -> FakeFuture:
        """Runs `function(*arguments)` on the thread; a name is looked up in `builtins` of a kind."""
        self.copied.append(copy)
        if self.refuse is not None:
            raise self.refuse
        if isinstance(function, str):
            function = {"double": double}[function]
        future = self.future_class()
        future.forwarder = self.forwarder
        self.calls.append(future)

        def serve() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = function(*arguments)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        self.executor.submit(serve)
        return future

    def shutdown(self) -> None:
        """Ends both threads once they have nothing to do."""
        self.executor.shutdown()
        self.forwarder.shutdown()


@pytest.fixture
def peers() -> Iterator[list[FakePeer]]:
    made = [FakePeer() for _ in range(3)]
    yield made
    for peer in made:
        peer.shutdown()


def double(value: int) -> int:
    return 2 * value


def increment(value: int) -> int:
    return value + 1


class Counted:
    """A source that counts what was pulled from it."""

    def __init__(self, count: int | None = None) -> None:
        self.numbers = itertools.count() if count is None else iter(range(count))
        self.pulled = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = next(self.numbers)
        self.pulled += 1
        return number


def until(condition: Callable[[], bool]) -> None:
    """Polls a condition, and fails when the watchdog barks."""
    limit = time.monotonic() + WATCHDOG
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < limit, "the condition never came true"
        pause.wait(0.001)


def test_frames_pass_all_stages_in_order(peers: list[FakePeer]) -> None:
    stages = [stage(double, peer=peers[0]), stage(increment, peer=peers[1]), stage(double, peer=peers[2])]
    with pipeline(*stages, in_flight=4) as chain:
        assert list(chain.map(range(50))) == [2 * (2 * n + 1) for n in range(50)]
        assert list(chain.map([])) == []
        assert list(chain.map([5])) == [22]


def test_only_frames_of_the_source_are_copied(peers: list[FakePeer]) -> None:
    with pipeline(stage(double, peer=peers[0]), stage(double, peer=peers[1])) as chain:
        assert list(chain.map([1])) == list(chain.map([1], copy=False)) == [4]
        with pytest.raises(transport.LocalProtocolError, match="copy='no' is neither True nor False"):
            chain.map([1], copy="no")  # type: ignore[arg-type]
    assert (peers[0].copied, peers[1].copied) == ([True, False], [False, False])


def test_functions_by_name_run_at_the_peer_and_are_measured_by_the_caller(peers: list[FakePeer]) -> None:
    with pipeline(stage("double", peer=peers[0]), in_flight=2) as chain:
        assert list(chain.map(range(5))) == [0, 2, 4, 6, 8]
        (only,) = chain.statistics().stages
    assert (only.name, only.frames) == ("double", 5)
    assert only.busy > 0


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_never_more_than_in_flight_and_a_slow_consumer_stops_the_source(peers: list[FakePeer], in_flight: int) -> None:
    source = Counted()
    taken = 0
    with pipeline(stage(double, peer=peers[0]), stage(increment, peer=peers[1]), in_flight=in_flight) as chain:
        run = chain.map(source)
        for value in run:
            assert value == 2 * taken + 1
            assert taken < source.pulled <= taken + in_flight
            until(lambda: len(peers[1].calls) == source.pulled)  # frames move on although the consumer is slow ...
            assert source.pulled <= taken + in_flight  # ... and the source stands still
            taken += 1
            if taken == 20:
                break
        assert chain.statistics().most_in_flight == in_flight


def test_a_result_that_is_there_goes_before_the_next_frame_of_the_source(peers: list[FakePeer]) -> None:
    gate = threading.Event()

    def held(value: int) -> int:
        assert gate.wait(WATCHDOG)
        return value

    def source() -> Iterator[int]:
        yield 1
        gate.set()
        peers[0].executor.submit(int).result(WATCHDOG)  # the only thread: the first frame and its callbacks are done
        yield 2
        raise AssertionError("pulled although a result was ready")

    with pipeline(stage(held, peer=peers[0]), in_flight=8) as chain:
        assert next(chain.map(source())) == 1


def test_ordered_holds_back_what_overtook_and_unordered_does_not(peers: list[FakePeer]) -> None:
    gate = threading.Event()

    class TwoThreads(FakePeer):
        def __init__(self) -> None:
            super().__init__()
            self.executor = ThreadPoolExecutor(2)

    def slow_first(value: int) -> int:
        if value == 0:
            assert gate.wait(WATCHDOG)
        return value

    peer = TwoThreads()
    try:
        with pipeline(stage(slow_first, peer=peer), in_flight=3) as chain:
            run = chain.map(range(3), ordered=False)
            assert [next(run), next(run)] == [1, 2]
            gate.set()
            assert list(run) == [0]
            gate.clear()
            ordered = chain.map(range(3))
            threading.Thread(target=lambda: (until(lambda: peer.calls[-1].done()), gate.set())).start()
            assert list(ordered) == [0, 1, 2]
    finally:
        gate.set()
        peer.shutdown()


def fails_on_three(value: int) -> int:
    if value == 3:
        raise ValueError("three")
    return value


def test_an_error_names_stage_and_frame_and_the_others_go_on(peers: list[FakePeer]) -> None:
    stages = [stage(increment, peer=peers[0]), stage(fails_on_three, peer=peers[1]), stage(double, peer=peers[2])]
    with pipeline(*stages, in_flight=4) as chain:
        run = chain.map(range(6))
        assert [next(run), next(run)] == [2, 4]
        with pytest.raises(StageError, match="stage 'fails_on_three' failed on frame 2: ValueError: three") as caught:
            next(run)
        assert (caught.value.stage, caught.value.frame) == ("fails_on_three", 2)
        assert isinstance(caught.value.__cause__, ValueError)
        assert list(run) == [8, 10, 12]
        statistics = chain.statistics()
        assert (statistics.frames, statistics.failed) == (5, 1)
        assert [each.frames for each in statistics.stages] == [6, 5, 5]


def test_an_error_of_the_last_stage_and_of_a_refused_call(peers: list[FakePeer]) -> None:
    with pipeline(stage(increment, peer=peers[0]), stage(fails_on_three, name="last", peer=peers[1])) as chain:
        run = chain.map(range(4))
        assert [next(run), next(run)] == [1, 2]
        with pytest.raises(StageError, match="stage 'last' failed on frame 2"):
            next(run)
        assert next(run) == 4
        peers[1].refuse = ClosedError("gone")
        with pytest.raises(StageError, match="stage 'last' failed on frame 0: ClosedError: gone"):
            next(chain.map([1]))
        peers[0].refuse = ClosedError("gone too")
        with pytest.raises(StageError, match="stage 'increment' failed on frame 0"):
            next(chain.map([1]))


class LosingFuture(FakeFuture):
    """What arrived is lost before it can be used."""

    def then(self, function: Callable[[Any], Any]) -> Future[Any]:
        """A child that fails."""

        def lose(_: Any) -> None:
            raise ClosedError("lost on the way")

        return super().then(lose)


def test_a_frame_whose_value_is_lost_between_two_stages_ends(peers: list[FakePeer]) -> None:
    peers[0].future_class = LosingFuture
    with pipeline(stage(double, peer=peers[0]), stage(double, peer=peers[1])) as chain:
        with pytest.raises(StageError, match="stage 'double' failed on frame 0: ClosedError: lost on the way"):
            next(chain.map([1]))


def test_the_sources_error_comes_after_the_frames_before_it(peers: list[FakePeer]) -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("no more frames")

    with pipeline(stage(double, peer=peers[0])) as chain:
        run = chain.map(source())
        assert [next(run), next(run)] == [2, 4]
        with pytest.raises(OSError, match="no more frames"):
            next(run)
        assert list(run) == []


def test_close_cancels_what_is_open_and_nothing_moves_on(peers: list[FakePeer]) -> None:
    gate, entered = threading.Event(), threading.Event()

    def held(value: int) -> int:
        entered.set()
        assert gate.wait(WATCHDOG)
        return value

    source = Counted()
    with pipeline(stage(held, peer=peers[0]), stage(double, peer=peers[1]), in_flight=3) as chain:
        run = chain.map(source)
        consumer = threading.Thread(target=lambda: list(run))
        consumer.start()
        assert entered.wait(WATCHDOG)
        until(lambda: len(peers[0].calls) == 3)
        run.close()
        run.close()
        consumer.join(WATCHDOG)
        assert not consumer.is_alive(), "close() has to wake a consumer that waits"
        gate.set()
        until(lambda: peers[0].calls[0].done())
        assert [call.cancelled() for call in peers[0].calls] == [False, True, True]
        assert source.pulled == 3
        assert list(run) == []
    peers[0].forwarder.submit(int).result(WATCHDOG)
    assert not peers[1].calls


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_leaving_the_pipeline_by_an_exception_ends_its_runs(peers: list[FakePeer], error: type[BaseException]) -> None:
    with pytest.raises(error), pipeline(stage(double, peer=peers[0]), in_flight=2) as chain:
        for _ in chain.map(Counted()):
            raise error
    assert chain._runs[-1].closed
    with pytest.raises(ClosedError, match="not running"):
        chain.map([1])


def test_a_stages_times_have_no_rest_and_sum_to_the_elapsed_time(peers: list[FakePeer]) -> None:
    with pipeline(stage(double, peer=peers[0]), stage(increment, peer=peers[1]), in_flight=2) as chain:
        assert len(list(chain.map(range(40)))) == 40
        statistics = chain.statistics()
    assert statistics.frames == len(statistics.latencies) == 40
    assert 0 < statistics.latency(50) <= statistics.latency(99) <= statistics.latencies[-1] <= statistics.elapsed
    for each in statistics.stages:
        parts = (each.busy, each.waiting_input, each.waiting_credit, each.transfer)
        assert all(part >= 0 for part in parts)
        assert each.busy > 0
        assert sum(parts) == pytest.approx(each.elapsed)
        assert each.rate == pytest.approx(40 / each.elapsed)


def test_idle_time_goes_to_what_it_waited_for() -> None:
    meter = Meter(began=0.0, last=0.0)
    meter.add(2.0, 5.0, 9.0, 19.0)  # room at 2, pulled by 5, under way until 9, busy until 19
    assert (meter.waiting_credit, meter.waiting_input, meter.transfer, meter.busy) == (2.0, 3.0, 4.0, 10.0)
    meter.add(2.0, 12.0, 19.5, 20.0)  # all of the way but 0.5 was hidden behind the call before
    assert (meter.waiting_credit, meter.waiting_input, meter.transfer, meter.busy) == (2.0, 3.0, 4.5, 10.5)
    meter.add(2.0, 12.0, 18.0, 19.0)  # overlapped: counted once
    assert (meter.busy, meter.last, meter.frames) == (10.5, 20.0, 3)


def test_a_function_of_a_peers_service_by_itself() -> None:
    service = transport.Service()
    service.function(increment)
    with transport.loopback(service) as peer, pipeline(stage(increment, peer=peer)) as chain:
        assert list(chain.map(range(4))) == [1, 2, 3, 4]
        with pytest.raises(StageError, match=r"stage 'double' failed .* no function 'double' here"):
            with pipeline(stage(double, peer=peer)) as other:
                next(other.map([1]))


def test_pipelines_that_are_consumed_by_continuations_leave_threads_for_their_own() -> None:
    """As many as the shared pool has threads: their frames are moved on by continuations, too."""
    service = transport.Service()
    service.function(increment)
    with transport.loopback(service, threads=2) as peer:

        def consume(count: int) -> int:
            with pipeline(stage("increment", peer=peer), stage("increment", peer=peer)) as chain:
                return sum(chain.map(range(count)))

        results = []
        for _ in range(DEFAULT_THREADS + 1):
            count: DeviceFuture[int] = DeviceFuture()
            results.append(count.then(consume))
            count.set_result(10)
        assert [result.result(WATCHDOG) for result in results] == [65] * len(results)


async def later(value: int) -> int:
    return value


def test_what_a_pipeline_looks_like(peers: list[FakePeer]) -> None:
    chain = pipeline(stage(double, peer=peers[0]), stage("double", name="again", peer=peers[1]), in_flight=3)
    assert repr(chain) == "<Pipeline double -> again, 3 in flight, not running>"
    with chain:
        assert repr(chain) == "<Pipeline double -> again, 3 in flight, running>"


def test_wrong_use_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        pipeline()
    with pytest.raises(ValueError, match="in_flight is 0"):
        pipeline(double, in_flight=0)
    with pytest.raises(ValueError, match="pass peer="):
        stage("double")
    with pytest.raises(ClosedError, match="not running"):
        pipeline(double).map([1])
    with pytest.raises(LocalProtocolError, match="later is an async function"):
        pipeline(later)
    assert stage(double).name == "double"
    assert stage(double, name="twice").name == "twice"


def scale(image: Any) -> Any:
    return image * np.float32(2)


def refuse_threes(image: Any) -> Any:
    if image[0, 0] == 6:
        raise ValueError("a six")
    return {"image": image, "sum": image.sum(axis=0)}


def total(found: dict[str, Any]) -> Any:
    return found["image"].sum(axis=0) - found["sum"]


def test_real_workers_carry_arrays_and_errors_from_stage_to_stage() -> None:
    frames = [np.full((300, 400), number, np.float32) for number in range(6)]
    with pipeline(scale, refuse_threes, lambda found: (found["image"], total(found)), in_flight=3, timeout=60) as chain:
        run = chain.map(frames)
        for number in (0, 1, 2):
            image, difference = next(run)
            np.testing.assert_array_equal(image, 2 * frames[number])
            assert not difference.any()
        with pytest.raises(StageError, match="stage 'refuse_threes' failed on frame 3") as caught:
            next(run)
        assert isinstance(caught.value.__cause__, ValueError)
        assert [float(image[0, 0]) for image, _ in run] == [8.0, 10.0]
        statistics = chain.statistics()
    assert statistics.most_in_flight == 3
    for each in statistics.stages:
        parts = (each.busy, each.waiting_input, each.waiting_credit, each.transfer)
        assert sum(parts) == pytest.approx(each.elapsed)
        assert min(parts) >= 0


def test_a_killed_worker_fails_its_frames_and_nothing_hangs() -> None:
    with pipeline(scale, scale, in_flight=4, timeout=60) as chain:
        run = chain.map(np.full((8, 8), number, np.float32) for number in itertools.count())
        assert next(run)[0, 0] == 0
        worker: Any = chain.peers[1]
        worker.kill()
        errors: list[StageError] = []
        while len(errors) < 8:  # a few frames were through before
            try:
                next(run)
            except StageError as error:
                errors.append(error)
    assert all(isinstance(error.__cause__, PeerLostError | ClosedError) for error in errors)


def test_a_map_that_outlives_its_pipeline_says_so() -> None:
    """Its frames would be missed by nobody."""
    with pipeline(increased, in_flight=2) as chain:
        whole = list(chain.map(iter(range(3))))
        begun, untouched = chain.map(iter(range(5))), chain.map(iter(range(3)))
        next(begun)
        given_up = chain.map(iter(range(3)))
        given_up.close()
    assert whole == [1, 2, 3]
    for run in (begun, untouched):
        with pytest.raises(ClosedError, match="the pipeline has ended, and this map with it"):
            next(run)
    assert list(given_up) == []


def increased(x: int) -> int:
    return x + 1
