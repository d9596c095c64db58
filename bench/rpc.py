"""Calls between two processes, streamrt against a peer: ``python -m bench.rpc --device host --peer torch``."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from bench.report import Row, judged, load_goals, save, show
from bench.side import Process, SideError
from bench.workload import MIB, Figures, Job

PEERS = {"torch": "bench.peers.torch_rpc"}
OURS = "bench.peers.streamrt_rpc"
MEMORIES = ("JAX", "async pool", "expandable segments")
"""Arrays that the driver's legacy IPC cannot export, besides CuPy's default pool."""


@dataclass(frozen=True, slots=True)
class Line:
    """A row to measure: which figure of the job it shows, and in which unit."""

    name: str
    unit: str
    job: Job
    figure: str = "p50"
    sides: str = "both"  # or "peer": a ceiling, which only the peer's process measures; or "ours"

    def value(self, figures: Figures) -> float:
        """The job's figure in the row's unit."""
        number = float(getattr(figures, self.figure))
        if self.unit == "GB/s" and self.figure == "p50":
            return 2 * self.job.nbytes / number / 1e3  # there and back: bytes each way in half of the time
        return number / 1e9 if self.unit == "GB/s" else number


def host_lines() -> list[Line]:
    """The host backend's rows."""
    small = Job("echo", count=400, warmup=50)
    big = Job("echo", 64 * MIB, count=10, warmup=3)
    flow = Job("pipelined", 64 * MIB, count=6, window=3)
    return [
        Line("small call", "us", small),
        Line("small call, p99", "us", small, "p99"),
        Line("small call, loaded", "us", Job("echo", count=60, warmup=10, loaded=True)),
        Line("small calls", "calls/s", Job("small_calls", count=1000, warmup=50), "rate"),
        Line("1 MiB", "us", Job("echo", MIB, count=100, warmup=10)),
        Line("64 MiB", "GB/s", big),
        Line("64 MiB pipelined, snapshot", "GB/s", flow, "rate"),
        Line("64 MiB pipelined, lent", "GB/s", replace(flow, lent=True), "rate"),
    ]


def cuda_lines(source: int, target: int) -> list[Line]:
    """The rows between two devices (or of one)."""
    arrow = f"{source} -> {target}"
    small = Job("echo", count=300, warmup=30)
    lines = [
        Line(f"4 B device echo {arrow}", "us", small),
        Line(f"4 B device echo {arrow}, p99", "us", small, "p99"),
        Line(f"4 B device echo {arrow}, loaded", "us", Job("echo", count=60, warmup=10, loaded=True)),
        Line(f"small calls {arrow}", "calls/s", Job("small_calls", count=1000, warmup=200), "rate"),
        Line(f"1 MiB echo {arrow}", "us", Job("echo", MIB, count=100, warmup=10)),
        Line(f"16 MiB echo {arrow}", "GB/s", Job("echo", 16 * MIB, count=50, warmup=5)),
        Line(f"256 MiB echo {arrow}", "GB/s", Job("echo", 256 * MIB, count=10, warmup=3)),
        Line(f"peer copy {arrow}", "GB/s", Job("peer_copy", 256 * MIB, count=20), "rate", sides="peer"),
    ]
    for mib, count, window in ((1, 512, 32), (16, 64, 8), (256, 32, 8)):
        flow = Job("pipelined", mib * MIB, count=count, window=window)
        lines.append(Line(f"{mib} MiB pipelined {arrow}, snapshot", "GB/s", flow, "rate"))
        lines.append(Line(f"{mib} MiB pipelined {arrow}, lent", "GB/s", replace(flow, lent=True), "rate"))
    flow = Job("pipelined", 256 * MIB, count=16, window=8)
    for memory in MEMORIES:
        job = replace(flow, memory=memory)
        lines.append(Line(f"256 MiB pipelined {arrow}, {memory}", "GB/s", job, "rate", sides="ours"))
    for name, nbytes in (("4 B", 4), ("1 GiB", 1024 * MIB)):
        lines.append(Line(f"{name} borrowed {arrow}", "us", Job("borrow", nbytes, count=200, warmup=20), sides="ours"))
    return lines


Values = dict[Process, float]
"""A row's figure of each side that has one."""


def run(
    lines: Sequence[Line], ours: Process | None, peers: Sequence[Process], rounds: int
) -> list[tuple[Line, Values]]:
    """Measures all lines, the sides in turn; a side that fails a row says so and has no figure there."""
    cache: dict[tuple[Process, Job], list[Figures]] = {}
    measured = []
    for line in lines:
        sides = [ours] if ours is not None and line.sides != "peer" else []
        sides += peers if line.sides != "ours" else ()
        for turn in range(rounds):
            for side in sides if turn % 2 == 0 else reversed(sides):
                done = cache.setdefault((side, line.job), [])
                if len(done) > turn:
                    continue  # another row shows another figure of the same job
                try:
                    done.append(side.measure(line.job))
                except SideError as error:
                    print(f"{line.name}: {side.version}: {error}", file=sys.stderr)
                    break
        values = {
            side: statistics.median(line.value(one) for one in cache[side, line.job])
            for side in sides
            if cache.get((side, line.job))
        }
        for side in values:
            print(f"{line.name}: {side.version}: checksum {cache[side, line.job][-1].checksum:#x}", file=sys.stderr)
        measured.append((line, values))
    return measured


def with_better_mode(rows: Sequence[Row]) -> list[Row]:
    """Adds to each pair of pipelined rows the better of its two modes."""
    result = []
    for row in rows:
        result.append(row)
        if row.name.endswith(", lent"):
            stem = row.name.removesuffix(", lent")
            modes = [other for other in rows if other.name in (f"{stem}, snapshot", row.name) and other.streamrt]
            if modes:
                best = max(modes, key=lambda other: other.streamrt or 0.0)
                result.append(Row(f"{stem}, better mode", row.unit, best.streamrt, row.peer))
    return result


def device_count() -> int:
    """CUDA devices that this process may use."""
    from streamrt.device import backend_of

    return backend_of("cuda").device_count()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves; exits with 1 when a row that should have a figure has none."""
    parser = argparse.ArgumentParser(prog="python -m bench.rpc", description=__doc__)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--peer", choices=(*PEERS, "none"), default="torch")
    parser.add_argument("--pair", action="append", metavar="A,B", help="devices of caller and callee; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name contains the text")
    parser.add_argument("--side", choices=("both", "streamrt", "peer"), default="both")
    parser.add_argument("--quick", action="store_true", help="one round of a few calls: does it work at all")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.device == "host":
        pairs = ["0,0"]
    else:
        pairs = args.pair or (["0,1", "0,0"] if device_count() > 1 else ["0,0"])
    rows: list[Row] = []
    for number, pair in enumerate(pairs):
        source, target = map(int, pair.split(","))
        lines = host_lines() if args.device == "host" else cuda_lines(source, target)
        if args.device == "cuda" and number == 0:
            lines.append(Line("CPU call", "us", Job("cpu_call", count=300, warmup=30)))
        if args.only:
            lines = [line for line in lines if args.only in line.name]
        if args.quick:
            lines = [replace(line, job=quick(line.job)) for line in lines]
        with ExitStack() as stack:
            options = ("--device", args.device, "--pair", pair)
            ours = None if args.side == "peer" else stack.enter_context(Process(OURS, *options))
            module = PEERS.get(args.peer)
            theirs = None
            if module is not None and args.side != "streamrt":
                theirs = stack.enter_context(Process(module, *options))
            for side in (ours, theirs):
                if side is not None:
                    print(f"side: {side.version}")
            peers = [] if theirs is None else [theirs]
            for line, values in run(lines, ours, peers, 1 if args.quick else args.rounds):
                streamrt = None if ours is None else values.get(ours)
                rows.append(Row(line.name, line.unit, streamrt, None if theirs is None else values.get(theirs)))
    rows = judged(with_better_mode(rows), load_goals("rpc"), args.peer)
    show(f"RPC between two processes, {args.device}", rows, args.peer)
    save(args.json, rows)
    ceilings = tuple(row.name for row in rows if row.name.startswith("peer copy"))
    lacking = [row.name for row in rows if row.name not in ceilings and row.streamrt is None and args.side != "peer"]
    return 1 if lacking else 0


def quick(job: Job) -> Job:
    """The same job with the fewest calls that mean anything."""
    fewest = {"echo": 10, "cpu_call": 10, "borrow": 10, "small_calls": 100, "pipelined": 4, "peer_copy": 4}[job.kind]
    return replace(job, count=min(job.count, fewest), warmup=min(job.warmup, 3), window=min(job.window, 4))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SideError as error:
        sys.exit(f"a side did not start: {error}")
