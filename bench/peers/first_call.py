"""A fresh process up to its first calls, with streamrt or with torch RPC: when what was there, and what a worker takes.

Prints one JSON object: milliseconds of each step, MiB of the worker, percent of a core of both ends while nothing is
called.  Both libraries do the same: import; the first array on the device, where that is a GPU; start the other process
and connect; a call of 4 B; a call of 64 MiB there and back; and that again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

MODULES = {"streamrt": "bench.peers.streamrt_rpc", "torch": "bench.peers.torch_rpc"}
LARGE_WORDS = 16 << 20
SETTLE_SECONDS = 1.0  # before what an idle process takes is measured
MIB = 1 << 20


def cpu_seconds(pid: int) -> float:
    """The time on processors that a process has taken so far, all its threads together."""
    return time.clock_gettime(~pid << 3 | 2)  # Linux's clock of another process's scheduled time


def idle(pids: list[int], seconds: float) -> list[float]:
    """What each process takes of a core while this one sleeps, in percent."""
    time.sleep(SETTLE_SECONDS)
    before = [cpu_seconds(pid) for pid in pids]
    begin = time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - begin
    return [100 * (cpu_seconds(pid) - was) / elapsed for pid, was in zip(pids, before, strict=True)]


def resident(pid: int) -> dict[str, float]:
    """A process's memory in MiB: all its pages (`rss`); and shared ones divided among those that map them (`pss`)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {
        line.split(":")[0].lower(): int(line.split()[1]) / 1024 for line in lines if line.startswith(("Rss", "Pss:"))
    }
    return {"rss": found["rss"], "pss": found["pss"]}


class Gpu:
    """The caller's GPU and how much of the callee's is free."""

    def __init__(self, library: str, source: int, target: int) -> None:
        """Makes the first array, and so the context."""
        self.target = target
        self.free: Callable[[], int]
        if library == "torch":
            import torch

            torch.ones(1, device=f"cuda:{source}")
            torch.cuda.synchronize(source)
            self.free = lambda: int(torch.cuda.mem_get_info(target)[0])
        else:
            import cupy

            with cupy.cuda.Device(source) as device:
                cupy.ones(1)
                device.synchronize()
            self.free = lambda: int(cupy.cuda.Device(target).mem_info[0])


def first_call(library: str, kind: str, source: int, target: int, since: float, seconds: float) -> dict[str, Any]:
    """The figures; `since` is when this process was started, by the system's monotonic clock."""
    steps: dict[str, float] = {}

    def step(name: str, action: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = action()
        steps[name] = 1e3 * (time.perf_counter() - begin)
        return result

    module = step("import", lambda: importlib.import_module(MODULES[library]))
    gpu = step("device", lambda: Gpu(library, source, target)) if kind == "cuda" else None
    free = 0 if gpu is None else gpu.free()
    with ExitStack() as stack:
        side = step("connect", lambda: stack.enter_context(module.pair(kind, source, target)))
        array = side.array(1)
        side.stamp(array, 21)
        side.synchronize()

        def call(name: str, array: Any) -> Any:
            reply = side.call(name, array)
            side.synchronize()
            return reply

        doubled = step("call", lambda: call("double", array))
        steps["all"] = 1e3 * (time.monotonic() - since)
        if int(side.numpy(doubled)[0]) != 42:
            raise ValueError(f"the first call came back with {side.numpy(doubled)}")
        worker = resident(side.worker)
        used = None if gpu is None else (free - gpu.free()) / MIB
        large = side.array(LARGE_WORDS)
        for name in ("large", "large again"):
            side.stamp(large, 7)
            side.synchronize()
            back = step(name, lambda: call("echo", large))
            if int(side.numpy(back[-1:])[0]) != LARGE_WORDS - 1 or int(side.numpy(back[:1])[0]) != 7:
                raise ValueError(f"the array of the step {name!r} came back with other bytes")
            del back
        own, theirs = idle([os.getpid(), side.worker], seconds)
    if library == "streamrt":
        steps["connect to one that runs"] = reached(f"{kind}:{target}")
    return {"steps": steps, **worker, "gpu": used, "idle": own, "idle worker": theirs}


def reached(device: str) -> float:
    """Milliseconds to connect to a worker that listens already."""
    import transport
    from bench.peers import agent_side

    with tempfile.TemporaryDirectory() as folder, agent_side.worker(os.path.join(folder, "worker"), device):
        begin = time.perf_counter()
        with transport.connect(f"unix://{folder}/worker"):
            return 1e3 * (time.perf_counter() - begin)


def main() -> int:
    """Prints the figures of one library."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=tuple(MODULES))
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pair", default="0,0")
    parser.add_argument("--since", type=float, default=time.monotonic())
    parser.add_argument("--idle", type=float, default=3.0, help="seconds")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    source, target = map(int, args.pair.split(","))
    answers.write(json.dumps(first_call(args.library, args.device, source, target, args.since, args.idle)) + "\n")
    answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
