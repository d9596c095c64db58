"""`streamrt demo`: the three runs, the check, and the report; with `--kill`, the kill and its report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from streamrt.device import open_device
from streamrt.errors import UnavailableError
from transport.demo import kill_report, photographs, report, rival
from transport.demo.alive import settled
from transport.demo.arrays import to_host
from transport.demo.check import Check
from transport.demo.kill import Killer, chain_to_kill, disturbed, undisturbed
from transport.demo.plan import VICTIM, Plan
from transport.demo.progress import progress
from transport.demo.runs import (
    BLOCKING_FRAMES,
    REFERENCE_FRAMES,
    Timed,
    blocking,
    make_chain,
    one_process,
    pipelined,
    source,
    warm,
)
from transport.demo.traffic import since, traffic
from transport.information import versions


def run(plan: Plan, console: Console, json_file: Path | None = None) -> bool:
    """Runs the demo and prints its report; whether the check passed.  Blocks the host."""
    frame, timed, reference = _beginning(plan, console)
    with ExitStack() as running:
        with console.status("starting three workers"):
            chain = running.enter_context(make_chain(plan))
        with progress(console, "workers, blocking calls", min(plan.frames, BLOCKING_FRAMES)) as observe:
            blocked = blocking(plan, chain, frame, observe)
        warm(plan, chain, frame)
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
    _end(plan, console, json_file, check, report.figures(results))
    return not check.wrong


def run_kill(plan: Plan, console: Console, json_file: Path | None = None) -> bool:
    """Runs the pipeline, kills one worker of it in the middle of a frame, does the same to torch RPC where it is
    installed, and prints the report; whether all came out as it should.  Blocks the host."""
    frame, _, reference = _beginning(plan, console)
    killer = Killer()
    with ExitStack() as running:
        with console.status("starting three workers"):
            chain = running.enter_context(chain_to_kill(plan, killer))
        with progress(console, "streamrt, nobody is killed", plan.frames, chain) as observe:
            undisturbed(plan, chain, frame, observe)
        check = Check(reference, open_device(plan.steps[-1].device))
        before = settled()  # with no bar on the screen: its thread would make and drop objects all the time
        with progress(console, "streamrt, a worker is killed", plan.frames, chain) as observe:
            killed = disturbed(plan, chain, killer, frame, check, observe)
        with console.status("checking every output against those of one process"):
            check.finish()
        after = settled(before)
    without, beside = "", None
    with console.status("killing a worker of torch RPC"):
        try:
            beside = rival.measure(*_rivals_frame(plan))
        except UnavailableError as error:
            without = str(error)
    results = kill_report.Results(plan, killed, before, after, beside, without)
    kill_report.show(console, results)
    _end(plan, console, json_file, check, kill_report.figures(results))
    return results.passed


def _beginning(plan: Plan, console: Console) -> tuple[Callable[[int], Any], Timed, dict[int, dict[str, Any]]]:
    """The frames by number, and what one process makes of them: how fast, and which outputs by window."""
    with console.status("tiling the photographs"):
        frame = source(plan)
    with progress(console, "one process", min(plan.frames, REFERENCE_FRAMES)) as observe:
        timed, reference = one_process(plan, frame, observe)
    return frame, timed, reference


def _end(plan: Plan, console: Console, json_file: Path | None, check: Check, figures: dict[str, Any]) -> None:
    if json_file is not None:
        report.save_json(json_file, plan, check, figures, versions())
        console.print(f"figures: {json_file}", soft_wrap=True, highlight=False)
    console.print(f"again: {plan.command}", soft_wrap=True, highlight=False)


def _rivals_frame(plan: Plan) -> tuple[str, int]:
    """The device and the bytes of a frame, for torch."""
    height, width = photographs.frame_shape(plan.megapixels)
    return ("cpu" if plan.kind == "host" else plan.steps[VICTIM].device), 12 * height * width
