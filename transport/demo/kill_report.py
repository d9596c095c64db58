"""What `streamrt demo --kill` prints and saves: the table, the lines about memory and the check, the figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transport.demo.alive import Alive
from transport.demo.kill import Killed
from transport.demo.plan import VICTIM, Plan
from transport.demo.report import LOOK, MB, show_check, subtitle
from transport.demo.rival import Rival

NOT_TRIED = "-"


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured; `rival` is None where torch RPC did not run, which `without` explains."""

    plan: Plan
    killed: Killed
    before: Alive
    after: Alive
    rival: Rival | None
    without: str = ""

    @property
    def grown(self) -> dict[str, int]:
        """By name, what there is more of after than before.  Does not touch the device."""
        return self.after.above(self.before)

    @property
    def passed(self) -> bool:
        """Whether the frames went on as they should and memory is back.  Does not touch the device."""
        return self.killed.passed and not self.grown


def show(console: Console, results: Results) -> None:
    """Prints the table and what is behind it.  Does not touch the device."""
    killed, rival, victim = results.killed, results.rival, results.plan.steps[VICTIM]
    table = Table(title=subtitle(results.plan), **LOOK)
    table.caption = "times are from the kill of a worker in the middle of a frame; -: not tried"
    for heading in ("", "lost", "known after", "worker back after", "delivered then", "check"):
        table.add_column(heading)
    table.add_row(*_row(killed), style="bold green" if killed.passed else "bold red")
    if rival is not None:
        table.add_row(*_rivals_row(rival))
    console.print(table)
    for line in _lines(results, victim.title):
        console.print(escape(line), soft_wrap=True, highlight=False)
    show_check(console, killed.check)
    for error in killed.failed:
        console.print(f"[bold red]failed, but not with its worker:[/] {escape(str(error))}", soft_wrap=True)


def _row(killed: Killed) -> tuple[str, ...]:
    check = killed.check
    return (
        "streamrt",
        _numbered(killed.lost),
        _seconds(killed.known) if killed.restart else "never",
        _seconds(killed.back) if killed.restart else "never",
        f"{killed.delivered_after} frames",
        f"{check.checked - len(check.wrong)} of {check.checked} right",
    )


def _rivals_row(rival: Rival) -> tuple[str, ...]:
    if rival.timed_out:
        known = f"hung until its timeout of {rival.timeout:g} s"
    elif rival.error:
        known = _seconds(rival.known)
    else:
        known = f"returned after {_seconds(rival.known)}"
    back = "not back" if rival.back is None else _seconds(rival.back)
    return ("torch RPC", "the call", known, back, NOT_TRIED, NOT_TRIED)


def _lines(results: Results, stage: str) -> list[str]:
    killed, rival = results.killed, results.rival
    lines = []
    if killed.restart is not None:
        lines.append(f"killed: process {killed.pid}, stage {stage!r}; in its place: process {killed.restart.pid}")
    delivered = f"{killed.delivered} of {results.plan.frames} frames delivered"
    lines.append(f"lost: {_numbered(killed.lost)}; {delivered}; none was run again")
    verdict = "back at its baseline" if not results.grown else f"NOT back: {_changes(results.grown)} more"
    lines.append(f"memory before: {_alive(results.before)}")
    lines.append(f"memory after:  {_alive(results.after)}: {verdict}")
    if rival is None:
        lines.append(f"torch RPC: left out: {results.without}")
    else:
        call = rival.error or "its call returned a value"
        lines.append(f"torch RPC {rival.version}: {_seconds(rival.known)} after the kill: {call}")
        if rival.back is None:
            lines.append(f"torch RPC {rival.version}: {rival.end}")
    return lines


def _alive(alive: Alive) -> str:
    return (
        f"{alive.live_bytes / MB:.1f} MB of buffers, {alive.blocks} blocks ({alive.block_bytes / MB:.1f} MB), "
        f"{alive.segments} shared segments, {alive.descriptors} descriptors, {alive.leases} leases, "
        f"{alive.futures} open futures"
    )


def _changes(grown: dict[str, int]) -> str:
    return ", ".join(f"{change} {name}" for name, change in grown.items())


def _numbered(frames: list[int]) -> str:
    if not frames:
        return "no frame"
    return ("frame " if len(frames) == 1 else "frames ") + ", ".join(map(str, frames))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def figures(results: Results) -> dict[str, Any]:
    """What was measured, for `report.save_json`.  Does not touch the device."""
    killed, rival = results.killed, results.rival
    return {
        "frames": {"lost": killed.lost, "delivered": killed.delivered, "delivered_after": killed.delivered_after},
        "seconds": {"known": killed.known, "back": killed.back},
        "restart": None if killed.restart is None else asdict(killed.restart),
        "memory": {"before": asdict(results.before), "after": asdict(results.after), "grown": results.grown},
        "torch": {"left out": results.without} if rival is None else asdict(rival),
    }
