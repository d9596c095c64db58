"""A user's own memory, lent to another process: read where it lies, released by a word, unmapped when it is not lent.

Virtual devices stand for GPUs: memory that their backend exports stands for what ``cudaMalloc`` gives.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import rpc_service
from peer_memory import by, exports_of
from rpc_processes import WATCHDOG, Worker, freeze, until

import streamrt
import transport
from streamrt import buffers
from streamrt.arrays import wrap
from streamrt.device import Block, Device
from streamrt.errors import UnavailableError
from streamrt.testing import Latch
from transport.channels import exports

HOST = Device("host", 0)
MIB = 1 << 20
COUNT = MIB // 4
MAP = {"host:0": "host:0", "cpu": "cpu"}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker("rpc_service:service", "--listen", f"unix://{tmp_path_factory.mktemp('lent')}/s", "--threads", "4")
    yield worker
    worker.stop()


@pytest.fixture
def peer(worker: Worker) -> Iterator[transport.Peer]:
    with transport.connect(worker.address, device_map=MAP) as peer:
        yield peer


@pytest.fixture
def control(worker: Worker) -> Iterator[transport.Peer]:
    with transport.connect(worker.address, device_map=MAP) as peer:
        yield peer


def own(count: int = COUNT, value: float = 1.0, *, memory: Any = None, offset: int = 0) -> Any:
    """An array in an allocation that another process can map, as the user's own may be."""
    memory = memory or streamrt.open_device(HOST).backend.export_memory(0, 4 * count)
    array = wrap(memory.address + offset, 4 * count, (count,), "float32", HOST, memory, "numpy")
    array[...] = value
    return array


def test_a_lent_array_is_read_where_it_lies(peer: transport.Peer) -> None:
    """What is written before the message goes is seen, which a snapshot would not show; so nothing was copied."""
    x = own()
    stream = streamrt.current_stream(HOST)
    for copy, seen in ((False, 3.0), (True, 1.0)):
        x[...] = 1.0
        with Latch(stream):
            future = peer.submit("total", x, copy=copy)
            if not copy:
                x[...] = 3.0
        assert future.result(WATCHDOG) == seen * COUNT
        future.sent.result(WATCHDOG)
    assert by(peer) == (2 * MIB, 0)
    assert peer.statistics().bytes_out.get("staging", 0) == 0


def test_it_is_free_when_the_peer_has_released_it(peer: transport.Peer, control: transport.Peer) -> None:
    x, name = own(), uuid.uuid4().hex
    future = peer.submit("borrowed_behind", x, name, copy=False)
    until(lambda: control.call("count", name) == 1, "the function to begin")
    assert not future.sent.done()
    x[0], x[-1] = 5.0, 7.0  # it reads in place, so it sees what is written while it waits
    control.call("open_gate", name)
    assert future.result(WATCHDOG) == 12.0
    future.sent.result(WATCHDOG)
    assert exports_of(peer).lent == 0


def test_a_borrowed_snapshot_stays_until_the_function_lets_go_of_it(
    peer: transport.Peer, control: transport.Peer
) -> None:
    x, name = own(), uuid.uuid4().hex
    future = peer.submit("borrowed_behind", x, name)
    until(lambda: control.call("count", name) == 1, "the function to begin")
    for value in range(8):
        assert peer.call("total", own(COUNT, value)) == value * COUNT
    x[...] = 9.0
    control.call("open_gate", name)
    assert future.result(WATCHDOG) == 2.0


def test_b40_offsets_into_one_allocation(peer: transport.Peer) -> None:
    """numba/numba#3310, cupy/cupy#9436: the handle names the allocation, not the array."""
    memory = streamrt.open_device(HOST).backend.export_memory(0, 4 * MIB)
    size = 40_000
    pieces = [own(size + n, n + 1, memory=memory, offset=4 * ((size + 3) * n + 1)) for n in range(5)]
    for number, x in enumerate(pieces):
        assert peer.call("total", x, copy=False) == (size + number) * (number + 1)
    back = peer.call("echo", pieces, copy=False)
    for one, other in zip(back, pieces, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)
    assert len(exports_of(peer)._allocations) == 1


def test_memory_that_cannot_be_exported_goes_as_a_snapshot(peer: transport.Peer) -> None:
    x = streamrt.array(np.ones(COUNT, np.float32), device="host:0")
    future = peer.submit("total", x, copy=False)
    future.sent.result(WATCHDOG)
    assert future.result(WATCHDOG) == COUNT
    assert not exports_of(peer)._allocations
    assert by(peer)[0] == MIB


def test_allocations_come_and_go(peer: transport.Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer keeps a few mapped; numbers are used again once it has unmapped what they named."""
    monkeypatch.setattr(exports, "MOST_LENT", 3)
    monkeypatch.setattr(exports, "MAX_ARENAS", 8)
    given: list[int] = []
    lend = exports.Exports.lend

    def lent(*arguments: Any) -> Any:
        block = lend(*arguments)
        given.append(block.room.number if block is not None else 0)
        return block

    monkeypatch.setattr(exports.Exports, "lend", lent)
    for value in range(40):
        future = peer.submit("total", own(1000 * 64, value), copy=False)
        assert future.result(WATCHDOG) == 64_000.0 * value
        future.sent.result(WATCHDOG)
    mine = exports_of(peer)
    assert len(mine._allocations) <= 3
    assert peer.statistics().bytes_out.get("staging", 0) == 0
    numbers = [number for number in given if number]
    assert len(given) == 40
    assert len(numbers) > len(set(numbers)), "no number was used again"
    assert max(numbers) <= 8


def test_another_allocation_at_the_same_address_is_another(peer: transport.Peer) -> None:
    for value in range(20):
        x = own(COUNT, value)
        future = peer.submit("total", x, copy=False)
        assert future.result(WATCHDOG) == value * COUNT
        future.sent.result(WATCHDOG)
        del x, future
        gc.collect()


def test_a_lost_peer_ends_what_it_was_lent(tmp_path: Any) -> None:
    worker = Worker("rpc_service:service", "--listen", f"unix://{tmp_path}/s")
    with transport.connect(worker.address, device_map=MAP) as peer:
        x, name = own(), uuid.uuid4().hex
        future = peer.submit("borrowed_behind", x, name, copy=False)
        worker.process.kill()
        assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
        until(future.sent.done, "the end of what was lent")
    worker.wait()


def test_nothing_is_lent_of_what_is_no_array_of_a_device(peer: transport.Peer) -> None:
    assert peer.call("total", np.ones(COUNT, np.float32), copy=False) == COUNT
    assert peer.call("total", own()[::2], copy=False) == COUNT // 2, "not contiguous: a snapshot"
    assert not exports_of(peer)._allocations


def test_the_release_is_seen_whichever_thread_ran_the_function(peer: transport.Peer, control: transport.Peer) -> None:
    """A function that took long, and one that had to wait for a thread, leave nobody who would look by chance."""
    x = own()
    for _ in range(2):
        name = uuid.uuid4().hex
        futures = [peer.submit("borrowed_behind", x, name, copy=False) for _ in range(3)]
        until(functools.partial(at_least, control, name, 3), "the functions to begin")
        control.call("open_gate", name)
        for future in futures:
            assert future.result(WATCHDOG) == 2.0
            future.sent.result(5)  # seconds: no ping of a connection comes so soon
    assert exports_of(peer).lent == 0


def at_least(control: transport.Peer, name: str, count: int) -> bool:
    return bool(control.call("count", name) >= count)


def test_what_runs_when_a_lent_array_goes_may_call(peer: transport.Peer) -> None:
    """The user's finaliser runs with no lock held."""
    answers: list[Any] = []
    x = own()
    weakref.finalize(x, lambda: answers.append(peer.submit("total", np.ones(COUNT, np.float32))))
    future = peer.submit("total", x, copy=False)
    del x
    assert future.result(WATCHDOG) == COUNT
    until(lambda: answers, "the finaliser")
    assert answers[0].result(WATCHDOG) == COUNT


def test_two_borrowed_views_of_one_memory_are_used_together() -> None:
    """The peer may have lent one array to two calls: a use of either is a use of both."""
    device = streamrt.open_device(HOST)
    memory = device.backend.export_memory(0, 4096)
    released: list[str] = []

    class Lease:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            released.append(self.name)

    def borrow(name: str) -> Any:
        buffer = buffers.adopt(Block(memory.address, 4096, Lease(name)), HOST)
        return wrap(buffer.address, 4096, (1024,), "float32", HOST, buffer.holder(), "numpy")

    first, second = borrow("first"), borrow("second")
    side = streamrt.Stream(HOST)
    with Latch(side):
        streamrt.use(first, side)
        del first
        streamrt.memory.drain(everything=True)
        assert released == []
    side.synchronize()
    streamrt.memory.drain(everything=True)
    assert released == ["first"]
    del second
    streamrt.memory.drain(everything=True)
    assert released == ["first", "second"]


def test_a_decline_that_comes_late_frees_what_was_lent() -> None:
    """The call was cancelled, so nobody waits for the decline; its slot is written all the same."""
    with transport.local_workers(1, device_map={"host:0": "host:0"}) as workers:
        worker = workers[0]
        assert worker.call(rpc_service.total, own()) == COUNT
        worker.call(refuse_to_map)
        freeze(worker.pid)
        future = worker.submit(rpc_service.total, own(), copy=False)
        until(lambda: exports_of(worker).lent == 1, "the array to be lent")
        future.cancel()
        os.kill(worker.pid, signal.SIGCONT)
        until(lambda: exports_of(worker).lent == 0, "the array to be free")
        until(future.sent.done, "the end of `sent`")


def refuse_to_map() -> None:
    def refuse(*arguments: Any) -> Any:
        raise UnavailableError("not here")

    streamrt.open_device(HOST).backend.import_memory = refuse  # type: ignore[method-assign]
