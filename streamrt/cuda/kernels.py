"""The kernels of the runtime and how they are launched.  They are loaded when a device is opened (`load`)."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from streamrt.cuda import ipc, memops
from streamrt.cuda.current import CUDARuntimeError, fail, made_current
from streamrt.errors import ExhaustedError, UnavailableError

# The latch is one thread that looks at a word in pinned memory; it gives up after `limit` nanoseconds, so that a latch
# whose process has forgotten it hangs no GPU.  A waiting kernel, unlike a waiting stream operation, does not hold up
# other streams that share its hardware queue.
SOURCE = r"""
extern "C" __global__ void streamrt_latch(const volatile int* word, int ticket, unsigned long long limit) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        if (*word - ticket >= 0) {
            __threadfence_system();
            return;
        }
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < limit);
}
"""

LATCH_SECONDS = 60
_LATCHES = 1024  # closed at one time in one process; a page of words, never given back

_lock = threading.Lock()
_module: Any = None
_words: np.ndarray[Any, np.dtype[np.int32]] | None = None
_address = 0
_memory: Any = None
_free: deque[int] = deque()


def load(index: int, stream: int) -> None:
    """Compiles the kernels once, loads them on the device and runs each on `stream`.  Blocks the host."""
    global _module, _words, _address, _memory
    with _lock:
        if _module is None:
            _memory = cupy.cuda.alloc_pinned_memory(4 * _LATCHES)
            _address = int(_memory.ptr)
            _words = np.frombuffer(_memory, np.int32, _LATCHES)
            _words[:] = 0
            _free.extend(range(_LATCHES))
            _module = cupy.RawModule(code=SOURCE, options=("--std=c++17",))
    _launch_latch(index, stream, 0, -1)


def _launch_latch(index: int, stream: int, slot: int, ticket: int) -> None:
    try:
        with made_current(index, stream):
            kernel = _module.get_function("streamrt_latch")
            kernel((1,), (1,), (np.uint64(_address + 4 * slot), np.int32(ticket), np.uint64(LATCH_SECONDS * 10**9)))
    except CUDARuntimeError as error:
        fail(error, "launching a latch")


class CudaLatch:
    """A closed latch; also opened when the handle is dropped, since nobody could open it any more."""

    __slots__ = ("_slot", "_ticket")

    def __init__(self, index: int, stream: int) -> None:
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise UnavailableError("under CUDA_LAUNCH_BLOCKING=1 a latch would block the host; unset it")
        self._slot: int | None = None
        words = _word_array()
        with ipc.giving_back:  # freeing would wait for the latch, and each further call of the driver for the freeing
            try:
                slot = _free.popleft()
            except IndexError:
                raise ExhaustedError(f"{_LATCHES} latches are closed; open some") from None
            self._ticket = (int(words[slot]) + 1) & 0x3FFFFFFF
            self._slot = slot
            _launch_latch(index, stream, slot, self._ticket)

    def open(self) -> None:
        """Lets the stream go on: one store, no call of the driver.  Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            _word_array()[slot] = self._ticket
            _free.append(slot)

    def __del__(self) -> None:
        if getattr(self, "_slot", None) is not None:
            self.open()


def latches_closed() -> bool:
    """Whether any latch of the process is closed.  Does not touch the device."""
    return _words is not None and len(_free) < _LATCHES


def _word_array() -> np.ndarray[Any, np.dtype[np.int32]]:
    if _words is None:
        raise UnavailableError("the kernels are not loaded; open the device first")
    return _words


def enable_peers(indices: list[int]) -> None:
    """Lets the opened devices read each other's memory directly, where the hardware can.  Does not block the host.

    By the driver's call, which leaves no error behind for another library's next launch to find.
    """
    driver = memops.driver()
    for here in indices:
        for there in indices:
            if here == there or not runtime.deviceCanAccessPeer(here, there):
                continue
            with memops.entered(here):
                code = int(driver.cuCtxEnablePeerAccess(memops.primary_context(there), 0)[0])
            if code not in (0, int(driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)):
                memops.check((code,), f"giving cuda:{here} access to cuda:{there}")
