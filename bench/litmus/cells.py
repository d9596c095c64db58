"""Data before word: a producer writes, signals a word; a consumer in another process sees the word, and reads.

One round: the producer's host waits until the consumer has read the last round, its stream writes a fresh pattern and
signals; the consumer waits (its stream does, or its host), reads through the copy engine or straight through the
mapping, a kernel compares every word, and the stream acknowledges.  `late` turns the producer's order round (signal,
then data): such a cell must report stale rounds, else the checker is blind.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from bench.litmus.gpu import BYTES, SPIN, STEP, TABLE, WORDS, Gpu, Words, export, open_mapping
from bench.litmus.processes import Channel
from streamrt.cuda import memops
from streamrt.errors import DeviceError
from streamrt.segment import Segment, reached

PRODUCERS = ("kernel store", "copy device to device", "copy pinned to device", "memset")
READERS = ("copy-engine pull", "kernel through mapping")
ORDERS = ("stream", "host")
DATA, ACK, ENQUEUED = 0, 1, 2


def plan(rounds: int, late_rounds: int, same_gpu: bool) -> list[dict[str, Any]]:
    """All cells with their rounds, then the calibration cells."""
    base = {"bits": 32, "start": (1 << 31) - 100, "late": 0}
    cells = [
        {**base, "producer": producer, "reader": reader, "order": order, "rounds": rounds}
        for producer in PRODUCERS
        for reader in READERS
        for order in ORDERS
    ]
    late = 6_000 * SPIN if same_gpu else 60 * SPIN  # on one GPU it must outlast a time slice
    return cells + [{**cell, "rounds": late_rounds, "late": late} for cell in cells]


def wraps(rounds: int, wide: bool) -> list[dict[str, Any]]:
    """Cells whose words wrap: past half and past the whole of their range."""
    starts = [(32, (1 << 31) - 100), (32, (1 << 32) - 100)]
    if wide:
        starts += [(64, (1 << 32) - 100), (64, (1 << 63) - 100), (64, (1 << 64) - 100)]
    return [
        {"producer": "kernel store", "reader": reader, "order": order, "rounds": rounds, "bits": bits, "start": start}
        | {"late": 0}
        for bits, start in starts
        for order in ORDERS
        for reader in READERS
    ]


def producer(channel: Channel, config: dict[str, Any], fds: list[int]) -> None:
    """Role: writes data and signals."""
    gpu = Gpu(config["device"])
    stream = gpu.streams[0]
    words = Words(Segment.attach(fds[0]), config["device"])
    target, source = gpu.allocate(BYTES), gpu.allocate(BYTES)
    pinned = gpu.cupy.cuda.alloc_pinned_memory(4 * (TABLE + WORDS))
    table = np.frombuffer(pinned, np.uint32, TABLE + WORDS)
    table[:] = (np.arange(TABLE + WORDS, dtype=np.uint64) * STEP & 0xFFFFFFFF).astype(np.uint32)
    pinned_address = int(table.ctypes.data)
    support = memops.support(config["device"])
    channel.send(
        {
            "handle": export(gpu, target),
            "wait64": support.wait64,
            "self_test": memops.self_test(config["device"]),
            "no_context": writes_without_context(words),
            **gpu.description(),
        }
    )

    def data(how: str, number: int) -> None:
        if how == "kernel store":
            gpu.store(stream, target, number * STEP, STEP)
        elif how == "copy device to device":
            gpu.store(stream, source, number * STEP, STEP)
            gpu.copy(stream, target, source, BYTES)
        elif how == "copy pinned to device":
            gpu.runtime.memcpyAsync(target, pinned_address + 4 * (number % TABLE), BYTES, 1, stream.ptr)
        else:
            gpu.set(stream, target, number * STEP)

    while True:
        cell = channel.receive()[0]
        bits, mask, how, late = cell["bits"], (1 << cell["bits"]) - 1, cell["producer"], cell["late"]
        signal, ack, enqueued = (words.word(index, bits) for index in (DATA, ACK, ENQUEUED))
        for number in range(1, cell["rounds"] + 1):
            value = (cell["start"] + number) & mask
            before = (value - 1) & mask
            while ack.load() != before:  # the next round is the host's decision, not a stream's wait
                pass
            if late:
                words.write(stream, signal, value)
                enqueued.store(value)
                gpu.spin(stream, late)
                data(how, number)
            else:
                if number % 4 == 0:  # the consumer's wait is then surely there before the signal
                    gpu.spin(stream, 20 * SPIN)
                data(how, number)
                words.write(stream, signal, value)
                enqueued.store(value)
        stream.synchronize()
        channel.send({"done": True})


def consumer(channel: Channel, config: dict[str, Any], fds: list[int]) -> None:
    """Role: waits, reads and compares."""
    gpu = Gpu(config["device"])
    stream = gpu.streams[0]
    words = Words(Segment.attach(fds[0]), config["device"])
    pulled = gpu.allocate(BYTES)
    channel.send({"ready": True})
    mapping = open_mapping(gpu, channel.receive()[0]["handle"])
    gpu.check(stream, mapping, 0, 0, 0)
    gpu.copy(stream, pulled, mapping, BYTES)
    gpu.take_found()
    channel.send({"ready": True})
    while True:
        cell = channel.receive()[0]
        bits, mask = cell["bits"], (1 << cell["bits"]) - 1
        signal, ack, enqueued = (words.word(index, bits) for index in (DATA, ACK, ENQUEUED))
        step = 0 if cell["producer"] == "memset" else STEP
        in_stream, by_copy = cell["order"] == "stream", cell["reader"] == READERS[0]
        pending = 0
        start = time.perf_counter()
        for number in range(1, cell["rounds"] + 1):
            value = (cell["start"] + number) & mask
            if in_stream:
                while enqueued.load() != value:  # signal before wait
                    pass
                words.wait(stream, signal, value)
                pending += not reached(signal.load(), value, bits)
            else:
                while not reached(signal.load(), value, bits):
                    pass
            base = (number % TABLE if cell["producer"] == "copy pinned to device" else number) * STEP
            if by_copy:
                gpu.copy(stream, pulled, mapping, BYTES)
            gpu.check(stream, pulled if by_copy else mapping, base, step, number)
            words.write(stream, ack, value)
        stream.synchronize()
        microseconds = (time.perf_counter() - start) / cell["rounds"] * 1e6
        wrong_words, wrong_rounds = gpu.take_found()
        found = {"stale_rounds": wrong_rounds, "stale_words": wrong_words, "us_a_round": round(microseconds, 1)}
        channel.send({**cell, **found, "waits_pending_when_enqueued": pending if in_stream else None})


def writes_without_context(words: Words) -> str:
    """Whether a thread that has no current context can signal: an agent's thread would like to."""
    outcome: list[str] = []

    def attempt() -> None:
        d = memops.driver()
        try:
            while int(d.cuCtxPopCurrent()[0]) == 0:
                pass
            stream = handles[0]
            memops.write_word(stream, words.base + 64 * 40, 7, 32)
            outcome.append("works")
        except (DeviceError, TypeError, ValueError) as error:
            outcome.append(str(error))

    with memops.entered(words.device) as d:
        handles = [int(memops.check(d.cuStreamCreate(1), "making a stream"))]
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return outcome[0]
