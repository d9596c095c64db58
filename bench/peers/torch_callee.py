"""The functions that torch RPC's callee runs; imported by name on both sides."""

from __future__ import annotations

import threading

import torch

from bench.workload import STRIDE, load

__all__ = ["add_up", "double", "echo", "load", "total"]

_sums: dict[torch.device, torch.Tensor] = {}
_making = threading.Lock()


def echo(x: torch.Tensor) -> torch.Tensor:
    """The argument."""
    return x


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice the argument."""
    return x * 2


def add_up(x: torch.Tensor, slot: int) -> None:
    """Sums the stamped words into a slot of its own: calls run on different streams, so a shared sum would race."""
    with _making:  # the first calls come together
        if x.device not in _sums:
            sums = torch.zeros(4096, dtype=torch.int64, device=x.device)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            _sums[x.device] = sums
    torch.sum(x[::STRIDE], dim=0, dtype=torch.int64, out=_sums[x.device][slot])


def total(slots: int) -> int:
    """The sum over the slots, when all that was enqueued is done."""
    result = 0
    for device, sums in _sums.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        result += int(sums[:slots].sum())
        sums.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result
