"""Whether another process of this host lives: a pidfd, with or without Python's own call for it."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrt.errors import UnavailableError
from transport import process

SLEEPER = "import sys; sys.stdin.read()"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def fires(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(10_000))


@pytest.mark.parametrize("own", [True, False], ids=["os.pidfd_open", "system call"])
def test_a_pidfd_tells_of_the_end(own: bool, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """conda's Pythons have no `os.pidfd_open`: every peer was said to be dead."""
    if not own:
        monkeypatch.delattr(os, "pidfd_open")
    started = process.start_time(sleeper.pid)
    descriptor = process.open_pidfd(sleeper.pid, started)
    assert descriptor is not None
    assert not os.get_inheritable(descriptor)
    assert process.open_pidfd(sleeper.pid, started + 1) is None, "another process that has got the pid"
    sleeper.kill()
    assert fires(descriptor)
    sleeper.wait()
    assert process.open_pidfd(sleeper.pid, started) is None
    os.close(descriptor)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE, errno.EINVAL])
def test_what_cannot_be_watched_is_not_said_to_be_gone(
    number: int, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(UnavailableError, match="cannot be watched"):
        process.open_pidfd(sleeper.pid, 0)


def test_the_system_calls_own_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(UnavailableError, match="cannot be watched"):
        process.open_pidfd(-1, 0)


def test_a_hidden_proc_says_nothing_of_a_process(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc mounted with hidepid shows the processes of others to nobody."""
    started = process.start_time(sleeper.pid)

    def hide(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", hide)
    with pytest.raises(UnavailableError, match="/proc"):
        process.open_pidfd(sleeper.pid, started)
    sleeper.kill()
    sleeper.wait()
    assert process.open_pidfd(sleeper.pid, started) is None
