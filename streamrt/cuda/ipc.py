"""Device memory that another process of this host maps: CUDA IPC, by the driver's calls.

An exported allocation is our own (``cuMemAlloc``), so that it can be exported whatever allocator the arrays come from,
and so that a peer maps nothing but what it was given.  Its handle is 64 bytes that may travel over any link.

Rules:

- Freeing and unmapping wait in the driver for the device's work, and block other calls of the process meanwhile.  So
  they are done by one thread of this module, never by whoever drops the last reference (finalisers only put into its
  queue), and while the runtime's own streams have nothing to do, for which that thread waits a minute at most.
- Memory must not be freed while a peer has it mapped.  Whoever exports it keeps the owner until the peer says so.
- Everything runs in relaxed capture mode: a capture elsewhere is not disturbed.

Source: CUDA driver API, "Memory Management", cuIpcGetMemHandle and cuIpcOpenMemHandle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from streamrt.cuda import memops
from streamrt.cuda.current import exchange_capture_mode
from streamrt.device import Allocation, Block, ExportedMemory
from streamrt.errors import DeviceError, ExhaustedError, UnavailableError

HANDLE_BYTES = 64
IDLE_SECONDS = 60.0
IDLE_POLL_SECONDS = 0.005
_OUT_OF_MEMORY = 2

Idle = Callable[[], bool]
_work: SimpleQueue[tuple[Idle, Callable[[], None]]] = SimpleQueue()
_worker: threading.Thread | None = None
_lock = threading.Lock()
giving_back = threading.Lock()
"""Held while memory is freed or unmapped: who takes it knows that this does not go on, nor begin meanwhile."""


@contextmanager
def _entered(index: int) -> Iterator[Any]:
    with memops.entered(index) as driver:
        before = exchange_capture_mode("RELAXED")
        try:
            yield driver
        finally:
            if before is not None:
                driver.cuThreadExchangeStreamCaptureMode(before)


class _Owner:
    """Gives memory back, on the thread of this module, when it is dropped and the device is `idle`."""

    __slots__ = ("_give_back", "_idle")

    def __init__(self, idle: Idle, give_back: Callable[[], None]) -> None:
        self._idle = idle
        self._give_back = give_back

    def __del__(self, put: Callable[[tuple[Idle, Callable[[], None]]], None] = _work.put) -> None:
        put((self._idle, self._give_back))


def export(index: int, nbytes: int, idle: Idle) -> ExportedMemory:
    """Memory of a device for other processes to map; see `Backend.export_memory`."""
    _start()
    with _entered(index) as driver:
        code, address = driver.cuMemAlloc(nbytes)
        if int(code) == _OUT_OF_MEMORY:
            raise ExhaustedError(f"cuda:{index} has no {nbytes} bytes left to share with another process")
        memops.check((code,), f"allocating {nbytes} bytes to export")
        owner = _Owner(idle, lambda: _free(index, int(address)))
        handle = _handle_of(driver, index, address)
    return ExportedMemory(int(address), nbytes, handle, owner)


def allocation(address: int) -> Allocation | None:
    """The allocation around an address, if legacy IPC can export it; see `Backend.allocation`."""
    driver = memops.driver()
    names = driver.CUpointer_attribute
    code, values = driver.cuPointerGetAttributes(
        4,
        [
            names.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            names.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            names.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            names.CU_POINTER_ATTRIBUTE_BUFFER_ID,
        ],
        address,
    )
    if int(code) or not values[0]:
        return None
    return Allocation(int(values[1]), int(values[2]), int(values[3]))


def export_allocation(index: int, found: Allocation) -> bytes:
    """The handle of somebody's allocation; see `Backend.export_allocation`."""
    with _entered(index) as driver:
        return _handle_of(driver, index, found.address)


def _handle_of(driver: Any, index: int, address: Any) -> bytes:
    code, handle = driver.cuIpcGetMemHandle(address)
    if int(code):
        raise UnavailableError(f"memory of cuda:{index} cannot be exported here: {memops.name_of(int(code))}")
    return bytes(handle.reserved)


def import_(index: int, handle: bytes, nbytes: int, unmapped: Callable[[], None], idle: Idle) -> Block:
    """What another process exported, readable by a device's streams; see `Backend.import_memory`."""
    if len(handle) != HANDLE_BYTES:
        raise UnavailableError(f"a handle of {len(handle)} bytes is none of CUDA's, which have {HANDLE_BYTES}")
    _start()
    with _entered(index) as driver:
        raw = driver.CUipcMemHandle()
        raw.reserved = handle
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        code, address = driver.cuIpcOpenMemHandle(raw, flags)
        if int(code):
            raise UnavailableError(f"cuda:{index} cannot map the peer's memory: {memops.name_of(int(code))}")
        code, base, size = driver.cuMemGetAddressRange(address)
        if int(code) or int(base) != int(address) or size < nbytes:
            driver.cuIpcCloseMemHandle(address)
            raise UnavailableError(f"the peer exported {size} bytes as {nbytes}")
    return Block(int(address), nbytes, _Owner(idle, lambda: _unmap(index, int(address), unmapped)))


def _free(index: int, address: int) -> None:
    with _entered(index) as driver:
        driver.cuMemFree(address)


def _unmap(index: int, address: int, unmapped: Callable[[], None]) -> None:
    with _entered(index) as driver:
        driver.cuIpcCloseMemHandle(address)
    unmapped()


def _start() -> None:
    global _worker
    with _lock:
        if _worker is None:
            _worker = threading.Thread(target=_run, args=(_work,), name="streamrt-ipc", daemon=True)
            _worker.start()


def _run(work: SimpleQueue[tuple[Idle, Callable[[], None]]]) -> None:
    while True:
        idle, give_back = work.get()
        deadline = time.monotonic() + IDLE_SECONDS
        try:
            while not _try(idle, give_back, time.monotonic() >= deadline):
                time.sleep(IDLE_POLL_SECONDS)
        except DeviceError:
            continue  # a failed device gives nothing back; the end of the process does
        finally:
            del idle, give_back


def _try(idle: Idle, give_back: Callable[[], None], late: bool) -> bool:
    """Gives back if the device is idle, or it is too late to wait for that; whether it did."""
    with giving_back:
        if not (late or idle()):
            return False
        give_back()
        return True
