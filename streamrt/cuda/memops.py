"""Stream memory operations: a stream writes a word in host memory, a stream waits for one.

Raw integer handles only, through ``cuda.bindings.driver`` (imported at first use).  Calls that need a context enter the
device's primary context, which CuPy, torch and JAX use too, and restore what was current.

Invariants:

- A write is a system-scope release: it becomes visible after all earlier work of its stream (no
  ``NO_MEMORY_BARRIER``).  A wait compares cyclically, so that words may wrap.
- Everything here returns at once except `unregister`: the driver holds it back while any stream of the process still
  waits.  So a segment stays registered as long as its connection, and the self-test's for the life of the process.

Source: CUDA driver API, "Stream Memory Operations" and "Unified Addressing" (cuMemHostRegister).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamrt.errors import DeviceError, LifetimeError, UnavailableError
from streamrt.segment import Segment, Word

if TYPE_CHECKING:
    Driver = Any

_lock = threading.Lock()
_driver: Driver | None = None
_contexts: dict[int, Any] = {}
_supports: dict[int, MemopSupport] = {}
_registered: dict[int, tuple[Segment, dict[int, int]]] = {}
_self_test_segments: list[Segment] = []

_GEQ = 0
_NON_BLOCKING = 1
_SELF_TEST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class MemopSupport:
    """What a device's streams can do with words: widths to wait on, and whether host addresses work unchanged."""

    wait32: bool
    wait64: bool
    host_pointer: bool


def driver() -> Driver:
    """The bindings of the CUDA driver.  Does not touch the device.  Raises `UnavailableError` naming the remedy."""
    global _driver
    if _driver is None:
        try:
            from cuda.bindings import driver as bindings
        except ImportError:
            raise UnavailableError(
                "ordering between processes needs cuda-bindings; install streamrt[cuda12] or streamrt[cuda13], or use "
                "'host:0'"
            ) from None
        code = int(bindings.cuInit(0)[0])
        if code:
            raise UnavailableError(
                f"the CUDA driver does not start ({_name(bindings, code)}); is there a GPU? If not, use 'host:0'"
            )
        _driver = bindings
    return _driver


def _name(bindings: Driver, code: int) -> str:
    error, name = bindings.cuGetErrorName(bindings.CUresult(code))
    return name.decode() if int(error) == 0 and name else f"CUresult {code}"


def name_of(code: int) -> str:
    """The driver's name of an error.  Does not touch the device."""
    return _name(driver(), code)


def check(result: Any, doing: str) -> Any:
    """The value of a driver call's result tuple.  Raises `DeviceError` with the driver's code and name."""
    code = int(result[0])
    if code:
        name = _name(driver(), code)
        raise DeviceError(f"{doing} failed: {name}", code=code, name=name)
    return result[1] if len(result) == 2 else result[1:]


def primary_context(device_index: int) -> Any:
    with _lock:
        context = _contexts.get(device_index)
        if context is None:
            d = driver()
            device = check(d.cuDeviceGet(device_index), f"opening cuda:{device_index}")
            context = check(d.cuDevicePrimaryCtxRetain(device), f"entering the context of cuda:{device_index}")
            _contexts[device_index] = context  # retained once, for the life of the process
    return context


@contextmanager
def entered(device_index: int) -> Iterator[Driver]:
    """The device's primary context current inside a ``with``, whatever was before.  Does not block the host."""
    d = driver()
    check(d.cuCtxPushCurrent(primary_context(device_index)), f"entering cuda:{device_index}")
    try:
        yield d
    finally:
        check(d.cuCtxPopCurrent(), f"leaving cuda:{device_index}")


def support(device_index: int) -> MemopSupport:
    """What the driver says the device can do (the self-test says whether it does).  Does not block the host."""
    known = _supports.get(device_index)
    if known is not None:
        return known
    d = driver()
    device = check(d.cuDeviceGet(device_index), f"opening cuda:{device_index}")

    def has(*names: str) -> bool:
        for name in names:
            attribute = getattr(d.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name, None)
            if attribute is not None:
                code, value = d.cuDeviceGetAttribute(attribute, device)
                if int(code) == 0 and value:
                    return True
        return False

    # From CUDA 12 on, 32-bit operations are there on every device; before, the unsuffixed attribute told.
    version = int(check(d.cuDriverGetVersion(), "asking for the driver's version"))
    wait32 = version >= 12000 or has("CAN_USE_STREAM_MEM_OPS", "CAN_USE_STREAM_MEM_OPS_V1")
    found = MemopSupport(
        wait32=wait32,
        wait64=wait32 and has("CAN_USE_64_BIT_STREAM_MEM_OPS", "CAN_USE_64_BIT_STREAM_MEM_OPS_V1"),
        host_pointer=has("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"),
    )
    _supports[device_index] = found
    return found


def register(segment: Segment, device_index: int) -> int:
    """Makes a segment usable by streams of a device and returns the device address of its first byte.

    Pins it once per process, for all devices; later calls look up.  Does not block the host.  Raises `DeviceError`.
    """
    with _lock:
        known = _registered.get(id(segment))
        if known is not None and device_index in known[1]:
            return known[1][device_index]
    with entered(device_index) as d, _lock:
        if id(segment) not in _registered:
            if segment.closed:
                raise LifetimeError("the segment is closed; register it before")
            flags = d.CU_MEMHOSTREGISTER_PORTABLE | d.CU_MEMHOSTREGISTER_DEVICEMAP
            check(d.cuMemHostRegister(segment.address, segment.nbytes, flags), "registering a segment")
            _registered[id(segment)] = (segment, {})
        addresses = _registered[id(segment)][1]
        if device_index not in addresses:
            addresses[device_index] = int(
                check(d.cuMemHostGetDevicePointer(segment.address, 0), f"mapping a segment into cuda:{device_index}")
            )
        return addresses[device_index]


def unregister(segment: Segment) -> None:
    """Unpins a segment; nothing if it is not registered.  Blocks the host while any stream of the process waits.

    Comes before `Segment.close`.  Raises `DeviceError`.
    """
    with _lock:
        known = _registered.pop(id(segment), None)
    if known is not None:
        with entered(next(iter(known[1]))) as d:
            check(d.cuMemHostUnregister(segment.address), "unregistering a segment")


def write_word(stream_handle: int, device_address: int, value: int, bits: int) -> None:
    """Enqueues on the stream a store of `value`, visible after all earlier work of it.  Raises `DeviceError`."""
    d = driver()
    write = d.cuStreamWriteValue32 if bits == 32 else d.cuStreamWriteValue64
    result = write(stream_handle, device_address, value, 0)
    if int(result[0]):
        check(result, "writing a word from a stream")


def wait_word(stream_handle: int, device_address: int, value: int, bits: int) -> None:
    """Enqueues on the stream a wait until the word has come to `value`, cyclically.  Raises `DeviceError`.

    Only after the signal was enqueued, or a host that owes it cannot be blocked by this process.
    """
    d = driver()
    wait = d.cuStreamWaitValue32 if bits == 32 else d.cuStreamWaitValue64
    result = wait(stream_handle, device_address, value, _GEQ)
    if int(result[0]):
        check(result, "waiting for a word on a stream")


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
    return True


def self_test(device_index: int) -> bool:
    """Whether writes and waits order two streams of the device, and data comes before its word, in each width it has.

    One stream waits for a word (started just below half the range) and then copies what the other stream has set.  It
    must not run before the word is there, and must see the data after.  Blocks the host, 5 s at most, once: its segment
    and memory are kept, since giving them back would block while any stream waits.  Raises `DeviceError` where the
    driver refuses.
    """
    can = support(device_index)
    if not can.wait32:
        return False
    segment = Segment.create(4096, "streamrt-self-test")
    _self_test_segments.append(segment)
    base = register(segment, device_index)
    with entered(device_index) as d:
        streams = [check(d.cuStreamCreate(_NON_BLOCKING), "making a stream") for _ in range(2)]
        size = 1 << 16
        memory = check(d.cuMemAlloc(4 * size), "allocating 256 KiB")
        try:
            return all(
                _ordered(d, segment, base, streams, int(memory), size, bits)
                for bits in ((32, 64) if can.wait64 else (32,))
            )
        finally:
            for stream in streams:
                check(d.cuStreamDestroy(stream), "destroying a stream")


def _ordered(d: Driver, segment: Segment, base: int, streams: list[Any], memory: int, size: int, bits: int) -> bool:
    gate, started, done, idle = (Word(segment, 64 * k + (0 if bits == 32 else 512), bits) for k in range(4))
    landing = 2048 + (0 if bits == 32 else 64)
    start = (1 << (bits - 1)) - 1
    gate.store(start)
    producer, consumer = (int(stream) for stream in streams)
    pattern = 0x5EED0000 + bits
    try:
        write_word(consumer, base + started.offset, 1, bits)
        wait_word(consumer, base + gate.offset, start + 1, bits)
        last = memory + 4 * (size - 1)
        check(d.cuMemcpyDtoHAsync(segment.address + landing, last, 4, consumer), "copying")
        write_word(consumer, base + done.offset, 1, bits)
        write_word(producer, base + idle.offset, 1, bits)
        if not _until(lambda: started.load() == 1 and idle.load() == 1, _SELF_TEST_SECONDS):
            return False
        check(d.cuMemsetD32Async(memory, pattern, size, producer), "setting memory")
        waited = done.load() == 0  # both streams ran, and the copy behind the wait did not
        write_word(producer, base + gate.offset, start + 1, bits)
        if not _until(lambda: done.load() == 1, _SELF_TEST_SECONDS):
            return False
        return waited and segment._words32[landing // 4] == pattern
    finally:
        gate.store(start + 1)  # in no case is a stream left waiting
