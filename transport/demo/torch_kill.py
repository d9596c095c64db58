"""The same act with torch.distributed.rpc: its callee is killed in the middle of a call, then started again.

A program of its own, `python -m transport.demo.torch_kill`: rank 0 with no `--callee`, which starts rank 1 and prints
what it measured as one line of JSON.  Both ranks are on loopback and end with the process that started them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import asdict

import torch
import torch.distributed.rpc as rpc

from transport.demo.rival import NO_WORKER_SECONDS, TIMEOUT_SECONDS, Rival

CALLER, CALLEE = "caller", "callee"
JOIN_SECONDS = 60.0  # for both to be there at the start
FOR_EVER = 3600.0
STARTED = "in the middle of the call"


def stay(frame: torch.Tensor) -> torch.Tensor:
    """Runs in the callee: says that it is in the middle of the call, and does not come to its end.  Blocks the host."""
    print(STARTED, flush=True)
    threading.Event().wait(FOR_EVER)
    return frame


def answer() -> int:
    """Runs in the callee: its process.  Does not touch the device."""
    return os.getpid()


def join(name: str, store: str, device: str) -> None:
    """Joins the pair, whose devices are mapped to each other.  Blocks the host until both are there."""
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, rpc_timeout=JOIN_SECONDS, init_method=f"file://{store}"
    )
    if device != "cpu":
        options.set_device_map(CALLEE if name == CALLER else CALLER, {device: device})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ProcessGroup.*")  # RPC's own use of a deprecated class
        rpc.init_rpc(name, rank=(CALLER, CALLEE).index(name), world_size=2, rpc_backend_options=options)


def start_callee(store: str, device: str) -> subprocess.Popen[str]:
    """Starts rank 1.  Does not block the host."""
    command = [sys.executable, "-m", "transport.demo.torch_kill", "--callee", store, "--device", device]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


def end_with_parent() -> None:
    """Ends this process when its parent has ended.  Does not block the host."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def act(store: str, device: str, nbytes: int, timeout: float, patience: float) -> Rival:
    """Kills the callee in the middle of a call and starts it again.  Blocks the host until it is known what came of it.

    Raises what kept the pair from starting.
    """
    callee = start_callee(store, device)
    try:
        join(CALLER, store, device)
        frame = torch.ones(nbytes // 4, device=device)
        rpc.rpc_sync(CALLEE, answer, timeout=JOIN_SECONDS)
        called = time.monotonic()
        future = rpc.rpc_async(CALLEE, stay, (frame,), timeout=timeout)
        assert callee.stdout is not None
        callee.stdout.readline()
        killed = time.monotonic()
    finally:
        callee.kill()
        callee.wait()
    error = ""
    try:
        future.wait()
    except Exception as raised:  # noqa: BLE001 - whatever it is, is what is reported
        error = f"{type(raised).__name__}: {raised}"
    ended = time.monotonic()
    back, end = start_again(store, device, patience)
    return Rival(torch.__version__, timeout, ended - killed, ended - called >= timeout, error, back, end)


def start_again(store: str, device: str, patience: float) -> tuple[float | None, str]:
    """Starts the callee again, and calls it: seconds until it answered, None and why where it did not.

    Blocks the host, `patience` seconds at most.
    """
    began = time.monotonic()
    callee = start_callee(store, device)
    last = ""
    try:
        while callee.poll() is None and time.monotonic() - began < patience:
            try:
                if rpc.rpc_sync(CALLEE, answer, timeout=1.0) == callee.pid:
                    return time.monotonic() - began, ""
            except Exception as raised:  # noqa: BLE001 - the next try may do, and the last one's error is reported
                last = f"; a call to it: {type(raised).__name__}: {raised}"
            time.sleep(0.1)
        seconds = time.monotonic() - began
        code = callee.poll()
        ended = f"had not joined after {seconds:.0f} s" if code is None else f"ended with exit code {code}"
        return None, f"the one that was started in its place {ended}{last}"
    finally:
        callee.kill()
        callee.wait()


def main() -> int:
    """Rank 1 with `--callee STORE`, else the act.  Blocks the host until it is done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--callee", metavar="STORE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nbytes", type=int, default=1 << 20)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS)
    parser.add_argument("--patience", type=float, default=NO_WORKER_SECONDS)
    args = parser.parse_args()
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    end_with_parent()
    if args.callee:
        join(CALLEE, args.callee, args.device)
        threading.Event().wait(FOR_EVER)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = act(os.path.join(folder, "store"), args.device, args.nbytes, args.timeout, args.patience)
    print(json.dumps(asdict(found)), flush=True)
    return 0


if __name__ == "__main__":
    code = 1
    with contextlib.suppress(KeyboardInterrupt):
        code = main()
    sys.stderr.flush()
    os._exit(code)  # an RPC agent whose peer is dead does not shut down in order
