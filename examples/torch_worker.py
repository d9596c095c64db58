# requires: torch
"""torch tensors there and back: the worker's functions get tensors, and so does the caller."""

from __future__ import annotations

import torch

import transport


def gram(x: torch.Tensor) -> torch.Tensor:
    """A matrix product in the worker."""
    return x @ x.T


def main() -> None:
    """Calls the worker with a tensor; on a machine with GPUs, say devices=["cuda:0"] and x.cuda()."""
    x = torch.rand(256, 128)
    with transport.local_workers(1, devices=["host:0"], arrays="torch") as workers:
        y = workers[0].call(gram, x)
    assert isinstance(y, torch.Tensor)
    assert torch.allclose(y, x @ x.T)
    print("a torch tensor came back:", tuple(y.shape), y.dtype)


if __name__ == "__main__":
    main()
