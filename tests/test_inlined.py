"""Small arrays of devices inside a message: they arrive as any others do, and hold it while they are not there."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import msgpack
import numpy as np
import pytest
import rpc_service
from device_arrays import opened, read_on_another_stream
from rpc_processes import WATCHDOG, until

import streamrt
import transport
from streamrt import hooks, memory
from streamrt.device import CPU, Device
from streamrt.errors import CaptureError, ExhaustedError, PlacementError
from streamrt.memory import ALIGNMENT
from streamrt.pool import stream_pool
from streamrt.testing import Latch, assert_no_host_sync, without
from transport import inlined, payload
from transport.errors import CodecError
from transport.events import BufferHeader
from transport.payload import INLINE_BYTES, INLINE_TOTAL_BYTES, SMALLEST_BYTES
from transport.pinned import MAX_CHUNK_BYTES, SLOT_BYTES, SLOTTED_BYTES, PinnedPool, pinned_pool
from transport.transfer import ROLE_SERVE, Incoming, even

pytest_plugins = ["rpc_fixtures"]

ONE = Device("host", 1)


def on_host(values: Any, device: str = "host:0") -> Any:
    return streamrt.array(np.asarray(values), device=device)


def moved(peer: transport.Peer) -> dict[str, int]:
    found = peer.statistics()
    return {**found.bytes_out, **{f"{channel} in": nbytes for channel, nbytes in found.bytes_in.items()}}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make small arrays go as buffers where a test is about the message."""
    monkeypatch.setattr("transport.calling.CALL_LOOKS", 1_000_000)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("dtype", ["u1", "f2", "i4", "f8", "c16", "?"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1, 1, 1, 2)])
def test_small_arrays_of_a_device_need_no_buffer(peer: transport.Peer, dtype: str, shape: tuple[int, ...]) -> None:
    x = on_host((np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype), "host:1")
    before = moved(peer).get("staging", 0)
    back = peer.call("echo", x)
    assert str(streamrt.device_of(back)) == "host:1"
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(x))
    assert moved(peer).get("staging", 0) == before


@pytest.mark.usefixtures("patient")
def test_layouts_and_several_devices_in_one_message(peer: transport.Peer) -> None:
    big, small = on_host(np.arange(20.0).reshape(4, 5)), on_host([7.0], "host:1")
    value = [big.T, big[::-1], big[::2, 1::3], small, small, on_host(np.ones(5000), "host:1")]
    back = peer.call("echo", value)
    for one, other in zip(back, value, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        assert streamrt.device_of(one) == streamrt.device_of(other)
    assert back[3] is back[4], "an alias stays one"
    back[3][...] = 9
    assert small[0] == 7


@pytest.mark.usefixtures("patient")
def test_the_sizes_around_the_limit(peer: transport.Peer) -> None:
    for nbytes in (0, 1, 2, 3, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1):
        before = moved(peer).get("staging", 0)
        x = on_host(rpc_service.pattern(nbytes))
        np.testing.assert_array_equal(np.asarray(peer.call("echo", x)), np.asarray(x))
        assert (moved(peer).get("staging", 0) > before) == (nbytes > INLINE_BYTES)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("sizes", "inside"),
    [
        ((40_000, 20_000), True),
        ((40_000, 30_000), False),
        ((2400,) * (inlined.MOST_LATE - 1), True),
        ((2400,) * inlined.MOST_LATE, False),
        ((2400, INLINE_BYTES + 1), False),
    ],
)
def test_arrays_that_are_not_the_smallest_go_inside_together_or_not_at_all(
    peer: transport.Peer, sizes: tuple[int, ...], inside: bool
) -> None:
    """One buffer for many costs less than a copy of each; those of a few bytes go inside in any case."""
    arrays = [on_host(rpc_service.pattern(nbytes)) for nbytes in (*sizes, 8)]
    before = moved(peer).get("staging", 0)
    for one, other in zip(peer.call("echo", arrays), arrays, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    apart = moved(peer).get("staging", 0) - before
    assert apart == 0 if inside else apart >= sum(sizes)


def test_ordinary_memory_travels_inside_up_to_a_limit_each_and_a_total() -> None:
    with transport.local_workers(1) as workers:
        peer = workers[0]

        def goes_apart(*sizes: int) -> int:
            before = sum(peer.statistics().bytes_out.values())
            value = [rpc_service.pattern(nbytes) for nbytes in sizes]
            for one, other in zip(peer.call(rpc_service.echo, value), value, strict=True):
                np.testing.assert_array_equal(one, other)
            return sum(peer.statistics().bytes_out.values()) - before

        assert goes_apart(INLINE_BYTES - 1, INLINE_BYTES, 0) == 0
        assert goes_apart(INLINE_BYTES + 1, INLINE_BYTES) == INLINE_BYTES + 1
        full = INLINE_TOTAL_BYTES // INLINE_BYTES
        assert goes_apart(*[INLINE_BYTES] * (full + 2), SMALLEST_BYTES) == 2 * INLINE_BYTES


def test_a_mapped_device_and_ordinary_memory() -> None:
    with transport.local_workers(1, devices=["host:1"], device_map={"host:0": "host:1", "host:1": "cpu"}) as workers:
        assert workers[0].call(where, on_host([1.0])) == "host:1"
        assert workers[0].call(where, on_host([1.0], "host:1")) == "cpu"
        assert str(streamrt.device_of(workers[0].call(rpc_service.echo, on_host([1.0])))) == "host:0"


def where(x: Any) -> str:
    return str(streamrt.device_of(x))


def test_a_service_gets_the_kind_that_it_declares() -> None:
    torch = pytest.importorskip("torch")
    with transport.local_workers(1, arrays="torch") as workers:
        back = workers[0].call(doubled, on_host(np.arange(3, dtype=np.float32)))
        assert isinstance(back, np.ndarray)
        np.testing.assert_array_equal(back, [0, 2, 4])
        sent = torch.arange(3)
        assert workers[0].call(doubled, sent).tolist() == [0, 2, 4]


def doubled(x: Any) -> Any:
    import torch

    assert isinstance(x, torch.Tensor)
    return x * 2


def test_bytes_that_are_not_there_soon_hold_their_message_alone(peer: transport.Peer) -> None:
    """The caller waits for its reply and for nothing else: the call is under way while the array is not ready."""
    stream = streamrt.current_stream("host:0")
    x = on_host(np.zeros(10))
    before = moved(peer).get("staging", 0)
    results: list[float] = []
    with Latch(stream) as latch:
        stream.launch(rpc_service.fill, x, 3.0, reads=(), writes=(x,))
        with streamrt.using(stream):
            late = threading.Thread(target=lambda: results.append(call_on(stream, peer, x)))
            late.start()
        until(lambda: peer.statistics().open_calls == 1, "the call to be made")
        assert peer.call("add", 1) == 2
        latch.open()
        late.join(WATCHDOG)
    assert results == [30.0]
    assert moved(peer).get("staging", 0) == before


def call_on(stream: streamrt.Stream, peer: transport.Peer, x: Any) -> float:
    with streamrt.using(stream):
        return float(peer.call("total", x))


def test_submit_waits_for_no_device(peer: transport.Peer) -> None:
    stream = streamrt.current_stream("host:0")
    x = on_host(np.zeros(10))
    with Latch(stream), assert_no_host_sync():
        stream.launch(rpc_service.fill, x, 2.0, reads=(), writes=(x,))
        future = peer.submit("total", x)
    assert future.result(WATCHDOG) == 20.0


def test_a_small_reply_is_ordered_on_the_stream_that_is_current_at_the_wait(peer: transport.Peer) -> None:
    """pytorch/pytorch#53717, #54560: also where the bytes came with the message."""
    device = opened("host:0")

    def reads(value: float, *, ordered: bool) -> np.ndarray[Any, Any]:
        def start(stream: streamrt.Stream) -> Any:
            return peer.submit("full_on", "host:0", value, reply_stream=stream)

        return read_on_another_stream(start, device, 100, ordered=ordered)

    before = moved(peer).get("staging in", 0)
    assert (reads(6.0, ordered=True) == 6).all()
    assert (reads(7.0, ordered=False) != 7).any(), "the test does not depend on the wait that it is about"
    assert moved(peer).get("staging in", 0) == before


@pytest.mark.parametrize("blocking", [False, True])
def test_a_small_reply_takes_a_stream_of_its_own(blocking: bool) -> None:
    """The stream that is current where it comes may be a callback's, or busy for another thread: it needs none."""
    pool = stream_pool("host:0", "caller")
    with transport.local_workers(1) as (worker,), streamrt.using(streamrt.Stream("host:0")):
        worker.call(rpc_service.full_on, "host:0", 1.0)
        leases = pool.statistics().leases
        for number in range(3):
            future = None if blocking else worker.submit(rpc_service.full_on, "host:0", 5.0)
            value = worker.call(rpc_service.full_on, "host:0", 5.0) if future is None else future.result(WATCHDOG)
            assert float(value[0]) == 5.0
            assert pool.statistics().leases - leases == number + 1


def test_the_bytes_are_those_of_the_call_in_stream_order() -> None:
    """Calibrates the fetch: on another stream than the array's it would read too early."""
    stream = streamrt.current_stream("host:0")
    info = streamrt.arrays.describe
    for dropped in (False, True):
        x = on_host(np.zeros(10))
        with Latch(stream):
            stream.launch(rpc_service.fill, x, 5.0, reads=(), writes=(x,))
            if dropped:
                with without("snapshot.copy"):
                    fetched = inlined.Fetched(x, info(x))
                until(lambda one=fetched: one.there, "the copy that waits for nothing")
            else:
                fetched = inlined.Fetched(x, info(x))
                assert not fetched.there
        until(lambda one=fetched: one.there, "the copy")
        assert (np.frombuffer(fetched.content()) == (0.0 if dropped else 5.0)).all()


def test_what_is_given_up_keeps_its_memory_until_the_copy_has_run() -> None:
    stream = streamrt.current_stream("host:0")
    x = on_host(np.ones(10))
    held = streamrt.memory.statistics().held_arrays
    with Latch(stream):
        assert inlined.settle([inlined.Fetched(x, streamrt.arrays.describe(x))], 3) == [None]
        assert streamrt.memory.statistics().held_arrays > held
    stream.synchronize(WATCHDOG)
    until(lambda: streamrt.memory.statistics().held_arrays <= held, "the chunk to be given back")


def test_what_is_there_at_once_is_kept_by_nobody() -> None:
    """It costs neither a table's entry nor a later question; the array goes with its user's last reference."""
    stream = streamrt.current_stream("host:0")
    x = on_host(np.ones(10))
    stream.synchronize(WATCHDOG)
    held = streamrt.memory.statistics().held_arrays
    assert inlined.settle([inlined.Fetched(x, streamrt.arrays.describe(x))], 1_000_000) == [np.ones(10).tobytes()]
    assert streamrt.memory.statistics().held_arrays == held
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_a_fetch_that_is_broken_off_keeps_its_chunk() -> None:
    """Whoever gets the chunk next must not have the copy of the one before written over it."""
    stream = streamrt.current_stream("host:0")
    x = on_host(np.full(10, 3.0))
    pool = pinned_pool(stream.device.backend)
    with Latch(stream):
        fetched = inlined.Fetched(x, streamrt.arrays.describe(x))
        address = fetched._chunk.address
        del fetched
        others = [pool.take(80) for _ in range(8)]
        assert address not in {chunk.address for chunk in others}
    stream.synchronize(WATCHDOG)


@pytest.mark.usefixtures("patient")
def test_many_small_arrays_go_in_part_as_buffers(peer: transport.Peer) -> None:
    arrays = [on_host([float(value)]) for value in range(inlined.MOST + 40)]
    before = moved(peer).get("staging", 0)
    assert [float(x[0]) for x in peer.call("echo", arrays)] == [float(value) for value in range(len(arrays))]
    assert moved(peer)["staging"] == before + 40 * ALIGNMENT  # in one buffer


# What a peer may claim ------------------------------------------------------------------------------------------------


def body(*target: Any, content: bytes | None = bytes(8), buffer: int = -1) -> bytes:
    return msgpack.packb([[("float64", (1,), buffer, "host:0", content, *target)], b""])


@pytest.mark.parametrize("target", [("nowhere:0",), (5,), (None,), ("host:0", "host:1"), ("cpu",), (["host:0"],)])
def test_a_target_that_is_none_is_refused(target: tuple[Any, ...]) -> None:
    with pytest.raises(CodecError):
        payload.read_body(body(*target), ())


def test_a_target_needs_bytes() -> None:
    with pytest.raises(CodecError):
        payload.read_body(body("host:0", content=None, buffer=0), (BufferHeader(8, "host:0", "staging", "host:0"),))
    metas, _ = payload.read_body(body("host:1"), ())
    assert metas[0].target == ONE
    assert payload.read_body(body(), ())[0][0].target == CPU


def test_a_peer_puts_arrays_only_where_it_may() -> None:
    agent = transport.Agent(name="other", service=rpc_service.service, devices=["host:0"])
    try:
        peer = transport.loopback(rpc_service.service, serving=agent)
        driver = agent.drivers[0]
        metas, _ = payload.read_body(body("host:1"), ())
        with pytest.raises(PlacementError, match="host:1 is not for this connection"):
            driver.transfers.inlined_targets(metas, reply=False)
        metas, _ = payload.read_body(body("host:0"), ())
        targets = driver.transfers.inlined_targets(metas, reply=False)
        incoming = driver.transfers.lease_inlined(targets, None, reply=False)
        assert [buffer.nbytes for buffer in incoming.fill(metas)] == [8]
        incoming.release()
        peer.close()
    finally:
        agent.close(1.0)


def described(content: bytes) -> payload.ArrayMeta:
    return payload.ArrayMeta("uint8", (len(content),), -1, "host:0", content, len(content), Device("host", 0))


def filled(contents: list[bytes]) -> tuple[Any, Any]:
    """A message of these contents for host:0, as a peer sends it, and its descriptions."""
    metas = list(map(described, contents))
    incoming = Incoming((), ROLE_SERVE)
    incoming.lease(opened("host:0"))
    return incoming, metas


def test_many_arrays_of_a_message_share_few_pinned_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk for each would let a small message pin a thousand times its size."""
    taken: list[int] = []
    usual = PinnedPool.take
    monkeypatch.setattr(PinnedPool, "take", lambda pool, nbytes: (taken.append(nbytes), usual(pool, nbytes))[1])
    large = np.arange(3 << 19, dtype=np.uint32).tobytes()  # 6 MiB
    contents = [bytes([number % 251]) * (number % 7) for number in range(2000)] + [large, b"", b"end"]
    incoming, metas = filled(contents)
    buffers = incoming.fill(metas)
    assert sum(taken) == sum(even(len(content)) for content in contents)
    assert len(taken) == 2
    incoming.streams[0].synchronize()
    seen = [bytes(buffer.host_view()[: len(content)]) for buffer, content in zip(buffers, contents, strict=True)]
    assert seen == contents
    incoming.release()


def test_a_chunk_is_read_to_the_end_where_the_next_one_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been enqueued still reads the pinned memory that came first, which nobody else may have."""
    contents = [bytes(MAX_CHUNK_BYTES), b"more"]
    incoming, metas = filled(contents)
    pool, usual, free = pinned_pool(opened("host:0").backend), PinnedPool.take, PinnedPool._give_back
    given_back: list[int] = []

    def take(pool: PinnedPool, nbytes: int) -> Any:
        if nbytes < MAX_CHUNK_BYTES:
            raise MemoryError("no pinned memory")
        return usual(pool, nbytes)

    def give_back(pool: PinnedPool, block: Any) -> None:
        given_back.append(block.nbytes)
        free(pool, block)

    pool.take(MAX_CHUNK_BYTES)
    memory.drain(everything=True)
    monkeypatch.setattr(pool, "_slots", None)
    monkeypatch.setattr(PinnedPool, "take", take)
    monkeypatch.setattr(PinnedPool, "_give_back", give_back)
    with Latch(incoming.streams[0]):
        with pytest.raises(MemoryError):
            incoming.fill(metas)
        memory.drain(everything=True)
        assert not given_back
    incoming.streams[0].synchronize()
    memory.drain(everything=True)
    assert given_back == [MAX_CHUNK_BYTES]
    incoming.release()


def test_the_few_bytes_of_many_messages_share_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no event for each message; the chunk goes back when the copies of all have run."""
    pool, free = pinned_pool(opened("host:0").backend), PinnedPool._give_back
    given_back: list[int] = []

    def give_back(pool: PinnedPool, block: Any) -> None:
        given_back.append(block.address)
        free(pool, block)

    monkeypatch.setattr(pool, "_slots", None)
    monkeypatch.setattr(PinnedPool, "_give_back", give_back)
    incoming, _ = filled([])
    (stream,) = incoming.streams
    contents = [bytes([number]) * (number % 9) for number in range(2 * (SLOTTED_BYTES // SLOT_BYTES))]
    buffers, recorded, chunks = [], [], {}
    with contextlib.ExitStack() as told, Latch(stream):
        told.callback(hooks.listen(recorded.append))
        for content in contents:
            buffers += incoming.fill([described(content), described(b"!")])
            chunks[pool._slots._chunk.address] = None  # type: ignore[union-attr]
        first, _ = chunks
        assert sum(isinstance(record, hooks.Recorded) for record in recorded) <= 1, "one for all of a chunk"
        memory.drain(everything=True)
        assert first not in given_back, "its copies have not run"
    stream.synchronize()
    seen = [bytes(buffer.host_view()[: len(content)]) for buffer, content in zip(buffers[::2], contents, strict=True)]
    assert seen == contents
    memory.drain(everything=True)
    assert first in given_back
    incoming.release()


def test_a_shared_chunk_waits_for_every_stream_that_copies_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, given_back = pinned_pool(opened("host:0").backend), []
    monkeypatch.setattr(pool, "_slots", None)
    monkeypatch.setattr(PinnedPool, "_give_back", lambda pool, block: given_back.append(block.address))
    (slow, _), (quick, _) = filled([]), filled([])
    with Latch(slow.streams[0]):
        slow.fill([described(b"slow")])
        quick.fill([described(b"quick")])
        chunk = pool._slots._chunk.address  # type: ignore[union-attr]
        pool._slots = None
        memory.drain(everything=True)
        assert chunk not in given_back, "one of the copies has not run"
    slow.streams[0].synchronize()
    memory.drain(everything=True)
    assert chunk in given_back
    slow.release()
    quick.release()


def test_streams_are_given_back_where_one_of_them_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while somebody keeps the error, as a future does."""
    peer = transport.loopback(rpc_service.service)
    try:
        driver = peer._driver
        made: list[Incoming] = []
        usual = Incoming.lease

        def lease(incoming: Incoming, device: Device) -> None:
            made.append(incoming)
            if device.index == 1:
                raise ExhaustedError("no stream")
            usual(incoming, device)

        monkeypatch.setattr(Incoming, "lease", lease)
        with pytest.raises(ExhaustedError):
            driver.transfers.lease_inlined([Device("host", 0), ONE], None, reply=False)
        assert not made[0].leases
    finally:
        peer.close()


@pytest.mark.parametrize("value", [3.0, None], ids=["in the body", "as a buffer"])
def test_a_reply_never_becomes_part_of_a_graph(peer: transport.Peer, value: float | None) -> None:
    """Whoever puts it in place would enqueue copies on a stream that the user captures, to be replayed with it."""
    ended: list[BaseException | None] = []
    x = on_host(np.zeros(1 << 16, np.float32))

    def step(_: Any) -> None:
        stream = streamrt.current_stream("host:0")
        with streamrt.using(streamrt.Stream("host:0")):
            future = peer.submit("full_on", "host:0", value, reply_stream=stream) if value else echoed(stream)
        ended.append(future.exception(WATCHDOG))

    def echoed(stream: streamrt.Stream) -> Any:
        return peer.submit("echo", x, reply_stream=stream)

    with streamrt.using(streamrt.Stream("host:0")), pytest.raises(CaptureError, match="has enqueued nothing"):
        streamrt.capture(step, x, warmup=0)
    assert isinstance(ended[0], CaptureError)
    assert "reply_stream" in str(ended[0])
    assert peer.call("full_on", "host:0", 2.0)[0] == 2.0
