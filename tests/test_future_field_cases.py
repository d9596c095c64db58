"""What went wrong with futures and callbacks elsewhere, each case under its label, with its report."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from device_arrays import ON_ONE, ON_TWO, WATCHDOG, copy_on, double, eventually, fill_on, make, opened, read

from streamrt.callbacks import CallbackPool
from streamrt.device import Device, current_devices
from streamrt.future import DeviceFuture, wait_all
from streamrt.guard import current_stream, device_guard, using
from streamrt.libraries import nesting
from streamrt.stream import Stream
from streamrt.testing import Latch, without


@pytest.mark.parametrize("kind", ON_TWO)
def test_b15_a_callback_sees_the_device_current_at_the_completion(kind: str) -> None:
    """pytorch/pytorch#48789: it saw whatever device its thread had used last."""
    first, second = opened(f"{kind}:0"), opened(f"{kind}:1")
    future: DeviceFuture[None] = DeviceFuture()
    with ThreadPoolExecutor(1) as pool:

        def current() -> Device:
            return next(device for device in current_devices() if device.kind == first.kind)

        assert pool.submit(current).result() == first
        child = future.then(lambda _: (current(), current_stream(second)), pool)
        with device_guard(second):
            future.set_result(None)
        device, stream = child.result(WATCHDOG)
        assert device == second
        assert stream != pool.submit(current_stream, second).result(), "the callback's stream is one of its own"
        assert pool.submit(current).result() == first


def chained(device: Device, *, ordered: bool) -> list[np.ndarray[Any, Any]]:
    """A communication stream fills late; a continuation doubles; three threads copy the result on three streams."""
    comm, main = Stream(device), Stream(device)
    x, doubled, trivial = make(comm, 1.0), make(comm, 0.0), make(main, 0.0)
    future: DeviceFuture[Any] = DeviceFuture()

    def twice(value: Any) -> Any:
        current_stream(device).launch(double, doubled, value, reads=(value,), writes=(doubled,))
        return doubled

    with nullcontext() if ordered else without("future.wait"):
        with Latch(comm):
            fill_on(comm, x, 5.0)
            with using(comm):
                future.set_result(x)
            with using(main):
                child = future.then(twice)
                fill_on(main, trivial, 1.0)
                event = main.record()
            event.synchronize(WATCHDOG)  # making a callback holds up nobody
            assert not future.ready()
            if not ordered:
                child.synchronize(WATCHDOG)
        results: list[np.ndarray[Any, Any]] = []

        def reader() -> None:
            stream = Stream(device)
            out = make(stream, 0.0)
            with using(stream):
                child.wait(WATCHDOG, non_blocking=True)
                copy_on(stream, out, doubled)
            stream.synchronize()
            results.append(read(out))

        threads = [threading.Thread(target=reader) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WATCHDOG)
    assert len(results) == 3
    return results


@pytest.mark.parametrize("name", ON_ONE)
def test_b16_a_chained_future_carries_its_points_and_the_main_stream_does_not_wait(name: str) -> None:
    """pytorch/pytorch#42869, pytorch/pytorch#50949: the main stream stalled, or the chained future lost its events."""
    device = opened(name)
    assert all((out == 10.0).all() for out in chained(device, ordered=True))
    assert not any((out == 10.0).any() for out in chained(device, ordered=False)), "the test cannot show the race"


def test_b17_an_error_after_the_completion_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#54475, pytorch/pytorch#56511: the real error was lost, or the future never ended."""
    future: DeviceFuture[int] = DeviceFuture()
    ran: list[int] = []

    def boom(_: int) -> int:
        raise ValueError("boom")

    child = future.then(boom)
    sibling = future.then(ran.append)
    future.set_result(1)
    for use in (child.wait, child.result, child.synchronize):
        with pytest.raises(ValueError, match="boom"):
            use(WATCHDOG)
    assert future.result() == 1
    sibling.result(WATCHDOG)
    assert ran == [1]


def test_b17_a_value_that_cannot_be_searched_fails_the_future() -> None:
    """pytorch/pytorch#53717: the runtime's own step after the completion raised, and the future stayed pending."""

    class Unsearchable:
        pass

    def parts(_: object) -> list[object]:
        raise OSError("cannot look into this")

    nesting.register_container(Unsearchable, parts)
    future: DeviceFuture[Any] = DeviceFuture()
    future.set_result(Unsearchable())
    assert future.done()
    with pytest.raises(OSError, match="cannot look"):
        future.result()
    child = DeviceFuture[int]().then(lambda _: 1)
    assert not child.done()


def test_b19_wait_all_raises_the_first_error_at_once() -> None:
    """pytorch/pytorch#46931: the caller waited 60 s for a future that had nothing to do with the error."""
    for turned in (False, True):
        fails, pending = DeviceFuture[int](), DeviceFuture[int]()
        timer = threading.Timer(0.05, fails.set_exception, [KeyError("first")])
        timer.start()
        with pytest.raises(KeyError, match="first"):
            wait_all([pending, fails] if turned else [fails, pending], timeout=WATCHDOG)
        assert not pending.done()
        timer.join()
    assert wait_all([]) == []


def test_b19_waiting_again_and_again_leaves_nothing_on_a_future() -> None:
    """pytorch#46931: whoever polls with a timeout, or meets an error, does so often."""
    pending: DeviceFuture[int] = DeviceFuture()
    failed: DeviceFuture[int] = DeviceFuture()
    failed.set_exception(ValueError("no"))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            wait_all([pending], timeout=0)
        with pytest.raises(ValueError, match="no"):
            wait_all([pending, failed])
    assert pending._done_callbacks == []  # type: ignore[attr-defined]
    pending.set_result(1)
    assert wait_all([pending]) == [1]


def test_b19_wait_all_of_cancelled_timed_out_and_repeated_futures() -> None:
    """pytorch/pytorch#46931: of the same kind."""
    done, pending, cancelled = DeviceFuture[int](), DeviceFuture[int](), DeviceFuture[int]()
    done.set_result(4)
    assert wait_all([done, done]) == [4, 4]
    cancelled.cancel()
    with pytest.raises(CancelledError):
        wait_all([pending, cancelled])
    with pytest.raises(TimeoutError, match="1 of 2"):
        wait_all([pending, done], timeout=0.01)


@pytest.mark.parametrize("name", ON_ONE)
def test_b19_wait_all_orders_the_values_on_the_current_stream(name: str) -> None:
    """pytorch/pytorch#46931: and the values are as of each future."""
    device = opened(name)
    a, b = Stream(device), Stream(device)
    x, out = make(a, 0.0), make(b, 0.0)
    future: DeviceFuture[Any] = DeviceFuture()
    with Latch(a):
        fill_on(a, x, 6.0)
        with using(a):
            future.set_result(x)
    with using(b):
        wait_all([future, future])
        copy_on(b, out, x)
    b.synchronize()
    assert (read(out) == 6.0).all()


def test_b20_one_completion_wins_and_callbacks_run_once() -> None:
    """agronholm/pythonfutures#86: a future that was set twice ran its callbacks twice."""
    for _ in range(20):
        future: DeviceFuture[int] = DeviceFuture()
        heard: list[int] = []
        future.add_done_callback(lambda one, heard=heard: heard.append(one.result()))
        start = threading.Barrier(8)

        def complete(number: int, future: DeviceFuture[int] = future, start: threading.Barrier = start) -> None:
            start.wait()
            future.set_result(number)

        threads = [threading.Thread(target=complete, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heard == [future.result()]


def test_b20_a_late_completion_does_no_harm_to_who_completes() -> None:
    """rapidsai/ucxx#281, numba/numba#5745: an exception of the late completion killed the progress thread."""
    with ThreadPoolExecutor(1) as progress:
        cancelled, timed_out = DeviceFuture[int](), DeviceFuture[int]()
        cancelled.cancel()
        with pytest.raises(TimeoutError):
            timed_out.result(0.001)
        timed_out.set_exception(TimeoutError("of the call"))
        for future in (cancelled, timed_out):
            progress.submit(future.set_result, 1).result()
            progress.submit(future.set_exception, OSError()).result()
        assert cancelled.cancelled()
        assert isinstance(timed_out.exception(), TimeoutError)
        for number in range(100):
            later: DeviceFuture[int] = DeviceFuture()
            progress.submit(later.set_result, number)
            assert later.result(WATCHDOG) == number


def test_b20_cancel_races_with_the_completion() -> None:
    """agronholm/pythonfutures#86: whichever comes first, there is one end, and everybody is told of that."""
    for _ in range(50):
        future: DeviceFuture[int] = DeviceFuture()
        heard: list[bool] = []
        future.add_done_callback(lambda one, heard=heard: heard.append(one.cancelled()))
        start = threading.Barrier(2)

        def complete(future: DeviceFuture[int] = future, start: threading.Barrier = start) -> None:
            start.wait()
            future.set_result(1)

        thread = threading.Thread(target=complete)
        thread.start()
        start.wait()
        won = future.cancel()
        thread.join()
        assert heard == [won]


def test_b21_a_callback_may_return_a_future_or_wait_for_one() -> None:
    """pytorch/pytorch#48790: a callback that called and waited on the only thread of its loop was a deadlock."""
    pool = CallbackPool(1, "only-thread")
    try:
        from streamrt.callbacks import add_blocking_hook

        remove = add_blocking_hook(pool.blocking)
        try:

            def call(value: int) -> DeviceFuture[int]:
                answer: DeviceFuture[int] = DeviceFuture()
                pool.submit(lambda: answer.set_result(value + 2))
                return answer

            first, second, third = DeviceFuture[int](), DeviceFuture[int](), DeviceFuture[int]()
            flattened = first.then(call, pool)
            blocked = second.then(lambda value: call(value).result(WATCHDOG), pool)
            nested = third.then(
                lambda value: call(value).then(lambda v: call(v).result(WATCHDOG), pool).result(WATCHDOG), pool
            )
            for future in (first, second, third):
                future.set_result(40)
            assert wait_all([flattened, blocked, nested], WATCHDOG) == [42, 42, 44]
        finally:
            remove()
    finally:
        pool.close()


def test_b21_the_shared_pool_never_starves() -> None:
    """pytorch/pytorch#48790: more callbacks that wait than the pool has threads, each for one queued after it."""
    gate: DeviceFuture[int] = DeviceFuture()
    start: DeviceFuture[int] = DeviceFuture()
    waiting = [start.then(lambda _: gate.result(WATCHDOG)) for _ in range(20)]
    start.then(lambda _: gate.set_result(5))
    start.set_result(0)
    assert wait_all(waiting, WATCHDOG) == [5] * 20
    eventually(gate.ready, "the end")
