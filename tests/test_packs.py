"""Small arrays of devices that share a buffer: they arrive as any others do, and cost one transfer."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import rpc_service
from device_arrays import opened
from peer_memory import by, exports_of
from rpc_processes import WATCHDOG, until

import streamrt
import transport
from streamrt import memory
from streamrt.errors import ExhaustedError
from streamrt.memory import SMALL_BYTES
from streamrt.testing import Latch, without
from transport import inlined, packs, payload
from transport.errors import CodecError
from transport.events import BufferHeader

pytest_plugins = ["rpc_fixtures"]


@pytest.fixture
def child() -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1, devices=["host:1"], device_map={"host:0": "host:1"}) as workers:
        yield workers[0]


def on_host(values: Any, device: str = "host:0") -> Any:
    return streamrt.array(np.asarray(values), device=device)


def some(count: int, size: int = 300) -> list[Any]:
    return [on_host(np.arange(number, number + size, dtype=np.int64)) for number in range(count)]


def back(*arrays: Any) -> Any:
    return arrays


def totals(*arrays: Any) -> list[int]:
    return [int(np.asarray(array).sum()) for array in arrays]


def messages(peer: transport.Peer) -> tuple[int, int]:
    found = peer.statistics()
    return found.messages_out, found.messages_in


def test_many_small_arrays_take_one_transfer_each_way(child: transport.LocalWorker) -> None:
    arrays = some(40)
    child.call(back, *arrays)
    before = messages(child)
    future = child.submit(back, *arrays)
    for sent, came in zip(arrays, future.result(WATCHDOG), strict=True):
        np.testing.assert_array_equal(np.asarray(sent), np.asarray(came))
    out, come = messages(child)
    assert out - before[0] <= 3  # the call, its bytes, and perhaps credit
    assert come - before[1] <= 3


@pytest.mark.parametrize("dtype", ["u1", "f2", "i4", "f8", "c16", "?"])
def test_every_dtype_and_layout(peer: transport.Peer, dtype: str) -> None:
    base = on_host((np.arange(4000) % 2).astype(dtype).reshape(40, 100))
    arrays = [
        base,
        base[::2],
        base[:, ::-1],
        base.T,
        base[3:4, 5:6],
        base[:0],
        base[0],
        np.ones(3),
        base[7, 7:8].reshape(()),
    ]
    for sent, came in zip(arrays, peer.call("echo", arrays), strict=True):
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(np.asarray(came), np.asarray(sent))


def test_several_devices_and_sizes_in_one_message(peer: transport.Peer) -> None:
    sizes = [1, 2, 3, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, 3 * SMALL_BYTES]
    arrays = [on_host(np.full(size, number, np.uint8), f"host:{number % 2}") for number, size in enumerate(2 * sizes)]
    for sent, came in zip(arrays, peer.submit("echo", arrays).result(WATCHDOG), strict=True):
        assert streamrt.device_of(came) == streamrt.device_of(sent)
        np.testing.assert_array_equal(np.asarray(came), np.asarray(sent))


def test_together_they_are_large_enough_to_be_shared(child: transport.LocalWorker) -> None:
    arrays = some(8, SMALL_BYTES // 8)
    child.call(back, *arrays)
    before = by(child)
    child.call(back, *arrays)
    assert by(child) == (before[0] + 8 * SMALL_BYTES, before[1] + 8 * SMALL_BYTES)
    until(lambda: exports_of(child).used_bytes == 0 or gc.collect() < 0, "the block to be free again")


def test_the_bytes_are_those_of_the_call_in_stream_order(child: transport.LocalWorker) -> None:
    """pytorch/pytorch#34885: one record behind the copies of all."""

    def sent(*, ordered: bool) -> list[int]:
        stream = streamrt.current_stream("host:0")
        arrays = [on_host(np.zeros(300, np.int64)) for _ in range(5)]
        with Latch(stream) as latch:
            for array in arrays:
                stream.launch(rpc_service.fill, array, 2, reads=(), writes=(array,))
            if ordered:
                future = child.submit(totals, *arrays)
            else:
                with without(memory.COPY_EDGE):
                    future = child.submit(totals, *arrays)
                    result: list[int] = future.result(WATCHDOG)
            for array in arrays:
                stream.launch(rpc_service.fill, array, 7, reads=(), writes=(array,))
            latch.open()
            return future.result(WATCHDOG) if ordered else result

    assert sent(ordered=True) == 5 * [600]
    assert sent(ordered=False) != 5 * [600], "the test does not depend on the order that it is about"


def test_one_view_keeps_the_memory_of_its_buffer(child: transport.LocalWorker) -> None:
    arrays = some(6)
    gc.collect()
    live = memory.statistics().live
    came = list(child.call(back, *arrays))
    kept = came.pop(2)
    del came
    gc.collect()
    assert memory.statistics().live > live
    for number in range(20):
        child.call(back, *some(6 + number % 3))
    np.testing.assert_array_equal(np.asarray(kept), np.asarray(arrays[2]))
    del kept
    until(lambda: gc.collect() >= 0 and memory.statistics().live <= live, "the buffer to be given back")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_is_kept_for_the_streams_that_use_it(child: transport.LocalWorker, number: int) -> None:
    """cupy/cupy#8068: a stream on which a value was completed still reads one of them when it is dropped."""
    x = list(child.submit(back, *some(3)).result(WATCHDOG))[number]
    expected, address, nbytes = np.array(x), x.__array_interface__["data"][0], x.nbytes
    other = streamrt.Stream("host:0")
    seen: list[bytes] = []

    def kernel() -> None:  # knows the address, and holds nothing
        seen.append(ctypes.string_at(address, nbytes))

    with Latch(other):
        other.launch(kernel, reads=(), writes=())
        future: streamrt.DeviceFuture[Any] = streamrt.DeviceFuture()
        future.set_result(x, streams=[other])
        del x, future
        gc.collect()
        memory.drain(everything=True)
        stream = streamrt.current_stream("host:0")
        taken = [memory.allocate("host:0", size, stream) for size in (nbytes, 3 * 2560) for _ in range(20)]
        for buffer in taken:
            buffer.host_view()[:] = bytes([255]) * buffer.nbytes
    other.synchronize(WATCHDOG)
    assert seen == [expected.tobytes()]


def around(first: Any, second: Any, *_: Any) -> int:
    """How many bytes of another's lie between two arrays."""
    begin = first.__array_interface__["data"][0]
    end = second.__array_interface__["data"][0]
    return ctypes.string_at(begin, end - begin).count(b"S")


def test_nothing_else_goes_along(child: transport.LocalWorker) -> None:
    """What lay in the memory before stays here: no peer is given what was not sent to it."""
    arrays = [on_host(np.zeros(1, np.uint8)) for _ in range(inlined.MOST_LATE + 1)]
    child.submit(around, *arrays).result(WATCHDOG)
    stream = streamrt.current_stream("host:0")
    secrets = [memory.allocate("host:0", 512, stream) for _ in range(8)]
    for secret in secrets:
        secret.host_view()[:] = b"S" * 512
    del secret, secrets
    gc.collect()
    memory.drain(everything=True)
    assert child.submit(around, *arrays).result(WATCHDOG) == 0


def test_a_pack_has_a_bound(child: transport.LocalWorker) -> None:
    """Who keeps one array does not keep all of a large call."""
    gc.collect()
    live = memory.statistics().live
    came = list(child.call(back, *some(64, SMALL_BYTES // 8)))
    kept = came[40]
    del came
    until(lambda: gc.collect() >= 0 and memory.statistics().live - live <= 2 * packs.PACK_BYTES, "the others to go")
    assert kept[0] == 40


def test_lent_arrays_go_each_by_itself(child: transport.LocalWorker) -> None:
    arrays = some(3)
    future = child.submit(totals, *arrays, copy=False)
    assert future.result(WATCHDOG) == [int(np.asarray(array).sum()) for array in arrays]
    future.sent.result(WATCHDOG)


def test_past_the_limit_nothing_is_sent(child: transport.LocalWorker) -> None:
    arrays, before = some(40), messages(child)
    opened("host:0")
    limit = memory.set_snapshot_limit(40 * 300 * 8 - 1)
    try:
        with pytest.raises(ExhaustedError, match="copy=False"):
            child.submit(totals, *arrays)
    finally:
        memory.set_snapshot_limit(limit)
    assert messages(child) == before
    assert memory.statistics().snapshots == 0
    assert child.call(totals, *arrays) == [int(np.asarray(array).sum()) for array in arrays]


# What a peer may claim ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-256, 1, 128, 1024, 1 << 70, 256.0, "256", None, True])
def test_an_offset_outside_the_buffer_is_refused(offset: Any) -> None:
    header = BufferHeader(1024, "host:0", "staging", "host:0")

    def read(*rest: Any) -> Any:
        return payload.read_body(msgpack.packb([[("float64", (64,), 0, "host:0", None, *rest)], b""]), (header,))

    assert read(512)[0][0].offset == 512
    with pytest.raises(CodecError):
        read(768)
    with pytest.raises((CodecError, OverflowError)):
        read(offset)
    with pytest.raises(CodecError):
        read(0, 0)
