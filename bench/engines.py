"""Engines as TensorRT's are: torch operators with a stream of their own, for tests, `bench.guards` and the examples.

An engine multiplies its input, and takes as long about it as it is told.  On the default stream it runs on a private
stream, fenced in and out by events (edges "engine.enter", "engine.exit"), or, as `synchronizing` says, with the host
waiting for it; on any other current stream it runs there, with no fence.  `shift` is an ordinary operation on the
current stream, as what lies between engines is.

On a GPU the engine is a kernel that CuPy compiles, and a call costs the host little more than its launch: streams,
events, numbers and the device's name are kept.  On the host backend both are functions launched on streams, where
torch's own operators would touch the memory at once; on the plain CPU they are what torch does.

``scale(x, factor, us=0, synchronizing=False)`` is ``x * factor``; ``shift(x, amount)`` is ``x + amount``.  Both are
float32 and enqueue on the current stream, `scale` on its private one where that is the default stream.  The host is
blocked by a `synchronizing` engine alone.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, NamedTuple

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
GRID, BLOCK = (8,), (256,)


class _Private(threading.local):
    """A thread's engine streams, by device, each with the event of its fences."""

    def __init__(self) -> None:
        self.streams: dict[streamrt.Device, tuple[streamrt.Stream, streamrt.Event]] = {}

    def of(self, device: streamrt.Device) -> tuple[streamrt.Stream, streamrt.Event]:
        found = self.streams.get(device)
        if found is None:
            found = self.streams[device] = (streamrt.Stream(device), streamrt.Event(device))
        return found


_private = _Private()
engine_calls: list[bool] = []
"""For each engine call, whether it took its private stream.  Whoever reads it clears it."""


def _scale(x: torch.Tensor, factor: float, us: float = 0.0, synchronizing: bool = False) -> torch.Tensor:
    if x.is_cuda:
        return _scale_on_gpu(x, factor, us, synchronizing)
    device = streamrt.device_of(x)
    if not device.has_streams:
        engine_calls.append(False)
        return x * factor
    current = streamrt.current_stream(device)
    private = current.handle == 0  # the host backend calls the default stream so
    engine_calls.append(private)
    x = x.contiguous()
    out = _empty_like(x, device)
    stream = current
    if private:
        stream, event = _private.of(device)
        stream.wait_by(event, current, edge="engine.enter")
    source, target = x.numpy(), out.numpy()
    stream.launch(_multiply, source, target, factor, us, reads=(source,), writes=(target,))
    if private and synchronizing:
        stream.synchronize()
    elif private:
        current.wait_by(event, stream, edge="engine.exit")
    return out


def _scale_on_gpu(x: torch.Tensor, factor: float, us: float, synchronizing: bool) -> torch.Tensor:
    index = x.get_device()
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return _scale_on_gpu(x, factor, us, synchronizing)
    gpu = _gpu(index)
    handle = torch._C._cuda_getCurrentRawStream(index)
    private = handle == 0  # torch calls the default stream so
    engine_calls.append(private)
    x = x.contiguous()
    out = torch.empty_like(x)
    arguments = (x.data_ptr(), out.data_ptr(), *_numbers(factor, x.numel(), us))
    if not private:
        gpu.kernel(GRID, BLOCK, arguments, stream=_named(handle))
        return out
    stream, event = _private.of(gpu.device)
    stream.wait_by(event, gpu.default, edge="engine.enter")
    own = _named(stream.handle)
    gpu.kernel(GRID, BLOCK, arguments, stream=own)
    if synchronizing:
        own.synchronize()
    else:
        gpu.default.wait_by(event, stream, edge="engine.exit")
    return out


def _shift(x: torch.Tensor, amount: float) -> torch.Tensor:
    device = streamrt.device_of(x)
    if device.kind != "host":
        return x + amount
    out = _empty_like(x, device)
    source, target = x.numpy(), out.numpy()
    current = streamrt.current_stream(device)
    current.launch(np.add, source, np.float32(amount), target, reads=(source,), writes=(target,))
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


def _empty_like(x: torch.Tensor, device: streamrt.Device) -> torch.Tensor:
    made: torch.Tensor = streamrt.empty(tuple(x.shape), "float32", device, arrays="torch")
    return made


class _Gpu(NamedTuple):
    """A GPU, its default stream, and the kernel, compiled and loaded for it."""

    device: streamrt.Device
    default: streamrt.Stream
    kernel: Any


@functools.cache
def _gpu(index: int) -> _Gpu:
    import cupy

    device = streamrt.open_device(streamrt.Device("cuda", index))
    with cupy.cuda.Device(index):
        kernel = cupy.RawModule(code=SOURCE).get_function("scale")
    return _Gpu(device, streamrt.Stream.borrow(0, device), kernel)


@functools.lru_cache(maxsize=64)
def _named(handle: int) -> Any:
    """The stream as CuPy's launches take it: no more than its handle."""
    import cupy

    return cupy.cuda.ExternalStream(handle)


@functools.lru_cache(maxsize=64)
def _numbers(factor: float, count: int, us: float) -> tuple[Any, ...]:
    """A kernel's numbers, of the types that it declares."""
    return np.float32(factor), np.int64(count), np.uint64(us * 1000)


def _multiply(source: Any, target: Any, factor: float, us: float) -> None:
    """Runs in a queue of the host backend."""
    if us:
        time.sleep(us * 1e-6)
    np.multiply(source, np.float32(factor), out=target)
