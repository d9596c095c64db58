"""The functions that streamrt's worker runs; sent by name, and alike for NumPy and CuPy arrays."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import transport
from bench.workload import STRIDE, load

__all__ = ["add_up", "double", "echo", "ends", "load", "total"]

_service = transport.Service()  # says that `ends` borrows
_SLOTS = 4096
_making = threading.Lock()
_host_sums = np.zeros(_SLOTS, dtype=np.int64)
_device_sums: dict[int, Any] = {}
_kernels: dict[int, Any] = {}

# One block a call: a CuPy reduction over a strided view costs several times its launch.
_SOURCE = r"""
extern "C" __global__ void add_up(const int* x, long long words, int stride, long long* sums, int slot) {
    __shared__ long long part[256];
    long long sum = 0;
    for (long long i = (long long)threadIdx.x * stride; i < words; i += 256LL * stride) sum += x[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[slot] = part[0];
}
"""


def echo(x: Any) -> Any:
    """The argument."""
    return x


@_service.function(borrow=True)
def ends(x: Any) -> int:
    """The sum of the first and the last word, read where they lie."""
    return int(x[0]) + int(x[-1])


def double(x: Any) -> Any:
    """Twice the argument."""
    return x * 2


def add_up(x: Any, slot: int) -> None:
    """Sums the stamped words into a slot of its own: calls run on different streams, so a shared sum would race."""
    if isinstance(x, np.ndarray):
        _host_sums[slot] = x[::STRIDE].sum(dtype=np.int64)
        return
    index = x.device.id
    with _making:  # the first calls come together
        if index not in _kernels:
            _prepare(index)
    _kernels[index]((1,), (256,), (x, np.int64(x.size), np.int32(STRIDE), _device_sums[index], np.int32(slot)))


def _prepare(index: int) -> None:
    import cupy

    with cupy.cuda.Device(index):
        _device_sums[index] = cupy.zeros(_SLOTS, dtype=cupy.int64)
        cupy.cuda.get_current_stream().synchronize()
        kernel = cupy.RawKernel(_SOURCE, "add_up")
        kernel.compile()
        _kernels[index] = kernel


def total(slots: int) -> int:
    """The sum over the slots, when all that was enqueued is done."""
    result = int(_host_sums[:slots].sum())
    _host_sums[:] = 0
    for index, sums in _device_sums.items():
        import cupy

        with cupy.cuda.Device(index) as device:
            device.synchronize()
            result += int(sums[:slots].sum())
            sums[:] = 0
            cupy.cuda.get_current_stream().synchronize()
    return result
