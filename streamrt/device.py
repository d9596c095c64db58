"""Devices and the `Backend` Protocol: all that the runtime asks of a driver.

A backend is one folder (`host/`, `cuda/`) against this Protocol, and both pass the same tests.  Handles are plain
integers; addresses are of this process.  ``cpu`` is ordinary memory: it has no streams, and what is in it is ready.

Rules:

- "Enqueues" means: ordered after what is on that stream, and the host does not wait for it.
- A backend never makes another device current for the caller: what it changes, it restores.
- An event handle may be recorded many times; a wait binds the record that is newest when the wait is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, final

from streamrt import forks
from streamrt.errors import PlacementError, UnavailableError

if TYPE_CHECKING:
    from streamrt.captures import Captures, Recorder
    from streamrt.segment import Segment, Word

T = TypeVar("T")
StreamKey = tuple[Any, ...]


@dataclass(slots=True)
class Block:
    """A piece of memory that a backend gave: `address`, `nbytes`, and what keeps it alive.

    Dropping the last reference gives it back *at once*, as CuPy's pool does, with no regard to work in flight:
    `streamrt.memory` is what makes that safe.  `in_order`: it is used again on the stream that it was allocated on,
    behind what is there at the drop, and nowhere else; without it anybody may use it again at once.
    """

    address: int
    nbytes: int
    owner: Any = field(repr=False)
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """Memory that other processes can map: `handle` is all that they need.  Dropping `owner` gives it back."""

    address: int
    nbytes: int
    handle: bytes
    owner: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of the driver's that another process can map, whoever made it.

    `identity` names it for good: one at the same address later has another.
    """

    address: int
    nbytes: int
    identity: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device can do, found when it is opened: `name`, word widths that streams can wait on, self-test result."""

    name: str
    uuid: str
    total_bytes: int
    wait32: bool
    wait64: bool
    self_test: bool


class LatchHandle(Protocol):
    """A closed door on a stream; see `streamrt.testing.Latch`."""

    def open(self) -> None:
        """Lets the stream go on.  Does not block the host.  Idempotent."""


class Backend(Protocol):
    """What a driver does for the runtime.  `index` is the device's number, `stream` and `event` are its handles."""

    kind: str
    captures: Captures
    """The captures that the runtime began here.  What cannot be part of one raises `CaptureError` and leaves it be."""

    def device_count(self) -> int:
        """How many devices there are.  Does not touch the device."""

    def open(self, index: int) -> DeviceInfo:
        """Makes the device ready (context, kernels of the runtime, self-test).  Idempotent.  Blocks the host once."""

    def uuid(self, index: int) -> str:
        """What tells the device from every other one, the same in every process that sees it.  Opens nothing.

        Does not block the host.
        """

    def activate(self, index: int) -> AbstractContextManager[None]:
        """Makes the device current for the calling thread inside a ``with``.  Does not block the host."""

    @property
    def current_device(self) -> int:
        """The index of the calling thread's current device.  Does not touch the device."""

    def device_reader(self) -> Callable[[], int]:
        """A function that tells that quickly, on the thread that calls it.  Does not touch the device."""

    # streams

    def create_stream(self, index: int, priority: int) -> int:
        """A new non-blocking stream.  Does not block the host."""

    def destroy_stream(self, index: int, stream: int) -> None:
        """Destroys a stream that `create_stream` gave.  Does not block the host."""

    def streams(self, index: int) -> list[int]:
        """The device's streams that `create_stream` gave and that live.  Does not touch the device."""

    def stream_key(self, index: int, stream: int) -> StreamKey:
        """The stream's identity: equal keys are one stream (null, legacy and per-thread handles are normalised).

        Does not touch the device.
        """

    def current_stream(self, index: int) -> int:
        """The calling thread's current stream as the backend's own array library has it.  Does not touch the device."""

    def set_current_stream(self, index: int, stream: int, owner: object) -> None:
        """Makes the stream current for the calling thread; `owner` is kept alive while it is.

        Does not block the host.
        """

    def current_owner(self, index: int) -> object:
        """What keeps the thread's current stream alive: with it, `set_current_stream` restores exactly what was.

        Does not touch the device.
        """

    def agent_thread(self, index: int) -> None:
        """Called once by a thread of the runtime's own: makes the device current for good, and from then on the thread
        cannot disturb a graph capture elsewhere.  Does not block the host.
        """

    def quiet(self) -> AbstractContextManager[None]:
        """Inside a ``with``, what the calling thread asks the driver disturbs no graph capture elsewhere.  Each query
        sees to that by itself; this does it once for many.  Does not block the host.
        """

    def query_stream(self, index: int, stream: int) -> bool:
        """Whether all work is done.  Raises `DeviceError` for a failed one, `CaptureError` for one that captures.

        Does not block the host.
        """

    def synchronize_stream(self, index: int, stream: int, timeout: float | None) -> bool:
        """Blocks the host, interruptibly, until all work is done (True) or the timeout (False)."""

    def capturing(self, index: int, stream: int) -> bool:
        """Whether the stream is capturing a graph.  Does not block the host."""

    # graphs

    def recorder(self, index: int, stream: int) -> Recorder:
        """Who captures what is enqueued on the stream, as a graph of this backend's.  Does not touch the device."""

    def keeping(self, index: int, kept: list[object]) -> AbstractContextManager[None]:
        """Inside a ``with``, memory that the calling thread takes is kept by `kept`: what is given back may be used
        again inside only, in the order of its stream.  Does not block the host.
        """

    # events

    def create_event(self, index: int) -> int:
        """A new event, timing off.  Does not block the host."""

    def destroy_event(self, index: int, event: int) -> None:
        """Destroys an event.  Does not block the host."""

    def record_event(self, index: int, event: int, stream: int) -> None:
        """Enqueues on `stream` a record of the event."""

    def wait_event(self, index: int, stream: int, event: int) -> None:
        """Enqueues on `stream` a wait for the event's newest record (of any device); nothing if it has none."""

    def order(self, index: int, event: int, first: int, then: int) -> None:
        """Records an event on the stream `first` and makes the stream `then` wait for it.  Does not block the host."""

    def query_event(self, index: int, event: int) -> bool:
        """Whether the newest record is complete.  Raises `DeviceError` for a failed one.  Does not block the host."""

    def synchronize_event(self, index: int, event: int, timeout: float | None) -> bool:
        """Blocks the host, interruptibly, until the newest record is complete (True) or the timeout (False)."""

    # words

    def map_segment(self, index: int, segment: Segment) -> None:
        """Makes the segment's words usable by streams of the device.  Idempotent.  May block the host, briefly."""

    def unmap_segment(self, segment: Segment) -> None:
        """The opposite, for all devices.  May block the host, and every other call of this backend, while a stream
        waits: only when `idle`."""

    def idle(self) -> bool:
        """Whether no latch is closed, and all that was enqueued on streams made here has run, on each open device.
        What waits in a driver for that may be called then.  Does not block the host."""

    def write_word(self, index: int, stream: int, word: Word, value: int) -> None:
        """Enqueues on `stream` a store of `value`, after all earlier work of the stream is visible."""

    def wait_word(self, index: int, stream: int, word: Word, value: int) -> None:
        """Enqueues on `stream` a wait until the word has reached `value` (cyclic comparison)."""

    # memory

    def allocate(self, index: int, nbytes: int, stream: int) -> Block:
        """Device memory, at least 256-byte aligned (64 on the host), usable at once on `stream`; elsewhere after it.

        May block the host when the driver has to be asked for more.
        """

    def allocate_pinned(self, nbytes: int) -> Block:
        """Host memory that copies to and from every device without a bounce.  May block the host on first use."""

    def copy(self, index: int, stream: int, destination: int, source: int, nbytes: int) -> None:
        """Enqueues on `stream` a copy between any two addresses (device, peer device, pinned, plain).

        Plain, pageable memory makes a GPU's driver block the host until the stream comes there: stage instead.
        """

    def copy_many(self, index: int, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        """Enqueues on `stream` several copies, each (destination, source, bytes), with no order among them."""

    def upload(self, index: int, stream: int, destination: int, source: int, nbytes: int) -> None:
        """Enqueues on `stream` a copy of pinned memory to the device, by a copy engine where there is one, so that it
        takes no turn of what computes: for an even number of bytes, however few.  Does not block the host."""

    def zero(self, index: int, stream: int, address: int, nbytes: int) -> None:
        """Enqueues on `stream` that memory of the device becomes zero.  Does not block the host."""

    def export_memory(self, index: int, nbytes: int) -> ExportedMemory:
        """Memory of the device that another process of this host can map.  Whoever has it keeps it until no process
        maps it any more.  May block the host in the driver, as any allocation.

        Raises `ExhaustedError` where there is no room, `UnavailableError` where the system cannot export.
        """

    def allocation(self, index: int, address: int) -> Allocation | None:
        """The allocation in which an address of the device lies; None where no other process can map it.

        Does not block the host.
        """

    def export_allocation(self, index: int, allocation: Allocation) -> bytes:
        """The handle by which another process maps an allocation.  Who made it must keep it while one does.

        Does not block the host.  Raises `UnavailableError`.
        """

    def import_memory(self, index: int, handle: bytes, nbytes: int, unmapped: Callable[[], None]) -> Block:
        """Maps what another process exported, `nbytes` of it, for streams of the device, whose memory it then is.  Once
        the block is dropped it is unmapped, on a thread that may wait, and then `unmapped` is called.  May block the
        host in the driver.

        Raises `UnavailableError` where it cannot be mapped; then `unmapped` is not called.
        """

    def device_of(self, address: int) -> int | None:
        """The index of the device whose memory this is, None for any other.  Does not block the host."""

    # work

    def launch(
        self,
        index: int,
        stream: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        reads: Sequence[Any],
        writes: Sequence[Any],
    ) -> None:
        """Enqueues on `stream` whatever `function` does, run with the stream current (host: later, in the queue)."""

    def latch(self, index: int, stream: int) -> LatchHandle:
        """Enqueues on `stream` a door that stays closed until the handle's `open`."""

    def require(self, index: int, event: int) -> None:
        """Plain code is about to read memory that is ready at the event: a host backend runs what that takes.

        A device backend does nothing: there the reader's stream is what waits.  Blocks the host on a host backend only.
        """


@final
@functools.total_ordering
class Device:
    """A device by kind and index: ``cuda:0``, ``host:1``, or ``cpu`` (ordinary memory, no streams).

    There is one object for each device, so devices are compared by identity: they are keys on every hot path.
    """

    kind: str
    index: int
    has_streams: bool
    """False only for ``cpu``."""
    backend: Backend
    """What drives it.  Raises `UnavailableError` where that cannot work here."""

    def __new__(cls, kind: str, index: int = 0) -> Device:
        known = _lasting.get((kind, index))
        if known is not None:
            return known
        with _naming:
            known = _named.get((kind, index))
            if known is None:
                known = _named[kind, index] = super().__new__(cls)
                known.__dict__.update(kind=kind, index=index, has_streams=kind != "cpu")
        return known

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{self!r} cannot be changed")

    def __reduce__(self) -> tuple[type[Device], tuple[str, int]]:
        return (Device, (self.kind, self.index))

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return (self.kind, self.index) < (other.kind, other.index)

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def __repr__(self) -> str:
        return f"<Device {self}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Finds `backend` when it is first asked for, since that imports it; there it stays."""
            if name != "backend":
                raise AttributeError(f"a device has no attribute {name!r}")
            found = self.__dict__["backend"] = backend_of(self.kind)
            return found


_lock = threading.RLock()  # held while a backend is imported and a device opened
_naming = threading.RLock()
forks.renew(sys.modules[__name__], _lock=threading.RLock, _naming=threading.RLock)
_named: weakref.WeakValueDictionary[tuple[str, int], Device] = weakref.WeakValueDictionary()  # peers name them too
_lasting: dict[tuple[str, int], Device] = {}  # of these, `cpu` and the opened ones
CPU = _lasting["cpu", 0] = Device("cpu", 0)
_NAME = re.compile(r"(cpu)(?::0)?|(host|cuda)(?::(\d{1,9}))?")
_backends: dict[str, Backend] = {}
_opened: dict[Device, DeviceInfo] = {}
_opened_kinds: tuple[str, ...] = ()


def parse_device(spec: str | int | Device | Any, *, default_kind: str | None = None) -> Device:
    """Turns ``"cuda:0"``, ``"host"``, ``"cpu"``, an index, a `Device` or any object whose ``str`` is such a name into a
    `Device`.  An index means the default kind (CUDA where there is a GPU).  Does not touch the device.

    Raises `PlacementError` naming the accepted forms.
    """
    if isinstance(spec, Device):
        return spec
    if isinstance(spec, bool) or spec is None:
        raise PlacementError(f"{spec!r} is no device; use 'cuda:0', 'host:0', 'cpu' or an index")
    if isinstance(spec, int):
        if spec < 0:
            raise PlacementError(f"device index {spec} is negative; use 0 or above")
        return Device(default_kind or default_device_kind(), spec)
    return _named_device(str(spec))


@functools.lru_cache(maxsize=256)  # bounded, for names come from peers too
def _named_device(name: str) -> Device:
    match = _NAME.fullmatch(name)
    if match is None:
        raise PlacementError(f"{name!r} is no device; use 'cuda:0', 'host:0', 'cpu' or an index")
    if match[1]:
        return CPU
    return Device(match[2], int(match[3] or 0))


def listed_devices(devices: Iterable[T]) -> list[T]:
    """The devices that ``devices=`` names, which is a list.  Does not touch the device.

    Raises `PlacementError` for one device, by its name above all, whose letters would be taken for devices.
    """
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise PlacementError(f"devices={devices!r} is no list of devices; write devices=[{str(devices)!r}]")
    return list(devices)


def backend_of(kind: str) -> Backend:
    """The backend of a kind, imported at first use.  Raises `UnavailableError` where it cannot work here."""
    backend = _backends.get(kind)
    if backend is not None:
        return backend
    if kind not in ("host", "cuda"):
        raise PlacementError(f"there is no backend {kind!r}; use 'host' or 'cuda'")
    with _lock:
        if kind not in _backends:
            module = importlib.import_module(f"streamrt.{kind}")
            _backends[kind] = module.create_backend()
        return _backends[kind]


_NOTHING = contextlib.nullcontext()


def quiet() -> AbstractContextManager[None]:
    """`Backend.quiet` of the GPUs' backend, if this process has one.  Does not block the host."""
    backend = _backends.get("cuda")
    return _NOTHING if backend is None else backend.quiet()


@functools.cache
def _driver_present() -> bool:
    """Whether there is a CUDA driver at all: asked before CuPy is imported, which takes longer than all of ours."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cuda_available() -> bool:
    """Whether CUDA devices can be used here: a driver, CuPy and at least one visible GPU.  Does not block the host."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1") or not _driver_present():
        return False
    try:
        return backend_of("cuda").device_count() > 0
    except UnavailableError:
        return False


def default_device_kind() -> str:
    """``"cuda"`` where a GPU can be used, else ``"host"``; ``STREAMRT_DEVICE`` overrides it.

    Does not block the host.  Raises `PlacementError` for another value of that.
    """
    chosen = os.environ.get("STREAMRT_DEVICE", "")
    if chosen in ("host", "cuda"):
        return chosen
    if chosen:
        raise PlacementError(
            f"STREAMRT_DEVICE={chosen!r} is no kind of device; set it to host or cuda, or leave it out"
        )
    return "cuda" if cuda_available() else "host"


def open_device(spec: str | int | Device = "auto") -> Device:
    """Opens a device: context, the runtime's kernels, the self-test.  Idempotent.  Blocks the host at the first call.

    ``"auto"`` is ``cuda:0`` where there is a GPU, else ``host:0``.  Raises `PlacementError` for an index that does not
    exist, `UnavailableError` where the backend cannot work.
    """
    global _opened_kinds
    if isinstance(spec, Device):
        device = spec
    else:
        device = Device(default_device_kind(), 0) if spec == "auto" else parse_device(spec)
    if device in _opened or not device.has_streams:
        return device
    with _lock:
        count = device.backend.device_count()
        if device.index >= count:
            more = "; STREAMRT_HOST_DEVICES sets another number" if device.kind == "host" else ""
            raise PlacementError(f"there is no {device}: {count} {device.kind} device(s) are visible here{more}")
        _opened[device] = device.backend.open(device.index)
        _lasting[device.kind, device.index] = device
        if device.kind not in _opened_kinds:
            _opened_kinds = (*_opened_kinds, device.kind)
    return device


def device_info(device: Device) -> DeviceInfo:
    """What an opened device can do (opens it if need be).  Blocks the host at the first call."""
    open_device(device)
    return _opened[device]


def opened_devices() -> tuple[Device, ...]:
    """The devices that this process has opened, in that order.  Does not touch the device."""
    return tuple(_opened)


def current_devices() -> tuple[Device, ...]:
    """The calling thread's current device of each kind, where it is one that was opened.  Does not touch the device."""
    found = []
    for kind in _opened_kinds:
        device = _lasting.get((kind, _backends[kind].current_device))
        if device is not None:
            found.append(device)
    return tuple(found)
