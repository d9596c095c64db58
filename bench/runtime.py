"""What the runtime's operations cost the host, against the same by hand: ``python -m bench.runtime``.

All sides run in this process, in turns of a few hundred calls; before each turn the device is idle, so that no side
pays for a full queue.  On the host backend there is nothing to compare with, and the rows stand alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import streamrt
from bench.peers.by_hand import SNAPSHOT_BYTES, Operations, cupy_operations, torch_operations
from bench.report import Row, judged, load_goals, save, show

NAMES = ("lease", "guard", "record and wait", "future wait", *SNAPSHOT_BYTES)
CALLS = 200  # a turn; well below the depth of a driver's queue
NESTED = 20  # guards inside one guard, whose cost is the difference


def our_operations(device: streamrt.Device) -> Operations:
    """The same operations with streamrt, on one device."""
    library: Any = np
    if device.kind == "cuda":
        import cupy

        library = cupy
    pool = streamrt.StreamPool(device)
    one, two = streamrt.Stream(device), streamrt.Stream(device)
    event = streamrt.Event(device)

    def lease() -> None:
        pool.lease().release()

    def guard() -> None:
        with streamrt.using(one):
            pass

    def record_and_wait() -> None:
        one.record(event)
        two.wait(event)

    future: streamrt.DeviceFuture[Any] = streamrt.DeviceFuture()
    future.set_result(library.zeros(1, dtype=library.float32))
    operations: Operations = {
        "lease": lease,
        "guard": guard,
        "record and wait": record_and_wait,
        "future wait": partial(future.wait, non_blocking=True),
    }
    for name, nbytes in SNAPSHOT_BYTES.items():
        operations[name] = partial(streamrt.snapshot, [library.zeros(nbytes, dtype=library.uint8)])
    return operations


def guard_operations(device: streamrt.Device) -> Operations:
    """`compute_stream` from the default stream, and inside itself, with one array."""
    library: Any = np
    if device.kind == "cuda":
        import cupy

        library = cupy
    x: Any = library.zeros(256, dtype=library.float32)
    if device.kind == "host":
        x = streamrt.array(x, device)
    outer = streamrt.compute_stream(x)

    def guard() -> None:
        with streamrt.compute_stream(x):
            pass

    def nested() -> None:
        with outer:
            for _ in range(NESTED):
                with streamrt.compute_stream(x):
                    pass

    return {"compute stream": guard, "compute stream inside itself": nested}


def guard_rows(device: streamrt.Device, idle: Callable[[], None], turns: int, loaded: str) -> list[Row]:
    """What a guard costs with the libraries that are loaded now."""
    operations = guard_operations(device)
    times: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(turns + 1):
        for name, operation in operations.items():
            microseconds = timed(operation, idle)
            if turn:
                times[name].append(microseconds)
    outer, nested = (statistics.median(values) for values in times.values())
    return [
        Row(f"compute stream, {loaded}", "us", outer),
        Row(f"compute stream inside itself, {loaded}", "us", (nested - outer) / NESTED),
    ]


def timed(operation: Callable[[], Any], idle: Callable[[], None]) -> float:
    """Microseconds a call, over one turn."""
    idle()
    begin = time.perf_counter()
    for _ in range(CALLS):
        operation()
    elapsed = time.perf_counter() - begin
    idle()
    return elapsed / CALLS * 1e6


def compare(sides: dict[str, Operations], idle: Callable[[], None], turns: int) -> list[Row]:
    """One row for each operation and peer."""
    peers = [name for name in sides if name != "streamrt"]
    rows = []
    for name in NAMES:
        times: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(turns + 1):
            for side in sides if turn % 2 else reversed(sides):
                microseconds = timed(sides[side][name], idle)
                if turn:  # the first turn warms up
                    times[side].append(microseconds)
        medians = {side: statistics.median(values) for side, values in times.items()}
        if not peers:
            rows.append(Row(name, "us", medians["streamrt"]))
        rows += [Row(f"{name}, {peer} by hand", "us", medians["streamrt"], medians[peer]) for peer in peers]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(prog="python -m bench.runtime", description=__doc__)
    parser.add_argument(
        "--device", default="auto", help="host, cuda, or one with its index; where there is a GPU, cuda"
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    device = streamrt.open_device(args.device)
    sides: dict[str, Operations] = {"streamrt": our_operations(device)}
    idle: Callable[[], None] = lambda: None  # noqa: E731 - the host backend's queues are empty between turns
    guards: list[Row] = []
    if device.kind == "cuda":
        import cupy

        cupy.cuda.Device(device.index).use()
        idle = cupy.cuda.Device(device.index).synchronize
        sides["CuPy"] = cupy_operations()
        guards += guard_rows(device, idle, args.turns, "CuPy alone" if "torch" not in sys.modules else "torch loaded")
        try:
            import torch
        except ImportError:
            print("torch is not installed: no rows against it")
        else:
            torch.cuda.set_device(device.index)
            sides["torch"] = torch_operations()
            guards += guard_rows(device, idle, args.turns, "torch loaded")
    else:
        guards += guard_rows(device, idle, args.turns, "host backend")
    rows = judged(compare(sides, idle, args.turns) + guards, load_goals("runtime"))
    show(f"Host time of the runtime's operations on {device}", rows)
    save(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
