"""A side of a comparison as a child process: one JSON line in, one out, so that both sides can take turns.

The child keeps its standard output for the answers; whatever its libraries print goes to standard error.  While one
side measures the other is stopped, with all its processes: threads that poll when they have nothing to do (TensorPipe's
do, on a core each) would take the time of the side that works.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Self, TypeVar

from bench.report import HERE, PACE, loop_milliseconds
from bench.workload import Figures, Job, measure

PATIENCE = 180.0  # seconds for one round of one row, start-up and first compilations included


T = TypeVar("T", bound=Any)  # a `bench.workload.Side`, or what measures in its own way


class SideError(RuntimeError):
    """A side could not measure a row; the message is its own."""


class Process:
    """A side running as ``python -m MODULE``, stopped but while it measures.  Usable as a context manager."""

    def __init__(self, module: str, *args: str) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), *sys.path]))
        self.module = module
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            process_group=0,
        )
        try:
            self.version = str(self._answer()["version"])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def measure(self, job: Job) -> Figures:
        """One round of a job.  Raises `SideError`."""
        assert self.child.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.child.stdin.write(json.dumps(asdict(job)) + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass  # the answer below says why it ended
        try:
            answer = self._answer()
            PACE.samples.append(answer.pop("pace"))
            return Figures(**answer)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, which its next answer says
            os.killpg(self.child.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        watchdog = threading.Timer(PATIENCE, self.child.kill)
        watchdog.start()
        line = self.child.stdout.readline()
        watchdog.cancel()
        if not line:
            code = self.child.wait()
            raise SideError(f"{self.module} ended with exit code {code} (killed after {PATIENCE:.0f} s if it is -9)")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the child, by force after a minute."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self.child.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already
        try:
            self.child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def end_with_parent() -> None:
    """Ends this process, a side's own child, when its standard input does: its parent is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(make: Callable[[], AbstractContextManager[T]], measured: Callable[[T, Job], Figures] = measure) -> int:
    """The child's main loop: opens the side, says its version, answers jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        with make() as side:
            answer({"version": side.version()})
            for line in sys.stdin:
                try:
                    figures = asdict(measured(side, Job(**json.loads(line))))
                    answer(figures | {"pace": loop_milliseconds()})
                except Exception as error:
                    traceback.print_exc()
                    answer({"error": f"{type(error).__name__}: {error}"})
    except ImportError as error:  # what it measures is not installed
        answer({"error": str(error)})
        return 1
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0
