"""One agent with many peers as a side: real connections from this process to a few workers, which listen on a path.

A few processes with many connections each, rather than one process a connection: to the caller's agent both are the
same (a link, a watched process and a table for each connection), while a hundred interpreters would be measured by how
the system shares few cores among them.  The workers are as many with one peer as with a hundred.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from typing import Any

import numpy as np

import transport
from bench.peers import agent_worker, first_call
from bench.report import versions
from bench.side import serve
from bench.workload import Figures, Job, quantiles

START_SECONDS = 60.0
READY = "streamrt-worker ready"


class AgentSide:
    """The caller's process: `peers` connections, dealt to the workers in turn."""

    def __init__(self, kind: str, peers: list[transport.Peer], workers: list[int]) -> None:
        self.kind, self.peers, self.workers = kind, peers, workers
        self.library: Any = np
        if kind == "cuda":
            import cupy

            self.library = cupy

    def version(self) -> str:
        """streamrt's version, and how many connections to how many workers there are."""
        return f"streamrt {versions().get('streamrt', '?')}, {len(self.peers)} peers in {len(self.workers)} workers"

    def array(self, job: Job) -> Any:
        """One word, with 21 in it: in ordinary memory, or on the device."""
        return (self.library if job.memory == "device" else np).full(1, 21, dtype=np.int32)


def round_robin(side: AgentSide, job: Job) -> Figures:
    """Calls one after the other, each of the next peer, the reply waited for."""
    array = side.array(job)
    times, checksum = [], 0
    begin = time.perf_counter()
    for number, peer in enumerate(islice(cycle(side.peers[: job.window]), job.warmup + job.count)):
        if number == job.warmup:
            begin = time.perf_counter()
        start = time.perf_counter()
        doubled = peer.call(agent_worker.double, array)
        times.append(time.perf_counter() - start)
        checksum += checked(doubled)
    elapsed = time.perf_counter() - begin
    return Figures(*quantiles(times[job.warmup :]), rate=job.count / elapsed, checksum=checksum)


def concurrent(side: AgentSide, job: Job) -> Figures:
    """All calls in flight at once, each of the next peer."""
    array = side.array(job)
    peers = side.peers[: job.window]
    for peer in islice(cycle(peers), max(job.warmup, len(peers))):
        checked(peer.call(agent_worker.double, array))
    begin = time.perf_counter()
    futures = [peer.submit(agent_worker.double, array) for peer in islice(cycle(peers), job.count)]
    results = [future.result() for future in futures]
    elapsed = time.perf_counter() - begin
    checksum = sum(map(checked, results))
    return Figures(rate=job.count / elapsed, checksum=checksum)


def idle(side: AgentSide, job: Job) -> Figures:
    """What the two ends take of a core while nothing is called, in percent: this process as `p50`, the busiest worker
    as `p99`.  Over `count` milliseconds."""
    for peer in side.peers:
        checked(peer.call(agent_worker.double, side.array(job)))
    own, *theirs = first_call.idle([os.getpid(), *side.workers], job.count / 1e3)
    return Figures(own, max(theirs))


MEASURES = {"round_robin": round_robin, "concurrent": concurrent, "idle": idle}


def checked(doubled: Any) -> int:
    """What came back.  Raises `ValueError` for what is not twice the argument."""
    number = int(doubled[0])
    if number != 42:
        raise ValueError(f"a call came back with {number}, not 42")
    return number


@contextmanager
def worker(path: str, device: str) -> Iterator[int]:
    """A worker that listens on a path; its process id."""
    command = [sys.executable, "-m", "transport.worker", "bench.peers.agent_worker:service"]
    command += ["--listen", f"unix://{path}", "--device", device, "--log-level", "error"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line.startswith(READY):
            raise RuntimeError(f"the worker said {line!r}")
        yield child.pid
    finally:
        child.terminate()
        child.wait(START_SECONDS)
        child.stdout.close()


@contextmanager
def connected(device: str, peers: int, workers: int) -> Iterator[AgentSide]:
    """`peers` connections to `workers` processes."""
    kind = device.partition(":")[0]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        paths = [os.path.join(folder, str(number)) for number in range(workers)]
        pids = [stack.enter_context(worker(path, device)) for path in paths]
        every = islice(cycle(paths), peers)
        opened = [
            stack.enter_context(
                transport.connect(f"unix://{path}", timeout=START_SECONDS, default_timeout=START_SECONDS)
            )
            for path in every
        ]
        yield AgentSide(kind, opened, pids)


def main() -> int:
    """The side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    return serve(
        lambda: connected(args.device, args.peers, args.workers), lambda side, job: MEASURES[job.kind](side, job)
    )


if __name__ == "__main__":
    sys.exit(main())
