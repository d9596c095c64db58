"""Large arrays between two processes of one host: by reference, in memory that both map.

What a channel of copies gives by itself has to be shown here: nobody's memory changes under anybody, it is used again
when it is free and not before, and it goes when either process does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import gc
import itertools
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rpc_service
from peer_memory import by, exports_of
from rpc_processes import HERE, WATCHDOG, Worker, open_descriptors, until

import streamrt
import transport
from streamrt.segment import Segment
from streamrt.testing import Latch, without
from transport.channels import SHARED_BYTES, SHARED_MEMORY, OpenError, can_share, choose, exports, imports
from transport.channels.exports import DESCRIPTOR, GRAIN, HEADER_BYTES, SLOTS, Exports, word_of
from transport.channels.imports import Imports
from transport.events import Key, Side
from transport.launch.environment import child_environment
from transport.sharing import Sharing

MIB = 1 << 20
_kept: list[Any] = []


@pytest.fixture(scope="module", params=["host", "stream"])
def child(request: pytest.FixtureRequest) -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1, order=request.param) as workers:
        yield workers[0]


@pytest.fixture
def fresh() -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1) as workers:
        yield workers[0]


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def limit_exports(peer: transport.Peer, limit: int) -> None:
    assert peer._driver.transfers.sharing is not None
    peer._driver.transfers.sharing.exports = Exports(limit)


def listening(path: Path) -> Worker:
    return Worker("rpc_service:service", "--listen", f"unix://{path}")


# What runs in the child -----------------------------------------------------------------------------------------------


def keep(x: Any) -> int:
    _kept.append(x)
    return len(_kept)


def kept_sums() -> list[float]:
    return [float(x.sum()) for x in _kept]


def drop_kept() -> None:
    _kept.clear()


def here() -> Exports:
    return exports_of(transport.caller())


def child_exports() -> tuple[int, int]:
    """Bytes that are out, and bytes that were ever touched, of what the child exports to its parent."""
    return here().used_bytes, here().touched_bytes


def child_limits_exports(limit: int) -> None:
    limit_exports(transport.caller(), limit)


def fill_first(x: Any, y: Any) -> tuple[Any, Any]:
    x[...] = 7
    return x, y


def full(value: float, count: int) -> Any:
    return np.full(count, value, np.float64)


def full_behind(name: str, count: int) -> Any:
    rpc_service.gate(name)
    return np.ones(count, np.float64)


def break_imports() -> None:
    def attach(fd: int) -> Segment:
        os.close(fd)
        raise OSError("no room for the mapping")

    imports.Segment.attach = staticmethod(attach)  # type: ignore[method-assign, assignment]


def descriptors() -> int:
    gc.collect()
    return open_descriptors()


# Values ---------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.T,
    "reversed": lambda x: x[::-1],
    "strided": lambda x: x[::2, 1::3],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["u1", "f2", "i4", "f8", "c16", "?"])
def test_arrays_arrive_equal(child: transport.LocalWorker, dtype: str, layout: str) -> None:
    x = LAYOUTS[layout]((np.arange(1200 * 700) % 2000).reshape(1200, 700).astype(dtype))
    before = by(child)
    y = child.call(rpc_service.echo, x)
    assert y.dtype == x.dtype
    assert y.flags.writeable
    np.testing.assert_array_equal(x, y)
    assert [after - one for after, one in zip(by(child), before, strict=True)] == [x.nbytes, x.nbytes]


@pytest.mark.parametrize("nbytes", [0, 1, SHARED_BYTES - 1, SHARED_BYTES, SHARED_BYTES + 1, MIB - 3, 5 * MIB + 4097])
@pytest.mark.parametrize("copy", [True, False])
def test_sizes_around_the_threshold_and_a_page(child: transport.LocalWorker, nbytes: int, copy: bool) -> None:
    x = rpc_service.pattern(nbytes)
    before = by(child)
    np.testing.assert_array_equal(child.submit(rpc_service.echo, x, copy=copy).result(WATCHDOG), x)
    assert by(child)[0] - before[0] == (nbytes if nbytes > SHARED_BYTES else 0)


def test_many_arrays_and_bytes_in_one_call(child: transport.LocalWorker) -> None:
    value = {
        "arrays": [np.full(size, size, np.int64) for size in (1, 100, 10_000, 30_000, 300_000)],
        "bytes": os.urandom(3 * MIB),
        "text": "x" * 200_000,
    }
    found = child.call(rpc_service.echo, value)
    assert found["bytes"] == value["bytes"]
    assert found["text"] == value["text"]
    for one, other in zip(found["arrays"], value["arrays"], strict=True):
        np.testing.assert_array_equal(one, other)


# Nobody's memory changes under anybody --------------------------------------------------------------------------------


def test_what_the_function_writes_does_not_show_at_the_caller(child: transport.LocalWorker) -> None:
    x = np.zeros(MIB)
    y = child.call(rpc_service.increment, x)
    assert not x.any()
    assert (y == 1).all()
    y[...] = 5
    assert (child.call(rpc_service.increment, x) == 1).all()
    assert (y == 5).all()


def test_two_arrays_over_the_same_bytes_are_two_at_the_callee(child: transport.LocalWorker) -> None:
    x = np.zeros(MIB)
    one, other = child.call(fill_first, x, x[:])
    assert (one == 7).all()
    assert not other.any()


@pytest.mark.parametrize("copy", [True, False])
def test_the_array_may_be_written_once_it_was_sent(child: transport.LocalWorker, name: str, copy: bool) -> None:
    """`sent` comes with the snapshot, not with the end of the function, and not with the end of the array."""
    x = np.ones(MIB)
    future = child.submit(rpc_service.total_behind, x, name, copy=copy)
    future.sent.result(WATCHDOG)
    x[...] = 3
    assert not future.done()
    child.call(rpc_service.open_gate, name)
    assert future.result(WATCHDOG) == MIB


def test_the_bytes_are_those_of_the_call(child: transport.LocalWorker) -> None:
    x = np.empty(MIB // 8)
    futures = []
    for number in range(60):
        x[...] = number
        futures.append(child.submit(rpc_service.total, x))
    x[...] = -1
    assert [future.result(WATCHDOG) for future in futures] == [number * x.size for number in range(60)]


def test_results_that_are_held_stay_as_they_are(child: transport.LocalWorker) -> None:
    held = [child.call(full, number, 50_000) for number in range(30)]
    for number in range(300):
        assert child.call(full, -number, 60_000)[-1] == -number
    for number, array in enumerate(held):
        assert (array == number).all()


def test_an_argument_that_the_callee_keeps_stays_as_it_is(child: transport.LocalWorker) -> None:
    for number in range(5):
        assert child.call(keep, np.full(100_000, number, np.float64)) == number + 1
    for number in range(100):
        child.call(rpc_service.total, np.full(90_000, -number, np.float64))
    assert child.call(kept_sums) == [number * 100_000 for number in range(5)]
    child.call(drop_kept)


def test_received_arrays_go_on_to_others() -> None:
    with transport.local_workers(2) as workers:
        first = workers[0].call(full, 3, MIB)
        second = workers[1].call(rpc_service.increment, first)
        third = workers[0].call(rpc_service.increment, second)
        assert [float(x[0]) for x in (first, second, third)] == [3, 4, 5]
        assert all((x == x[0]).all() for x in (first, second, third))
        assert by(workers[1]) == (8 * MIB, 8 * MIB)


def test_a_worker_hands_on_what_it_was_sent(tmp_path: Path) -> None:
    with listening(tmp_path / "second") as second, listening(tmp_path / "third") as third:
        with transport.connect(second.address) as peer:
            assert peer.call("hand_on", third.address, np.ones(MIB)) == MIB


# Virtual devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [True, False])
def test_a_virtual_device_is_ordered(child: transport.LocalWorker, copy: bool) -> None:
    stream = streamrt.current_stream("host:0")
    x = streamrt.array(np.zeros(MIB), device="host:0")
    before = by(child)
    with Latch(stream) as latch:
        stream.launch(rpc_service.fill, x, 1.0, reads=(), writes=(x,))
        future = child.submit(rpc_service.increment, x, copy=copy)
        assert child.call(rpc_service.add, 1) == 2
        latch.open()
    y = future.result(WATCHDOG)
    assert (np.asarray(y) == 2).all()
    assert by(child)[0] - before[0] == x.nbytes


def test_without_the_event_the_callee_sees_too_little(fresh: transport.LocalWorker) -> None:
    """Calibrates the test above in host order: the descriptor must not go before the snapshot's copy has run."""
    stream = streamrt.current_stream("host:0")
    x = streamrt.array(np.zeros(MIB), device="host:0")
    with without("share.ready"), Latch(stream) as latch:
        stream.launch(rpc_service.fill, x, 3.0, reads=(), writes=(x,))
        assert fresh.submit(rpc_service.total, x).result(WATCHDOG) != 3 * MIB
        latch.open()


# Memory is used again -------------------------------------------------------------------------------------------------


def test_memory_is_bounded_over_many_calls(fresh: transport.LocalWorker) -> None:
    x = np.ones(MIB // 2)
    for _ in range(200):
        assert fresh.call(rpc_service.increment, x)[0] == 2
    assert exports_of(fresh).touched_bytes <= 8 * x.nbytes
    assert fresh.call(child_exports)[1] <= 8 * x.nbytes
    gc.collect()
    until(lambda: fresh.call(child_exports)[0] == 0, "the results to be released")
    until(lambda: exports_of(fresh).used_bytes == 0, "the arguments to be released")


def test_past_the_limit_arrays_go_over_the_link(fresh: transport.LocalWorker) -> None:
    limit_exports(fresh, 4 * MIB)
    fresh.call(child_limits_exports, 4 * MIB)
    big = np.arange(MIB, dtype=np.float64)
    np.testing.assert_array_equal(fresh.call(rpc_service.echo, big), big)
    assert by(fresh) == (0, 0)
    assert by(fresh, "staging") == (big.nbytes, big.nbytes)
    held = [fresh.call(full, number, 100_000) for number in range(12)]
    for number, array in enumerate(held):
        assert (array == number).all()
    assert by(fresh)[1] == 5 * 800_000  # what found room
    del held, array
    gc.collect()
    until(lambda: fresh.call(child_exports)[0] == 0, "the results to be released")
    assert fresh.call(full, 1, 100_000)[0] == 1
    assert by(fresh)[1] == 6 * 800_000


def test_the_limit_of_the_process_holds_for_all_peers() -> None:
    x = np.ones(MIB // 4)
    previous = transport.set_export_limit(exports._taken_bytes + x.nbytes)  # what other connections have, and one array
    try:
        with transport.local_workers(2) as workers:
            for worker in workers:
                assert worker.call(rpc_service.total, x) == x.size
            assert [by(worker)[0] for worker in workers] == [x.nbytes, 0]
            assert by(workers[1], "staging")[0] == x.nbytes
        with transport.local_workers(1) as workers:
            assert workers[0].call(rpc_service.total, x) == x.size
            assert by(workers[0])[0] == x.nbytes, "what an ended connection had was not given back"
    finally:
        transport.set_export_limit(previous)
    with pytest.raises(ValueError, match="negative"):
        transport.set_export_limit(-1)


def test_a_call_that_was_given_up_releases_its_reply(fresh: transport.LocalWorker, name: str) -> None:
    future = fresh.submit(full_behind, name, MIB)
    future.cancel()
    late = fresh.submit(full_behind, name, MIB, timeout=0.05)
    assert isinstance(late.exception(WATCHDOG), transport.DeadlineError)
    fresh.call(rpc_service.open_gate, name)
    until(lambda: fresh.call(child_exports)[0] == 0, "late replies to be released")


def test_the_slot_is_released_behind_the_use_of_the_last_alias(fresh: transport.LocalWorker) -> None:
    view = fresh.call(full, 2, MIB)[10:20]
    gc.collect()
    assert fresh.call(child_exports)[0] == 8 * MIB
    assert (view == 2).all()
    del view
    until(lambda: fresh.call(child_exports)[0] == 0, "the result to be released")


# Declines -------------------------------------------------------------------------------------------------------------


def test_a_callee_that_cannot_map_gets_the_bytes_by_the_link(
    fresh: transport.LocalWorker, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.call(break_imports)
    x = np.arange(MIB, dtype=np.float64)
    futures = [fresh.submit(rpc_service.echo, [x, x + 1]) for _ in range(3)]
    for future in futures:
        one, other = future.result(WATCHDOG)
        np.testing.assert_array_equal(one, x)
        np.testing.assert_array_equal(other, x + 1)
        future.sent.result(WATCHDOG)
    before = by(fresh)
    np.testing.assert_array_equal(fresh.call(rpc_service.echo, x), x)
    assert by(fresh)[0] == before[0], "a channel that has failed was chosen again"
    assert by(fresh)[1] > before[1], "the other direction works"
    assert len([one for one in caplog.records if "shared memory" in one.message]) == 1
    assert exports_of(fresh).used_bytes == 0
    assert fresh._driver.next_timeout() is None or fresh._driver.transfers.sharing.next_look() is None  # type: ignore[union-attr]


def test_a_caller_that_cannot_map_gets_the_bytes_by_the_link(
    fresh: transport.LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(fd: int) -> Segment:
        os.close(fd)
        raise OSError("no room for the mapping")

    monkeypatch.setattr(imports.Segment, "attach", attach)
    for number in range(5):
        assert (fresh.call(full, number, MIB) == number).all()
    assert by(fresh) == (0, 0)
    assert by(fresh, "staging")[1] == 5 * 8 * MIB
    assert fresh.call(child_exports)[0] == 0


def test_a_segment_that_the_kernel_does_not_pass_is_left_out(fresh: transport.LocalWorker) -> None:
    """A user may have so many descriptors on their way; what was shared goes by the link, which holds."""
    link: Any = fresh._driver.link
    real = link._writer._socket

    class NoDescriptors:
        def sendmsg(self, pieces: Any, rights: Any, flags: int) -> int:
            if rights:
                raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
            return int(real.sendmsg(pieces, rights, flags))

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    link._writer._socket = NoDescriptors()
    for number in range(3):
        assert fresh.call(rpc_service.total, np.full(MIB, number, np.float64)) == number * MIB
    assert by(fresh, "staging")[0] == 3 * 8 * MIB
    assert not fresh.closed


# The end of a process -------------------------------------------------------------------------------------------------


def test_held_results_outlive_the_connection_and_the_worker() -> None:
    before = descriptors()
    with transport.local_workers(2) as workers:
        held = [worker.call(full, 4, MIB) for worker in workers]
        workers[0].kill()
    for array in held:
        assert (array == 4).all()
        array[...] = 5
    del held, array
    until(lambda: descriptors() <= before, "the segments to be closed")


def test_kill_in_the_function_leaves_nothing(name: str) -> None:
    before, live = descriptors(), streamrt.memory.statistics().live
    with transport.local_workers(1) as workers:
        worker = workers[0]
        held = worker.call(full, 4, MIB)
        futures = [worker.submit(rpc_service.total_behind, np.ones(MIB), name) for _ in range(3)]
        until(lambda: worker.call(rpc_service.count, name) == 3, "the functions to run")
        worker.kill()
        for future in futures:
            assert isinstance(future.exception(WATCHDOG), transport.PeerLostError)
        assert (held == 4).all()
        del held, future, futures
    until(lambda: descriptors() <= before, "the segments to be closed")
    until(lambda: streamrt.memory.statistics().live <= live, "the memory to be given back")


CALLER = """
import sys, numpy as np, transport
peer = transport.connect(sys.argv[1])
held = [peer.call("pattern", 1 << 20) for _ in range(5)]
futures = [peer.submit("total_behind", np.ones(1 << 17), sys.argv[2]) for _ in range(3)]
while peer.call("count", sys.argv[2]) < 3: pass
print(peer.statistics().bytes_in["shared_memory"], flush=True)
sys.stdin.read()
"""


def test_a_caller_that_is_killed_leaves_nothing_at_the_worker(name: str, tmp_path: Path) -> None:
    with listening(tmp_path / "worker") as worker, transport.connect(worker.address) as peer:

        def of_worker() -> int:
            return len(os.listdir(f"/proc/{worker.pid}/fd"))

        peer.call("held_bytes")  # by then the worker has opened what it watches this process with
        before = of_worker()
        caller = subprocess.Popen(
            [sys.executable, "-c", CALLER, worker.address, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE,
            env=child_environment(),
        )
        with caller:
            assert caller.stdout is not None
            assert int(caller.stdout.readline()) == 5 * MIB
            caller.kill()
        peer.call("open_gate", name)
        until(lambda: of_worker() <= before, "the worker to close the segments")
        until(lambda: peer.call("held_bytes") == 0, "the worker to give the memory back")


# What a peer may claim ------------------------------------------------------------------------------------------------


def imported(nbytes: int = 16 * GRAIN) -> tuple[Segment, Imports]:
    ours = Segment.create(HEADER_BYTES + nbytes)
    found = Imports()
    found.attach(os.dup(ours.fd))
    return ours, found


def test_a_block_is_read_in_place_and_released_by_its_word() -> None:
    ours, found = imported()
    ours.view[HEADER_BYTES + GRAIN] = 77
    buffer = found.open(DESCRIPTOR.pack(0, 5, 9, HEADER_BYTES + GRAIN, 100), 100)
    assert buffer.host_view()[0] == 77
    assert word_of(ours, 5).load() == 0
    del buffer
    streamrt.memory.drain()
    assert word_of(ours, 5).load() == 9
    found.release(DESCRIPTOR.pack(0, 6, 3, 0, 0))
    assert word_of(ours, 6).load() == 3


HOSTILE = {
    "in the words": (0, 1, 1, 0, 100),
    "past the end": (0, 1, 1, HEADER_BYTES + 16 * GRAIN, 100),
    "over the end": (0, 1, 1, HEADER_BYTES + 15 * GRAIN, GRAIN + 1),
    "far past the end": (0, 1, 1, (1 << 64) - GRAIN, 2 * GRAIN),
    "not on a page": (0, 1, 1, HEADER_BYTES + 64, 100),
    "another size": (0, 1, 1, HEADER_BYTES, 101),
    "no such slot": (0, SLOTS, 1, HEADER_BYTES, 100),
    "no such memory": (1, 1, 1, HEADER_BYTES, 100),
}


@pytest.mark.parametrize("claim", HOSTILE)
def test_a_descriptor_of_what_was_not_exported_is_refused(claim: str) -> None:
    _, found = imported()
    fields = HOSTILE[claim]
    nbytes = 100 if claim == "another size" else fields[-1]
    with pytest.raises(OpenError):
        found.open(DESCRIPTOR.pack(*fields), nbytes)


@pytest.mark.parametrize("raw", [b"", b"x", bytes(DESCRIPTOR.size + 1), bytes(4096)])
def test_a_malformed_descriptor_is_refused(raw: bytes) -> None:
    _, found = imported()
    with pytest.raises(OpenError):
        found.open(raw, 100)
    found.release(raw)
    with pytest.raises(OpenError, match="did not come"):
        Imports().open(DESCRIPTOR.pack(0, 1, 1, HEADER_BYTES, 100), 100)


def test_what_is_no_sealed_segment_is_refused_and_closed() -> None:
    before = descriptors()
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, HEADER_BYTES + GRAIN)
    readonly = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(readonly, HEADER_BYTES + GRAIN)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE
    fcntl.fcntl(readonly, fcntl.F_ADD_SEALS, seals)
    pipe, other = os.pipe()
    with Segment.create(GRAIN) as small, Segment.create(HEADER_BYTES + GRAIN) as large:
        short, second = os.dup(small.fd), os.dup(large.fd)
    os.close(other)
    for fd in (unsealed, readonly, pipe, short):
        found = Imports()
        found.attach(fd)
        with pytest.raises(OpenError):
            found.open(DESCRIPTOR.pack(0, 1, 1, HEADER_BYTES, 100), 100)
    ours, found = imported()
    found.attach(second)
    found.open(DESCRIPTOR.pack(0, 1, 1, HEADER_BYTES, 100), 100)  # the first one stands
    found.close()
    ours.close()
    streamrt.memory.drain()
    until(lambda: descriptors() <= before, "all that came to be closed")


def test_a_peer_that_releases_what_was_never_leased_gets_no_more() -> None:
    pool = Exports(16 * GRAIN)
    block = pool.allocate(GRAIN)
    assert block is not None
    theirs = Segment.attach(os.dup(pool.fd))
    block.owner.give(GRAIN)
    word_of(theirs, block.owner.slot.word).store(99)
    del block
    pool.allocate(GRAIN)
    assert pool.allocate(GRAIN) is None


# The pool by itself ---------------------------------------------------------------------------------------------------


def test_blocks_are_whole_again_in_any_order() -> None:
    pool = Exports(64 * GRAIN)
    rng = np.random.default_rng(3)
    held: list[Any] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            del held[int(rng.integers(len(held)))]
        else:
            block = pool.allocate(int(rng.integers(1, 9 * GRAIN)))
            if block is not None:
                spans = sorted((one.owner.offset, one.owner.offset + one.owner.nbytes) for one in [*held, block])
                assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
                held.append(block)
            del block
    held.clear()
    assert pool.used_bytes == 0
    assert pool.allocate(64 * GRAIN) is not None


def test_a_block_that_was_given_waits_for_its_word() -> None:
    pool = Exports(GRAIN)
    block = pool.allocate(GRAIN)
    assert block is not None
    slot = block.owner.slot
    block.owner.give(GRAIN)
    del block
    assert pool.allocate(1) is None
    theirs = Segment.attach(os.dup(pool.fd))
    word_of(theirs, slot.word).store(slot.generation)
    assert pool.allocate(1) is not None


def test_a_block_outlives_its_connection() -> None:
    """What is still to be copied into it must not be unmapped under the copy."""
    before = descriptors()
    pool = Exports(GRAIN)
    block = pool.allocate(GRAIN)
    assert block is not None
    pool.close(lambda: True)
    assert pool.allocate(1) is None
    ctypes.memset(block.address, 1, GRAIN)
    assert descriptors() > before
    del block
    assert descriptors() <= before


def test_slots_run_out_before_memory_does() -> None:
    pool = Exports((SLOTS + 1) * GRAIN)
    held = [pool.allocate(1) for _ in range(SLOTS)]
    assert all(held)
    assert pool.allocate(1) is None
    held.pop()
    assert pool.allocate(1) is not None


def test_who_can_share() -> None:
    one = {"boot": "b", "pid_namespace": "n", "uid": 1, "descriptors": True, "process": "p"}
    other = one | {"process": "q"}
    cpu, host, cuda = (streamrt.Device(kind, 0) for kind in ("cpu", "host", "cuda"))
    assert can_share(one, other)
    near = functools.partial(choose, one_process=False, shares=True)
    assert near(cpu, host, MIB) == SHARED_MEMORY
    assert near(cpu, cpu, SHARED_BYTES) == "staging"
    assert near(cuda, cpu, MIB) == near(cpu, cuda, MIB) == "staging"
    assert choose(cpu, host, MIB, one_process=False, shares=False) == "staging"
    assert choose(cpu, host, MIB, one_process=True, shares=False) == "same_process"
    assert choose(cuda, cpu, MIB, one_process=True, shares=False) == "staging"
    for field, value in {"boot": "c", "pid_namespace": "m", "uid": 2, "descriptors": False, "process": "p"}.items():
        assert not can_share(one, other | {field: value})
    assert not can_share({}, {})


def test_a_transfer_is_not_over_while_one_of_its_blocks_may_be_declined() -> None:
    """The first block that is declined goes again, and all of it may have gone before the second one is declined."""
    sharing = Sharing()
    key = Key(1, True, Side.REQUEST)
    blocks = [sharing.allocate(streamrt.Device("cpu", 0), MIB) for _ in range(2)]
    exported = [block.owner for block in blocks if block is not None]
    for buffer, export in enumerate(exported):
        sharing.given(key, buffer, export.give(MIB))
    assert not sharing.went(key, 0.0)
    assert sharing.declined(key, 0, exported[0].room.device)
    assert not sharing.went(key, 0.0), "the other one may still be declined"
    assert sharing.over(10.0) == []
    assert not sharing.declined(key, 1, exported[1].room.device), "told once"
    assert sharing.over(20.0) == [key]
    assert sharing.went(key, 30.0)
    sharing.close(lambda: True)


def test_no_room_for_a_mapping_is_no_error(fresh: transport.LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(nbytes: int, name: str = "") -> Segment:
        raise OSError("no room for the mapping")

    monkeypatch.setattr(Segment, "create", create)
    assert fresh.call(rpc_service.total, np.ones(MIB)) == MIB
    assert by(fresh)[0] == 0
