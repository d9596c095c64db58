"""Worker processes for tests: started with their ready line read, stopped with their exit code known."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from transport.launch.environment import child_environment

HERE = Path(__file__).parent
FORCED_TO_UCX = os.environ.get("STREAMRT_CHANNELS", "").startswith("ucx")
"""Whether all is sent over UCX, which waits for no device: what has come is there for the host."""
chosen = pytest.mark.skipif(FORCED_TO_UCX, reason="is about a channel that is chosen where nobody names one")
WATCHDOG = 30.0  # seconds; far above what anything here takes, also on a busy machine of two cores


class Worker:
    """A ``streamrt-worker`` of its own that serves ``rpc_service``."""

    def __init__(
        self,
        service: str = "rpc_service:service",
        *options: str,
        environment: dict[str, str] | None = None,
        keep_errors: bool = False,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "transport.worker", service, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if keep_errors else None,
            text=True,
            cwd=HERE,
            env=child_environment() | (environment or {}),
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        found = re.search(r"listen=(\S+)", self.ready_line)
        if found is None:
            self.process.kill()
            self.process.communicate()
            raise AssertionError(f"the worker said {self.ready_line!r}")
        self.address = found[1]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self.process.pid

    def freeze(self) -> None:
        """Stops the process, and waits until it is stopped."""
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> tuple[int, str]:
        """The exit code, and what was written to standard error."""
        _, errors = self.process.communicate(timeout=WATCHDOG)
        return self.process.returncode, errors or ""

    def stop(self) -> tuple[int, str]:
        self.process.terminate()
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.thaw()
            self.process.terminate()
        try:
            self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            if error is None:
                raise


def run_worker(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Runs a worker that is expected to end by itself: exit code, standard output, standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "transport.worker", *arguments],
        capture_output=True,
        text=True,
        cwd=HERE,
        env=child_environment() | (environment or {}),
        timeout=WATCHDOG,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def use_up_descriptors(limit: int) -> list[int]:
    """Lowers this process's limit and opens what is left under it; the caller closes them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    return held


def until(condition: Callable[[], Any], what: str | Callable[[], str], timeout: float = WATCHDOG) -> Any:
    """Polls until the condition holds, and returns what it gave; fails after the watchdog's time.

    `what` was waited for; a function is asked when the time is over.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s for {what if isinstance(what, str) else what()}")
        pause.wait(0.002)  # polls; nobody sets it


def freeze(pid: int) -> None:
    """Stops a process, and waits until it is stopped: until then it may go on with what it is told."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T", "the process to be stopped")


def state_of(pid: int) -> str:
    """The state letter of a process, empty when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state = text.rpartition(")")[2].split()[0]
    return "" if state in "ZX" else state


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes(pid: int, field: str = "RssAnon") -> int:
    """What a process holds in memory: of its own now, or (``VmHWM``) the most that it ever held, files included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"process {pid} tells no {field}")
