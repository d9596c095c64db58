"""Where the time of one call goes: ``python -m bench.profile_call --device cuda --pair 0,1``.

Both processes wrap the functions that make up a call and add up the time in each, less what the wrapped functions
inside take.  The wrapping costs a little itself, so a profiled call takes longer than one without; both are printed.
What is left of the turn-around time is waiting: for the other side, for a thread to wake, for the device.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import transport
from bench.report import Row, save
from bench.workload import quantiles

STEPS: dict[str, tuple[str, ...]] = {
    "encode the value, describe its arrays": ("transport.payload:prepare",),
    "snapshot: memory, copy, record": ("streamrt.memory:snapshot", "transport.lend:lend"),
    "fetch small arrays": ("transport.inlined:Fetched.__init__",),
    "look for their bytes": ("transport.inlined:settle",),
    "place small arrays": ("transport.transfer:Incoming.fill",),
    "memory of exports": ("transport.channels.exports:Exports.allocate",),
    "what is dropped": ("streamrt.buffers:drain",),
    "lease streams, take memory": (
        "transport.transfer:Incoming.__init__",
        "transport.transfer:Incoming.lease",
        "transport.transfer:Outgoing.__init__",
    ),
    "protocol": (
        "transport.protocol:Connection.command",
        "transport.protocol:Connection.receive",
        "transport.protocol:Connection.fact",
        "transport.protocol:Connection.drain",
        "transport.protocol:Connection.next_timeout",
    ),
    "write the link": ("transport.links.unix_link:UnixLink.send", "transport.links.unix_link:UnixLink.flush"),
    "read the link": ("transport.links.unix_link:UnixLink.receive",),
    "ask whether copies have run": (
        "transport.moving:Moving.move",
        "transport.moving:Moving.look",
    ),
    "open and pull": ("transport.transfer:Incoming.pull",),
    "make streams current, bring them back": ("streamrt.guard:using.__enter__", "streamrt.guard:using.__exit__"),
    "rebuild the value": ("transport.payload:rebuild", "transport.payload:read_body"),
    "the function": ("bench.profile_call:turn",),
    "start and complete the future": (
        "streamrt.future:DeviceFuture.__init__",
        "streamrt.future:DeviceFuture.set_result",
        "streamrt.future:DeviceFuture.set_ready",
        "streamrt.future:DeviceFuture.result",
    ),
    "the rest of submitting": ("transport.calling:Calling.submit",),
    "the rest of serving": ("transport.running:Running._serve",),
    "the rest of the driver": (
        "transport.driver:Driver.work",
        "transport.driver:Driver.on_readable",
        "transport.driver:Driver.tick",
        "transport.driver:Driver.after",
    ),
}


class Meter:
    """Adds up, by step, the time in wrapped functions less that in wrapped functions inside them."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = dict.fromkeys(STEPS, 0.0)
        self.calls: dict[str, int] = dict.fromkeys(STEPS, 0)
        self._inside = threading.local()

    def wrap(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, measured."""

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._inside, "spent", 0.0)
            self._inside.spent = 0.0
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.spent[step] += took - self._inside.spent
                self.calls[step] += 1
                self._inside.spent = outer + took

        return measured

    def install(self) -> None:
        """Wraps every function of `STEPS`, wherever a module holds it by name."""
        for step, targets in STEPS.items():
            for target in targets:
                module, _, path = target.partition(":")
                owner: Any = importlib.import_module(module)
                *parents, name = path.split(".")
                for parent in parents:
                    owner = getattr(owner, parent)
                original = getattr(owner, name)
                measured = self.wrap(step, original)
                setattr(owner, name, measured)
                if not parents:
                    _replace(original, measured)

    def reset(self) -> None:
        """Begins anew."""
        self.spent = dict.fromkeys(STEPS, 0.0)
        self.calls = dict.fromkeys(STEPS, 0)


def _replace(original: object, measured: object) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] in ("streamrt", "transport"):
            for name, value in list(vars(module).items()):
                if value is original:
                    setattr(module, name, measured)


_meter = Meter()


def turn(x: Any) -> Any:
    """The function that is called: the echo of the benchmark."""
    return x


def measure() -> None:
    """Runs in the worker: measures from now on."""
    _meter.install()


def reset() -> None:
    """Runs in the worker: begins anew."""
    _meter.reset()


def collect() -> tuple[dict[str, float], dict[str, int]]:
    """Runs in the worker: what was measured."""
    return _meter.spent, _meter.calls


def times(peer: Any, x: Any, synchronize: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of `count` calls, the device synchronised after each."""
    result = []
    for _ in range(count):
        begin = time.perf_counter()
        peer.call(turn, x)
        synchronize()
        result.append(time.perf_counter() - begin)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles, prints, saves."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile_call", description=__doc__)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pair", default="0,0", metavar="A,B", help="devices of caller and callee")
    parser.add_argument("--nbytes", type=int, default=4)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    source, target = map(int, args.pair.split(","))
    with transport.local_workers(1, devices=[f"{args.device}:{target}"]) as workers:
        peer = workers[0]
        x: Any = np.arange(max(1, args.nbytes // 4), dtype=np.int32)
        synchronize: Callable[[], None] = _nothing
        if args.device == "cuda":
            import cupy

            cupy.cuda.Device(source).use()
            x = cupy.asarray(x)
            synchronize = cupy.cuda.get_current_stream().synchronize
        times(peer, x, synchronize, 50)
        plain = quantiles(times(peer, x, synchronize, args.count))
        peer.call(measure)
        _meter.install()
        times(peer, x, synchronize, 50)
        peer.call(reset)
        _meter.reset()
        profiled = times(peer, x, synchronize, args.count)
        ours = (dict(_meter.spent), dict(_meter.calls))
        theirs = peer.call(collect)
    rows = budget(ours, theirs, sum(profiled), args.count)
    print(f"{'step':40} {'side':7} {'us':>8} {'times':>6}")
    for row, side, often in rows:
        print(f"{row.name.partition(': ')[2]:40} {side:7} {row.streamrt:8.1f} {often:6.1f}")
    mean = sum(profiled) / args.count * 1e6
    print(f"a call as it is: p50 {plain[0]:.1f} us, p99 {plain[1]:.1f} us; profiled, mean: {mean:.1f} us")
    summary = [Row("call, p50", "us", plain[0], None), Row("call, p99", "us", plain[1], None)]
    save(args.json, [*summary, *(row for row, _, _ in rows)])
    return 0


def budget(
    ours: tuple[dict[str, float], dict[str, int]],
    theirs: tuple[dict[str, float], dict[str, int]],
    total: float,
    count: int,
) -> list[tuple[Row, str, float]]:
    """The table: a row for each step and side that took any time, the dearest first, then what is left of the calls."""
    rows = []
    for side, (spent, calls) in (("caller", ours), ("callee", theirs)):
        for step, seconds in spent.items():
            if calls[step]:
                row = Row(f"{side}: {step}", "us", seconds / count * 1e6, None)
                rows.append((row, side, calls[step] / count))
    rows.sort(key=lambda entry: -(entry[0].streamrt or 0.0))
    left = total / count * 1e6 - sum(row.streamrt or 0.0 for row, _, _ in rows)
    return [*rows, (Row("both: waiting and what is not measured", "us", left, None), "both", 1.0)]


def _nothing() -> None:
    """The host has no device to wait for."""


if __name__ == "__main__":
    from bench import profile_call  # under its own name, by which the worker imports what it is sent

    sys.exit(profile_call.main())
