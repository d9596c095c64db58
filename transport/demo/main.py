"""`streamrt demo`: the three runs, the check, and the report."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from streamrt.device import open_device
from transport.demo import report
from transport.demo.arrays import to_host
from transport.demo.check import Check
from transport.demo.plan import Plan
from transport.demo.progress import progress
from transport.demo.runs import BLOCKING_FRAMES, REFERENCE_FRAMES, blocking, make_chain, one_process, pipelined, source
from transport.demo.traffic import since, traffic
from transport.information import versions


def run(plan: Plan, console: Console, json_file: Path | None = None) -> bool:
    """Runs the demo and prints its report; whether the check passed.  Blocks the host."""
    with console.status("tiling the photographs"):
        frame = source(plan)
    with progress(console, "one process", min(plan.frames, REFERENCE_FRAMES)) as observe:
        timed, reference = one_process(plan, frame, observe)
    with ExitStack() as running:
        with console.status("starting three workers"):
            chain = running.enter_context(make_chain(plan))
        with progress(console, "workers, blocking calls", min(plan.frames, BLOCKING_FRAMES)) as observe:
            blocked = blocking(plan, chain, frame, observe)
        check = Check(reference, open_device(plan.steps[-1].device))
        before = traffic(chain.peers)
        with progress(console, f"streamrt, {plan.in_flight} frames in flight", plan.frames, chain) as observe:
            statistics, outputs = pipelined(plan, chain, frame, check, observe)
        carried = since(before, traffic(chain.peers))
    with console.status("checking every output against those of one process"):
        check.finish()
    results = report.Results(plan, timed, blocked, statistics, carried, check, report.cores())
    report.show(console, results)
    shots = [(f"frame {index}", to_host(frame(index)), output) for index, output in outputs.items()]
    for path in report.save_pictures(results, shots):
        console.print(f"picture: {path}", soft_wrap=True, highlight=False)
    if json_file is not None:
        report.save_json(json_file, results, versions())
        console.print(f"figures: {json_file}", soft_wrap=True, highlight=False)
    console.print(f"again: {plan.command}", soft_wrap=True, highlight=False)
    return not check.wrong
