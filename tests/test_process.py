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
from rpc_processes import HERE, until

from streamrt.errors import UnavailableError
from transport import process
from transport.launch.environment import child_environment

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


LOOKER = """
import os
from rpc_processes import use_up_descriptors
from transport import process

mine = (os.getpid(), process.start_time(os.getpid()))
held = use_up_descriptors(64)
print(process.ended(*mine))
"""


def test_only_a_process_that_is_over_has_ended(sleeper: subprocess.Popen[bytes]) -> None:
    """What cannot be looked at may still map our memory."""
    pid, started = sleeper.pid, process.start_time(sleeper.pid)
    assert not process.ended(pid, started)
    assert not process.ended(pid, 0)
    assert process.ended(pid, started + 1), "another process of that number"
    done = subprocess.run(
        [sys.executable, "-c", LOOKER], capture_output=True, text=True, check=True, cwd=HERE, env=child_environment()
    )
    assert done.stdout.strip() == "False", "no descriptor was left to look with"
    sleeper.kill()
    until(lambda: process.ended(pid, started), "the process to be seen as over, also before it is waited for")
    sleeper.wait()
    assert process.ended(pid, started)
