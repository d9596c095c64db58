"""Messages that are held while the bytes of their small arrays are on their way to the host."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rpc_service
from rpc_processes import WATCHDOG, until
from simulation import World
from test_forks import in_child
from traffic import Program, overwrite, pattern, written_later

import streamrt
import transport
from streamrt import memory
from streamrt.errors import CaptureError, ClosedError, DeviceError
from streamrt.testing import Latch, assert_no_host_sync
from transport import inlined, payload
from transport.context import current_call
from transport.errors import DeadlineError, PeerLostError
from transport.events import Key, Side
from transport.held import IN_TURN, OLDEST, Held
from transport.pinned import pinned_pool

pytest_plugins = ["rpc_fixtures"]

SIZE = 10  # elements of eight bytes


@pytest.fixture
def child() -> Iterator[transport.LocalWorker]:
    """A child that shares memory with this process, and runs the functions below."""
    with transport.local_workers(1, devices=["host:0"]) as workers:
        yield workers[0]


# what the child runs

_ran: Counter[str] = Counter()
_latches: dict[str, Latch] = {}
_seen = {"begun": threading.Event()}


def total(x: Any, name: str = "") -> float:
    _ran[name] += 1
    return float(np.asarray(x).sum())


def ran(name: str) -> int:
    return _ran[name]


def late_result(name: str, value: float) -> Any:
    """An array that is filled when the latch of that name is opened."""
    _ran[name] += 1
    x = streamrt.array(np.zeros(SIZE), device="host:0")
    stream = streamrt.current_stream("host:0")
    _latches[name] = Latch(stream)
    stream.launch(rpc_service.fill, x, value, reads=(), writes=(x,))
    return x


def late_result_once_cancelled(name: str) -> Any:
    _seen["begun"].set()
    until(transport.cancelled, "the caller to give up")
    return late_result(name, 1.0)


def failing() -> None:
    raise KeyError("no such layer")


def failing_result(name: str) -> Any:
    """An array whose stream fails when the latch of that name is opened."""
    x = streamrt.array(np.zeros(SIZE), device="host:0")
    stream = streamrt.current_stream("host:0")
    _latches[name] = Latch(stream)
    stream.launch(failing)
    return x


def open_latch(name: str) -> None:
    _latches.pop(name).open()


def served_here() -> tuple[int, int]:
    """How many replies are held there, and how many calls count as running, but for this one."""
    driver = transport.caller()._driver
    return len(driver.transfers._held.messages), len(driver.served.calls) - 1


# what this process does


def held(peer: transport.Peer) -> int:
    return len(peer._driver.transfers._held.messages)


def on_host(values: Any, device: str = "host:0") -> Any:
    return streamrt.array(np.asarray(values), device=device)


@contextlib.contextmanager
def closed_stream() -> Iterator[tuple[streamrt.Stream, Latch]]:
    """A stream of its own, current, behind a closed latch."""
    stream = streamrt.Stream("host:0")
    with Latch(stream) as latch, streamrt.using(stream):
        yield stream, latch
    stream.synchronize(WATCHDOG)


def filled(value: float, size: int = SIZE) -> Any:
    """An array that is there when the current stream comes to it."""
    x = on_host(np.zeros(size))
    streamrt.current_stream("host:0").launch(rpc_service.fill, x, value, reads=(), writes=(x,))
    return x


def free_chunks() -> int:
    """Bytes of pinned memory that nobody uses, once what copies kept is let go as the next user of memory would."""
    memory.drain(everything=True)
    return pinned_pool(streamrt.current_stream("host:0").device.backend)._cached


def held_arrays() -> int:
    memory.drain(everything=True)
    return memory.statistics().held_arrays


@pytest.fixture
def chunks() -> Iterator[None]:
    """Every chunk of pinned memory that a test takes comes back: `free_chunks` is as before."""
    stream = streamrt.current_stream("host:0")
    pool = pinned_pool(stream.device.backend)
    pool.slot(stream)  # of a chunk that the pool itself keeps
    taken = [pool.take(64) for _ in range(16)]
    del taken
    gc.collect()
    until(lambda: held_arrays() == 0, "copies of tests before to be over")
    before = free_chunks()
    yield
    until(lambda: free_chunks() >= before, lambda: f"{before - free_chunks()} bytes of chunks to come back")


pytestmark = pytest.mark.usefixtures("chunks")


# calls ----------------------------------------------------------------------------------------------------------------


def test_a_held_call_goes_when_its_bytes_are_there(child: transport.LocalWorker) -> None:
    with closed_stream() as (_, latch):
        before = child.statistics()
        with assert_no_host_sync():
            future = child.submit(total, filled(2.0))
        assert held(child) == 1
        found = child.statistics()
        assert (found.open_calls, found.messages_out) == (1, before.messages_out)
        assert child.call(abs, -1) == 1, "others pass it"
        assert not future.done()
        assert not future.sent.done()
        latch.open()
        assert future.result(WATCHDOG) == 20.0
        future.sent.result(WATCHDOG)
    found = child.statistics()
    assert (held(child), found.open_calls, found.bytes_out) == (0, 0, before.bytes_out)


def test_what_is_there_at_once_is_sent_at_once(child: transport.LocalWorker) -> None:
    x = on_host(np.ones(SIZE))
    streamrt.current_stream("host:0").synchronize(WATCHDOG)
    for _ in range(20):
        future = child.submit(total, x)
        assert future.result(WATCHDOG) == SIZE
        future.sent.result(WATCHDOG)
    assert held(child) == 0


def test_the_bytes_are_those_of_the_call(child: transport.LocalWorker) -> None:
    with closed_stream() as (stream, latch):
        x = filled(2.0)
        future = child.submit(total, x)
        stream.launch(rpc_service.fill, x, 7.0, reads=(), writes=(x,))
        latch.open()
        assert future.result(WATCHDOG) == 20.0


def test_several_arrays_and_others_in_one_message(child: transport.LocalWorker) -> None:
    with closed_stream() as (_, latch):
        arrays = [filled(float(number)) for number in range(inlined.MOST_LATE)]
        future = child.submit(rpc_service.echo, {"x": arrays, "plain": np.arange(5), "again": arrays[3]})
        assert held(child) == 1
        latch.open()
        back = future.result(WATCHDOG)
    assert [float(x[0]) for x in back["x"]] == [float(number) for number in range(inlined.MOST_LATE)]
    assert back["again"] is back["x"][3]
    np.testing.assert_array_equal(back["plain"], np.arange(5))


def test_arrays_of_two_streams_are_waited_for_both(child: transport.LocalWorker) -> None:
    other = streamrt.Stream("host:1")
    with Latch(other) as second, closed_stream() as (_, first), streamrt.using(other):
        x, y = filled(1.0), on_host(np.zeros(SIZE), "host:1")
        other.launch(rpc_service.fill, y, 2.0, reads=(), writes=(y,))
        late = payload_of(child, [x, y])
        first.open()
        until(lambda: late._fetched[0].there, "the first")
        assert not late.there
        second.open()
        until(lambda: late.there, "both")
    metas, _ = payload.read_body(late.body(), ())
    assert [np.frombuffer(meta.inline or b"")[0] for meta in metas] == [1.0, 2.0]


def payload_of(peer: transport.Peer, value: Any) -> inlined.Late:
    """What a message of that value waits for."""
    devices = peer._driver.device_map()
    prepared = payload.prepare(value, devices, lambda device: device, channel_of=lambda *_: "staging", hold=True)
    assert prepared.late is not None
    assert (prepared.body, prepared.headers, prepared.snapshots) == (b"", (), ())
    return prepared.late


def test_a_message_that_waits_keeps_none_of_the_users_arrays(child: transport.LocalWorker) -> None:
    """They would end under a lock, on a thread that is not the user's."""
    with closed_stream() as (stream, latch):
        x = filled(1.0)
        gone = weakref.ref(x)
        late = payload_of(child, [x])
        del x
        latch.open()
        stream.synchronize(WATCHDOG)

    def dropped() -> bool:
        memory.drain(everything=True)
        return gone() is None

    until(dropped, "the array to end")
    assert late.there
    assert np.frombuffer(payload.read_body(late.body(), ())[0][0].inline or b"")[0] == 1.0


def test_a_held_call_is_awaited(child: transport.LocalWorker) -> None:
    async def main() -> float:
        with closed_stream() as (_, latch):
            future = child.submit(total, filled(2.0))
            waiting = asyncio.ensure_future(waited(future))
            await asyncio.sleep(0)
            assert held(child) == 1
            latch.open()
            return await asyncio.wait_for(waiting, WATCHDOG)

    async def waited(future: Any) -> float:
        return float(await future)

    assert asyncio.run(main()) == 20.0


def test_an_await_that_is_cancelled_drops_what_it_waits_for(child: transport.LocalWorker) -> None:
    async def main() -> None:
        future = child.submit(total, filled(2.0), "awaited")

        async def waits() -> None:
            await future

        waiting = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        future.cancel()

    with closed_stream():
        asyncio.run(main())
        until(lambda: held(child) == 0, "the call to be dropped")
    assert child.call(ran, "awaited") == 0


def test_a_cancelled_call_is_never_made(child: transport.LocalWorker) -> None:
    with closed_stream() as (_, latch):
        future = child.submit(total, filled(2.0), "cancelled")
        copied = held_arrays()
        assert copied
        before = child.statistics().messages_out
        assert future.cancel()
        assert (held(child), child.statistics().open_calls) == (0, 0)
        with pytest.raises(CancelledError):
            future.result(WATCHDOG)
        with pytest.raises(PeerLostError, match="not sent"):
            future.sent.result(WATCHDOG)
        assert child.statistics().messages_out == before, "the peer knows nothing of it"
        assert held_arrays() == copied, "the copy has yet to run"
        latch.open()
    assert child.call(ran, "cancelled") == 0
    until(lambda: held_arrays() == 0, "what the copy needs to be given back")


@pytest.mark.parametrize("read", ["before", "behind"])
def test_a_cancel_that_crosses_the_send_cancels_what_was_sent(child: transport.LocalWorker, read: str) -> None:
    """The id that the cancel has read is that of before, or already the new one."""
    driver = child._driver
    with closed_stream() as (stream, latch):
        future = child.submit(total, filled(2.0), "crossed")
        commands: list[int] = []
        given = driver.command

        def command(one: Any) -> None:
            commands.append(one.call)
            if len(commands) == 1:
                latch.open()
                stream.synchronize(WATCHDOG)
                driver.look()  # so that it goes between the two
            given(one)

        with driver.lock:
            if read == "behind":
                latch.open()
                stream.synchronize(WATCHDOG)
                driver.look()
            driver.command = command  # type: ignore[method-assign]
            try:
                assert future.cancel()
            finally:
                driver.command = given  # type: ignore[method-assign]
        assert commands == ([-1, 1] if read == "before" else [1])
        with pytest.raises(CancelledError):
            future.result(WATCHDOG)
        assert child.statistics().open_calls == 0
    assert child.call(abs, -1) == 1


def test_cancels_and_sends_at_once_leave_nothing(child: transport.LocalWorker) -> None:
    for number in range(60):
        with closed_stream() as (_, latch):
            future = child.submit(total, filled(2.0))
            opener = threading.Thread(target=latch.open)
            opener.start()
            cancelled = future.cancel()
            opener.join(WATCHDOG)
            if not cancelled:
                assert future.result(WATCHDOG) == 20.0, number
    until(lambda: (held(child), child.statistics().open_calls) == (0, 0), "all to end")
    assert child.call(abs, -1) == 1


def test_the_time_of_a_held_call_runs(child: transport.LocalWorker) -> None:
    with closed_stream():
        future = child.submit(total, filled(2.0), "expired", timeout=0.05)
        with pytest.raises(DeadlineError, match="before it was sent"):
            future.result(WATCHDOG)
        assert held(child) == 0
        with pytest.raises(PeerLostError, match="not sent"):
            future.sent.result(WATCHDOG)
        with pytest.raises(DeadlineError, match="before it was sent"):
            child.call(total, filled(2.0), "expired", timeout=0.05)
        with pytest.raises(DeadlineError, match="before it was sent"):
            child.submit(total, filled(2.0), "expired", timeout=1e-9).result(WATCHDOG)
        assert (held(child), child.statistics().open_calls) == (0, 0)
    assert child.call(ran, "expired") == 0


def test_a_held_call_takes_its_deadline_along(child: transport.LocalWorker) -> None:
    with closed_stream() as (_, latch):
        future = child.submit(has_deadline, filled(2.0), timeout=WATCHDOG)
        latch.open()
        assert future.result(WATCHDOG) is True


def has_deadline(x: Any) -> bool:
    return current_call().deadline is not None


def test_close_lets_a_held_call_be_made(child: transport.LocalWorker) -> None:
    """As any that was begun before."""
    driver = child._driver
    with closed_stream() as (_, latch):
        future = child.submit(total, filled(2.0))
        closing = threading.Thread(target=child.close, args=(WATCHDOG,))
        closing.start()
        until(lambda: driver.protocol._farewell.leaving, "the end to begin")
        with pytest.raises(streamrt.ClosedError):
            child.submit(total, filled(2.0))
        assert (held(child), driver.closed) == (1, None)
        latch.open()
        assert future.result(WATCHDOG) == 20.0
        closing.join(WATCHDOG)
    assert driver.closed is not None
    assert driver.closed.graceful


def test_close_gives_up_a_held_call_in_time(child: transport.LocalWorker) -> None:
    with closed_stream():
        future = child.submit(total, filled(2.0))
        child.close(0.05)
        with pytest.raises(PeerLostError, match="it was not sent"):
            future.result(WATCHDOG)
        with pytest.raises(PeerLostError, match="not sent"):
            future.sent.result(WATCHDOG)
        assert held(child) == 0


def test_abort_ends_held_calls(child: transport.LocalWorker) -> None:
    with closed_stream() as (_, latch):
        futures = [child.submit(total, filled(2.0)) for _ in range(OLDEST + 2)]
        assert held(child) == OLDEST + 2
        child.abort()
        for future in futures:
            with pytest.raises(PeerLostError, match="it was not sent"):
                future.result(WATCHDOG)
        latch.open()
    assert (held(child), child.statistics().open_calls) == (0, 0)
    assert not child._driver.polling


def test_the_death_of_the_peer_ends_held_calls(child: transport.LocalWorker) -> None:
    with closed_stream() as (_, latch):
        future = child.submit(total, filled(2.0))
        assert held(child) == 1
        os.kill(child.process.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="it was not sent"):
            future.result(WATCHDOG)
        latch.open()
    assert (held(child), child.statistics().open_calls) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_leaves_the_held_calls_of_its_parent_alone(child: transport.LocalWorker) -> None:
    with closed_stream() as (_, latch):
        x = filled(2.0)
        future = child.submit(total, x, "forked")

        def in_the_child() -> str:
            with pytest.raises(streamrt.ClosedError):
                child.submit(total, np.ones(3))
            future.cancel()  # its own
            return "fine"

        assert in_child(in_the_child) == "'fine'"
        assert held(child) == 1
        latch.open()
        assert future.result(WATCHDOG) == 20.0
    assert child.call(ran, "forked") == 1


def test_bytes_that_a_graph_has_taken_end_their_held_call_alone(
    child: transport.LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody began a capture on the stream between the look at it and the record: the driver says so from then on."""

    def taken(fetched: Any) -> bool:
        raise CaptureError("the event's newest record is part of a capture")

    with closed_stream() as (_, latch):
        future = child.submit(total, filled(2.0), "captured")
        assert held(child) == 1
        with monkeypatch.context() as patch:
            patch.setattr(inlined.Fetched, "there", property(taken))
            child.submit(ran, "captured")  # something to look for
            assert isinstance(future.exception(WATCHDOG), CaptureError)
        assert held(child) == 0
        assert child.call(ran, "captured") == 0
        latch.open()


def test_a_device_that_fails_ends_its_held_call_alone(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream("host:0")
    with Latch(stream) as latch, streamrt.using(stream):
        stream.launch(failing)
        futures = [child.submit(total, filled(2.0), "failed"), child.submit(total, filled(2.0), "failed")]
        with closed_stream() as (_, other):
            well = child.submit(total, filled(3.0))
            assert held(child) == 3
            latch.open()
            for future in futures:
                assert isinstance(future.exception(WATCHDOG), DeviceError)
                with pytest.raises(PeerLostError, match="not sent"):
                    future.sent.result(WATCHDOG)
            assert held(child) == 1
            other.open()
            assert well.result(WATCHDOG) == 30.0
    assert child.call(ran, "failed") == 0
    assert child.statistics().open_calls == 0


def test_a_notify_is_not_held(child: transport.LocalWorker) -> None:
    with closed_stream() as (_, latch):
        before = child.statistics().messages_out
        sent = child.notify(total, filled(2.0), "notified")
        assert held(child) == 0
        assert child.statistics().messages_out > before, "its header goes ahead"
        latch.open()
        sent.result(WATCHDOG)
    until(lambda: child.call(ran, "notified") == 1, "it to run")


def test_past_a_limit_messages_are_not_held(child: transport.LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.moving.MAX_HELD", 3)
    with closed_stream() as (_, latch):
        futures = [child.submit(total, filled(float(number))) for number in range(6)]
        assert held(child) == 3
        assert child.statistics().open_calls == 6
        latch.open()
        assert [future.result(WATCHDOG) for future in futures] == [10.0 * number for number in range(6)]
    assert sum(child.statistics().bytes_out.values()) == 3 * 8 * SIZE


@pytest.mark.parametrize("what", ["large", "many", "inline"])
def test_where_others_go_apart_nothing_is_held(child: transport.LocalWorker, what: str) -> None:
    with closed_stream() as (_, latch):
        small = filled(2.0)
        match what:
            case "large":
                value: list[Any] = [small, filled(1.0, 9000)]
            case "many":
                value = [filled(2.0) for _ in range(inlined.MOST_LATE + 1)]
            case _:  # a body of any size would be kept for as long as the stream takes
                value = [small, *(np.zeros(payload.INLINE_BYTES, np.uint8) for _ in range(16)), np.zeros(200)]
        future = child.submit(rpc_service.echo, value)
        assert held(child) == 0
        latch.open()
        for one, other in zip(future.result(WATCHDOG), value, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert sum(child.statistics().bytes_out.values()) > 0


@pytest.mark.parametrize("more", [0, 1, 5, 40])
def test_no_held_call_waits_for_the_stream_of_another(child: transport.LocalWorker, more: int) -> None:
    """However many were held before it: what these wait for may be its reply."""
    with closed_stream() as (_, first):
        before = [child.submit(total, filled(1.0)) for _ in range(OLDEST + more)]
        with closed_stream() as (_, second):
            between = child.submit(total, filled(2.0))
            behind = [child.submit(total, filled(1.0)) for _ in range(3)]
            last = child.submit(total, filled(3.0))
            second.open()
            assert between.result(WATCHDOG) == 20.0
            assert last.result(WATCHDOG) == 30.0
            assert [future.result(WATCHDOG) for future in behind] == [10.0] * 3
        assert held(child) == OLDEST + more
        first.open()
        assert [future.result(WATCHDOG) for future in before] == [10.0] * len(before)


def test_each_look_asks_a_few_and_all_in_turn() -> None:
    asked: list[int] = []
    waiting = Held()

    class One:
        def __init__(self, number: int) -> None:
            self.number = number

        @property
        def there(self) -> bool:
            asked.append(self.number)
            return False

    for number in range(20):
        waiting.add(Key(number, True, Side.REQUEST), One(number), print)  # type: ignore[arg-type]
    for _ in range((20 - OLDEST) // IN_TURN):
        before = len(asked)
        assert waiting.take() is None
        assert len(asked) - before <= OLDEST + IN_TURN
    assert set(asked) == set(range(20))
    assert waiting.drop(Key(3, True, Side.REQUEST))
    assert not waiting.drop(Key(3, True, Side.REQUEST))
    assert len(waiting.messages) == 19


def test_two_threads_look_at_one_message() -> None:
    """Without the lock one asks whether it pays to take it, while the other has it."""
    late: inlined.Late
    looks: list[bool] = []

    class There:
        there = True

        def content(self) -> bytes:
            return b"x"

    class Crossed(There):
        @property
        def there(self) -> bool:  # type: ignore[override]
            if not looks:  # another thread looks just now
                looks.append(True)
                looks.append(late.there)
            return True

    class NotThere(There):
        there = False

    late = inlined.Late([NotThere(), Crossed()], b"".join)  # type: ignore[list-item]
    assert not late.there
    assert looks == [True, False]
    looks.clear()
    late = inlined.Late([Crossed()], b"".join)  # type: ignore[list-item]
    assert late.there
    assert late.body() == b"x"


def test_what_is_lent_is_sent_when_its_bytes_are_there(peer: transport.Peer) -> None:
    """``copy=False``: whoever waits for `sent` writes to it from anywhere, also past the stream."""
    with closed_stream() as (_, latch):
        x = filled(2.0)
        future = peer.submit("total", x, copy=False)
        assert held(peer) == 1
        assert not future.sent.done()
        latch.open()
        future.sent.result(WATCHDOG)
        np.asarray(x)[...] = 9.0
        assert future.result(WATCHDOG) == 20.0


def test_a_call_that_waits_holds_and_takes_its_reply_itself(child: transport.LocalWorker) -> None:
    results: list[float] = []
    with closed_stream() as (stream, latch):
        x = filled(2.0)

        def call() -> None:
            with streamrt.using(stream):
                results.append(child.call(total, x))

        calling = threading.Thread(target=call)
        calling.start()
        until(lambda: held(child) == 1, "it to be held")
        latch.open()
        calling.join(WATCHDOG)
    assert results == [20.0]


def test_a_function_that_is_called_holds_its_own_calls(child: transport.LocalWorker) -> None:
    service = transport.Service()
    streams: list[Latch] = []

    @service.function(name="relay")
    def relay() -> tuple[float, int]:
        with closed_stream() as (_, latch):
            future = child.submit(total, filled(2.0))
            found = held(child)
            streams.append(latch)
            until(lambda: latch.opened, "the latch")
            return future.result(WATCHDOG), found

    with transport.loopback(service) as outer:
        future = outer.submit("relay")
        until(lambda: streams, "the inner call")
        assert not future.done()
        streams[0].open()
        assert future.result(WATCHDOG) == (20.0, 1)


def test_inside_one_process_nothing_is_held() -> None:
    """Memory is handed over there, which takes no copy to the host."""
    with transport.loopback(rpc_service.service) as peer, closed_stream() as (_, latch):
        future = peer.submit("total", filled(2.0))
        assert held(peer) == 0
        latch.open()
        assert future.result(WATCHDOG) == 20.0
        assert peer.statistics().bytes_out == {"same_process": 8 * SIZE}


def test_a_held_call_that_has_ended_leaves_no_cycle(child: transport.LocalWorker) -> None:
    gc.collect()
    gc.disable()
    try:
        for cancel in (False, True):
            with closed_stream() as (_, latch):
                future = child.submit(total, filled(2.0))
                gone = weakref.ref(future)
                if cancel:
                    future.cancel()
                latch.open()
                future.exception(WATCHDOG) if not cancel else None
                del future
            until(lambda gone=gone: gone() is None, "the future to end")  # type: ignore[misc]
    finally:
        gc.enable()


# replies --------------------------------------------------------------------------------------------------------------


def test_a_held_reply_goes_when_its_bytes_are_there(child: transport.LocalWorker) -> None:
    future = child.submit(late_result, "reply", 4.0)
    until(lambda: child.call(served_here) == (1, 1), "the reply to be held")
    before = child.statistics()
    assert before.open_calls == 1
    assert not future.done()
    child.call(open_latch, "reply")
    assert (np.asarray(future.result(WATCHDOG)) == 4.0).all()
    assert child.call(served_here) == (0, 0)
    assert child.statistics().bytes_in == {}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_held_reply_that_nobody_wants_is_dropped(child: transport.LocalWorker, how: str) -> None:
    """Else a graceful end would wait for the callee's device."""
    future = child.submit(late_result, "dropped", 4.0, timeout=None if how == "cancel" else 2.0)
    if how == "cancel":
        until(lambda: child.call(served_here) == (1, 1), "the reply to be held")
        future.cancel()
    else:
        with pytest.raises(DeadlineError):
            future.result(WATCHDOG)
    until(lambda: child.call(ran, "dropped") == 1 and child.call(served_here) == (0, 0), "it to be dropped")
    driver = child._driver
    child.close(WATCHDOG)
    assert driver.closed is not None
    assert driver.closed.graceful


def test_a_reply_that_nobody_wants_is_not_held(child: transport.LocalWorker) -> None:
    future = child.submit(late_result_once_cancelled, "late")
    child.call(wait_for, "begun")
    future.cancel()
    until(lambda: child.call(ran, "late") == 1, "the function to return")
    until(lambda: child.call(served_here) == (0, 0), "its call to be over")


def test_a_notified_function_holds_nothing(child: transport.LocalWorker) -> None:
    child.notify(late_result, "notified", 4.0).result(WATCHDOG)
    until(lambda: child.call(ran, "notified") == 1, "the function to return")
    until(lambda: child.call(served_here) == (0, 0), "its call to be over")


def wait_for(name: str) -> None:
    assert _seen[name].wait(WATCHDOG)


def test_close_waits_for_a_held_reply(child: transport.LocalWorker, tmp_path: Path) -> None:
    driver = child._driver
    future = child.submit(late_result, "closing", 4.0)
    until(lambda: child.call(served_here) == (1, 1), "the reply to be held")
    told = tmp_path / "told"
    opening = child.submit(open_when, str(told), "closing")
    closing = threading.Thread(target=child.close, args=(WATCHDOG,))
    closing.start()
    until(lambda: driver.protocol._farewell.leaving, "the end to begin")
    assert driver.closed is None
    told.touch()
    opening.result(WATCHDOG)
    assert (np.asarray(future.result(WATCHDOG)) == 4.0).all()
    closing.join(WATCHDOG)
    assert driver.closed is not None
    assert driver.closed.graceful


def open_when(path: str, name: str) -> None:
    until(lambda: os.path.exists(path), "the latch to be wanted")
    open_latch(name)


def test_a_device_that_fails_ends_the_call_of_a_held_reply(child: transport.LocalWorker) -> None:
    future = child.submit(failing_result, "failed")
    until(lambda: child.call(served_here) == (1, 1), "the reply to be held")
    child.submit(open_latch, "failed")
    assert isinstance(future.exception(WATCHDOG), DeviceError)

    def over() -> bool:
        try:
            return bool(child.call(served_here) == (0, 0))
        except (ClosedError, PeerLostError):  # a failed device ends a worker
            return True

    until(over, "its call to be over")


# simulated ------------------------------------------------------------------------------------------------------------


SCHEDULES = ["lazy", "random", "priority"]
SMALL = 100  # elements of four bytes


def held_there(world: World) -> int:
    return sum(len(driver.transfers._held.messages) for joint in world.joints for driver in joint.drivers)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("apart", [False, True])
def test_simulated_calls_and_replies_are_held_and_arrive(
    schedule: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.payload.HOLD_LOOKS", 0)  # each runs some of what is enqueued
    most = 0
    for seed in range(4):
        runs: Counter[str] = Counter()
        with World(seed, schedule) as world:
            service = Program(world, runs).service
            joint = world.connect(world.side("a", apart=apart), world.side("b", service, apart=apart))
            futures = []
            for number in range(6):
                x = written_later(pattern(str(number), SMALL), f"host:{number % 2}")
                futures.append(joint.peer.submit("double_later", str(number), x))
                overwrite(x, f"host:{number % 2}")
                del x
                most = max(most, held_there(world))
            for number, future in enumerate(futures):
                assert np.array_equal(future.result(), pattern(str(number), SMALL) * 2)
            del future
            futures.clear()
            assert set(runs.values()) == {1}
            world.settle()
            world.check_quiet()
    assert (most > 0) == apart, "in one process nothing is held"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("what", ["cancel", "close", "kill a", "kill b", "abort"])
def test_what_ends_a_simulated_call_at_any_step_leaves_nothing(
    schedule: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it is held, and while its reply is."""
    for looks in ("running.REPLY_LOOKS", "running.LAST_LOOKS", "payload.HOLD_LOOKS"):
        monkeypatch.setattr(f"transport.{looks}", 0)  # each runs some of what is enqueued
    while_held: Counter[int] = Counter()
    for step in range(40):
        runs: Counter[str] = Counter()
        with World(step, schedule) as world:
            a, b = world.side("a", apart=True), world.side("b", Program(world, runs).service, apart=True)
            joint = world.connect(a, b)
            x = written_later(pattern("x", SMALL), "host:0")
            future = joint.peer.submit("double_later", "x", x)
            del x
            for _ in range(step):
                world.step()
            for number, driver in enumerate(joint.drivers):
                while_held[number] += len(driver.transfers._held.messages)
            match what:
                case "cancel":
                    future.cancel()
                case "close":
                    joint.drivers[0].goodbye()
                case "abort":
                    joint.drivers[0].abort("enough")
                case _:
                    world.kill(a if what == "kill a" else b)
            world.settle()
            if what != "kill a":
                assert future.done()
                error = None if future.cancelled() else future.exception()
                assert error is None or isinstance(error, PeerLostError | CancelledError), error
                if what == "close":
                    assert np.array_equal(future.result(), pattern("x", SMALL) * 2)
                    assert all(driver.closed is not None and driver.closed.graceful for driver in joint.drivers)
            assert max(runs.values(), default=0) <= 1
            assert held_there(world) == 0
            del future
            world.settle()
            world.check_quiet()
    assert while_held[0], "no step met the call while it was held"
    assert while_held[1], "no step met the reply while it was held"
