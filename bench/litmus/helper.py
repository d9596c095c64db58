"""The releasing process: standard library only, holds the producer's pidfd and maps the words.

It never calls CUDA and shares no GIL with the survivor: so it can release also while the survivor is stuck in a driver
call that holds its GIL.  Flags first, words second.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

from bench.litmus.processes import Channel
from streamrt.segment import Segment, Word


def release(words: list[Word], values: list[int]) -> None:
    """Marks all the words lost, then moves them to `values`: plain stores."""
    for word in words:
        word.mark_lost()
    for word, value in zip(words, values, strict=True):
        word.store(value)


def helper(channel: Channel, config: dict[str, Any], fds: list[int]) -> None:
    """Role: for each order, releases `words` when the process is gone, or has stood still for `frozen_after` s."""
    while True:
        order, received = channel.receive()
        pidfd, segment = received[0], Segment.attach(received[1])
        words = [Word(segment, 64 * index) for index in order["words"]]
        enqueued = [Word(segment, 64 * index) for index in order["enqueued"]]
        channel.send({"armed": True})
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        state = "gone"
        if "frozen_after" in order:
            state = _until_frozen(order["pid"], order["frozen_after"], poll)
        elif not poll.poll(60_000):
            state = "still there after 60 s"
        at_release = [word.load() for word in words]
        release(words, [(word.load() + 1) & 0xFFFFFFFF for word in enqueued])
        channel.send({"state": state, "released_at": time.monotonic(), "words_at_release": at_release})
        os.close(pidfd)
        segment.close()


def _until_frozen(pid: int, seconds: float, poll: select.poll) -> str:
    since: float | None = None
    while True:
        if poll.poll(10):
            return "gone"
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        now = time.monotonic()
        if state != "T":
            since = None
        elif since is None:
            since = now
        elif now - since >= seconds:
            return "stopped (T)"
