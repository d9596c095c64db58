# requires: torch
"""One guard around all engines of a torch graph, with breaks between them. Torch-TensorRT's engines if it is there."""

from __future__ import annotations

import importlib.util

import torch

import streamrt
from bench import engines
from streamrt.torch_graphs import GuardedModule, guard_engines


class Model(torch.nn.Module):
    """Two layers that become engines, and a sine between that stays with torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Layer, break, layer."""
        return self.second(torch.sin(self.first(x)))


def with_tensorrt() -> None:
    """Torch-TensorRT compiles the model, with a graph break; its engines are found by themselves."""
    import torch_tensorrt

    model, x = Model().eval().cuda(), torch.rand(8, 64, device="cuda")
    compiled = torch_tensorrt.compile(
        model, ir="dynamo", inputs=[x], min_block_size=1, torch_executed_ops={"torch.ops.aten.sin.default"}
    )
    guarded = guard_engines(compiled)
    print(guarded.report)
    torch.testing.assert_close(guarded(x), model(x), rtol=1e-2, atol=1e-2)


def with_our_engine() -> None:
    """The same with an engine of `bench/engines.py`, which fences itself on the default stream as TensorRT's do."""

    def graph(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = engines.shift(engines.scale(x, 2.0), 1.0)
        return x

    device = streamrt.open_device("auto")
    x = streamrt.array([1.0, 2.0], device, dtype="float32", arrays="torch")
    guarded: GuardedModule = guard_engines(torch.fx.symbolic_trace(graph), engines.is_engine)
    print(guarded.report)
    y = guarded(x)  # one fence in and one out; torch.compile(guarded) keeps them
    streamrt.current_stream(device).synchronize()
    assert y.tolist() == [511.0, 767.0]


def main() -> None:
    """Takes what is there."""
    if importlib.util.find_spec("torch_tensorrt") is not None and torch.cuda.is_available():
        with_tensorrt()
    else:
        print("Torch-TensorRT is not installed here, or there is no GPU: an engine of our own takes its place")
    with_our_engine()


if __name__ == "__main__":
    main()
