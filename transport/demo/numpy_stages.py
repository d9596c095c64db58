"""The demo's stages for NumPy and CuPy arrays: one source, by the array's own module.

NumPy works block by block, so that the temporaries stay in the processor's cache; a GPU takes the whole image.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transport.demo import arithmetic
from transport.demo.arithmetic import HALO

BLOCK_BYTES = 400_000
"""Size of one plane's block for NumPy: a dozen of them fit a cache of 2 MiB."""


def denoise(image: Any) -> Any:
    """Stage 1: (3, height, width) float32 in 0..1 to the same, smoothed but for its edges.

    Enqueues on the current stream (CuPy); NumPy is done when it returns.
    """
    return _by_blocks(arithmetic.denoise, image)


def filter_bank(image: Any) -> dict[str, Any]:
    """Stage 2: the image and its thin edges, {"image": (3, height, width), "edges": (height, width) uint8}.

    Enqueues on the current stream (CuPy); NumPy is done when it returns.
    """
    return {"image": image, "edges": _by_blocks(_edges, image)}


def finish(found: dict[str, Any]) -> dict[str, Any]:
    """Stage 3: the tone-mapped image as uint8, the edges, and "corners", (height, width) float32 in 0..1.

    Enqueues on the current stream (CuPy); NumPy is done when it returns.
    """
    image = found["image"]
    return {
        "image": _by_blocks(arithmetic.tone, image),
        "edges": found["edges"],
        "corners": _by_blocks(arithmetic.corners, image),
    }


def _edges(xp: Any, planes: Any) -> Any:
    return arithmetic.to_bytes(xp, arithmetic.edges(xp, planes))


def module_of(array: Any) -> Any:
    """The module of an array's class, numpy or cupy.  Does not touch the device."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def _by_blocks(function: Callable[[Any, Any], Any], image: Any) -> Any:
    xp = module_of(image)
    height, width = image.shape[-2:]
    rows = height if xp.__name__ == "cupy" else max(16, BLOCK_BYTES // (4 * width))
    result = None
    for start in range(0, height, rows):
        stop = min(start + rows, height)
        block = image[..., max(0, start - HALO) : stop + HALO, :]
        above, below = max(0, HALO - start), max(0, stop + HALO - height)
        if above or below:
            block = xp.concatenate([block[:, :1]] * above + [block] + [block[:, -1:]] * below, -2)
        part = function(xp, block)
        if stop - start == height:
            return part
        if result is None:
            result = xp.empty((*part.shape[:-2], height, width), part.dtype)
        result[..., start:stop, :] = part
    return result
