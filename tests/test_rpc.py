"""Calls between real processes: values, order, threads, errors, deadlines, cancellation, notifications, the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import os
import pickle
import select
import signal
import sys
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rpc_service
from rpc_processes import WATCHDOG, Worker, chosen, open_descriptors, until

import streamrt
import transport
from streamrt.callbacks import blocking
from transport import context, driver, untended
from transport.remote_errors import rebuild_error

pytest_plugins = ["rpc_fixtures"]


# Values ---------------------------------------------------------------------------------------------------------------


def test_arguments_by_position_and_by_name(peer: transport.Peer) -> None:
    x = np.arange(3000.0)
    np.testing.assert_array_equal(peer.call("add", x, y=x, scale=2), 4 * x)
    np.testing.assert_array_equal(peer.call(rpc_service.add, x, scale=3.0), 3 * (x + 1))


@pytest.mark.parametrize("device", ["cpu", "host:0", "host:1"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (1 << 20,)])
def test_arrays_of_every_size_arrive(peer: transport.Peer, device: str, shape: tuple[int, ...]) -> None:
    x = streamrt.array(np.full(shape, 7, np.int32), device=device)
    back = peer.call("echo", {"x": [x, (x,)], "n": None})
    for array in (back["x"][0], back["x"][1][0]):
        assert array.shape == shape
        assert array.dtype == np.int32
        assert str(streamrt.device_of(array)) == device
        assert (np.asarray(array) == 7).all()


def test_the_same_array_twice_is_the_same_array_there(peer: transport.Peer) -> None:
    """Aliases in one message stay aliases, and different arrays stay different."""
    a, b, c, d, e = (np.full(4096, float(value)) for value in range(1, 6))
    same, sums = peer.call("same_object", [a, b, c], [c, d, e])
    assert same
    assert sums == [4096.0 * value for value in (1, 2, 3, 3, 4, 5)]


def test_reply_is_of_the_kind_of_the_first_argument(peer: transport.Peer) -> None:
    torch = pytest.importorskip("torch")
    assert isinstance(peer.call("echo", torch.ones(5000)), torch.Tensor)
    assert isinstance(peer.call("echo", [np.ones(5000), torch.ones(5000)])[1], np.ndarray)


def test_arrays_option_says_the_kind_of_the_reply(worker: Worker) -> None:
    torch = pytest.importorskip("torch")
    with transport.connect(worker.address, arrays="torch") as peer:
        assert isinstance(peer.call("echo", np.ones(5000)), torch.Tensor)


# Order and threads ----------------------------------------------------------------------------------------------------


def test_what_is_written_right_after_the_call_does_not_show(peer: transport.Peer) -> None:
    for device in ("cpu", "host:0"):
        x = streamrt.array(np.ones(1 << 20, np.float32), device=device)
        futures = []
        for value in range(1, 11):
            futures.append(peer.submit("total", x))
            x[...] = value + 1
        assert [future.result() for future in futures] == [float(value << 20) for value in range(1, 11)]


def test_calls_from_many_threads(peer: transport.Peer) -> None:
    def call(number: int) -> bool:
        x = np.full(1000 + number * 300, number, np.int64)
        return bool((peer.call("echo", x) == x).all())

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(200)))


def test_more_calls_in_flight_than_streams_in_the_pool(peer: transport.Peer, name: str) -> None:
    """100 calls are open at once on one device, whose pools have 32 streams, at the caller and at the callee."""
    number = 100
    arrays = [streamrt.array(np.full(1024, value, np.float32), device="host:0") for value in range(number)]
    expected = [1024.0 * value for value in range(number)]
    assert [future.result(WATCHDOG) for future in [peer.submit("total", x) for x in arrays]] == expected
    with transport.loopback(rpc_service.service, threads=number) as wide:
        futures = [wide.submit("total_behind", x, name) for x in arrays]
        until(lambda: rpc_service.count(name) == number, "all functions to run at once")
        assert wide.statistics().open_calls == number
        rpc_service.open_gate(name)
        assert [future.result(WATCHDOG) for future in futures] == expected


# Errors ---------------------------------------------------------------------------------------------------------------


def test_built_in_errors_are_raised_as_themselves(peer: transport.Peer) -> None:
    for kind, expected in (("value", ValueError), ("key", KeyError), ("timeout", TimeoutError)):
        with pytest.raises(expected, match="what went wrong") as raised:
            peer.call("fail", kind, "what went wrong")
        assert isinstance(raised.value, transport.RemoteError)
        assert raised.value.type_name == expected.__name__
        assert "rpc_service.py" in raised.value.traceback_text
        assert any("remote traceback" in note for note in raised.value.__notes__)


def test_the_projects_own_errors_are_raised_as_themselves(peer: transport.Peer) -> None:
    with pytest.raises(streamrt.ArrayError, match="cannot hold") as raised:
        peer.call("fail", "array", "cannot hold")
    assert isinstance(raised.value, transport.RemoteError)


@pytest.mark.parametrize("kind", ["stop", "spoiled", "shadow", "exit", "interrupt"])
def test_other_errors_are_remote_errors(peer: transport.Peer, kind: str) -> None:
    """Also those that would mean something to the interpreter here, and those that end a thread there."""
    with pytest.raises(transport.RemoteError) as raised:
        peer.submit("fail", kind, "it").result(WATCHDOG)
    assert type(raised.value) is transport.RemoteError
    assert raised.value.message == ("1 and 2" if kind == "shadow" else "it")
    assert peer.call("add", 1) == 2


def test_an_error_of_a_third_process_keeps_its_type(peer: transport.Peer, other: Worker) -> None:
    with pytest.raises(ValueError, match="far away") as raised:
        peer.call("through", other.address, "fail", "value", "far away")
    assert isinstance(raised.value, transport.RemoteError)
    with pytest.raises(transport.RemoteError, match="far away") as raised:
        peer.call("through", other.address, "fail", "spoiled", "far away")
    assert raised.value.type_name == "rpc_service.Spoiled"


def test_a_result_that_cannot_be_sent_is_an_error_at_the_caller(peer: transport.Peer) -> None:
    with pytest.raises(transport.CodecError, match="lock"):
        peer.call("unsendable")
    assert peer.call("add", 1) == 2


# Deadlines and cancellation -------------------------------------------------------------------------------------------


def test_default_timeout(worker: Worker, name: str) -> None:
    with transport.connect(worker.address, default_timeout=0.2) as peer:
        with pytest.raises(transport.DeadlineError, match="bump_behind"):
            peer.call("bump_behind", name, name)
        assert isinstance(peer.submit("bump_behind", name, name).exception(WATCHDOG), TimeoutError)
        peer.call("open_gate", name, timeout=WATCHDOG)
        assert peer.call("count", name, timeout=WATCHDOG) == 2


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_must_be_positive(peer: transport.Peer, timeout: float) -> None:
    with pytest.raises(transport.LocalProtocolError, match="timeout"):
        peer.submit("add", 1, timeout=timeout)


def test_cancellation_reaches_the_function(peer: transport.Peer, name: str) -> None:
    future = peer.submit("until_cancelled", name)
    until(lambda: peer.call("count", f"{name} began"), "the function to begin")
    assert future.cancel()
    assert future.cancelled()
    until(lambda: peer.call("count", f"{name} cancelled"), "the function to see it")
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    until(lambda: peer.statistics().open_calls == 0, "the call table to be empty")


def test_a_deadline_cancels_the_function(peer: transport.Peer, name: str) -> None:
    with pytest.raises(transport.DeadlineError):
        peer.call("until_cancelled", name, timeout=0.3)
    until(lambda: peer.call("count", f"{name} cancelled"), "the function to see it")


def test_late_replies_are_dropped(peer: transport.Peer, name: str) -> None:
    futures = [peer.submit("ones_behind", name, 1 << 20) for _ in range(4)]
    assert all(future.cancel() for future in futures)
    peer.call("open_gate", name)
    assert [peer.call("add", number) for number in range(100)] == list(range(1, 101))
    assert all(future.cancelled() for future in futures)


def test_a_wait_that_times_out_loses_nothing(peer: transport.Peer, name: str) -> None:
    """`result(timeout)` is about waiting: the call goes on, and its value comes."""
    future = peer.submit("bump_behind", name, name)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            future.result(0.02)
    assert peer.call("add", 1) == 2
    peer.call("open_gate", name)
    assert future.result(WATCHDOG) == 1


def test_ctrl_c_while_waiting(peer: transport.Peer, name: str) -> None:
    """The wait ends at once, and both the call and the connection go on."""
    future = peer.submit("bump_behind", name, name)
    interrupt = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        future.result(WATCHDOG)
    interrupt.join()
    assert peer.call("add", 1) == 2
    peer.call("open_gate", name)
    assert future.result(WATCHDOG) == 1


def test_cancelled_outside_a_call() -> None:
    with pytest.raises(transport.LocalProtocolError, match="no call runs here"):
        transport.cancelled()
    with pytest.raises(transport.LocalProtocolError, match="no call runs here"):
        transport.caller()


# Notifications --------------------------------------------------------------------------------------------------------


def test_errors_of_a_notification_are_logged_there() -> None:
    with Worker(keep_errors=True) as worker:
        with transport.connect(worker.address) as peer:
            peer.notify("fail", "spoiled", "nobody hears of this").result(WATCHDOG)
            peer.notify("no_such_function").result(WATCHDOG)
            assert peer.call("add", 1) == 2
        code, errors = worker.stop()
    assert code == 0
    assert "nobody hears of this" in errors
    assert "rpc_service.py" in errors, "the traceback is missing"
    assert "no_such_function" in errors


# The peer -------------------------------------------------------------------------------------------------------------


def test_what_a_peer_says_of_itself(worker: Worker) -> None:
    with transport.connect(worker.address, name="mine") as peer:
        assert peer.name == "mine"
        assert peer.pid == worker.pid == peer.call("process_id")
        assert {"add", "echo"} <= set(peer.functions)
        assert peer.device_map == {"cpu": "cpu", "host:0": "host:0", "host:1": "host:1"}
        assert not peer.closed
    assert peer.closed
    with pytest.raises(streamrt.ClosedError, match="open a new one"):
        peer.call("add", 1)


@chosen
def test_a_peer_tells_by_which_channel_arrays_go(peer: transport.Peer, tmp_path: Path) -> None:
    assert peer.channels() == {"host:0": "staging", "host:1": "staging", "cpu": "staging"}
    with Worker("rpc_service:service", "--device", "host:1", "--listen", f"unix://{tmp_path}/socket") as near:
        with transport.connect(near.address, device_map={"host:0": "host:1"}) as other:
            assert other.channels() == {"host:0": "shared_memory", "cpu": "shared_memory"}
            assert set(other.channels(nbytes=1000).values()) == {"staging"}
    with transport.loopback(rpc_service.service, device_map={"host:2": "host:0"}) as myself:
        assert set(myself.channels().values()) == {"same_process"}


@chosen
def test_statistics_count_the_bytes(peer: transport.Peer) -> None:
    before = peer.statistics()
    peer.call("total", np.ones(1 << 18, np.float32))
    peer.call("echo", np.ones(1 << 17, np.uint8))
    after = peer.statistics()
    assert after.bytes_out["staging"] - before.bytes_out.get("staging", 0) == (1 << 20) + (1 << 17)
    assert after.bytes_in["staging"] - before.bytes_in.get("staging", 0) == 1 << 17
    assert after.messages_out > before.messages_out
    assert (after.open_calls, after.running_calls) == (0, 0)


def test_late_joiners(worker: Worker) -> None:
    with transport.group({"first": worker.address}, arrays="numpy", service=rpc_service.service) as group:
        with Worker() as late:
            joined = group.add("late", late.address)
            assert list(group) == ["first", "late"]
            assert joined.call("nested", 2) == 2, "the group's service is not there for it"
            assert joined.call("process_id") == late.pid
            with pytest.raises(transport.DeviceMapError, match="late"):
                group.add("late", late.address)
            joined.close()
        assert group["first"].call("process_id") == worker.pid


def test_a_service_of_the_caller_can_be_called_back(worker: Worker) -> None:
    with transport.connect(worker.address, service=rpc_service.service) as peer:
        assert peer.call("nested", 5) == 5


def test_loopback_serves_many_threads() -> None:
    with transport.loopback(rpc_service.service, threads=2) as peer:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda number: peer.call("add", number), range(100))) == list(range(1, 101))


def test_a_callback_may_not_wait_on_the_agents_thread_and_then_may(peer: transport.Peer) -> None:
    """A wait in a done-callback is refused (or works), and never hangs; `then` may wait (pytorch#48790)."""
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def callback(_: object) -> None:
        try:
            outcome.set_result(peer.call("add", 41))
        except streamrt.DeadlockError as error:
            outcome.set_result(error)

    peer.submit("add", 1).add_done_callback(callback)
    found = outcome.result(WATCHDOG)
    assert found == 42 or isinstance(found, streamrt.DeadlockError)
    assert peer.submit("add", 1).then(lambda two: peer.submit("add", two)).result(WATCHDOG) == 3
    assert peer.submit("add", 1).then(lambda two: peer.call("add", two)).result(WATCHDOG) == 3


def test_a_callback_that_raises_harms_nobody(peer: transport.Peer) -> None:
    def callback(_: object) -> None:
        raise ValueError("a callback's own fault")

    future = peer.submit("add", 1)
    future.add_done_callback(callback)
    assert future.result(WATCHDOG) == 2
    assert peer.call("add", 2) == 3


def test_awaiting_a_call(peer: transport.Peer) -> None:
    async def main() -> list[int]:
        return [int(value) for value in await asyncio.gather(*(_await(peer, number) for number in range(20)))]

    assert asyncio.run(main()) == list(range(1, 21))


async def _await(peer: transport.Peer, number: int) -> int:
    return int(await peer.submit("add", number))


def test_close_lets_open_calls_finish(worker: Worker, name: str) -> None:
    with transport.connect(worker.address) as helper, transport.connect(worker.address) as peer:
        future = peer.submit("bump_behind", name, name)
        until(lambda: helper.call("count", name), "the function to run")
        closing = threading.Thread(target=peer.close, args=(WATCHDOG,))
        closing.start()
        helper.call("open_gate", name)
        closing.join(WATCHDOG)
        assert not closing.is_alive()
        assert future.result(0) == 1


def test_abort_fails_open_calls(worker: Worker, name: str) -> None:
    with transport.connect(worker.address) as helper:
        peer = transport.connect(worker.address)
        future = peer.submit("bump_behind", name, name)
        until(lambda: helper.call("count", name), "the function to run")
        peer.abort()
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
        helper.call("open_gate", name)


def test_abort_ends_all_of_a_loopback() -> None:
    others = set(threading.enumerate())
    peer = transport.loopback(rpc_service.service)
    before = open_descriptors()
    assert peer.call("add", 1) == 2
    own = [one for one in set(threading.enumerate()) - others if "agent-loopback" in one.name]
    assert own
    peer.abort()
    peer.abort()
    until(lambda: not any(one.is_alive() for one in own), "its threads to end")
    until(lambda: open_descriptors() < before, "its descriptors to be closed")


def test_an_agent_closes_without_a_function_that_runs_on() -> None:
    """Its connection is gone, so nobody waits for the function; the agent's own thread that runs it is left to it."""
    begun, gate = threading.Event(), threading.Event()
    ran_on: list[threading.Thread] = []
    service = transport.Service()

    @service.function(name="hold")
    def hold() -> None:
        ran_on.append(threading.current_thread())
        begun.set()
        gate.wait()

    service.function(name="abs")(abs)
    agent = transport.Agent(name="held up", service=service, threads=2)
    with transport.loopback(service, serving=agent) as peer:
        assert peer.call("abs", -1) == 1
        until(lambda: agent._lead.relieved, "a thread to stand by")
        held = peer.submit("hold")
        assert begun.wait(WATCHDOG)
        peer.abort()
        assert isinstance(held.exception(WATCHDOG), transport.PeerLostError)
        agent.close(timeout=3600.0)
    assert ran_on[0] in agent._threads, "the executor ran it, whose threads nobody waits for"
    assert [thread for thread in agent._threads if thread.is_alive()] == ran_on
    gate.set()
    ran_on[0].join(WATCHDOG)


def test_a_function_that_raises_what_its_own_future_holds_keeps_nothing() -> None:
    """The error holds the frame, the frame the future, and the future the error: nobody collects garbage here."""
    failing, service = transport.Service(), transport.Service()
    kept: list[weakref.ref[Any]] = []

    @failing.function(name="fail")
    def fail() -> None:
        raise ValueError("as it should")

    @service.function(name="relay")
    def relay(x: Any) -> None:
        kept.append(weakref.ref(x))
        future = last.submit("fail")
        future.result()

    gc.collect()
    gc.disable()
    try:
        with transport.loopback(failing) as last, transport.loopback(service) as peer:
            with pytest.raises(ValueError, match="as it should"):
                peer.call("relay", streamrt.array(np.ones(1000), device="host:0"))
            until(lambda: kept[0]() is None, "the argument to be dropped")
    finally:
        gc.enable()


class Flooded:
    """A poll of a link at which there is always something to receive."""

    def __init__(self, poll: Any, descriptor: int) -> None:
        self._poll = poll
        self._descriptor = descriptor

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        return self._poll.poll(0) or [(self._descriptor, select.POLLIN)]


def test_deadlines_are_kept_by_a_caller_that_always_has_something_to_read(name: str) -> None:
    with transport.local_workers(1) as (worker,):
        assert worker.call(abs, -1) == 1
        calls = worker._driver.calls
        calls._poll = Flooded(calls._poll, worker._driver.link.fileno())  # type: ignore[assignment]
        with pytest.raises(transport.DeadlineError):
            worker.call(rpc_service.gate, name, timeout=0.2)
        held = worker.submit(rpc_service.gate, name)
        with pytest.raises(TimeoutError):
            held.result(timeout=0.2)
        assert not held.done()
        worker.call(rpc_service.open_gate, name)
        held.result(WATCHDOG)


def test_an_error_that_a_function_keeps_for_itself_can_still_be_looked_at() -> None:
    service = transport.Service()
    kept: list[BaseException] = []

    @service.function(name="fail")
    def fail(x: Any) -> None:
        note = "what a debugger would show"
        try:
            raise ValueError(note)
        except ValueError as error:
            kept.append(error)
            raise

    with transport.loopback(service) as peer:
        with pytest.raises(ValueError, match="what a debugger would show"):
            peer.call("fail", np.ones(3))
    frames = [frame for frame, _ in traceback.walk_tb(kept[0].__traceback__) if frame.f_code.co_name == "fail"]
    assert frames[0].f_locals["note"] == "what a debugger would show"
    assert (frames[0].f_locals["x"] == 1).all()


@pytest.mark.parametrize("holder", ["future", "list", "closure", "error"])
def test_what_holds_its_own_error_is_found(holder: str) -> None:
    """Each would keep the argument until somebody collects garbage."""
    service = transport.Service()
    kept: list[weakref.ref[Any]] = []

    @service.function(name="fail")
    def fail(x: Any) -> None:
        kept.append(weakref.ref(x))
        error = ValueError("as it should")
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        future.set_exception(error)
        if holder == "error":
            raise error
        held = [future] if holder == "list" else future
        del error, future

        def take() -> None:
            (held[0] if isinstance(held, list) else held).result()

        if holder == "closure":
            take()
        elif isinstance(held, list):
            held[0].result()
        else:
            held.result()

    gc.collect()
    gc.disable()
    try:
        with transport.loopback(service) as peer:
            with pytest.raises(ValueError, match="as it should"):
                peer.call("fail", streamrt.array(np.ones(1000), device="host:0"))
            until(lambda: kept[0]() is None, "the argument to be dropped")
    finally:
        gc.enable()


# What goes wrong elsewhere --------------------------------------------------------------------------------------------


@pytest.fixture
def held() -> Iterator[tuple[transport.Peer, threading.Event]]:
    """A peer that takes nothing until its gate is opened."""
    gate, entered = threading.Event(), threading.Event()
    agent = transport.Agent(name="busy", service=rpc_service.service)

    def hold() -> None:
        entered.set()
        gate.wait(WATCHDOG)

    with transport.loopback(rpc_service.service, serving=agent) as peer:
        agent.call_soon(hold)
        assert entered.wait(WATCHDOG)
        yield peer, gate
        gate.set()
    agent.close(0.0)


def test_who_has_sent_cannot_cancel_it(held: tuple[transport.Peer, threading.Event]) -> None:
    """`asyncio.wait_for` cancels what it waits for; the arguments are on their way all the same."""
    peer, gate = held
    future = peer.submit("total", np.ones(1 << 20), copy=False)
    notified = peer.notify("total", np.ones(1 << 20), copy=False)

    async def impatient(one: concurrent.futures.Future[None]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(one), 0.01)

    for sent in (future.sent, notified):
        asyncio.run(impatient(sent))
        assert not sent.cancel()
        assert not sent.done()
    gate.set()
    assert future.result(WATCHDOG) == 1 << 20
    assert future.sent.result(WATCHDOG) is None
    assert notified.result(WATCHDOG) is None
    assert not peer.closed


def test_sent_that_the_user_has_ended_harms_nobody(held: tuple[transport.Peer, threading.Event]) -> None:
    peer, gate = held
    future = peer.submit("total", np.ones(1 << 20), copy=False)
    future.sent.set_result(None)
    gate.set()
    assert future.result(WATCHDOG) == 1 << 20
    assert peer.call("add", 1) == 2


def test_a_failed_device_of_a_peer_is_the_peers_alone() -> None:
    """A function that calls a third process and hears of its device's end has not lost its own."""
    last = transport.Service()

    @last.function(name="fail")
    def fail() -> None:
        raise streamrt.DeviceError("an illegal address", code=700)

    ended: list[streamrt.DeviceError] = []
    with transport.loopback(last) as far:
        service = transport.Service()

        @service.function(name="relay")
        def relay() -> None:
            far.call("fail")

        agent = transport.Agent(name="between", service=service)
        agent.on_device_error = ended.append
        with transport.loopback(service, serving=agent) as peer:
            with pytest.raises(streamrt.DeviceError, match="illegal address"):
                peer.call("relay")
            until(lambda: not peer.statistics().open_calls, "the call to be over")
        agent.close()  # and with it the thread that ran the function
    assert ended == []


@pytest.mark.parametrize("text", [b"bytes\n", "\udc80"])
def test_an_error_that_cannot_be_formatted_arrives(text: Any) -> None:
    service = transport.Service()

    @service.function(name="fail")
    def fail() -> None:
        raise SyntaxError("bad", ("file", 1, 1, text))

    @service.function(name="one")
    def one() -> int:
        return 1

    with transport.loopback(service) as peer:
        for _ in range(3):
            with pytest.raises(SyntaxError, match="bad"):
                peer.submit("fail").result(WATCHDOG)
        assert [peer.submit("one").result(WATCHDOG) for _ in range(3)] == [1, 1, 1]


class Parts:
    """A value of a registered type."""


def test_a_value_whose_rebuilding_is_broken_off_ends_its_future() -> None:
    """Ctrl-C on the thread that reads a connection, while it rebuilds a value that another thread waits for."""
    gates = {name: threading.Event() for name in ("made", "waited")}
    service = transport.Service()

    @service.function(name="wait")
    def wait(name: str) -> None:
        gates[name].wait(WATCHDOG)

    @service.function(name="make")
    def make() -> Parts:
        gates["made"].wait(WATCHDOG)
        return Parts()

    def rebuild(_: object) -> Parts:
        raise KeyboardInterrupt

    transport.register_type(Parts, to_parts=lambda _: (), from_parts=rebuild)
    with transport.loopback(service, threads=4) as peer:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            future = threads.submit(peer.submit, "make").result(WATCHDOG)
        opened = threading.Timer(0.1, gates["made"].set)
        opened.start()
        with contextlib.suppress(KeyboardInterrupt):  # where it was this thread that read it
            peer.call("wait", "waited", timeout=1.0)
            gates["waited"].set()
        opened.join()
        error = future.exception(WATCHDOG)
        assert isinstance(error, streamrt.LifetimeError)
        assert "make on 'loopback'" in str(error)
        gates["waited"].set()
        assert not peer.closed


def test_nobody_wakes_a_reader_that_has_left() -> None:
    with transport.loopback(rpc_service.service) as peer:
        assert peer.call("add", 1) == 2
        calls = peer._driver.calls
        calls._reader = threading.get_ident() + 1  # as seen by one who is about to write
        calls.close_descriptors()
        calls.wake_reader()
        calls._reader = 0


def test_a_connection_has_ended_before_its_agent_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that leaves in between would close nothing, and nobody would after it."""
    peer = transport.loopback(rpc_service.service)
    agent = peer._driver.agent
    seen: list[bool] = []
    forget = agent.forget

    def look(driver: Any) -> None:
        seen.append(driver.ended.is_set())
        forget(driver)

    monkeypatch.setattr(agent, "forget", look)
    peer.close()
    assert seen == [True]


def test_a_deadline_that_comes_while_the_agent_looks_at_deadlines_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked at this connection already, and is about to sleep for longer."""
    looked, submitted = threading.Event(), threading.Event()
    service = transport.Service()
    over = threading.Event()

    @service.function(name="wait")
    def wait() -> None:
        over.wait(WATCHDOG)

    with transport.loopback(service, threads=4) as peer:
        driver, agent = peer._driver, peer._driver.agent
        next_timeout, armed = driver.next_timeout, threading.Event()

        def slowly() -> float | None:
            due = next_timeout()
            if agent._lead.mine and sys._getframe(1).f_code.co_name == "_timeout" and armed.is_set():
                armed.clear()
                looked.set()
                submitted.wait(WATCHDOG)
            return due

        monkeypatch.setattr(driver, "next_timeout", slowly)
        first = peer.submit("wait", timeout=0.3)  # until when the agent sleeps first
        first.add_done_callback(lambda _: armed.set())
        assert looked.wait(WATCHDOG)
        woken: list[None] = []
        wake = agent.wake

        def note() -> None:
            woken.append(None)
            wake()

        monkeypatch.setattr(agent, "wake", note)
        second = peer.submit("wait", timeout=0.1)
        assert woken, "it would be noticed by the next heartbeat"
        submitted.set()
        assert isinstance(second.exception(WATCHDOG), transport.DeadlineError)
        over.set()


def test_memory_that_cannot_be_given_back_does_not_stop_an_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of giving back is told once; whoever lent an array hears all the same."""

    def fail(**_: object) -> None:
        raise ValueError("a fault")

    with transport.loopback(rpc_service.service) as peer:
        monkeypatch.setattr(streamrt.memory, "drain", fail)
        for _ in range(20):
            future = peer.submit("total", np.ones(1 << 20), copy=False)
            assert future.result(WATCHDOG) == 1 << 20
            assert future.sent.result(WATCHDOG) is None
        told = [record for record in caplog.records if record.message == "giving back memory failed"]
        assert 1 <= len(told) <= 3  # once for each agent: the two here, and perhaps the one of the process
        monkeypatch.undo()


EDGES = [(name, event) for name in ("__enter__", "__exit__") for event in ("call", "return")]


def interrupted_at(module: str, name: str, event: str, call: Callable[[], object]) -> None:
    """Calls it until it is interrupted, as by Ctrl-C, where a function of that name and file begins or returns."""
    interrupted = []

    def interrupt(frame: Any, what: str, value: object) -> Any:
        code = frame.f_code
        if (code.co_filename, code.co_name, what) == (module, name, event) and not interrupted:
            interrupted.append(frame)
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(100):
                call()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(("name", "event"), EDGES)
def test_ctrl_c_at_the_edge_of_the_drivers_lock_does_not_leave_it_held(name: str, event: str) -> None:
    """The agent's thread would wait for it for ever, and all connections with it."""
    with transport.loopback(rpc_service.service) as peer:
        assert peer.call("add", 1) == 2
        interrupted_at(driver.__file__, name, event, lambda: peer.submit("add", 1))
        free = threading.Event()

        def take() -> None:
            with peer._driver.lock:
                free.set()

        threading.Thread(target=take, daemon=True).start()
        assert free.wait(WATCHDOG)


@pytest.mark.parametrize(("name", "event"), EDGES)
def test_ctrl_c_while_a_caller_reads_does_not_keep_it_from_waiting_again(name: str, event: str) -> None:
    """A thread that reads may not wait in a callback: that is over when it does not read any more."""
    with transport.loopback(rpc_service.service) as peer:
        interrupted_at(context.__file__, name, event, lambda: peer.call("add", 1))
        with blocking():
            pass


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("name", ["ready", "leave"])
def test_a_caller_that_ctrl_c_interrupts_when_it_leaves_a_link_leaves_it_to_somebody(name: str, event: str) -> None:
    with transport.loopback(rpc_service.service) as peer:
        interrupted_at(untended.__file__, name, event, lambda: peer.call("add", 1))
        until(lambda: not peer._driver.attended, "the agent's thread to read the link again")
        future = peer.submit("add", 2)
        until(future.done, "the reply")


def test_an_errors_number_and_file_come_along() -> None:
    def find() -> None:
        open("/nowhere/at all")  # noqa: SIM115

    service = transport.Service()
    service.function(name="find")(find)
    with transport.loopback(service) as peer, pytest.raises(FileNotFoundError) as raised:
        peer.call("find")
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert (error.errno, error.strerror) == (errno.ENOENT, os.strerror(errno.ENOENT))
        assert error.filename == "/nowhere/at all"
        assert str(error) == "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at all'"


@pytest.mark.parametrize(
    ("error", "files"),
    [
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/a", None, "/b"), ("/a", "/b")),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "it's"), (None, None)),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), b"/a"), (None, None)),
        (OSError(errno.ENOENT, "a message of its own: '/a'"), (None, None)),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), (None, None)),
        (OSError("whatever it was"), (None, None)),
    ],
    ids=str,
)
def test_what_an_errors_message_does_not_say_plainly_is_left_out(error: OSError, files: tuple[Any, Any]) -> None:
    again = rebuild_error(type(error).__name__, str(error), "", "f on 'worker'")
    assert isinstance(again, OSError)
    assert (again.errno, again.strerror) == (error.errno, error.strerror)
    assert (again.filename, again.filename2) == files
    assert again.message == str(error)


def test_an_error_of_text_is_a_value_error() -> None:
    error = rebuild_error("UnicodeDecodeError", "'utf-8' codec can't decode byte 0xff", "", "f on 'worker'")
    assert isinstance(error, ValueError)
    assert error.type_name == "UnicodeDecodeError"
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


def test_a_function_goes_by_the_name_that_its_service_has_it_under() -> None:
    def add(x: int) -> int:
        return x + 1

    service = transport.Service()
    service.function(name="increment")(add)
    with transport.loopback(service) as peer:
        assert peer.call(add, 1) == 2
    again = transport.Service()
    again.function(add)
    assert again.functions == (add.__qualname__,), "what another service calls it is that one's business"


@pytest.mark.parametrize("type_name", ["ValueError", "KeyError", "PeerLostError", "svc.Own", "UnicodeDecodeError"])
def test_an_error_of_the_peer_can_be_pickled(type_name: str) -> None:
    """A pool of processes sends errors so, and ends where that fails."""
    error = rebuild_error(type_name, "what it said", "Traceback ...", "f on 'worker'")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.type_name, again.traceback_text) == (str(error), type_name, "Traceback ...")
    assert again.__notes__ == error.__notes__
    lost = transport.StageLostError("blur", 7, [3, 4], error)
    for one in (transport.StageError("blur", 7, error), lost):
        copied = pickle.loads(pickle.dumps(one))
        assert (type(copied), str(copied), copied.frame) == (type(one), str(one), 7)
        assert type(copied.__cause__) is type(error)
    assert pickle.loads(pickle.dumps(lost)).lost == (3, 4)


@pytest.mark.parametrize("make", ["connect", "loopback"])
def test_a_peer_that_is_dropped_says_so_and_closes_when_its_calls_have_ended(worker: Worker, make: str) -> None:
    """Nobody could close it any more; whoever takes it for the connection's end sees no error."""
    peer = transport.loopback(rpc_service.service) if make == "loopback" else transport.connect(worker.address)
    driver, name = peer._driver, uuid.uuid4().hex
    future = peer.submit("bump_behind", name, name)
    until(lambda: bool(driver.calls.open), "the call")
    with pytest.warns(ResourceWarning, match="dropped, but not closed: <Peer .* 1 calls open>; use it in a with"):
        del peer
    with transport.connect(worker.address) if make == "connect" else contextlib.nullcontext() as control:
        if control is None:
            rpc_service.open_gate(name)
        else:
            control.call("open_gate", name)
        assert future.result(WATCHDOG) == 1
    until(driver.ended.is_set, "the connection to end")
    assert driver.closed is not None
    assert driver.closed.graceful


def test_a_peer_that_a_function_has_made_is_no_end_of_the_connection(peer: transport.Peer) -> None:
    for again in (transport.Peer.of(peer._driver), transport.Peer(peer._driver)):
        assert again.call("add", 1) == 2
    del again
    gc.collect()
    assert peer.call("add", 1) == 2


def test_a_caller_that_reads_the_link_brings_the_replies_of_others(worker_on_unix: transport.Peer) -> None:
    """Their threads find the link taken, and sleep until it has: their futures end on the thread of the first one."""
    peer, name = worker_on_unix, uuid.uuid4().hex
    results: list[int] = []
    reader = threading.Thread(target=lambda: results.append(peer.call("bump_behind", name, name)), daemon=True)
    reader.start()
    until(lambda: peer._driver.calls._reader == reader.ident, "the first caller to read")
    for _ in range(3):
        other, ended_on = uuid.uuid4().hex, list[threading.Thread]()
        future = peer.submit("bump_behind", other, other)
        future.add_done_callback(lambda _, seen=ended_on: seen.append(threading.current_thread()))  # type: ignore[misc]
        peer.submit("open_gate", other)
        assert future.result(WATCHDOG) == 1
        until(lambda seen=ended_on: bool(seen), "the callback")  # type: ignore[misc]
        assert ended_on == [reader]
    assert not results
    peer.submit("open_gate", name)
    reader.join(WATCHDOG)
    assert results == [1]


@pytest.fixture
def worker_on_unix(tmp_path: Path) -> Iterator[transport.Peer]:
    with (
        Worker("rpc_service:service", "--listen", f"unix://{tmp_path}/s") as worker,
        transport.connect(worker.address) as peer,
    ):
        yield peer
