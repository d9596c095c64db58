"""The measurements of `bench.rpc`, written once and run by each side against its own library.

Fresh contents: before a timed call (echo) or a timed round (pipelined), a number is stored into every `STRIDE`-th word
of each buffer; the callee sums those words of what arrived, so that a stale or a missing piece shows as a wrong sum.
No buffer is sent twice in a pipelined round, so no side has to be asked when it may be written again.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

STRIDE = 4096  # words of 4 bytes: one in 16 KiB
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: `kind` is echo, cpu_call, borrow, small_calls, pipelined or peer_copy; `count` is calls a round,
    `memory` where the arrays lie: empty for the side's own pool."""

    kind: str
    nbytes: int = 4
    count: int = 100
    warmup: int = 10
    window: int = 8
    lent: bool = False
    loaded: bool = False
    memory: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds a call (p50, p99), calls a second, and the checksum of what arrived last."""

    p50: float = 0.0
    p99: float = 0.0
    rate: float = 0.0
    checksum: int = 0


class Side(Protocol):
    """What a library has to offer to be measured.  Functions are named: echo, double, add_up, total, load."""

    def version(self) -> str:
        """The library, its version and where it runs."""

    def array(self, words: int, memory: str = "") -> Any:
        """An int32 array on the caller's device: of its own pool, or of another kind of memory."""

    def host_array(self, words: int) -> Any:
        """An int32 array in ordinary host memory."""

    def stamp(self, array: Any, number: int) -> Any:
        """The array with the number in every `STRIDE`-th word, stored on the current stream; in place if it can be."""

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """The array's contents, copied to the host."""

    def synchronize(self) -> None:
        """Waits for the caller's device."""

    def call(self, name: str, *args: Any) -> Any:
        """Calls the function on the peer and returns its result, ordered on the current stream."""

    def submit(self, name: str, *args: Any, lent: bool = False) -> Any:
        """Starts a call and returns its future."""

    def result(self, future: Any) -> Any:
        """The future's value, ordered on the current stream."""

    def free(self, future: Any) -> None:
        """Waits until what was lent to a call may be written."""

    def copy_ceiling(self, nbytes: int, count: int) -> float:
        """Bytes a second of plain copies from the caller's device to the callee's, in one process."""


def measure(side: Side, job: Job) -> Figures:
    """Runs one round of a job."""
    if job.kind == "peer_copy":
        return Figures(rate=side.copy_ceiling(job.nbytes, job.count))
    with Load(side, job.loaded):
        return MEASURES[job.kind](side, job)


class Load:
    """One busy Python thread on each side while it is entered."""

    def __init__(self, side: Side, wanted: bool) -> None:
        self.side, self.wanted = side, wanted
        self.spinner = Spinner()

    def __enter__(self) -> None:
        if self.wanted:
            self.side.call("load", True)
            self.spinner.start()

    def __exit__(self, *exc: object) -> None:
        if self.wanted:
            self.spinner.stop()
            self.side.call("load", False)


class Spinner:
    """A thread that holds the interpreter as much as the interpreter allows."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self.ended.clear()
        self.thread = threading.Thread(target=self._spin, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def _spin(self) -> None:
        while not self.ended.is_set():
            sum(range(500))


_spinner = Spinner()


def load(on: bool) -> None:
    """Starts or stops one busy thread of this process: a function of the callees."""
    if on:
        _spinner.start()
    else:
        _spinner.stop()


def echo(side: Side, job: Job) -> Figures:
    """There and back, the caller's device synchronised after each; every reply is checked outside the timed part."""
    words = job.nbytes // 4
    make = side.host_array if job.kind == "cpu_call" else side.array
    arrays = [make(words) for _ in range(4 if job.nbytes < 64 * MIB else 2)]
    name = "double" if job.kind == "cpu_call" else "echo"
    factor = 2 if job.kind == "cpu_call" else 1
    times = []
    reply = None
    for number in range(job.warmup + job.count):
        array = arrays[number % len(arrays)]
        side.stamp(array, number)
        side.synchronize()
        begin = time.perf_counter()
        reply = side.call(name, array)
        side.synchronize()
        times.append(time.perf_counter() - begin)
        if int(side.numpy(reply[:1])[0]) != number * factor:
            raise ValueError(f"call {number} of {job} came back with other bytes")
    arrived, wanted = side.numpy(reply), side.numpy(array) * factor
    if not np.array_equal(arrived, wanted):
        raise ValueError(f"the last reply of {job} differs from what was sent")
    return Figures(*quantiles(times[job.warmup :]), checksum=zlib.crc32(arrived.tobytes()))


def small_calls(side: Side, job: Job) -> Figures:
    """`count` calls in flight at once, the device synchronised at the end."""
    array = side.array(1)
    for _ in range(job.warmup):
        side.call("double", array)
    side.stamp(array, 21)
    side.synchronize()
    begin = time.perf_counter()
    futures = [side.submit("double", array) for _ in range(job.count)]
    results = [side.result(future) for future in futures]
    side.synchronize()
    elapsed = time.perf_counter() - begin
    arrived = np.array([int(side.numpy(value)[0]) for value in results])
    if not np.all(arrived == 42):
        raise ValueError(f"{np.count_nonzero(arrived != 42)} of {job.count} replies are wrong")
    return Figures(rate=job.count / elapsed, checksum=zlib.crc32(arrived.tobytes()))


def pipelined(side: Side, job: Job) -> Figures:
    """One way, `window` calls in flight, each with a buffer of its own; bytes a second."""
    words = job.nbytes // 4
    ring = [side.array(words, job.memory) for _ in range(job.count)]
    samples = -(-words // STRIDE)
    for _ in range(2):  # the first round warms up
        start = time.perf_counter_ns() % 100_000
        for number in range(job.count):
            ring[number] = side.stamp(ring[number], start + number)
        side.synchronize()
        begin = time.perf_counter()
        flying: deque[Any] = deque()
        for number, array in enumerate(ring):
            if len(flying) == job.window:
                side.result(flying.popleft())
            flying.append(side.submit("add_up", array, number, lent=job.lent))
        for future in flying:
            side.result(future)
        total = side.call("total", job.count)
        elapsed = time.perf_counter() - begin
        wanted = samples * sum(start + number for number in range(job.count))
        if total != wanted:
            raise ValueError(f"the callee's sum of {job} is {total}, not {wanted}: bytes were stale or missing")
    return Figures(rate=job.count * job.nbytes / elapsed, checksum=int(total))


def borrow(side: Side, job: Job) -> Figures:
    """The callee reads the first and the last word where they lie; each answer is checked outside the timed part."""
    words = job.nbytes // 4
    array = side.array(words)
    last_is_stamped = (words - 1) % STRIDE == 0
    times = []
    for number in range(job.warmup + job.count):
        side.stamp(array, number)
        side.synchronize()
        begin = time.perf_counter()
        future = side.submit("ends", array, lent=True)
        answer = side.result(future)
        times.append(time.perf_counter() - begin)
        side.free(future)
        if answer != number + (number if last_is_stamped else words - 1):
            raise ValueError(f"call {number} of {job} read {answer}")
    return Figures(*quantiles(times[job.warmup :]), checksum=int(answer))


MEASURES: dict[str, Callable[[Side, Job], Figures]] = {
    "echo": echo,
    "cpu_call": echo,
    "borrow": borrow,
    "small_calls": small_calls,
    "pipelined": pipelined,
}


def quantiles(times: list[float]) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2] * 1e6, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6
