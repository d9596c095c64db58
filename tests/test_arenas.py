"""Exported memory of devices: arenas that grow, are mapped once, and go when no process maps them any more.

Virtual devices stand for GPUs here: their backend exports memory under the same Protocol.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import rpc_service
from peer_memory import by, exports_of
from rpc_processes import HERE, WATCHDOG, freeze, open_descriptors, until

import streamrt
import transport
from streamrt.device import Device, ExportedMemory, backend_of, parse_device
from streamrt.errors import ExhaustedError, UnavailableError
from streamrt.segment import Segment
from streamrt.testing import Latch
from transport.channels import OpenError, exports, retired
from transport.channels.exports import (
    ARENA,
    ARENA_GRAIN,
    DESCRIPTOR,
    FIRST_ARENA_BYTES,
    HEADER_BYTES,
    MAPPED,
    MAX_ARENAS,
    UNMAPPED,
    Exports,
    state_of,
    word_of,
)
from transport.channels.imports import Imports
from transport.launch.environment import child_environment
from transport.transfer import Incoming

MIB = 1 << 20
HOST = Device("host", 0)
OTHER = Device("host", 1)
KINDS = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def fresh() -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1, devices=["host:1"], device_map={"host:0": "host:1"}) as workers:
        yield workers[0]


def on_host(count: int, value: float = 1.0) -> Any:
    return streamrt.array(np.full(count, value), device="host:0")


def arenas_of(peer: transport.Peer) -> list[int]:
    return [room.nbytes for rooms in exports_of(peer)._arenas.values() for room in rooms]


# What the backends export ---------------------------------------------------------------------------------------------

READER = """
import sys
import numpy as np
from streamrt.device import open_device
from streamrt.event import Event
from streamrt.stream import Stream

device = open_device(sys.argv[1])
handle, nbytes = bytes.fromhex(sys.stdin.readline()), int(sys.argv[2])
unmapped = []
block = device.backend.import_memory(device.index, handle, nbytes, lambda: unmapped.append(1))
pinned = device.backend.allocate_pinned(nbytes)
stream = Stream(device)
stream.copy(pinned.address, block.address, nbytes)
stream.synchronize(20)
import ctypes
print(ctypes.string_at(pinned.address, nbytes).hex(), flush=True)
del block
import time
deadline = time.monotonic() + 20
while not unmapped and time.monotonic() < deadline:
    time.sleep(0.01)
print(len(unmapped), flush=True)
sys.stdin.read()
"""


def fill(memory: ExportedMemory, device: Device, content: bytes) -> None:
    """Writes the content there, by way of pinned memory."""
    import ctypes

    pinned = device.backend.allocate_pinned(len(content))
    ctypes.memmove(pinned.address, content, len(content))
    stream = streamrt.Stream(device)
    stream.copy(memory.address, pinned.address, len(content))
    stream.synchronize(WATCHDOG)


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_reads_what_a_backend_exports(kind: str) -> None:
    device = streamrt.open_device(f"{kind}:0")
    memory = device.backend.export_memory(0, MIB)
    content = os.urandom(1000)
    fill(memory, device, content)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(device), "1000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
        env=child_environment(),
    )
    with reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(memory.handle.hex() + "\n")
        reader.stdin.flush()
        assert bytes.fromhex(reader.stdout.readline().strip()) == content
        assert reader.stdout.readline().strip() == "1", "the end of the mapping was not told"
        reader.stdin.close()


STREAMS_DIE = """
import sys, threading, streamrt
from streamrt.device import parse_device
device = parse_device(sys.argv[1])
first, source = streamrt.Stream(device), streamrt.array([1.0] * 1000, device=device)
backend, over = device.backend, threading.Event()
target = backend.export_memory(device.index, 1 << 20)
def give_back():
    while not over.is_set():
        backend.export_memory(device.index, 1 << 20)
thread = threading.Thread(target=give_back)
thread.start()
address = streamrt.describe(source).address
for _ in range(3000):
    stream = streamrt.Stream(device)
    stream.copy(target.address, address, 4000)
    stream.wait(first)
    del stream
over.set()
thread.join()
print("alive")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_streams_die_while_memory_waits_for_an_idle_device(kind: str) -> None:
    """Whoever looks at the streams must not ask for one that is being destroyed: the driver crashes."""
    program = [sys.executable, "-c", STREAMS_DIE, f"{kind}:0"]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=HERE, env=child_environment(), check=False)
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_given_back_while_a_latch_is_closed(kind: str) -> None:
    """The driver frees when all work is done, and holds up every other call of the process until then."""
    device = streamrt.open_device(f"{kind}:0")
    source, target = device.backend.export_memory(0, MIB), device.backend.export_memory(0, MIB)
    closed, other = streamrt.Stream(device), streamrt.Stream(device)
    for _ in range(30):
        device.backend.export_memory(0, MIB)  # dropped at once
        with Latch(closed):
            other.copy(target.address, source.address, MIB)
            other.synchronize(20)
            device.backend.export_memory(0, MIB)
            other.copy(target.address, source.address, MIB)
            other.synchronize(20)
            assert not closed.query()


@pytest.mark.parametrize("kind", KINDS)
def test_handles_that_are_none_are_refused(kind: str) -> None:
    backend = backend_of(kind)
    backend.open(0)
    memory = backend.export_memory(0, MIB)
    for handle in (b"", b"x", bytes(len(memory.handle)), memory.handle + b"x"):
        with pytest.raises(UnavailableError):
            backend.import_memory(0, handle, 100, lambda: None)
    with pytest.raises((ExhaustedError, UnavailableError, ValueError)):
        backend.export_memory(0, 1 << 50)


def test_no_more_is_read_than_was_exported() -> None:
    memory = backend_of("host").export_memory(0, 4096)
    told = []
    with pytest.raises(UnavailableError, match="4096 bytes as 8192"):
        backend_of("host").import_memory(0, memory.handle, 8192, lambda: told.append(1))
    assert told == []


# Calls ----------------------------------------------------------------------------------------------------------------


def where(x: Any) -> str:
    return str(streamrt.device_of(x))


def test_arenas_grow_by_need_and_are_used_again(fresh: transport.LocalWorker) -> None:
    assert fresh.call(where, on_host(MIB)) == "host:1"
    assert arenas_of(fresh) == [8 * MIB]
    assert fresh.call(rpc_service.total, on_host(5 * MIB // 4)) == 5 * MIB // 4
    assert arenas_of(fresh) == [8 * MIB, 10 * MIB]
    for _ in range(30):
        assert (np.asarray(fresh.call(rpc_service.increment, on_host(MIB))) == 2).all()
    assert sum(arenas_of(fresh)) <= 34 * MIB
    until(lambda: exports_of(fresh).used_bytes == 0, "the arguments to be released")


def test_a_handle_goes_until_the_peer_has_mapped_the_arena() -> None:
    pool = Exports()
    block = pool.allocate(100, HOST)
    assert block is not None
    export = block.owner
    assert len(export.give(100)) == DESCRIPTOR.size + ARENA.size + len(export.room.handle)
    with Segment.attach(os.dup(pool.fd)) as theirs:
        state_of(theirs, export.room.number).store(MAPPED)
        assert len(export.give(100)) == DESCRIPTOR.size
    assert export.room.nbytes == FIRST_ARENA_BYTES


def break_arenas() -> None:
    """From now on this process maps no memory of devices."""

    def refuse(index: int, handle: bytes, nbytes: int, unmapped: Any) -> Any:
        raise UnavailableError("the peer's GPU is not visible here")

    backend_of("host").import_memory = refuse  # type: ignore[method-assign]


def test_a_device_that_the_peer_cannot_map_goes_over_the_link(
    fresh: transport.LocalWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """pytorch/pytorch#95487, pytorch/tensorpipe#412: the process aborted.  Ordinary memory is still shared."""
    assert fresh.call(rpc_service.total, np.ones(MIB)) == MIB
    fresh.call(break_arenas)
    before = by(fresh)
    futures = [
        fresh.submit(rpc_service.total, [on_host(MIB, 2.0), on_host(MIB, 3.0)][number % 2]) for number in range(4)
    ]
    for number, future in enumerate(futures):
        assert future.result(WATCHDOG) == (2 + number % 2) * MIB
        future.sent.result(WATCHDOG)
    assert by(fresh, "staging")[0] >= 4 * 8 * MIB
    staged = by(fresh, "staging")[0]
    assert fresh.call(rpc_service.total, on_host(MIB)) == MIB
    assert by(fresh, "staging")[0] == staged + 8 * MIB
    assert fresh.call(rpc_service.total, np.ones(MIB)) == MIB
    assert by(fresh)[0] >= before[0] + 8 * MIB, "what can be shared is shared"
    assert len([one for one in caplog.records if "shared memory of host:0" in one.message]) == 1
    until(lambda: exports_of(fresh).used_bytes == 0, "the blocks to be free")


def test_no_room_on_the_device_is_no_error(fresh: transport.LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int, nbytes: int) -> ExportedMemory:
        raise ExhaustedError("host:0 is full")

    taken = exports._taken_bytes
    monkeypatch.setattr(backend_of("host"), "export_memory", refuse)
    assert fresh.call(rpc_service.total, on_host(MIB)) == MIB
    assert by(fresh)[0] == 0
    assert exports._taken_bytes == taken


def test_an_arena_that_is_over_the_limit_is_made_as_small_as_can_be(fresh: transport.LocalWorker) -> None:
    previous = transport.set_export_limit(exports._taken_bytes + 3 * MIB)
    try:
        assert fresh.call(rpc_service.total, on_host(MIB // 4)) == MIB // 4
        assert arenas_of(fresh) == [2 * MIB]
        assert fresh.call(rpc_service.total, on_host(MIB)) == MIB
        assert by(fresh) == (2 * MIB, 0)
    finally:
        transport.set_export_limit(previous)


# The end --------------------------------------------------------------------------------------------------------------


def echo_from(device: str, count: int) -> Any:
    return streamrt.array(np.ones(count), device=device)


def test_arenas_go_once_the_peer_maps_them_no_more() -> None:
    until(lambda: retired.kept() == 0, "what other tests have left")
    before, taken = open_descriptors(), exports._taken_bytes
    with transport.local_workers(1, device_map={"host:0": "host:0"}) as workers:
        for _ in range(3):
            workers[0].call(rpc_service.increment, on_host(MIB))
        assert exports._taken_bytes > taken
    gc.collect()
    streamrt.memory.drain(everything=True)
    until(lambda: retired.kept() == 0, "the arenas to be dropped")
    until(lambda: open_descriptors() <= before, "the arenas to be closed")
    assert exports._taken_bytes == taken


def test_a_frozen_peer_keeps_its_arenas_until_it_is_gone() -> None:
    """What a stopped process has mapped must not be used again under it."""
    with transport.local_workers(1, device_map={"host:0": "host:0"}) as workers:
        worker = workers[0]
        assert worker.call(rpc_service.total, on_host(MIB)) == MIB
        ((arena,),) = exports_of(worker)._arenas.values()

        def kept() -> bool:
            return any(one.memory is arena.memory for one in retired.keeper.entries)

        freeze(worker.pid)
        worker.abort()
        until(kept, "the arena to be kept")
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: not kept(), "the arena to be dropped")


def test_a_peer_that_is_killed_leaves_nothing() -> None:
    before, live = open_descriptors(), streamrt.memory.statistics().live
    with transport.local_workers(1, device_map={"host:0": "host:0"}) as workers:
        futures = [workers[0].submit(rpc_service.increment, on_host(MIB)) for _ in range(8)]
        workers[0].kill()
        for future in futures:
            future.exception(WATCHDOG)
        del future, futures
    gc.collect()
    streamrt.memory.drain(everything=True)
    until(lambda: retired.kept() == 0, "the arenas to be dropped")
    until(lambda: open_descriptors() <= before, "the arenas to be closed")
    until(lambda: streamrt.memory.statistics().live <= live, "the memory to be given back")


def test_an_arena_that_was_never_announced_goes_at_once() -> None:
    pool, before = Exports(), retired.kept()
    assert pool.allocate(100, HOST) is not None
    pool.close(lambda: False)
    assert retired.kept() == before


def test_an_arena_that_was_announced_and_never_mapped_goes_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that carried the segment was lost with its link, and the peer goes on."""
    monkeypatch.setattr(exports, "NEVER_MAPPED_SECONDS", 0.3)
    before = retired.kept()
    pools = [Exports(), Exports()]
    for pool in pools:
        assert pool.allocate(100, HOST) is not None
        pool.announced = True
    with Segment.attach(os.dup(pools[1].fd)) as theirs:
        state_of(theirs, 0).store(MAPPED)  # this peer has received it, and says when it is done
        for pool in pools:
            pool.close(lambda: False)
        assert retired.kept() == before + 2
        until(lambda: retired.kept() == before + 1, "the one that was never mapped to be dropped")
        state_of(theirs, 0).store(UNMAPPED)
        until(lambda: retired.kept() == before, "the other one to be dropped")


def test_no_thread_for_what_is_retired_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter no thread can be started: the connection closes all the same."""
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "streamrt-retired":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        real(self)

    until(lambda: retired.kept() == 0, "what other tests have left")
    over = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", start)
    retired.keep(object(), over.is_set, int)
    assert retired.kept() == 1
    monkeypatch.undo()
    retired.keep(object(), over.is_set, int)  # the next one tries again
    over.set()
    until(lambda: retired.kept() == 0, "both to be dropped")


def no_room() -> None:
    """From now on this process has no memory for what it receives."""

    def refuse(self: Any, *args: Any) -> None:
        raise ExhaustedError("no room")

    Incoming._add = refuse  # type: ignore[method-assign]


def test_a_notify_that_finds_no_room_ends(fresh: transport.LocalWorker) -> None:
    """Nobody maps its arena, and nobody answers a notify: its slot is given back, which says enough."""
    fresh.call(no_room)
    fresh.notify(rpc_service.total, on_host(MIB)).result(WATCHDOG)
    until(lambda: exports_of(fresh).used_bytes == 0, "the block to be free")


def test_snapshots_of_one_stream_do_not_wait_for_another() -> None:
    stuck, idle = streamrt.Stream("host:0"), streamrt.Stream("host:0")
    x = on_host(MIB)
    pool = Exports()
    with Latch(stuck):
        for stream in (stuck, idle):
            with streamrt.using(stream), Latch(stream) if stream is idle else contextlib.nullcontext():
                streamrt.memory.snapshot([x], allocate_at=lambda device, nbytes: pool.allocate(nbytes, device))
                streamrt.memory.drain()
        idle.synchronize(WATCHDOG)
        streamrt.memory.drain()
        until(lambda: pool.used_bytes == 8 * MIB, "the idle stream's snapshot to be given back")
    pool.close(lambda: True)


# What a peer may claim ------------------------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[tuple[Segment, Imports, ExportedMemory]]:
    words = Segment.create(HEADER_BYTES + 4096)
    found = Imports()
    found.attach(os.dup(words.fd))
    yield words, found, backend_of("host").export_memory(0, 16 * ARENA_GRAIN)
    found.close()


def described(number: int, offset: int, nbytes: int, memory: ExportedMemory) -> bytes:
    return DESCRIPTOR.pack(number, 3, 7, offset, nbytes) + ARENA.pack(memory.nbytes) + memory.handle


def test_a_block_is_mapped_once_and_released_by_its_word(shared: tuple[Segment, Imports, ExportedMemory]) -> None:
    words, found, memory = shared
    fill(memory, parse_device("host:0"), b"x" * 700)
    buffer = found.open(described(1, ARENA_GRAIN, 100, memory), 100, HOST)
    assert bytes(buffer.host_view()) == b"x" * 100
    assert state_of(words, 1).load() == MAPPED
    again = found.open(DESCRIPTOR.pack(1, 4, 8, ARENA_GRAIN, 100), 100, HOST)  # by its number alone
    assert again.address == buffer.address
    other = found.open(DESCRIPTOR.pack(1, 5, 9, 0, 100), 100, OTHER)
    assert other.device == OTHER
    found.close()
    del buffer, again
    streamrt.memory.drain()
    assert word_of(words, 3).load() == 7
    assert state_of(words, 1).load() == MAPPED, "a block of it is still read"
    assert state_of(words, 0).load() == UNMAPPED
    del other
    streamrt.memory.drain()
    assert state_of(words, 1).load() == UNMAPPED


HOSTILE = {
    "past the end": (1, 16 * ARENA_GRAIN, 100),
    "over the end": (1, 15 * ARENA_GRAIN, ARENA_GRAIN + 1),
    "far past the end": (1, (1 << 64) - ARENA_GRAIN, 2 * ARENA_GRAIN),
    "not on the grain": (1, 64, 100),
    "no such number": (MAX_ARENAS + 1, 0, 100),
}


@pytest.mark.parametrize("claim", HOSTILE)
def test_a_descriptor_of_what_was_not_exported_is_refused(
    claim: str, shared: tuple[Segment, Imports, ExportedMemory]
) -> None:
    _, found, memory = shared
    number, offset, nbytes = HOSTILE[claim]
    with pytest.raises(OpenError):
        found.open(described(number, offset, nbytes, memory), nbytes, HOST)


def test_an_arena_needs_its_handle_first(shared: tuple[Segment, Imports, ExportedMemory]) -> None:
    words, found, memory = shared
    with pytest.raises(OpenError, match="not exported"):
        found.open(DESCRIPTOR.pack(1, 3, 7, 0, 100), 100, HOST)
    with pytest.raises(OpenError):
        found.open(DESCRIPTOR.pack(2, 3, 7, 0, 100) + ARENA.pack(1 << 40) + memory.handle, 100, HOST)
    with pytest.raises(OpenError):
        found.open(DESCRIPTOR.pack(3, 3, 7, 0, 100) + ARENA.pack(4096) + b"nonsense", 100, HOST)
    assert [state_of(words, number).load() for number in (1, 2, 3)] == [0, 0, 0]


def test_a_call_whose_bytes_are_there_is_one_message_each_way(fresh: transport.LocalWorker) -> None:
    """From the second call on, when the peer has mapped the arena: descriptors stand in the header."""
    for _ in range(3):
        assert fresh.call(rpc_service.total, on_host(100_000)) == 100_000
        assert fresh.call(rpc_service.echo, on_host(100_000)).shape == (100_000,)
    before, moved = fresh.statistics(), by(fresh)
    result = fresh.call(rpc_service.echo, on_host(100_000, 7.0))
    after = fresh.statistics()
    assert (np.asarray(result) == 7.0).all()
    assert (after.messages_out - before.messages_out, after.messages_in - before.messages_in) == (1, 1)
    assert by(fresh) == (moved[0] + 800_000, moved[1] + 800_000)


def test_what_is_retired_is_told_apart_by_identity() -> None:
    """Lent arrays are kept as they are, and two arrays compare as an array."""
    until(lambda: retired.kept() == 0, "what other tests have left")
    first, second = threading.Event(), threading.Event()
    retired.keep(np.ones(3), first.is_set, int)
    retired.keep(np.ones(3), second.is_set, int)
    second.set()
    until(lambda: retired.kept() == 1, "the second to be dropped")
    first.set()
    until(lambda: retired.kept() == 0, "the first to be dropped")
