"""A forked child: it starts anew, says clearly what it cannot use, and does no harm to its parent."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rpc_processes import WATCHDOG

import streamrt
import transport
from streamrt import buffers, forks, moves
from streamrt.callbacks import CallbackPool, callback_pool
from streamrt.future import DeviceFuture
from transport.agent import default_agent

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # Python's own, in a process with threads
    pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning"),  # JAX's, where another test has loaded it
]


def in_child(function: Callable[[], Any]) -> str:
    """What a forked child says of `function()`: its repr, or its error."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        timer = threading.Timer(WATCHDOG, os._exit, (3,))
        timer.daemon = True
        timer.start()
        try:
            told = repr(function())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stderr)
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = file.read()
    os.waitpid(pid, 0)
    return told


def chained(value: int) -> int:
    future: DeviceFuture[int] = DeviceFuture()
    child = future.then(lambda got: got + 1)
    future.set_result(value)
    return int(child.result(WATCHDOG))


def test_continuations_run_in_a_child_of_a_process_that_had_some() -> None:
    assert chained(1) == 2
    pool = callback_pool()
    assert in_child(lambda: chained(41)) == "42"
    assert callback_pool() is pool
    assert in_child(lambda: callback_pool() is pool) == "False"


def test_locks_that_another_thread_held_are_free_in_the_child() -> None:
    def snapshot() -> int:
        array = streamrt.array(np.arange(5000.0), device="host:0")
        [copy] = streamrt.memory.snapshot([array])
        return copy.nbytes

    snapshot()
    with buffers._lock, buffers._draining:
        assert in_child(snapshot) == "40000"


def increment(array: Any) -> None:
    array += 1


def graph_of(array: Any) -> streamrt.Graph[None]:
    def step(array: Any) -> None:
        streamrt.current_stream("host:0").launch(increment, array, writes=(array,))

    with streamrt.using(streamrt.Stream("host:0")):
        return streamrt.capture(step, array, warmup=0)


def replayed(graph: streamrt.Graph[None], array: Any) -> float:
    stream = streamrt.Stream("host:0")
    with streamrt.using(stream):
        graph.replay()
    stream.synchronize(WATCHDOG)
    return float(array[0])


def test_a_graph_that_another_thread_replays_is_replayed_in_the_child() -> None:
    array = streamrt.array(np.zeros(4), device="host:0")
    graph, before = graph_of(array), len(forks._renewed)
    with graph._lock:
        assert in_child(functools.partial(replayed, graph, array)) == "1.0"
    assert replayed(graph, array) == 1.0
    del graph
    buffers.drain(everything=True)
    assert len(forks._renewed) == before - 1


def test_captures_of_other_threads_are_over_in_the_child() -> None:
    """Their streams are ordinary ones, and garbage is collected again."""
    array = streamrt.array(np.zeros(4), device="host:0")
    stream, inside, go = streamrt.Stream("host:0"), threading.Event(), threading.Event()
    captures = stream.device.backend.captures

    def wait_inside() -> None:
        stream.launch(int)
        inside.set()
        go.wait(WATCHDOG)

    def work() -> None:
        with streamrt.using(stream):
            streamrt.capture(wait_inside, device="host:0", warmup=0)

    def own() -> tuple[bool, ...]:
        found = (gc.isenabled(), captures.active, stream.capturing)
        return (*found, stream.query(), replayed(graph_of(array), array) == 1.0, gc.isenabled())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(WATCHDOG)
        assert in_child(own) == repr((True, False, False, True, True, True))
        assert (gc.isenabled(), captures.active, stream.capturing) == (False, True, True)
    finally:
        go.set()
        thread.join(WATCHDOG)
    assert (gc.isenabled(), captures.active) == (True, False)


def test_a_capture_that_forks_goes_on_in_the_child() -> None:
    stream = streamrt.Stream("host:0")
    captures = stream.device.backend.captures

    def state() -> tuple[bool, ...]:
        return (gc.isenabled(), captures.active, stream.capturing)

    told = []

    def fork_inside() -> None:
        stream.launch(int)
        told.append(in_child(state))

    with streamrt.using(stream):
        streamrt.capture(fork_inside, device="host:0", warmup=0)
    assert told == [repr((False, True, True))]
    assert state() == (True, False, False)


def test_large_copies_are_made_in_the_child_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that helped are the parent's."""
    monkeypatch.setattr(moves, "THREADS", 2)
    source, target = np.arange(1 << 22), np.zeros(1 << 22, int)

    def copied() -> bool:
        target[:] = 0
        moves.move(target.ctypes.data, source.ctypes.data, source.nbytes)
        return bool((target == source).all())

    assert copied()
    assert in_child(copied) == "True"


def test_an_owner_that_is_gone_is_forgotten() -> None:
    before = len(forks._renewed)
    pool = CallbackPool(1)
    assert len(forks._renewed) == before + 1
    del pool
    assert len(forks._renewed) == before


def test_a_child_cannot_use_the_peers_of_its_parent_but_its_own() -> None:
    with transport.local_workers(1) as workers:
        (worker,) = workers
        assert worker.call(abs, -3) == 3
        future = worker.submit(abs, -3)
        agent = default_agent()

        def use() -> Any:
            assert default_agent() is not agent
            with pytest.raises(streamrt.ClosedError, match="spawn instead of fork"):
                worker.call(abs, -4)
            workers.close()  # as a `with` does; it must not end the parent's
            service = transport.Service()
            service.function(abs)
            with transport.loopback(service) as own:
                return own.call("abs", -5, timeout=WATCHDOG)

        assert in_child(use) == "5"
        assert future.result(WATCHDOG) == 3
        assert worker.call(abs, -6, timeout=WATCHDOG) == 6
        assert worker.process.poll() is None


def held_result() -> Any:
    return np.ones(1 << 17)


def test_what_a_child_drops_is_still_the_parents() -> None:
    """The peer waits for the parent's array to be dropped: a copy of it in a child is another matter."""
    with transport.local_workers(1) as workers:
        held = [workers[0].call(held_result)]

        def drop() -> int:
            held.clear()
            streamrt.memory.drain(everything=True)
            return len(held)

        assert in_child(drop) == "0"
        for value in range(8):
            workers[0].call(other_result, float(value + 2))
        assert (held[0] == 1).all()


def other_result(value: float) -> Any:
    return np.full(1 << 17, value)
