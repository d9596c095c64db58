"""The interpreter's switch interval while a thread waits for a reply."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import pytest
import rpc_service
from rpc_processes import until

import transport
from transport.launch.environment import child_environment
from transport.responsive import SHORT_SECONDS, responsive


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def short() -> bool:
    return sys.getswitchinterval() == pytest.approx(SHORT_SECONDS)


def test_it_is_short_while_anybody_waits_and_comes_back() -> None:
    with responsive():
        assert short()
        with responsive():
            assert short()
        assert short()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    with pytest.raises(RuntimeError), responsive():
        raise RuntimeError
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize("chosen", [2e-5, 0.002])
def test_what_the_user_sets_stays(chosen: float) -> None:
    sys.setswitchinterval(chosen)
    with responsive():
        assert sys.getswitchinterval() == pytest.approx(min(chosen, SHORT_SECONDS))
    assert sys.getswitchinterval() == pytest.approx(chosen)
    sys.setswitchinterval(0.005)
    with responsive():
        sys.setswitchinterval(chosen)
    assert sys.getswitchinterval() == pytest.approx(chosen)


def test_a_call_that_waits_makes_it_short() -> None:
    name, seen = uuid.uuid4().hex, threading.Event()
    with transport.local_workers(1, threads=2) as workers:
        worker = workers[0]
        waiting = threading.Thread(target=worker.call, args=(rpc_service.bump_behind, name, name))
        waiting.start()
        for _ in range(3000):
            if short():
                seen.set()
                break
            seen.wait(0.01)
        worker.submit(rpc_service.open_gate, name)
        waiting.join(30)
    assert seen.is_set()
    until(lambda: not short(), "the interval to be as it was")


def test_it_is_short_until_the_link_is_left_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has called waits for a device next, or calls again; a busy thread would keep it from that for as long."""
    monkeypatch.setattr("transport.untended.LEFT_SECONDS", 3.0)
    monkeypatch.setattr("transport.untended.LONGEST_LEFT_SECONDS", 3.0)
    with transport.local_workers(1) as workers:
        for _ in range(3):
            workers[0].call(rpc_service.echo, 1)
            assert short()
    until(lambda: not short(), "the interval to be as it was")
    monkeypatch.undo()
    with transport.local_workers(1) as workers:
        workers[0].call(rpc_service.echo, 1)
        until(lambda: not short(), "the interval to be as it was")


FORK = """
import os, sys
from transport.responsive import responsive
with responsive():
    child = os.fork()
    if child == 0:
        with responsive():
            pass
        os._exit(0 if abs(sys.getswitchinterval() - 0.005) < 1e-5 else 1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_the_usual_interval() -> None:
    environment = child_environment()
    ended = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_who_puts_back_what_he_found_does_not_make_it_short_for_good() -> None:
    """He may have found ours, as whole microseconds, and a timer of his own runs on in between."""
    with responsive():
        found = sys.getswitchinterval()
    sys.setswitchinterval(found)
    with responsive():
        assert short()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    with responsive():
        sys.setswitchinterval(sys.getswitchinterval())
        sys.setswitchinterval(sys.getswitchinterval())
    assert sys.getswitchinterval() == pytest.approx(0.005)
