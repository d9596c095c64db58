"""Child processes of the litmus: started fresh, spoken to by JSON lines and descriptors, never outliving the run."""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from streamrt.errors import StreamrtError

ROOT = Path(__file__).resolve().parents[2]
_DESCRIPTORS = 8


class ChildError(StreamrtError):
    """A child reported an error; its traceback is the message."""


class Channel:
    """JSON lines both ways over a socket, with descriptors beside them."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = b""
        self._fds: list[int] = []

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Sends one message.  Does not touch the device."""
        data = json.dumps(message).encode() + b"\n"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.end.sendmsg([data], rights)
        self.end.sendall(data[sent:])

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        """The next message and the descriptors beside it.  Blocks the host.  Raises `TimeoutError`, `EOFError`."""
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            self.end.settimeout(None if end is None else max(end - time.monotonic(), 1e-3))
            data, rights, _, _ = self.end.recvmsg(1 << 16, socket.CMSG_SPACE(4 * _DESCRIPTORS))
            for _, kind, payload in rights:
                if kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._fds.extend(fds)
            if not data:
                raise EOFError("the other process is gone")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        received, self._fds = self._fds, []
        self.end.settimeout(None)
        return json.loads(line), received


class Child(Channel):
    """A child that runs ``bench.litmus.<module>.<function>(channel, config, fds)`` in a fresh interpreter."""

    def __init__(
        self, role: str, config: Any, fds: tuple[int, ...] = (), environment: dict[str, str] | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self.role = role
        passed = (theirs.fileno(), *fds)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.litmus.child", role, json.dumps(passed), json.dumps(config)],
            pass_fds=passed,
            cwd=ROOT,
            env={**os.environ, "CUPY_CACHE_IN_MEMORY": "1", **(environment or {})},
        )
        theirs.close()

    def ask(self, message: Any, timeout: float) -> Any:
        """Sends a message and returns the answer.  Blocks the host."""
        self.send(message)
        return self.answer(timeout)

    def answer(self, timeout: float) -> Any:
        """The next message.  Blocks the host.  Raises `TimeoutError` or `EOFError`, naming the child."""
        try:
            message = self.receive(timeout)[0]
        except (TimeoutError, EOFError, ConnectionError) as error:
            kind = TimeoutError if isinstance(error, TimeoutError) else EOFError
            raise kind(f"{self.role} (pid {self.process.pid}, exit {self.process.poll()}): {error}") from None
        if isinstance(message, dict) and "error" in message:
            raise ChildError(f"{self.role} failed: {message['error']}")
        return message

    def kill(self) -> None:
        """Ends the child, whatever it does.  Blocks the host until it is gone, 20 s at most."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            print(f"{self.role} (pid {self.process.pid}) does not die", file=sys.stderr, flush=True)
        self.end.close()


class Family:
    """The children of one part: all are ended when the part ends, however it ends."""

    def __init__(self) -> None:
        self.children: list[Child] = []

    def start(
        self, role: str, config: Any, fds: tuple[int, ...] = (), environment: dict[str, str] | None = None
    ) -> Child:
        """Starts a child of the family.  Does not block the host."""
        child = Child(role, config, fds, environment)
        self.children.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGKILL)
        for child in self.children:
            child.kill()


def die_with_parent(parent: int) -> None:
    """Asks the kernel to end this process with its parent (prctl PR_SET_PDEATHSIG).  Does not touch the device."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(3)
