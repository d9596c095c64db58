"""What the tests of guards in torch graphs share: tensors on a device, what was waited for, and what is current."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import streamrt
from streamrt import hooks, memory
from streamrt.device import Device, open_device
from streamrt.errors import UnavailableError
from streamrt.stream import Stream

WATCHDOG = 30.0  # seconds; what has not come by then hangs
ON_ONE = [pytest.param("host:0", id="host"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]
EVERYWHERE = [pytest.param("cpu", id="cpu"), *ON_ONE]
PLAIN = ["eager", "aot_eager"]
COMPILER = shutil.which("g++") or shutil.which("clang++")
INDUCTOR = pytest.param(
    "inductor",
    marks=[pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler on the CPU")],
)
BACKENDS = [*PLAIN, INDUCTOR]
QUIET = [  # torch's own, about itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def opened(name: str) -> Device:
    """The device; the test is skipped where its backend is missing, or torch has no such device."""
    try:
        device = open_device(name)
    except UnavailableError as error:
        pytest.skip(str(error))
    if device.kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return device


def tensor(device: Device, *values: float) -> torch.Tensor:
    """A float32 tensor with these values, there already."""
    if device.kind == "cuda":
        made = torch.tensor(values, device=str(device))
        torch.cuda.synchronize(device.index)
        return made
    made = streamrt.empty((len(values),), "float32", device, arrays="torch")
    made.copy_(torch.tensor(values))
    return made


def assign(x: torch.Tensor, value: float) -> None:
    """Enqueues on the default stream that all elements become `value`."""
    if x.is_cuda:
        x.fill_(value)
    else:
        default(streamrt.device_of(x)).launch(x.numpy().fill, value, writes=(x.numpy(),))


def default(device: Device) -> Stream:
    """The default stream."""
    return Stream.borrow(0, device)


def current(device: Device) -> Stream:
    """The current stream: torch's on a GPU."""
    if device.kind == "cuda":
        return Stream.borrow(torch.cuda.current_stream(device.index).cuda_stream, device)
    return streamrt.current_stream(device)


def values(x: torch.Tensor) -> list[float]:
    """The values; the caller has synchronized."""
    return [float(value) for value in x.detach().cpu()]


def let_go() -> None:
    """Ends what these tests leave to be collected some time: compiled code, and arrays that it held."""
    torch._dynamo.reset()
    gc.collect()
    memory.drain(everything=True)


@contextmanager
def waits() -> Iterator[list[str]]:
    """The names of all waits that are enqueued inside."""
    seen: list[str] = []

    def watch(record: hooks.Record) -> None:
        if isinstance(record, hooks.Waited) and record.edge:
            seen.append(record.edge)

    remove = hooks.listen(watch)
    try:
        yield seen
    finally:
        remove()


def targets(module: Any) -> list[str]:
    """What the nodes of a graph call, in their order."""
    return [
        str(getattr(node.target, "__name__", node.target)) for node in module.graph.nodes if node.op.startswith("call")
    ]
