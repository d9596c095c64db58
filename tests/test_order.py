"""Stream order between processes: a stream waits for a peer's, and nobody's host waits for either.

Shown with latches: what is behind a closed one has not run, whatever the hosts have done meanwhile.  Both orders pass
the tests of shared memory and of calls; here is what only one of them does, and what a loss does to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import order_service
import pytest
from rpc_processes import WATCHDOG, Worker, until

import streamrt
import transport
from streamrt.segment import STRIDE, Segment, Word
from streamrt.testing import Latch, without
from transport import ordering
from transport.channels import OpenError, bounds, signals, waits, words
from transport.channels.waits import Named, Waits
from transport.channels.words import SEGMENT_BYTES, SIGNAL

DEVICE = "host:0"
WORDS = 1 << 15  # of 8 bytes: more than what travels inside a message
ORDER = {"STREAMRT_ORDER": "stream"}


@pytest.fixture(scope="module")
def child() -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1, order="stream") as workers:
        workers[0].call(order_service.increment, array(0.0))  # the first one brings memory and words along
        yield workers[0]


@pytest.fixture
def fresh() -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1, order="stream") as workers:
        yield workers[0]


def array(value: float) -> Any:
    return streamrt.array(np.full(WORDS, value), device=DEVICE)


@contextlib.contextmanager
def behind(reply: Any) -> Iterator[streamrt.Stream]:
    """A stream that waits for a reply's bytes is current: as after a GPU's result(), the host does not wait.

    The process beside the agent has been told of the peer: while it is started or told, host order serves.
    """
    until(reply.done, "the reply's message")
    until(lambda: "streamrt-releaser" not in [one.name for one in threading.enumerate()], "the process to be told")
    stream = streamrt.Stream(DEVICE)
    reply._points.order_on(stream)
    with streamrt.using(stream):
        yield stream


def later(stream: streamrt.Stream, value: float) -> Any:
    """An array that gets its value when the stream comes to it."""
    return order_service.fill_later(stream, array(-1.0), value)


def by_order(peer: transport.Peer) -> tuple[dict[str, int], dict[str, int]]:
    found = peer.statistics()
    return found.orders_out, found.orders_in


def orders_since(peer: transport.Peer, before: tuple[dict[str, int], dict[str, int]]) -> list[dict[str, int]]:
    """What has gone and come since, by order."""
    now = by_order(peer)
    return [
        {name: count - old.get(name, 0) for name, count in new.items() if count != old.get(name, 0)}
        for new, old in zip(now, before, strict=True)
    ]


# The hosts run ahead --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [True, False])
def test_the_call_is_launched_while_its_argument_is_behind_a_closed_latch(
    child: transport.LocalWorker, copy: bool
) -> None:
    before = by_order(child)
    stream = streamrt.Stream(DEVICE)
    with Latch(stream) as latch, streamrt.using(stream):
        future = child.submit(order_service.increment, later(stream, 4.0), copy=copy)
        until(lambda: child.call(order_service.serving) == 1, "the call to be launched")
        assert not future.done()
        latch.open()
        assert (np.asarray(future.result(WATCHDOG)) == 5.0).all()
    assert orders_since(child, before)[0] == {"stream": 1}


def test_in_host_order_it_is_not_launched_before() -> None:
    """Calibrates the test above: there it is the order that launches the call."""
    with transport.local_workers(1, order="host") as workers:
        child = workers[0]
        stream = streamrt.Stream(DEVICE)
        with Latch(stream) as latch, streamrt.using(stream):
            future = child.submit(order_service.increment, later(stream, 4.0))
            for _ in range(20):
                assert child.call(order_service.serving) == 0
            latch.open()
            assert (np.asarray(future.result(WATCHDOG)) == 5.0).all()
        assert by_order(child)[0] == {"host": 1}


def test_a_reply_arrives_while_its_bytes_are_behind_a_closed_latch(child: transport.LocalWorker) -> None:
    before = by_order(child)
    future = child.submit(order_service.held, DEVICE, 3.0, WORDS)
    until(future.done, "the reply's message")
    assert not future.ready()
    after = future.then(lambda x: float(np.asarray(x).sum()))
    child.call(order_service.open_latches)
    assert after.result(WATCHDOG) == 3.0 * WORDS
    assert (np.asarray(future.result(WATCHDOG)) == 3.0).all()
    assert orders_since(child, before)[1] == {"stream": 1}


def test_values_are_right_call_after_call(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream(DEVICE)
    with streamrt.using(stream):
        x = array(0.0)
        futures = []
        for number in range(60):
            order_service.fill_later(stream, x, float(number))
            futures.append(child.submit(order_service.increment, x))
        for number, future in enumerate(futures):
            assert (np.asarray(future.result(WATCHDOG)) == number + 1).all()


def test_what_is_past_the_limit_goes_in_host_order(child: transport.LocalWorker) -> None:
    before = by_order(child)
    stream = streamrt.Stream(DEVICE)
    count = signals.MOST_PENDING + 3
    with Latch(stream) as latch, streamrt.using(stream):
        futures = [child.submit(order_service.total, later(stream, float(n))) for n in range(count)]
        until(lambda: child.call(order_service.serving) == signals.MOST_PENDING, "those in stream order")
        latch.open()
        assert [future.result(WATCHDOG) for future in futures] == [n * float(WORDS) for n in range(count)]
    assert orders_since(child, before)[0] == {"stream": signals.MOST_PENDING, "host": 3}


def test_the_array_may_be_written_when_its_snapshot_has_run_and_not_when_its_message_went(
    child: transport.LocalWorker,
) -> None:
    stream = streamrt.Stream(DEVICE)
    with Latch(stream) as latch, streamrt.using(stream):
        future = child.submit(order_service.total, later(stream, 2.0))
        until(lambda: child.call(order_service.serving) == 1, "the call to be launched")
        assert not future.sent.done()
        latch.open()
        future.sent.result(WATCHDOG)
        assert future.result(WATCHDOG) == 2.0 * WORDS


@pytest.mark.parametrize("first", [2**31 - 2, 2**32 - 2, 2**63 - 2, 2**64 - 2])
def test_words_may_wrap(fresh: transport.LocalWorker, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "FIRST", first)
    stream = streamrt.Stream(DEVICE)
    with streamrt.using(stream):
        for number in range(6):
            with Latch(stream) as latch:
                future = fresh.submit(order_service.total, later(stream, float(number)))
                until(lambda: fresh.call(order_service.serving) == 1, "the call to be launched")
                latch.open()
                assert future.result(WATCHDOG) == number * float(WORDS)
    assert by_order(fresh)[0] == {"stream": 6}


# Calibration ----------------------------------------------------------------------------------------------------------


def test_without_the_wait_the_callee_sees_too_little(fresh: transport.LocalWorker) -> None:
    fresh.call(order_service.increment, array(0.0))
    fresh.call(order_service.drop_edge, waits.ORDER_EDGE)
    stream = streamrt.Stream(DEVICE)
    with Latch(stream) as latch, streamrt.using(stream):
        assert fresh.submit(order_service.total, later(stream, 7.0)).result(WATCHDOG) != 7.0 * WORDS
        latch.open()


def test_without_the_order_behind_the_snapshot_the_callee_sees_too_little(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream(DEVICE)
    with without("send.wait"), Latch(stream) as latch, streamrt.using(stream):
        assert child.submit(order_service.total, later(stream, 7.0)).result(WATCHDOG) != 7.0 * WORDS
        latch.open()


def test_without_the_wait_the_caller_sees_too_little(child: transport.LocalWorker) -> None:
    with without(waits.ORDER_EDGE):
        result = child.submit(order_service.held, DEVICE, 3.0, WORDS).result(WATCHDOG)
        assert not (np.asarray(result) == 3.0).all()
    child.call(order_service.open_latches)


# Loss -----------------------------------------------------------------------------------------------------------------


def test_a_reply_that_never_comes_raises_wherever_it_is_used(fresh: transport.LocalWorker) -> None:
    future = fresh.submit(order_service.held, DEVICE, 3.0, WORDS)
    until(future.done, "the reply's message")
    after = future.then(lambda x: float(np.asarray(x).sum()))
    fresh.kill()
    for use in (future.result, future.wait, future.synchronize, future.value, future.ready, after.result):
        with pytest.raises(transport.PeerLostError, match=r"lost before"):
            use()
    assert isinstance(future.exception(), transport.PeerLostError)
    until(lambda: bounds.kept() == 0, "streams to go on")
    assert waits.foreign(None) == waits.NOTHING


def test_a_value_that_had_come_stays_good(fresh: transport.LocalWorker) -> None:
    first = fresh.submit(order_service.held, DEVICE, 3.0, WORDS)
    until(first.done, "the reply's message")
    fresh.call(order_service.open_latches)
    until(first.ready, "its bytes")
    second = fresh.submit(order_service.held, DEVICE, 4.0, WORDS)
    until(second.done, "the reply's message")
    fresh.kill()
    with pytest.raises(transport.PeerLostError):
        second.result(WATCHDOG)
    assert (np.asarray(first.result()) == 3.0).all()


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Worker]:
    address = f"unix://{tmp_path / 'worker'}"
    with Worker("order_service:service", "--listen", address, environment=ORDER) as worker:
        yield worker


def test_a_peer_that_stands_still_is_given_up_and_what_it_does_later_changes_nothing(listening: Worker) -> None:
    with transport.connect(listening.address, peer_timeout=0.5) as peer:
        future, unasked = (peer.submit("held", DEVICE, value, WORDS) for value in (3.0, 4.0))
        until(lambda: future.done() and unasked.done(), "the replies' messages")
        points = waits.foreign(None).points
        assert len(points) == 2
        listening.freeze()
        with pytest.raises(transport.PeerLostError):
            future.result(WATCHDOG)
        until(lambda: bounds.kept() == 0, "streams to go on")
        for point in points:
            point.word.store(0)  # as it was: its writer comes later
        listening.thaw()
        with transport.connect(listening.address) as again:
            again.call("open_latches")
            assert again.call("add", 1) == 2
            until(lambda: all(point.reached() for point in points), "the late signals")
        assert all(point.lost for point in points)
        for lost in (future, unasked):
            with pytest.raises(transport.PeerLostError):
                lost.result(WATCHDOG)


def test_a_call_runs_ahead_of_a_third_process_and_is_lost_with_it(
    fresh: transport.LocalWorker, child: transport.LocalWorker
) -> None:
    """What is made of bytes that may never come is launched too; a loss is marked there before anything is let go."""
    before = by_order(child)
    reply = fresh.submit(order_service.held, DEVICE, 3.0, WORDS)
    with behind(reply) as stream:
        passed_on = child.submit(order_service.note_total, later(stream, 9.0))
        until(lambda: child.call(order_service.serving) == 1, "the call to be launched")
        fresh.kill()
        with pytest.raises(transport.PeerLostError, match="lost before"):
            passed_on.result(WATCHDOG)
        assert child.call(order_service.noted) == []
        for value in (9.0, 8.0):  # by another word
            assert child.submit(order_service.total, later(stream, value)).result(WATCHDOG) == value * WORDS
    assert orders_since(child, before)[0] == {"stream": 3}


def test_what_is_derived_is_lost_with_what_it_is_made_of_and_goes_no_further(
    child: transport.LocalWorker, tmp_path: Path
) -> None:
    """T has called B, whose result is made of C's.  What T makes of it goes to others when it is there, or never."""
    before = by_order(child)
    address = f"unix://{tmp_path / 'c'}"
    with (
        Worker("order_service:service", "--listen", address, environment=ORDER) as last,
        Worker("order_service:service", "--listen", f"unix://{tmp_path / 'b'}", environment=ORDER) as first,
        transport.connect(first.address) as peer,
    ):
        reply = peer.submit("made_of", address, DEVICE, 3.0, WORDS)
        until(reply.done, "the reply's message")
        assert reply.exception() is None
        assert by_order(peer)[1] == {"stream": 1}
        assert waits.foreign(None).deep
        with behind(reply) as stream:
            passed_on = child.submit(order_service.note_total, later(stream, 9.0))
            for _ in range(5):
                assert child.call(order_service.serving) == 0
            os.kill(last.pid, signal.SIGKILL)
            with pytest.raises(transport.PeerLostError, match="lost before"):
                reply.result(WATCHDOG)
            with pytest.raises(transport.PeerLostError, match="not sent"):
                passed_on.result(WATCHDOG)
        assert peer.call("add", 1) == 2, "B lives"
    assert child.call(order_service.noted) == []
    assert orders_since(child, before)[0] == {}


def test_an_array_whose_bytes_never_came_is_not_sent(
    fresh: transport.LocalWorker, child: transport.LocalWorker
) -> None:
    reply = fresh.submit(order_service.held, DEVICE, 3.0, WORDS)
    until(reply.done, "the reply's message")
    x = reply._result  # as a GPU's result() gives it, while the bytes are on their way
    fresh.kill()
    until(lambda: waits.foreign(None) == waits.NOTHING and bounds.kept() == 0, "streams to go on")
    for argument in (x, x[100:], [array(1.0), x.reshape(2, -1)]):
        with pytest.raises(transport.PeerLostError, match="never came"):
            child.submit(order_service.note_total, argument)
    assert child.submit(order_service.total, array(1.0)).result(WATCHDOG) == WORDS


def test_who_has_taken_a_value_is_told_of_its_loss_at_the_next_call(
    fresh: transport.LocalWorker, child: transport.LocalWorker
) -> None:
    """What was made of it cannot be known: the thread that has it hears of the loss, once, before it sends anything."""
    reply = fresh.submit(order_service.held, DEVICE, 3.0, WORDS)
    until(reply.done, "the reply's message")
    assert not reply.ready()  # a use, as a GPU's result() is: it returns before the bytes are there
    fresh.kill()
    until(lambda: waits.foreign(None) == waits.NOTHING and bounds.kept() == 0, "streams to go on")
    with pytest.raises(transport.PeerLostError, match=r"held.*lost before"):
        child.submit(order_service.note_total, array(9.0))
    assert child.submit(order_service.total, array(1.0)).result(WATCHDOG) == WORDS


def test_a_loss_between_the_questions_of_a_call_is_seen(
    fresh: transport.LocalWorker, child: transport.LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = fresh.submit(order_service.held, DEVICE, 3.0, WORDS)
    until(reply.done, "the reply's message")
    assert not reply.ready()
    ask = waits.untold

    def untold() -> transport.PeerLostError | None:
        error = ask()
        monkeypatch.setattr(waits, "untold", ask)
        fresh.kill()
        until(lambda: waits.foreign(None) == waits.NOTHING and bounds.kept() == 0, "streams to go on")
        return error

    with behind(reply) as stream:
        made = later(stream, 9.0)
        monkeypatch.setattr(waits, "untold", untold)
        with pytest.raises(transport.PeerLostError, match="lost before"):
            child.submit(order_service.note_total, made).result(WATCHDOG)
    assert isinstance(waits.untold(), transport.PeerLostError)
    assert child.call(order_service.noted) == []


def test_what_is_made_of_bytes_that_come_is_sent(fresh: transport.LocalWorker, child: transport.LocalWorker) -> None:
    before = by_order(child)
    reply = fresh.submit(order_service.held, DEVICE, 3.0, WORDS)
    with behind(reply) as stream:
        passed_on = child.submit(order_service.total, later(stream, 9.0))
        until(lambda: child.call(order_service.serving) == 1, "the call to be launched")
        fresh.call(order_service.open_latches)
        assert passed_on.result(WATCHDOG) == 9.0 * WORDS
    assert orders_since(child, before)[0] == {"stream": 1}


def test_a_function_whose_argument_never_comes_is_not_run(listening: Worker, tmp_path: Path) -> None:
    """The caller dies: the callee's stream is let go, and its function is shown nothing."""
    with transport.connect(listening.address) as watcher, Worker("order_service:service", environment=ORDER) as caller:
        with transport.connect(caller.address) as peer:
            peer.call("send_held", listening.address, DEVICE, 5.0, WORDS)
            until(lambda: watcher.call("serving") == 1, "the call to be launched")
            os.kill(caller.pid, signal.SIGKILL)
            until(lambda: watcher.call("serving") == 0, "the call to end")
            until(lambda: watcher.call("bounded") == 0, "streams to go on")
            assert watcher.call("noted") == []
            assert watcher.submit("total", array(2.0)).result(WATCHDOG) == 2.0 * WORDS


def words_open() -> set[int]:
    """The segments of words and notes that this process has open."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(path)
            if any(f"streamrt-{kind}" in name for kind in ("signals", "waits", "derived")):
                found.add(path.stat().st_ino)
    return found


def test_what_a_connection_had_of_words_goes_with_it_though_its_values_are_kept() -> None:
    before = words_open()
    with transport.local_workers(1, order="stream") as workers:
        reply = workers[0].submit(order_service.held, DEVICE, 3.0, WORDS)
        until(reply.done, "the reply's message")
        assert not reply.ready()  # a thread that takes it, and sends nothing more
        made = words_open() - before
        assert made
        workers[0].call(order_service.open_latches)
        until(lambda: all(event.query() for events in reply._points.events.values() for event in events), "its bytes")
    until(lambda: not made & words_open(), "all to be let go of")
    assert (np.asarray(reply.result()) == 3.0).all()


def test_an_agent_looks_after_connections_only_while_streams_wait_for_their_peers(
    child: transport.LocalWorker,
) -> None:
    driver = child._driver
    for _ in range(2):
        reply = child.submit(order_service.held, DEVICE, 3.0, WORDS)
        until(reply.done, "the reply's message")
        assert driver in driver.agent.ordered
        child.call(order_service.open_latches)
        assert (np.asarray(reply.result(WATCHDOG)) == 3.0).all()
        until(lambda: driver not in driver.agent.ordered, "it to be let go of")


def exhausted(*_: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def test_without_memory_for_its_notes_a_message_goes_in_host_order(
    fresh: transport.LocalWorker, child: transport.LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = by_order(child)
    with monkeypatch.context() as changed:
        changed.setattr(Segment, "create", exhausted)
        declined = fresh.submit(order_service.held, DEVICE, 2.0, WORDS)
        until(lambda: fresh.call(order_service.serving) == 0, "the function to return")
        fresh.call(order_service.open_latches)
        assert (np.asarray(declined.result(WATCHDOG)) == 2.0).all()
    reply = child.submit(order_service.held, DEVICE, 3.0, WORDS)
    with behind(reply) as stream:
        with monkeypatch.context() as changed:
            changed.setattr(Segment, "create", exhausted)
            passed_on = fresh.submit(order_service.total, later(stream, 9.0))
        child.call(order_service.open_latches)
        assert passed_on.result(WATCHDOG) == 9.0 * WORDS
    assert by_order(fresh)[0].get("stream", 0) == 0
    assert orders_since(child, before)[1] == {"stream": 1}


def test_after_the_end_of_a_connection_who_waits_for_a_signal_is_called_when_it_has_run() -> None:
    stream, found, called = streamrt.Stream(DEVICE), signals.Signals(), []
    with Latch(stream) as latch:
        first, second = found.signal(stream), found.signal(stream)
        assert first is not None
        assert second is not None
        found.when_run(first, lambda: called.append("before"))
        assert found.close() == []
        found.when_run(second, lambda: called.append("after"))
        assert found.signal(stream) is None
        assert not called
        assert not found.look()
        latch.open()
        stream.synchronize(WATCHDOG)
        until(lambda: called == ["before", "after"], "both calls")


def test_a_caller_that_hangs_up_still_signals(listening: Worker) -> None:
    """The end of a connection is no loss while the peer's process lives: what it had enqueued comes."""
    with transport.connect(listening.address) as watcher, Worker("order_service:service", environment=ORDER) as caller:
        with transport.connect(caller.address) as peer:
            peer.call("send_held", listening.address, DEVICE, 5.0, WORDS)
            until(lambda: watcher.call("serving") == 1, "the call to be launched")
            peer.call("hang_up")
            until(lambda: watcher.call("bounded") == 1, "the end to be seen")
            assert watcher.call("noted") == []
            peer.call("open_latches")
            until(lambda: watcher.call("bounded") == 0, "streams to go on")
            until(lambda: watcher.call("noted") == ["163840"], "the function to run")


def test_a_stream_that_fails_lets_go_of_the_peers(child: transport.LocalWorker) -> None:
    stream = streamrt.Stream(DEVICE)

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    x = array(1.0)
    with Latch(stream) as latch, streamrt.using(stream):
        stream.launch(fail)
        future = child.submit(order_service.note_total, x)
        until(lambda: child.call(order_service.serving) == 1, "the call to be launched")
        latch.open()
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
    assert child.call(order_service.noted) == []
    assert child.submit(order_service.total, x).result(WATCHDOG) == WORDS


def test_what_is_made_of_a_failed_stream_of_the_peers_is_lost_for_the_peer_too(fresh: transport.LocalWorker) -> None:
    """The peer lives, and is told of what goes back to it: nothing else would tell."""
    reply = fresh.submit(order_service.failing, DEVICE, 3.0, WORDS)
    with behind(reply) as stream:
        future = fresh.submit(order_service.note_total, later(stream, 9.0))
        until(lambda: fresh.call(order_service.serving) == 1, "the call to be launched")
        fresh.call(order_service.open_latches)
        with pytest.raises(transport.PeerLostError, match="lost before"):
            future.result(WATCHDOG)
    with pytest.raises(transport.PeerLostError):
        reply.result(WATCHDOG)
    assert fresh.call(order_service.noted) == []


# Which order ----------------------------------------------------------------------------------------------------------


def hello(asked: str = "auto", **said: Any) -> dict[str, Any]:
    order = {"asked": asked, "words": True, "gpus": {}, "dear": ""} | said
    return {"boot": "b", "pid_namespace": "n", "uid": 1, "descriptors": True, "process": object(), "order": order}


@pytest.mark.parametrize(
    ("one", "other", "order"),
    [
        (hello(), hello(), "auto"),
        (hello(""), hello(""), "host"),
        (hello(""), hello(), "auto"),
        (hello(""), hello("stream"), "stream"),
        (hello("stream"), hello(), "stream"),
        (hello("stream"), hello("host"), "host"),
        (hello("host"), hello(), "host"),
        (hello("stream"), hello(words=False), "host"),
        (hello(), hello(dear="CUDA_LAUNCH_BLOCKING is set"), "host"),
        (hello("stream"), hello(dear="CUDA_LAUNCH_BLOCKING is set"), "stream"),
        (hello(), hello() | {"descriptors": False}, "host"),
        (hello("stream"), hello("stream") | {"boot": "another host"}, "host"),
        (hello("stream"), {key: value for key, value in hello().items() if key != "order"}, "host"),
        (hello("stream"), hello() | {"order": "stream"}, "host"),
    ],
)
def test_both_ends_agree(one: dict[str, Any], other: dict[str, Any], order: str) -> None:
    assert ordering.agreed(one, other) == ordering.agreed(other, one) == order


def test_ucx_between_two_ends_is_host_order_unless_stream_is_asked_for() -> None:
    ucx: dict[str, Any] = {"ucx": True, "channels": ["shared_memory", "ucx", "staging"]}
    assert ordering.agreed(hello() | ucx, hello() | ucx) == "host"
    assert ordering.agreed(hello("stream") | ucx, hello() | ucx) == "stream"


def test_a_stream_should_wait_for_another_gpu_only() -> None:
    one, other = hello(gpus={"cuda:0": "a"}), hello(gpus={"cuda:0": "b", "cuda:1": "a"})
    assert ordering.pays(one, other, "cuda:0", "cuda:0")
    assert not ordering.pays(one, other, "cuda:0", "cuda:1"), "it is the same GPU"
    assert not ordering.pays(one, other, "host:0", "host:0")
    assert not ordering.pays(one, other, "cuda:0", "cuda:2")


def test_why_a_waiting_stream_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "LAUNCH_BLOCKING" in str(ordering.describe("auto", ())["dear"])
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "MAX_CONNECTIONS" in str(ordering.describe("auto", ())["dear"])
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert ordering.describe("auto", ())["dear"] == ""


def test_an_order_that_is_none_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(transport.LocalProtocolError, match=r"order='both'.*auto, host, stream"):
        transport.connect("tcp://127.0.0.1:1", order="both")
    with pytest.raises(transport.LocalProtocolError, match="order='both'"):
        transport.local_workers(1, order="both")
    monkeypatch.setenv(ordering.ORDER_VARIABLE, "both")
    with pytest.raises(transport.LocalProtocolError, match="STREAMRT_ORDER='both'"):
        transport.connect("tcp://127.0.0.1:1")
    monkeypatch.setenv(ordering.ORDER_VARIABLE, "stream")
    assert ordering.asked() == "stream"
    assert ordering.asked("host") == "host"


def test_auto_looks_first_and_lets_a_stream_wait_where_the_work_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ordering.ORDER_VARIABLE, raising=False)
    monkeypatch.setattr(ordering, "pays", lambda *_: True)
    with transport.local_workers(1, order="auto") as workers:
        child = workers[0]
        assert child.order == "auto"
        stream = streamrt.Stream(DEVICE)
        with streamrt.using(stream):
            assert child.call(order_service.total, array(1.0)) == WORDS
            assert by_order(child)[0] == {"host": 1}
            with Latch(stream) as latch:
                future = child.submit(order_service.total, later(stream, 4.0))
                until(lambda: child.call(order_service.serving) == 1, "the call to be launched")
                latch.open()
                assert future.result(WATCHDOG) == 4.0 * WORDS
            assert by_order(child)[0] == {"host": 1, "stream": 1}


# What a peer may say --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [b"", bytes(8), SIGNAL.pack(512, 64, 1), SIGNAL.pack(0, 33, 1), SIGNAL.pack(0, 0, 1), SIGNAL.pack(0, 32, 1 << 32)],
)
def test_a_signal_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(OpenError):
        Named.read(raw)


def test_a_peer_fills_no_stream_up_with_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MOST_WAITS", 2)
    device, stream = streamrt.open_device(DEVICE), streamrt.Stream(DEVICE)
    found = Waits()
    with Segment.create(SEGMENT_BYTES) as segment:
        found.attach(os.dup(segment.fd))
        for value in (1, 2):
            found.check(device, Named(0, 64, value))
            assert not found.wait(stream, Named(0, 64, value)).reached()
        with pytest.raises(OpenError, match="2 waits"):
            found.check(device, Named(0, 64, 3))
        Word(segment, 0, 64).store(2)
        stream.synchronize(WATCHDOG)
        found.check(device, Named(0, 64, 3))
    found.close(bounds.Bound(lambda: True, 0.0))


@pytest.mark.parametrize(
    ("first", "stored", "second", "match"),
    [
        (Named(0, 32, 5), (1 << 63) + 100, Named(0, 64, 3), "bits"),
        (Named(0, 64, 5), 4, Named(0, 64, 4 + (1 << 20)), "too far"),
        (Named(0, 64, 9), 0, Named(0, 64, 8), "after 9"),
        (Named(0, 64, 9), (1 << 62), Named(0, 64, (1 << 62) + 1), "too far"),
    ],
)
def test_waits_that_no_value_would_release_together_are_refused(
    first: Named, stored: int, second: Named, match: str
) -> None:
    device, stream, other = streamrt.open_device(DEVICE), streamrt.Stream(DEVICE), streamrt.Stream(DEVICE)
    found = Waits()
    with Segment.create(SEGMENT_BYTES) as segment:
        found.attach(os.dup(segment.fd))
        found.check(device, Named(1, 64, 1))
        found.wait(stream, Named(1, 64, 1))
        found.check(device, first)
        point = found.wait(stream, first)  # behind the other one: not passed, whatever its word says
        Word(segment, 0, 64).store(stored)
        with pytest.raises(OpenError, match=match):
            found.check(device, second)
        with pytest.raises(OpenError, match=match):
            found.wait(other, second)
    found.close(bounds.Bound(lambda: True, 0.0))
    stream.synchronize(WATCHDOG)
    assert point.lost or point.reached()


def test_words_that_did_not_come_or_are_none_are_refused() -> None:
    device = streamrt.open_device(DEVICE)
    found = Waits()
    with pytest.raises(OpenError, match="did not come"):
        found.check(device, Named(0, 64, 1))
    found.attach(os.open(os.devnull, os.O_RDONLY))
    with pytest.raises(OpenError, match="no memfd"):
        found.check(device, Named(0, 64, 1))
    small = Waits()
    with Segment.create(STRIDE) as segment:
        small.attach(os.dup(segment.fd))
    with pytest.raises(OpenError, match="too few"):
        small.check(device, Named(0, 64, 1))
    twice = Waits()
    with Segment.create(SEGMENT_BYTES) as segment:
        twice.attach(os.dup(segment.fd))
        twice.attach(os.dup(segment.fd))
        twice.check(device, Named(0, 64, 1))  # the first ones stand


class Pinning:
    """A driver that unpins memory while nothing runs, as CUDA does."""

    def __init__(self) -> None:
        self.busy, self.unmapped = True, 0

    def idle(self) -> bool:
        return not self.busy

    def unmap_segment(self, segment: Segment) -> None:
        self.unmapped += 1


@pytest.mark.parametrize("ends", ["it is idle", "a minute later"])
def test_pinned_words_go_when_nothing_runs_or_a_minute_after_they_could(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then every unpinning would hold up other calls; the minute is not that in which the peer still waits."""
    driver, now, over = Pinning(), [0.0], [False]
    kept: list[Any] = []
    monkeypatch.setattr(words, "backend_of", lambda kind: driver)
    monkeypatch.setattr(words, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    monkeypatch.setattr(words.retired, "keep", lambda segment, free, dropped: kept.extend((free, dropped)))
    with Segment.create(SEGMENT_BYTES) as segment:
        words.retire(segment, ["cuda"], lambda: over[0])
        free, dropped = kept
        looks = [free(), free()]
        now[0] += 2 * words.IDLE_SECONDS
        over[0] = True
        looks.append(free())
        now[0] += words.IDLE_SECONDS - 1
        looks.append(free())
        assert looks == [False] * 4
        if ends == "it is idle":
            driver.busy = False
        else:
            now[0] += 1
        assert free()
        dropped()
        assert driver.unmapped == 1
