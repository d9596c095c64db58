"""Kills at random moments in a chain A -> B -> C: every call ends, no wrong value is taken, nothing is left.

`KILLS=200 pytest tests/test_kills.py` is the long run; a few are enough to see that it works.  Every kill meets a call
on each hop, at one of four moments: before the caller's stream has come there, while arrays are on their way, in the
function, and while the reply is on its way.
"""

from __future__ import annotations

import collections
import gc
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rpc_service
from chain import Chain
from rpc_processes import open_descriptors, until

import streamrt
import transport
from streamrt.testing import Latch
from transport.channels import retired

KILLS = int(os.environ.get("KILLS", "16"))
LONGEST_SECONDS = 5.0
MOMENTS = ("before", "transfer", "function", "reply")
WORDS = 1 << 20  # of 8 bytes: a transfer that takes a moment, on both ways


@pytest.fixture(params=["tcp", "unix"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chain]:
    devices = {"b": "host:0", "c": "host:0"}
    made = Chain("rpc_service:service", devices, tmp_path if request.param == "unix" else None)
    yield made
    made.close()


def one_kill(chain: Chain, moment: str, victim: str, rng: random.Random, value: float) -> str:
    """Kills the victim at the moment; what became of the call."""
    name = uuid.uuid4().hex
    stream = streamrt.Stream("host:0")
    x = streamrt.array(np.zeros(WORDS), device="host:0")
    peer, last = chain.peers["b"], chain.peers["c"]
    with streamrt.using(stream), Latch(stream) as latch:
        stream.launch(rpc_service.fill, x, value, writes=[x])
        future = peer.submit("through", chain.workers["c"].address, "increment_behind", x, name)
        if moment != "before":
            latch.open()
        if moment == "transfer":
            threading.Event().wait(rng.uniform(0, 0.01))
        elif moment in ("function", "reply"):
            until(lambda: last.call("count", name) == 1, "the function of the last one to run")
            if moment == "reply":
                last.call("open_gate", name)
                threading.Event().wait(rng.uniform(0, 0.01))
        begin = time.monotonic()
        chain.kill(victim)
        if victim == "b":
            last.call("open_gate", name)  # else what C runs for the dead would wait there
        latch.open()
        error = future.exception(LONGEST_SECONDS)
        took = time.monotonic() - begin
    assert took < LONGEST_SECONDS
    if error is None:
        result = np.asarray(future.result())
        assert (result == value + 1).all(), "a wrong value was taken"
        return "value"
    assert isinstance(error, transport.PeerLostError), repr(error)
    return "lost"


def test_every_call_ends_when_somebody_dies(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    """pytorch/pytorch#33208, pytorch/tensorpipe#311: callers hung when a peer died in a transfer."""
    rng = random.Random(KILLS)
    one_kill_of_nobody(chain)
    gc.collect()
    streamrt.memory.drain(everything=True)
    before, live = open_descriptors(), streamrt.memory.statistics().live
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    for number in range(KILLS):
        moment, victim = MOMENTS[number % 4], "bc"[(number // 4) % 2]
        outcome = one_kill(chain, moment, victim, rng, float(number + 2))
        seen[moment, outcome] += 1
        chain.replace(victim)
        assert float(np.asarray(chain.peers["b"].call("increment", np.full(10, 1.0)))[0]) == 2, "the others go on"
    with capsys.disabled():
        sys.stdout.write(f"\nkills over {chain.workers['b'].address.partition(':')[0]}: {dict(seen)}\n")
    assert all(seen[moment, "lost"] > 0 for moment in ("before", "function")), seen
    until(lambda: retired.kept() == 0, "what was exported to the dead to be dropped")

    def settled() -> bool:
        gc.collect()
        streamrt.memory.drain(everything=True)
        return open_descriptors() <= before and streamrt.memory.statistics().live <= live

    until(
        settled, lambda: f"{open_descriptors() - before} descriptors, {streamrt.memory.statistics().live - live} bytes"
    )


def one_kill_of_nobody(chain: Chain) -> None:
    """The same call as it goes when all live."""
    name = uuid.uuid4().hex
    x = streamrt.array(np.ones(WORDS), device="host:0")
    future = chain.peers["b"].submit("through", chain.workers["c"].address, "increment_behind", x, name)
    until(lambda: chain.peers["c"].call("count", name) == 1, "the function of the last one to run")
    chain.peers["c"].call("open_gate", name)
    result: Any = future.result(30)
    assert (np.asarray(result) == 2).all()
