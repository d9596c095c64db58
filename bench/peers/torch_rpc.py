"""torch.distributed.rpc over TensorPipe as a side: rank 0 is this process, rank 1 a child of it, both on loopback."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as rpc

from bench.peers import torch_callee
from bench.side import end_with_parent, serve
from bench.workload import STRIDE

CALLER, CALLEE = "caller", "callee"


class TorchSide:
    """The caller's half; `worker` is the callee's process id."""

    def __init__(self, kind: str, source: int, target: int, worker: int) -> None:
        self.kind, self.source, self.target, self.worker = kind, source, target, worker
        self.device = torch.device("cpu") if kind == "host" else torch.device("cuda", source)

    def version(self) -> str:
        """torch's version and the devices."""
        where = "cpu" if self.kind == "host" else f"cuda:{self.source} -> cuda:{self.target}"
        return f"torch {torch.__version__} RPC (TensorPipe), {where}"

    def array(self, words: int, memory: str = "") -> torch.Tensor:
        """A tensor with its index as contents, in memory of torch's own allocator."""
        return torch.arange(words, dtype=torch.int32, device=self.device)

    def host_array(self, words: int) -> torch.Tensor:
        """A CPU tensor."""
        return torch.arange(words, dtype=torch.int32)

    def stamp(self, array: torch.Tensor, number: int) -> torch.Tensor:
        """Fills every STRIDE-th word."""
        array[::STRIDE].fill_(number)
        return array

    def free(self, future: Any) -> None:
        """Nothing: torch does not say when what was sent may be written."""

    def numpy(self, array: torch.Tensor) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        return np.array(array.cpu().numpy())

    def synchronize(self) -> None:
        """Waits for the current stream; nothing on the host."""
        if self.kind != "host":
            torch.cuda.current_stream(self.source).synchronize()

    def call(self, name: str, *args: Any) -> Any:
        """`rpc_sync`."""
        return rpc.rpc_sync(CALLEE, getattr(torch_callee, name), args)

    def submit(self, name: str, *args: Any, lent: bool = False) -> Any:
        """`rpc_async`; torch takes no snapshot, so `lent` changes nothing."""
        return rpc.rpc_async(CALLEE, getattr(torch_callee, name), args)

    def result(self, future: Any) -> Any:
        """The future's `wait`."""
        return future.wait()

    def copy_ceiling(self, nbytes: int, count: int) -> float:
        """Copies with one `copy_` after the other; needs both devices in this process."""
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source, device=torch.device("cuda", self.target))
        begin = 0.0
        for number in range(count + 3):
            if number == 3:
                torch.cuda.synchronize(self.source)
                torch.cuda.synchronize(self.target)
                begin = time.perf_counter()
            target.copy_(source)
        torch.cuda.synchronize(self.source)
        torch.cuda.synchronize(self.target)
        return count * nbytes / (time.perf_counter() - begin)


def join(name: str, rank: int, store: str, kind: str, source: int, target: int) -> None:
    """Joins the pair; the caller declares the device map."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=120, init_method=f"file://{store}")
    if kind != "host":
        if rank == 0:
            options.set_device_map(CALLEE, {source: target})
            torch.cuda.set_device(source)
        else:
            options.set_device_map(CALLER, {target: source})
            torch.cuda.set_device(target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ProcessGroup.*")  # RPC's own use of a deprecated class
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


@contextmanager
def pair(kind: str, source: int, target: int) -> Iterator[TorchSide]:
    """Both ranks, ended together."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        command = [sys.executable, "-m", "bench.peers.torch_rpc", "--callee", store]
        command += ["--device", kind, "--pair", f"{source},{target}"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)
        try:
            join(CALLER, 0, store, kind, source, target)
            yield TorchSide(kind, source, target, child.pid)
            rpc.shutdown()
        finally:
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def main() -> int:
    """Rank 1 with `--callee STORE`, else the side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pair", default="0,0")
    parser.add_argument("--callee")
    args = parser.parse_args()
    source, target = map(int, args.pair.split(","))
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if args.callee:
        end_with_parent()
        join(CALLEE, 1, args.callee, args.device, source, target)
        rpc.shutdown()
        return 0
    return serve(lambda: pair(args.device, source, target))


if __name__ == "__main__":
    sys.exit(main())
