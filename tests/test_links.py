"""Links: whole messages in order or a broken link, the same for every kind."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ring_ends import agree

from transport.errors import AddressError, AuthError, LocalProtocolError
from transport.links import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    Link,
    LinkBroken,
    Listener,
    PeerCredentials,
    Unreached,
    memory_link,
    schemes,
    unix_link,
    unix_listener,
    zmq_link,
)
from transport.links.memory_link import Faults

WATCHDOG = 20.0
KINDS = ("unix", "unix-rings", "unix-path", "zmq-v4", "zmq-v6", "zmq-ipc", "memory")
DESCRIPTOR_KINDS = KINDS[:-1]
MiB = 1 << 20


def until(condition: Callable[[], Any], pollable: Callable[[], list[Any]] = list) -> Any:
    """Polls descriptors, then asks, until the answer is true."""
    deadline = time.monotonic() + WATCHDOG
    while not (answer := condition()):
        assert time.monotonic() < deadline, "the watchdog fired"
        wait_readable(pollable(), 0.05)
    return answer


def wait_readable(objects: list[Any], seconds: float) -> bool:
    poller = select.poll()
    for item in objects:
        if item.fileno() >= 0:
            poller.register(item.fileno(), select.POLLIN)
    return bool(poller.poll(seconds * 1e3))


class Pair:
    """Two ends, whatever kind; `messages` waits on descriptors as an agent does."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.listener: Listener | None = None
        if kind == "memory":
            self.a, self.b = memory_link.pair()
        elif kind in ("unix", "unix-rings"):
            self.a, theirs = unix_link.pair()
            self.b = unix_link.UnixLink(theirs, inherited=True)
            if kind == "unix-rings":
                agree(self.a, self.b)
        else:
            self.listener, self.a = self._connect(kind, directory)
            self.a.send([b"hello"])
            accepted: list[Link] = []
            until(lambda: accepted.extend(self.listener.accept()) or accepted, lambda: [self.listener])
            (self.b,) = accepted
            assert self.messages(self.b, 1) == [[b"hello"]]

    a: Any
    b: Any

    @staticmethod
    def _connect(kind: str, directory: Path) -> tuple[Any, Any]:
        if kind == "unix-path":
            listener: Any = unix_listener.listen(f"unix://{directory}/link.sock")
            return listener, unix_listener.connect(listener.address)
        address = {"zmq-v4": "tcp://127.0.0.1:0", "zmq-v6": "tcp://[::1]:0", "zmq-ipc": f"ipc://{directory}/zmq.sock"}
        listener = zmq_link.listen(address[kind])
        return listener, zmq_link.connect(listener.address)

    def polled(self) -> list[Any]:
        return [end for end in (self.a, self.b, self.listener) if end is not None]

    def step(self) -> None:
        """What an agent does between two looks: pump the listener, write what waits, look at what is readable."""
        if self.listener is not None and self.listener.fileno() >= 0:
            self.listener.pump()
        for link in (self.a, self.b):
            with contextlib.suppress(LinkBroken):
                if link.wants_write or wait_readable([link], 0):
                    link.flush()

    def messages(self, link: Any, count: int) -> list[list[Any]]:
        """At least `count` messages; descriptors alone say when to look."""
        got: list[list[Any]] = []
        deadline = time.monotonic() + WATCHDOG
        while len(got) < count:
            assert time.monotonic() < deadline, f"{len(got)} of {count} messages came"
            self.step()
            new = link.receive()
            got += new
            if not new and self.kind != "memory":
                wait_readable(self.polled(), 0.05)
        return got

    def broken(self, link: Any) -> tuple[list[list[Any]], str]:
        """What still came before the link broke, and why it broke."""
        got: list[list[Any]] = []

        def look() -> str | None:
            self.step()
            try:
                got.extend(link.receive())
            except LinkBroken as broken:
                return str(broken)
            return None

        return got, until(look, self.polled)

    def close(self) -> None:
        self.a.close()
        self.b.close()
        if self.listener is not None:
            self.listener.close()


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    ends = Pair(request.param, tmp_path)
    yield ends
    ends.close()


@pytest.fixture(params=DESCRIPTOR_KINDS)
def real_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    ends = Pair(request.param, tmp_path)
    yield ends
    ends.close()


def plain(message: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in message]


# messages -------------------------------------------------------------------------------------------------------------


def test_messages_arrive_whole_and_in_order_both_ways(pair: Pair) -> None:
    for number in range(500):
        pair.a.send([b"a%d" % number, b"x" * (number % 7)])
        pair.b.send([b"b%d" % number])
    there = pair.messages(pair.b, 500)
    back = pair.messages(pair.a, 500)
    assert [plain(message) for message in there] == [[b"a%d" % n, b"x" * (n % 7)] for n in range(500)]
    assert [plain(message) for message in back] == [[b"b%d" % n] for n in range(500)]


def test_frames_keep_their_borders(pair: Pair) -> None:
    frames = [b"", *(bytes([number]) * (number * 700) for number in range(MAX_FRAMES - 2)), b""]
    pair.a.send(frames)
    pair.a.send([memoryview(b"")])
    first, second = pair.messages(pair.b, 2)
    assert plain(first) == frames
    assert plain(second) == [b""]


@pytest.mark.parametrize("size", [0, 1, (1 << 14) - 1, 1 << 14, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, MiB + 3])
def test_frames_of_sizes_at_the_thresholds(pair: Pair, size: int) -> None:
    payload = os.urandom(size)
    pair.a.send([b"header", memoryview(payload), b"after"])
    assert plain(pair.messages(pair.b, 1)[0]) == [b"header", payload, b"after"]


def test_64_mib_in_chunks_of_one(real_pair: Pair) -> None:
    content = memoryview(bytearray(os.urandom(MiB) * 64))
    for start in range(0, len(content), MiB):
        content[start : start + 8] = struct.pack("<Q", start)
    received, expected = hashlib.blake2b(), hashlib.blake2b(content)
    for start in range(0, len(content), MiB):
        real_pair.a.send([b"chunk", content[start : start + MiB]])
    count = 0
    while count < 64:
        for _, payload in real_pair.messages(real_pair.b, 1):
            received.update(payload)
            count += 1
    assert received.digest() == expected.digest()
    until(lambda: real_pair.step() or real_pair.a.queued_bytes == 0, lambda: [real_pair.a])


def test_a_frame_of_the_largest_size(real_pair: Pair) -> None:
    real_pair.a.send([memoryview(bytearray(MAX_FRAME_BYTES))])
    ((frame,),) = real_pair.messages(real_pair.b, 1)
    assert len(frame) == MAX_FRAME_BYTES


@pytest.mark.parametrize(
    "frames",
    [[], [b""] * (MAX_FRAMES + 1), [memoryview(bytes(MAX_FRAME_BYTES + 1))], [memoryview(bytes(8))[::2]]],
    ids=["none", "too many", "too large", "in pieces"],
)
def test_what_no_link_carries_is_refused_and_the_link_goes_on(pair: Pair, frames: list[Any]) -> None:
    with pytest.raises(LocalProtocolError):
        pair.a.send(frames)
    pair.a.send([b"next"])
    assert plain(pair.messages(pair.b, 1)[0]) == [b"next"]


def test_limit_leaves_the_rest_and_says_that_it_is_there(pair: Pair) -> None:
    for number in range(10):
        pair.a.send([b"%d" % number])
    first = until(lambda: pair.step() or pair.b.receive(limit=1), pair.polled)
    assert len(first) == 1
    rest: list[Any] = []
    while len(rest) < 9:
        until(lambda: pair.step() or pair.b.readable or wait_readable([pair.b], 0), pair.polled)
        new = pair.b.receive(limit=2)
        assert len(new) <= 2
        rest += new
    assert [plain(message) for message in first + rest] == [[b"%d" % number] for number in range(10)]


def test_a_reader_that_only_polls_misses_nothing(real_pair: Pair) -> None:
    """ZMQ_FD tells of changes only, and a send can use one up: here each side sends before it looks, many times."""
    for number in range(300):
        real_pair.b.send([b"from b"])
        real_pair.a.send([b"from a"])
        real_pair.b.send([b"again"])
        real_pair.a.queued_bytes
        deadline = time.monotonic() + WATCHDOG
        seen_a = seen_b = 0
        while seen_a < 2 or seen_b < 1:
            assert time.monotonic() < deadline, f"round {number}: a lost wake-up"
            watched = [real_pair.b if seen_b < 1 else real_pair.a, *([real_pair.listener] if seen_b < 1 else [])]
            assert wait_readable([item for item in watched if item is not None], WATCHDOG), f"round {number}"
            if real_pair.listener is not None:
                real_pair.listener.pump()
            seen_a += len(real_pair.a.receive())
            seen_b += len(real_pair.b.receive())


# back-pressure --------------------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_read_makes_us_queue_and_nothing_is_dropped(real_pair: Pair) -> None:
    """Far beyond every buffer and high-water mark; then all of it, in order."""
    count, size = 3000, 20_000
    for number in range(count):
        real_pair.a.send([struct.pack("<I", number), bytes(size)])
    assert real_pair.a.queued_bytes > 0
    got: list[int] = []
    while len(got) < count:
        got += [struct.unpack("<I", message[0])[0] for message in real_pair.messages(real_pair.b, 1)]
    assert got == list(range(count))
    until(lambda: real_pair.a.queued_bytes == 0)


def test_the_accepting_end_queues_too_and_one_slow_peer_does_not_stop_another() -> None:
    listener = zmq_link.listen("tcp://127.0.0.1:0")
    slow, quick = zmq_link.connect(listener.address), zmq_link.connect(listener.address)
    slow.send([b"slow"])
    quick.send([b"quick"])
    links: dict[bytes, Any] = {}

    def arrived() -> bool:
        for link in listener.accept():
            links[bytes(link.receive()[0][0])] = link
        return len(links) == 2

    until(arrived, lambda: [listener])
    for number in range(2500):
        links[b"slow"].send([b"%d" % number, bytes(20_000)])
    assert links[b"slow"].queued_bytes > 0
    links[b"quick"].send([b"at once"])
    assert until(quick.receive, lambda: [quick]) == [[b"at once"]]
    got: list[bytes] = []

    def drain() -> bool:
        listener.pump()  # only because its descriptor says so
        got.extend(bytes(message[0]) for message in slow.receive())
        return len(got) == 2500

    until(drain, lambda: [slow, listener])
    assert got == [b"%d" % number for number in range(2500)]
    for link in (slow, quick, *links.values()):
        link.close()
    listener.close()


def test_partial_writes_continue_where_they_stopped() -> None:
    """A socket that takes a few kilobytes at a time: frames are cut in every possible place."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender = unix_link.UnixLink(ours)
    receiver = unix_link.UnixLink(theirs)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    expected = [[os.urandom(size), b"", os.urandom(size * 7)] for size in (1, 100, 5000, 20_000, 70_000)]
    for frames in expected:
        sender.send(frames)
    assert sender.wants_write
    assert sender.queued_bytes > 0
    writes = 0
    got: list[list[bytes]] = []
    while len(got) < len(expected):
        before = sender.queued_bytes
        if sender.wants_write:
            sender.flush()
        writes += sender.queued_bytes < before
        got += [plain(message) for message in receiver.receive()]
    assert got == expected
    assert writes > 10
    assert not sender.wants_write
    sender.close()
    receiver.close()


# the end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closer", ["a", "b"])
def test_the_end_comes_after_all_that_was_sent(pair: Pair, closer: str) -> None:
    closing, staying = (pair.a, pair.b) if closer == "a" else (pair.b, pair.a)
    for number in range(20):
        closing.send([b"%d" % number])
    if pair.kind.startswith("zmq") and closer == "b":
        # ZeroMQ may hold messages that it has not written when a connection is cut: see the next test.
        got = pair.messages(staying, 20)
        closing.close()
        rest, reason = pair.broken(staying)
        got += rest
    else:
        closing.close(linger=5.0)
        got, reason = pair.broken(staying)
    assert [plain(message) for message in got] == [[b"%d" % number] for number in range(20)]
    assert "closed" in reason
    with pytest.raises(LinkBroken):
        staying.receive()
    assert not staying.connected


def test_a_lingering_listener_end_lets_its_last_words_out(tmp_path: Path) -> None:
    pair = Pair("zmq-v4", tmp_path)
    pair.b.send([b"the reason"])
    pair.listener.close()  # type: ignore[union-attr]
    pair.b.close(linger=5.0)
    got, _ = pair.broken(pair.a)
    assert got == [[b"the reason"]]
    pair.close()


def test_a_lost_peer_shows_on_send(pair: Pair) -> None:
    pair.b.close()

    def send_until_broken() -> bool:
        pair.step()
        try:
            pair.a.send([b"into the void"])
            pair.a.receive()
        except LinkBroken:
            return True
        return False

    until(send_until_broken, pair.polled)


def test_an_accepted_link_is_told_that_its_peer_went(real_pair: Pair) -> None:
    """ROUTER: EHOSTUNREACH on send, or the socket's monitor before that."""
    real_pair.a.close()
    assert "closed" in real_pair.broken(real_pair.b)[1]
    with pytest.raises(LinkBroken):
        real_pair.b.send([b"x"])


def test_closed_links_say_so_and_close_is_idempotent(pair: Pair) -> None:
    pair.a.close()
    pair.a.close()
    for use in (lambda: pair.a.send([b"x"]), pair.a.receive, pair.a.flush):
        with pytest.raises(LinkBroken, match="closed"):
            use()
    assert pair.a.fileno() == -1
    assert not pair.a.connected
    assert not pair.a.readable
    assert not pair.a.wants_write


def test_close_during_traffic_ends_both_sides(real_pair: Pair) -> None:
    """Two threads send and read under a lock each, as agents do; one closes in between."""
    problems: list[BaseException] = []
    traffic = threading.Event()

    def converse(link: Any, lock: threading.Lock) -> None:
        chunk = memoryview(bytes(100_000))
        try:
            deadline = time.monotonic() + WATCHDOG
            while time.monotonic() < deadline:
                with lock:
                    if link.queued_bytes < MiB:
                        link.send([b"data", chunk])
                    if link.wants_write:
                        link.flush()
                    if link.receive():
                        traffic.set()
                if real_pair.listener is not None and link is real_pair.b:
                    real_pair.listener.pump()
            problems.append(TimeoutError("the watchdog fired"))
        except LinkBroken:
            return
        except BaseException as error:
            problems.append(error)

    locks = {id(link): threading.Lock() for link in (real_pair.a, real_pair.b)}
    threads = [threading.Thread(target=converse, args=(link, locks[id(link)])) for link in (real_pair.a, real_pair.b)]
    for thread in threads:
        thread.start()
    assert traffic.wait(WATCHDOG)
    with locks[id(real_pair.a)]:
        real_pair.a.close()
    for thread in threads:
        thread.join(WATCHDOG)
        assert not thread.is_alive()
    assert not problems


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", DESCRIPTOR_KINDS)
def test_b33_descriptors_go_back_to_the_baseline_after_50_cycles(kind: str, tmp_path: Path) -> None:
    """zeromq/pyzmq#102: sockets with unsent messages, opened and closed in a loop, leave nothing behind."""

    def cycle(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        pair = Pair(kind, directory)
        for _ in range(4):
            pair.a.send([b"never read", bytes(100_000)])
            pair.b.send([b"never read", bytes(100_000)])
        pair.close()

    cycle(0)  # the context and its threads stay
    baseline = until(descriptors)
    for number in range(1, 51):
        cycle(number)
    gc.collect()
    until(lambda: descriptors() <= baseline)


def test_b33_exit_with_unsent_messages_to_a_closed_port_is_quick() -> None:
    """zeromq/pyzmq#102, zeromq/libzmq#2586: context termination waits for ever for what cannot be sent."""
    program = (
        "from transport.links import zmq_link\n"
        "links = [zmq_link.connect('tcp://127.0.0.1:1') for _ in range(3)]\n"
        "for link in links: link.send([b'call', bytes(100_000)])\n"
        "links[1].close(linger=0.5)\n"
        "print('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# ZeroMQ ---------------------------------------------------------------------------------------------------------------


def test_a_closed_port_breaks_the_link() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: nobody else gets it, and connecting is refused
        link = zmq_link.connect(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        link.send([b"hello"])
        assert not link.connected

        def look() -> str | None:
            try:
                assert link.receive() == []
            except LinkBroken as broken:
                return str(broken)
            return None

        assert "refused" in until(look, lambda: [link])
        link.close()


def test_b26_a_dealer_never_reconnects_to_another_process(tmp_path: Path) -> None:
    """pytorch/pytorch#32130: a peer that comes back at the same address is another one; sessions are not resumed."""
    first = Pair("zmq-v4", tmp_path)
    assert first.listener is not None
    address = first.listener.address
    first.b.close()
    first.listener.close()
    second: list[Any] = []

    def bind_again() -> bool:
        try:
            second.append(zmq_link.listen(address))
        except AddressError:  # the old socket is closed in the background
            return False
        return True

    until(bind_again)
    first.a.send([b"for the first one"])  # the loss is not known here yet: a reconnect would deliver this
    deadline = time.monotonic() + 0.5  # ZeroMQ's own reconnect interval is 0.1 s
    while time.monotonic() < deadline:
        wait_readable(second, 0.05)
        assert second[0].accept() == []
    assert "closed" in first.broken(first.a)[1]
    with pytest.raises(LinkBroken):
        first.a.send([b"for the first one"])
    assert second[0].accept() == []
    first.a.close()
    second[0].close()


def test_a_frame_beyond_the_limit_ends_the_connection_of_its_sender_only() -> None:
    zmq = pytest.importorskip("zmq")
    listener = zmq_link.listen("tcp://127.0.0.1:0")
    good = zmq_link.connect(listener.address)
    good.send([b"good"])
    (link,) = until(listener.accept, lambda: [listener])
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        hostile.linger = 0
        monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        hostile.connect(listener.address)
        hostile.send(bytes(MAX_FRAME_BYTES + 1))
        assert monitor.poll(WATCHDOG * 1e3)
        hostile.disable_monitor()
        monitor.close()
    assert link.receive() == [[b"good"]]
    link.send([b"still here"])
    assert until(good.receive, lambda: [good]) == [[b"still here"]]
    assert listener.accept() == []
    good.close()
    link.close()
    listener.close()


def test_a_message_of_too_many_frames_ends_the_connection_of_its_sender_only() -> None:
    zmq = pytest.importorskip("zmq")
    listener = zmq_link.listen("tcp://127.0.0.1:0")
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        hostile.linger = 0
        hostile.connect(listener.address)
        hostile.send_multipart([b""] * (MAX_FRAMES + 1))
        (link,) = until(listener.accept, lambda: [listener])
        with pytest.raises(LinkBroken, match="65 frames"):
            link.receive()
    link.close()
    listener.close()


@pytest.mark.parametrize("said", [b"\x01\x00" + b"\x02\x00x" * 20, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 60])
def test_a_strangers_bytes_disturb_nobody(said: bytes, tmp_path: Path) -> None:
    """ZeroMQ takes them for messages of its first version, which do not say by whom they come."""
    pair = Pair("zmq-v4", tmp_path)
    listener: Any = pair.listener
    host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
    for number in range(20):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
        pair.a.send([b"%d" % number])
        assert pair.messages(pair.b, 1) == [[b"%d" % number]]
    assert listener.accept() == []
    pair.close()


def test_who_has_come_and_was_not_taken_is_told_that_the_listener_closes(tmp_path: Path) -> None:
    """He has connected and spoken: without a word he would wait for an answer until his time is over."""
    pair = Pair("zmq-v4", tmp_path)
    listener: Any = pair.listener
    late = zmq_link.connect(listener.address)
    late.send([b"hello"])
    until(lambda: listener.pump() or listener._new, lambda: [listener])
    listener.close()
    with pytest.raises(Unreached):
        until(late.receive, lambda: [late])
    assert listener.accept() == []
    late.close()
    pair.close()


def test_a_message_of_who_was_turned_away_ends_nobody_elses_connection(tmp_path: Path) -> None:
    """The next connection has the descriptor of the one that was cut, and is not to be cut for its second message."""
    zmq = pytest.importorskip("zmq")
    pair = Pair("zmq-v4", tmp_path)
    listener: Any = pair.listener
    listener.close()
    host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
    with socket.socket() as other:  # its own descriptor is taken now
        other.settimeout(WATCHDOG)
        late = zmq_link.connect(listener.address)
        late.send([b"too"])
        late.send([b"late"])  # both go at once, when the handshake is done
        until(lambda: late.connected, lambda: [late])
        with listener._core.lock:
            until(lambda: listener._core.events() & zmq.POLLIN)
            listener._pump(1)  # which turns it away
        descriptor = max(listener._by_descriptor)
        until(lambda: not os.path.exists(f"/proc/self/fd/{descriptor}"))
        with the_next_descriptor(descriptor):
            other.connect((host, int(port)))
            greeting = b""
            while len(greeting) < 10:  # it is accepted
                greeting += other.recv(64)
        with socket.socket(fileno=os.dup(descriptor)) as accepted:
            assert accepted.getpeername() == other.getsockname(), "the descriptor is not used again"
        listener.pump()
        assert not ended(other)
    late.close()
    pair.close()


@contextlib.contextmanager
def the_next_descriptor(number: int) -> Iterator[None]:
    """What is opened next has this descriptor, once it is free: those below are taken."""
    taken = []
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) < number:
        taken.append(descriptor)
    os.close(descriptor)
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def ended(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection; what it has said is skipped."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            continue
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("again", [True, False])
def test_who_closes_a_new_connection_at_once_may_be_a_worker_that_ends(again: bool) -> None:
    """Whoever connects tries again then, but not where the other end has said that it wants another mechanism."""
    mechanism = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"ANOTHER".ljust(20, b"\0") + bytes(32)  # a greeting of ZMTP 3
    with socket.create_server(("127.0.0.1", 0)) as server:
        late = zmq_link.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        late.send([b"hello"])
        connection, _ = server.accept()
        with connection:
            connection.recv(64)
            if not again:
                connection.sendall(mechanism)
                until(lambda: late.connected or late.readable, lambda: [late])
        with pytest.raises(LinkBroken) as raised:
            until(late.receive, lambda: [late])
    assert isinstance(raised.value, Unreached) is again
    late.close()


def test_a_closed_listener_answers_nobody_new_while_its_links_live_on(tmp_path: Path) -> None:
    pair = Pair("zmq-v4", tmp_path)
    assert pair.listener is not None
    pair.listener.close()
    late = zmq_link.connect(pair.listener.address)  # type: ignore[attr-defined]
    late.send([b"too late"])

    def refused() -> bool:
        pair.listener.pump()  # type: ignore[union-attr]
        try:
            late.receive()
        except LinkBroken:
            return True
        return False

    until(refused, lambda: [late, pair.listener])
    assert pair.listener.accept() == []
    pair.a.send([b"still"])
    assert pair.messages(pair.b, 1) == [[b"still"]]
    late.close()
    pair.close()
    assert pair.listener.fileno() == -1


@pytest.mark.parametrize("kind", ["zmq", "unix"])
def test_an_address_in_use_is_a_clear_error(kind: str, tmp_path: Path) -> None:
    listen = zmq_link.listen if kind == "zmq" else unix_listener.listen
    listener = listen("tcp://127.0.0.1:0" if kind == "zmq" else f"unix://{tmp_path}/one.sock")
    with pytest.raises(AddressError, match="in use"):
        listen(listener.address)
    listener.close()


# AF_UNIX --------------------------------------------------------------------------------------------------------------


UnixPair = Callable[[], tuple[unix_link.UnixLink, unix_link.UnixLink]]


@pytest.fixture(params=[False, True], ids=["socket", "rings"])
def unix_pair(request: pytest.FixtureRequest) -> UnixPair:
    """Makes two ends, which send by the socket alone or by rings too."""

    def make() -> tuple[unix_link.UnixLink, unix_link.UnixLink]:
        ours, theirs = unix_link.pair()
        other = unix_link.UnixLink(theirs, inherited=True)
        if request.param:
            agree(ours, other)
        return ours, other

    return make


def test_descriptors_arrive_with_their_message(unix_pair: UnixPair) -> None:
    a, b = unix_pair()
    files = [os.memfd_create(f"file{number}") for number in range(3)]
    for number, descriptor in enumerate(files):
        os.write(descriptor, b"content %d" % number)
    a.send([b"plain"])
    a.send([b"two", bytes(50_000)], fds=files[:2])
    a.send([b"one"], fds=files[2:])
    a.send([b"plain again"])
    for descriptor in files:
        os.close(descriptor)
    seen: list[tuple[bytes, list[bytes]]] = []
    while len(seen) < 4:
        batch = b.receive()
        taken = b.taken_fds()
        contents = [os.pread(descriptor, 100, 0) for descriptor in taken]
        assert all(not os.get_inheritable(descriptor) for descriptor in taken)
        for descriptor in taken:
            os.close(descriptor)
        seen += [(bytes(message[0]), []) for message in batch[:-1]]
        seen += [(bytes(message[0]), contents) for message in batch[-1:]]
    assert seen == [
        (b"plain", []),
        (b"two", [b"content 0", b"content 1"]),
        (b"one", [b"content 2"]),
        (b"plain again", []),
    ]
    a.close()
    b.close()


def test_descriptors_of_queued_messages_survive_the_callers_close_and_do_not_leak(unix_pair: UnixPair) -> None:
    baseline = descriptors()
    a, b = unix_pair()
    for number in range(40):
        descriptor = os.memfd_create("queued")
        a.send([b"%d" % number, bytes(400_000)], fds=[descriptor])
        os.close(descriptor)
    assert a.wants_write
    got = 0
    while got < 20:
        if a.wants_write:
            a.flush()
        got += len(b.receive())
        if got % 2:
            for descriptor in b.taken_fds():
                os.close(descriptor)
    a.close()
    b.close()
    assert descriptors() == baseline


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_descriptors_left_what_can_go_at_once_goes_with_its_own(unix_pair: UnixPair) -> None:
    a, b = unix_pair()
    file = os.memfd_create("file")
    with no_descriptor_left():
        a.send([b"with", bytes(100)], fds=[file])
    assert [bytes(message[0]) for message in b.receive()] == [b"with"]
    (taken,) = b.taken_fds()
    assert os.fstat(taken).st_ino == os.fstat(file).st_ino
    os.close(taken)
    os.close(file)
    a.close()
    b.close()


def test_without_descriptors_left_a_message_that_waits_goes_without(unix_pair: UnixPair) -> None:
    """Whoever needs them declines, and what they are for goes another way; the link holds."""
    a, b = unix_pair()
    file = os.memfd_create("file")
    while not a.wants_write:
        a.send([b"before", bytes(1 << 20)])
    with no_descriptor_left():
        a.send([b"without"], fds=[file, file])
    a.send([b"with"], fds=[file])
    seen: dict[bytes, int] = {}
    while b"with" not in seen:
        if a.wants_write:
            a.flush()
        messages = b.receive()
        taken = b.taken_fds()
        seen.update((bytes(message[0]), 0) for message in messages)
        if messages:
            seen[bytes(messages[-1][0])] = len(taken)
        for descriptor in taken:
            os.close(descriptor)
    assert seen == {b"before": 0, b"without": 0, b"with": 1}
    os.close(file)
    a.close()
    b.close()


class NoDescriptors:
    """A socket of a user who has as many descriptors on their way as the kernel lets a user have."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.refused = 0

    def sendmsg(self, pieces: Any, rights: Any, flags: int) -> int:
        if rights:
            self.refused += 1
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return self._real.sendmsg(pieces, rights, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("waits", [False, True])
def test_what_the_kernel_passes_no_descriptors_for_goes_without(unix_pair: UnixPair, waits: bool) -> None:
    a, b = unix_pair()
    file = os.memfd_create("file")
    before = descriptors()
    while waits and not a.wants_write:
        a.send([b"before", bytes(1 << 20)])
    real, a._writer._socket = a._writer._socket, NoDescriptors(a._writer._socket)  # type: ignore[assignment]
    a.send([b"without", bytes(100)], fds=[file, file])
    seen: list[bytes] = []
    while b"without" not in seen:
        if a.wants_write:
            a.flush()
        seen += [bytes(message[0]) for message in b.receive()]
        assert b.taken_fds() == []
    assert a._writer._socket.refused == 1  # type: ignore[attr-defined]
    assert descriptors() == before
    a._writer._socket = real
    a.send([b"with"], fds=[file])
    assert [bytes(message[0]) for message in b.receive()] == [b"with"]
    os.close(*b.taken_fds())
    os.close(file)
    a.close()
    b.close()


def test_descriptors_that_find_no_room_here_do_not_break_the_link(unix_pair: UnixPair) -> None:
    a, b = unix_pair()
    file = os.memfd_create("file")
    a.send([b"first"], fds=[file, file])
    with no_descriptor_left():
        assert [bytes(message[0]) for message in b.receive()] == [b"first"]
        assert b.taken_fds() == []
    a.send([b"second"], fds=[file])
    assert [bytes(message[0]) for message in b.receive()] == [b"second"]
    (taken,) = b.taken_fds()
    os.close(taken)
    os.close(file)
    a.close()
    b.close()


def test_more_descriptors_than_a_message_may_have_are_refused(unix_pair: UnixPair) -> None:
    a, b = unix_pair()
    with pytest.raises(LocalProtocolError, match="descriptors"):
        a.send([b"x"], fds=[0] * (unix_link.MAX_FDS + 1))
    a.close()
    b.close()


@pytest.mark.parametrize(
    "attack",
    [
        struct.pack("<II", 0, 0),
        struct.pack("<II", MAX_FRAMES + 1, 0),
        struct.pack("<II", 2**32 - 1, 0),
        struct.pack("<II", 1, unix_link.MAX_FDS + 1),
        struct.pack("<IIQ", 1, 0, MAX_FRAME_BYTES + 1),
        struct.pack("<IIQ", 1, 0, 2**64 - 1),
        struct.pack("<IIQ", 1, 1, 0),
        struct.pack("<IIQ", 1, 0, 10) + b"short",
    ],
)
def test_bytes_that_are_no_message_break_the_link(attack: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = unix_link.UnixLink(ours)
    theirs.sendall(attack)
    theirs.close()
    with pytest.raises(LinkBroken):
        while True:
            assert link.receive() == []
    link.close()


def test_a_flood_of_descriptors_breaks_the_link_and_none_stays_open() -> None:
    baseline = descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = unix_link.UnixLink(ours)
    with pytest.raises(LinkBroken, match="descriptors"):
        for _ in range(20):
            socket.send_fds(theirs, [struct.pack("<IIQ", 1, 0, 0)], [0] * 40)
            link.receive()
    link.close()
    theirs.close()
    assert descriptors() == baseline


def test_a_sink_receives_large_payloads_in_place(unix_pair: UnixPair) -> None:
    a, b = unix_pair()
    memory = bytearray(3 * MiB)
    asked: list[tuple[bytes, int]] = []

    def sink(header: bytes, size: int) -> memoryview | None:
        asked.append((header, size))
        return memoryview(memory)[:size] if header == b"here" else None

    b.sink = sink
    payload = os.urandom(len(memory))
    for header, size in ((b"here", len(memory)), (b"elsewhere", MiB), (b"small", 10)):
        a.send([header, memoryview(payload)[:size]])
    got: list[list[Any]] = []
    while len(got) < 3:
        if a.wants_write:
            a.flush()
        got += b.receive()
    assert memory == payload
    assert asked == [(b"here", len(memory)), (b"elsewhere", MiB)]
    assert got[0][1].obj is memory
    assert [len(message[1]) for message in got] == [len(memory), MiB, 10]
    a.close()
    b.close()


def test_received_memory_is_used_again_only_when_nobody_looks_at_it(unix_pair: UnixPair) -> None:
    a, b = unix_pair()
    kept: list[Any] = []
    for number in range(12):
        a.send([b"", bytes([number]) * 200_000])
        while not (got := b.receive()):
            a.flush()
        if number % 3 == 0:
            kept.append((number, got[0][1]))
    for number, frame in kept:
        assert frame == bytes([number]) * 200_000
    a.close()
    b.close()


def test_credentials_are_the_kernels_word(unix_pair: UnixPair, tmp_path: Path) -> None:
    pair = Pair("unix-path", tmp_path)
    for link in (pair.a, pair.b):
        assert (link.credentials().pid, link.credentials().uid) == (os.getpid(), os.getuid())
    assert pair.a.inherited is False
    child, parent = unix_pair()
    assert child.inherited
    child.close()
    parent.close()
    assert os.stat(tmp_path / "link.sock").st_mode & 0o777 == 0o600
    pair.close()
    assert not (tmp_path / "link.sock").exists()


@pytest.mark.parametrize("address", ["tcp://localhost:0", "tcp://[::1]:0", "ipc://{}/z.sock", "unix://{}/u.sock"])
def test_an_address_says_which_kind_of_link(address: str, tmp_path: Path) -> None:
    listener = schemes.listen(address.format(tmp_path))
    link = schemes.connect(listener.address)
    link.send([b"hello"])
    accepted: list[Link] = []
    until(lambda: accepted.extend(listener.accept()) or accepted, lambda: [listener])
    assert until(lambda: accepted[0].receive(), lambda: [listener, accepted[0]]) == [[b"hello"]]
    assert isinstance(link, unix_link.UnixLink) == address.startswith("unix")
    for end in (link, accepted[0], listener):
        end.close()
    for refused in (schemes.listen, schemes.connect):
        with pytest.raises(AuthError):
            refused("tcp://10.1.1.1:7700")


def test_another_users_process_is_not_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = unix_listener.listen(f"unix://{tmp_path}/ours.sock")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(unix_link.UnixLink, "credentials", lambda link: PeerCredentials(1, 54321, 0))
    with contextlib.closing(unix_listener.connect(listener.address)) as stranger:
        assert listener.accept() == []
        with pytest.raises(LinkBroken, match="closed"):
            stranger.receive()
    listener.close()


def test_a_path_that_a_dead_process_left_is_taken_over_and_a_file_is_not(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "stale.sock"))
    unix_listener.listen(f"unix://{tmp_path}/stale.sock").close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(AddressError):
        unix_listener.listen(f"unix://{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(LinkBroken, match="nobody listens"):
        unix_listener.connect(f"unix://{tmp_path}/nowhere.sock")


# memory ---------------------------------------------------------------------------------------------------------------


def simulate(faults: Faults) -> list[tuple[float, bytes]]:
    now = 0.0
    a, b = memory_link.pair(faults, lambda: now)
    for number in range(200):
        a.send([b"%d" % number])
    seen = []
    while (arrival := b.next_arrival) is not None:
        assert arrival >= now
        now = arrival
        assert b.readable
        seen += [(now, bytes(message[0])) for message in b.receive(limit=1)]
    return seen


def test_memory_faults_replay_from_their_seed() -> None:
    def faults(seed: int) -> Faults:
        return Faults(seed, drop=0.2, repeat=0.2, delay=(0.1, 2.0))

    assert simulate(faults(1)) == simulate(faults(1))
    assert simulate(faults(1)) != simulate(faults(2))
    numbers = [int(number) for _, number in simulate(faults(1))]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) < 200
    assert len(set(numbers)) < len(numbers)


def test_a_memory_message_waits_for_its_time_and_is_a_copy() -> None:
    now = 0.0
    a, b = memory_link.pair(Faults(delay=(1.0, 1.0)), lambda: now)
    buffer = bytearray(b"as of the send")
    a.send([memoryview(buffer)])
    buffer[:] = bytes(len(buffer))
    assert b.receive() == []
    assert not b.readable
    now = 1.0
    assert b.receive() == [[b"as of the send"]]


def test_a_killed_memory_end_leaves_what_it_sent() -> None:
    a, b = memory_link.pair(Faults(kill_after=2))
    a.send([b"one"])
    a.send([b"two"])
    with pytest.raises(LinkBroken, match="killed"):
        a.send([b"three"])
    assert b.receive() == [[b"one"], [b"two"]]
    with pytest.raises(LinkBroken, match="died"):
        b.receive()
