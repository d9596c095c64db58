"""Leases on pooled streams and events."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from device_bytes import WATCHDOG, fill, get, opened, put

from streamrt.device import Device
from streamrt.errors import ExhaustedError, PlacementError
from streamrt.pool import CLEAN_STREAMS, EventPool, StreamPool, event_pool, stream_pool
from streamrt.testing import Latch, assert_no_host_sync, live_resources

BOTH = [pytest.param("host:0", id="host"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=BOTH)
def device(request: pytest.FixtureRequest) -> Device:
    return opened(request.param)


def test_a_lease_gives_a_stream_and_takes_it_back(device: Device) -> None:
    pool = StreamPool(device, 4)
    with pool.lease() as lease:
        assert lease.stream.device == device
        assert not lease.shared
        assert pool.statistics().leased == 1
    assert lease.released
    lease.release()
    assert pool.statistics().leased == 0
    with pool.lease() as again:
        assert again.stream == lease.stream


@pytest.mark.parametrize("asked", ["fail", "share"])
def test_b04_exclusive_leases_are_distinct_and_fail_loudly(device: Device, asked: str) -> None:
    """pytorch/pytorch#173729: the pool wraps round and two "new" streams are one; nothing says so."""
    pool = StreamPool(device, 4, "fail" if asked == "fail" else "share")
    leases = [pool.lease(exclusive=asked == "share") for _ in range(4)]
    assert len({lease.stream for lease in leases}) == 4
    with pytest.raises(ExhaustedError, match="size=4"):
        pool.lease(exclusive=asked == "share")
    leases.pop().release()
    with pool.lease() as lease:
        assert not lease.shared


def test_b04_sharing_goes_round_and_is_visible(device: Device) -> None:
    """pytorch/pytorch#173729: in shared mode nine leases of four streams use each two or three times, and say so."""
    pool = StreamPool(device, 4)
    leases = [pool.lease() for _ in range(9)]
    uses = [sum(lease.stream.handle == handle for lease in leases) for handle in {x.stream.handle for x in leases}]
    assert sorted(uses) == [2, 2, 2, 3]
    assert [lease.shared for lease in leases] == [False] * 4 + [True] * 5
    for first in leases:
        for second in leases:
            assert (first.stream == second.stream) == (first.stream.handle == second.stream.handle)
            assert first.stream != second.stream or hash(first.stream) == hash(second.stream)
    statistics = pool.statistics()
    assert (statistics.size, statistics.created, statistics.leased, statistics.leases) == (4, 4, 9, 9)
    assert (statistics.shared, statistics.busy_shared) == (5, 5)


def test_nobody_shares_an_exclusive_lease(device: Device) -> None:
    pool = StreamPool(device, 2)
    with pool.lease(exclusive=True) as mine:
        others = [pool.lease() for _ in range(4)]
        assert all(other.stream != mine.stream for other in others)
    single = StreamPool(device, 1)
    with single.lease(exclusive=True), pytest.raises(ExhaustedError, match="exclusively"):
        single.lease()


def test_a_lease_prefers_a_clean_stream(device: Device) -> None:
    pool = StreamPool(device, 3)
    first, second, third = (pool.lease() for _ in range(3))
    with Latch(first.stream), Latch(third.stream):
        for lease in (first, second, third):
            lease.release()
        with pool.lease() as lease:
            assert lease.stream == second.stream
            with pool.lease() as busy:  # nothing clean is left: the one that was released first
                assert busy.stream == first.stream
                assert not busy.shared
        assert pool.statistics().busy_shared == 1
    first.stream.synchronize(WATCHDOG)


def test_a_pool_makes_another_stream_before_it_gives_a_busy_one(device: Device) -> None:
    pool = StreamPool(device, 2)
    with pool.lease() as lease:
        door = Latch(lease.stream)
    with pool.lease() as other:
        assert other.stream != lease.stream
    door.open()


def test_a_pool_makes_few_streams_for_the_sake_of_clean_ones(device: Device) -> None:
    """An allocator keeps memory by stream: a stream for each busy moment would take an arena for each."""
    pool = StreamPool(device, 32)
    doors = []
    for _ in range(CLEAN_STREAMS + 3):
        with pool.lease() as lease:
            doors.append(Latch(lease.stream))
    assert pool.statistics().created == CLEAN_STREAMS
    assert pool.statistics().busy_shared == 3
    held = [pool.lease() for _ in range(CLEAN_STREAMS + 3)]
    assert len({lease.stream for lease in held}) == CLEAN_STREAMS + 3, "all are held: then there are more"
    for door in doors:
        door.open()
    for lease in held:
        lease.release()


def test_a_growing_pool_gives_clean_streams_only(device: Device) -> None:
    pool = StreamPool(device, 1, "grow")
    doors = []
    for _ in range(5):
        with pool.lease() as lease:
            doors.append(Latch(lease.stream))
    assert pool.statistics().created == 5
    assert pool.statistics().busy_shared == 0
    for door in doors:
        door.open()


def test_work_of_one_lease_comes_before_the_next_on_the_same_stream(device: Device) -> None:
    pool = StreamPool(device, 1)
    with pool.lease() as lease:
        block = put(lease.stream, bytes(64))
        with Latch(lease.stream):
            fill(lease.stream, block, 1)
            lease.release()
            again = pool.lease()
            fill(again.stream, block, 2)
    assert get(again.stream, block) == b"\x02" * 64


def test_nothing_is_made_in_steady_state(device: Device) -> None:
    pool = StreamPool(device, 4)
    for _ in range(3):
        with pool.lease():
            pass
    before, statistics = live_resources(), pool.statistics()
    with assert_no_host_sync():
        for _ in range(100):
            with pool.lease():
                pass
    assert live_resources() - before == {}
    assert pool.statistics().created == statistics.created


def test_a_forgotten_lease_comes_back(device: Device) -> None:
    pool = StreamPool(device, 1, "fail")
    pool.lease()
    gc.collect()
    with pool.lease() as lease:
        assert not lease.shared


def test_streams_of_a_pool_outlive_it(device: Device) -> None:
    handle = StreamPool(device, 1).lease().stream.handle
    gc.collect()
    assert handle in device.backend.streams(device.index)


def test_many_threads_lease_and_release(device: Device) -> None:
    pool = StreamPool(device, 4, "fail")
    gate = threading.Semaphore(4)
    held: set[int] = set()

    def work(_: int) -> None:
        for _ in range(200):
            with gate, pool.lease() as lease:
                assert lease.stream.handle not in held, f"two threads hold {lease.stream}"
                held.add(lease.stream.handle)
                held.discard(lease.stream.handle)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert pool.statistics().leased == 0
    assert pool.statistics().leases == 1600


def test_callers_and_callees_have_separate_pools(device: Device) -> None:
    assert stream_pool(device, "caller") is stream_pool(device)
    callee = stream_pool(device, "callee")
    assert callee is not stream_pool(device)
    assert callee is stream_pool(device, "callee")
    with stream_pool(device).lease() as mine, callee.lease() as theirs:
        assert mine.stream != theirs.stream


def test_a_failed_stream_is_replaced() -> None:
    """Host only: a GPU has no failure that ends at one stream."""
    pool = StreamPool("host:4", 1)

    def broken() -> None:
        raise ZeroDivisionError

    with pool.lease() as lease:
        lease.stream.launch(broken)
    with pool.lease() as again:
        assert again.stream != lease.stream
        again.stream.synchronize(WATCHDOG)


def test_impossible_pools_are_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="0 streams"):
        StreamPool(device, 0)
    with pytest.raises(ValueError, match="'share', 'grow' or 'fail'"):
        StreamPool(device, exhausted="wait")  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match="cpu has no streams"):
        StreamPool("cpu")
    with pytest.raises(ValueError, match="'caller' or 'callee'"):
        stream_pool(device, "server")  # type: ignore[arg-type]


def test_event_handles_are_reused(device: Device) -> None:
    pool = EventPool(device)
    handles = [pool.lease().handle for _ in range(10)]
    assert len(set(handles)) == 1
    assert (pool.statistics().created, pool.statistics().free) == (1, 1)
    both = pool.lease(), pool.lease()
    assert both[0].handle != both[1].handle
    assert event_pool(device) is event_pool(device)


@pytest.mark.gpu
def test_b08_a_capturing_stream_is_not_leased_and_serves_again_afterwards() -> None:
    """pytorch/pytorch#114320: a recycled pool stream is still part of somebody's capture.  Only CUDA has graphs."""
    from cupy.cuda import runtime

    pool = StreamPool("cuda:0", 2)
    first, second = pool.lease(), pool.lease()
    block = put(first.stream, bytes(64))
    runtime.streamBeginCapture(first.stream.handle, runtime.streamCaptureModeRelaxed)
    first.release()
    second.release()
    for _ in range(4):
        with pool.lease() as lease:
            assert lease.stream == second.stream
    fill(first.stream, block, 8)
    runtime.graphDestroy(runtime.streamEndCapture(first.stream.handle))
    with pool.lease() as one, pool.lease() as two:
        assert {one.stream, two.stream} == {first.stream, second.stream}
        for stream in (one.stream, two.stream):
            fill(stream, block, 9)
            assert get(stream, block) == b"\x09" * 64
