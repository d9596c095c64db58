"""Peers that say of themselves what is not true, driven by hand: no honest end would send such messages."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

import transport
from streamrt import memory
from streamrt.device import CPU, parse_device
from streamrt.errors import LifetimeError
from transport import codec, process
from transport.agent import Agent
from transport.channels import ends, same_process
from transport.events import BufferHeader, Closed, DataReady, EndFuture, Key, Ready, Send, Side, StartCall
from transport.limits import Limits
from transport.links import LinkBroken
from transport.links.unix_link import UnixLink
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

    def claim(self, nbytes: int, descriptor: bytes) -> Any:
        """Calls `echo` with an array that is said to have been handed over; how the call ended."""
        skeleton = codec.encode(((np.zeros(1, "u1"),), {}), lambda value: hasattr(value, "dtype")).body
        body = msgpack.packb([[("uint8", (nbytes,), 0, "cpu", None)], skeleton])
        header = BufferHeader(nbytes, "cpu", "same_process", "cpu")
        self.connection.command(StartCall(1, "echo", body, (header,)), time.monotonic())
        fact = DataReady(Key(1, True, Side.REQUEST), 0, 0, descriptor, "same_process")
        self.connection.fact(fact, time.monotonic())
        return self.until(EndFuture)


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
    value = np.full(9000, 0x53, np.uint8)
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
    assert "another process" in liar.claim(9000, descriptor).message
    assert liar.driver.ended.wait(WATCHDOG)
    assert descriptor in same_process._handed
    np.testing.assert_array_equal(handed(), np.full(9000, 0x53, np.uint8))
    assert liar.until(Closed).graceful is False


def test_what_was_handed_to_one_end_is_not_taken_nor_dropped_by_another(
    handed: Callable[[], np.ndarray[Any, Any]],
) -> None:
    descriptor = next(iter(same_process._handed))
    taker = same_process.Taker(CPU, 9000, None, ends.register(), CPU)
    with pytest.raises(LifetimeError, match="another connection"):
        taker.pull(0, descriptor)
    same_process.discard(descriptor, "another end")
    assert len(descriptor) == 16  # random, so that it cannot be counted up to
    np.testing.assert_array_equal(handed(), np.full(9000, 0x53, np.uint8))


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
    assert ends.paired(first, second) and ends.paired(second, first)
    ends.meet(third, first)  # it was copied from another connection's hello
    assert not ends.paired(third, first)
    ends.forget(first)
    assert not ends.paired(second, first)
    assert not ends.paired({}, {}) and not ends.paired({ends.FIELD: 3}, {ends.FIELD: 3})
