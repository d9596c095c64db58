"""The runtime's operations written by hand with CuPy and with torch: what a careful user would have written instead.

Each function returns the operations by name; an operation is called many times by the timer, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Operations = dict[str, Callable[[], Any]]
SNAPSHOT_BYTES = {"snapshot 4 B": 4, "snapshot 1 MiB": 1 << 20}


def cupy_operations() -> Operations:
    """With CuPy alone.  A lease is a stream of a ring, marked by an event when it is given back."""
    import cupy

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(32)]
    events = [cupy.cuda.Event(disable_timing=True) for _ in streams]
    one, two = streams[:2]
    event = cupy.cuda.Event(disable_timing=True)
    turn = 0

    def lease() -> None:
        nonlocal turn
        turn = (turn + 1) % len(streams)
        events[turn].record(streams[turn])

    def guard() -> None:
        with one:
            pass

    def record_and_wait() -> None:
        event.record(one)
        two.wait_event(event)

    done = cupy.cuda.Event(disable_timing=True)
    done.record(one)
    current = cupy.cuda.get_current_stream()
    operations: Operations = {
        "lease": lease,
        "guard": guard,
        "record and wait": record_and_wait,
        "future wait": lambda: current.wait_event(done),
    }
    for name, nbytes in SNAPSHOT_BYTES.items():
        operations[name] = cupy.zeros(nbytes, dtype=cupy.uint8).copy
    return operations


def torch_operations() -> Operations:
    """With torch alone.  A lease is a stream of torch's own ring, marked by an event."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    one, two = torch.cuda.Stream(device), torch.cuda.Stream(device)
    event = torch.cuda.Event()
    marks = [torch.cuda.Event() for _ in range(32)]
    turn = 0

    def lease() -> None:
        nonlocal turn
        turn = (turn + 1) % len(marks)
        marks[turn].record(torch.cuda.Stream(device))

    def guard() -> None:
        with torch.cuda.stream(one):
            pass

    def record_and_wait() -> None:
        event.record(one)
        two.wait_event(event)

    future: Any = torch.futures.Future(devices=[device])
    future.set_result(torch.zeros(1, device=device))
    operations: Operations = {
        "lease": lease,
        "guard": guard,
        "record and wait": record_and_wait,
        "future wait": future.wait,
    }
    for name, nbytes in SNAPSHOT_BYTES.items():
        operations[name] = torch.zeros(nbytes, dtype=torch.uint8, device=device).clone
    return operations
