"""What an agent costs: a hundred peers, idle time, the first call, a worker's memory: ``python -m bench.agent``.

The hundred peers are connections to few workers, one for each core that the caller leaves, up to four (`--workers`): to
the caller's agent that is the same as a process for each, and more processes than cores would measure how the system
shares those.  The calls with one peer go to one of these workers, over one of these connections, as many in all.

The first call is timed in fresh processes, streamrt's and torch RPC's in turn, up to the same calls.  Where there is a
GPU, arrays lie there, and matrix products run beside a flow of transfers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bench.report import HERE, Row, judged, load_goals, save, show
from bench.rpc import device_count
from bench.side import PATIENCE, Process, SideError
from bench.workload import Job

PEERS = 100
MOST_WORKERS = 4
SIDE, GEMM = "bench.peers.agent_side", "bench.peers.gemm_side"
ORDERS = {"round_robin": "one after the other", "concurrent": "in flight together"}
STEPS = {
    "import": "import",
    "device": "first array on the GPU",
    "connect": "start a worker and connect",
    "call": "first call",
    "all": "from the start to the first reply",
    "large": "first 64 MiB there and back",
    "large again": "second 64 MiB there and back",
    "connect to one that runs": "connect to a worker that runs",
}
SIZES = {
    "rss": "a worker's memory (RSS)",
    "pss": "a worker's memory (PSS)",
    "gpu": "GPU memory of a worker and its link",
}
CORE = "% of a core"


def rate_rows(side: Process, peers: int, calls: int, rounds: int, memories: Sequence[str]) -> list[Row]:
    """Small calls a second, with one peer and with all of them, in turn."""
    rows = []
    for memory in memories:
        of = f" of an array on the {memory}" if memory else ""
        for kind, order in ORDERS.items():
            rates: dict[int, list[float]] = {1: [], peers: []}
            for turn in range(rounds):
                for number in (1, peers) if turn % 2 == 0 else (peers, 1):
                    job = Job(kind, count=calls, warmup=calls // 10, window=number, memory=memory)
                    rates[number].append(side.measure(job).rate)
            for number, found in rates.items():
                name = f"small calls{of} {order}, {number} peer{'s' if number > 1 else ''}"
                rows.append(Row(name, "calls/s", statistics.median(found)))
    return rows


def idle_rows(side: Process, peers: int, seconds: float) -> list[Row]:
    """What both ends of many connections take while nothing is called."""
    found = side.measure(Job("idle", count=round(1e3 * seconds)))
    return [Row(f"idle, {peers} peers", CORE, found.p50), Row(f"idle worker, {peers} peers", CORE, found.p99)]


def fresh(library: str, device: str, pair: str, seconds: float) -> dict[str, Any]:
    """The figures of one fresh process.  Raises `SideError`."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), *sys.path]))
    command = [sys.executable, "-m", "bench.peers.first_call", library, "--device", device, "--pair", pair]
    command += ["--idle", str(seconds), "--since", str(time.monotonic())]
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    except subprocess.SubprocessError as error:
        raise SideError(f"the first call with {library}: {error}") from error
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def first_rows(libraries: Sequence[str], device: str, pair: str, rounds: int, seconds: float) -> list[Row]:
    """The first calls and what a worker takes: streamrt, and torch RPC where it is one of the libraries."""
    found: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
    for turn in range(rounds):
        for library in libraries if turn % 2 == 0 else list(reversed(libraries)):
            try:
                found[library].append(fresh(library, device, pair, seconds))
            except SideError as error:
                if library == "streamrt":
                    raise
                print(f"{library}: left out: {error}", file=sys.stderr)
                libraries = [name for name in libraries if name != library]

    def median(library: str, *keys: str) -> float | None:
        values: list[Any] = found.get(library, [])
        for key in keys:
            values = [value.get(key) for value in values]
        return statistics.median(values) if values and None not in values else None

    def row(name: str, unit: str, *keys: str) -> Row:
        return Row(name, unit, median("streamrt", *keys), median("torch", *keys))

    rows = [row(name, "ms", "steps", key) for key, name in STEPS.items()]
    rows += [row(name, "MiB", key) for key, name in SIZES.items()]
    rows += [row("idle, 1 peer", CORE, "idle"), row("idle worker, 1 peer", CORE, "idle worker")]
    return [one for one in rows if one.streamrt is not None or one.peer is not None]


def gemm_rows(pair: str, rounds: int, seconds: float) -> list[Row]:
    """Matrix products alone and beside transfers, and these alone and beside those."""
    arrow = " -> ".join(pair.split(","))
    jobs = {kind: Job(kind, count=round(1e3 * seconds), window=4) for kind in ("products", "beside", "flow")}
    with Process(GEMM, "--pair", pair) as side:
        found = [{kind: side.measure(job) for kind, job in jobs.items()} for _ in range(rounds)]

    def median(kind: str, figure: str, scale: float) -> float:
        return statistics.median(getattr(one[kind], figure) for one in found) / scale

    return [
        Row(f"GEMM alone, {arrow}", "TFLOP/s", median("products", "rate", 1e12)),
        Row(f"GEMM beside 256 MiB transfers {arrow}", "TFLOP/s", median("beside", "rate", 1e12)),
        Row(f"256 MiB transfers {arrow} beside a GEMM", "GB/s", median("beside", "p50", 1e9)),
        Row(f"256 MiB transfers {arrow} alone", "GB/s", median("flow", "p50", 1e9)),
    ]


def workers() -> int:
    """One for each core beside the caller's, up to `MOST_WORKERS`."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves; exits with 1 where a part could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.agent", description=__doc__)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pair", metavar="A,B", help="devices of caller and callee")
    parser.add_argument("--peer", choices=("torch", "none"), default="torch", help="beside whose first call")
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--workers", type=int, default=workers())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a few calls: does it work at all")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    rounds, calls, seconds = (1, 200, 0.5) if args.quick else (args.rounds, 2000, 5.0)
    pair = args.pair or ("0,1" if args.device == "cuda" and device_count() > 1 else "0,0")
    target = f"{args.device}:{pair.split(',')[1]}"
    libraries = ["streamrt"]
    if args.peer == "torch":
        if importlib.util.find_spec("torch") is None:
            print("torch is not installed: no rows against it")
        else:
            libraries.append("torch")
    memories = ("", "device") if args.device == "cuda" else ("",)
    rows: list[Row] = []
    failures = 0

    def many() -> list[Row]:
        with Process(SIDE, "--device", target, "--peers", str(args.peers), "--workers", str(args.workers)) as side:
            print(f"side: {side.version}")
            found = rate_rows(side, args.peers, calls, rounds, memories)
            return found + idle_rows(side, args.peers, seconds)

    parts: list[Callable[[], list[Row]]] = [many, lambda: first_rows(libraries, args.device, pair, rounds, seconds)]
    if args.device == "cuda":
        for flow in dict.fromkeys(("0,0", pair)):
            parts.append(partial(gemm_rows, flow, 1 if args.quick else 3, 0.5 if args.quick else 2.0))
    for part in parts:
        try:
            rows += part()
        except SideError as error:  # the others are still worth their run
            failures += 1
            print(f"a side could not be measured: {error}", file=sys.stderr)
    rows = judged(rows, load_goals("agent"), "torch")
    show(f"One agent, {args.device}", rows, "torch")
    save(args.json, rows)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
