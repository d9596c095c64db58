"""What processes say to each other over a link with rings: ``python ring_talk.py echo|count DESCRIPTOR SEED``.

Both ends look, sleep and are woken in any order, drawn from a seed.
"""

from __future__ import annotations

import random
import select
import socket
import sys
from typing import Any

from transport.links import LinkBroken
from transport.links.unix_link import UnixLink

SIZES = (0, 10, 1000, 30_000)


def messages(link: UnixLink, draw: random.Random, patience: float = 20.0) -> list[list[Any]]:
    """The next ones; raises `TimeoutError` when nobody has woken this end for so many seconds."""
    while True:
        looks = draw.choice((0, 0, 1, 5, 50, 400))
        if looks:
            link.rouse()
            if link.glance(looks) and (got := link.receive()):
                return got
        if link.wants_write:
            link.flush()
        if link.doze() and not select.select([link], [], [], patience)[0]:
            raise TimeoutError("a message was slept through")
        if got := link.receive():
            return got


def echo(link: UnixLink, draw: random.Random) -> None:
    """Sends back what comes."""
    while True:
        for message in messages(link, draw):
            link.send(message)


def count(link: UnixLink, draw: random.Random) -> None:
    """Sends numbers, small and large, as fast as the link takes them."""
    number = 0
    while True:
        link.send([b"%d" % number, bytes(draw.choice(SIZES))])
        number += 1
        if link.wants_write:
            select.select([], [link], [])
            link.flush()
        if draw.random() < 0.05:
            link.receive()


def main() -> None:
    """Runs until the other end is gone."""
    link = UnixLink(socket.socket(fileno=int(sys.argv[2])), inherited=True)
    try:
        {"echo": echo, "count": count}[sys.argv[1]](link, random.Random(int(sys.argv[3])))
    except LinkBroken:
        link.close()


if __name__ == "__main__":
    main()
