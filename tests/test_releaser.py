"""The process that lets streams go when the one that has them cannot."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import order_service
import pytest
from rpc_processes import HERE, WATCHDOG, Worker, state_of, until

import streamrt
import transport
from streamrt.segment import Segment, Word
from streamrt.timeline import Point
from transport import process, releaser_process
from transport.channels import words
from transport.launch.environment import child_environment
from transport.releaser import Releaser, Watched, releaser

DEVICE, WORDS = "host:0", 1 << 15


@pytest.fixture
def one() -> Iterator[Releaser]:
    made = Releaser()
    yield made
    made.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


class Pair:
    """What a process signals, and what is waited for."""

    def __init__(self) -> None:
        self.words = Segment.create(words.SEGMENT_BYTES)
        self.table = Segment.create(words.SEGMENT_BYTES)

    def wait(self, index: int, value: int, bits: int = 64) -> Point:
        self.table.words[8 * index] = value
        self.table.words[8 * index + 1] = bits
        return Point(Word(self.words, 64 * index, bits), value)

    def of(self, pid: int, timeout: float = 30.0) -> Watched:
        return Watched(pid, process.start_time(pid), self.words, self.table, timeout)


def test_it_knows_words_as_segments_have_them() -> None:
    with Segment.create(4096) as segment:
        word = Word(segment, releaser_process.STRIDE)
        word.store(7)
        word.mark_lost()
        view = segment.view[releaser_process.STRIDE :]
        assert view[releaser_process.LAST_GOOD] == 7
        assert view[releaser_process.LOST] == 1
        view.release()


def test_it_releases_what_a_process_owes_that_had_ended_before_it_was_told(
    one: Releaser, sleeper: subprocess.Popen[bytes]
) -> None:
    pair = Pair()
    owed, watched = pair.wait(0, 3), pair.of(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    one.watch(watched)
    until(owed.reached, "the word to be released")
    assert owed.lost


@pytest.mark.parametrize("bits", [32, 64])
def test_it_marks_and_releases_what_a_dead_process_owes(
    one: Releaser, sleeper: subprocess.Popen[bytes], bits: int
) -> None:
    pair = Pair()
    top = 1 << bits
    reached, owed, wrapped = pair.wait(1, 5, bits), pair.wait(2, 6, bits), pair.wait(3, 2, bits)
    for point, value in ((reached, 5), (owed, 4), (wrapped, top - 3)):
        point.word.store(value)
    early = Point(owed.word, 4)
    one.watch(pair.of(sleeper.pid))
    until(lambda: one.pid, "the process to start")
    assert not owed.reached()
    sleeper.kill()
    until(lambda: owed.reached() and wrapped.reached(), "the words to be released")
    assert owed.lost
    assert wrapped.lost
    assert not reached.lost
    assert not early.lost, "it had come before"
    late = pair.wait(4, 1, bits)  # of a message that is read after the death
    until(late.reached, "what is waited for later to be released")
    assert late.lost


@pytest.mark.whole
def test_a_process_that_stands_still_is_given_its_time(one: Releaser, sleeper: subprocess.Popen[bytes]) -> None:
    pair = Pair()
    owed = pair.wait(0, 3)
    one.watch(pair.of(sleeper.pid, timeout=0.0))
    until(lambda: one.pid, "the process to start")
    os.kill(sleeper.pid, signal.SIGSTOP)
    until(owed.reached, "the word to be released")
    assert owed.lost


class Sight:
    """What the helper sees of processes, and when it looks at one of whose words the first is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float = 1.0) -> None:
        self.pair = Pair()
        self.owed = self.pair.wait(0, 3)
        self.stopped = True
        monkeypatch.setattr(releaser_process, "stopped", lambda pid: self.stopped)
        descriptors = [os.dup(self.pair.words.fd), os.dup(self.pair.table.fd)]
        self.watched = releaser_process.Watched(os.getpid(), timeout, [os.pidfd_open(os.getpid()), *descriptors])

    def look(self, start: int, end: int, *, counts: bool = True) -> bool:
        """Looks once a second; whether the peer counts as lost then."""
        for now in range(start, end):
            self.watched.look(float(now), counts=counts)
        return self.watched.due is not None


def test_time_in_which_the_owner_stands_still_too_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    sight = Sight(monkeypatch)
    assert not sight.look(0, 4)
    assert not sight.look(4, 20, counts=False)
    assert not sight.look(20, 25), "what was counted before is forgotten"
    assert sight.look(25, 26)
    sight.watched.close()


def test_who_runs_again_is_not_lost_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sight = Sight(monkeypatch)
    assert sight.look(0, 6)
    sight.stopped = False
    assert not sight.look(6, 7)
    sight.stopped = True
    assert not sight.look(7, 12), "it has its whole time again"
    sight.watched.gone, sight.watched.due = True, 0.0
    sight.stopped = False
    assert sight.look(12, 13), "who has ended stays so"
    sight.watched.close()


def test_what_the_owner_signals_behind_others_is_marked_before_they_are_released(
    one: Releaser, sleeper: subprocess.Popen[bytes]
) -> None:
    pair, own = Pair(), Pair()
    owed, derived, run = pair.wait(0, 3), own.wait(0, 5), own.wait(1, 6)
    run.word.store(6)
    one.derive(own.words, own.table)
    one.watch(pair.of(sleeper.pid))
    until(lambda: one.pid, "the process to start")
    sleeper.kill()
    until(owed.reached, "the word to be released")
    assert derived.lost
    assert not derived.reached(), "its own stream does that"
    assert not run.lost


def test_what_is_derived_is_known_when_a_message_may_leave(
    one: Releaser, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, own = Pair(), Pair()
    orders: list[int] = []  # how many descriptors the orders have that are sent
    send = socket.send_fds

    def note(control: socket.socket, buffers: list[bytes], descriptors: list[int], *flags: int) -> int:
        orders.append(len(descriptors))
        return send(control, buffers, descriptors, *flags)

    monkeypatch.setattr(socket, "send_fds", note)
    with one._lock:
        assert one.derive(own.words, own.table) is None, "another thread tells it something"
    with monkeypatch.context() as changed:
        changed.setattr(Releaser, "_tell_all", lambda *_: None)  # no thread comes to it
        one.watch(pair.of(sleeper.pid))
        one.derive(own.words, own.table)
    one.watch(pair.of(sleeper.pid))
    until(lambda: len(orders) == 3, "all to be told")
    assert orders == [2, 3, 3]
    with one._lock:  # the thread that told is done
        pass
    one.derive(own.words, own.table)
    assert orders == [2, 3, 3, 2], "it was told on this thread"
    monkeypatch.setattr(socket, "send_fds", exhausted)
    assert one.derive(own.words, own.table) is None


def exhausted(*_: Any) -> int:
    raise BlockingIOError("its socket is full")


def test_an_order_that_cannot_be_obeyed_costs_the_others_nothing(
    one: Releaser, sleeper: subprocess.Popen[bytes]
) -> None:
    pair = Pair()
    owed = pair.wait(0, 3)
    one.watch(pair.of(sleeper.pid))
    until(lambda: one._control is not None and one.watched, "the process to start")
    with one._lock, open(os.devnull, "rb") as empty:
        assert one._control is not None
        order = releaser_process.ORDER.pack(99, sleeper.pid, 1.0)
        socket.send_fds(one._control, [order], [empty.fileno()] * 2)  # no memory that can be mapped
    sleeper.kill()
    until(owed.reached, "the word to be released")


def test_what_is_forgotten_is_left_alone(one: Releaser, sleeper: subprocess.Popen[bytes]) -> None:
    forgotten, kept = Pair(), Pair()
    left, owed = forgotten.wait(0, 3), kept.wait(0, 3)
    number = one.watch(forgotten.of(sleeper.pid))
    one.watch(kept.of(sleeper.pid))
    until(lambda: one.pid, "the process to start")
    mapped = Path(f"/proc/{one.pid}/maps")
    until(lambda: mapped.read_text().count("memfd:streamrt") == 4, "both to be mapped")
    one.forget(number)
    one.forget(number)
    until(lambda: mapped.read_text().count("memfd:streamrt") == 2, "the forgotten one to be unmapped")
    sleeper.kill()
    until(owed.reached, "the other one to be released")
    assert not left.reached()
    assert one.watched == 1


def test_one_that_was_killed_is_followed_by_another(one: Releaser, sleeper: subprocess.Popen[bytes]) -> None:
    first, second = Pair(), Pair()
    points = [first.wait(0, 3), second.wait(0, 3)]
    one.watch(first.of(sleeper.pid))
    before = until(lambda: one.pid, "the process to start")
    os.kill(before, signal.SIGKILL)
    until(lambda: one.pid == 0, "its end")
    one.watch(second.of(sleeper.pid))
    until(lambda: one.pid not in (0, before), "another one")
    sleeper.kill()
    until(lambda: all(point.reached() for point in points), "the words of both to be released")


def test_it_ends_at_once_also_where_a_copy_of_its_socket_is_held(
    one: Releaser, sleeper: subprocess.Popen[bytes]
) -> None:
    pair = Pair()
    one.watch(pair.of(sleeper.pid))
    until(lambda: one.pid, "the process to start")
    until(lambda: one._control is not None, "its socket")
    assert one._control is not None
    assert one._process is not None
    copy = os.dup(one._control.fileno())  # as a forked child has it
    try:
        one.close()
        assert one._process.returncode == 0, "it had to be killed"
    finally:
        os.close(copy)


OWNER = """
import sys, threading
from streamrt.segment import Segment
from transport import process, releaser
from transport.channels.words import SEGMENT_BYTES
words, table = Segment.create(SEGMENT_BYTES), Segment.create(SEGMENT_BYTES)
one, pid = releaser.releaser(), int(sys.argv[1])
one.watch(releaser.Watched(pid, process.start_time(pid), words, table, 30.0))
while not one.pid:
    threading.Event().wait(0.01)
print(one.pid, flush=True)
if sys.argv[2] == "stay":
    threading.Event().wait()
"""


@pytest.mark.parametrize("way", ["stay", "leave"])
def test_it_ends_with_its_owner(sleeper: subprocess.Popen[bytes], way: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(sleeper.pid), way],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
        cwd=HERE,
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if way == "stay":
            assert state_of(pid)
            owner.kill()
        assert owner.stdout.read() == "", "it holds the owner's output"
    until(lambda: state_of(pid) == "", "it to end")


def test_it_is_started_when_a_stream_first_waits_for_a_peer_and_not_before() -> None:
    program = "import test_releaser; test_releaser.check_start()"
    subprocess.run([sys.executable, "-c", program], env=child_environment(), cwd=HERE, timeout=WATCHDOG, check=True)


def check_start() -> None:
    with transport.local_workers(1, order="stream") as workers:
        assert (workers[0].call(order_service.total, array()), releaser().pid) == (WORDS, 0)
        future = workers[0].submit(order_service.held, DEVICE, 3.0, WORDS)
        until(lambda: releaser().pid, "the process to start")
        workers[0].call(order_service.open_latches)
        assert (np.asarray(future.result(WATCHDOG)) == 3.0).all()
        assert releaser().watched == 1
    until(lambda: releaser().watched == 0, "the peer to be forgotten")


def array() -> Any:
    return streamrt.array(np.ones(WORDS), device=DEVICE)


def lost_words(pid: int) -> list[Word]:
    """The words in a process's segments of signals that are marked lost."""
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            if "streamrt-signals" not in os.readlink(path):
                continue
            segment = Segment.attach(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            continue
        found += [Word(segment, 64 * index, 64) for index in range(words.WORDS)]
    return [word for word in found if word.lost]


def test_streams_are_let_go_while_the_agent_cannot_run(tmp_path: Path) -> None:
    """A caller dies while the callee's interpreter is held, as by a driver's call that waits for that very stream."""
    environment = {"STREAMRT_ORDER": "stream"}
    address, begun = f"unix://{tmp_path / 'callee'}", tmp_path / "begun"
    with (
        Worker("order_service:service", "--listen", address, environment=environment) as callee,
        Worker("order_service:service", environment=environment) as caller,
        transport.connect(address) as watcher,
        transport.connect(caller.address) as peer,
    ):
        peer.call("send_held", address, DEVICE, 5.0, WORDS)
        until(lambda: watcher.call("serving") == 1, "the call to be launched")
        until(lambda: watcher.call("watched") == 1, "the process to watch")
        held = watcher.submit("hold_interpreter", str(begun), 2.0)
        until(begun.exists, "the interpreter to be held")
        assert lost_words(callee.pid) == []
        os.kill(caller.pid, signal.SIGKILL)
        released = until(lambda: lost_words(callee.pid), "the words to be marked")
        until(lambda: all(word.load() > word.last_good for word in released), "the words to be released")
        assert not held.done(), "the interpreter was not held so long"
        held.result(WATCHDOG)
        assert watcher.call("noted") == [], "the function was shown what never came"
        until(lambda: watcher.call("bounded") == 0, "streams to go on")


def test_threads_that_tell_it_end(one: Releaser, sleeper: subprocess.Popen[bytes]) -> None:
    pair = Pair()
    one.watch(pair.of(sleeper.pid))
    until(lambda: one.pid, "the process to start")
    until(lambda: all(thread.name != "streamrt-releaser" for thread in threading.enumerate()), "the threads to end")
