"""Kills in a chain A -> B -> C whose call is held where the kill is to meet it: on virtual devices and on GPUs.

`KILLS=40 pytest -m gpu tests/test_kills_held.py` is the long run.  Every kill meets a call on each hop, a quarter of
them at each of four points between B and C: before the signal (the snapshot has not run), in the pull (which is
enqueued and does not run), in the function, and with the reply on its way.  So what becomes of it is known: it is lost.
"""

from __future__ import annotations

import collections
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chain import Chain
from rpc_processes import WATCHDOG, until

import streamrt
import transport
from streamrt.testing import Latch
from transport import pinned
from transport.channels import retired
from transport.demo.alive import Alive, alive

KILLS = int(os.environ.get("KILLS", "8"))
LONGEST_SECONDS = 5.0
HELD_SECONDS = 8.0  # until a call has come where it is to be held
STOPPED_SECONDS = float(os.environ.get("STOPPED_SECONDS", "1"))
MOMENTS = ("before", "pull", "function", "reply")
WORDS = 1 << 20  # of 8 bytes

VIRTUAL, ONE, TWO = ("host:0", "host:1", "host:0"), ("cuda:0",) * 3, ("cuda:0", "cuda:1", "cuda:0")
CHAINS = [
    pytest.param((VIRTUAL, "unix"), id="host-unix"),
    pytest.param((VIRTUAL, "stream"), id="host-stream"),
    pytest.param((VIRTUAL, "tcp"), id="host-tcp", marks=pytest.mark.whole),
    pytest.param((ONE, "unix"), id="one GPU-unix", marks=pytest.mark.gpu),
    pytest.param((ONE, "tcp"), id="one GPU-tcp", marks=pytest.mark.gpu),
    pytest.param((TWO, "unix"), id="two GPUs-unix", marks=[pytest.mark.gpu, pytest.mark.gpu2]),
]


class Held(Chain):
    """The chain, and A's own stream, on which all calls of a test are made."""

    def __init__(self, devices: tuple[str, str, str], listen: Path | None, order: str | None) -> None:
        spares = 3 if devices[0].startswith("cuda") else 0
        super().__init__("kill_service:service", dict(zip("abc", devices, strict=True)), listen, spares, order)
        self.stream = streamrt.Stream(self.devices["a"])
        self.whole = False
        for _ in range(2):  # kernels are loaded, memory is mapped, and what the first loss makes is there
            self.exercise()
            self.replace("b")

    def array(self, value: float) -> Any:
        """A fresh array of A's, written on its stream."""
        return streamrt.array(np.full(WORDS, value), device=self.devices["a"])

    def submit(self, value: float, held: str) -> tuple[str, streamrt.DeviceFuture[Any]]:
        """A call through B to C; its name, and its future."""
        name = uuid.uuid4().hex
        with streamrt.using(self.stream):
            x = self.array(value)
            return name, self.peers["b"].submit("through", self.workers["c"].address, x, name, held)

    def held_at(self, moment: str, value: float) -> tuple[str, streamrt.DeviceFuture[Any]]:
        """A call that has come to the moment, and stays there until `release`."""
        if moment == "pull":
            self.peers["c"].call("hold_pulls", self.devices["c"])
        name, future = self.submit(value, moment)

        def there() -> bool:
            if moment == "pull":
                return self.count("b", f"{name} handed on") == 1 and self.peers["c"].call("serving") == 1
            where, what = {"before": "b handed on", "function": "c begun", "reply": "c returned"}[moment].split(" ", 1)
            return self.count(where, f"{name} {what}") == 1

        try:
            until(there, f"the call to be held {moment}", HELD_SECONDS)
        except AssertionError:
            for name, worker in self.workers.items():
                sys.stderr.write(f"\n{name}: {self.peers[name].call('whereabouts', timeout=LONGEST_SECONDS)}\n")
                os.kill(worker.pid, signal.SIGUSR1)  # it shows where its threads are
                threading.Event().wait(0.5)
            raise
        return name, future

    def count(self, where: str, what: str) -> int:
        return int(self.peers[where].call("count", what))

    def release(self, name: str, *where: str) -> None:
        """Lets go on what is held in these workers."""
        for one in where:
            self.peers[one].call("let_go")
            self.peers[one].call("open_gate", name)

    def check(self, array: Any, value: float) -> None:
        """On A's stream: the array is all of that value, and a copy and a kernel run."""
        with streamrt.using(self.stream):
            further = array + 1
            self.stream.synchronize(LONGEST_SECONDS)
        host = np.asarray(further.get() if hasattr(further, "get") else further)
        assert (host == value + 1).all(), "a wrong value was taken"

    def call_that_nobody_disturbs(self, value: float) -> None:
        _, future = self.submit(value, "nowhere")
        with streamrt.using(self.stream):
            result = future.result(WATCHDOG)
        self.check(result, value + 1)

    def survivor_works(self, name: str) -> None:
        """A copy and a kernel run there, on a stream that it is given."""
        with streamrt.using(self.stream):
            result = self.peers[name].call("increment", self.array(4.0), timeout=LONGEST_SECONDS)
        self.check(result, 5.0)

    def exercise(self) -> None:
        """All that a test does, so that what connections keep for it is there."""
        for name in "bc":
            self.survivor_works(name)
        self.call_that_nobody_disturbs(9.0)

    def alive(self) -> Alive:
        """What is alive here when all works and nothing runs."""
        self.exercise()
        return uncached()

    def settles(self, before: Alive) -> None:
        """Nothing more is alive here than before: memory, segments, descriptors, leases, futures."""
        self.exercise()
        until(lambda: retired.kept() == 0, "what was exported to the dead to be dropped")
        until(lambda: not uncached().above(before), lambda: f"these to be given back: {uncached().above(before)}")
        self.whole = True


def uncached() -> Alive:
    """What is alive but for pinned chunks that are kept for the next transfer, as many as ever were in use at once."""
    for pool in list(pinned._pools.values()):
        with pool._lock:
            for free in pool._free.values():
                free.clear()
            pool._cached = 0
    return alive()


@pytest.fixture(scope="module", params=CHAINS)
def chains(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Held]]:
    """Gives the chain that the test before has left whole, or a new one."""
    devices, link = request.param
    made: list[Held] = []

    def give() -> Held:
        if not made or not made[-1].whole:
            close()
            order = "stream" if link == "stream" else None
            made.append(Held(devices, None if link == "tcp" else tmp_path_factory.mktemp("chain"), order))
        made[-1].whole = False
        return made[-1]

    def close() -> None:
        while made:
            made.pop().close()

    yield give
    close()


@pytest.fixture
def chain(chains: Callable[[], Held]) -> Held:
    return chains()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.slow
def test_every_kill_meets_a_call_and_ends_it(chain: Held, moment: str, capsys: pytest.CaptureFixture[str]) -> None:
    """pytorch/pytorch#33208, pytorch/tensorpipe#311: callers hung when a peer died in a transfer."""
    seen: collections.Counter[str] = collections.Counter()
    longest = 0.0
    before = chain.alive()
    for number in range(KILLS // len(MOMENTS)):
        victim, survivor = ("b", "c") if number % 2 else ("c", "b")
        held_before = chain.peers[survivor].call("held_bytes")
        name, future = chain.held_at(moment, float(number + 2))
        assert not future.done(), "the call was not held"
        begin = time.monotonic()
        chain.kill(victim)
        error = future.exception(LONGEST_SECONDS)
        longest = max(longest, time.monotonic() - begin)
        assert isinstance(error, transport.PeerLostError), repr(error)
        seen[victim] += 1
        chain.release(name, survivor)
        chain.survivor_works(survivor)
        until(
            lambda peer=chain.peers[survivor], most=held_before: peer.call("held_bytes") <= most,
            f"the survivor {survivor} to give back what the dead {victim} had a part in",
        )
        del future, error
        chain.replace(victim)
        chain.call_that_nobody_disturbs(float(number))
    with capsys.disabled():
        where = " -> ".join(chain.devices.values())
        sys.stdout.write(
            f"\nkills in {where}, held {moment}: {dict(seen)}; the longest call ended {longest:.2f} s after\n"
        )
    chain.settles(before)


@pytest.mark.slow
def test_a_reply_whose_pull_is_enqueued_when_its_sender_dies(chain: Held) -> None:
    """What is taken is right, or an error says that it is lost; the stream goes on in any case."""
    before = chain.alive()
    stream = streamrt.Stream(chain.devices["a"])
    with Latch(stream), streamrt.using(chain.stream):
        future = chain.peers["b"].submit("increment", chain.array(7.0), reply_stream=stream)
        until(future.done, "the reply's message")
        chain.kill("b")
        until(lambda: chain.peers["b"].closed, "the loss to be known")
    stream.synchronize(LONGEST_SECONDS)
    try:
        with streamrt.using(chain.stream):
            result = future.result(LONGEST_SECONDS)
    except transport.PeerLostError:
        result = None
    if result is not None:
        chain.check(result, 8.0)
    del result, future, stream
    chain.replace("b")
    chain.call_that_nobody_disturbs(30.0)
    chain.settles(before)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.slow
def test_who_is_stopped_and_continued_corrupts_nothing(chain: Held, moment: str) -> None:
    stopped = "bc"[MOMENTS.index(moment) % 2]
    before = chain.alive()
    name, future = chain.held_at(moment, 11.0)
    chain.workers[stopped].freeze()
    threading.Event().wait(STOPPED_SECONDS)
    assert not future.done()
    chain.workers[stopped].thaw()
    chain.release(name, "b", "c")
    with streamrt.using(chain.stream):
        result = future.result(WATCHDOG)
    chain.check(result, 12.0)
    chain.call_that_nobody_disturbs(20.0)
    del result, future
    chain.settles(before)


@pytest.mark.slow
def test_a_call_that_is_given_up_while_its_peer_is_stopped(chain: Held) -> None:
    """Its memory is not used again before the peer, which goes on later, has let go of it."""
    before = chain.alive()
    chain.workers["b"].freeze()
    with streamrt.using(chain.stream):
        futures = [chain.peers["b"].submit("increment", chain.array(float(n)), timeout=0.2) for n in range(3)]
    for future in futures:
        assert isinstance(future.exception(WATCHDOG), transport.DeadlineError)
    for _ in range(3):
        chain.survivor_works("c")
    chain.workers["b"].thaw()
    for name in "bcb":
        chain.survivor_works(name)
    chain.call_that_nobody_disturbs(40.0)
    del future, futures
    chain.replace("b")  # with its connection goes what that has grown by
    chain.settles(before)
