"""The check of the demo: every output against the same stages run in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transport.demo.arrays import to_host

BYTE_TOLERANCE = 1 / 255
"""Of a uint8 output: one rounding step."""
FLOAT_TOLERANCE = 1e-4
"""Of a float32 output in 0..1: stages are deterministic, but a compiler may fuse differently in another process."""
KEPT = 3 << 30
"""Bytes of outputs that wait for the end of the run; past that they are checked as they come, which slows the run."""


@dataclass(slots=True)
class Check:
    """Compares outputs with `reference`, which maps a frame's window to its output in one process (NumPy)."""

    reference: dict[int, dict[str, Any]]
    checked: int = 0
    wrong: list[int] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    _kept: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, index: int, window: int, output: dict[str, Any]) -> None:
        """Takes the output of frame `index`.  Does not block the host until `KEPT` bytes wait."""
        self._kept.append((index, window, output))
        self._bytes += sum(int(each.nbytes) for each in output.values())
        if self._bytes > KEPT:
            self.finish()

    def finish(self) -> bool:
        """Compares all that wait; whether every output so far was right.  Blocks the host."""
        for index, window, output in self._kept:
            expected, right = self.reference[window], True
            if output.keys() != expected.keys():
                self.wrong.append(index)
                continue
            for name, want in expected.items():
                difference = _difference(to_host(output[name]), want)
                self.largest[name] = max(self.largest.get(name, 0.0), difference)
                right = right and difference <= tolerance(want.dtype)
            if not right:
                self.wrong.append(index)
            self.checked += 1
        self._kept.clear()
        self._bytes = 0
        return not self.wrong


def tolerance(dtype: Any) -> float:
    """The difference that is allowed, of full scale 1.  Does not touch the device."""
    return BYTE_TOLERANCE if dtype == np.uint8 else FLOAT_TOLERANCE


def _difference(got: Any, want: Any) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    scale = 255.0 if want.dtype == np.uint8 else 1.0
    if want.dtype == np.uint8:  # no wider copy of a whole image: |a - b| of bytes is max - min
        return float((np.maximum(got, want) - np.minimum(got, want)).max()) / scale
    largest = float(np.abs(got - want).max())
    return largest if largest == largest else float("inf")
