"""Matrix products on a GPU, alone and while 256 MiB arrays flow from it to a worker: what the transfers cost them.

The products run on a stream of this process, as a user's would; another thread calls the worker with a snapshot of each
array, `window` calls in flight.  The callee sums stamped words of each array, and the sums are checked at the end.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from bench.peers import streamrt_rpc
from bench.side import serve
from bench.workload import MIB, STRIDE, Figures, Job
from streamrt import memory

SIZE = 8192
BATCH = 20  # products between two looks at the clock
NBYTES = 256 * MIB
SLOTS = 4096
STAMP = 7


class Flow:
    """Arrays to the worker, one after the other, while it is entered; `sent` counts those that have been taken."""

    def __init__(self, side: streamrt_rpc.StreamrtSide, window: int) -> None:
        self.side, self.window = side, window
        self.sent = 0
        self.begun = threading.Event()
        self._over = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flow")

    def __enter__(self) -> Self:
        self._thread.start()
        self.begun.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        samples = -(-NBYTES // 4 // STRIDE)
        total, wanted = self.side.call("total", SLOTS), min(self.sent, SLOTS) * samples * STAMP
        if total != wanted:
            raise ValueError(f"the callee's sum is {total}, not {wanted}: bytes were stale or missing")

    def _run(self) -> None:
        side, cupy = self.side, self.side.library
        try:
            with cupy.cuda.Device(side.source), cupy.cuda.Stream(non_blocking=True):
                arrays = [side.stamp(side.array(NBYTES // 4), STAMP) for _ in range(self.window)]
                flying: deque[Any] = deque()
                while not self._over.is_set():
                    if len(flying) == self.window:
                        side.result(flying.popleft())
                        self.sent += 1
                        if self.sent > 2 * self.window:
                            self.begun.set()  # pools are full, and mappings made
                    number = self.sent + len(flying)
                    flying.append(side.submit("add_up", arrays[number % self.window], number % SLOTS))
                while flying:
                    side.result(flying.popleft())
                    self.sent += 1
        except BaseException as error:  # it is raised where the flow is left
            self._failed = error
        finally:
            self.begun.set()


def products(side: streamrt_rpc.StreamrtSide, seconds: float) -> float:
    """Operations a second of half-precision products, over so many seconds."""
    cupy = side.library
    with cupy.cuda.Device(side.source), cupy.cuda.Stream(non_blocking=True) as stream:
        one, two, three = (cupy.ones((SIZE, SIZE), dtype=cupy.float16) for _ in range(3))
        for _ in range(BATCH):
            cupy.matmul(one, two, out=three)
        stream.synchronize()
        begin, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            for _ in range(BATCH):
                cupy.matmul(one, two, out=three)
            stream.synchronize()
            count += BATCH
        if not bool((three == three[0, 0]).all()) or float(three[0, 0]) <= 0:
            raise ValueError("a product of ones has different numbers in it")
    return 2 * SIZE**3 * count / elapsed


def measured(side: streamrt_rpc.StreamrtSide, job: Job) -> Figures:
    """`products`, `beside` or `flow`, over `count` milliseconds: operations a second as `rate`, bytes as `p50`."""
    seconds = job.count / 1e3
    if job.kind == "products":
        return Figures(rate=products(side, seconds))
    with Flow(side, job.window) as flow:
        begin, before = time.perf_counter(), flow.sent
        rate = 0.0
        if job.kind == "beside":
            rate = products(side, seconds)
        else:
            time.sleep(seconds)
        moved = (flow.sent - before) * NBYTES / (time.perf_counter() - begin)
    return Figures(p50=moved, rate=rate, checksum=flow.sent)


@contextmanager
def pair(source: int, target: int) -> Iterator[streamrt_rpc.StreamrtSide]:
    """This process and a worker."""
    memory.set_snapshot_limit(4 << 30)
    with streamrt_rpc.pair("cuda", source, target) as side:
        yield side


def main() -> int:
    """The side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", default="0,0")
    args = parser.parse_args()
    source, target = map(int, args.pair.split(","))
    return serve(lambda: pair(source, target), measured)


if __name__ == "__main__":
    sys.exit(main())
