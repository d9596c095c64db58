"""Engines as TensorRT's are: torch operators with a stream of their own, for tests, `bench.guards` and the examples.

An engine multiplies its input, and takes as long about it as it is told.  On the default stream it runs on a private
stream, fenced in and out by events (edges "engine.enter", "engine.exit"), or, as `synchronizing` says, with the host
waiting for it; on any other current stream it runs there, with no fence.  `shift` is an ordinary operation on the
current stream, as what lies between engines is.

On a GPU the engine is a kernel that CuPy compiles.  On the host backend both are functions launched on streams, where
torch's own operators would touch the memory at once; on the plain CPU they are what torch does.

``scale(x, factor, us=0, synchronizing=False)`` is ``x * factor``; ``shift(x, amount)`` is ``x + amount``.  Both are
float32 and enqueue on the current stream, `scale` on its private one where that is the default stream.  The host is
blocked by a `synchronizing` engine alone.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import numpy as np
import torch

import streamrt

__all__ = ["SOURCE", "engine_calls", "is_engine", "scale", "shift"]

SOURCE = r"""
extern "C" __global__ void scale(const float* x, float* out, float factor, long long count, unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ns);
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) out[i] = x[i] * factor;
}
"""
THREADS, BLOCKS = 256, 8


class _Private(threading.local):
    """A thread's engine streams, by device."""

    def __init__(self) -> None:
        self.streams: dict[streamrt.Device, streamrt.Stream] = {}

    def of(self, device: streamrt.Device) -> streamrt.Stream:
        if device not in self.streams:
            self.streams[device] = streamrt.Stream(device)
        return self.streams[device]


_private = _Private()
engine_calls: list[bool] = []
"""For each engine call, whether it took its private stream.  Whoever reads it clears it."""


def _scale(x: torch.Tensor, factor: float, us: float = 0.0, synchronizing: bool = False) -> torch.Tensor:
    device = _gpu(x.get_device()) if x.is_cuda else streamrt.device_of(x)
    if not device.has_streams:
        engine_calls.append(False)
        return x * factor
    current = _current(device)
    private = current.handle == 0  # torch and the host backend call the default stream so
    engine_calls.append(private)
    x = x.contiguous()
    out = _empty_like(x, device)
    stream = _private.of(device) if private else current
    if private:
        stream.wait(current, edge="engine.enter")
    _launch(stream, x, out, factor, us)
    if private and synchronizing:
        stream.synchronize()
    elif private:
        current.wait(stream, edge="engine.exit")
    return out


def _shift(x: torch.Tensor, amount: float) -> torch.Tensor:
    device = streamrt.device_of(x)
    if device.kind != "host":
        return x + amount
    out = _empty_like(x, device)
    source, target = x.numpy(), out.numpy()
    _current(device).launch(np.add, source, np.float32(amount), target, reads=(source,), writes=(target,))
    return out


def _fake(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library = torch.library.Library("engines", "DEF")
_library.define("scale(Tensor x, float factor, float us=0., bool synchronizing=False) -> Tensor")
_library.define("shift(Tensor x, float amount) -> Tensor")
for _name, _function in (("scale", _scale), ("shift", _shift)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"engines::{_name}", _fake, lib=_library)
scale = torch.ops.engines.scale.default
shift = torch.ops.engines.shift.default


def is_engine(node: torch.fx.Node) -> bool:
    """Whether a node of a graph calls `scale`.  Does not touch the device."""
    return node.target in (scale, torch.ops.engines.scale)


@functools.cache
def _gpu(index: int) -> streamrt.Device:
    return streamrt.open_device(streamrt.Device("cuda", index))


def _current(device: streamrt.Device) -> streamrt.Stream:
    """torch's current stream, or the host backend's."""
    if device.kind == "cuda":
        return streamrt.Stream.borrow(torch._C._cuda_getCurrentRawStream(device.index), device)
    return streamrt.current_stream(device)


def _empty_like(x: torch.Tensor, device: streamrt.Device) -> torch.Tensor:
    if device.kind == "cuda":
        return torch.empty_like(x)
    made: torch.Tensor = streamrt.empty(tuple(x.shape), "float32", device, arrays="torch")
    return made


def _launch(stream: streamrt.Stream, x: torch.Tensor, out: torch.Tensor, factor: float, us: float) -> None:
    if stream.device.kind == "host":
        source, target = x.numpy(), out.numpy()
        stream.launch(_multiply, source, target, factor, us, reads=(source,), writes=(target,))
        return
    numbers = (np.float32(factor), np.int64(x.numel()), np.uint64(us * 1000))
    arguments = (np.uint64(x.data_ptr()), np.uint64(out.data_ptr()), *numbers)
    kernel, current = _kernel(stream.device.index)
    if current().ptr == stream.handle:  # as in a guard, which moves CuPy's current stream with torch's
        kernel((BLOCKS,), (THREADS,), arguments)
    else:
        stream.launch(kernel, (BLOCKS,), (THREADS,), arguments)


def _multiply(source: Any, target: Any, factor: float, us: float) -> None:
    """Runs in a queue of the host backend."""
    if us:
        time.sleep(us * 1e-6)
    np.multiply(source, np.float32(factor), out=target)


@functools.cache
def _kernel(index: int) -> tuple[Any, Any]:
    """The kernel, compiled and loaded for one GPU, and CuPy's current stream, on which CuPy launches it."""
    import cupy

    with cupy.cuda.Device(index):
        return cupy.RawModule(code=SOURCE).get_function("scale"), cupy.cuda.get_current_stream
