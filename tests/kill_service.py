"""The workers of a chain A -> B -> C whose calls can be held at each point of their way, for tests that kill there.

Holding is done by words that streams wait for, and by gates; each call counts how far it has come, so that nobody has
to guess.
"""

from __future__ import annotations

import faulthandler
import itertools
import signal
from typing import Any

import rpc_service

import streamrt
import transport
from streamrt.pool import CLEAN_STREAMS, StreamLease, stream_pool
from streamrt.segment import STRIDE, Segment, Word
from streamrt.timeline import Point
from transport.agent import default_agent

service = transport.Service()
for function in (rpc_service.count, rpc_service.open_gate, rpc_service.increment, rpc_service.held_bytes):
    service.function(function)

faulthandler.register(signal.SIGUSR1, all_threads=True)  # for a test that finds a call elsewhere than it should be
_segment = Segment.create(1 << 16, "streamrt-holds")
_offsets = itertools.count(0, STRIDE)
_closed: list[Word] = []
_taken: list[StreamLease] = []
_last: dict[str, transport.Peer] = {}


def close(stream: streamrt.Stream) -> None:
    """What is enqueued on the stream from now on waits for `let_go`.

    By a word, since a latch is a kernel that runs: a stream that waits leaves the GPU to the other processes on it.
    """
    _closed.append(Word(_segment, next(_offsets), 32))
    stream.wait(Point(_closed[-1], 1))


def hold(device: str) -> None:
    """Closes the stream on which this call's function runs."""
    close(streamrt.current_stream(streamrt.parse_device(device)))


@service.function
def hold_pulls(device: str) -> None:
    """Closes the one stream that the next call can be given, so that its pulls are enqueued and do not run."""
    pool = stream_pool(streamrt.parse_device(device), "callee")
    _taken.extend(pool.lease(exclusive=True) for _ in range(CLEAN_STREAMS))  # past these none is made for being clean
    given = _taken.pop()
    close(given.stream)
    given.release()


@service.function
def let_go() -> None:
    """Lets go on what was closed here."""
    while _closed:
        _closed.pop().store(1)
    while _taken:
        _taken.pop().release()


@service.function
def serving() -> int:
    """How many calls are here beside this one: all of their pulls are enqueued.

    On a GPU a function is launched behind its pulls and returns; then it is the reply that waits for them.
    """
    drivers = default_agent().drivers
    replies = sum(not key.outgoing for driver in drivers for key in tuple(driver.transfers.outgoing))
    return sum(len(driver.served.calls) for driver in drivers) + replies - 1


@service.function
def whereabouts() -> list[str]:
    """What is on its way over each connection here."""
    return [
        f"{driver.name}: {len(driver.transfers.outgoing)} out, {len(driver.transfers.incoming)} in, polling "
        f"{driver.polling}, ready {driver.transfers.ready}, serving {len(driver.served.calls)}, {driver.protocol!r}"
        for driver in default_agent().drivers
    ]


@service.function
def through(address: str, x: Any, name: str, held: str) -> Any:
    """B: what C makes of the array.  `held` is where the call is to stay: see `behind`, or "before" its snapshot."""
    if address not in _last or _last[address].closed:
        _last.clear()
        _last[address] = transport.connect(address, timeout=2.0)
    if held == "before":
        hold(str(streamrt.device_of(x)))
    future = _last[address].submit("behind", x, name, held)
    rpc_service.bump(f"{name} handed on")
    return future.result()


@service.function
def behind(x: Any, name: str, held: str) -> Any:
    """C: one more everywhere, in the caller's array.  Stays in the "function", or behind it, with the "reply"."""
    rpc_service.bump(f"{name} begun")
    if held == "function":
        rpc_service.gate(name)
    x += 1
    if held == "reply":
        hold(str(streamrt.device_of(x)))
        rpc_service.bump(f"{name} returned")
    return x
