"""Rings: a queue of messages in shared memory, its bell, and its order beside a socket."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import platform
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import ring_talk
from hypothesis import given
from hypothesis import strategies as st
from ring_ends import ring_pair

import transport
from streamrt.segment import Segment
from transport.agent import RINGS
from transport.links import MAX_FRAMES, Frame, LinkBroken, ring, unix_link
from transport.links.ring import MOST_BYTES, RING_BYTES, RingFault, RingReader, RingWriter
from transport.links.ring_pair import RingPair
from transport.links.socket_writer import SocketWriter

pytestmark = pytest.mark.skipif(not ring.usable(), reason="rings need the memory order of x86-64")

WATCHDOG = 30.0
TAIL, HEAD = 0, 8  # words of ring 0
RECORDS = 256  # and where its records begin, in bytes
OTHER = (RECORDS + RING_BYTES) // 8  # words between its counters and those of ring 1, which whoever offers writes


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RINGS, "1")  # of this process's agents, and of its children's


@pytest.fixture
def segment() -> Iterator[Segment]:
    with ring.create() as made:
        yield made


def ends(segment: Segment, begun: int = 0) -> tuple[RingWriter, RingReader]:
    """Both ends of ring 0; `begun` bytes have gone through it."""
    segment.view[:] = bytes(segment.nbytes)
    segment.words[TAIL] = segment.words[HEAD] = begun
    writer, reader = RingWriter(segment, 0), RingReader(segment, 0)
    writer._tail = writer._head = reader._head = begun
    return writer, reader


def push(writer: RingWriter, frames: list[bytes]) -> bool:
    return writer.push(frames, [len(frame) for frame in frames])


# the queue ------------------------------------------------------------------------------------------------------------

messages = st.lists(
    st.one_of(st.integers(0, 40), st.integers(0, 6000), st.sampled_from([MOST_BYTES - 20, MOST_BYTES])), max_size=4
).filter(bool)
starts = st.one_of(
    st.just(0), st.integers(0, 2 * RING_BYTES // 16), st.integers(2**60 - RING_BYTES // 16, 2**60 - 1)
).map(lambda grains: grains * 16)


@given(st.lists(st.one_of(st.just(None), messages), max_size=60), starts)
def test_it_is_a_queue(operations: list[list[int] | None], begun: int) -> None:
    """Against a deque, with wrap-arounds of the records and of the counters (2**64), full and empty."""
    with ring.create() as segment:
        writer, reader = ends(segment, begun)
        model: collections.deque[list[bytes]] = collections.deque()
        held = number = 0
        room: collections.deque[int] = collections.deque()
        for operation in [*operations, *[None] * 60]:
            if operation is None:
                assert reader.take() == (model.popleft() if model else None)
                held -= room.popleft() if room else 0
                continue
            number += 1
            frames = [bytes([(number + place) % 256]) * size for place, size in enumerate(operation)]
            nbytes = -(-(16 + 4 * len(frames) + sum(operation)) // 16) * 16
            fits = nbytes <= MOST_BYTES and held + nbytes <= RING_BYTES
            assert push(writer, frames) == fits, "it is full when it is full, and not before"
            if fits:
                model.append(frames)
                room.append(nbytes)
                held += nbytes
        assert not model
        assert writer.count == reader.count


def test_what_was_taken_is_a_copy(segment: Segment) -> None:
    writer, reader = ends(segment, RING_BYTES - 32)
    push(writer, [b"first", b"second" * 100])
    frames = reader.take()
    segment.view[:] = b"\xff" * segment.nbytes
    assert frames == [b"first", b"second" * 100]


def test_rings_of_both_ways_do_not_meet(segment: Segment) -> None:
    there, back = RingWriter(segment, 0), RingWriter(segment, 1)
    for number in range(300):
        there.push([b"there %d" % number], [len(b"there %d" % number)])
        back.push([b"back %d" % number], [len(b"back %d" % number)])
    reading = RingReader(segment, 0), RingReader(segment, 1)
    for number in range(300):
        assert [reader.take() for reader in reading] == [[b"there %d" % number], [b"back %d" % number]]


def test_two_threads_at_full_speed(segment: Segment) -> None:
    """Contents that say their number and length, so that anything torn shows."""
    writer, reader = ends(segment)
    count = 20_000

    def write() -> None:
        for number in range(count):
            frames = [struct.pack("<Q", number), struct.pack("<Q", number) * (number % 500)]
            while not push(writer, frames):
                os.sched_yield()

    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + WATCHDOG
    for number in range(count):
        while (frames := reader.take()) is None:
            assert time.monotonic() < deadline
            os.sched_yield()
        assert frames == [struct.pack("<Q", number), struct.pack("<Q", number) * (number % 500)]
    thread.join()


# hostile peers --------------------------------------------------------------------------------------------------------

words = st.one_of(st.integers(0, 2**64 - 1), st.integers(-64, RING_BYTES + 64).map(lambda word: word % 2**64))


@given(words, st.integers(0, RING_BYTES // 16 - 1), st.binary(max_size=200), st.lists(words, max_size=6))
def test_a_reader_believes_nothing(tail: int, start: int, content: bytes, tails: list[int]) -> None:
    """Any counter, any bytes: a message within bounds, nothing, or a fault; never more than is there."""
    with ring.create() as segment:
        _, reader = ends(segment, start * 16)
        filled = content * (RING_BYTES // max(1, len(content)) + 1)
        segment.view[RECORDS : RECORDS + RING_BYTES] = filled[:RING_BYTES].ljust(RING_BYTES, b"\0")
        with contextlib.suppress(RingFault):
            for word in [tail, *tails]:
                segment.words[TAIL] = word
                frames = reader.take()
                if frames is not None:
                    assert 1 <= len(frames) <= MAX_FRAMES
                    assert sum(map(len, frames)) <= MOST_BYTES
                    assert all(type(frame) is bytes for frame in frames)


@given(words, st.lists(words, max_size=8))
def test_a_writer_believes_nothing(head: int, heads: list[int]) -> None:
    """Whatever the reader says of itself: the writer stays inside its ring, and never writes over its own end."""
    with ring.create() as segment:
        writer, _ = ends(segment)
        segment.view[RECORDS + RING_BYTES :] = b"\xab" * (segment.nbytes - RECORDS - RING_BYTES)
        with contextlib.suppress(RingFault):
            for word in [head, *heads] * 5:
                segment.words[HEAD] = word
                push(writer, [b"x" * 9000])
                assert (segment.words[TAIL] - writer._head) % 2**64 <= RING_BYTES
        assert segment.view[RECORDS + RING_BYTES :] == b"\xab" * (segment.nbytes - RECORDS - RING_BYTES)


def record(nbytes: int, count: int, before: int, *lengths: int) -> bytes:
    return struct.pack(f"<IIQ{len(lengths)}I", nbytes, count, before, *lengths)


@pytest.mark.parametrize(
    ("tail", "content"),
    [
        (8, b""),
        (24, b""),
        (RING_BYTES + 16, b""),
        (2**64 - 16, b""),
        (64, record(20, 0, 0)),
        (64, record(20, MAX_FRAMES + 1, 0)),
        (64, record(20, 2**32 - 1, 0)),
        (64, record(0, 1, 0, 0)),
        (64, record(19, 1, 0, 0)),
        (64, record(65, 1, 0, 45)),
        (64, record(2**32 - 1, 1, 0, 2**32 - 1)),
        (RING_BYTES, record(MOST_BYTES + 16, 1, 0, MOST_BYTES - 4)),
        (64, record(40, 1, 0, 19)),
        (64, record(40, 1, 0, 21)),
        (64, record(40, 2, 0, 2**32 - 1, 17)),
    ],
)
def test_bytes_that_are_no_message_are_a_fault(segment: Segment, tail: int, content: bytes) -> None:
    _, reader = ends(segment)
    segment.view[RECORDS : RECORDS + len(content)] = content
    segment.words[TAIL] = tail
    with pytest.raises(RingFault):
        reader.take()


def test_a_message_behind_one_that_is_long_here_is_a_fault(segment: Segment) -> None:
    writer, reader = ends(segment)
    push(writer, [b"x"])
    reader.beside = 1
    with pytest.raises(RingFault, match="behind 0"):
        reader.take()


# the bell -------------------------------------------------------------------------------------------------------------


def test_the_bell_rings_once_for_each_sleep(segment: Segment) -> None:
    writer, reader = ends(segment)
    assert not writer.claim_bell(), "a reader that has said nothing looks by itself"
    assert reader.doze()
    assert writer.claim_bell()
    assert not writer.claim_bell()
    assert reader.doze(), "another sleep"
    assert writer.claim_bell()
    push(writer, [b"x"])
    assert not reader.doze(), "something lies there"
    reader.rouse()
    assert not writer.claim_bell()


class Meanwhile:
    """In place of an end's fence: between its store and its look the other end does something."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def acquire(self) -> None:
        self._then()

    def release(self) -> None:
        return


def slept_through(segment: Segment, first: str, reading: type[RingReader] = RingReader) -> bool:
    """Whether one message is, when one end comes in between the store and the look of the other."""
    writer, _ = ends(segment)
    reader = reading(segment, 0)
    rings = sleeps = False

    def write() -> None:
        nonlocal rings
        assert push(writer, [b"x"])
        rings = writer.claim_bell()

    def sleep() -> None:
        nonlocal sleeps
        sleeps = reader.doze()

    if first == "writer":
        writer._fence = Meanwhile(sleep)  # type: ignore[assignment]
        write()
    else:
        reader._fence = Meanwhile(write)  # type: ignore[assignment]
        sleep()
    return sleeps and not rings


@pytest.mark.parametrize("first", ["writer", "reader"])
def test_no_message_is_slept_through(segment: Segment, first: str) -> None:
    assert not slept_through(segment, first)


def test_a_reader_that_looks_before_it_hangs_the_bell_sleeps_through_one(segment: Segment) -> None:
    """The calibration of the test above."""

    class Late(RingReader):
        def doze(self) -> bool:
            empty = not self.watch(1)
            self._fence.acquire()  # the writer comes in, and there is no bell yet
            return empty

    assert slept_through(segment, "reader", Late)


@given(st.lists(st.sampled_from(["send", "rouse", "doze", "read", "large"]), max_size=40))
def test_who_sleeps_can_be_woken_by_the_socket(operations: list[str]) -> None:
    """After any history: who may sleep has nothing to read, and what is sent then makes its socket readable."""
    a, b = ring_pair()
    try:
        for operation in operations:
            match operation:
                case "send":
                    a.send([b"small"])
                case "large":
                    a.send([b"large", bytes(MOST_BYTES)])
                case "rouse":
                    b.rouse()
                case "doze":
                    b.doze()
                case "read":
                    b.receive()
        while not b.doze():
            assert b.receive()
        readable = select.select([b], [], [], 0)[0]
        if not readable:
            a.send([b"wakes"])
            assert select.select([b], [], [], 0)[0], "nobody rang"
            assert b.receive() == [[b"wakes"]]
    finally:
        a.close()
        b.close()


# beside the socket ----------------------------------------------------------------------------------------------------

sends = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0, 1, 100, 5000, MOST_BYTES, 200_000]), st.booleans())
reads = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["rouse", "doze", "flush"]) | st.integers(1, 5))


@given(st.lists(st.one_of(sends, reads), max_size=60))
def test_messages_keep_their_order_whichever_way_they_go(operations: list[tuple[Any, ...]]) -> None:
    """Small, large and with descriptors, to readers awake and asleep, read in parts; each with its own descriptors."""
    before = descriptors()
    file = os.memfd_create("file")
    a, b = ring_pair()
    links, sent = {"a": a, "b": b}, {"a": [], "b": []}  # type: ignore[var-annotated]
    got: dict[str, list[Any]] = {"a": [], "b": []}

    def read(name: str, limit: int) -> int:
        batch = links[name].receive(limit)
        taken = links[name].taken_fds()
        for descriptor in taken:
            os.close(descriptor)
        got[name] += [(bytes(message[0]), len(message[1]), 0) for message in batch]
        if taken:
            got[name][-1] = (*got[name][-1][:2], len(taken))
        return len(batch)

    for number, (name, what, *with_file) in enumerate(operations):
        link = links[name]
        if with_file:
            fds = [file] if with_file[0] else []
            link.send([b"%d" % number, bytes(what)], fds=fds)
            sent["b" if name == "a" else "a"].append((b"%d" % number, what, len(fds)))
        elif what == "rouse":
            link.rouse()
        elif what == "doze":
            link.doze()
        elif what == "flush":
            link.flush()
        else:
            read(name, what)
    for name, link in links.items():
        while len(got[name]) < len(sent[name]):
            links["b" if name == "a" else "a"].flush()
            link.doze()  # reading takes what there is, both ways
            read(name, 64)
        assert got[name] == sent[name]
        assert link.receive() == []
    for link in links.values():
        link.close()
    os.close(file)
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_small_messages_to_who_is_awake_need_no_socket() -> None:
    a, b = ring_pair()
    b.rouse()
    for number in range(1000):
        a.send([b"%d" % number])
        assert not select.select([b], [], [], 0)[0]
        assert b.glance(1)
        assert b.receive() == [[b"%d" % number]]
        assert not b.glance(1)
    assert b.doze()
    a.send([b"asleep"])
    assert select.select([b], [], [], 0)[0]
    assert b.receive() == [[b"asleep"]]
    a.close()
    b.close()


def test_a_ring_that_is_full_keeps_nothing_back() -> None:
    a, b = ring_pair()
    b.rouse()
    count = 0
    while not select.select([b], [], [], 0)[0]:
        a.send([b"%d" % count, bytes(1000)])
        count += 1
    assert 50 < count < 100
    for number in range(count, count + 10):
        a.send([b"%d" % number, bytes(1000)])
    got: list[bytes] = []
    while len(got) < count + 10:
        got += [bytes(message[0]) for message in b.receive()]
    assert got == [b"%d" % number for number in range(count + 10)]
    a.close()
    b.close()


@pytest.mark.parametrize("awake", [True, False])
def test_the_end_comes_after_what_lies_in_the_ring(awake: bool) -> None:
    a, b = ring_pair()
    if awake:
        b.rouse()
    for number in range(100):
        a.send([b"%d" % number])
        if number % 10 == 0:
            a.send([b"%d large" % number, bytes(20_000)])
    a.close(linger=5)
    got: list[bytes] = []
    with pytest.raises(LinkBroken, match="closed"):
        while True:
            got += [bytes(message[0]) for message in b.receive(limit=7)]
    assert [name for name in got if b"large" not in name] == [b"%d" % number for number in range(100)]
    assert len(got) == 110
    b.close()


# agreeing -------------------------------------------------------------------------------------------------------------

OFFER, TAKEN, BELL_SIGNAL = (struct.pack("<II", 0, kind) for kind in (1, 2, 3))


def raw() -> tuple[unix_link.UnixLink, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return unix_link.UnixLink(ours), theirs


def broken(link: unix_link.UnixLink) -> None:
    with pytest.raises(LinkBroken):
        while True:
            assert link.receive() == []
    link.close()


@pytest.mark.parametrize("attack", [struct.pack("<II", 0, 0), struct.pack("<II", 0, 4), TAKEN, BELL_SIGNAL, OFFER])
def test_signals_that_nothing_led_to_break_the_link(attack: bytes) -> None:
    link, theirs = raw()
    theirs.sendall(attack)
    broken(link)
    theirs.close()


def offered() -> tuple[unix_link.UnixLink, socket.socket, Segment]:
    """A link that has made rings, and what its peer was given."""
    link, theirs = raw()
    link.offer_rings()
    data, (descriptor,), _, _ = socket.recv_fds(theirs, 100, 4)
    assert data == OFFER
    return link, theirs, ring.attach(descriptor)


def test_an_offer_of_whoever_has_offered_breaks_the_link() -> None:
    link, theirs, memory = offered()
    with memory:
        socket.send_fds(theirs, [OFFER], [memory.fd])
        broken(link)
    theirs.close()


def test_taken_twice_breaks_the_link() -> None:
    link, theirs, memory = offered()
    theirs.sendall(TAKEN + TAKEN)
    broken(link)
    theirs.close()
    memory.close()


def test_a_message_behind_more_than_lies_in_the_ring_breaks_the_link() -> None:
    link, theirs, memory = offered()
    theirs.sendall(TAKEN + struct.pack("<IIQQ", 1, 0, 1, 0))
    broken(link)
    theirs.close()
    memory.close()


def test_garbage_in_the_ring_breaks_the_link_on_either_side() -> None:
    link, theirs, memory = offered()
    theirs.sendall(TAKEN)
    assert link.receive() == []
    link.send([b"small"])
    memory.words[HEAD + OTHER] = 2**40 + 1
    with pytest.raises(LinkBroken, match="shared memory"):
        for _ in range(RING_BYTES):
            link.send([b"small"])
            while theirs in select.select([theirs], [], [], 0)[0]:
                theirs.recv(1 << 16)
    link.close()
    theirs.close()
    memory.close()


@pytest.mark.parametrize("kind", ["open", "small", "no memfd"])
def test_memory_that_cannot_be_used_is_not_and_the_link_goes_on(kind: str) -> None:
    before = descriptors()
    link, theirs = raw()
    match kind:
        case "open":
            descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, 1 << 20)
        case "small":
            small = Segment.create(4096)
            descriptor = os.dup(small.fd)
            small.close()
        case _:
            descriptor = os.open(os.devnull, os.O_RDWR)
    socket.send_fds(theirs, [OFFER], [descriptor])
    os.close(descriptor)
    theirs.sendall(struct.pack("<IIQ", 1, 0, 4) + b"plain"[:4])
    assert link.receive() == [[b"plai"]]
    assert not link.wants_write
    link.close()
    theirs.close()
    assert descriptors() == before


def test_without_descriptors_left_messages_go_by_the_socket() -> None:
    link, theirs = raw()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        link.offer_rings()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    link.send([b"plain"])
    assert theirs.recv(100) == struct.pack("<IIQ", 1, 0, 5) + b"plain"
    link.close()
    theirs.close()


def test_nothing_stays_of_rings_that_are_dropped() -> None:
    before = descriptors()
    for _ in range(10):
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = (RingPair(SocketWriter(end)) for end in (a, b))
        ours.offer()
        ours._socket.flush()
        assert theirs.heed(1, collections.deque(socket.recv_fds(b, 100, 4)[1]), False)
        assert ours.heed(2, collections.deque(), False)
        assert theirs.heed(2, collections.deque(), False)
        assert theirs.reader is not None
        a.close()
        b.close()
        del ours, theirs
    gc.collect()
    assert descriptors() == before


def test_both_ends_may_be_looked_at_while_they_are_closed() -> None:
    a, b = ring_pair()
    b.rouse()
    a.send([b"x"])
    b.close()
    assert not b.glance(3)
    b.rouse()
    assert b.doze()
    a.close()


def test_there_are_no_rings_where_memory_is_weakly_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    link, theirs = raw()
    assert not link.takes_rings
    link.offer_rings()
    with pytest.raises(BlockingIOError):
        theirs.recv(100, socket.MSG_DONTWAIT)
    with ring.create() as memory:
        socket.send_fds(theirs, [OFFER], [memory.fd])
        broken(link)
    theirs.close()


# processes ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def child(part: str, seed: int) -> Iterator[tuple[unix_link.UnixLink, subprocess.Popen[bytes]]]:
    """A process that plays a part of `ring_talk` at the other end of a link with rings."""
    link, theirs = unix_link.pair()
    process = subprocess.Popen(
        [sys.executable, ring_talk.__file__, part, str(theirs.fileno()), str(seed)], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    try:
        link.offer_rings()
        yield link, process
    finally:
        link.close()
        process.kill()
        process.wait()


def ping_pong(seconds: float, seed: int, patience: float = 20.0) -> int:
    """How many messages went there and back, one at a time, between two ends that sleep at random."""
    draw, number, end = random.Random(seed), 0, time.monotonic() + seconds
    with child("echo", seed) as (link, process):
        while time.monotonic() < end:
            link.send([b"%d" % number])
            assert ring_talk.messages(link, draw, patience) == [[b"%d" % number]]
            number += 1
        assert process.poll() is None
    return number


def test_no_wake_up_is_lost_between_processes() -> None:
    assert ping_pong(2.0, 1) > 100


def test_a_wake_up_is_lost_by_who_does_not_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration of the test above: it sees a reader that hangs its bell and sleeps at once."""

    def careless(reader: RingReader) -> bool:
        doze(reader)
        return True

    doze = RingReader.doze
    monkeypatch.setattr(RingReader, "doze", careless)
    with pytest.raises(TimeoutError, match="slept through"):
        ping_pong(WATCHDOG, 1, patience=0.5)


@pytest.mark.slow
def test_no_wake_up_is_lost_in_many_messages() -> None:
    total, end = 0, time.monotonic() + 5
    while total < 100_000 and time.monotonic() < end:
        total += ping_pong(5.0, total)
    assert total > 1_000


@pytest.mark.parametrize("seed", range(6))
def test_a_peer_that_is_killed_leaves_whole_messages_in_order(seed: int) -> None:
    draw = random.Random(seed)
    with child("count", seed) as (link, process):
        count, most, awake = 0, draw.randrange(1, 3000), draw.random() < 0.5

        def take() -> int:
            nonlocal count
            if awake:
                link.rouse()
            got = link.receive(draw.choice((1, 3, 64)))
            for message in got:
                assert message[0] == b"%d" % count
                assert len(message[1]) in ring_talk.SIZES
                count += 1
            return len(got)

        deadline = time.monotonic() + WATCHDOG
        while count < most:
            assert time.monotonic() < deadline
            if link.wants_write:
                link.flush()
            if not take() and link.doze():
                select.select([link], [], [], 1)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(LinkBroken, match="closed"):
            while True:
                assert time.monotonic() < deadline
                take()
    assert count >= most


def deaf() -> None:
    """Runs in a worker, which rings for nobody any more."""
    RingWriter.claim_bell = lambda writer: False  # type: ignore[method-assign]


def late() -> str:
    """Answers when its caller sleeps."""
    threading.Event().wait(0.02)
    return "late"


@pytest.mark.workers
def test_a_bell_that_is_missed_holds_nothing_up_for_long() -> None:
    with transport.local_workers(1) as (worker,):
        worker.call(deaf)
        for _ in range(5):
            assert worker.call(late, timeout=WATCHDOG) == "late"


def nonsense() -> None:
    """Runs in a worker, which writes what is no message from then on, its answer to this included."""

    def push(writer: RingWriter, frames: object, sizes: object) -> bool:
        writer._words[writer._control + TAIL] = 2**63
        return True

    RingWriter.push = push  # type: ignore[method-assign, assignment]
    deaf()


@pytest.mark.workers
def test_who_writes_nonsense_is_lost_with_all_its_calls() -> None:
    with transport.local_workers(1) as (worker,):
        with pytest.raises(transport.PeerLostError, match="shared memory"):
            worker.call(nonsense, timeout=WATCHDOG)
        assert worker.closed


def ahead() -> None:
    """Runs in a worker, whose messages in the ring wait from then on for one on the socket that does not come."""
    push = RingWriter.push

    def wait(writer: RingWriter, frames: Sequence[Frame], sizes: Sequence[int]) -> bool:
        writer.beside += 1
        try:
            return push(writer, frames, sizes)
        finally:
            writer.beside -= 1

    RingWriter.push = wait  # type: ignore[method-assign]
    deaf()


@pytest.mark.workers
def test_a_caller_whose_reply_waits_for_the_socket_goes_to_sleep() -> None:
    with transport.local_workers(1) as (worker,):
        future = worker.submit(ahead)
        calls, deadline = worker._driver.calls, time.monotonic() + WATCHDOG
        while not worker._driver.rings.glance(1):  # type: ignore[union-attr]
            assert time.monotonic() < deadline
        thread = threading.Thread(target=future.exception)
        thread.start()
        while not calls._reader or calls.looking:
            assert time.monotonic() < deadline
            os.sched_yield()
        assert not future.done()
        worker.abort()
        thread.join(WATCHDOG)
        assert isinstance(future.exception(0), transport.PeerLostError)


@pytest.mark.workers
def test_calls_go_by_rings_between_processes_and_not_inside_one() -> None:
    with transport.local_workers(1) as (worker,):
        for _ in range(3):
            futures = [worker.submit(abs, -number) for number in range(200)]
            assert [future.result() for future in futures] == list(range(200))
        rings = worker._driver.link._rings  # type: ignore[attr-defined]
        assert rings.writer.count + rings.reader.count > 0
    service = transport.Service()
    service.function(abs, name="abs")
    with transport.loopback(service) as peer:
        assert peer.call("abs", -1) == 1
        assert peer._driver.link._rings.writer is None  # type: ignore[attr-defined]
