"""Cross-stream lifetime and snapshots, on the host backend and on GPUs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from device_arrays import ON_ONE, eventually, fill_on, home, make, opened, read

import streamrt
from streamrt import buffers, memory
from streamrt.errors import ArrayError, DeviceError, ExhaustedError, PlacementError
from streamrt.future import DeviceFuture
from streamrt.guard import current_stream, using
from streamrt.host import memory as host_memory
from streamrt.libraries import library
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, schedules, without

N = 1 << 12


@pytest.fixture(scope="module", autouse=True)
def only_what_is_made_here() -> Iterator[None]:
    """The collections below look at what these tests made, not each time at all modules that are loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Every test gives back what it took."""
    gc.collect()
    before = memory.statistics()
    yield
    gc.collect()

    def given_back() -> bool:  # a pump thread may still be on its way out of the last operation
        after = memory.statistics()
        return after.live <= before.live and after.held_arrays <= before.held_arrays and not after.snapshots

    eventually(given_back, "giving back what the test took")


def reuse_while_read(device_name: str, *, own: bool, declare: bool) -> float:
    """Stream B copies x while it is held up; x is dropped and its size allocated again on A.  The sum that B saw."""
    device = opened(device_name)
    a, b = Stream(device), Stream(device)
    if own:
        x = make(a, 1.0, N)
    else:
        with using(a):
            x = home(device).empty((N,), "float32", device)
        fill_on(a, x, 1.0)
        a.synchronize()
    y = make(b, 0.0, N)
    b.wait(a)
    with Latch(b):
        info, target = home(device).describe(x), home(device).describe(y)
        b.copy(target.address, info.address, info.nbytes)
        if declare:
            memory.use(x, b)
        del x
        gc.collect()
        if own:
            memory.drain()  # which a small allocation does now and then
            z = make(a, None, N)
        else:
            with using(a):
                z = home(device).empty((N,), "float32", device)
        fill_on(a, z, 7.0)
        a.synchronize()
    b.synchronize()
    return float(read(y).sum())


@pytest.mark.parametrize("own", [True, False], ids=["buffer", "library"])
@pytest.mark.parametrize("device", ON_ONE)
def test_b11_memory_used_on_another_stream_is_not_reused(device: str, own: bool) -> None:
    """cupy/cupy#8068: an array read by stream B is dropped, and the allocator hands its memory out again on A."""
    assert reuse_while_read(device, own=own, declare=True) == N
    assert reuse_while_read(device, own=own, declare=False) == 7 * N, "the test cannot show the race"


def make_raw(stream: Stream, n: int) -> tuple[object, int]:
    array = make(stream, None, n)
    return array, home(stream.device).describe(array).address


def run_ahead(device_name: str, limit: int, *, ordered: bool = True) -> tuple[int, int, bool]:
    """200 temporaries used on a side stream, the host never waiting: the peak, how often the bound held, and whether
    the side stream read what each of them had.  Unless `ordered` the bound's wait is dropped."""
    device = opened(device_name)
    previous = memory.set_held_limit(limit)
    try:
        filler = Stream(device)
        zeros, ones = make(filler, 0.0, N), make(filler, 1.0, N)
        # Held up: on a GPU by a latch, on the host backend because nothing runs unless it is asked for.
        with schedules("lazy") if device.kind == "host" else nullcontext():
            a, b = Stream(device), Stream(device)
            y = make(b, None, 200 * N)
            target = home(device).describe(y).address
            sources = [home(device).describe(array) for array in (zeros, ones)]
            base = memory.statistics()
            memory.reset_peak()
            held_up = Latch(b) if device.kind == "cuda" else nullcontext()
            with held_up, assert_no_host_sync(), nullcontext() if ordered else without("memory.bound"):
                for number in range(200):
                    temporary, address = make_raw(a, N)
                    a.copy(address, sources[number % 2].address, 4 * N)  # by address: a queue keeps no array alive
                    b.wait(a)
                    b.copy(target + 4 * N * number, address, 4 * N)
                    memory.use(temporary, b)
                    del temporary
            b.synchronize()
            right = bool((read(y).reshape(200, N) == np.arange(200)[:, None] % 2).all())
            eventually(lambda: memory.statistics().live == base.live, "giving everything back")
            after = memory.statistics()
            return after.peak - base.live, after.bounded - base.bounded, right
    finally:
        memory.set_held_limit(previous)


@pytest.mark.parametrize("device", ON_ONE)
def test_b13_what_is_held_for_a_side_stream_is_bounded(device: str) -> None:
    """pytorch/pytorch#147168: deferred frees pile up while the host runs ahead; with a limit of 2 the peak is 4."""
    size = 4 * N
    peak, bounded, right = run_ahead(device, 2 * size)
    assert right
    assert peak <= 4 * size
    assert bounded > 0
    unbounded, _, right = run_ahead(device, 1000 * size)
    assert right
    assert unbounded > 4 * size, "the test cannot show the pile"


@pytest.mark.gpu
def test_b13_without_the_wait_of_the_bound_memory_is_used_again_too_early() -> None:
    """The host backend has no such wait: there the bound runs what it would wait for."""
    assert not run_ahead("cuda:0", 8 * N, ordered=False)[2], "the test cannot show the race"


def snapshot_before_overwrite(device_name: str, *, ordered: bool) -> np.ndarray:
    """x is 1, is snapshot, and is overwritten on the same stream, all behind a latch."""
    device = opened(device_name)
    a = Stream(device)
    x = make(a, 5.0, N)
    out = make(a, 0.0, N)
    with using(a), Latch(a):
        fill_on(a, x, 1.0)
        with assert_no_host_sync(), nullcontext() if ordered else without("snapshot.copy"):
            (shot,) = memory.snapshot([x])
        fill_on(a, x, 0.0)
        if not ordered:
            assert shot.event is not None
            shot.event.synchronize()
    assert shot.event is not None
    a.wait(shot.event)
    a.copy(home(device).describe(out).address, shot.info.address, shot.nbytes)
    a.synchronize()
    assert float(read(x)[0]) == 0.0
    return read(out)


@pytest.mark.parametrize("device", ON_ONE)
def test_b14_a_snapshot_has_the_bytes_as_of_the_call(device: str) -> None:
    """pytorch/pytorch#34885: the sender writes to its array right after the call, and the receiver sees that."""
    assert (snapshot_before_overwrite(device, ordered=True) == 1.0).all()
    assert (snapshot_before_overwrite(device, ordered=False) == 5.0).all(), "the test cannot show the race"


@pytest.mark.parametrize("name", ["lazy", "random", "priority"])
def test_b14_under_schedules(name: str) -> None:
    """zeromq/pyzmq#1364: the same under schedules that replay, with freed memory poisoned."""
    device = opened("host:0")
    for seed in range(10):
        with schedules(name, seed):
            a, b = Stream(device), Stream(device)
            x, out = make(a, None, 64), make(b, None, 64)
            fill_on(a, x, 1.0)
            with using(a):
                (shot,) = memory.snapshot([x])
            fill_on(a, x, 0.0)
            del x
            assert shot.event is not None
            b.wait(shot.event)
            b.copy(home(device).describe(out).address, shot.info.address, shot.nbytes)
            shot.buffer.use(b)
            del shot
            b.synchronize()
            assert (read(out) == 1.0).all(), f"seed {seed}"


LAYOUTS = {
    "reversed": lambda a: a[::-1],
    "transposed": lambda a: a.reshape(16, -1).T,
    "strided": lambda a: a[3::5],
    "broadcast": lambda a: np.broadcast_to(a[:7], (5, 7)),
    "zero-d": lambda a: a[3:4].reshape(()),
    "empty": lambda a: a[:0],
    "whole": lambda a: a,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["cpu", *ON_ONE])
def test_snapshots_hold_the_visible_bytes_of_any_layout(where: str, layout: str) -> None:
    values = np.arange(256, dtype=np.float32)
    if where == "cpu":
        array, expected = LAYOUTS[layout](values), LAYOUTS[layout](values)
    else:
        stream = Stream(opened(where))
        base = make(stream, 0.0)
        buffer = memory.allocate(stream.device, values.nbytes, stream)
        stream.copy(home(stream.device).describe(base).address, values.ctypes.data, values.nbytes)
        stream.synchronize()
        del buffer
        array, expected = LAYOUTS[layout](base), LAYOUTS[layout](values)
    (shot,) = memory.snapshot([array])
    assert shot.info.strides is None
    assert shot.info.shape == expected.shape
    assert shot.nbytes == expected.nbytes
    if where == "cpu":
        assert shot.event is None
    elif shot.event is not None:
        shot.event.synchronize()
    if where != "cuda:0":
        assert bytes(shot.host_view()) == expected.tobytes()
        return
    out = make(stream, 0.0, max(1, expected.size))
    stream.copy(home(stream.device).describe(out).address, shot.info.address, shot.nbytes)
    stream.synchronize()
    assert read(out)[: expected.size].tobytes() == expected.tobytes()


@pytest.mark.parametrize("device", ON_ONE)
def test_small_arrays_share_a_buffer_large_ones_do_not_and_the_same_one_is_copied_once(device: str) -> None:
    stream = Stream(opened(device))
    small, other, large = make(stream, 1.0, 8), make(stream, 2.0, 8), make(stream, 3.0, memory.SMALL_BYTES)
    with using(stream):
        shots = memory.snapshot([small, other, large, small])
    assert shots[0].buffer is shots[1].buffer
    assert shots[0].info.address != shots[1].info.address
    assert shots[2].buffer is not shots[0].buffer
    assert shots[3] is shots[0]
    assert shots[0].event is shots[2].event
    stream.synchronize()


def test_the_snapshot_limit_names_copy_false_and_room_comes_back() -> None:
    array = np.zeros(1000, np.uint8)
    first = memory.snapshot([array], limit=2000)
    base = memory.statistics().snapshots
    with pytest.raises(ExhaustedError, match="copy=False"):
        memory.snapshot([array], limit=base + 999)
    assert memory.statistics().snapshots == base
    del first
    gc.collect()
    assert memory.snapshot([array], limit=base)


def test_the_process_limit_is_settable() -> None:
    previous = memory.set_snapshot_limit(10)
    try:
        with pytest.raises(ExhaustedError, match="snapshot_limit=10"):
            memory.snapshot([np.zeros(11, np.uint8)])
    finally:
        assert memory.set_snapshot_limit(previous) == 10


def test_a_snapshot_of_ordinary_memory_is_made_at_once() -> None:
    array = np.arange(10)
    (shot,) = memory.snapshot([array])
    array[:] = 0
    assert bytes(shot.host_view()) == np.arange(10).tobytes()


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(ArrayError, match="list"):
        memory.snapshot([[1, 2]])


def test_memory_wants_a_stream_of_its_device() -> None:
    with pytest.raises(PlacementError, match="host:1"):
        memory.allocate("host:1", 16, Stream("host:0"))
    with pytest.raises(PlacementError, match="host:0"):
        memory.allocate("host:0", 16)


@pytest.mark.gpu
def test_no_snapshot_inside_a_capture() -> None:
    """The capture goes on, and nothing was added to it."""
    cupy = pytest.importorskip("cupy")
    from streamrt.errors import CaptureError

    device = opened("cuda:0")
    stream = Stream(device)
    array = make(stream, 1.0)
    with using(stream):
        current = cupy.cuda.get_current_stream()
        current.begin_capture()
        try:
            with pytest.raises(CaptureError, match="captures a graph"):
                memory.snapshot([array])
        finally:
            current.end_capture()


@pytest.mark.parametrize("device", ON_ONE)
def test_the_last_alias_keeps_the_memory(device: str) -> None:
    stream = Stream(opened(device))
    live = memory.statistics().live
    whole = make(stream, 3.0)
    part = whole[10:20]
    del whole
    gc.collect()
    assert memory.statistics().live == live + 4 * 256
    assert (read(part) == 3.0).all()
    del part
    gc.collect()
    stream.synchronize()
    assert memory.statistics().live == live


def test_an_array_of_others_is_kept_only_while_a_stream_uses_it() -> None:
    stream = Stream(opened("host:0"))
    held = memory.statistics().held_arrays
    array = np.zeros(10)
    memory.use(array, stream)
    memory.use(array, stream)
    with Latch(stream):
        assert memory.statistics().held_arrays == held + 1
        del array
        assert memory.statistics().held_arrays == held + 1
    stream.synchronize()
    assert memory.statistics().held_arrays == held


def test_buffers_can_be_dropped_from_many_threads() -> None:
    device = opened("host:0")

    def churn(_: int) -> None:
        a, b = Stream(device), Stream(device)
        for _ in range(100):
            array = make(a, None, 16)
            memory.use(array, b)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(churn, range(4)))


def test_ordinary_memory_needs_no_stream() -> None:
    buffer = memory.allocate("cpu", 100)
    array = library("numpy").wrap(buffer.address, 100, (100,), "uint8", buffer.device, buffer.holder())
    array[:] = 4
    del buffer
    gc.collect()
    assert (array == 4).all()


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_snapshots_of_other_libraries_arrays(name: str, dtype: str) -> None:
    pytest.importorskip(name)
    stream = Stream(opened("host:0"))
    nbytes = 12 * (2 if dtype == "bfloat16" else 8)
    buffer = memory.allocate(stream.device, nbytes, stream)
    buffer.host_view()[:] = bytes(range(nbytes))
    array = library(name).wrap(buffer.address, nbytes, (3, 4), dtype, stream.device, buffer.holder())
    parts = [array, array.T] if name == "torch" else [array]
    with using(stream):
        shots = memory.snapshot(parts)
    for part, shot in zip(parts, shots, strict=True):
        assert shot.event is not None
        shot.event.synchronize()
        packed = library(name).as_numpy(library(name).contiguous(part))
        stream.synchronize()
        current_stream(stream.device).synchronize()
        assert bytes(shot.host_view()) == packed.tobytes()
        assert shot.info.dtype == dtype


def test_a_failed_device_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that answers every question with an error: what its streams used goes back, and nobody else suffers."""
    device = opened("host:0")
    stream, owner = Stream(device), Stream(device)
    before = memory.statistics()
    array, own = np.zeros(10), memory.allocate(device, 64, owner)
    memory.use(array, stream)
    own.use(stream)

    def fail(*_: object) -> bool:
        assert not buffers._lock.locked(), "a driver call under the lock of all memory"
        raise DeviceError("asking failed", code=700)

    for question in ("capturing", "query_stream", "record_event"):
        monkeypatch.setattr(type(device.backend), question, fail)
    del array, own
    gc.collect()
    after = memory.statistics()
    assert (after.held_arrays, after.live) == (before.held_arrays, before.live)


def test_the_bound_does_not_wait_for_a_failed_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened("host:0")
    stream, owner = Stream(device), Stream(device)
    before = memory.statistics().held
    limit = memory.set_held_limit(0)
    try:
        with Latch(stream):
            array = np.zeros(1000)
            memory.hold(array, stream, nbytes=array.nbytes, owner=owner)
            del array

            def fail(*_: object) -> bool:
                raise DeviceError("running failed", code=700)

            monkeypatch.setattr(type(device.backend), "require", fail)
            memory.drain(everything=True, bound=True)
            assert memory.statistics().held == before
            monkeypatch.undo()
    finally:
        memory.set_held_limit(limit)


def test_a_large_block_goes_back_to_the_system_when_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the next allocation, which a daemon may never make."""
    monkeypatch.setattr(host_memory, "CACHE_LIMIT", 0)
    held = host_memory.HostMemory()
    block = held.allocate(0, host_memory.LARGE_BYTES)
    address = block.address
    assert held.device_of(address) == 0
    del block
    assert held.device_of(address) is None


def test_a_block_may_outlive_the_names_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a process a module's names are None before the last objects go."""
    held = host_memory.HostMemory()
    blocks = [held.allocate(0, nbytes) for nbytes in (1, host_memory.LARGE_BYTES)]
    with monkeypatch.context() as patch:
        for name in ("LARGE_BYTES", "CACHE_LIMIT", "hooks", "bisect", "sys"):
            patch.setattr(host_memory, name, None)
        patch.setattr(held, "ending", lambda: True)
        blocks.clear()
        gc.collect()
    assert len(held.returned) == 2


def test_a_large_block_that_is_dropped_inside_of_an_allocation_goes_back_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A finaliser runs anywhere, also where its thread holds the lock."""
    monkeypatch.setattr(host_memory, "CACHE_LIMIT", 0)
    held = host_memory.HostMemory()
    block = held.allocate(0, host_memory.LARGE_BYTES)
    address = block.address
    with held._lock:
        del block
    assert held.device_of(address) == 0
    held.allocate(0, 1)
    assert held.device_of(address) is None


# What is left to a later drain


def kept() -> tuple[int, int]:
    """How many arrays of others, and how many things that wait for an event, are kept now."""
    return len(buffers._held), sum(map(len, buffers._pending.values()))


def test_a_process_that_only_completes_futures_keeps_few_arrays_of_others() -> None:
    """Views are no buffers of the runtime's own: who waits for one keeps the array, until nobody has it any more."""
    device = opened("host:0")
    a, b = Stream(device), Stream(device)
    whole, most = make(a, 1.0, N), 0
    for number in range(1, 400):
        future: DeviceFuture[object] = DeviceFuture()
        with using(a):
            future.set_result(whole[number:])
        with using(b):
            future.result()
        most = max(most, kept()[0])
    assert most < 50


def test_a_process_that_only_completes_futures_gives_back_what_it_dropped() -> None:
    device = opened("host:0")
    a = Stream(device)
    x = make(a, 1.0)
    memory.drain(everything=True)
    before = buffers._live_bytes
    large = memory.allocate(device, 1 << 20, a)
    del large
    assert buffers._live_bytes == before + (1 << 20)
    for _ in range(buffers.MUCH):
        future: DeviceFuture[object] = DeviceFuture()
        with using(a):
            future.set_result(x)
    assert buffers._live_bytes == before


def test_small_allocations_that_are_kept_give_back_what_was_dropped() -> None:
    device = opened("host:0")
    a = Stream(device)
    memory.drain(everything=True)
    large = memory.allocate(device, 1 << 20, a)
    before = buffers._live_bytes
    del large
    small = [memory.allocate(device, 64, a) for _ in range(buffers.MUCH)]
    assert buffers._live_bytes == before - (1 << 20) + sum(one.nbytes for one in small)


def test_what_is_fetched_keeps_its_memory_no_longer_than_a_few_fetches() -> None:
    device = opened("host:0")
    a = Stream(device)
    x, target, most = make(a, 1.0), make(a, 0.0), 0
    library_ = home(device)
    with using(a):
        for _ in range(100):
            copy = memory.fetch(x, library_.describe(x), library_.describe(target).address)
            memory.hold_until([copy.source, object()], copy.event, copy.stream)
            copy.event.synchronize()
            most = max(most, kept()[1])
    assert most <= buffers.MUCH + 1


def test_where_there_is_no_room_what_was_dropped_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small allocation leaves what was dropped to a later one, but not where it would fail without."""
    device = opened("host:0")
    a = Stream(device)
    memory.drain(everything=True)
    large = memory.allocate(device, 1 << 20, a)
    full = buffers._live_bytes
    usual = device.backend.allocate

    def allocate(index: int, nbytes: int, stream: int) -> object:
        if buffers._live_bytes >= full:
            raise MemoryError("full")
        return usual(index, nbytes, stream)

    monkeypatch.setattr(device.backend, "allocate", allocate)
    with pytest.raises(MemoryError, match="release arrays"):
        memory.allocate(device, 64, a)
    del large
    memory.allocate(device, 64, a)


def test_use_refuses_what_is_no_array() -> None:
    stream = Stream("host:0")
    for wrong in (3, None, [streamrt.array(np.ones(4), device="host:0")]):
        with pytest.raises(TypeError, match=r"is no array of a loaded library; write use\(array, stream\)"):
            memory.use(wrong, stream)
