"""Room for replies: each connection has its own, a result waits for it, and nothing else does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from rpc_processes import WATCHDOG, until

import transport
from transport.reply_room import ReplyRoom

MIB = 1 << 20


def never() -> bool:
    return False


def test_replies_share_the_room_and_one_of_any_size_passes_alone() -> None:
    room = ReplyRoom(limit=100)
    large = room.share(never)
    large.take(1000)
    small = room.share(never)
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(small.take, 1)
        until(lambda: room.short, "the small reply to wait")
        assert not taking.done()
        large.give_back()
        taking.result(WATCHDOG)
    assert not room.short
    beside = room.share(never)
    beside.take(99)
    assert not room.short


def test_giving_back_twice_gives_back_once() -> None:
    room = ReplyRoom(limit=100)
    first, second = room.share(never), room.share(never)
    first.take(60)
    second.take(40)
    first.give_back()
    first.give_back()
    third, fourth = room.share(never), room.share(never)
    third.take(60)
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(fourth.take, 1)
        until(lambda: room.short, "the room to be full")
        third.give_back()
        taking.result(WATCHDOG)


def test_a_reply_that_nobody_wants_waits_no_longer() -> None:
    room = ReplyRoom(limit=100)
    room.share(never).take(100)
    given_up = threading.Event()
    unwanted = room.share(given_up.is_set)
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(unwanted.take, 50)
        until(lambda: room.short, "the reply to wait")
        given_up.set()
        taking.result(WATCHDOG)


@pytest.fixture
def serving() -> Any:
    """An agent that serves `made`, whose ends are here to be looked at."""
    service = transport.Service()

    @service.function(name="made")
    def made(nbytes: int, value: int) -> Any:
        return np.full(nbytes, value, np.uint8)

    agent = transport.Agent(name="serving", service=service, threads=2)
    yield agent
    agent.close(0.0)


def connected(agent: transport.Agent) -> tuple[transport.Peer, Any]:
    before = set(agent._drivers)
    peer = transport.loopback(agent.service, serving=agent)
    (driver,) = set(agent._drivers) - before
    return peer, driver


def test_a_peer_whose_replies_have_no_room_holds_up_nobody_else(serving: transport.Agent) -> None:
    """Its results wait and its further calls are not begun; another peer's calls run, and nothing is lost."""
    slow, driver = connected(serving)
    quick, _ = connected(serving)
    with slow, quick:
        kept = driver.served.room.share(never)
        kept.take(1 << 40)
        futures = [slow.submit("made", MIB, value) for value in range(6)]
        until(lambda: driver.served.room.short, "a result to wait for room")
        for value in range(20):
            assert (quick.call("made", MIB, value) == value).all()
        assert not any(future.done() for future in futures)
        kept.give_back()
        driver.served._begin_held()
        for value, future in enumerate(futures):
            assert (future.result() == value).all()
        until(lambda: not driver.served.calls, "no call to be left")


def test_the_end_of_a_connection_ends_what_waits_for_room(serving: transport.Agent) -> None:
    slow, driver = connected(serving)
    kept = driver.served.room.share(never)
    kept.take(1 << 40)
    futures = [slow.submit("made", MIB, value) for value in range(6)]
    until(lambda: driver.served.room.short, "a result to wait for room")
    slow.abort()
    for future in futures:
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
    until(lambda: not driver.served.room.short, "nobody to wait")
    until(lambda: not driver.served.calls, "no call to be left")


def test_all_room_is_given_back(serving: transport.Agent) -> None:
    peer, driver = connected(serving)
    with peer:
        for value in range(5):
            assert (peer.call("made", MIB, value) == value).all()
        with pytest.raises(transport.RemoteError):
            peer.call("made", -1, 0)
        until(lambda: driver.served.room._held == 0, "the room to be given back")


def test_a_call_that_a_leading_function_begins_is_not_left_behind(serving: transport.Agent) -> None:
    """Room for a reply begins what was held back, on a thread that may lose the lead before it comes back to it."""
    peer, driver = connected(serving)
    with peer:
        for value in range(50):
            peer.call("made", 10, value)  # quick: run by the thread that leads
        room, share = driver.served.room, driver.served.room.share
        second: list[Any] = []

        def begin_another(unwanted: Any) -> Any:
            """Runs on the function's thread, behind the function."""
            if not second and serving._lead.mine:
                room._waiting += 1  # another reply waits for room...
                second.append(peer.submit("made", 10, 7))
                driver.on_readable()
                assert driver.served._held  # ...so this call is held back...
                room._waiting -= 1
                driver.served._begin_held()  # ...until the other has gone
                until(lambda: not serving._lead.mine, "another thread to take the lead")
            return share(unwanted)

        room.share = begin_another
        for value in range(50):
            assert (peer.submit("made", 10, value).result(WATCHDOG) == value).all()
        assert second, "no thread that led ran a function"
        assert (second[0].result(WATCHDOG) == 7).all()
