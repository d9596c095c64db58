"""What every benchmark hands back: rows with their goals, on which hardware, with which versions, at which commit.

A ratio over 1 means that streamrt is the better one, whatever the unit.  Goals are read from `goals.json`, which was
written before anything was measured; a row without a goal there is reported and holds nothing.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Units of durations, sizes and shares of the host's time; in every other one (rates) more is better.
LESS_IS_BETTER = frozenset({"ns", "us", "ms", "s", "B", "MiB", "GiB", "count", "%", "% of a core"})
PACKAGES = ("streamrt", "numpy", "pyzmq", "msgpack", "torch", "jax")
GPU_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "ucxx-cu13")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.  `goal` is text for people; `holds` is None where there is no goal or no figure."""

    name: str
    unit: str
    streamrt: float | None = None
    peer: float | None = None
    ratio: float | None = None
    goal: str | None = None
    holds: bool | None = None


def ratio_of(unit: str, ours: float | None, theirs: float | None) -> float | None:
    """How many times better `ours` is than `theirs` in this unit; None where one is missing or zero."""
    if not ours or not theirs:
        return None
    return theirs / ours if unit in LESS_IS_BETTER else ours / theirs


def load_goals(benchmark: str) -> dict[str, dict[str, Any]]:
    """The goals of one benchmark, by row name."""
    goals = json.loads((HERE / "goals.json").read_text())
    return dict(goals[benchmark])


def judged(rows: Sequence[Row], goals: Mapping[str, Mapping[str, Any]], peer: str = "-") -> list[Row]:
    """The same rows with ratio, goal and holds filled in."""
    by_name = {row.name: row for row in rows}
    result = []
    for row in rows:
        row = replace(row, ratio=ratio_of(row.unit, row.streamrt, row.peer))
        goal = goals.get(row.name)
        if goal is not None:
            checks = _checks(row, goal, by_name, peer)
            text = " and ".join(text for text, _ in checks)
            if later := [text for text, _ in _checks(row, goal.get("later", {}), by_name, peer)]:
                text += f" (later {' and '.join(later)})"
            known = [held for _, held in checks]
            holds = None if row.streamrt is None or None in known or not known else all(known)
            row = replace(row, goal=text or None, holds=holds)
        result.append(row)
    return result


def _checks(row: Row, goal: Mapping[str, Any], rows: Mapping[str, Row], peer: str) -> list[tuple[str, bool | None]]:
    ours = row.streamrt
    less = row.unit in LESS_IS_BETTER
    checks: list[tuple[str, bool | None]] = []
    if "max" in goal:
        checks.append((f"<= {goal['max']:g} {row.unit}", None if ours is None else ours <= goal["max"]))
    if "min" in goal:
        checks.append((f">= {goal['min']:g} {row.unit}", None if ours is None else ours >= goal["min"]))
    if peer in goal.get("ratio", {}):
        wanted = goal["ratio"][peer]
        checks.append((f">= {wanted:g}x {peer}", None if row.ratio is None else row.ratio >= wanted))
    if "of" in goal:
        other = rows.get(goal["of"])
        base = None if other is None else other.streamrt if other.streamrt is not None else other.peer
        held = None
        if ours is not None and base is not None:
            held = ours <= goal["factor"] * base if less else ours >= goal["factor"] * base
        checks.append((f"{'<=' if less else '>='} {goal['factor']:g} x {goal['of']}", held))
    return checks


def hardware() -> dict[str, Any]:
    """The CPU, the cores that this process may use, the machine's GPUs, and what CUDA_VISIBLE_DEVICES says, if set."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux: the platform's own word has to do
    found: dict[str, Any] = {"cpu": model, "cores": len(os.sched_getaffinity(0)), "gpus": _gpus()}
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        found["visible"] = visible
    return found


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def loop_milliseconds() -> float:
    """What a loop of 100 000 additions takes now."""
    begin, total = time.perf_counter(), 0
    for number in range(100_000):
        total += number
    return (time.perf_counter() - begin) * 1e3


class Pace:
    """How fast this machine runs Python, from moment to moment: where cores are shared with others that changes by two
    within seconds, and with it whatever is bound by Python."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        """Of `loop_milliseconds`, one for each measurement, in the process that measured."""

    def summary(self) -> dict[str, float] | None:
        """The least, the median and the most, in milliseconds; None without a sample."""
        if not self.samples:
            return None
        numbers = {"least": min(self.samples), "median": statistics.median(self.samples), "most": max(self.samples)}
        return {name: round(number, 2) for name, number in numbers.items()}


PACE = Pace()
"""Saved with the rows."""


def versions() -> dict[str, str]:
    """Python's version and those of the packages that matter to a figure, where they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES + GPU_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of this checkout, with ``+`` behind it when files differ; ``unknown`` outside one."""
    if given := os.environ.get("STREAMRT_COMMIT"):
        return given  # a copied tree has no history of its own
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True)
        diff = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "*.py"], cwd=HERE, check=False)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.stdout.strip()[:12] + ("+" if diff.returncode else "")


def figure(value: float | None) -> str:
    """A number for a table: three significant digits, thousands in full."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def cells(row: Row) -> tuple[str, ...]:
    """A row's texts in the order of the columns: name, unit, streamrt, peer, ratio, goal, holds."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
    holds = {None: "-", True: "yes", False: "no"}[row.holds]
    return row.name, row.unit, figure(row.streamrt), figure(row.peer), ratio, row.goal or "-", holds


def show(title: str, rows: Sequence[Row], peer: str = "peer") -> None:
    """Prints the rows as a table of plain text that survives a log file."""
    lines = [("row", "unit", "streamrt", peer, "ratio", "goal", "holds"), *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    print(f"\n{title}")
    for number, line in enumerate(lines):
        texts = [t.rjust(w) if 2 <= i <= 4 else t.ljust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(texts).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def save(path: str | Path | None, rows: Sequence[Row]) -> None:
    """Writes the rows with hardware, versions, commit and pace; does nothing without a path."""
    if path is None:
        return
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "pace": PACE.summary(),
        "rows": [asdict(row) for row in rows],
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {file}")
