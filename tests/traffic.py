"""Traffic for simulated processes: functions that say how often they ran, and clients that check every byte."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from simulation import QUIET, Joint, Script, World

import streamrt
import transport
from streamrt.device import open_device
from streamrt.pool import stream_pool
from transport.context import current_call
from transport.errors import DeadlineError, PeerLostError
from transport.limits import Limits
from transport.service import Service

BIG = 640 * 1024  # float32: 2.5 MiB, three chunks


class Program:
    """The functions of a simulated process, and how often each call of it ran."""

    def __init__(self, world: World, runs: Counter[str]) -> None:
        self.service = Service()
        self.world, self.runs = world, runs
        for function in (self.double, self.double_later, self.mix, self.bounce, self.fail, self.stall, self.hear):
            self.service.function(function, name=function.__name__)

    def double(self, token: str, x: Any) -> Any:
        self.runs[token] += 1
        return x + x

    def double_later(self, token: str, x: Any) -> Any:
        """Ready only when the leased stream comes there."""
        self.runs[token] += 1
        result = streamrt.empty(x.shape, "float32", device=str(streamrt.device_of(x)))
        streamrt.current_stream(streamrt.device_of(x)).launch(np.add, x, x, result, reads=[x], writes=[result])
        return result

    def mix(self, token: str, tree: dict[str, Any]) -> dict[str, Any]:
        self.runs[token] += 1
        return {name: array * 3 for name, array in tree.items()} | {"token": token}

    def bounce(self, token: str, x: Any, depth: int) -> Any:
        """Goes back to the caller until `depth` is used up; each turn adds one."""
        self.runs[f"{token}/{depth}"] += 1
        return transport.caller().call("bounce", token, x + 1, depth - 1) if depth else x + 1

    def fail(self, token: str) -> None:
        self.runs[token] += 1
        raise ValueError(f"no {token}")

    def stall(self, token: str) -> str:
        """Runs until its caller gives up."""
        self.runs[token] += 1
        running = current_call()
        self.world.wait(lambda: running.cancelled)
        return "stopped"

    def hear(self, token: str, x: Any) -> None:
        self.runs[token] += 1
        assert np.array_equal(np.asarray(x), pattern(token, x.size))


def pattern(token: str, n: int) -> np.ndarray[Any, Any]:
    """What the array of a call holds, unlike that of any other."""
    start = sum(map(ord, token)) % 977
    return (np.arange(n, dtype=np.float32) + start) % 4093


def written_later(values: np.ndarray[Any, Any], device: str) -> Any:
    """An array that the current stream has yet to write."""
    array = streamrt.empty(values.shape, "float32", device=device)
    streamrt.current_stream(device).launch(np.copyto, array, values, writes=[array])
    return array


def overwrite(array: Any, device: str) -> None:
    """The caller goes on and writes to its array, in stream order."""
    streamrt.current_stream(device).launch(array.fill, -1.0, writes=[array])


class Client:
    """Calls of one thread, drawn from a seed; it checks what comes back."""

    def __init__(self, world: World, joint: Joint, number: int, runs: Counter[str], *, lossy: bool = False) -> None:
        self.world, self.joint, self.number, self.runs, self.lossy = world, joint, number, runs, lossy
        self.peer = (joint.peer, joint.back)[number % 2]
        self.random = random.Random(f"{world.seed} {number}")
        self.ends: Counter[str] = Counter()
        self.started = 0
        self.lost = 0

    def __call__(self, rounds: int = 6) -> None:
        actions = (self.plain, self.device, self.device, self.big, self.lent, self.tree, self.nested, self.failing)
        actions += (self.notified, self.cancelled, self.abandoned, self.late)
        for turn in range(rounds):
            token = f"{self.world.seed}.{self.number}.{turn}"
            try:
                self.random.choice(actions)(token)
            except PeerLostError:
                if not self.lossy:
                    raise
                self.lost += 1
                return

    def start(self, function: str, token: str, *args: Any, **options: Any) -> Any:
        future = self.peer.submit(function, token, *args, **options)
        return self.watch(token, future)

    def watch(self, token: str, future: Future[Any]) -> Any:
        self.started += 1
        future.add_done_callback(lambda _: self.ends.update([token]))
        return future

    @contextmanager
    def somewhere(self) -> Iterator[str]:
        """A device, with its default stream or another one current."""
        device = self.random.choice(["host:0", "host:1"])
        if self.random.random() < 0.5:
            yield device
            return
        with stream_pool(open_device(device)).lease() as lease, streamrt.using(lease.stream):
            yield device

    def plain(self, token: str) -> None:
        n = self.random.choice([0, 1, 100, 5000])  # inside the message, and by a channel
        values = pattern(token, n)
        future = self.start("double", token, values)
        values.fill(-1.0)
        assert np.array_equal(future.result(), pattern(token, n) * 2)

    def device(self, token: str) -> None:
        with self.somewhere() as device:
            n = self.random.choice([1, 300, 20_000])
            array = written_later(pattern(token, n), device)
            function = self.random.choice(["double", "double_later"])
            future = self.start(function, token, array)
            overwrite(array, device)
            del array
            result = future.result()
            assert str(streamrt.device_of(result)) == device
            assert np.array_equal(result, pattern(token, n) * 2)

    def big(self, token: str) -> None:
        with self.somewhere() as device:
            array = written_later(pattern(token, BIG), device)
            future = self.start("double_later", token, array)
            overwrite(array, device)
            del array
            assert np.array_equal(future.result(), pattern(token, BIG) * 2)

    def lent(self, token: str) -> None:
        with self.somewhere() as device:
            array = written_later(pattern(token, 9000), device)
            future = self.start("double_later", token, array, copy=False)
            future.sent.add_done_callback(lambda _: None)
            self.world.wait(future.sent.done)
            overwrite(array, device)
            assert np.array_equal(future.result(), pattern(token, 9000) * 2)

    def tree(self, token: str) -> None:
        values = {"a": pattern(token + "a", 40), "b": pattern(token + "b", 3000), "c": pattern(token + "c", 700)}
        tree = {
            name: written_later(array, f"host:{i}") if i < 2 else array
            for i, (name, array) in enumerate(values.items())
        }
        future = self.start("mix", token, tree)
        overwrite(tree["a"], "host:0")
        del tree
        result = future.result()
        assert result.pop("token") == token
        for name, array in values.items():
            assert np.array_equal(result[name], array * 3), name

    def nested(self, token: str) -> None:
        with self.somewhere() as device:
            depth = self.random.randrange(4)
            array = written_later(pattern(token, 900), device)
            future = self.start("bounce", token, array, depth)
            overwrite(array, device)
            del array
            assert np.array_equal(future.result(), pattern(token, 900) + depth + 1)

    def failing(self, token: str) -> None:
        with pytest.raises(ValueError, match=token):
            self.start("fail", token).result()

    def notified(self, token: str) -> None:
        self.watch(token, self.peer.notify("hear", token, pattern(token, self.random.choice([10, 4000]))))

    def cancelled(self, token: str) -> None:
        future = self.start("stall", token)
        if self.random.random() < 0.5:
            self.world.wait(lambda: self.runs[token] > 0 or future.done())
        future.cancel()
        with pytest.raises(CancelledError):
            future.result()

    def abandoned(self, token: str) -> None:
        """Gives a call up while its bytes are on their way: somewhere between the array and the function's end."""
        with self.somewhere() as device:
            array = written_later(pattern(token, BIG), device)
            future = self.start("double_later", token, array)
            overwrite(array, device)
            del array
            steps = len(self.world.trace) + self.random.randrange(30)
            self.world.wait(lambda: future.done() or len(self.world.trace) >= steps)
            if future.cancel():
                with pytest.raises(CancelledError):
                    future.result()
            else:
                assert np.array_equal(future.result(), pattern(token, BIG) * 2)

    def late(self, token: str) -> None:
        with pytest.raises(DeadlineError, match="time ran out"):
            self.start("stall", token, timeout=self.random.uniform(0.001, 0.1)).result()


def traffic(
    world: World,
    *,
    clients: int = 4,
    rounds: int = 4,
    limits: Limits = QUIET,
    faults: Script | None = None,
    apart: bool = True,
) -> tuple[Joint, Counter[str], list[Client]]:
    """Two processes, threads of clients on both, at random; returns when every client has ended."""
    runs: Counter[str] = Counter()
    a, b = (world.side(name, Program(world, runs).service, apart=apart) for name in "ab")
    lossy = faults is not None
    joint = world.connect(a, b, limits=limits, faults=faults)
    callers = [Client(world, joint, number, runs, lossy=lossy) for number in range(clients)]
    fibers = [
        world.spawn(
            lambda caller=caller: caller(rounds), name=f"client {caller.number}", side=(a, b)[caller.number % 2]
        )  # type: ignore[misc]
        for caller in callers
    ]
    world.run_until(lambda: all(fiber.ended for fiber in fibers))
    return joint, runs, callers


def check_once(runs: Counter[str], callers: list[Client]) -> None:
    """Each future ended, once; no function ran twice."""
    assert max(runs.values(), default=1) == 1, runs.most_common(3)
    for caller in callers:
        assert len(caller.ends) == caller.started
        assert max(caller.ends.values(), default=1) == 1
