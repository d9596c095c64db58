"""A producer that dies or freezes with its queue full of points that were not signalled.

The producer signals `GOOD` points on each stream, closes a gate (a wait that nobody answers, or a long kernel) and
fills its queues behind it.  The survivor has pulls waiting for points of both kinds, and is spinning in Python, inside
cudaMalloc, or in the first launch of a kernel when the producer goes.  A helper process that holds the pidfd releases.
"""

from __future__ import annotations

import time
from typing import Any

from bench.litmus.gpu import STEP, Gpu, Words, export, open_mapping
from bench.litmus.processes import Channel
from streamrt.cuda import memops
from streamrt.segment import Segment
from streamrt.timeline import Point

STREAMS = 8
GOOD = 4
SLICE = 1 << 16  # words of exported memory per stream
SIGNAL, ENQUEUED = 0, STREAMS
ENTERED, OPEN, GATE = 2 * STREAMS, 2 * STREAMS + 1, 2 * STREAMS + 2
FULL, LATE = 24, 4
GOOD_BASE, LATE_BASE = 0x600D0000, 0xBAD00000


def producer(channel: Channel, config: dict[str, Any], fds: list[int]) -> None:
    """Role: fills its queues behind a gate.  With `late`, only a few points; its host opens the gate when told."""
    gpu = Gpu(config["device"], STREAMS)
    words = Words(Segment.attach(fds[0]), config["device"])
    memory = gpu.allocate(4 * STREAMS * SLICE)
    signals, enqueued = ([words.word(group + i) for i in range(STREAMS)] for group in (SIGNAL, ENQUEUED))
    channel.send({"handle": export(gpu, memory)})
    channel.receive()

    def point(i: int, value: int, base: int) -> None:
        stream = gpu.streams[i]
        gpu.store(stream, memory + 4 * SLICE * i, base + i, STEP, SLICE)
        words.write(stream, signals[i], value)
        enqueued[i].store(value)

    for i in range(STREAMS):
        for value in range(1, GOOD + 1):
            point(i, value, GOOD_BASE)
    gpu.runtime.deviceSynchronize()
    channel.send({"good": True})
    channel.receive()  # the survivor has read them
    for stream in gpu.streams:
        if config["gate"] == "wait":
            words.wait(stream, words.word(GATE), 1)
        else:
            gpu.spin(stream, 60_000_000_000)
    if config.get("late"):
        for i in range(STREAMS):
            for value in range(GOOD + 1, GOOD + LATE + 1):
                gpu.spin(gpu.streams[i], 20_000_000)  # slow enough for the driver of the test to see each
                point(i, value, LATE_BASE)
        channel.send({"queued": True})
        while not words.word(OPEN).load():
            pass
        words.word(GATE).store(1)
        gpu.runtime.deviceSynchronize()
        channel.send({"drained": True})
        channel.receive()
    for i in range(1, STREAMS):
        for value in range(GOOD + 1, GOOD + FULL + 1):
            point(i, value, LATE_BASE)
    channel.send({"queued": True})
    for value in range(GOOD + 1, 1 << 20):  # until the queue is full: the call does not come back
        point(0, value, LATE_BASE)


def survivor(channel: Channel, config: dict[str, Any], fds: list[int]) -> None:
    """Role: lives through all the deaths; one connection (segment, mapping) for each producer."""
    gpu = Gpu(config["device"], 2 * STREAMS)
    local = gpu.allocate(4 * SLICE)
    number = 0
    channel.send({"ready": True})
    while True:
        order, received = channel.receive()
        segment = Segment.attach(received[0])
        words = Words(segment, config["device"])
        signals, enqueued = ([words.word(group + i) for i in range(STREAMS)] for group in (SIGNAL, ENQUEUED))
        mapping = open_mapping(gpu, order["handle"])
        pulled = gpu.allocate(4 * STREAMS * SLICE)
        scratch = gpu.allocate(4 * STREAMS * SLICE)
        gpu.runtime.deviceSynchronize()

        good = [Point(signals[i], GOOD) for i in range(STREAMS)]
        for i in range(STREAMS):  # delivered before the end: must stay good
            words.wait(gpu.streams[i], good[i].word, good[i].value)
            gpu.copy(gpu.streams[i], pulled + 4 * SLICE * i, mapping + 4 * SLICE * i, 4 * SLICE)
        gpu.runtime.deviceSynchronize()
        channel.send({"good": [point.reached() and not point.lost for point in good]})
        channel.receive()  # the producer's queue is full

        late = []
        for i in range(STREAMS):
            last = enqueued[i].load()
            for value in sorted({GOOD + 1, (GOOD + 1 + last) // 2, last}):
                late.append((i, Point(signals[i], value)))
                words.wait(gpu.streams[i], signals[i], value)
                gpu.copy(gpu.streams[i], scratch + 4 * SLICE * i, mapping + 4 * SLICE * i, 4 * SLICE)
        report: dict[str, Any] = {"waiting_for": len(late)}
        report["pending_before"] = sum(gpu.pending(gpu.streams[i]) for i in range(STREAMS))
        words.word(ENTERED).store(1)
        if order["inside"] == "frozen":
            report.update(_through_a_stop(gpu, channel, late))
        else:
            number = _inside(gpu, order["inside"], late, number)
        done = _drained(gpu, order.get("limit", 30.0))
        report["all_streams_done_at"] = time.monotonic() if done else None
        report["lost"] = [sum(point.lost for i, point in late if i == k) for k in range(STREAMS)]
        report["points"] = [sum(1 for i, _ in late if i == k) for k in range(STREAMS)]
        report["not_released"] = sum(not point.reached() for _, point in late)
        report["good_stay_good"] = all(point.reached() and not point.lost for point in good)
        if done:
            for i in range(STREAMS):
                gpu.check(gpu.streams[i], pulled + 4 * SLICE * i, GOOD_BASE + i, STEP, i, SLICE)
            report["delivered_data_wrong"] = gpu.take_found()[0]
            if order["inside"] == "frozen":
                for i in order["waited"]:
                    gpu.check(gpu.streams[i], scratch + 4 * SLICE * i, LATE_BASE + i, STEP, i, SLICE)
                report["late_data_wrong"] = gpu.take_found()[0]
                for i in order["given_up"]:  # what was pulled at the release must not change afterwards
                    gpu.check(gpu.streams[i], scratch + 4 * SLICE * i, GOOD_BASE + i, STEP, i, SLICE)
                report["given_up_data_changed"] = gpu.take_found()[0]
            report["usable"] = _usable(gpu, local, number := number + 1)
            start = time.perf_counter()
            gpu.runtime.ipcCloseMemHandle(mapping)
            memops.unregister(segment)
            gpu.runtime.free(pulled)
            gpu.runtime.free(scratch)
            report["cleanup_ms"] = round((time.perf_counter() - start) * 1e3, 1)
        channel.send(report)
        channel.receive()
        if done:
            del signals, enqueued, good, late, words
            segment.close()


def _inside(gpu: Gpu, inside: str, late: list[tuple[int, Point]], number: int) -> int:
    """What the survivor's thread does while its peer dies."""
    taken = []
    while not all(point.reached() for _, point in late):
        if inside == "cudaMalloc":
            taken.append(gpu.runtime.malloc(1 << 21))  # not freed before the end: cudaFree would block
        elif inside == "first launch":
            number += 1
            gpu.first_launch(gpu.streams[STREAMS + number % STREAMS], number)
    for address in taken:
        gpu.runtime.free(address)
    return number


def _through_a_stop(gpu: Gpu, channel: Channel, late: list[tuple[int, Point]]) -> dict[str, Any]:
    """Answers the driver's questions about what has been delivered, until it says that the producer has drained."""
    looks: dict[str, Any] = {}
    while True:
        question = channel.receive()[0]
        if question == "drained":
            return {"looks": looks}
        looks[question] = {
            "reached": [sum(p.reached() for i, p in late if i == k) for k in range(STREAMS)],
            "lost": [sum(p.lost for i, p in late if i == k) for k in range(STREAMS)],
            "streams_pending": [gpu.pending(gpu.streams[i]) for i in range(STREAMS)],
        }
        channel.send(looks[question])


def _drained(gpu: Gpu, limit: float) -> bool:
    end = time.monotonic() + limit
    while any(gpu.pending(stream) for stream in gpu.streams):
        if time.monotonic() > end:
            return False
    return True


def _usable(gpu: Gpu, local: int, number: int) -> bool:
    """Whether every stream still computes and copies, and the device still allocates, frees and loads."""
    for i, stream in enumerate(gpu.streams):
        base = (number * 100 + i) * STEP
        if i:
            gpu.runtime.streamSynchronize(gpu.streams[i - 1].ptr)
        gpu.store(stream, local, base, STEP, SLICE)
        gpu.check(stream, local, base, STEP, i, SLICE)
    gpu.first_launch(gpu.streams[0], 7000 + number)
    gpu.runtime.free(gpu.runtime.malloc(1 << 22))
    return gpu.take_found() == (0, 0)
