"""The functions that the RPC tests call, served by real worker processes, by loopback and by children.

What has to wait waits at a named gate, which another call opens: no test sleeps.
"""

from __future__ import annotations

import collections
import os
import threading
import time
import zlib
from typing import Any

import numpy as np

import streamrt
import transport
from streamrt.testing import Latch

service = transport.Service()
torch_service = transport.Service(arrays="torch")
jax_service = transport.Service(arrays="jax")
broken_service = transport.Service()
empty_service = transport.Service()
cupy_service = transport.Service(arrays="cupy")

GATE_SECONDS = 60.0  # a gate that nobody opens must not outlive the test's own watchdog

_gates: dict[str, threading.Event] = collections.defaultdict(threading.Event)
_counters: collections.Counter[str] = collections.Counter()
_notes: list[tuple[int, int]] = []
_kept: dict[str, Any] = {}
_lock = threading.Lock()


class Spoiled(Exception):
    """An error of a class that only the service knows."""


class Shadow(Exception):
    """An error that cannot be made of its message alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def _gate(name: str) -> threading.Event:
    with _lock:  # two threads that come first must not wait at two gates
        return _gates[name]


def gate(name: str) -> None:
    if not _gate(name).wait(GATE_SECONDS):
        raise TimeoutError(f"nobody opened the gate {name!r}")


@service.function
def open_gate(name: str) -> None:
    _gate(name).set()


@service.function
def count(name: str) -> int:
    """How often something happened."""
    with _lock:
        return _counters[name]


def bump(name: str) -> int:
    with _lock:
        _counters[name] += 1
        return _counters[name]


@service.function
def bump_behind(name: str, gate_name: str) -> int:
    number = bump(name)
    gate(gate_name)
    return number


@service.function
def misuse_a_virtual_device(x: Any) -> Any:
    """An engine that raises in what it has enqueued."""

    def engine() -> None:
        raise KeyError("no such layer")

    with streamrt.compute_stream(x) as side:
        side.launch(engine)
    return x


@service.function
def total(x: Any) -> float:
    return float(np.asarray(x, dtype=np.float64).sum())


@service.function
def total_behind(x: Any, name: str) -> float:
    bump(name)
    gate(name)
    return total(x)


@service.function(borrow=True)
def borrowed_behind(x: Any, name: str) -> float:
    """The first and the last element, read where they lie once the gate is open."""
    bump(name)
    gate(name)
    return float(x[0]) + float(x[-1])


@service.function
def echo(x: Any) -> Any:
    return x


@torch_service.function(name="echo")
def echo_torch(x: Any) -> Any:
    return x


@jax_service.function(name="echo")
def echo_jax(x: Any) -> Any:
    return x


@broken_service.function(name="echo")
def echo_nothing(state: None, x: Any) -> Any:
    return x


@cupy_service.function(name="echo")
def echo_cupy(x: Any) -> Any:
    return x


@torch_service.function
def kind_of(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}"


@service.function
def add(x: Any, y: Any = 1, *, scale: Any = 1) -> Any:
    return (x + y) * scale


@service.function
def increment(x: Any) -> Any:
    x += 1
    return x


@service.function
def full_on(device: str, value: float) -> Any:
    """A small result on a device that no argument used, ready at once."""
    return streamrt.array(np.full(100, value, np.float32), device=device)


@service.function
def process_id() -> int:
    return os.getpid()


@service.function
def thread_name() -> str:
    return threading.current_thread().name


@service.function
def ones_behind(gate_name: str, nbytes: int) -> Any:
    gate(gate_name)
    return np.ones(nbytes, np.uint8)


@service.function
def ones_when(path: str, nbytes: int) -> Any:
    """For a worker that takes no calls any more: waits for a file."""
    bump(path)
    deadline = time.monotonic() + GATE_SECONDS
    while not os.path.exists(path):
        if _gates["nobody"].wait(0.005) or time.monotonic() > deadline:
            raise TimeoutError(f"there is no {path}")
    return np.ones(nbytes, np.uint8)


@service.function
def held_bytes() -> int:
    """What the runtime of this process holds."""
    return streamrt.memory.statistics().live


@service.function
def until_cancelled(name: str) -> str:
    """Ends when the caller gives up, and notes it."""
    bump(f"{name} began")
    deadline = threading.Event()
    while not transport.cancelled():
        if deadline.wait(0.005) or _gates[f"{name} gives up"].is_set():
            return "never cancelled"
    bump(f"{name} cancelled")
    return "cancelled"


@service.function
def nested(depth: int) -> int:
    """Calls its caller back, who calls back here, and so on; each turn counts one."""
    return 0 if depth == 0 else 1 + int(transport.caller().call("nested", depth - 1))


@service.function
def through(address: str, function: str, *args: Any) -> Any:
    """Calls a third process; it is there, or is not coming."""
    with transport.connect(address, timeout=2.0) as third:
        return third.call(function, *args)


@service.function
def hand_on(address: str, x: Any) -> float:
    """Sends what it was sent to a third process, and drops it at once."""
    with transport.connect(address) as third:
        future = third.submit("total", x)
        del x
        return float(future.result())


@service.function
def note_behind(number: int, data: Any, gate_name: str) -> None:
    if number == 0:
        gate(gate_name)
    with _lock:
        _notes.append((number, zlib.crc32(data)))


@service.function
def notes() -> list[tuple[int, int]]:
    with _lock:
        return list(_notes)


@service.function
def fail(kind: str, message: str) -> None:
    errors: dict[str, type[BaseException]] = {
        "value": ValueError,
        "key": KeyError,
        "timeout": TimeoutError,
        "stop": StopIteration,
        "unicode": UnicodeError,
        "exit": SystemExit,
        "interrupt": KeyboardInterrupt,
        "spoiled": Spoiled,
        "array": streamrt.ArrayError,
    }
    if kind == "shadow":
        raise Shadow(1, 2)
    raise errors[kind](message)


@service.function
def fail_behind(name: str, gate_name: str) -> None:
    gate(gate_name)
    raise Spoiled(name)


@service.function
def unsendable() -> Any:
    return threading.Lock()


@service.function
def describe(x: Any) -> tuple[str, list[int], float]:
    return str(x.dtype), list(x.shape), float(np.asarray(x).astype(np.complex128).sum().real)


@service.function
def same_object(first: list[Any], second: list[Any]) -> tuple[bool, list[float]]:
    """Whether the last of the first list is the first of the second one, and the sums."""
    return first[-1] is second[0], [float(x.sum()) for x in (*first, *second)]


@service.function
def how_many(values: list[Any]) -> tuple[int, int, float]:
    """How many entries, how many different arrays, and the sum of all."""
    return len(values), len({id(value) for value in values}), float(sum(float(value.sum()) for value in values))


def checksum(x: Any) -> int:
    """64 bits over all bytes of a flat uint8 array, made part by part; each part counts by where it is."""
    whole = x.size // 8 * 8
    words = x[:whole].view(np.uint64)
    found = 0
    for start in range(0, words.size, 1 << 22):
        found = (found * 1099511628211 + int(words[start : start + (1 << 22)].sum(dtype=np.uint64))) % (1 << 64)
    return (found * 1099511628211 + zlib.crc32(x[whole:].tobytes())) % (1 << 64)


@service.function
def pattern(size: int) -> Any:
    """Value i % 251 at place i."""
    x = np.empty(size, np.uint8)
    part = np.resize(np.arange(251, dtype=np.uint8), 251 << 16)
    for start in range(0, size, part.size):
        x[start : start + part.size] = part[: size - start]
    return x


@service.function
def sample(x: Any, offsets: list[int]) -> tuple[int, list[int], int]:
    """The size, the bytes at some offsets, and a checksum."""
    return int(x.size), [int(x[offset]) for offset in offsets], checksum(x)


def fill(target: Any, value: float) -> None:
    target[...] = value


@service.function
def made_late(device: str, value: float) -> Any:
    """A result on a device that no argument used, filled only after a latch has opened."""
    result = streamrt.empty(1000, "float32", device=device)
    stream = streamrt.current_stream(streamrt.parse_device(device))
    latch = Latch(stream)
    stream.launch(fill, result, value, writes=[result])
    threading.Timer(0.1, latch.open).start()
    return result


@service.function
def on_two(x: Any, y: Any) -> tuple[Any, Any, str, str]:
    """Twice each; on the host backend plain code makes ordinary memory, which is put where its term was."""
    places = str(streamrt.device_of(x)), str(streamrt.device_of(y))
    return streamrt.array(x + x, device=places[0]), streamrt.array(y + y, device=places[1]), *places


@service.function
def keep(name: str, x: Any) -> None:
    _kept[name] = x


@broken_service.setup
def explode(device: str) -> None:
    raise LookupError(f"no weights for {device}")


@service.function
def increment_behind(x: Any, name: str) -> Any:
    bump(name)
    gate(name)
    return x + 1
