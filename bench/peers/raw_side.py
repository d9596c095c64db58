"""A transport with nothing around it as a side: arrays there and back, and one way, between this process and a child.

It knows ahead how many messages of which size come, which no RPC does: a floor.  What is sent is new each time and
checked as in `bench.workload`, whose jobs these are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from bench import raw_nccl, raw_ucxx
from bench.peers.streamrt_callee import add_up, total
from bench.side import end_with_parent, serve
from bench.workload import STRIDE, Figures, Job, quantiles

WIRES: dict[str, Any] = {"nccl": raw_nccl.Wire, "ucxx": raw_ucxx.Wire}
READY = "ready"


class Wire(Protocol):
    """One end of a raw transport, which sends and receives arrays in order; see `raw_ucxx` and `raw_nccl`."""

    ordered: bool
    address: Any

    def connect(self, address: Any) -> None: ...
    def send(self, array: Any) -> Any: ...
    def receive(self, array: Any) -> Any: ...
    def wait(self, request: Any) -> None: ...
    def finish(self) -> None: ...


class Machine:
    """The arrays of one process: NumPy's on the host, or CuPy's of a GPU on a stream that is current from now on."""

    def __init__(self, kind: str, index: int) -> None:
        self.library: Any = np
        self._stream: Any = None
        if kind == "cuda":
            import cupy

            self.library = cupy
            cupy.cuda.Device(index).use()
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._stream.use()

    def arange(self, words: int) -> Any:
        """An int32 array with its index as contents."""
        return self.library.arange(words, dtype=np.int32)

    def empty(self, words: int) -> Any:
        """An int32 array."""
        return self.library.empty(words, dtype=np.int32)

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        return np.array(array) if self._stream is None else self.library.asnumpy(array)

    def synchronize(self) -> None:
        """Waits for the stream; nothing on the host."""
        if self._stream is not None:
            self._stream.synchronize()


class RawSide:
    """The caller's half."""

    def __init__(self, name: str, wire: Wire, machine: Machine, callee: Connection) -> None:
        self._name, self._wire, self._machine, self._callee = name, wire, machine, callee

    def version(self) -> str:
        """The transport and its version."""
        return self._name

    def measure(self, job: Job) -> Figures:
        """One round of a job, for which the callee is told of it first."""
        self._callee.send(asdict(job))
        return self._echo(job) if job.kind == "echo" else self._pipelined(job)

    def _echo(self, job: Job) -> Figures:
        """There and back, with the host waiting for the reply on both sides of each turn."""
        wire, machine, words = self._wire, self._machine, job.nbytes // 4
        array, reply, times = machine.arange(words), machine.empty(words), []
        for number in range(job.warmup + job.count):
            array[::STRIDE] = number
            machine.synchronize()
            begin = time.perf_counter()
            wire.send(array)
            wire.receive(reply)
            wire.finish()
            times.append(time.perf_counter() - begin)
            if int(machine.numpy(reply[:1])[0]) != number:
                raise ValueError(f"message {number} of {job} came back with other bytes")
        arrived = machine.numpy(reply)
        if not np.array_equal(arrived, machine.numpy(array)):
            raise ValueError(f"the last reply of {job} differs from what was sent")
        return Figures(*quantiles(times[job.warmup :]), checksum=zlib.crc32(arrived.tobytes()))

    def _pipelined(self, job: Job) -> Figures:
        """One way, `window` messages in flight, each with a buffer of its own; bytes a second."""
        wire, machine, words = self._wire, self._machine, job.nbytes // 4
        ring = [machine.arange(words) for _ in range(job.count)]
        for _ in range(2):  # the first round warms up
            start = time.perf_counter_ns() % 100_000
            for number, array in enumerate(ring):
                array[::STRIDE] = start + number
            machine.synchronize()
            if self._callee.recv() != READY:
                raise ValueError("the callee is not ready")
            begin = time.perf_counter()
            flying: deque[Any] = deque()
            for array in ring:
                if len(flying) == job.window:
                    wire.wait(flying.popleft())
                flying.append(wire.send(array))
            wire.finish()
            arrived = self._callee.recv()
            elapsed = time.perf_counter() - begin
            wanted = -(-words // STRIDE) * sum(start + number for number in range(job.count))
            if arrived != wanted:
                raise ValueError(f"the callee's sum of {job} is {arrived}, not {wanted}: bytes were stale or missing")
        return Figures(rate=job.count * job.nbytes / elapsed, checksum=int(arrived))


def answer_all(wire: Wire, machine: Machine, caller: Connection) -> None:
    """The callee's half, until the caller is gone."""
    while True:
        try:
            job = Job(**caller.recv())
        except EOFError:
            return
        if job.kind == "echo":
            buffer = machine.empty(job.nbytes // 4)
            for _ in range(job.warmup + job.count):
                wire.receive(buffer)
                wire.finish()
                wire.send(buffer)
                wire.finish()
        else:
            for _ in range(2):
                _take(wire, machine, caller, job)


def _take(wire: Wire, machine: Machine, caller: Connection, job: Job) -> None:
    """Receives and sums a round's messages, with as many buffers as are in flight."""
    buffers = [machine.empty(job.nbytes // 4) for _ in range(job.window)]
    coming: deque[tuple[Any, Any, int]] = deque()

    def take() -> None:
        request, buffer, number = coming.popleft()
        wire.wait(request)
        add_up(buffer, number)
        if not wire.ordered:
            machine.synchronize()  # before the buffer may be received into again

    for number in range(job.count):
        if len(coming) == job.window:
            take()
        buffer = buffers[number % job.window]
        coming.append((wire.receive(buffer), buffer, number))
        if number == min(job.window, job.count) - 1:
            caller.send(READY)
    while coming:
        take()
    caller.send(total(job.count))


@contextmanager
def pair(wire: str, kind: str, source: int, target: int) -> Iterator[RawSide]:
    """Both ends, ended together."""
    name = f"{WIRES[wire].version()}, {kind}:{source} -> {kind}:{target}"
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "bench.peers.raw_side", "--callee", str(theirs.fileno()), "--wire", wire]
    command += ["--device", kind, "--pair", f"{source},{target}"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        machine = Machine(kind, source)
        yield RawSide(name, _connected(wire, 0, ours, machine), machine, ours)
    finally:
        ours.close()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _connected(name: str, rank: int, other: Connection, machine: Machine) -> Wire:
    """An end that has greeted the other one: what is set up at the first message is there, both ways."""
    wire: Wire = WIRES[name](rank)
    other.send(wire.address)
    wire.connect(other.recv())
    word = machine.empty(1)
    for step in (wire.send, wire.receive) if rank == 0 else (wire.receive, wire.send):
        step(word)
        wire.finish()
    return wire


def main() -> int:
    """The callee with `--callee DESCRIPTOR`, else the side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wire", choices=tuple(WIRES), required=True)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pair", default="0,0")
    parser.add_argument("--callee", type=int)
    args = parser.parse_args()
    source, target = map(int, args.pair.split(","))
    if args.callee is None:
        return serve(lambda: pair(args.wire, args.device, source, target), RawSide.measure)
    end_with_parent()
    caller = Connection(args.callee)
    machine = Machine(args.device, target)
    answer_all(_connected(args.wire, 1, caller, machine), machine, caller)
    os._exit(0)  # what the transport still has to say to a caller that is gone would take its time


if __name__ == "__main__":
    sys.exit(main())
