"""torch RPC beside the demo's own kill: run in processes of its own, where torch is installed, and read back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

from streamrt.errors import UnavailableError
from transport.launch.environment import child_environment

TIMEOUT_SECONDS = 5.0
"""Of the call that is killed; torch's own default is a minute."""
NO_WORKER_SECONDS = 8.0
"""After which a worker that was started again counts as not back."""
WHOLE_SECONDS = 180.0
"""After which the whole act is given up."""


@dataclass(frozen=True, slots=True)
class Rival:
    """What came of torch RPC's call.  `known`: seconds from the kill to its end; `error`: what it raised, if anything.

    `back`: seconds until a worker that was started in its place answered, None where it did not, which `end` explains.
    """

    version: str
    timeout: float
    known: float
    timed_out: bool
    error: str
    back: float | None
    end: str


def measure(device: str, nbytes: int, patience: float = NO_WORKER_SECONDS) -> Rival:
    """Kills torch RPC's callee in the middle of a call with an array of `nbytes`, and starts it again.

    Blocks the host until that is over: for the second one it waits `patience` seconds at most.

    Raises `UnavailableError` where torch is not installed, or its RPC does not start.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("torch is not installed: pip install 'streamrt[torch]'")
    command = [sys.executable, "-m", "transport.demo.torch_kill", "--device", device, "--nbytes", str(nbytes)]
    command += ["--timeout", str(TIMEOUT_SECONDS), "--patience", str(patience)]
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WHOLE_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"torch RPC was not done after {WHOLE_SECONDS:g} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UnavailableError(f"torch RPC does not run here (exit code {error.returncode}): {last}") from error
    return Rival(**json.loads(done.stdout.splitlines()[-1]))
