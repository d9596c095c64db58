"""streamrt as a side: this process calls one worker of its own, NumPy arrays on the host and CuPy's on GPUs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import transport
from bench.peers import streamrt_callee
from bench.report import versions
from bench.side import serve
from bench.workload import STRIDE
from streamrt import memory


class StreamrtSide:
    """The caller's half; `worker` is the callee's process id."""

    def __init__(self, kind: str, source: int, target: int, peer: transport.LocalWorker) -> None:
        self.kind, self.source, self.target, self.peer = kind, source, target, peer
        self.worker = peer.process.pid
        self.library: Any = np
        if kind == "cuda":
            import cupy

            self.library = cupy
            cupy.cuda.Device(source).use()

    def version(self) -> str:
        """streamrt's version, its array library and the devices."""
        arrow = f"{self.kind}:{self.source} -> {self.kind}:{self.target}"
        return (
            f"streamrt {versions().get('streamrt', '?')} ({self.library.__name__} {self.library.__version__}), {arrow}"
        )

    def array(self, words: int, memory: str = "") -> Any:
        """An array with its index as contents; `memory` names another library's, or another allocator."""
        if memory == "JAX":
            import jax

            return jax.numpy.arange(words, dtype=np.int32, device=jax.devices()[self.source])
        if memory == "expandable segments":
            import torch

            return torch.arange(words, dtype=torch.int32, device=f"cuda:{self.source}")
        if memory == "async pool":
            with self.library.cuda.using_allocator(self.library.cuda.MemoryAsyncPool().malloc):
                return self.library.arange(words, dtype=np.int32)
        return self.library.arange(words, dtype=np.int32)

    def host_array(self, words: int) -> Any:
        """A NumPy array."""
        return np.arange(words, dtype=np.int32)

    def stamp(self, array: Any, number: int) -> Any:
        """Fills every STRIDE-th word."""
        if hasattr(array, "at"):  # JAX's arrays never change
            return array.at[::STRIDE].set(number).block_until_ready()
        array[::STRIDE] = number
        if type(array).__module__ == "torch":  # `synchronize` waits for CuPy's stream
            import torch

            torch.cuda.synchronize(array.device)
        return array

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        return np.array(array) if isinstance(array, np.ndarray) else self.library.asnumpy(array)

    def synchronize(self) -> None:
        """Waits for the current stream; nothing on the host."""
        if self.kind == "cuda":
            self.library.cuda.get_current_stream().synchronize()

    def call(self, name: str, *args: Any) -> Any:
        """`Peer.call`."""
        return self.peer.call(getattr(streamrt_callee, name), *args)

    def submit(self, name: str, *args: Any, lent: bool = False) -> Any:
        """`Peer.submit`, with a snapshot unless lent."""
        return self.peer.submit(getattr(streamrt_callee, name), *args, copy=not lent)

    def result(self, future: Any) -> Any:
        """The future's `result`: ordered on the current stream."""
        return future.result()

    def free(self, future: Any) -> None:
        """The future's `sent`."""
        future.sent.result()

    def copy_ceiling(self, nbytes: int, count: int) -> float:
        """Copies with CuPy from device to device, one after the other."""
        cupy = self.library
        source = cupy.zeros(nbytes, dtype=cupy.uint8)
        with cupy.cuda.Device(self.target):
            target = cupy.empty(nbytes, dtype=cupy.uint8)
        stream = cupy.cuda.get_current_stream()
        target.data.copy_from_device_async(source.data, nbytes, stream)
        stream.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            target.data.copy_from_device_async(source.data, nbytes, stream)
        stream.synchronize()
        return count * nbytes / (time.perf_counter() - begin)


@contextmanager
def pair(kind: str, source: int, target: int) -> Iterator[StreamrtSide]:
    """One worker, ended with this process."""
    with transport.local_workers(1, devices=[f"{kind}:{target}"]) as workers:
        yield StreamrtSide(kind, source, target, workers[0])


def main() -> int:
    """The side."""
    memory.set_snapshot_limit(4 << 30)  # the largest row has 2 GiB in flight
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pair", default="0,0")
    args = parser.parse_args()
    source, target = map(int, args.pair.split(","))
    return serve(lambda: pair(args.device, source, target))


if __name__ == "__main__":
    sys.exit(main())
