"""The check of the demo: every output against the same stages run in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrt.device import CPU, Device, device_info
from transport.demo.arrays import copied, to_host

BYTE_TOLERANCE = 1 / 255
"""Of a uint8 output: one rounding step."""
FLOAT_TOLERANCE = 1e-4
"""Of a float32 output in 0..1: stages are deterministic, but a compiler may fuse differently in another process."""
KEPT = 3 << 30
"""Bytes of outputs in ordinary memory that wait for the end of the run; past the limit they are checked as they come,
which slows the run."""
KEPT_SHARE = 8
"""The same on GPUs: one part in so many of the device's memory."""


@dataclass(slots=True)
class Check:
    """Compares outputs on `device` with `reference`: by a frame's window, the output in one process (NumPy)."""

    reference: dict[int, dict[str, Any]]
    device: Device = CPU
    checked: int = 0
    wrong: list[int] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    _kept: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, index: int, window: int, output: dict[str, Any]) -> None:
        """Takes the output of frame `index`; on a GPU a copy of it, so that the sender has its memory back.

        Enqueues the copy on the current stream.  Does not block the host until too many bytes wait.
        """
        on_gpu = self.device.kind == "cuda"
        self._kept.append((index, window, copied(output) if on_gpu else output))
        self._bytes += sum(int(each.nbytes) for each in output.values())
        if self._bytes > (device_info(self.device).total_bytes // KEPT_SHARE if on_gpu else KEPT):
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
