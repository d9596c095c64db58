# requires: core
"""Two worker processes of one's own: any function may be sent to them, and calls overlap."""

from __future__ import annotations

import numpy as np

import transport


def smooth(image: np.ndarray, rounds: int) -> np.ndarray:
    """Repeated averages with the neighbours; NumPy arrays on the host, CuPy's on a GPU, the same code."""
    for _ in range(rounds):
        image = (image + image[::-1] + image[:, ::-1]) / 3
    return image


def main() -> None:
    """Sends one image to each worker and compares with the same function run here."""
    images = [np.random.default_rng(seed).random((512, 512)) for seed in range(2)]
    with transport.local_workers(2, devices=["host:0", "host:1"]) as workers:
        futures = [worker.submit(smooth, image, rounds=20) for worker, image in zip(workers, images, strict=True)]
        results = [future.result() for future in futures]
    for image, result in zip(images, results, strict=True):
        assert np.allclose(result, smooth(image, 20))
    print("both workers returned what this process computes itself")


if __name__ == "__main__":
    main()
