"""What the driving process does for each part: starts the roles, steers them, judges what they report.

It maps the words, but never touches a GPU.  Each function adds to `table` as it goes, so that a part that is cut short
leaves what it had found; `save` writes it out.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.litmus import cells, death, streams
from bench.litmus.processes import Child, ChildError, Family
from streamrt.segment import Segment, Word

Save = Callable[[], None]
START_SECONDS = 90.0


def config(**values: Any) -> dict[str, Any]:
    return {"parent": os.getpid(), **values}


def run_cells(
    devices: tuple[int, int], table: dict[str, Any], save: Save, plan: Callable[[bool], list[dict[str, Any]]]
) -> None:
    """Data before word: one pair of processes for all the cells of `plan(wide words available)`."""
    rows = table.setdefault("cells", [])
    with Family() as family, Segment.create(4096) as segment:
        producer = family.start("cells.producer", config(device=devices[0]), (segment.fd,))
        consumer = family.start("cells.consumer", config(device=devices[1]), (segment.fd,))
        table["producer"] = hello = producer.answer(START_SECONDS)
        consumer.answer(START_SECONDS)
        consumer.ask({"handle": hello["handle"]}, START_SECONDS)
        for cell in plan(hello["wait64"]):
            for index in (cells.DATA, cells.ACK, cells.ENQUEUED):
                Word(segment, 64 * index, cell["bits"]).reset(cell["start"])
            limit = 20 + cell["rounds"] * 4e-3
            producer.send(cell)
            consumer.send(cell)
            try:
                found = consumer.answer(limit)
                producer.answer(20)
            except (TimeoutError, EOFError) as error:
                rows.append({**cell, "error": f"no end within {limit:.0f} s: {error}"})
                save()
                return
            rows.append(found)
            save()


def run_streams(devices: tuple[int, int], turns: int, table: dict[str, Any], save: Save) -> None:
    """64 streams both ways, under 1, 8 and 32 hardware connections."""
    rows = table.setdefault("streams", [])
    for connections in (1, 8, 32):
        row: dict[str, Any] = {"connections": connections, "streams": streams.STREAMS}
        rows.append(row)
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
        with Family() as family, Segment.create(streams.SEGMENT_BYTES) as segment:
            sides = [
                family.start(
                    "streams.peer", config(side=side, device=devices[side], turns=turns), (segment.fd,), environment
                )
                for side in (0, 1)
            ]
            try:
                handles = [side.answer(START_SECONDS)["handle"] for side in sides]
                for side, handle in zip(sides, reversed(handles), strict=True):
                    side.ask({"handle": handle}, START_SECONDS)
                for side in sides:
                    side.send("go")
                row["sides"] = [side.answer(20 + 0.4 * turns) for side in sides]
                row["hang"] = False
                save()
                if devices[0] != devices[1] or connections == 1:
                    row["wait_before_signal"] = _calibrate(sides, segment)
            except (TimeoutError, EOFError, ChildError) as error:
                row["hang"] = "sides" not in row
                row["error"] = repr(error)
            save()


def _calibrate(sides: list[Child], segment: Segment) -> Any:
    """Breaks rule 5a on purpose: the call must block until this process, two seconds later, stores the word."""
    entered, held = Word(segment, 64 * streams.ENTERED), Word(segment, 64 * streams.HELD)
    sides[1].send("end")
    sides[0].send("calibrate")
    for value in (1, 2):
        _until(partial(_is, entered, value), 20)
        time.sleep(2.0)
        held.store(value)
    return sides[0].answer(20)


def _is(word: Word, value: int) -> bool:
    return word.load() == value


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing after {seconds} s")
        time.sleep(1e-3)


def run_deaths(devices: tuple[int, int], runs: int, table: dict[str, Any], save: Save) -> None:
    """Producers killed, one connection each; then one that is stopped for 10 s and goes on."""
    rows = table.setdefault("deaths", [])
    insides = ("spinning in Python", "cudaMalloc", "spinning in Python", "first launch")
    with Family() as family:
        survivor = family.start("death.survivor", config(device=devices[1]))
        helper = family.start("helper.helper", config())
        ahead: list[tuple[Child, Segment]] = []

        def producer(gate: str, late: bool = False) -> tuple[Child, Segment]:
            segment = Segment.create(4096)
            child = family.start("death.producer", config(device=devices[0], gate=gate, late=late), (segment.fd,))
            return child, segment

        gates = ["wait" if run // 2 % 2 else "kernel" for run in range(runs)]
        ahead = [producer(gate) for gate in gates[:3]]
        frozen = producer("wait", late=True)
        survivor.answer(START_SECONDS)
        for run, gate in enumerate(gates):
            row: dict[str, Any] = {"gate": gate, "inside": insides[run % 4]}
            rows.append(row)
            child, segment = ahead.pop(0)
            if run + 3 < runs:
                ahead.append(producer(gates[run + 3]))
            try:
                _one_death(child, survivor, helper, segment, row)
            finally:
                child.kill()
                segment.close()
                save()
        stop: dict[str, Any] = {}
        table["stop"] = stop
        try:
            _one_stop(*frozen, survivor, helper, stop)
        finally:
            frozen[0].kill()
            frozen[1].close()
            save()


def _meet(child: Child, survivor: Child, segment: Segment, order: dict[str, Any]) -> None:
    handle = child.answer(START_SECONDS)["handle"]
    child.ask("go", START_SECONDS)
    survivor.send({**order, "handle": handle}, (segment.fd,))
    if not all(survivor.answer(20)["good"]):
        raise ValueError("points signalled before the end did not arrive")
    child.ask("close the gate", 30)


def _arm(helper: Child, child: Child, segment: Segment, words: list[int], **more: Any) -> int:
    pidfd = os.pidfd_open(child.process.pid)
    enqueued = [death.ENQUEUED + word for word in words]
    order = {"words": words, "enqueued": enqueued, "pid": child.process.pid, **more}
    helper.send(order, (pidfd, segment.fd))
    helper.answer(10)
    return pidfd


def _one_death(child: Child, survivor: Child, helper: Child, segment: Segment, row: dict[str, Any]) -> None:
    streams_of_it = list(range(death.STREAMS))
    _meet(child, survivor, segment, {"inside": row["inside"]})
    row["points_queued"] = _queue_full(Word(segment, 64 * death.ENQUEUED)) - death.GOOD
    os.close(_arm(helper, child, segment, streams_of_it))
    survivor.send("queue is full")
    _until(lambda: Word(segment, 64 * death.ENTERED).load() == 1, 20)
    time.sleep(0.3)  # the survivor is inside its call by now
    killed = time.monotonic()
    child.process.send_signal(signal.SIGKILL)
    released = helper.answer(70)
    report = survivor.answer(60)
    words = [Word(segment, 64 * i).load() for i in streams_of_it]
    expected = [(Word(segment, 64 * (death.ENQUEUED + i)).load() + 1) & 0xFFFFFFFF for i in streams_of_it]
    done = report.pop("all_streams_done_at", None)
    row.update(report)
    row["gone_after_ms"] = round((released["released_at"] - killed) * 1e3, 1)
    row["streams_done_after_release_ms"] = None if done is None else round((done - released["released_at"]) * 1e3, 1)
    row["state"] = released["state"]
    row["signalled_after_the_kill"] = sum(value != death.GOOD for value in released["words_at_release"])
    row["words_changed_after_release"] = words != expected
    row["holds"] = (
        done is not None
        and row["state"] == "gone"
        and row["lost"] == row["points"]
        and row["not_released"] == row["signalled_after_the_kill"] == row["delivered_data_wrong"] == 0
        and row["good_stay_good"]
        and row["usable"]
        and not row["words_changed_after_release"]
    )
    survivor.send("next")


def _queue_full(counter: Word) -> int:
    """What the producer had enqueued when its call stopped coming back: no progress for half a second."""
    last, since = counter.load(), time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(5e-3)
        if counter.load() != last:
            last, since = counter.load(), time.monotonic()
    return last


def _one_stop(child: Child, segment: Segment, survivor: Child, helper: Child, row: dict[str, Any]) -> None:
    """Stopped for 10 s: half of the connection is given up after 2 s, the other half is waited for."""
    given_up, waited = list(range(death.STREAMS // 2)), list(range(death.STREAMS // 2, death.STREAMS))
    _meet(child, survivor, segment, {"inside": "frozen", "given_up": given_up, "waited": waited})
    survivor.send("queued")
    _until(lambda: Word(segment, 64 * death.ENTERED).load() == 1, 20)
    os.close(_arm(helper, child, segment, given_up, frozen_after=2.0))
    child.process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    before = survivor.ask("just stopped", 10)
    row["helper"] = helper.answer(20)["state"]
    time.sleep(0.5)
    released = survivor.ask("after giving up", 10)
    time.sleep(max(0.0, stopped + 9.5 - time.monotonic()))
    Word(segment, 64 * death.OPEN).store(1)  # what its host would answer, were it not stopped
    time.sleep(0.5)
    late = survivor.ask("after 10 s", 10)
    row["stopped_s"] = round(time.monotonic() - stopped, 1)
    signals = [Word(segment, 64 * i) for i in range(death.STREAMS)]
    lowest = signals[0].load()
    child.process.send_signal(signal.SIGCONT)
    end = time.monotonic() + 20
    while signals[-1].load() != death.GOOD + death.LATE and time.monotonic() < end:
        lowest = min(lowest, signals[0].load())
    row["released_word_fell_back_to"] = lowest
    child.answer(20)
    survivor.send("drained")
    report = survivor.answer(60)
    report.pop("all_streams_done_at", None)
    row.update(report)
    half = death.STREAMS // 2
    points = report["points"]
    row["holds"] = (
        row["helper"] == "stopped (T)"
        and sum(before["reached"]) == 0  # nothing before the release
        and released["lost"][:half] == points[:half] == released["reached"][:half]
        and not any(released["streams_pending"][:half])
        and sum(late["reached"][half:]) == 0  # and nothing at all from a stopped producer
        and all(late["streams_pending"][half : 2 * half])
        and report["lost"] == points[:half] + [0] * half
        and report["late_data_wrong"] == report["given_up_data_changed"] == report["delivered_data_wrong"] == 0
        and report["good_stay_good"]
        and report["usable"]
    )
    survivor.send("next")
