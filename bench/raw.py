"""Calls beside torch RPC and two floors, NCCL's send and receive and UCXX's worker: ``python -m bench.raw``.

A call says which function, takes a snapshot of its arguments, and hands on what was returned; NCCL and UCXX move bytes
whose number both ends know ahead, with the host polling.  All take turns.  What is not installed is left out, and said.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from bench.report import Row, judged, load_goals, save, show
from bench.rpc import OURS, Line, cuda_lines, device_count, host_lines, quick, run, with_better_mode
from bench.side import Process, SideError

RAW = "bench.peers.raw_side"
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch": ("bench.peers.torch_rpc", ()),
    "nccl": (RAW, ("--wire", "nccl")),
    "ucxx": (RAW, ("--wire", "ucxx")),
}
KINDS = ("echo", "pipelined", "peer_copy")
TWO_GPUS = ("nccl",)  # has no two ranks on one GPU, and no host memory


def lines(device: str, source: int, target: int) -> list[Line]:
    """The rows of `bench.rpc` that a transport without functions has, too."""
    all_of_them = host_lines() if device == "host" else cuda_lines(source, target)
    chosen = [line for line in all_of_them if line.job.kind in KINDS and not line.job.loaded and not line.job.memory]
    return [replace(line, sides="ours") if line.job.kind == "peer_copy" else line for line in chosen]


def started(name: str, options: Sequence[str], stack: ExitStack) -> Process | None:
    """The side of a peer; None where it does not run here, which is said."""
    module, more = PEERS[name]
    try:
        side = stack.enter_context(Process(module, *options, *more))
    except SideError as error:
        print(f"{name}: left out: {error}")
        return None
    print(f"side: {side.version}")
    return side


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints a table for each peer, and saves all rows; exits with 1 where streamrt has no figure."""
    parser = argparse.ArgumentParser(prog="python -m bench.raw", description=__doc__)
    parser.add_argument("--device", choices=("host", "cuda"), default="cuda")
    parser.add_argument("--peer", action="append", choices=tuple(PEERS), help="one of them; may be repeated")
    parser.add_argument("--pair", metavar="A,B", help="devices of caller and callee")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name contains the text")
    parser.add_argument("--quick", action="store_true", help="one round of a few calls: does it work at all")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    pair = args.pair or ("0,1" if args.device == "cuda" and device_count() > 1 else "0,0")
    source, target = map(int, pair.split(","))
    chosen = [line for line in lines(args.device, source, target) if not args.only or args.only in line.name]
    if args.quick:
        chosen = [replace(line, job=quick(line.job)) for line in chosen]
    options = ("--device", args.device, "--pair", pair)
    rows: list[Row] = []
    with ExitStack() as stack:
        ours = stack.enter_context(Process(OURS, *options))
        print(f"side: {ours.version}")
        peers: dict[str, Process] = {}
        for name in args.peer or PEERS:
            if name in TWO_GPUS and (args.device == "host" or source == target):
                print(f"{name}: left out: it needs two GPUs")
            elif (side := started(name, options, stack)) is not None:
                peers[name] = side
        measured = run(chosen, ours, list(peers.values()), 1 if args.quick else args.rounds)
        for name, side in peers.items():
            beside = [Row(line.name, line.unit, values.get(ours), values.get(side)) for line, values in measured]
            beside = judged(with_better_mode(beside), load_goals("rpc"), name)
            show(f"Calls beside {side.version}", beside, name)
            rows += [replace(row, name=f"{row.name}, beside {name}") for row in beside]
    save(args.json, rows)
    return 1 if any(ours not in values for _, values in measured) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SideError as error:
        sys.exit(f"a side did not start: {error}")
