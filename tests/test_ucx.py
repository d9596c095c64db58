"""UCX between two processes: what goes by it, that it comes right, and what becomes of it when anything fails.

What needs no ucxx runs everywhere; the rest is skipped where it is not installed.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rpc_service
from rpc_processes import HERE, WATCHDOG, Worker, run_worker, until

import streamrt
import transport
from streamrt import memory
from streamrt.device import CPU, parse_device
from streamrt.testing import Latch, without
from transport.channels import (
    CHANNELS_VARIABLE,
    asked,
    can_share,
    can_tag,
    choose,
    retired,
    shares_first,
    ucx,
    ucx_traffic,
)
from transport.channels.tag_messages import RECEIVE_EDGE, SECRET_BYTES, SEND_EDGE, TagPath, tag_of
from transport.channels.ucx_messages import End, Message
from transport.channels.ucx_worker import process_worker
from transport.errors import LocalProtocolError
from transport.events import Key, Side
from transport.launch.environment import child_environment

MIB = 1 << 20
FORCED = "ucx,staging"
INSTALLED = importlib.util.find_spec("ucxx") is not None
needs_ucxx = pytest.mark.skipif(not INSTALLED, reason="ucxx is not installed: pip install 'streamrt[ucx-cu13]'")
HOST, GPU = parse_device("host:0"), parse_device("cuda:0")


# Which buffers go by it: a pure function of both ends -----------------------------------------------------------------


def end(**fields: object) -> dict[str, object]:
    """What a process says of itself over AF_UNIX, with fields of one's own."""
    same = {"boot": "b", "pid_namespace": "n", "uid": 1, "descriptors": True, "ucx": True}
    return {**same, "process": uuid.uuid4().hex, **fields}


def asking(*channels: str, **fields: object) -> dict[str, object]:
    """The same of a process whose environment names channels."""
    return end(channels=list(channels), **fields)


@pytest.mark.parametrize("boot", ["b", "of another host"])
def test_ucx_is_not_used_where_nobody_asks_for_it(boot: str) -> None:
    assert not can_tag(end(), end(boot=boot))
    assert shares_first(end(), end())
    assert choose(GPU, GPU, 1 << 30, one_process=False, shares=False, tags=False) == "staging"


@pytest.mark.parametrize("boot", ["b", "of another host"])
def test_who_asks_for_ucx_gets_it_for_everything_both_ways(boot: str) -> None:
    a, b = asking("ucx", "staging"), end(boot=boot)
    for local, remote in ((a, b), (b, a)):
        assert can_tag(local, remote)
        assert not can_share(local, remote)
        assert not shares_first(local, remote)
    for source, target in ((CPU, CPU), (GPU, GPU), (GPU, CPU), (CPU, HOST)):
        assert choose(source, target, 1, one_process=False, shares=False, tags=True) == "ucx"


def test_ucx_named_first_goes_before_shared_memory_and_named_second_behind_it() -> None:
    first, second = asking("ucx", "shared_memory", "staging"), asking("shared_memory", "ucx", "staging")
    assert not shares_first(first, end())
    assert shares_first(second, end())
    assert can_share(first, end())
    assert can_tag(second, end())
    assert choose(GPU, GPU, 4, one_process=False, shares=True, tags=True) == "shared_memory"
    assert choose(GPU, CPU, 4, one_process=False, shares=True, tags=True) == "ucx"


def test_in_one_process_memory_is_handed_over_whatever_is_asked_for() -> None:
    assert choose(CPU, CPU, 1 << 20, one_process=True, shares=False, tags=True) == "same_process"


def test_empty_buffers_go_by_no_channel_that_has_to_say_that_they_came() -> None:
    assert choose(CPU, CPU, 0, one_process=False, shares=False, tags=True) == "staging"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"ucx": False}, {}),
        ({}, {"ucx": False}),
        ({}, {"ucx": None}),
        ({}, {"channels": ["staging"]}),
        ({}, {"channels": ["shared_memory", "staging"]}),
        ({"process": "p"}, {"process": "p"}),
    ],
    ids=["not here", "not there", "an older peer", "not wanted there", "nor there", "one process"],
)
def test_both_ends_have_to_have_and_want_it(ours: dict[str, object], theirs: dict[str, object]) -> None:
    a, b = asking("ucx", "staging", **ours), end(**theirs)
    assert not can_tag(a, b)
    assert not can_tag(b, a)


def test_a_stranger_over_tcp_is_given_no_ucx_unless_both_ends_were_told() -> None:
    """UCX reads what a peer says is its address, and does not check it."""
    a, b = end(descriptors=False), asking("ucx", "staging", descriptors=False)
    assert not can_tag(a, b)
    assert not can_tag(b, a)
    assert can_tag(b, asking("ucx", descriptors=False))


def test_what_a_peer_claims_of_the_link_is_not_believed() -> None:
    assert not can_tag(end(descriptors=False), asking("ucx", descriptors=True))


def test_hostile_lists_of_channels_name_nothing() -> None:
    for named in (["rubbish", 7, None, ["ucx"]], "ucx", {"ucx": 1}, 3):
        assert not can_tag(end(), end(channels=named))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", None),
        (" , ", None),
        ("ucx", ("ucx", "staging")),
        ("ucx,staging", ("ucx", "staging")),
        (" ucx , shared_memory ", ("ucx", "shared_memory", "staging")),
        ("staging,ucx", ("ucx", "staging")),
        ("staging", ("staging",)),
    ],
)
def test_the_environment_names_channels(
    text: str, names: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHANNELS_VARIABLE, text)
    assert asked() == names


def test_a_channel_that_there_is_not_is_an_error_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNELS_VARIABLE, "ucx,rdma")
    before = set(threading.enumerate())
    with pytest.raises(LocalProtocolError, match="names 'rdma'; use some of shared_memory, ucx, staging"):
        transport.loopback(transport.Service())
    assert not [one for one in set(threading.enumerate()) - before if "agent-loopback" in one.name]


def test_a_worker_refuses_a_channel_that_there_is_not() -> None:
    code, _, errors = run_worker("rpc_service:service", environment={CHANNELS_VARIABLE: "rdma"})
    assert code == 2
    assert "names 'rdma'" in errors


def test_tags_are_of_one_transfer_and_one_end() -> None:
    ours, theirs = b"1" * SECRET_BYTES, b"2" * SECRET_BYTES
    tags = [
        tag_of(secret, Key(call, True, side), buffer, receipt=receipt)
        for secret in (ours, theirs)
        for call in (1, 12, 121)
        for side in Side
        for buffer in (0, 1, 21)
        for receipt in (False, True)
    ]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < 1 << 64 for tag in tags)


def test_both_ends_know_one_tag_for_a_transfer() -> None:
    secret = b"s" * SECRET_BYTES
    for side in Side:
        assert tag_of(secret, Key(7, True, side), 3) == tag_of(secret, Key(7, False, side), 3)


# Where it cannot be used ----------------------------------------------------------------------------------------------


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNELS_VARIABLE, FORCED)


def echo(*values: Any) -> Any:
    return values if len(values) > 1 else values[0]


def test_without_ucxx_it_is_said_once_and_the_next_channel_is_used(
    forced: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)  # as where it is not installed
    ucx.available.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "transport"), transport.local_workers(1) as (worker,):
            x = np.arange(MIB)
            for _ in range(3):
                assert np.array_equal(worker.call(echo, x), x)
            assert set(worker.statistics().bytes_out) == {"staging"}
            assert set(worker.channels().values()) == {"staging"}
    finally:
        ucx.available.cache_clear()
    assert [record.message for record in caplog.records if "ucxx is not installed" in record.message]
    assert len(caplog.records) == 1


class Heard:
    """A path whose worker is never started: what peers may tell of themselves is checked before it is used."""

    def __init__(self) -> None:
        self.path = TagPath(lambda: None, lambda: False)


@pytest.mark.parametrize("payload", [b"", b"s" * SECRET_BYTES, b"s" * (SECRET_BYTES + ucx.MAX_ADDRESS_BYTES + 1)])
def test_an_address_of_no_length_that_an_address_has_is_not_used(payload: bytes) -> None:
    path = Heard().path
    path.heard(payload)
    assert path.broken == "the peer has no UCX that works"
    assert path.complain() == path.broken
    assert path.complain() == ""


def test_a_second_address_changes_nothing() -> None:
    path = Heard().path
    path.heard(b"s" * SECRET_BYTES + b"first")
    first = path._end
    path.heard(b"t" * SECRET_BYTES + b"second")
    assert path._end is first
    assert path._their_secret == b"s" * SECRET_BYTES
    path.close(graceful=True)
    path.close(graceful=True)


def test_a_peer_that_never_says_where_it_is_is_given_up() -> None:
    path = Heard().path
    path.deadline = 5.0
    path.check(4.9)
    assert not path.broken
    path.check(5.0)
    assert "has not told where its UCX is" in path.broken
    assert path.deadline is None


# Two processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def child() -> Iterator[transport.LocalWorker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHANNELS_VARIABLE, FORCED)
        workers = transport.local_workers(1)
    with workers:
        yield workers[0]


@pytest.fixture
def fresh(forced: None) -> Iterator[transport.LocalWorker]:
    with transport.local_workers(1) as workers:
        yield workers[0]


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def bytes_of(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def by_ucx(peer: transport.Peer) -> tuple[int, int]:
    counted = peer.statistics()
    return counted.bytes_out.get("ucx", 0), counted.bytes_in.get("ucx", 0)


def settled() -> bool:
    """Whether UCX has nothing of ours any more: no message is on its way, and none is kept."""
    traffic = process_worker()._traffic
    return traffic is None or not (traffic.underway or traffic.touching)


def gated(name: str, x: Any) -> int:
    rpc_service.gate(name)
    return int(x.size)


def call_back(name: str, count: int, times: int) -> int:
    """Sends arrays to whoever called, many at once, and counts those that come back right."""
    peer = transport.caller()
    futures = [peer.submit("mirror", bytes_of(count + number, number)) for number in range(times)]
    return sum(np.array_equal(future.result(), bytes_of(count + n, n)) for n, future in enumerate(futures))


@needs_ucxx
@pytest.mark.parametrize("count", [0, 1, 65537, MIB, 16 * MIB + 3, 64 * MIB])
def test_arrays_of_every_size_come_back_equal(child: transport.LocalWorker, count: int) -> None:
    before = by_ucx(child)
    x = bytes_of(count, count)
    assert np.array_equal(child.call(echo, x), x)
    moved = 0 if count < 65537 else count  # small ones travel inside the message
    assert by_ucx(child) == (before[0] + moved, before[1] + moved)


@needs_ucxx
def test_hundreds_of_messages_at_once_both_ways(child: transport.LocalWorker) -> None:
    service = transport.Service()
    service.function(echo, name="mirror")
    sizes = [70_000 + 997 * number for number in range(300)]
    futures = [child.submit(echo, bytes_of(size, size)) for size in sizes]
    for size, future in zip(sizes, futures, strict=True):
        assert np.array_equal(future.result(WATCHDOG), bytes_of(size, size))
    until(settled, "every receipt")
    assert child.statistics().bytes_out.get("staging", 0) == 0


@needs_ucxx
def test_a_worker_that_others_call_and_that_calls_back(forced: None, tmp_path: Path) -> None:
    """AF_UNIX and TCP, in both directions at once."""
    for listen in (f"unix://{tmp_path}/socket", "tcp://127.0.0.1:0"):
        with Worker("rpc_service:service", "--listen", listen, "--device", "host:0") as worker:
            with transport.connect(worker.address) as peer:
                assert set(peer.channels().values()) == {"ucx"}
                futures = [peer.submit("echo", bytes_of(100_000 + n, n)) for n in range(40)]
                for number, future in enumerate(futures):
                    assert np.array_equal(future.result(WATCHDOG), bytes_of(100_000 + number, number))
                assert by_ucx(peer)[0] == by_ucx(peer)[1] > 4_000_000


@needs_ucxx
@pytest.mark.parametrize("device", ["cpu", "host:0"])
def test_many_arrays_of_one_call(child: transport.LocalWorker, device: str) -> None:
    arrays = [streamrt.array(np.full(30_000 * (n + 1), n, np.float64), device=device) for n in range(9)]
    back = child.call(echo, *arrays, np.zeros(0), np.arange(10))
    for number, array in enumerate(back[:9]):
        assert (np.asarray(array) == number).all()
        assert array.size == 30_000 * (number + 1)
    assert back[9].size == 0
    assert np.array_equal(back[10], np.arange(10))


@needs_ucxx
@pytest.mark.parametrize("copy", [True, False])
def test_what_is_written_after_the_call_does_not_show(child: transport.LocalWorker, name: str, copy: bool) -> None:
    x = np.ones(4 * MIB, np.uint8)
    future = child.submit(echo, x, copy=copy)
    if not copy:
        future.sent.result(WATCHDOG)
    x[:] = 2
    assert (future.result(WATCHDOG) == 1).all()


@needs_ucxx
def test_the_command_shows_it(forced: None) -> None:
    with Worker("rpc_service:service", "--device", "host:0") as worker:
        command = [sys.executable, "-m", "transport.cli", "info", "--peer", worker.address]
        done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=60, check=True)
        assert "host:0: ucx" in done.stdout


# Order ----------------------------------------------------------------------------------------------------------------


def filled(value: float, stream: streamrt.Stream) -> Any:
    """An array of a virtual device that holds 0 until a kernel on the stream has run, and then the value."""
    array = streamrt.array(np.zeros(100_000), device=stream.device)
    stream.launch(_fill, array, value, writes=(array,))
    return array


def _fill(target: Any, value: float) -> None:
    target[...] = value


def total(x: Any) -> float:
    return float(x.sum())


@needs_ucxx
@pytest.mark.parametrize("edge", ["there", "removed"])
def test_bytes_go_when_the_snapshot_has_been_taken(child: transport.LocalWorker, edge: str) -> None:
    stream = streamrt.Stream("host:0")
    latch = Latch(stream)
    with streamrt.using(stream):
        x = filled(0.125 if edge == "there" else 0.25, stream)
        if edge == "there":
            future = child.submit(total, x)  # returns behind the latch
            assert child.call(total, np.ones(100_000)) == 100_000  # others pass it
            assert not future.done()
            latch.open()
            assert future.result(WATCHDOG) == 12_500
        else:
            with without(SEND_EDGE):
                assert child.submit(total, x).result(WATCHDOG) != 25_000
            latch.open()


@needs_ucxx
@pytest.mark.parametrize("edge", ["there", "removed"])
def test_memory_is_written_when_its_last_use_is_over(child: transport.LocalWorker, edge: str) -> None:
    """The stream that the reply's memory is of is held by a latch: UCX is not given the memory before it opens."""
    stream = streamrt.Stream("host:0")
    child.call(echo, streamrt.array(np.ones(100_000), device="host:0"))
    latch = Latch(stream)
    x = streamrt.array(np.full(100_000, 3.0), device="host:0")
    if edge == "there":
        future = child.submit(echo, x, reply_stream=stream)
        traffic = process_worker()._traffic
        assert traffic is not None
        until(lambda: traffic._arrived, "the reply to wait for its memory")
        assert child.call(total, np.ones(100_000)) == 100_000
        assert not future.done()
        latch.open()
        assert (np.asarray(future.result(WATCHDOG)) == 3).all()
    else:
        with without(RECEIVE_EDGE):
            future = child.submit(echo, x, reply_stream=stream)
            until(future.done, "the reply, into memory that somebody may be using")
        latch.open()


# Ends -----------------------------------------------------------------------------------------------------------------


@needs_ucxx
def test_a_cancelled_call_takes_its_memory_with_it_and_nothing_else(child: transport.LocalWorker, name: str) -> None:
    held = memory.statistics().live
    for _ in range(20):
        futures = [child.submit(echo, bytes_of(3 * MIB, n)) for n in range(6)]
        for future in futures[::2]:
            future.cancel()
        for number, future in enumerate(futures):
            try:
                assert np.array_equal(future.result(WATCHDOG), bytes_of(3 * MIB, number))
            except CancelledError:
                assert number % 2 == 0
        del futures, future
    until(settled, "what was cancelled to end")
    until(lambda: free_again(held), "memory to be free again")
    assert set(child.channels().values()) == {"ucx"}
    assert retired.kept() == 0


@needs_ucxx
def test_a_deadline_ends_a_call_whose_peer_is_stopped_and_nothing_is_written_late(fresh: transport.LocalWorker) -> None:
    x = bytes_of(8 * MIB)
    assert np.array_equal(fresh.call(echo, x), x)
    os.kill(fresh.pid, signal.SIGSTOP)
    futures = [fresh.submit(echo, x, timeout=0.3) for _ in range(5)]
    for future in futures:
        with pytest.raises(transport.DeadlineError):
            future.result(WATCHDOG)
    os.kill(fresh.pid, signal.SIGCONT)
    for number in range(10):
        y = bytes_of(2 * MIB, number)
        assert np.array_equal(fresh.call(echo, y), y)
    until(settled, "what came late to be dropped")


@needs_ucxx
@pytest.mark.parametrize("moment", ["sending", "receiving"])
def test_a_peer_that_is_killed_in_the_middle_ends_every_call(
    forced: None, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    held = memory.statistics().live
    for _ in range(3):
        _kill_in_the_middle(moment)
        until(settled, "UCX to end what was on its way")
        until(lambda: retired.kept() == 0, "what was broken off to be given back")
        until(lambda: free_again(held), "memory to be free again")


def _kill_in_the_middle(moment: str) -> None:
    with transport.local_workers(1) as (worker,):
        worker.call(echo, bytes_of(MIB))
        before = by_ucx(worker)[1]
        if moment == "sending":
            futures = [worker.submit(total, bytes_of(64 * MIB)) for _ in range(4)]
        else:
            futures = [worker.submit(grown, 64, bytes_of(MIB)) for _ in range(4)]
        traffic = process_worker()._traffic
        assert traffic is not None
        if moment == "sending":
            until(lambda: traffic._sent, "the transfer to begin")
        else:
            until(lambda: traffic._fetching or by_ucx(worker)[1] > before, "the reply to come")
        worker.kill()
        errors = [future.exception(WATCHDOG) for future in futures]
        assert all(isinstance(error, transport.PeerLostError | None) for error in errors)
        assert any(errors)


def grown(times: int, x: Any) -> Any:
    return np.tile(x, times)


def free_again(held: int) -> bool:
    gc.collect()
    return memory.statistics().live <= held


@needs_ucxx
def test_closing_with_transfers_on_their_way_hangs_nobody(forced: None) -> None:
    held = memory.statistics().live
    with transport.local_workers(1) as (worker,):
        worker.call(echo, bytes_of(MIB))
        futures = [worker.submit(echo, bytes_of(32 * MIB)) for _ in range(3)]
        worker.abort()
        for future in futures:
            assert isinstance(future.exception(WATCHDOG), transport.PeerLostError | None)
        del future, futures
    until(settled, "UCX to end what was on its way")
    until(lambda: free_again(held), "memory to be free again")


# What fails is declined -----------------------------------------------------------------------------------------------


def child_cannot_start() -> None:
    """In the child: UCX is given transports that there are not."""
    os.environ["UCX_TLS"] = "no_such_transport"


@needs_ucxx
def test_a_peer_whose_ucx_does_not_start_is_sent_to_by_the_next_channel(
    fresh: transport.LocalWorker, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.call(child_cannot_start)
    with caplog.at_level(logging.WARNING, "transport"):
        for number in range(4):
            x = bytes_of(MIB, number)
            assert np.array_equal(fresh.call(echo, x), x)
    assert set(fresh.channels().values()) == {"staging"}
    assert fresh.statistics().bytes_out == {"ucx": MIB, "staging": 4 * MIB} or by_ucx(fresh) == (0, 0)
    assert len([record for record in caplog.records if "UCX does not work with" in record.message]) == 1


def child_loses_what_it_sends() -> None:
    """In the child: messages go under a tag that nobody expects."""
    send = ucx.Ucx.send

    def elsewhere(self: Any, endpoint: Any, tag: int, *rest: Any) -> Any:
        return send(self, endpoint, tag ^ 1, *rest)

    ucx.Ucx.send = elsewhere  # type: ignore[method-assign]


@needs_ucxx
def test_what_does_not_come_is_declined_and_comes_by_the_next_channel(
    fresh: transport.LocalWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ucx_traffic, "ARRIVAL_SECONDS", 0.2)
    fresh.call(child_loses_what_it_sends)
    with caplog.at_level(logging.WARNING, "transport"):
        for number in range(3):
            x = bytes_of(2 * MIB, number)
            assert np.array_equal(fresh.call(echo, x, timeout=WATCHDOG), x)
    assert fresh.statistics().bytes_in == {"staging": 6 * MIB}
    assert len([record for record in caplog.records if "did not come within" in record.message]) == 1


def child_breaks_imports() -> None:
    from transport.channels import imports

    def attach(fd: int) -> Any:
        os.close(fd)
        raise OSError("no room for the mapping")

    imports.Segment.attach = staticmethod(attach)  # type: ignore[method-assign, assignment]


@needs_ucxx
def test_what_shared_memory_cannot_bring_goes_by_ucx_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNELS_VARIABLE, "shared_memory,ucx")
    with transport.local_workers(1) as (worker,):
        worker.call(child_breaks_imports)
        assert set(worker.channels().values()) == {"shared_memory"}
        for number in range(3):
            x = bytes_of(MIB, number)
            assert np.array_equal(worker.call(echo, x), x)
        assert by_ucx(worker)[0] == 3 * MIB


# The process ----------------------------------------------------------------------------------------------------------


def run(program: str, **environment: str) -> str:
    """Runs a program in an interpreter of its own, where UCX is asked for, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=child_environment() | {CHANNELS_VARIABLE: FORCED} | environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


USE = """
import os, sys, threading
import numpy as np
import transport
from test_ucx import by_ucx, echo
def caught():
    return [line for line in open("/proc/self/status") if line.startswith("SigCgt")]
def use(worker):
    x = np.arange(1 << 20)
    assert (worker.call(echo, x) == x).all()
    assert by_ucx(worker)[1] >= x.nbytes, worker.statistics()
"""


@needs_ucxx
def test_environment_and_signals_are_the_programs() -> None:
    program = """
import signal, subprocess
signal.signal(signal.SIGUSR1, lambda *_: None)
before, handlers = dict(os.environ), caught()
with transport.local_workers(1) as (worker,):
    use(worker)
    assert "ucxx" in sys.modules
    assert dict(os.environ) == before
    shown = subprocess.run(["env", "-0"], capture_output=True, text=True, check=True).stdout.split("\\0")
    assert not [one for one in shown if one.startswith("UCX_")], shown
    ours, theirs = [int(one[0].split()[1], 16) & 0xffffffff for one in (handlers, caught())]
    assert ours == theirs, (handlers, caught())
print("as before")
"""
    assert run(USE + program).strip() == "as before"


@needs_ucxx
def test_what_the_user_says_of_ucx_holds() -> None:
    program = """
with transport.local_workers(1) as (worker,):
    use(worker)
    from transport.channels.ucx_worker import process_worker
    print(process_worker()._ucx._context.config["TLS"], os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"])
"""
    assert run(USE + program, UCX_TLS="self,tcp", UCX_NET_DEVICES="lo").split() == ["self,tcp", "self,tcp", "lo"]


@needs_ucxx
def test_it_is_not_imported_where_it_is_not_wanted() -> None:
    program = """
def imported():
    return "ucxx" in sys.modules or "libucxx" in sys.modules
with transport.local_workers(1) as (worker,):
    x = np.arange(1 << 20)
    assert (worker.call(echo, x) == x).all()
    print(imported(), worker.call("test_ucx:imported"), [t.name for t in threading.enumerate() if "ucx" in t.name])
"""
    program = program.replace('worker.call("test_ucx:imported")', "worker.call(imported_there)")
    lines = run("from test_ucx import imported_there\n" + USE + program, **{CHANNELS_VARIABLE: ""})
    assert lines.split("\n")[0] == "False False []"


def imported_there() -> bool:
    return "ucxx" in sys.modules


@needs_ucxx
def test_with_nothing_on_its_way_the_thread_sleeps(child: transport.LocalWorker) -> None:
    child.call(echo, bytes_of(MIB))
    thread = next(thread for thread in threading.enumerate() if thread.name == "streamrt-ucx")
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def switches() -> int:
        return sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches" in line)

    def still() -> bool:
        before = switches()
        threading.Event().wait(0.25)  # in which a thread that polls wakes hundreds of times
        return switches() == before

    until(lambda: settled() and still(), "the thread to sleep")


@needs_ucxx
def test_a_forked_child_has_no_part_in_it() -> None:
    program = """
import warnings
warnings.simplefilter("ignore")
with transport.local_workers(1) as (worker,):
    use(worker)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        from transport.channels.ucx_worker import process_worker
        assert process_worker()._ucx is None
        del worker
        import gc; gc.collect()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for _ in range(3):
        use(worker)
print("both")
"""
    assert run(USE + program).strip() == "both"


@needs_ucxx
def test_a_process_ends_with_transfers_that_never_will() -> None:
    program = """
import signal
worker = transport.local_workers(1)[0]
use(worker)
print(worker.pid, flush=True)
os.kill(worker.pid, signal.SIGSTOP)
futures = [worker.submit(echo, np.arange(1 << 22)) for _ in range(4)]
from transport.channels.ucx_worker import process_worker
from rpc_processes import until
until(lambda: process_worker()._traffic._sent, "a transfer")
"""
    environment = child_environment() | {CHANNELS_VARIABLE: FORCED}
    with subprocess.Popen(
        [sys.executable, "-c", USE + program], stdout=subprocess.PIPE, text=True, cwd=HERE, env=environment
    ) as process:
        assert process.stdout is not None
        stopped = int(process.stdout.readline())
        try:
            assert process.wait(WATCHDOG) == 0
        finally:
            process.kill()
            os.kill(stopped, signal.SIGKILL)


# Messages, one by one: two workers in one process ---------------------------------------------------------------------


class Desk:
    """A worker of UCX with its traffic, which the test drives by hand."""

    def __init__(self) -> None:
        self.traffic = ucx_traffic.Traffic(ucx.Ucx(), {})

    @property
    def ucx(self) -> ucx.Ucx:
        return self.traffic._ucx


@pytest.fixture(scope="module")
def desks() -> Iterator[tuple[Desk, Desk]]:
    pair = Desk(), Desk()
    yield pair
    for desk in pair:
        desk.traffic.fail_all("the test is over")


@pytest.fixture
def between(desks: tuple[Desk, Desk]) -> Iterator[tuple[Desk, Desk, End, End]]:
    """Both desks, and the ends at which each sees the other."""
    one, two = desks
    ends = End(two.ucx.address), End(one.ucx.address)
    yield one, two, *ends
    for end in ends:
        end.close("the test is over")
    for desk in desks:
        desk.traffic._unwanted.clear()


def message(end: End, tag: int, array: np.ndarray[Any, Any], receipt: int = 0, ready: Any = None) -> Message:
    return Message(
        end,
        tag,
        receipt or tag + (1 << 32),
        address=array.ctypes.data,
        nbytes=array.nbytes,
        device=CPU,
        memory=array,
        ready=ready or (lambda: True),
        changed=lambda: None,
        gone=lambda: True,
    )


def step(*desks: Desk, until_: Any, what: str) -> None:
    def stepped() -> bool:
        for desk in desks:
            desk.traffic.step()
        return bool(until_())

    until(stepped, what)


SIZES = [1, 8000, MIB]  # inside a packet, eager, rendezvous


@needs_ucxx
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("first", ["sent", "expected"])
def test_a_message_comes_whoever_speaks_first(between: Any, count: int, first: str) -> None:
    one, two, there, back = between
    x, y = bytes_of(count), np.zeros(count, np.uint8)
    sent, received = message(there, 5, x), message(back, 5, y)
    if first == "sent":
        one.traffic.send(sent)
        step(one, two, until_=lambda: two.traffic._early, what="the message to come early")
        two.traffic.expect(received)
    else:
        two.traffic.expect(received)
        one.traffic.send(sent)
    step(one, two, until_=lambda: sent.done and received.done, what="both ends")
    assert np.array_equal(x, y)
    assert not one.traffic.touching
    assert not two.traffic.touching


@needs_ucxx
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("announced", ["more", "less"])
def test_bytes_of_another_number_are_not_received(between: Any, count: int, announced: str) -> None:
    """Fewer would leave what the memory held before, which a function might send back."""
    one, two, there, back = between
    y = np.zeros(count + (1 if announced == "more" else -1) or 2, np.uint8)
    received = message(back, 6, y)
    two.traffic.expect(received)
    sent = message(there, 6, bytes_of(count) | 1)
    one.traffic.send(sent)
    step(one, two, until_=lambda: received.error, what="the refusal")
    assert f"{count} bytes came where {y.size} were announced" in received.error
    step(one, two, until_=lambda: sent.request is None, what="the sender's memory to be free")
    assert not sent.done  # nobody has said that the bytes came
    assert not y.any()


@needs_ucxx
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("given_up", ["before it came", "after it came"])
def test_what_is_given_up_is_never_written(between: Any, count: int, given_up: str) -> None:
    one, two, there, back = between
    y = np.zeros(count, np.uint8)
    door: list[int] = []
    received = message(back, 7, y, ready=lambda: bool(door))
    two.traffic.expect(received)
    sent = message(there, 7, bytes_of(count) | 1)
    if given_up == "before it came":
        two.traffic.abandon(received)
        one.traffic.send(sent)
    else:
        one.traffic.send(sent)
        step(one, two, until_=lambda: two.traffic._arrived, what="the message")
        two.traffic.abandon(received)
        door.append(1)
    step(one, two, until_=lambda: sent.request is None and sent.posted, what="the sender's memory to be free")
    step(one, two, until_=lambda: not two.traffic.underway, what="the receiver to be done with it")
    assert not y.any()


@needs_ucxx
def test_a_tag_is_expected_once(between: Any) -> None:
    _, two, _, back = between
    first, second = (message(back, 8, np.zeros(9, np.uint8)) for _ in range(2))
    two.traffic.expect(first)
    two.traffic.expect(second)
    assert second.error == "a message of this tag is expected already"
    assert not first.error
    two.traffic.abandon(first)


@needs_ucxx
def test_strangers_messages_are_bounded_and_go_to_nobody(between: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_traffic, "MAX_EARLY", 16)
    one, two, there, back = between
    y = np.zeros(5000, np.uint8)
    received = message(back, 1 << 20, y)
    two.traffic.expect(received)
    strangers = [message(there, (1 << 21) + number, bytes_of(5000)) for number in range(64)]
    for stranger in strangers:
        one.traffic.send(stranger)
    step(one, two, until_=lambda: len(two.traffic._early) == 16 and not one.traffic._sent, what="all of them")
    assert not received.done
    assert not y.any()
    two.traffic.wind_up()
    two.traffic.abandon(received)


@needs_ucxx
def test_an_end_that_is_closed_ends_what_is_on_its_way(between: Any) -> None:
    one, two, there, _ = between
    sent = message(there, 9, bytes_of(MIB))
    one.traffic.send(sent)
    step(one, two, until_=lambda: two.traffic._early, what="the message")
    there.close("enough")
    step(one, until_=lambda: sent.error, what="the end")
    assert not one.traffic.touching
    late = message(there, 10, bytes_of(10))
    one.traffic.send(late)
    one.traffic.step()
    assert "enough" in late.error
