"""Stream order between processes on GPUs: the hosts run ahead of both devices, and a death lets everybody go.

Every kernel is loaded before a latch is closed: while a stream waits, the first use of one blocks its host.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import order_service
import pytest
from rpc_processes import WATCHDOG, Worker, until
from test_releaser import lost_words

import streamrt
import transport
from streamrt.testing import Latch, assert_no_host_sync, without
from transport.channels import bounds, retired, signals, waits

pytestmark = pytest.mark.gpu

ZERO, ONE = "cuda:0", "cuda:1"
WORDS = 1 << 20  # of 8 bytes
ORDER = {"STREAMRT_ORDER": "stream"}


def array(value: float, device: str = ZERO) -> Any:
    """An array whose bytes are there."""
    made = streamrt.array(np.full(WORDS, value), device=device)
    streamrt.current_stream(device).synchronize(WATCHDOG)
    return made


def host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else np.asarray(x)


def warm(peer: transport.Peer, device: str = ZERO) -> None:
    """Loads all kernels on both sides, and maps all memory."""
    for _ in range(2):
        x = order_service.fill_later(streamrt.current_stream(device), array(0.0, device), 1.0)
        assert peer.call(order_service.total, peer.call(order_service.increment, x)) == 2.0 * WORDS
        future = peer.submit(order_service.held, device, 2.0, WORDS)
        until(future.done, "the reply's message")
        peer.call(order_service.open_latches)
        future.synchronize(WATCHDOG)
        assert (host(future.result() + 1.0) == 3.0).all()


@pytest.fixture
def child() -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1, devices=[ZERO], device_map={ZERO: ZERO}, order="stream") as workers:
        assert workers[0].order == "stream"
        warm(workers[0])
        yield workers[0]


@pytest.mark.parametrize("copy", [True, False])
def test_the_reply_is_here_while_the_request_is_behind_a_closed_latch(child: transport.LocalWorker, copy: bool) -> None:
    """Neither host waits for a device: the function is launched and returns before its argument is there."""
    before = child.statistics()
    stream = streamrt.Stream(ZERO)
    for value in range(5):
        x = array(-1.0)
        with streamrt.using(stream):
            with Latch(stream):
                order_service.fill_later(stream, x, float(value))
                with assert_no_host_sync():
                    future = child.submit(order_service.increment, x, copy=copy)
                until(future.done, "the reply's message")
                with assert_no_host_sync():
                    future.wait(non_blocking=True)
                assert not future.ready()
            result = future.result(WATCHDOG)
            stream.synchronize(WATCHDOG)
            assert (host(result) == value + 1.0).all()
    after = child.statistics()
    assert after.orders_out.get("stream", 0) - before.orders_out.get("stream", 0) == 5
    assert after.orders_in.get("stream", 0) - before.orders_in.get("stream", 0) == 5


def test_a_reply_arrives_while_its_bytes_are_behind_a_closed_latch(child: transport.LocalWorker) -> None:
    for value in range(5):
        future = child.submit(order_service.held, ZERO, float(value), WORDS)
        until(future.done, "the reply's message")
        assert not future.ready()
        child.call(order_service.open_latches)
        future.synchronize(WATCHDOG)
        assert (host(future.result()) == value).all()


def test_values_are_right_call_after_call(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream(ZERO)
    x = array(0.0)
    with streamrt.using(stream):
        for turn in range(20):
            futures = []
            for number in range(10):
                order_service.fill_later(stream, x, float(10 * turn + number))
                futures.append(child.submit(order_service.increment, x))
            for number, future in enumerate(futures):
                assert (host(future.result(WATCHDOG)) == 10 * turn + number + 1).all()


@pytest.mark.parametrize("first", [2**32 - 3, 2**63 - 3, 2**64 - 3])
def test_words_may_wrap(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "FIRST", first)
    with transport.local_workers(1, devices=[ZERO], device_map={ZERO: ZERO}, order="stream") as workers:
        warm(workers[0])
        test_the_reply_is_here_while_the_request_is_behind_a_closed_latch(workers[0], True)


# Calibration ----------------------------------------------------------------------------------------------------------


def wrong(child: transport.LocalWorker) -> bool:
    """Whether what is filled behind a latch comes back with other bytes than it was filled with."""
    stream = streamrt.Stream(ZERO)
    x = array(-1.0)
    with streamrt.using(stream):
        with Latch(stream):
            order_service.fill_later(stream, x, 7.0)
            future = child.submit(order_service.increment, x)
            until(future.done, "the reply's message")
            until(future.ready, "its bytes, which nothing holds back")
        return not bool((host(future.result(WATCHDOG)) == 8.0).all())


def test_without_the_wait_the_callee_sees_too_little(child: transport.LocalWorker) -> None:
    child.call(order_service.drop_edge, waits.ORDER_EDGE)
    assert wrong(child)


def test_without_the_order_behind_the_snapshot_the_callee_sees_too_little(child: transport.LocalWorker) -> None:
    with without("send.wait"):
        assert wrong(child)


# Loss -----------------------------------------------------------------------------------------------------------------


def test_a_reply_that_never_comes_raises_and_lets_the_stream_go(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream(ZERO)
    future = child.submit(order_service.held, ZERO, 3.0, WORDS)
    until(future.done, "the reply's message")
    with streamrt.using(stream):
        taken = future.result()  # the stream waits, the host does not
        child.kill()
        for use in (lambda: future.synchronize(WATCHDOG), future.result, future.ready, future.wait):
            with pytest.raises(transport.PeerLostError, match="lost before"):
                use()
        stream.synchronize(WATCHDOG)
        assert (host(array(1.0) + 1.0) == 2.0).all()  # copies and kernels run
    until(lambda: bounds.kept() == 0, "streams to go on")
    with transport.local_workers(1, devices=[ZERO], device_map={ZERO: ZERO}, order="stream") as workers:
        warm(workers[0])
        with pytest.raises(transport.PeerLostError, match="never came"):
            workers[0].submit(order_service.total, taken)


@pytest.mark.parametrize("stuck", [False, True], ids=["agent runs", "agent holds the interpreter"])
def test_a_callee_whose_caller_dies_is_let_go(tmp_path: Path, stuck: bool) -> None:
    begun = tmp_path / "begun"
    with (
        Worker(
            "order_service:service", "--device", ZERO, "--listen", f"unix://{tmp_path / 'callee'}", environment=ORDER
        ) as callee,
        Worker("order_service:service", "--device", ZERO, environment=ORDER) as caller,
        transport.connect(callee.address) as watcher,
        transport.connect(caller.address) as peer,
    ):
        warm(watcher)
        peer.call("send_held", callee.address, ZERO, 5.0, WORDS)
        until(lambda: watcher.call("serving") == 1, "the call to be launched")
        until(lambda: watcher.call("watched") >= 1, "the process to watch")
        held = watcher.submit("hold_interpreter", str(begun), 5.0) if stuck else None
        if held is not None:
            until(begun.exists, "the interpreter to be held")
        os.kill(caller.pid, signal.SIGKILL)
        released = until(lambda: lost_words(callee.pid), "the words to be marked")
        until(lambda: all(word.load() > word.last_good for word in released), "the words to be released")
        if held is not None:
            assert not held.done(), "the interpreter was not held so long"
            held.result(WATCHDOG)
        until(lambda: watcher.call("serving") == 0, "the call to end")
        until(lambda: watcher.call("bounded") == 0, "streams to go on")
        assert watcher.submit("total", array(2.0)).result(WATCHDOG) == 2.0 * WORDS


def test_a_peer_that_stands_still_is_given_up_and_what_it_does_later_changes_nothing(tmp_path: Path) -> None:
    address = f"unix://{tmp_path / 'worker'}"
    with Worker("order_service:service", "--device", ZERO, "--listen", address, environment=ORDER) as worker:
        with transport.connect(address, peer_timeout=1.0) as peer:
            warm(peer)
            future = peer.submit("held", ZERO, 3.0, WORDS)
            until(future.done, "the reply's message")
            worker.freeze()
            with pytest.raises(transport.PeerLostError):
                future.synchronize(WATCHDOG)
            until(lambda: bounds.kept() == 0, "streams to go on")
            worker.thaw()
            with transport.connect(address) as again:
                again.call("open_latches")
                assert again.call("total", array(1.0)) == WORDS
            with pytest.raises(transport.PeerLostError):
                future.result(WATCHDOG)


# Which order ----------------------------------------------------------------------------------------------------------


def test_on_one_gpu_auto_is_host_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMRT_ORDER", raising=False)
    with transport.local_workers(1, devices=[ZERO], device_map={ZERO: ZERO}, order="auto") as workers:
        assert workers[0].order == "auto"
        assert workers[0].call(order_service.total, array(1.0)) == WORDS
        assert set(workers[0].statistics().orders_out) == {"host"}


@pytest.mark.gpu2
def test_between_two_gpus_auto_lets_a_stream_wait_for_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMRT_ORDER", raising=False)
    with transport.local_workers(1, devices=[ONE], device_map={ZERO: ONE}, order="auto") as workers:
        child = workers[0]
        assert child.order == "auto"
        assert child.call(order_service.total, array(1.0)) == WORDS
        stream = streamrt.Stream(ZERO)
        x = array(-1.0)
        order_service.fill_later(stream, x, 0.0)
        stream.synchronize(WATCHDOG)
        with streamrt.using(stream):
            child.call(order_service.increment, x)
            with Latch(stream):
                order_service.fill_later(stream, x, 4.0)
                future = child.submit(order_service.increment, x)
                until(future.done, "the reply's message")
                assert not future.ready()
            assert (host(future.result(WATCHDOG)) == 5.0).all()
        assert child.statistics().orders_out["stream"] == 1


def test_the_words_of_an_ended_connection_stay_pinned_while_a_stream_runs() -> None:
    """Unpinning waits in the driver for every stream, and whoever pins other words meanwhile would wait behind it."""
    stream = streamrt.Stream(ZERO)
    with transport.local_workers(1, devices=[ZERO], device_map={ZERO: ZERO}, order="stream") as workers:
        warm(workers[0])
        before = retired.kept()  # by other tests, for peers that were killed or stood still
        latch = Latch(stream)
    with latch, transport.local_workers(1, devices=[ZERO], device_map={ZERO: ZERO}, order="stream") as workers:
        x = array(1.0)
        for _ in range(3):
            future = workers[0].submit(order_service.increment, x)
            until(future.done, "the reply's message, for which words are pinned here")
            assert (host(future.result()) == 2.0).all()
        assert retired.kept() > before
        assert not stream.query()
    until(lambda: retired.kept() <= before, "the words to be unpinned")
