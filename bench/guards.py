"""Guards in torch graphs against synchronising in every submodule: ``python -m bench.guards``.

A graph of 8 engines with 7 breaks between them, on the default stream.  The peer is what pytorch/TensorRT#3977 is
about: every engine runs on a stream of its own and the host waits for that stream after each; ours is the same graph
after `guard_engines`.  Both run in turn in this process, and each result is checked.

On the host backend an engine is an operation launched on a stream, which runs on a thread of the device (the schedule
"threads") and takes its time asleep.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

import streamrt
from bench.engines import is_engine, scale, shift
from bench.report import Row, judged, load_goals, save, show
from streamrt.testing import schedules
from streamrt.torch_graphs import guard_engines

ENGINES = 8
PEER = "synchronising"
BY_WITH = "one with"  # the same engines with no guard in their graph, all in one `compute_stream`: what operators add
REPLAYED = "replayed"  # the guarded graph, captured once: one launch in place of 15, and a copy of the argument
IN_PLACE = "replayed in place"  # the same where the argument is the captured one, which callers fill themselves
LENGTHS = {"2 ms": 2000.0, "20 us": 20.0}


def graph(device: streamrt.Device, us: float, synchronizing: bool) -> torch.fx.GraphModule:
    """8 engines of `us` microseconds with 7 breaks: an addition on the current stream."""

    def function(x: Any) -> Any:
        for number in range(ENGINES):
            x = scale(x, 2.0, us, synchronizing)
            if number < ENGINES - 1:
                x = shift(x, 1.0) if device.kind == "host" else x + 1.0
        return x

    return torch.fx.symbolic_trace(function)


def wanted(x: float) -> float:
    """What the graph makes of a number."""
    for number in range(ENGINES):
        x = 2 * x + (number < ENGINES - 1)
    return x


def ones(device: streamrt.Device) -> torch.Tensor:
    """1024 ones on a device, written on its default stream."""
    if device.kind == "cuda":
        return torch.ones(1024, device=str(device))
    made: torch.Tensor = streamrt.empty((1024,), "float32", device, arrays="torch").fill_(1.0)
    return made


def by_with(module: torch.fx.GraphModule) -> Callable[[Any], Any]:
    """Calls of the module inside one `compute_stream`."""

    def call(x: Any) -> Any:
        with streamrt.compute_stream(x):
            return module(x)

    return call


def replayed(module: torch.fx.GraphModule, own: Any) -> Callable[[Any], Any]:
    """Calls that replay a graph of the module, captured once with `own`, into which they copy what else they get."""
    with streamrt.compute_stream(own):
        captured = streamrt.capture(module, own)

    def call(x: Any) -> Any:
        captured.replay(x)
        return captured.result

    return call


def timed(call: Callable[[Any], Any], x: Any, wait: Callable[[], None]) -> tuple[float, float]:
    """Seconds inside the call, and until the device is done."""
    wait()
    begin = time.perf_counter()
    y = call(x)
    returned = time.perf_counter()
    wait()
    end = time.perf_counter()
    if float(y[0]) != wanted(float(x[0])):
        raise ArithmeticError(f"{float(y[0])} is not {wanted(float(x[0]))}: the order does not hold")
    return returned - begin, end - begin


def measure(device: streamrt.Device, rounds: int) -> list[Row]:
    """All rows, both sides in turn."""
    default = streamrt.Stream.borrow(0, device)
    x = ones(device)
    rows = []
    with torch.no_grad():
        for name, us in LENGTHS.items():
            guarded = guard_engines(graph(device, us, False), is_engine)
            if not rows:
                print(guarded.report)
                rows.append(Row("pairs of fences", "count", guarded.report.fences_after, guarded.report.fences_before))
            sides = {
                "streamrt": guarded,
                PEER: graph(device, us, True),
                BY_WITH: by_with(graph(device, us, False)),
                REPLAYED: replayed(guarded, ones(device)),
                IN_PLACE: replayed(guarded, x),
            }
            found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for turn in range(rounds + 1):
                for side in list(sides)[:: 1 if turn % 2 else -1]:
                    times = timed(sides[side], x, default.synchronize)
                    if turn:  # the first turn warms up
                        found[side].append(times)
            wall = {side: statistics.median(total for _, total in times) * 1e6 for side, times in found.items()}
            share = {
                side: statistics.median(inside / total for inside, total in times) * 100
                for side, times in found.items()
            }
            rows.append(Row(f"host inside calls, engines of {name}", "%", share["streamrt"], share[PEER]))
            rows.append(Row(f"{ENGINES} engines of {name}", "us", wall["streamrt"], wall[PEER]))
            rows.append(Row(f"{ENGINES} engines of {name}, guarded by one with", "us", wall[BY_WITH], wall[PEER]))
            rows.append(Row(f"{ENGINES} engines of {name}, guarded and replayed", "us", wall[REPLAYED], wall[PEER]))
            rows.append(Row(f"{ENGINES} engines of {name}, replayed in place", "us", wall[IN_PLACE], wall[PEER]))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(prog="python -m bench.guards", description=__doc__)
    parser.add_argument(
        "--device", default="auto", help="host, cuda, or one with its index; where there is a GPU, cuda"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    device = streamrt.open_device(args.device)
    with ExitStack() as stack:
        if device.kind == "host":
            stack.enter_context(schedules("threads"))
        rows = judged(measure(device, args.rounds), load_goals("guards"), PEER)
    show(f"Guards in a graph of {ENGINES} engines and {ENGINES - 1} breaks on {device}", rows, PEER)
    save(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
