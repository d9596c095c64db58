"""Peers that say of themselves what is not true, driven by hand: no honest end would send such messages."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

import streamrt
import transport
from streamrt import memory
from streamrt.device import CPU, parse_device
from streamrt.errors import LifetimeError
from transport import codec, process
from transport.agent import Agent
from transport.channels import ends, same_process
from transport.channels.staging import DeviceReceiver, HostReceiver
from transport.events import BufferHeader, DataReady, EndFuture, Key, Ready, Send, Side, StartCall
from transport.limits import Limits
from transport.links import MAX_FRAMES, Link, LinkBroken, zmq_link
from transport.links.unix_link import UnixLink
from transport.links.unix_listener import UnixListener
from transport.protocol import Connection

WATCHDOG = 20.0


class Stranger:
    """An initiator whose every word is chosen: the sans-io connection with no driver.  Close its `link`."""

    def __init__(self, agent: Agent, **told: object) -> None:
        theirs, ours = socket.socketpair()
        self.driver = agent.add(UnixLink(theirs), initiator=False, limits=Limits(same_host=True))
        self.link = UnixLink(ours)
        hello: dict[str, object] = {
            "name": "stranger",
            "pid": 1,
            "started": 0,
            "devices": ["host:0"],
            "device_count": 1,
            "functions": [],
            "map": None,
            **told,
        }
        self.connection = Connection(
            initiator=True,
            hello=hello,
            session=secrets.token_bytes(16),
            limits=Limits(same_host=True),
            now=time.monotonic(),
        )
        self.effects: list[Any] = []
        self.until(Ready)

    def pump(self) -> None:
        for effect in self.connection.drain():
            if isinstance(effect, Send):
                try:
                    self.link.send(effect.frames)
                except LinkBroken:
                    return
            else:
                self.effects.append(effect)

    def until(self, kind: type) -> Any:
        """Goes on until there is an effect of the kind."""
        deadline = time.monotonic() + WATCHDOG
        while True:
            self.pump()
            for effect in self.effects:
                if isinstance(effect, kind):
                    return effect
            assert time.monotonic() < deadline, f"no {kind.__name__} among {self.effects}"
            poll = select.poll()
            poll.register(self.link.fileno(), select.POLLIN)
            poll.poll(100)
            for message in self.link.receive():
                self.connection.receive(message, time.monotonic())

    def claim(self, nbytes: int, descriptor: bytes) -> str:
        """Calls `echo` with an array that is said to have been handed over; why that ended the connection."""
        skeleton = codec.encode(((np.zeros(1, "u1"),), {}), lambda value: hasattr(value, "dtype")).body
        body = msgpack.packb([[("uint8", (nbytes,), 0, "cpu", None)], skeleton])
        header = BufferHeader(nbytes, "cpu", "same_process", "cpu")
        self.connection.command(StartCall(1, "echo", body, (header,)), time.monotonic())
        fact = DataReady(Key(1, True, Side.REQUEST), 0, 0, descriptor, "same_process")
        self.connection.fact(fact, time.monotonic())
        with contextlib.suppress(LinkBroken):  # cut while we still write
            self.until(EndFuture)
        assert self.driver.ended.wait(WATCHDOG)
        assert self.driver.closed is not None
        return self.driver.closed.reason


def echo(value: Any) -> Any:
    return value


@pytest.fixture
def stranger(agent: Agent) -> Iterator[Callable[..., Stranger]]:
    """Makes strangers, and closes their links."""
    with contextlib.ExitStack() as stack:

        def make(**told: object) -> Stranger:
            made = Stranger(agent, **told)
            stack.callback(made.link.close)
            return made

        yield make


@pytest.fixture
def agent() -> Iterator[Agent]:
    service = transport.Service()
    service.function(echo)
    agent = Agent(name="honest", service=service)
    yield agent
    agent.close(0.0)


@pytest.fixture
def handed(agent: Agent) -> Iterator[Callable[[], np.ndarray[Any, Any]]]:
    """Hands an array over on an honest connection whose other end does not take it until the test is over."""
    gate, entered = threading.Event(), threading.Event()
    busy = Agent(name="busy", service=agent.service)
    peer = transport.loopback(agent.service, serving=busy)

    def hold() -> None:
        entered.set()
        gate.wait(WATCHDOG)

    busy.call_soon(hold)
    assert entered.wait(WATCHDOG)
    value = np.full(100_000, 0x53, np.uint8)  # more than travels inside a message
    future = peer.submit("echo", value)
    assert same_process._handed

    def finish() -> np.ndarray[Any, Any]:
        gate.set()
        return future.result(WATCHDOG)  # type: ignore[no-any-return]

    yield finish
    gate.set()
    peer.close(1.0)
    busy.close(0.0)


def test_a_peer_that_repeats_what_this_process_says_of_itself_gets_no_memory(
    stranger: Callable[..., Stranger], handed: Callable[[], np.ndarray[Any, Any]]
) -> None:
    learnt = stranger().until(Ready).info
    liar = stranger(process=process.identity(), same_process=learnt[ends.FIELD])
    descriptor = next(iter(same_process._handed))
    assert "another process" in liar.claim(9000, descriptor)
    assert descriptor in same_process._handed
    np.testing.assert_array_equal(handed(), np.full(100_000, 0x53, np.uint8))


def test_what_was_handed_to_one_end_is_not_taken_nor_dropped_by_another(
    handed: Callable[[], np.ndarray[Any, Any]],
) -> None:
    descriptor = next(iter(same_process._handed))
    taker = same_process.Taker(CPU, 9000, None, ends.register(), CPU)
    with pytest.raises(LifetimeError, match="another connection"):
        taker.pull(0, descriptor)
    same_process.discard(descriptor, "another end")
    assert len(descriptor) == 16  # random, so that it cannot be counted up to
    np.testing.assert_array_equal(handed(), np.full(100_000, 0x53, np.uint8))


@pytest.mark.parametrize(("nbytes", "source"), [(9001, "cpu"), (8999, "cpu"), (9000, "cuda:1")])
def test_a_header_of_another_size_or_source_does_not_reach_the_memory(nbytes: int, source: str) -> None:
    [snapshot] = memory.snapshot([np.zeros(9000, np.uint8)])
    half = same_process.HandOver(snapshot, "end")
    chunk = half.advance()
    assert chunk is not None
    taker = same_process.Taker(CPU, nbytes, None, "end", parse_device(source))
    with pytest.raises(LifetimeError, match="were announced"):
        taker.pull(0, chunk[1])


def test_two_ends_are_paired_only_when_each_was_told_of_the_other() -> None:
    first, second, third = ({ends.FIELD: ends.register()} for _ in range(3))
    ends.meet(first, second)
    assert not ends.paired(first, second)
    ends.meet(second, first)
    assert ends.paired(first, second)
    assert ends.paired(second, first)
    ends.meet(third, first)  # it was copied from another connection's hello
    assert not ends.paired(third, first)
    ends.forget(first)
    assert not ends.paired(second, first)
    assert not ends.paired({}, {})
    assert not ends.paired({ends.FIELD: 3}, {ends.FIELD: 3})


def test_a_header_of_more_than_the_hosts_memory_ends_its_call(
    stranger: Callable[..., Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []
    monkeypatch.setattr(memory, "allocate", lambda device, nbytes, *rest: allocated.append(nbytes))
    liar = stranger()
    header = BufferHeader(process.memory_bytes() + 1, "cpu", "staging", "cpu")
    liar.connection.command(StartCall(1, "echo", b"", (header,)), time.monotonic())
    ended = liar.until(EndFuture)
    assert ended.type_name == "ExhaustedError"
    assert re.fullmatch(rf"{header.nbytes} bytes for cpu in one message, where \d+ are allowed; .*", ended.message)
    assert allocated == []


@pytest.mark.parametrize("channel", ["staging", "shared_memory"])
def test_a_source_that_is_no_device_ends_its_call_and_no_other(stranger: Callable[..., Stranger], channel: str) -> None:
    made = stranger()
    skeleton = codec.encode(((np.zeros(1, "u1"),), {}), lambda value: hasattr(value, "dtype")).body
    body = msgpack.packb([[("uint8", (8,), 0, "cpu", None)], skeleton])
    header = BufferHeader(8, "cpu", channel, "nonsense")
    made.connection.command(StartCall(1, "echo", body, (header,)), time.monotonic())
    ended = made.until(EndFuture)
    assert "'nonsense' is no device" in ended.message
    assert made.driver.closed is None


def test_a_caller_that_sends_more_than_the_hosts_memory_is_told_what_to_do(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "memory_bytes", lambda: 1 << 20)
    with transport.loopback(agent.service) as peer:
        with pytest.raises(transport.LocalProtocolError, match="1048576 are allowed; send them in several calls"):
            peer.call("echo", np.zeros((1 << 20) + 1, np.uint8))
        assert peer.call("echo", 3) == 3


@pytest.mark.parametrize("device", ["cpu", "host:0"])
def test_a_repeated_range_is_not_received_in_place(device: str) -> None:
    """By then a function may be reading there: all that came before it was checked, this was not."""
    receiver: HostReceiver | DeviceReceiver
    if device == "cpu":
        room = memory.allocate(CPU, 3000)
        receiver = HostReceiver(room.address, 3000, room)
    else:
        stream = streamrt.Stream(device)
        room = memory.allocate(stream.device, 3000, stream)
        receiver = DeviceReceiver(room.address, 3000, stream)
    first = receiver.reserve(0, 1000)
    assert first is not None
    receiver.pull(0, first)
    assert receiver.reserve(0, 1000) is None
    assert receiver.reserve(999, 1000) is None
    receiver.pull(1000, bytes(500))  # not in place
    assert receiver.reserve(1000, 1000) is None
    assert receiver.reserve(1500, 1000) is not None
    assert receiver.reserve(2500, 501) is None
    receiver.abandon()


def test_a_link_that_cannot_be_taken_does_not_cost_the_others(agent: Agent, tmp_path: Path) -> None:
    listener = UnixListener(f"unix://{tmp_path}/s")
    refused: list[Link] = []

    def accept(link: Link) -> Any:
        if not refused:
            refused.append(link)
            raise OSError("no")
        return agent.add(link, initiator=False, limits=Limits(same_host=True))

    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for client in (first, second):
            client.settimeout(WATCHDOG)
            client.connect(f"{tmp_path}/s")
        agent.listen(listener, accept)
        assert first.recv(1) == b""
        deadline = time.monotonic() + WATCHDOG
        while not agent.drivers:
            assert time.monotonic() < deadline
    agent.stop_listening(listener)


def test_without_descriptors_a_listener_takes_what_it_can_and_turns_the_rest_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = UnixListener(f"unix://{tmp_path}/s")
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
        for client in clients:
            client.settimeout(WATCHDOG)
            client.connect(f"{tmp_path}/s")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        try:
            links = listener.accept()
            assert listener.accept() == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(links) == 1
        for client in clients[1:]:
            assert client.recv(1) == b""
        assert [record.message for record in caplog.records if "ulimit" in record.message] != []
        assert len(caplog.records) == 1
        again = stack.enter_context(socket.socket(socket.AF_UNIX))
        again.connect(f"{tmp_path}/s")
        links += listener.accept()
        assert len(links) == 2
        for link in links:
            link.close()


def test_an_ipc_socket_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    os.umask(before)
    listener = zmq_link.listen(f"ipc://{tmp_path}/s")
    try:
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) & 0o077 == 0
        after = os.umask(before)
        assert after == before
    finally:
        listener.close()


def test_a_message_of_very_many_parts_is_not_gathered(tmp_path: Path) -> None:
    listener = zmq_link.listen(f"ipc://{tmp_path}/s")
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as sender:
            sender.connect(f"ipc://{tmp_path}/s")
            sender.send_multipart([b"x"] * 5000)
            assert listener._core.socket.poll(int(WATCHDOG) * 1000)
            parts = listener._core.read()
            assert parts is not None
            assert len(parts) == MAX_FRAMES + 2
            assert listener._core.read() is None
    finally:
        listener.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("functions", [5, "echo", {"echo": 1}, [1], [b"echo"], ["f"] * 1025])
def test_functions_that_are_no_names_end_the_connection(functions: object, stranger: Callable[..., Stranger]) -> None:
    driver = stranger(functions=functions).driver
    assert driver.ended.wait(WATCHDOG)
    assert transport.Peer.of(driver).functions == ()
