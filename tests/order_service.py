"""What the tests of stream order between processes call: work that stays behind a latch until another call opens it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import rpc_service
from rpc_processes import WATCHDOG

import streamrt
import transport
from streamrt import hooks
from streamrt.testing import Latch
from transport.agent import default_agent
from transport.channels import bounds
from transport.releaser import releaser

service = transport.Service()
_latches: list[Latch] = []
_peers: dict[str, transport.Peer] = {}
_futures: list[streamrt.DeviceFuture[Any]] = []
_noted: list[str] = []


def close(device: str, x: Any) -> streamrt.Stream:
    """The current stream of the device, from now on behind a latch.  What will fill `x` behind it is loaded before."""
    fill(x, -2.0)
    stream = streamrt.current_stream(device)
    _latches.append(Latch(stream))
    return stream


def fill_later(stream: streamrt.Stream, x: Any, value: float) -> Any:
    """Fills an array in stream order, which on a virtual device plain code would not."""
    stream.launch(fill, x, value, reads=(), writes=(x,))
    return x


def fill(x: Any, value: float) -> None:
    x.fill(value)


@service.function
def open_latches() -> None:
    """Lets go on what was closed here."""
    while _latches:
        _latches.pop().open()


@service.function
def serving() -> int:
    """How many calls beside this one are launched here: the pulls of their arguments are enqueued."""
    return sum(len(driver.served.calls) for driver in default_agent().drivers) - 1


@service.function
def total(x: Any) -> float:
    """The sum of what the function was shown."""
    return float(x.sum())


@service.function
def increment(x: Any) -> Any:
    """One more everywhere, in the caller's array."""
    x += 1
    return x


@service.function
def held(device: str, value: float, count: int) -> Any:
    """A result whose bytes are behind a latch: the reply's message is not."""
    with streamrt.device_guard(device):
        x = streamrt.array(np.zeros(count), device=device)
        return fill_later(close(device, x), x, value)


@service.function
def failing(device: str, value: float, count: int) -> Any:
    """As `held`, on a stream that fails behind the latch."""

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    with streamrt.device_guard(device):
        x = streamrt.array(np.zeros(count), device=device)
        stream = close(device, x)
        stream.launch(fail)
        return fill_later(stream, x, value)


@service.function
def send_held(address: str, device: str, value: float, count: int) -> None:
    """Calls another process with an array whose bytes are behind a latch here; keeps the future."""
    if address not in _peers:
        _peers[address] = transport.connect(address)
    x = streamrt.array(np.zeros(count), device=device)
    fill_later(close(device, x), x, value)
    _futures.append(_peers[address].submit("note_total", x))


@service.function
def made_of(address: str, device: str, value: float, count: int) -> Any:
    """A result that is behind the bytes of another process, which are behind a latch there."""
    if address not in _peers:
        _peers[address] = transport.connect(address)
    reply = _peers[address].submit("held", device, value, count)
    reply.exception(WATCHDOG)
    with streamrt.device_guard(device):
        x = streamrt.array(np.zeros(count), device=device)
        stream = streamrt.current_stream(device)
        reply._points.order_on(stream)  # as a GPU's result() does: the stream waits, the host does not
        _futures.append(reply)
        return fill_later(stream, x, value + 1.0)


@service.function
def hang_up() -> None:
    """Ends the connections to others at once; what is enqueued here still runs."""
    for peer in _peers.values():
        peer.abort()
    _peers.clear()


@service.function
def note_total(x: Any) -> float:
    """Notes that it ran, and on what."""
    _noted.append(f"{total(x):g}")
    return total(x)


@service.function
def noted() -> list[str]:
    """What was noted so far."""
    return list(_noted)


@service.function
def bounded() -> int:
    """For how many connections that have ended a stream here still waits."""
    return bounds.kept()


@service.function
def drop_edge(edge: str) -> None:
    """Takes a wait away here ("" puts all back), for calibration."""
    hooks.dropped = frozenset({edge} if edge else ())


@service.function
def orders(name: str) -> dict[str, int]:
    """In which orders arrays came here from a peer."""
    found = [driver for driver in default_agent().drivers if not name or driver.name == name]
    return dict(found[0].transfers.ordered.come) if found else {}


@service.function
def process_id() -> int:
    """Which process this is."""
    return os.getpid()


service.function(rpc_service.add)


@service.function
def watched() -> int:
    """How many peers the process beside this one has been told of."""
    found = releaser().pid
    return Path(f"/proc/{found}/maps").read_text().count("streamrt-waits") if found else 0


@service.function
def hold_interpreter(path: str, seconds: float) -> None:
    """Keeps every other thread of this process from running, from when there is a file."""
    sleep = ctypes.PyDLL(None).usleep
    with open(path, "w"):
        sleep(int(seconds * 1e6))
