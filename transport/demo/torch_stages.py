"""The demo's stages for torch tensors, on the CPU or a GPU."""

from __future__ import annotations

from typing import Any

import torch

from transport.demo import arithmetic
from transport.demo.arithmetic import HALO


def denoise(image: Any) -> Any:
    """Stage 1: see `numpy_stages.denoise`.  Enqueues on the current stream."""
    with torch.inference_mode():
        return arithmetic.denoise(torch, _taller(image))


def filter_bank(image: Any) -> dict[str, Any]:
    """Stage 2: see `numpy_stages.filter_bank`.  Enqueues on the current stream."""
    with torch.inference_mode():
        return {"image": image, "edges": arithmetic.to_bytes(torch, arithmetic.edges(torch, _taller(image)))}


def finish(found: dict[str, Any]) -> dict[str, Any]:
    """Stage 3: see `numpy_stages.finish`.  Enqueues on the current stream."""
    with torch.inference_mode():
        tall = _taller(found["image"])
        return {
            "image": arithmetic.tone(torch, tall),
            "edges": found["edges"],
            "corners": arithmetic.corners(torch, tall),
        }


def _taller(image: Any) -> Any:
    return arithmetic.widen(torch, image, -2, HALO)
