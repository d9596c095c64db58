"""Stages for tests of pipelines in real processes.  Gates and notes are files, since a killed worker tells nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrt.errors import DeviceError

STAY = 120.0  # beyond every watchdog


def plus_one(frame: Any) -> Any:
    """The next number, or a frame with one more everywhere."""
    return frame + 1


class Gated:
    """A stage that notes each frame which it is given, and stays in those whose gates are closed until they open."""

    def __init__(self, folder: Path, name: str, *closed: int) -> None:
        self.folder, self.name, self.closed = folder, name, closed

    def __call__(self, frame: Any) -> Any:
        number = int(frame.flat[0])
        with open(self.folder / self.name, "a") as notes:
            notes.write(f"{number} {os.getpid()}\n")
        if number in self.closed:
            gate, pause = self.folder / f"{self.name}-{number}", threading.Event()
            for _ in range(int(STAY / 0.002)):
                if gate.exists():
                    break
                pause.wait(0.002)  # polls; nobody sets it
        return frame

    def open(self, number: int) -> None:
        """Lets the frame go on."""
        (self.folder / f"{self.name}-{number}").touch()

    def notes(self) -> list[tuple[int, int]]:
        """Frames and processes, in the order in which they met."""
        path = self.folder / self.name
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(number), int(pid)) for number, pid in map(str.split, lines)]

    def holds(self, number: int) -> Callable[[], bool]:
        """Whether the frame has come."""
        return lambda: number in [noted for noted, _ in self.notes()]


class Deadly:
    """A stage whose process ends in the frames that are named, or in all."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __call__(self, number: int) -> int:
        if not self.numbers or number in self.numbers:
            os._exit(3)
        return number


def fail_in_one(number: int) -> int:
    """A stage whose device fails for good in frame 1."""
    if number == 1:
        raise DeviceError("an illegal memory access was encountered")
    return number
