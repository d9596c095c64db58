"""The demo's stages for torch tensors, on the CPU or a GPU."""

from __future__ import annotations

from typing import Any

import torch

from transport.demo import arithmetic
from transport.demo.arithmetic import HALO


@torch.inference_mode()
def denoise(image: torch.Tensor) -> torch.Tensor:
    """Stage 1: see `numpy_stages.denoise`.  Enqueues on the current stream."""
    result: torch.Tensor = arithmetic.denoise(torch, _taller(image))
    return result


@torch.inference_mode()
def filter_bank(image: torch.Tensor) -> dict[str, Any]:
    """Stage 2: see `numpy_stages.filter_bank`.  Enqueues on the current stream."""
    return {"image": image, "edges": arithmetic.edges(torch, _taller(image))}


@torch.inference_mode()
def finish(found: dict[str, Any]) -> dict[str, Any]:
    """Stage 3: see `numpy_stages.finish`.  Enqueues on the current stream."""
    tall = _taller(found["image"])
    return {
        "image": arithmetic.tone(torch, tall),
        "edges": arithmetic.to_bytes(torch, found["edges"]),
        "corners": arithmetic.corners(torch, tall),
    }


def _taller(image: torch.Tensor) -> torch.Tensor:
    tall: torch.Tensor = arithmetic.widen(torch, image, -2, HALO)
    return tall
