"""The demo's frames: photographs that scikit-image carries in its own package, tiled into rows and panned over.

Nothing is downloaded.  The mosaic is built once, with a little sensor noise in it (so that there is something to
denoise), as bytes; a frame is a window into it as planar float32, and window `n` is the same in every run.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np

from streamrt.errors import UnavailableError

PHOTOGRAPHS = ("astronaut", "coffee", "rocket", "chelsea", "stereo_motorcycle", "retina", "hubble_deep_field")
"""Functions of `skimage.data` whose files are in the wheel (`stereo_motorcycle` gives a pair; the left one is used)."""
ROW_HEIGHT = 480
PAN = (12, 28)
"""Rows and columns that the window moves from one frame to the next."""
PERIOD = 16
"""The pan turns round after this many frames, which bounds the mosaic."""
NOISE = 9.0
"""Standard deviation of the noise, of 255."""
NEEDED = {"skimage": "scikit-image", "PIL": "Pillow"}


def frame_shape(megapixels: float) -> tuple[int, int]:
    """(height, width) of about that many million pixels, 4:3, both multiples of 4.  Does not touch the device."""
    height = max(64, 4 * round(math.sqrt(megapixels * 1e6 * 3 / 4) / 4))
    return height, max(64, 4 * round(height / 3))


def check_installed() -> None:
    """Raises `UnavailableError` with the remedy where scikit-image or Pillow is missing; imports neither."""
    missing = [title for package, title in NEEDED.items() if importlib.util.find_spec(package) is None]
    if missing:
        raise UnavailableError(
            f"the demo's photographs need {' and '.join(missing)}, not installed here: pip install 'streamrt[demo]'"
        )


def mosaic(megapixels: float) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The photographs in rows, (3, height, width) uint8, as large as the pan over frames of that size needs.

    Raises `UnavailableError` where scikit-image or Pillow is missing.  Does not touch the device.
    """
    check_installed()
    import skimage.data
    from PIL import Image

    height, width = frame_shape(megapixels)
    height, width = height + PAN[0] * PERIOD, width + PAN[1] * PERIOD
    tiles = []
    for name in PHOTOGRAPHS:
        loaded = getattr(skimage.data, name)()
        picture = Image.fromarray(loaded[0] if isinstance(loaded, tuple) else loaded)
        size = (round(picture.width * ROW_HEIGHT / picture.height), ROW_HEIGHT)
        tiles.append(np.asarray(picture.resize(size, Image.Resampling.LANCZOS)))
    result = np.empty((3, height, width), np.uint8)
    noise = np.random.default_rng(20).standard_normal((3, ROW_HEIGHT, width), np.float32) * np.float32(NOISE)
    turn = 0
    for top in range(0, height, ROW_HEIGHT):
        row, filled = [], 0
        while filled < width:
            row.append(tiles[turn % len(tiles)])
            filled += row[-1].shape[1]
            turn += 1
        rows = min(ROW_HEIGHT, height - top)
        clean = np.concatenate(row, axis=1)[:rows, :width].transpose(2, 0, 1)
        shifted = np.roll(noise, 101 * top, axis=-1)[:, :rows]
        np.clip(clean + shifted, 0, 255, out=result[:, top : top + rows], casting="unsafe")
    return result


def position(index: int) -> int:
    """How far, in steps, the window of frame `index` is along the pan, there or back.  Does not touch the device."""
    step = index % (2 * PERIOD)
    return min(step, 2 * PERIOD - step)


def window(tiled: Any, megapixels: float, index: int) -> Any:
    """Frame `index`, (3, height, width) float32 in 0..1, of the library and on the device of `tiled`.

    Enqueues on the current stream (a GPU's mosaic); NumPy is done when it returns.
    """
    height, width = frame_shape(megapixels)
    top, left = (step * position(index) for step in PAN)
    frame = tiled[:, top : top + height, left : left + width].astype(np.float32)
    frame *= np.float32(1 / 255)
    return frame
