# requires: core
"""Three stages in three processes, a few frames in flight; an error names its stage and frame."""

from __future__ import annotations

import numpy as np

import transport


def denoise(frame: np.ndarray) -> np.ndarray:
    """An average over the four neighbours."""
    return (frame + np.roll(frame, 1, 0) + np.roll(frame, -1, 0) + np.roll(frame, 1, 1) + np.roll(frame, -1, 1)) / 5


def edges(frame: np.ndarray) -> np.ndarray:
    """The length of the gradient."""
    down, across = np.gradient(frame)
    return np.hypot(down, across)


def score(frame: np.ndarray) -> float:
    """One number a frame."""
    return float(frame.mean())


def main() -> None:
    """Maps frames through the chain, in order."""
    frames = [np.random.default_rng(seed).random((256, 256)) for seed in range(12)]
    stages = [transport.stage(function, device="host:0") for function in (denoise, edges, score)]
    with transport.pipeline(*stages, in_flight=4) as chain:
        scores = list(chain.map(frames))
    assert np.allclose(scores, [score(edges(denoise(frame))) for frame in frames])
    print("scores:", " ".join(f"{value:.4f}" for value in scores))


if __name__ == "__main__":
    main()
