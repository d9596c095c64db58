"""The testing tools fail where they should: each check here is shown to be able to."""

from __future__ import annotations

import threading

import pytest
from device_bytes import WATCHDOG, empty, fill, get, opened, put
from rpc_processes import until

from streamrt import hooks
from streamrt.device import Device, open_device
from streamrt.pool import StreamPool
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, closed, live_resources, schedules, without
from transport.channels import retired

BOTH = [pytest.param("host:0", id="host"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=BOTH)
def device(request: pytest.FixtureRequest) -> Device:
    return opened(request.param)


def test_a_latch_opens_at_the_end_also_after_an_error(device: Device) -> None:
    stream = Stream(device)
    with pytest.raises(ZeroDivisionError), Latch(stream) as door:
        assert not door.opened
        assert "closed" in repr(door)
        assert not stream.query()
        raise ZeroDivisionError
    assert door.opened
    assert "open" in repr(door)
    stream.synchronize(WATCHDOG)


def test_latches_on_one_stream_open_one_by_one(device: Device) -> None:
    stream = Stream(device)
    block = put(stream, bytes(16))
    first, second = Latch(stream), Latch(stream)
    mark = stream.record()
    fill(stream, block, 1)
    second.open()
    assert not mark.query()
    first.open()
    assert get(stream, block) == b"\x01" * 16


def test_closed_closes_every_stream_of_a_device(device: Device) -> None:
    streams = [Stream(device) for _ in range(3)]
    with closed(device):
        assert not any(stream.query() for stream in streams)
    for stream in streams:
        stream.synchronize(WATCHDOG)
    with closed(streams[0], streams[0]):
        assert not streams[0].query()
        assert streams[1].query()


@pytest.mark.parametrize("blocks", ["stream", "event"])
def test_a_host_sync_fails_before_it_blocks(device: Device, blocks: str) -> None:
    stream = Stream(device)
    with Latch(stream):
        mark = stream.record()
        with pytest.raises(AssertionError, match="synchronize blocks the host"), assert_no_host_sync():
            (stream if blocks == "stream" else mark).synchronize(WATCHDOG)
    stream.synchronize(WATCHDOG)


def test_a_host_sync_that_was_swallowed_fails_at_the_end(device: Device) -> None:
    stream = Stream(device)
    with pytest.raises(AssertionError, match=r"was blocked by: Stream\.synchronize"), assert_no_host_sync():
        try:
            stream.synchronize(WATCHDOG)
        except AssertionError:
            pass


def test_what_does_not_block_passes(device: Device) -> None:
    first, second = Stream(device), Stream(device)
    block = put(first, bytes(64))
    with closed(first, second), assert_no_host_sync():
        fill(first, block, 1)
        second.wait(first)
        first.copy(block.address, block.address + 32, 32)
        second.record().query()
        first.query()
    assert get(second, block) == b"\x01" * 64


def test_other_threads_may_block_the_host(device: Device) -> None:
    stream = Stream(device)
    with assert_no_host_sync():
        thread = threading.Thread(target=stream.synchronize)
        thread.start()
        thread.join()


@pytest.mark.gpu
def test_a_copy_of_pageable_memory_is_a_host_sync() -> None:
    """Only a driver blocks the host for pageable memory."""
    import ctypes

    stream = Stream("cuda:0")
    block = put(stream, bytes(64))
    plain = ctypes.create_string_buffer(64)
    with pytest.raises(AssertionError, match="pageable"), assert_no_host_sync():
        stream.copy(block.address, ctypes.addressof(plain), 64)


def test_live_resources_counts_what_is_not_given_back(device: Device) -> None:
    pool = StreamPool(device, 1)
    pool.lease().release()
    maker = Stream(device)
    live_resources()
    until(lambda: retired.kept() == 0, "what earlier tests have exported to be dropped")
    before = live_resources()
    stream = Stream(device)
    mark = stream.record()
    block = empty(stream, 1000)
    lease = pool.lease()
    assert live_resources() - before == {"streams": 1, "events": 1, "blocks": 1, "block_bytes": 1000, "leases": 1}
    del stream, mark, block
    lease.release()
    assert live_resources() - before == {}
    assert maker.query()


def test_live_resources_counts_descriptors_and_threads() -> None:
    before = live_resources()
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with open("/dev/null", "rb"):
        assert live_resources() - before == {"fds": 1, "threads": 1}
    end.set()
    thread.join()
    assert live_resources() - before == {}


def test_without_drops_the_named_wait_only(device: Device) -> None:
    held, first, second = Stream(device), Stream(device), Stream(device)
    with Latch(held):
        with without("mine"):
            first.wait(held, edge="mine")
            second.wait(held, edge="other")
        first.synchronize(WATCHDOG)
        assert not second.query()
    assert hooks.dropped == frozenset()


def test_without_fails_for_an_edge_that_is_never_met() -> None:
    with pytest.raises(LookupError, match="'mistyped'"), without("mistyped"):
        pass
    assert hooks.dropped == frozenset()


def test_without_keeps_the_error_of_its_body() -> None:
    with pytest.raises(ZeroDivisionError), without("mistyped"):
        raise ZeroDivisionError


def test_without_can_be_nested() -> None:
    stream, other = Stream("host:0"), Stream("host:0")
    with without("outer"), without("inner"):
        stream.wait(other, edge="outer")
        stream.wait(other, edge="inner")
    with pytest.raises(LookupError), without("outer"), without("inner"):
        stream.wait(other, edge="inner")


def test_schedules_can_be_nested_and_an_unknown_one_is_refused() -> None:
    backend = open_device("host:0").backend
    with schedules("lazy") as outer:
        with schedules("random", 4) as inner:
            assert inner.name == "random"
            assert backend.machine.schedule is inner  # type: ignore[attr-defined]
        assert backend.machine.schedule is outer  # type: ignore[attr-defined]
    assert backend.machine.schedule.name == "eager"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="lazy"), schedules("eventually"):
        pass


def test_counting_what_is_alive_harms_no_other_thread() -> None:
    """CPython refuses to finish a tuple that somebody else has got hold of, as who lists all objects does."""
    over, failed = threading.Event(), []

    def busy() -> None:
        try:
            while not over.is_set():
                tuple(number for number in range(50))
        except SystemError as error:
            failed.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    for _ in range(3):
        live_resources()
    over.set()
    thread.join()
    assert not failed
