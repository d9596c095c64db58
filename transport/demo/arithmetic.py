"""What the three stages compute, written once for any array module: slices, adds and small separable kernels.

`xp` is numpy, cupy, torch or jax.numpy; only names that all four have are used, and a name is re-bound by an augmented
assignment only where it holds a temporary of its own (jax arrays are immutable, and inputs are never written).
An image is planar, (3, height, width) float32 in 0..1; edges repeat the outermost pixel.

Every function takes a block of the image that already carries `HALO` extra rows above and below, and returns the rows
between them: NumPy works on blocks that stay in the cache, the other libraries on the whole image at once.

Everything is a continuous function of its input (ramps instead of thresholds, all orientations suppressed before the
strongest is chosen), so that libraries that round differently agree to a tolerance.
"""

from __future__ import annotations

from typing import Any

HALO = 5
"""Rows above and below that the widest stage looks at."""

RANGE = 0.11
"""Difference of luminance at which a neighbour counts a quarter in `denoise`."""
NEIGHBOUR_WEIGHTS = (0.8, 0.45)
"""Weights of the neighbours at distance 1 and 2 in `denoise`."""
RIDGE_RAMP = 0.15
"""Non-maximum suppression fades over this fraction of the response instead of cutting."""
EDGE_CONTRAST = 0.035
"""Response at which an edge is drawn half bright."""
EXPOSURE, WHITE = 2.2, 2.2
"""Tone curve: luminance is multiplied by the first and reaches 1 at the second."""
HARRIS_K, CORNER_CONTRAST = 0.05, (2e-5, 8e-6)
"""Harris' constant, and the score at which a corner of the fine and of the coarse scale is drawn half bright."""
DIRECTIONS = ((0, 1), (1, 2), (1, 1), (2, 1), (1, 0), (2, -1), (1, -1), (1, -2))
"""Directions, in (rows, columns), of the eight filters of `edges`."""


def luminance(planes: Any) -> Any:
    """The weighted sum of the three planes, (height, width).  Does not block the host."""
    return planes[0] * 0.299 + planes[1] * 0.587 + planes[2] * 0.114


def widen(xp: Any, array: Any, axis: int, by: int) -> Any:
    """Repeats the outermost slices of `axis`, `by` times on both sides.  Does not block the host."""
    first, last = cut(array, axis, 0, 1), cut(array, axis, array.shape[axis] - 1, 1)
    return xp.concatenate([first] * by + [array] + [last] * by, axis)


def cut(array: Any, axis: int, start: int, length: int) -> Any:
    """A view of `length` slices from `start` along one of the last two axes (-1 or -2).  Does not touch the device."""
    return array[..., start : start + length] if axis == -1 else array[..., start : start + length, :]


def denoise(xp: Any, planes: Any) -> Any:
    """A separable bilateral filter of radius 2: neighbours of a similar luminance are averaged, edges are kept.

    Takes (3, height + 2 * HALO, width), returns (3, height, width).  After Tomasi and Manduchi (ICCV 1998), with a
    rational range kernel; separable as in Pham and van Vliet (ICME 2005).  Does not block the host.
    """
    rows = planes.shape[-2] - 2 * HALO
    planes = widen(xp, cut(planes, -2, HALO - 2, rows + 4), -1, 2)
    for axis in (-1, -2):
        planes = _bilateral(planes, axis)
    return planes


def _bilateral(planes: Any, axis: int) -> Any:
    guide = luminance(planes) * (1 / RANGE)
    extent = planes.shape[axis] - 4
    total = cut(planes, axis, 2, extent) * 1.0
    weights = 1.0
    for distance, near in enumerate(NEIGHBOUR_WEIGHTS, start=1):
        similar = cut(guide, axis, distance, extent + 4 - distance) - cut(guide, axis, 0, extent + 4 - distance)
        similar *= similar
        similar += 1.0
        similar *= similar
        similar = near / similar  # one weight for each pair of pixels: used from both of its ends
        for start, weight in ((2 - distance, 2 - distance), (2 + distance, 2)):
            weight = cut(similar, axis, weight, extent)
            total += cut(planes, axis, start, extent) * weight
            weights = weights + weight
    total /= weights
    return total


def edges(xp: Any, planes: Any) -> Any:
    """Eight oriented derivative filters, each thinned along its own direction; the strongest remains, in 0..1.

    Takes (3, height + 2 * HALO, width), returns (height, width).  The filters are steered from two separable ones
    (Freeman and Adelson, 1991).  Does not block the host.
    """
    height, width = planes.shape[-2] - 2 * HALO, planes.shape[-1]
    grey = widen(xp, cut(luminance(planes), -2, HALO - 3, height + 6), -1, 3)
    across = _derivative(_smooth(grey, -2), -1)
    down = _derivative(_smooth(grey, -1), -2)
    strongest: Any = None
    for rows, columns in DIRECTIONS:
        length = (rows * rows + columns * columns) ** 0.5
        response = xp.abs(across * (columns / length) + down * (rows / length))
        thin = _thin(xp, response, (rows, columns), height, width)
        strongest = thin if strongest is None else xp.maximum(strongest, thin)
    strongest = strongest * strongest
    return strongest / (strongest + EDGE_CONTRAST**2)


def _thin(xp: Any, response: Any, direction: tuple[int, int], height: int, width: int) -> Any:
    """Fades what is lower than a neighbour along the direction; between two pixels, than their mean."""
    down, right = direction
    near, far = (down // 2, right // 2), (down - down // 2, right - right // 2)  # (1, 2): (0, 1) and (1, 1)
    neighbours = []
    for sign in (1, -1):
        parts = [
            response[1 + sign * row : 1 + sign * row + height, 1 + sign * column : 1 + sign * column + width]
            for row, column in ((near, far) if 2 in (abs(down), abs(right)) else (direction,))
        ]
        neighbours.append(parts[0] if len(parts) == 1 else (parts[0] + parts[1]) * 0.5)
    middle = response[1 : 1 + height, 1 : 1 + width]
    kept = middle - xp.maximum(*neighbours)
    kept /= middle * RIDGE_RAMP + 1e-6
    kept += 1.0
    return xp.clip(kept, 0.0, 1.0) * middle


def _smooth(grey: Any, axis: int) -> Any:
    extent = grey.shape[axis] - 4
    total = cut(grey, axis, 1, extent) + cut(grey, axis, 3, extent)
    total *= 4.0
    total += cut(grey, axis, 0, extent)
    total += cut(grey, axis, 4, extent)
    total += cut(grey, axis, 2, extent) * 6.0
    total *= 1 / 16
    return total


def _derivative(grey: Any, axis: int) -> Any:
    extent = grey.shape[axis] - 4
    total = cut(grey, axis, 3, extent) - cut(grey, axis, 1, extent)
    total *= 2.0
    total += cut(grey, axis, 4, extent)
    total -= cut(grey, axis, 0, extent)
    total *= 1 / 8
    return total


def tone(xp: Any, planes: Any) -> Any:
    """Lifts the shadows by the extended curve of Reinhard et al. (2002), keeping hue; (3, height, width) of uint8.

    Takes (3, height + 2 * HALO, width).  Does not block the host.
    """
    planes = cut(planes, -2, HALO, planes.shape[-2] - 2 * HALO)
    light = luminance(planes) * EXPOSURE
    gain = (light * (1 / WHITE**2) + 1.0) * EXPOSURE / (light + 1.0)
    return to_bytes(xp, planes * gain)


def corners(xp: Any, planes: Any) -> Any:
    """Harris' corner score of the luminance at two scales (Harris and Stephens 1988), the higher of both, in 0..1.

    Takes (3, height + 2 * HALO, width), returns (height, width) float32.  Does not block the host.
    """
    grey = widen(xp, luminance(planes), -1, HALO)
    across = (grey[1:-1, 2:] - grey[1:-1, :-2]) * 0.5
    down = (grey[2:, 1:-1] - grey[:-2, 1:-1]) * 0.5
    fine = [_smooth(_smooth(each, -1), -2) for each in (across * across, down * down, across * down)]
    coarse = [_smooth(_smooth(each, -1), -2) for each in fine]
    fine = [each[2:-2, 2:-2] for each in fine]
    best: Any = None
    for (xx, yy, xy), contrast in zip((fine, coarse), CORNER_CONTRAST, strict=True):
        trace = xx + yy
        score = xx * yy
        score -= xy * xy
        score -= trace * trace * HARRIS_K
        score = xp.clip(score, 0.0, None)
        score /= score + contrast
        best = score if best is None else xp.maximum(best, score)
    return best


def to_bytes(xp: Any, values: Any) -> Any:
    """Rounds 0..1 to 0..255 of uint8; what is outside is clipped.  Does not block the host."""
    return xp.asarray(xp.clip(values, 0.0, 1.0) * 255.0 + 0.5, dtype=xp.uint8)
