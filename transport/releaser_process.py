"""The program that lets streams go when the process that has them cannot: standard library only, run by its path.

``python -I -S releaser_process.py SOCKET OWNER``.  It maps the words that the owner's streams wait for and the table of
the values that they wait for, and holds the pidfds of the processes that signal them.  When one of these has ended and
the owner's agent has not seen to it within a moment (it holds the interpreter in a driver's call, say), it marks the
words and moves them, by plain stores.  So it does for a process that stands still for longer than the owner gives it.

It asks nothing of the owner but the socket, and ends with it.  What it writes is what the owner's agent would: done
twice, it changes nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import sys
import time

ORDER = struct.Struct("<QQd")
"""What the owner says: a number, the peer's process id, and after how many seconds of standing still that is lost.
With three descriptors (pidfd, words, table) it is watched from now on.  With two (words, table) it has ended
already; or, without a process id, these are words of the owner's own that are derived from others'.  Without any the
number is forgotten."""
DESCRIPTORS = 3
GRACE_SECONDS = 0.25
"""What the owner's agent has from the end of a peer's process."""
FROZEN_GRACE_SECONDS = 3.0
"""What it has more than its own time for a process that stands still: it looks once a second."""
AGAIN_SECONDS = 0.05
TICK_SECONDS = 1.0
LATE_SECONDS = 1.0  # a look that comes so late: this process stood still itself
# As in streamrt.segment, which cannot be imported without all of streamrt: 64 bytes a word, with its loss beside it.
STRIDE, LAST_GOOD, LOST = 64, 8, 16
VALUE, BITS = 0, 8  # in the table


class Words:
    """The words of one connection and direction, and a table of values that they have to come to."""

    def __init__(self, descriptors: list[int]) -> None:
        self._maps = [mmap.mmap(fd, os.fstat(fd).st_size) for fd in descriptors]
        for fd in descriptors:
            os.close(fd)
        self._words32, self._words = (memoryview(self._maps[0]).cast(form) for form in ("I", "Q"))
        self._table = memoryview(self._maps[1]).cast("Q")

    def behind(self) -> list[tuple[int, int, int]]:
        """The words that have not come to their values: where they are, how wide, and the value."""
        found = []
        for offset in range(0, 8 * len(self._table), STRIDE):
            value, bits = self._table[(offset + VALUE) // 8], self._table[(offset + BITS) // 8]
            if bits and (self._load(offset, bits) - value) & ((1 << bits) - 1) >= 1 << (bits - 1):
                found.append((offset, bits, value))
        return found

    def mark(self) -> None:
        """Marks all of these lost."""
        for offset, bits, _ in self.behind():
            value = self._load(offset, bits)
            if not self._words32[(offset + LOST) // 4]:
                self._words[(offset + LAST_GOOD) // 8] = value
                self._words32[(offset + LOST) // 4] = 1

    def release(self) -> None:
        """Moves those that are marked."""
        for offset, bits, value in self.behind():
            if not self._words32[(offset + LOST) // 4]:
                continue
            if bits == 32:
                self._words32[offset // 4] = value
            else:
                self._words[offset // 8] = value

    def _load(self, offset: int, bits: int) -> int:
        return self._words32[offset // 4] if bits == 32 else self._words[offset // 8]

    def close(self) -> None:
        """Unmaps them."""
        for view in (self._words32, self._words, self._table):
            view.release()
        for one in self._maps:
            one.close()


class Watched:
    """A peer's process, and its words for which the owner's streams wait."""

    def __init__(self, pid: int, timeout: float, descriptors: list[int]) -> None:
        self.pid = pid
        self.timeout = timeout
        self.gone = len(descriptors) < DESCRIPTORS
        self.pidfd = -1 if self.gone else descriptors[0]
        self.words = Words(descriptors[-2:])
        self.due: float | None = None  # when its words are released, if nobody else does
        if self.gone:
            self.due = time.monotonic() + GRACE_SECONDS
        self._still: float | None = None  # since when it stands still and is waited for

    def look(self, now: float, *, counts: bool = True) -> None:
        """Sees whether it stands still, while it is waited for.

        It is not lost any more once it runs again.  Time that does not count, in which the owner stands still too (both
        were stopped from a terminal, say) or this process did, begins the count anew.
        """
        if self.gone:
            return
        if not (counts and stopped(self.pid) and self.words.behind()):
            self._still = None
            if not stopped(self.pid):
                self.due = None
        elif self.due is not None:
            return
        elif self._still is None:
            self._still = now
        elif now - self._still > self.timeout + FROZEN_GRACE_SECONDS:
            self.due = now

    def close(self) -> None:
        """Lets go of all of it."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.words.close()


def stopped(pid: int) -> bool:
    """Whether a process is stopped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return False
    return text[text.rfind(b")") + 2 :][:1] in (b"T", b"t")


def serve(control: socket.socket, owner: int) -> None:
    """Watches what it is told to, until the owner has gone."""
    watched: dict[int, Watched] = {}
    derived: dict[int, Words] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    tick = 0.0
    while os.getppid() == owner:
        now = time.monotonic()
        dues = [one.due for one in watched.values() if one.due is not None]
        end = min([tick, *dues]) if watched else tick
        ready = {fd for fd, _ in poll.poll(max(0.0, 1000 * (end - now)))}
        if control.fileno() in ready and not _obey(control, watched, derived, poll):
            return
        now = time.monotonic()
        for one in watched.values():
            if one.pidfd in ready and not one.gone:
                one.gone, one.due = True, now + GRACE_SECONDS
                poll.unregister(one.pidfd)
            if one.due is not None and now >= one.due:
                if one.gone or stopped(one.pid):
                    _release(one.words, derived)
                one.due = now + AGAIN_SECONDS  # what stood still may write late, what is read late may wait late
        if now >= tick:
            counts = now - tick <= LATE_SECONDS and not stopped(owner)
            tick = now + TICK_SECONDS
            for one in watched.values():
                one.look(now, counts=counts)


def _release(words: Words, derived: dict[int, Words]) -> None:
    """Marks the words, then what the owner signals behind others, and only then lets its streams go."""
    if words.behind():
        words.mark()
        for one in derived.values():
            one.mark()
        words.release()


def _obey(control: socket.socket, watched: dict[int, Watched], derived: dict[int, Words], poll: select.poll) -> bool:
    """Does what the owner says; False when it has gone."""
    message, descriptors, flags, _ = socket.recv_fds(control, ORDER.size, DESCRIPTORS)
    if len(message) != ORDER.size:
        return False
    number, pid, timeout = ORDER.unpack(message)
    before = watched.pop(number, None)
    if before is not None:
        if not before.gone:
            poll.unregister(before.pidfd)
        before.close()
    if number in derived:
        derived.pop(number).close()
    if flags & socket.MSG_CTRUNC:  # no descriptor was left for some: the agent releases these alone
        _close(descriptors)
        return True
    try:
        if len(descriptors) == DESCRIPTORS or (pid and len(descriptors) == DESCRIPTORS - 1):
            one = watched[number] = Watched(pid, timeout, list(descriptors))
            if not one.gone:
                poll.register(one.pidfd, select.POLLIN)
        elif len(descriptors) == DESCRIPTORS - 1:
            derived[number] = Words(list(descriptors))
        else:
            _close(descriptors)
    except (OSError, ValueError):  # no memory to map these: the others are looked after all the same
        _close(descriptors)
    return True


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def main() -> None:
    """Runs until the owner has gone."""
    with socket.socket(fileno=int(sys.argv[1])) as control, contextlib.suppress(ConnectionError):
        serve(control, int(sys.argv[2]))


if __name__ == "__main__":
    main()
