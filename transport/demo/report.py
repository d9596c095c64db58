"""What a run of the demo prints and saves: tables, the check, the pictures, the JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from transport.demo import photographs, pictures
from transport.demo.check import Check, tolerance
from transport.demo.plan import Plan
from transport.demo.runs import Timed
from transport.demo.traffic import Traffic
from transport.stage_times import PipelineStatistics

MB = 1e6
LOOK: dict[str, Any] = {
    "title_justify": "left",
    "title_style": "bold",
    "caption_justify": "left",
    "box": box.SIMPLE_HEAD,
}


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured."""

    plan: Plan
    one_process: Timed
    blocking: Timed
    pipelined: PipelineStatistics
    traffic: list[Traffic]
    check: Check
    cores: int

    @property
    def ideal(self) -> float:
        """Frames a second if transfers took no time: the slowest stage's rate in one process, or that of all cores."""
        each = [seconds / self.one_process.frames for seconds in self.one_process.stages]
        if self.plan.kind == "host":
            return 1 / max(*each, sum(each) / self.cores)
        return 1 / max(_by_device(self.plan, each))

    @property
    def transfer(self) -> float:
        """Seconds that the transfers of all frames take with nothing to hide behind (measured call by call)."""
        return (self.blocking.seconds - sum(self.blocking.stages)) / self.blocking.frames * self.pipelined.frames

    @property
    def not_hidden(self) -> float:
        """Seconds for which a stage stood still because its next frame was on the way; of the stage with the most."""
        return max(each.transfer for each in self.pipelined.stages)


def cores() -> int:
    """Processor cores that this process may use.  Does not touch the device."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _by_device(plan: Plan, each: list[float]) -> list[float]:
    loads: dict[str, float] = {}
    for step, seconds in zip(plan.steps, each, strict=True):
        loads[step.device] = loads.get(step.device, 0.0) + seconds
    return list(loads.values())


def subtitle(plan: Plan) -> str:
    """One line that says what ran on what.  Does not touch the device."""
    height, width = photographs.frame_shape(plan.megapixels)
    where = ", ".join(dict.fromkeys(step.device for step in plan.steps))
    machine = f"{cores()} CPU cores" if plan.kind == "host" else where
    return (
        f"{plan.frames} frames of {width} x {height} ({12 * width * height / MB:.0f} MB), {plan.libraries}, {machine}"
    )


def bars(results: Results) -> list[tuple[str, str, float]]:
    """The chart's bars: (label, remark, frames a second).  Does not touch the device."""
    bound = (
        "the slowest stage" if results.plan.kind == "cuda" else f"the slowest stage, or {results.cores} cores at work"
    )
    return [
        ("one process", "the stages one after the other", results.one_process.rate),
        ("worker processes, blocking", "every call waits for its reply", results.blocking.rate),
        ("streamrt", f"the same workers, {results.plan.in_flight} frames in flight", results.pipelined.rate),
        ("ideal", f"no transfers: {bound}", results.ideal),
    ]


def show(console: Console, results: Results) -> None:
    """Prints the tables and the check.  Does not touch the device."""
    plan, run = results.plan, results.pipelined
    speed = Table(title=subtitle(plan), **LOOK)
    for heading in ("", "frames", "frames/s", "p50 a frame", "p99 a frame"):
        speed.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    ways: list[tuple[str, Timed | PipelineStatistics]] = [
        ("one process", results.one_process),
        ("workers, blocking calls", results.blocking),
        (f"streamrt, {plan.in_flight} in flight", run),
    ]
    for name, timed in ways:
        style = "bold green" if timed is run else None
        times = (f"{1000 * timed.latency(percent):.0f} ms" for percent in (50, 99))
        speed.add_row(name, str(timed.frames), f"{timed.rate:.2f}", *times, style=style)
    speed.add_row("ideal: no transfers", "", f"{results.ideal:.2f}", "", "")
    console.print(speed)

    stages = Table(title="Where the time of streamrt's stages went", **LOOK)
    stages.caption = (
        "ms and work: what a frame took, and the share of the time; the rest waited:\n"
        "input for a frame, credit for room, transfer for one that nothing hid"
    )
    for number, heading in enumerate(("stage", "arrays", "device", "ms", "work", "input", "credit", "transfer")):
        stages.add_column(heading, justify="right" if number > 2 else "left", no_wrap=True)
    for step, each in zip(plan.steps, run.stages, strict=True):
        parts = (each.busy, each.waiting_input, each.waiting_credit, each.transfer)
        shares = (f"{part / each.elapsed:.0%}" for part in parts)
        stages.add_row(step.title, step.library, step.device, f"{1000 * each.busy / each.frames:.0f}", *shares)
    console.print(stages)

    channels = Table(title="What crossed process borders", **LOOK)
    for number, heading in enumerate(("channel", "there", "back", "GB/s over the run")):
        channels.add_column(heading, justify="right" if number else "left")
    for traffic in results.traffic:
        rate = (traffic.sent + traffic.received) / run.elapsed / 1e9
        channels.add_row(
            traffic.channel, f"{traffic.sent / MB:,.0f} MB", f"{traffic.received / MB:,.0f} MB", f"{rate:.2f}"
        )
    console.print(channels)
    console.print(
        f"transfers: {results.transfer:.2f} s in all when nothing hides them (measured call by call);"
        f" in the pipeline {results.not_hidden:.2f} s of its {run.elapsed:.2f} s were not hidden"
    )
    show_check(console, results.check)


def show_check(console: Console, check: Check) -> None:
    """Prints what the check found.  Does not touch the device."""
    verdict = "[bold red]FAILED[/]" if check.wrong else "[bold green]passed[/]"
    for name, difference in check.largest.items():
        kind = next(iter(check.reference.values()))[name].dtype
        console.print(f"  {name}: largest difference {difference:.2g} of full scale, tolerance {tolerance(kind):.2g}")
    console.print(f"check {verdict}: {check.checked - len(check.wrong)} of {check.checked} outputs as in one process")
    if check.wrong:
        console.print(f"  wrong: frames {', '.join(map(str, check.wrong[:20]))}")


def save_pictures(results: Results, shots: list[tuple[str, Any, dict[str, Any]]]) -> list[Path]:
    """Writes the contact sheet and the chart into the plan's folder; returns their paths.  Blocks the host."""
    folder = results.plan.output
    folder.mkdir(parents=True, exist_ok=True)
    sheet, chart = folder / "contact-sheet.png", folder / "frames-per-second.png"
    pictures.contact_sheet(sheet, "streamrt demo: what three stages in three processes made of the photographs", shots)
    pictures.bar_chart(chart, "Frames a second, measured", subtitle(results.plan), bars(results))
    return [sheet, chart]


def figures(results: Results) -> dict[str, Any]:
    """What was measured, for `save_json`.  Does not touch the device."""
    return {
        "frames_per_second": {label: value for label, _, value in bars(results)},
        "latency_ms": {str(percent): 1000 * results.pipelined.latency(percent) for percent in (50, 99)},
        "stages": [asdict(each) for each in results.pipelined.stages],
        "channels": [asdict(each) for each in results.traffic],
        "transfer_seconds": {"call by call": results.transfer, "not hidden": results.not_hidden},
    }


def save_json(path: Path, plan: Plan, check: Check, figures: dict[str, Any], versions: dict[str, str]) -> None:
    """Writes a run's figures as JSON, with what ran where, and what its check found.  Blocks the host."""
    record = {
        "command": plan.command,
        "hardware": {"cores": cores(), "devices": [step.device for step in plan.steps]},
        "versions": versions,
        **figures,
        "check": {"outputs": check.checked, "wrong": check.wrong, "largest": check.largest},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
