"""UCXX's low-level worker as a side: this process and a child send each other tag messages, both polling all the time.

No protocol, no functions, no threads: memory that lies ready, received into memory that lies ready.  So only the jobs
echo and pipelined mean something, and the callee's `echo` and `add_up` are all that there is.  Endpoints have error
handling, as streamrt's, since without it a peer's death may end or hang this process.  On few cores a poller that has
nothing to do gives its core away, or it would keep the other half from running.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.report import HERE, versions
from bench.side import serve
from bench.workload import MIB, STRIDE

MOST_BYTES = 256 * MIB
RING = 8  # messages in flight one way
FEW_CORES = len(os.sched_getaffinity(0)) < 4
COMMAND, THERE, BACK = 1, 2, 3
ECHO, ADD_UP, TOTAL, END = range(4)


class Half:
    """One of the two processes: its worker, its endpoint, and memory to receive into."""

    def __init__(self, kind: str, device: int) -> None:
        for name, value in (("NET_DEVICES", "lo"), ("MM_ERROR_HANDLING", "y"), ("WARN_UNUSED_ENV_VARS", "n")):
            os.environ.setdefault(f"UCX_{name}", value)
        self.library: Any = np
        if kind == "cuda":
            import cupy

            cupy.cuda.Device(device).use()
            self.library = cupy
        self.kind = kind
        self.received = self.library.zeros(MOST_BYTES // 4, dtype=np.int32)
        self.synchronize()
        import ucxx._lib.libucxx as ucx
        from ucxx._lib.arr import Array

        self.ucx, self.wrap = ucx, Array
        self.worker = ucx.UCXWorker(ucx.UCXContext(feature_flags=(ucx.Feature.TAG,)))
        self.endpoint: Any = None

    def connect(self, address: bytes) -> None:
        """Makes the endpoint to the other half."""
        there = self.ucx.UCXAddress.create_from_buffer(address)
        create = self.ucx.UCXEndpoint.create_from_worker_address
        self.endpoint = create(self.worker, there, endpoint_error_handling=True)

    def synchronize(self) -> None:
        """Waits for the current stream; nothing on the host."""
        if self.kind == "cuda":
            self.library.cuda.get_current_stream().synchronize()

    def send(self, array: Any, tag: int) -> Any:
        """Begins to send."""
        return self.endpoint.tag_send(self.wrap(array), self.ucx.UCXXTag(tag))

    def receive(self, array: Any, tag: int) -> Any:
        """Begins to receive."""
        return self.worker.tag_recv(self.wrap(array), self.ucx.UCXXTag(tag), self.ucx.UCXXTagMaskFull)

    def wait(self, request: Any) -> None:
        """Polls until a request is over."""
        while not request.completed:
            if not self.worker.progress_once() and FEW_CORES:
                os.sched_yield()
        request.check_error()


class UcxxSide:
    """The caller's half, with the face of a library that calls functions."""

    def __init__(self, kind: str, source: int, target: int, half: Half) -> None:
        self.kind, self.source, self.target, self.half = kind, source, target, half
        self.library = half.library
        self.flying: deque[Any] = deque()

    def version(self) -> str:
        """ucxx's version and the devices."""
        where = "host" if self.kind == "host" else f"cuda:{self.source} -> cuda:{self.target}"
        return f"ucxx {versions().get('ucxx-cu13', '?')}, low level, polled, {where}"

    def array(self, words: int, memory: str = "") -> Any:
        """An array with its index as contents."""
        return self.library.arange(words, dtype=np.int32)

    host_array = array

    def stamp(self, array: Any, number: int) -> Any:
        """Fills every STRIDE-th word."""
        array[::STRIDE] = number
        return array

    def numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        return np.array(array if isinstance(array, np.ndarray) else array.get())

    def synchronize(self) -> None:
        """Waits for the current stream; nothing on the host."""
        self.half.synchronize()

    def _command(self, what: int, words: int, slot: int = 0) -> None:
        self.half.wait(self.half.send(np.array([what, words, slot], dtype=np.int64), COMMAND))

    def call(self, name: str, *args: Any) -> Any:
        """`echo` there and back, or the `total` of what was added up."""
        half = self.half
        if name == "total":
            self._command(TOTAL, 0, args[0])
            answer = np.zeros(1, dtype=np.int64)
            half.wait(half.receive(answer, BACK))
            return int(answer[0])
        back = half.received[: args[0].size]
        reply = half.receive(back, BACK)
        self._command(ECHO, args[0].size)
        half.wait(half.send(args[0], THERE))
        half.wait(reply)
        return back

    def submit(self, name: str, *args: Any, lent: bool = False) -> Any:
        """Begins to send an array that is to be added up; nothing is ever copied, so `lent` changes nothing."""
        self._command(ADD_UP, args[0].size, args[1])
        return self.half.send(args[0], THERE)

    def result(self, future: Any) -> Any:
        """Until it has been received."""
        self.half.wait(future)

    def free(self, future: Any) -> None:
        """Nothing is lent for longer than `result` waits."""

    def copy_ceiling(self, nbytes: int, count: int) -> float:
        """Not measured here."""
        raise NotImplementedError("peer copies are measured by other sides")


def callee(kind: str, device: int) -> None:
    """The other half: does what it is told until it is told to end."""
    from bench.peers.streamrt_callee import add_up, total

    half = Half(kind, device)
    sys.stdout.write(bytes(half.worker.address).hex() + "\n")
    sys.stdout.flush()
    half.connect(bytes.fromhex(sys.stdin.readline()))
    ring = [half.received] + [half.library.empty_like(half.received) for _ in range(RING - 1)]
    turn = 0
    command = np.zeros(3, dtype=np.int64)
    while True:
        half.wait(half.receive(command, COMMAND))
        what, words, slot = map(int, command)
        if what == END:
            return
        if what == TOTAL:
            half.wait(half.send(np.array([total(slot)], dtype=np.int64), BACK))
            continue
        turn = (turn + 1) % RING
        here = ring[turn][:words]
        half.wait(half.receive(here, THERE))
        if what == ECHO:
            half.wait(half.send(here, BACK))
        else:
            add_up(here, slot)


@contextmanager
def pair(kind: str, source: int, target: int) -> Iterator[UcxxSide]:
    """One callee, ended with this process."""
    half = Half(kind, source)
    command = [sys.executable, "-m", __spec__.name, "--device", kind, "--pair", f"{source},{target}", "--callee"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parent), *sys.path]))
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        half.connect(bytes.fromhex(child.stdout.readline()))
        child.stdin.write(bytes(half.worker.address).hex() + "\n")
        child.stdin.flush()
        side = UcxxSide(kind, source, target, half)
        yield side
        side._command(END, 0)
        child.wait(timeout=20)
    finally:
        child.kill()
        child.wait()


def main() -> int:
    """The side, or its callee."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--pair", default="0,0")
    parser.add_argument("--callee", action="store_true")
    args = parser.parse_args()
    source, target = map(int, args.pair.split(","))
    if args.callee:
        callee(args.device, target)
        return 0
    return serve(lambda: pair(args.device, source, target))


if __name__ == "__main__":
    sys.exit(main())
