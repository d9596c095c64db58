"""Throughput of the links by chunk size, from which the default size of a chunk is taken; nothing is asserted.

``python -m bench.links``: a child process sends 64 MiB in chunks of 0.25 to 4 MiB, as a header frame and a payload
frame each; this process copies each payload to its destination, as a receiver of staged data does.  Best of several
rounds.  The last columns are the round trip of a small message, p50 and p99; both ends of ``unix + ring`` look into the
ring for up to 300 us before they sleep, those of the others sleep at once.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from transport.links import Link, LinkBroken, Listener, unix_link, unix_listener, zmq_link

MIB = 1 << 20
TOTAL = 64 * MIB
CHUNKS = (MIB // 4, MIB // 2, MIB, 2 * MIB, 4 * MIB)
HEADER = bytes(48)
AHEAD = 8 * MIB  # what the driver lets stand in a link
PINGS = 2000
SPIN_SECONDS = 300e-6
GLANCES, ROUNDS = 32, 4


def wait(link: Any, seconds: float = 10.0, *others: Any) -> None:
    """Until the link is readable (or writable, where it wants to write)."""
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN | (select.POLLOUT if link.wants_write else 0))
    for other in others:
        poller.register(other.fileno(), select.POLLIN)
    poller.poll(seconds * 1e3)


def arrived(link: Any) -> bool:
    """Looks into the link's ring, and at its socket, for a while: whether something has come."""
    end = time.perf_counter() + SPIN_SECONDS
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    link.rouse()
    while time.perf_counter() < end:
        for _ in range(ROUNDS):
            if link.glance(GLANCES) or poller.poll(0):
                return True
        os.sched_yield()  # the other end may have the same core
    return not link.doze()


def child(address: str, ring: bool) -> None:
    """Connects, and does what each message says: its length in bytes, its chunk, or an echo."""
    link: Link
    if address.startswith("fd:"):
        link = unix_link.UnixLink(socket.socket(fileno=int(address[3:])), inherited=True)
    elif address.startswith("unix:"):
        link = unix_listener.connect(address)
    else:
        link = zmq_link.connect(address)
    source = memoryview(bytearray(os.urandom(4 * MIB)))
    link.send([b"hello"])
    try:
        while True:
            for message in link.receive():
                if len(message) == 1:
                    link.send(message)
                    continue
                chunk = int(bytes(message[1]))
                for _ in range(TOTAL // chunk):
                    link.send([HEADER, source[:chunk]])
                    while link.queued_bytes >= AHEAD:
                        wait(link, 0.0005)
                        link.flush()
            if link.wants_write:
                link.flush()
            if ring and arrived(link):
                continue
            wait(link, 0.0005 if link.queued_bytes else 10.0)
    except LinkBroken:
        link.close()


class Run:
    """One kind of link to a child."""

    def __init__(self, kind: str, directory: str) -> None:
        self.listener: Listener | None = None
        self.link: Any
        self.ring = kind == "unix + ring"
        command = [sys.executable, "-m", "bench.links", *(["--ring"] if self.ring else []), "--child"]
        if kind.startswith("unix"):
            self.link, theirs = unix_link.pair()
            self.process = subprocess.Popen([*command, f"fd:{theirs.fileno()}"], pass_fds=[theirs.fileno()])
            theirs.close()
            if self.ring:
                self.link.offer_rings()
        else:
            self.listener = (
                zmq_link.listen("tcp://127.0.0.1:0") if kind == "zmq tcp" else zmq_link.listen(f"ipc://{directory}/z")
            )
            self.process = subprocess.Popen([*command, self.listener.address])
            links: list[Link] = []
            while not links:
                wait_listener(self.listener)
                links = self.listener.accept()
            (self.link,) = links
        self.messages(1)

    def messages(self, count: int) -> list[Any]:
        got: list[Any] = []
        others = [] if self.listener is None else [self.listener]
        while True:
            got += self.link.receive()
            if len(got) >= count:
                return got
            if self.ring and arrived(self.link):
                continue
            wait(self.link, 10.0, *others)

    def throughput(self, chunk: int, rounds: int) -> float:
        destination = memoryview(bytearray(chunk))
        best = float("inf")
        others = [] if self.listener is None else [self.listener]
        for _ in range(rounds):
            begin = time.perf_counter()
            self.link.send([b"send", b"%d" % chunk])
            left = TOTAL // chunk
            while left:
                messages = self.link.receive(8)
                for message in messages:
                    destination[:] = message[1]
                    left -= 1
                if not messages and left:
                    wait(self.link, 10.0, *others)
            best = min(best, time.perf_counter() - begin)
        return TOTAL / best / 1e9

    def round_trip(self) -> tuple[float, float]:
        times = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            self.link.send([b"ping"])
            self.messages(1)
            times.append(time.perf_counter() - begin)
        times.sort()
        return times[PINGS // 2] * 1e6, times[PINGS * 99 // 100] * 1e6

    def close(self) -> None:
        self.link.close()
        if self.listener is not None:
            self.listener.close()
        self.process.wait(10)


def wait_listener(listener: Listener) -> None:
    poller = select.poll()
    poller.register(listener.fileno(), select.POLLIN)
    poller.poll(10_000)


def main() -> None:
    """Prints the table.  Blocks the host until it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--ring", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.ring)
        return
    rows = []
    print(f"{'GB/s by chunk':14}" + "".join(f"{chunk / MIB:>7.2f}M" for chunk in CHUNKS) + "   small, us     p99")
    with tempfile.TemporaryDirectory() as directory:
        for kind in ("unix", "unix + ring", "zmq tcp", "zmq ipc"):
            run = Run(kind, directory)
            figures = [run.throughput(chunk, arguments.rounds) for chunk in CHUNKS]
            ping, slow = run.round_trip()
            run.close()
            print(f"{kind:14}" + "".join(f"{figure:>8.2f}" for figure in figures) + f"{ping:>12.0f}{slow:>8.0f}")
            rows += [
                {"name": f"{kind} {chunk / MIB:g} MiB", "unit": "GB/s", "streamrt": figure}
                for chunk, figure in zip(CHUNKS, figures, strict=True)
            ]
            rows.append({"name": f"{kind} small", "unit": "us", "streamrt": ping})
            rows.append({"name": f"{kind} small, p99", "unit": "us", "streamrt": slow})
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
