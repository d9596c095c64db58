"""Device futures: what a completion records, what a use waits for, and how they end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from device_arrays import ON_ONE, ON_TWO, WATCHDOG, assign, copy_on, eventually, fill_on, make, opened, read

from streamrt import hooks, memory
from streamrt.callbacks import CallbackPool, add_blocking_hook, blocking
from streamrt.device import Device, current_devices, parse_device
from streamrt.errors import ArrayError, ClosedError, ExhaustedError, PendingError, PlacementError, StreamrtError
from streamrt.future import DeviceFuture, blocking_wait, wait_all
from streamrt.guard import current_stream, using
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, schedules, without


class Opaque:
    """What a value may hold besides arrays: it cannot be pickled and is none of our business."""

    __slots__ = ("array", "event", "lock")

    def __init__(self, array: Any, event: Any) -> None:
        self.array = array
        self.lock = threading.Lock()
        self.event = event


@dataclass
class Sparse:
    """A sparse value is a container of dense parts."""

    indices: Any
    values: Any
    shape: tuple[int, ...]


FORMS = ["launched", "plain"]


def work(form: str, stream: Stream, function: Callable[..., None], *args: Any) -> None:
    """The user's work on a stream: launched, or plain code with the stream current."""
    if form == "launched":
        stream.launch(function, *args, reads=(), writes=args[:1])
    else:
        with using(stream):
            function(*args)


def value_read_on_another_stream(
    device: Device, wrap: Any, unwrap: Any, form: str, *, ordered: bool
) -> np.ndarray[Any, Any]:
    """Stream A finishes the value late; stream B waits for the future and copies.  What B copied."""
    a, b = Stream(device), Stream(device)
    x, out = make(a, 0.0), make(b, 5.0)
    future: DeviceFuture[Any] = DeviceFuture([str(device)])
    with Latch(a):
        work(form, a, assign, x, 1.0)
        with using(a):
            future.set_result(wrap(x))
        with using(b), assert_no_host_sync(), nullcontext() if ordered else without("future.wait"):
            assert future.wait(non_blocking=True) is None
            assert not future.ready()
        copy_on(b, out, x)
        if not ordered:
            b.synchronize()
    with using(b):
        assert read_part(unwrap(future.result()), x)
    b.synchronize()
    assert future.ready()
    return read(out)


def read_part(found: Any, x: Any) -> bool:
    return found is x


WRAPS: dict[str, tuple[Any, Any]] = {
    "c75_array": (lambda x: x, lambda v: v),
    "c76_list": (lambda x: [x], lambda v: v[0]),
    "c77_class_with_lock_and_event": (lambda x: Opaque(x, threading.Event()), lambda v: v.array),
    "c78_sparse": (lambda x: Sparse(x, x, (256, 256)), lambda v: v.values),
    "c79_list_of_sparse": (lambda x: [Sparse(x, x, (256, 256))], lambda v: v[0].indices),
    "c80_class_of_sparse": (lambda x: Opaque(Sparse(x, x, (9,)), None), lambda v: v.array.values),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", WRAPS)
@pytest.mark.parametrize("name", ON_ONE)
def test_c75_to_c80_the_value_is_finished_where_it_is_read(name: str, row: str, form: str) -> None:
    device = opened(name)
    wrap, unwrap = WRAPS[row]
    assert (value_read_on_another_stream(device, wrap, unwrap, form, ordered=True) == 1.0).all()
    early = 1.0 if (form, device.kind) == ("plain", "host") else 0.0  # there plain code runs at once: nothing to race
    assert (value_read_on_another_stream(device, wrap, unwrap, form, ordered=False) == early).all(), "no race is seen"


def test_c78_a_sparse_value_keeps_its_size() -> None:
    future: DeviceFuture[Sparse] = DeviceFuture()
    future.set_result(Sparse(np.arange(2), np.ones(2), (4, 5)))
    value = future.result()
    assert (value.shape, list(value.indices), list(value.values)) == ((4, 5), [0, 1], [1.0, 1.0])


class _Named:
    def __str__(self) -> str:
        return "host:1"


@pytest.mark.parametrize(
    "spec", [0, "host:1", parse_device("host:1"), _Named()], ids=["int", "str", "device", "object"]
)
def test_c71_to_c73_devices_by_index_name_or_object(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRT_DEVICE", "host")
    expected = Device("host", 0 if spec == 0 else 1)
    assert DeviceFuture[int]([spec]).allowed == {expected}


def test_c74_cpu_has_no_index() -> None:
    with pytest.raises(ValueError, match="have indices, got cpu"):
        DeviceFuture[int](["cpu"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ON_TWO)
def test_c81_a_callback_changes_devices(kind: str, form: str) -> None:
    first, second = opened(f"{kind}:0"), opened(f"{kind}:1")
    a, b = Stream(first), Stream(second)
    x = make(a, 0.0)
    parent: DeviceFuture[Any] = DeviceFuture([first, second])
    allocated = make(b, 0.0)

    def to_second(value: Any) -> Any:
        work(form, current_stream(second), assign, allocated, value)
        return allocated

    child = parent.then(to_second)
    with Latch(a):
        work(form, a, assign, x, 1.0)
        with using(a):
            parent.set_result(x)
    out = make(b, 5.0)
    with using(b):
        child.wait(WATCHDOG, non_blocking=True)
        copy_on(b, out, allocated)
    b.synchronize()
    assert child.devices == (second,)
    assert (read(out) == 1.0).all()


@pytest.mark.parametrize("kind", ON_TWO)
def test_c82_a_value_on_a_device_that_is_not_allowed(kind: str) -> None:
    first, second = opened(f"{kind}:0"), opened(f"{kind}:1")
    a, b = Stream(first), Stream(second)
    parent: DeviceFuture[Any] = DeviceFuture([second])
    made = make(b, 4.0)
    child = parent.then(lambda _: made, with_future=True)
    other = parent.then(lambda value: value)
    with using(a):
        parent.set_result(make(a, 1.0))
    with pytest.raises(PlacementError) as caught:
        parent.wait()
    assert f"{{{first}}}" in str(caught.value)
    assert f"{{{second}}}" in str(caught.value)
    with pytest.raises(ValueError):
        other.result(WATCHDOG)
    with using(b):
        assert child.result(WATCHDOG) is made
        child.synchronize()
    assert (read(made) == 4.0).all()


@pytest.mark.parametrize("name", ON_ONE)
def test_c85_c86_changing_the_value_afterwards_does_no_harm(name: str) -> None:
    device = opened(name)
    a, b = Stream(device), Stream(device)
    value = [make(a, 1.0)]
    future: DeviceFuture[Any] = DeviceFuture()
    with using(a):
        future.set_result(value)
    fill_on(a, value[0], 2.0)
    value[0] = make(a, 3.0)
    gc.collect()
    with using(b):
        assert (read(future.result()[0]) == 3.0).all()
    future.wait()


# what a use waits for


@pytest.mark.parametrize("name", ON_ONE)
def test_only_the_stream_that_is_current_at_the_wait_waits(name: str) -> None:
    device = opened(name)
    a, b, bystander = Stream(device), Stream(device), Stream(device)
    x, out = make(a, 0.0), make(bystander, 0.0)
    future: DeviceFuture[Any] = DeviceFuture()
    with Latch(a):
        with using(a):
            future.set_result(x)
        with using(b):
            future.wait(non_blocking=True)
        fill_on(bystander, out, 1.0)
        bystander.synchronize(WATCHDOG)
        assert not b.query()
    b.synchronize(WATCHDOG)


def test_given_streams_are_recorded_instead_of_the_current_ones() -> None:
    device = opened("host:0")
    a, b = Stream(device), Stream(device)
    future: DeviceFuture[Any] = DeviceFuture()
    with Latch(a):
        future.set_result("no array at all", streams=[a])
        with using(b):
            future.wait(non_blocking=True)
        assert not future.ready()
    assert future.devices == (device,)
    b.synchronize(WATCHDOG)


@pytest.mark.parametrize("name", ON_ONE)
def test_wait_blocks_for_the_device_unless_told_not_to(name: str) -> None:
    device = opened(name)
    a = Stream(device)
    x = make(a, 0.0)
    future: DeviceFuture[Any] = DeviceFuture()
    assert blocking_wait() is True
    with Latch(a), using(a):
        future.set_result(x)
        with pytest.raises(TimeoutError):
            future.wait(0.01)
        previous = blocking_wait(False)
        try:
            future.wait()
            with pytest.raises(TimeoutError):
                future.wait(0.01, non_blocking=False)
        finally:
            blocking_wait(previous)
        with pytest.raises(TimeoutError):
            future.synchronize(0.01)
    future.wait()
    future.synchronize()
    assert future.ready()


def test_a_pending_future_times_out_and_value_says_so() -> None:
    future: DeviceFuture[int] = DeviceFuture()
    for use in (future.result, future.wait, future.synchronize, future.exception):
        with pytest.raises(TimeoutError):
            use(0.001)
    with pytest.raises(PendingError, match="wait for it first"):
        future.value()
    assert not future.ready()
    future.set_result(3)
    assert future.value() == future.result() == 3
    assert future.ready()


@pytest.mark.parametrize("name", ON_ONE)
def test_value_orders_no_stream(name: str) -> None:
    device = opened(name)
    a, b = Stream(device), Stream(device)
    future: DeviceFuture[Any] = DeviceFuture()
    with using(a):
        future.set_result(make(a, 1.0))
    waits: list[hooks.Record] = []
    remove = hooks.listen(waits.append)
    try:
        with using(b):
            future.value()
            assert not [record for record in waits if isinstance(record, hooks.Waited)]
            future.result()
            assert [record for record in waits if isinstance(record, hooks.Waited) and record.stream == b.key]
    finally:
        remove()


@pytest.mark.parametrize("own", [True, False], ids=["buffer", "library"])
@pytest.mark.parametrize("name", ON_ONE)
def test_a_value_may_be_dropped_while_the_stream_that_took_it_reads(name: str, own: bool) -> None:
    """The wait is a use: the memory is not handed out again before that stream is done."""
    from device_arrays import home

    device = opened(name)
    a, b = Stream(device), Stream(device)
    with using(a):
        x = make(a, 1.0) if own else home(device).empty((256,), "float32", device)
    fill_on(a, x, 1.0)
    a.synchronize()
    y = make(b, 0.0)
    future: DeviceFuture[Any] = DeviceFuture()
    with using(a):
        future.set_result(x)
    with Latch(b):
        with using(b):
            future.wait(non_blocking=True)
        b.copy(home(device).describe(y).address, home(device).describe(x).address, 1024)
        del x, future
        gc.collect()
        with using(a):
            z = make(a, None) if own else home(device).empty((256,), "float32", device)
        fill_on(a, z, 7.0)
        a.synchronize()
    b.synchronize()
    assert (read(y) == 1.0).all()


def test_result_shows_host_memory_that_is_there_under_every_schedule() -> None:
    """Plain code touches host memory at once, so `result` runs what the value needs; else it would see poison."""
    device = opened("host:0")
    for name in ("lazy", "random", "priority"):
        for seed in range(5):
            with schedules(name, seed):
                a = Stream(device)
                x = make(a, None)
                fill_on(a, x, 3.0)
                future: DeviceFuture[Any] = DeviceFuture()
                with using(a):
                    future.set_result([x])
                assert (future.result()[0] == 3.0).all()
    with schedules("lazy"):
        a = Stream(device)
        x = make(a, None)
        fill_on(a, x, 3.0)
        with using(a):
            future = DeviceFuture()
            future.set_result([x])
        with without("future.wait"):
            assert not (future.result()[0] == 3.0).any(), "the test cannot show the race"


# ends


def test_a_failed_future_raises_the_same_error_each_time() -> None:
    future: DeviceFuture[int] = DeviceFuture()
    error = KeyError("why")
    future.set_exception(error)
    for use in (future.result, future.wait, future.synchronize, future.value):
        with pytest.raises(KeyError) as caught:
            use()
        assert caught.value is error
    assert future.exception() is error
    assert future.ready()


def test_futures_work_with_concurrent_futures_wait_and_as_completed() -> None:
    first, second, third = DeviceFuture[int](), DeviceFuture[int](), DeviceFuture[int]()
    second.set_result(2)
    done, pending = concurrent.futures.wait([first, second, third], timeout=0.01)
    assert (done, pending) == ({second}, {first, third})
    threading.Thread(target=lambda: (first.set_result(1), third.set_exception(OSError()))).start()
    assert set(concurrent.futures.as_completed([first, second, third], timeout=WATCHDOG)) == {first, second, third}


def test_a_cancelled_future_notifies_its_waiters_and_its_hook() -> None:
    heard: list[DeviceFuture[Any]] = []
    future: DeviceFuture[int] = DeviceFuture(on_cancel=heard.append)
    waiting = threading.Event()
    ended: list[Any] = []

    def wait() -> None:
        waiting.set()
        ended.append(concurrent.futures.wait([future], timeout=WATCHDOG).done)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    eventually(lambda: bool(future._waiters), "the wait")
    assert future.cancel()
    assert future.cancel()
    thread.join(WATCHDOG)
    assert ended == [{future}]
    assert heard == [future]
    future.set_result(3)
    future.set_exception(OSError())
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert future.ready() is True
    assert not future.set_running_or_notify_cancel()


def test_a_hook_that_raises_does_not_keep_cancel_from_its_work(caplog: pytest.LogCaptureFixture) -> None:
    def hook(_: object) -> None:
        raise ValueError("the hook's")

    future: DeviceFuture[int] = DeviceFuture(on_cancel=hook)
    assert future.cancel()
    assert "on_cancel" in caplog.text


def test_an_ended_future_cannot_be_cancelled() -> None:
    future: DeviceFuture[int] = DeviceFuture()
    future.set_result(1)
    assert not future.cancel()
    running: DeviceFuture[int] = DeviceFuture()
    assert running.set_running_or_notify_cancel()
    assert not running.cancel()
    running.set_result(2)
    assert running.result() == 2


def test_pickling_says_what_to_do() -> None:
    with pytest.raises(ArrayError, match="send its value"):
        pickle.dumps(DeviceFuture[int]())


def test_sent_is_done_where_nothing_is_sent() -> None:
    assert DeviceFuture[int]().sent.done()
    sent: concurrent.futures.Future[None] = concurrent.futures.Future()
    future: DeviceFuture[int] = DeviceFuture(sent=sent)
    future.cancel()
    assert future.sent is sent
    assert not sent.done()


class Lost(StreamrtError):
    pass


def test_lost_data_is_never_a_value() -> None:
    future: DeviceFuture[int] = DeviceFuture()
    child = future.then(lambda value: value + 1)
    grandchild = child.then(lambda value: value + 1)
    future.set_result(1)
    assert grandchild.result(WATCHDOG) == 3
    future.mark_lost(Lost("gone"))
    future.mark_lost(Lost("again"))
    for lost in (future, child, grandchild):
        for use in (lost.result, lost.wait, lost.synchronize, lost.value, lost.ready):
            with pytest.raises(Lost, match="gone"):
                use()
        assert isinstance(lost.exception(), Lost)
    with pytest.raises(Lost):
        wait_all([future])
    pending: DeviceFuture[int] = DeviceFuture()
    pending.mark_lost(Lost("early"))
    with pytest.raises(Lost, match="early"):
        pending.result()


def test_who_waits_already_hears_of_a_loss_too() -> None:
    """Also where the value itself has no arrays, as that of a peer's reply."""
    future: DeviceFuture[int] = DeviceFuture()
    reply: DeviceFuture[int] = DeviceFuture()
    child = future.then(lambda value: reply)
    future.set_result(1)
    caught: list[BaseException] = []

    def wait_for_it() -> None:
        with pytest.raises(Lost, match="gone") as raised:
            child.result(WATCHDOG)
        caught.append(raised.value)

    waiter = threading.Thread(target=wait_for_it)
    waiter.start()
    eventually(lambda: child._blocked is not None, "the wait")
    future.mark_lost(Lost("gone"))
    reply.set_ready(2)
    waiter.join(WATCHDOG)
    assert len(caught) == 1


def test_a_loss_during_a_blocking_wait_is_noticed_before_it_returns() -> None:
    future: DeviceFuture[int] = DeviceFuture(settle=lambda one: one.mark_lost(Lost("on the link")))
    future.set_result(1)
    assert future.result() == 1
    future.wait(non_blocking=True)
    with pytest.raises(Lost, match="on the link"):
        future.wait()


# asyncio


@pytest.mark.parametrize("name", ON_ONE)
def test_await_orders_in_the_task_that_awaits_and_does_not_block_the_loop(name: str) -> None:
    device = opened(name)
    a, streams = Stream(device), [Stream(device), Stream(device)]
    x = make(a, 0.0)
    outs = [make(stream, 5.0) for stream in streams]
    future: DeviceFuture[Any] = DeviceFuture()
    latch = Latch(a)
    fill_on(a, x, 1.0)

    async def task(number: int) -> None:
        @using(streams[number])
        async def steps() -> None:
            array = await future
            copy_on(streams[number], outs[number], array)

        await steps()

    async def complete() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        with using(a):
            await asyncio.get_running_loop().run_in_executor(None, future.set_result, x, [a])
        for _ in range(5):
            await asyncio.sleep(0)
        latch.open()  # reached only if nobody blocks the loop

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(task(0), task(1), complete()), WATCHDOG)

    asyncio.run(main())
    for stream, out in zip(streams, outs, strict=True):
        stream.synchronize()
        assert (read(out) == 1.0).all()


def test_await_raises_and_a_cancelled_task_cancels() -> None:
    failed: DeviceFuture[int] = DeviceFuture()
    failed.set_exception(KeyError("x"))
    pending: DeviceFuture[int] = DeviceFuture()

    async def use(future: DeviceFuture[int]) -> int:
        return await future

    async def main() -> None:
        with pytest.raises(KeyError):
            await failed
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(use(pending), 0.01)

    asyncio.run(main())
    assert pending.cancelled()


# continuations


def test_then_refuses_what_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"3 is no function; then\(function\) calls it"):
        DeviceFuture().then(3)  # type: ignore[arg-type]


def test_then_chains_flattens_and_passes_errors_on() -> None:
    inner: DeviceFuture[int] = DeviceFuture()
    future: DeviceFuture[int] = DeviceFuture()
    flat = future.then(lambda value: inner).then(lambda value: value * 10)
    plain = future.then(lambda value: ThreadPoolExecutor(1).submit(lambda: 7))
    future.set_result(1)
    inner.set_result(4)
    assert flat.result(WATCHDOG) == 40
    assert plain.result(WATCHDOG) == 7
    failed = future.then(lambda value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.then(lambda value: value).result(WATCHDOG)
    assert failed.then(lambda one: type(one.exception()), with_future=True).result(WATCHDOG) is ZeroDivisionError


def test_a_cancelled_parent_or_child_ends() -> None:
    parent: DeviceFuture[int] = DeviceFuture()
    ran: list[int] = []
    cancelled, kept = parent.then(ran.append), parent.then(lambda value: value)
    assert cancelled.cancel()
    parent.set_result(1)
    assert kept.result(WATCHDOG) == 1
    assert ran == []
    gone: DeviceFuture[int] = DeviceFuture()
    child = gone.then(lambda value: value)
    gone.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        child.result(WATCHDOG)
    flat = kept.then(lambda value: gone)
    with pytest.raises(concurrent.futures.CancelledError):
        flat.result(WATCHDOG)


def test_an_executor_that_refuses_fails_the_child() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    future: DeviceFuture[int] = DeviceFuture()
    child = future.then(lambda value: value, pool)
    future.set_result(1)
    with pytest.raises(RuntimeError, match="shutdown"):
        child.result(WATCHDOG)


def test_a_flattened_future_keeps_to_the_devices() -> None:
    first, second = opened("host:0"), opened("host:1")
    future: DeviceFuture[Any] = DeviceFuture([first])
    other: DeviceFuture[Any] = DeviceFuture()
    stream = Stream(second)
    with using(stream):
        other.set_result(make(stream, 1.0))
    child = future.then(lambda value: other)
    future.set_result(None)
    with pytest.raises(PlacementError, match="host:1"):
        child.result(WATCHDOG)


def test_a_continuation_gives_its_streams_and_the_threads_state_back() -> None:
    from streamrt.pool import stream_pool

    device = opened("host:0")
    a = Stream(device)
    future: DeviceFuture[Any] = DeviceFuture()
    with using(a):
        future.set_result(make(a, 1.0))
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(lambda: (current_stream(device), current_devices())).result()
        leased = stream_pool(device, "callee").statistics().leased
        inside = future.then(lambda value: current_stream(device), pool).result(WATCHDOG)
        assert inside not in (before[0], a)
        assert pool.submit(lambda: (current_stream(device), current_devices())).result() == before
    assert stream_pool(device, "callee").statistics().leased == leased


# the pool of callbacks


@pytest.fixture
def pool() -> Iterator[CallbackPool]:
    made = CallbackPool(1, "test-callback")
    yield made
    made.close()


def test_the_pool_grows_for_threads_that_block_and_only_for_those(pool: CallbackPool) -> None:
    go, second = threading.Event(), threading.Event()

    def blocks() -> None:
        with pool.blocking():
            go.wait(WATCHDOG)

    pool.submit(blocks)
    pool.submit(second.set)
    assert second.wait(WATCHDOG)
    go.set()
    busy, third = threading.Event(), threading.Event()
    pool.submit(lambda: busy.wait(WATCHDOG) and None)
    pool.submit(third.set)
    assert not third.wait(0.05)
    busy.set()
    assert third.wait(WATCHDOG)


def test_a_task_that_raises_is_logged_and_the_pool_goes_on(
    pool: CallbackPool, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    pool.submit(lambda: print(1 // 0))
    pool.submit(done.set)
    assert done.wait(WATCHDOG)
    assert "ZeroDivisionError" in caplog.text


def raise_what_cannot_be_formatted() -> None:
    raise SyntaxError("bad", ("file", 1, 1, b"bytes\n"))  # type: ignore[arg-type]  # that it is wrong is the point


def test_a_task_whose_error_cannot_be_formatted_costs_no_thread(
    pool: CallbackPool, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    pool.submit(raise_what_cannot_be_formatted)
    pool.submit(done.set)
    assert done.wait(WATCHDOG)
    assert "a task of test-callback raised: SyntaxError, which cannot be formatted" in caplog.text


def test_a_callback_that_is_broken_off_keeps_none_from_the_others() -> None:
    """Ctrl-C comes in whatever the main thread does just then: here, in a callback of somebody's."""
    future: DeviceFuture[int] = DeviceFuture()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    future.add_done_callback(interrupted)
    future.add_done_callback(lambda _: raise_what_cannot_be_formatted())
    child = future.then(lambda value: value + 1)
    with pytest.raises(KeyboardInterrupt):
        future.set_result(1)
    assert child.result(WATCHDOG) == 2


def test_a_pool_that_is_full_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("streamrt.callbacks.MAX_THREADS", 1)
    pool = CallbackPool(1, "full")
    gate, inside, ran = threading.Event(), threading.Event(), threading.Semaphore(0)

    def blocks() -> None:
        with blocking(), pool.blocking() or nullcontext():
            inside.set()
            gate.wait(WATCHDOG)

    pool.submit(blocks)
    assert inside.wait(WATCHDOG)
    for _ in range(2):
        pool.submit(lambda: ran.release())
    assert [record.message for record in caplog.records if "full" in record.message] == [
        "tasks of full have to wait for its threads: all 1 of them are there and 1 are blocked"
    ]
    gate.set()
    assert ran.acquire(timeout=WATCHDOG)
    assert ran.acquire(timeout=WATCHDOG)
    pool.close()


def test_a_thread_that_cannot_be_started_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = CallbackPool(1, "starved")
    ran = threading.Event()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ExhaustedError, match="can't start new thread"):
            pool.submit(ran.set)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(WATCHDOG)
    assert not ran.is_set()
    pool.close()


def test_a_closed_pool_refuses() -> None:
    pool = CallbackPool(1)
    pool.close()
    with pytest.raises(ClosedError):
        pool.submit(lambda: None)
    with pytest.raises(ValueError):
        CallbackPool(0)


def test_other_executors_hear_of_waits() -> None:
    from contextlib import contextmanager

    entered: list[bool | None] = []

    @contextmanager
    def hook(until: Callable[[], bool] | None) -> Iterator[None]:
        entered.append(None if until is None else until())
        yield

    remove = add_blocking_hook(hook)
    try:
        future: DeviceFuture[int] = DeviceFuture()
        with pytest.raises(TimeoutError):
            future.result(0.001)
        with blocking():
            pass
    finally:
        remove()
    with blocking():
        pass
    assert entered == [False, None]


def test_nothing_is_left_behind() -> None:
    gc.collect()
    eventually(lambda: memory.statistics().live == 0, "giving back all memory")
