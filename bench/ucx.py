"""streamrt over UCX beside UCXX alone: ``python -m bench.ucx --device host --json FILE``.

streamrt's calls are forced to UCX (`STREAMRT_CHANNELS`); the peer is UCXX's low-level worker, polled by both processes,
with nothing on top (`bench.raw_ucxx`).  It knows what comes next, has memory ready for it, keeps the interpreter to
itself, and has no answer to the other process's death: on the host it can therefore use what UCX leaves out otherwise.
Small arrays of the host travel inside streamrt's own messages, so there the first row says nothing of UCX.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from bench.report import Row, judged, load_goals, save, show
from bench.rpc import OURS, Line, device_count, quick, run
from bench.side import Process, SideError
from bench.workload import MIB, Job

PEER = "bench.peers.raw_side"
FORCED = "ucx,staging"


def lines(source: int, target: int, device: str) -> list[Line]:
    """The rows between two devices, or two processes of the host."""
    where = "host" if device == "host" else f"{source} -> {target}"
    scale = 1 if device == "host" else 4
    rows = [
        Line(f"4 B echo {where}", "us", Job("echo", count=100 * scale, warmup=20)),
        Line(f"1 MiB echo {where}", "us", Job("echo", MIB, count=50 * scale, warmup=10)),
    ]
    for mib, count in ((16, 10), (256, 4)):
        name = f"{mib} MiB"
        rows.append(Line(f"{name} echo {where}", "GB/s", Job("echo", mib * MIB, count=count * scale, warmup=3)))
        flow = Job("pipelined", mib * MIB, count=max(4, 2 * count), window=4)
        rows.append(Line(f"{name} one way {where}, snapshot", "GB/s", flow, "rate"))
        rows.append(Line(f"{name} one way {where}, lent", "GB/s", replace(flow, lent=True), "rate"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves; exits with 1 when a row has no figure."""
    parser = argparse.ArgumentParser(prog="python -m bench.ucx", description=__doc__)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pair", action="append", metavar="A,B", help="devices of caller and callee; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name contains the text")
    parser.add_argument("--quick", action="store_true", help="one round of a few calls: does it work at all")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    os.environ["STREAMRT_CHANNELS"] = FORCED
    pairs = ["0,0"]
    if args.device == "cuda":
        pairs = args.pair or (["0,1", "0,0"] if device_count() > 1 else ["0,0"])
    rows: list[Row] = []
    for pair in pairs:
        source, target = map(int, pair.split(","))
        wanted = [line for line in lines(source, target, args.device) if not args.only or args.only in line.name]
        if args.quick:
            wanted = [replace(line, job=quick(line.job)) for line in wanted]
        with ExitStack() as stack:
            options = ("--device", args.device, "--pair", pair)
            ours = stack.enter_context(Process(OURS, *options))
            theirs = stack.enter_context(Process(PEER, "--wire", "ucxx", *options))
            print(f"side: {ours.version}\nside: {theirs.version}")
            for line, values in run(wanted, ours, [theirs], 1 if args.quick else args.rounds):
                rows.append(Row(line.name, line.unit, values.get(ours), values.get(theirs)))
    rows = judged(rows, load_goals("ucx"), "ucxx")
    show(f"Calls over UCX, and UCXX alone, {args.device}", rows, "ucxx")
    save(args.json, rows)
    return 1 if [row for row in rows if row.streamrt is None or row.peer is None] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SideError as error:
        sys.exit(f"a side did not start: {error}")
