"""The demo's progress bars: one for the run, and one for each stage with its rate while the pipeline runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from transport.pipeline import Pipeline


class Update(Protocol):
    """Shows how many frames are out, and the numbers of those among them that are lost."""

    def __call__(self, done: int, lost: Sequence[int] = (), /) -> None: ...


@contextmanager
def progress(console: Console, title: str, frames: int, chain: Pipeline | None = None) -> Iterator[Update]:
    """Shows a bar while the block runs, and the stages of `chain` below it; yields what to call with the frames done.

    Does not touch the device.
    """
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(bar_width=36),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("[cyan]{task.fields[rate]}"),
    )
    with Progress(*columns, console=console) as bars:
        total = bars.add_task(title, total=frames, rate="")
        stages = [bars.add_task(f"  {each.name}", total=frames, rate="") for each in chain.stages] if chain else []

        def update(done: int, lost: Sequence[int] = (), /) -> None:
            task = next(task for task in bars.tasks if task.id == total)
            rate = f"{done / task.elapsed:.2f} frames/s" if task.elapsed else ""
            if lost:
                rate += f" [bold red]lost: {', '.join(map(str, lost))}[/]"
            bars.update(total, completed=done, rate=rate)
            if chain is not None:
                for stage, each in zip(stages, chain.statistics().stages, strict=True):
                    bars.update(stage, completed=each.frames, rate=f"{each.rate:.2f} frames/s")

        yield update
