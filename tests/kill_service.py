"""The workers of a chain A -> B -> C whose calls can be held at each point of their way, for tests that kill there.

Holding is done by latches on streams and by gates; each call counts how far it has come, so that nobody has to guess.
"""

from __future__ import annotations

import os
from typing import Any

import rpc_service

import streamrt
import transport
from streamrt.pool import stream_pool
from streamrt.testing import Latch
from transport.agent import default_agent

service = transport.Service()
for function in (rpc_service.count, rpc_service.open_gate, rpc_service.increment, rpc_service.held_bytes):
    service.function(function)

_latches: list[Latch] = []
_last: dict[str, transport.Peer] = {}


def hold(device: str) -> None:
    """Closes the stream on which this call's function runs."""
    _latches.append(Latch(streamrt.current_stream(streamrt.parse_device(device))))


@service.function
def hold_pulls(device: str) -> None:
    """Closes all streams that calls are given here, so that pulls are enqueued and do not run."""
    pool = stream_pool(streamrt.parse_device(device), "callee")
    leases = [pool.lease() for _ in range(pool.size)]  # the pool makes all of its streams, and no clean one later
    for lease in leases:
        _latches.append(Latch(lease.stream))
        lease.release()


@service.function
def let_go() -> None:
    """Opens what was closed here."""
    while _latches:
        _latches.pop().open()


@service.function
def serving() -> int:
    """How many calls run here beside this one: all of their pulls are enqueued."""
    return sum(len(driver.served.calls) for driver in default_agent().drivers) - 1


@service.function
def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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
