"""Many streams, both directions, few hardware queues, and a host that allocates, frees and loads kernels in between.

Two processes; each signals one word per stream for the other's stream of the same number to wait on.  A wait is
enqueued only after the peer's host has said that its signal is (rule 5a), and a slot is reused only after the host has
read its release: then every dependency, also the false ones of shared queues, points back in time, and nothing hangs.
The calibration does the opposite once (a wait whose signal is not enqueued, then a blocking call) and is let go by a
plain store from another process.
"""

from __future__ import annotations

import random
import time
from typing import Any

from bench.litmus.gpu import SPIN, STEP, Gpu, Words, export, open_mapping
from bench.litmus.processes import Channel
from streamrt.segment import Segment

STREAMS = 64
SLOTS = 4
SLOT_WORDS = 1 << 12
ENTERED, HELD = 6 * STREAMS, 6 * STREAMS + 1
SEGMENT_BYTES = 64 * (6 * STREAMS + 8)


def peer(channel: Channel, config: dict[str, Any], fds: list[int]) -> None:
    """Role: one of the two sides (`side` 0 or 1)."""
    side, turns = config["side"], config["turns"]
    draw = random.Random(side)
    gpu = Gpu(config["device"], STREAMS)
    words = Words(Segment.attach(fds[0]), config["device"])

    def group(kind: int, of: int) -> list[Any]:
        return [words.word((kind * 2 + of) * STREAMS + i) for i in range(STREAMS)]

    signal, release, enqueued = (group(kind, side) for kind in range(3))
    their_signal, their_release, their_enqueued = (group(kind, 1 - side) for kind in range(3))
    exported = gpu.allocate(4 * STREAMS * SLOTS * SLOT_WORDS)
    pulled = gpu.allocate(4 * STREAMS * SLOT_WORDS)
    channel.send({"handle": export(gpu, exported)})
    mapping = open_mapping(gpu, channel.receive()[0]["handle"])
    gpu.copy(gpu.streams[0], pulled, mapping, 4 * SLOT_WORDS)
    gpu.take_found()
    channel.send({"ready": True})
    channel.receive()

    allocations = [gpu.runtime.malloc(1 << 20)]
    counts = {"malloc": 0, "free": 0, "first launch": 0}
    longest = 0.0
    number = 1000 * side

    def disturb() -> None:
        nonlocal longest, number
        kind = draw.choice(tuple(counts))
        start = time.perf_counter()
        if kind == "malloc" or (kind == "free" and not allocations):
            kind = "malloc"
            allocations.append(gpu.runtime.malloc(1 << draw.randrange(12, 25)))
        elif kind == "free":
            gpu.runtime.free(allocations.pop(0))
        else:
            number += 1
            gpu.first_launch(gpu.streams[draw.randrange(STREAMS)], number)
        counts[kind] += 1
        longest = max(longest, time.perf_counter() - start)

    def slot(base: int, i: int, turn: int) -> int:
        return base + 4 * SLOT_WORDS * (i * SLOTS + turn % SLOTS)

    start = time.perf_counter()
    order = list(range(STREAMS))
    for turn in range(1, turns + 1):
        draw.shuffle(order)
        for n, i in enumerate(order):
            while their_release[i].load() + SLOTS < turn:
                pass
            stream = gpu.streams[i]
            if (i + turn) % 8 == 0:
                gpu.spin(stream, 100 * SPIN)
            gpu.store(stream, slot(exported, i, turn), (turn * STREAMS + i) * STEP, STEP, SLOT_WORDS)
            words.write(stream, signal[i], turn)
            enqueued[i].store(turn)
            if n == STREAMS // 2:
                disturb()
        draw.shuffle(order)
        for n, i in enumerate(order):
            while their_enqueued[i].load() < turn:  # signal before wait
                pass
            stream = gpu.streams[i]
            words.wait(stream, their_signal[i], turn)
            mine = pulled + 4 * SLOT_WORDS * i
            gpu.copy(stream, mine, slot(mapping, i, turn), 4 * SLOT_WORDS)
            gpu.check(stream, mine, (turn * STREAMS + i) * STEP, STEP, turn * STREAMS + i, SLOT_WORDS)
            words.write(stream, release[i], turn)
            if n % 32 == 31:
                disturb()
    for stream in gpu.streams:
        stream.synchronize()
    seconds = time.perf_counter() - start
    wrong_words, wrong_rounds = gpu.take_found()
    report = {"turns": turns, "stale_rounds": wrong_rounds, "stale_words": wrong_words, "seconds": round(seconds, 2)}
    channel.send({**report, "disturbances": counts, "longest_disturbance_ms": round(longest * 1e3, 1)})
    if channel.receive()[0] == "calibrate":
        channel.send([_blocked(gpu, words, kind, value) for value, kind in enumerate(("cudaFree", "first launch"), 1)])
    channel.receive()


def _blocked(gpu: Gpu, words: Words, kind: str, value: int) -> dict[str, Any]:
    """Waits for a word that nobody has signalled, then blocks in the driver until another process stores it."""
    memory = gpu.runtime.malloc(1 << 20)
    held, entered = words.word(HELD), words.word(ENTERED)
    words.wait(gpu.streams[0], held, value)
    entered.store(value)
    start = time.perf_counter()
    if kind == "cudaFree":
        gpu.runtime.free(memory)
    else:
        gpu.first_launch(gpu.streams[1], 5000 + value)
    blocked = time.perf_counter() - start
    gpu.streams[0].synchronize()
    return {"call": kind, "blocked_s": round(blocked, 2)}
