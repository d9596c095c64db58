"""The litmus of the product's own code: arrays that are written right before they are sent, by calls between processes.

One round: the producer's stream writes fresh contents, some rounds held up for a while, and at once the array is sent,
as an argument (the caller produces) or as a reply (the function does).  What arrived is compared on the device, word by
word.  A snapshot's array is written over at once, a lent one when `future.sent` says so.  `WINDOW` calls are in flight.

A calibration drops the one wait that the cell is about and holds every round up until it has been compared: such a cell
must report stale rounds, else the litmus is blind.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self

import streamrt
import transport
from bench.litmus import product_callee as callee
from bench.litmus.drive import START_SECONDS, Save, config
from bench.litmus.gpu import SPIN, WORDS
from bench.litmus.machine import PRODUCERS, Machine, machine
from bench.litmus.processes import Channel, ChildError, Family
from streamrt import memory
from streamrt.testing import Latch, without
from transport.channels import shared_memory

WINDOW = 8
HELD = 4  # one round of so many is held up
CALL_SECONDS = 60.0
SIZES = {"1 MiB": WORDS, "1 KiB": 256}
ARGUMENTS = tuple(itertools.product(("snapshot", "lent"), ("pull", "in place")))
REPLIES = (("kept", "pull"), ("fresh", "pull"))
EDGES = {
    "snapshot": memory.COPY_EDGE,
    "kept": memory.COPY_EDGE,
    "lent": shared_memory.READY_EDGE,
    "fresh": shared_memory.READY_EDGE,
}
"""By how an array is sent, the wait that keeps its bytes right."""


def plan(rounds: int, late_rounds: int) -> list[dict[str, Any]]:
    """All cells with their rounds, then the calibrations."""
    ways = [("argument", *way) for way in ARGUMENTS] + [("reply", *way) for way in REPLIES]
    cells = [
        {"direction": direction, "producer": producer, "sent": sent, "reader": reader, "size": size, "rounds": rounds}
        for (direction, sent, reader), producer, size in itertools.product(ways, PRODUCERS, SIZES)
    ]
    cells.sort(key=lambda cell: str(cell["direction"]))  # the load moves to the other device once
    late = [{**cell, "rounds": late_rounds, "late": 1} for cell in cells if cell["size"] == "1 MiB"]
    return [{**cell, "late": 0} for cell in cells] + late


class Captures:
    """A thread that captures graphs while it is entered, in global mode: other threads must do nothing unsafe then."""

    def __init__(self, index: int) -> None:
        from bench.litmus.gpu import Gpu

        self.done = self.broken = 0
        self.first_error = ""
        self._gpu = Gpu(index)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def take(self) -> dict[str, Any]:
        """How many there were since the last call, how many of them broke, and how the first one did."""
        found = {"captures": self.done, "captures_broken": self.broken, "why": self.first_error}
        self.done, self.broken, self.first_error = 0, 0, ""
        return found

    def _run(self) -> None:
        gpu, stream = self._gpu, self._gpu.streams[0]
        gpu.cupy.cuda.Device(gpu.device).use()
        errors = (gpu.runtime.CUDARuntimeError, gpu.cupy.cuda.driver.CUDADriverError)
        while not self._over.is_set():
            try:
                stream.begin_capture(gpu.runtime.streamCaptureModeGlobal)
                try:
                    for _ in range(20):
                        gpu.store(stream, gpu.scratch, 1, 1, 16)
                finally:
                    stream.end_capture()
                self.done += 1
            except errors as error:
                self.broken += 1
                self.first_error = self.first_error or str(error)

    def __enter__(self) -> Self:
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="captures")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


class Caller:
    """The process that calls: one worker of its own, and a stream on its device."""

    def __init__(self, source: str, target: str, peer: transport.LocalWorker) -> None:
        self.machine: Machine = machine(source)
        self.peer = peer
        self.device = streamrt.open_device(source)
        self.stream = streamrt.Stream(self.device)
        self.numbers = itertools.count(1)
        peer.call(callee.open_machine, target, list(SIZES.values()))
        with streamrt.using(self.stream):
            self.rings = {words: [self.machine.array(words) for _ in range(WINDOW)] for words in SIZES.values()}
            self.sources = {words: self.machine.array(words) for words in SIZES.values()}
            self.like = self.machine.array(1)
            self.stream.synchronize()

    def run(self, cell: dict[str, Any], captures: Captures | None) -> dict[str, Any]:
        """Runs a cell; what it has found.  Graphs are captured meanwhile, but not while the comparisons are read."""
        argument, late = cell["direction"] == "argument", bool(cell["late"])
        edge = EDGES[cell["sent"]]
        begin = time.perf_counter()
        with streamrt.using(self.stream), ExitStack() as stack:
            if late and argument:
                stack.enter_context(without(edge))
            elif late:
                self.peer.call(callee.drop, edge)
                stack.callback(self.peer.call, callee.restore)
            with captures or nullcontext():
                (self.send if argument else self.fetch)(cell, late)
            found = self.peer.call(callee.found) if argument else list(self.machine.found())
        seconds = time.perf_counter() - begin
        if found[2] != cell["rounds"]:
            raise ValueError(f"{found[2]} of {cell['rounds']} rounds were compared")
        return {"stale_words": found[0], "stale_rounds": found[1], "us_a_round": round(1e6 * seconds / found[2], 1)}

    def send(self, cell: dict[str, Any], late: bool) -> None:
        """Arguments: this process writes, the worker compares."""
        how, words, lent = cell["producer"], SIZES[cell["size"]], cell["sent"] == "lent"
        function: Callable[..., None] = callee.compare if cell["reader"] == "pull" else callee.compare_in_place
        flying: deque[Any] = deque()
        for turn, number in enumerate(itertools.islice(self.numbers, cell["rounds"])):
            x = self.rings[words][turn % WINDOW]
            if len(flying) == WINDOW:
                oldest = flying.popleft()
                oldest.result()
                oldest.sent.result(CALL_SECONDS)
            with Latch(self.stream) if late else nullcontext():
                if not late and turn % HELD == 0:
                    self.machine.hold_up()
                self.machine.write(how, x, number, self.sources[words])
                future = self.peer.submit(function, x, how, number, copy=not lent, timeout=CALL_SECONDS)
                if late:
                    future.result()  # it is here, with the stream still closed
                    self.peer.call(callee.settle)
                if not lent:
                    self.machine.scribble(x)
            flying.append(future)
        for future in flying:
            future.result()
            future.sent.result(CALL_SECONDS)

    def fetch(self, cell: dict[str, Any], late: bool) -> None:
        """Replies: the worker writes, this process compares."""
        how, words, kept = cell["producer"], SIZES[cell["size"]], cell["sent"] == "kept"
        flying: deque[tuple[int, Any]] = deque()

        def compare() -> None:
            number, future = flying.popleft()
            self.machine.compare(how, future.result(), number)

        for turn, number in enumerate(itertools.islice(self.numbers, cell["rounds"])):
            if len(flying) == WINDOW:
                compare()
            held = "until open_doors" if late else "a while" if turn % HELD == 0 else ""
            made = self.peer.submit(callee.make, self.like, how, number, words, kept, held, timeout=CALL_SECONDS)
            flying.append((number, made))
            if late:
                compare()  # the reply is here, with the stream that should have written it still closed
                self.machine.settle()
                self.peer.call(callee.open_doors)
        while flying:
            compare()


def caller(channel: Channel, told: dict[str, Any], fds: list[int]) -> None:
    """Role: calls a worker of its own, cell by cell."""
    with transport.local_workers(1, devices=[told["target"]], default_timeout=CALL_SECONDS) as workers:
        side = Caller(told["source"], told["target"], workers[0])
        captures = Captures(side.device.index) if told["capture"] else None
        channel.send({"channels": workers[0].channels()})
        while True:
            cell = channel.receive()[0]
            found = side.run(cell, None if cell["late"] else captures)
            channel.send({**cell, **found, **(captures.take() if captures is not None else {})})


def load(channel: Channel, told: dict[str, Any], fds: list[int]) -> None:
    """Role: keeps a device busy until it is ended."""
    device = streamrt.open_device(told["device"])
    if device.kind == "cuda":
        from bench.litmus.gpu import Gpu

        gpu = Gpu(device.index)
        one, other = gpu.allocate(4 * WORDS), gpu.allocate(4 * WORDS)
    channel.send({"ready": True})
    while True:
        if device.kind == "host":
            sum(range(10_000))
            continue
        for _ in range(8):
            gpu.spin(gpu.streams[0], 200 * SPIN)
            gpu.copy(gpu.streams[0], one, other, 4 * WORDS)
        gpu.streams[0].synchronize()


@contextmanager
def loaded(family: Family, wanted: bool) -> Iterator[Callable[[str], None]]:
    """What moves the load to a device; nothing where none is wanted."""
    at: dict[str, Any] = {}

    def move(device: str) -> None:
        if not wanted or device in at:
            return
        for child in at.values():
            child.kill()
        at.clear()
        at[device] = family.start("product.load", config(device=device))
        at[device].answer(START_SECONDS)

    yield move


def run(
    kind: str,
    devices: tuple[int, int],
    cells: list[dict[str, Any]],
    table: dict[str, Any],
    save: Save,
    *,
    load: bool = False,
    capture: bool = False,
) -> None:
    """One caller with its worker for all cells; adds to `table` as it goes."""
    rows = table.setdefault("cells", [])
    source, target = (f"{kind}:{index}" for index in devices)
    with Family() as family, loaded(family, load) as move:
        child = family.start("product.caller", config(source=source, target=target, capture=capture))
        table["channels"] = child.answer(START_SECONDS)["channels"]
        for cell in cells:
            move(target if cell["direction"] == "argument" else source)
            limit = START_SECONDS + cell["rounds"] * 20e-3
            try:
                rows.append(child.ask(cell, limit))
            except (TimeoutError, EOFError, ChildError) as error:
                rows.append({**cell, "error": str(error)})
                save()
                return
            save()
