"""Array libraries behind one Protocol, one file each.

A library is *loaded* when its module is in `sys.modules`: the runtime never imports one by itself, and never chooses a
result's kind by what happens to be installed.  The current stream has one source of truth, the library that the array
belongs to; NumPy and JAX have none, and numba's is the default stream, which cannot be moved, only fenced.

On the host backend nobody but the backend knows of streams: there every library's current stream is the backend's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from streamrt.errors import ArrayError, UnavailableError

if TYPE_CHECKING:
    import numpy as np

    from streamrt.captures import Recorder
    from streamrt.device import Device
    from streamrt.stream import Stream


class ArrayInfo(NamedTuple):
    """What the runtime knows of an array.

    `dtype` is the canonical name (``"float32"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ``"bool"``, ``"complex64"``);
    `strides` are in bytes, None for C-contiguous; `address` is of the first element (0 where there is none);
    `nbytes` counts the visible elements.
    """

    library: str
    device: Device
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    itemsize: int
    nbytes: int
    readonly: bool


def packed_at(info: ArrayInfo, address: int) -> ArrayInfo:
    """The description of a C-contiguous, writable copy at another address.  Does not touch the device."""
    library, device, _, shape, _, dtype, itemsize, nbytes, _ = info
    return ArrayInfo(library, device, address, shape, None, dtype, itemsize, nbytes, False)


class StreamKeeper(Protocol):
    """Who knows a thread's current device and streams.

    A token is what was found: the current device, its stream, and the named device's stream.
    All methods concern the calling thread and do not block the host.
    """

    def save(self, device: Device) -> Any:
        """What is current now: the device, its stream, and the stream of `device`.  None: nothing to bring back."""

    def set_device(self, device: Device) -> None:
        """Makes the device current.  Nothing where the keeper does not drive such devices."""

    def current_stream(self, device: Device) -> Stream | None:
        """The current stream on the device, None where the keeper has no such notion there."""

    def handle_reader(self, device: Device) -> Callable[[], int] | None:
        """A function that tells that stream's handle, on the thread that calls it, quickly.

        None where there is no such stream, or where it cannot be set, as numba's.
        """

    def here_reader(self, device: Device) -> Callable[[], Any] | None:
        """A function that gives, on the thread that calls it, what has the handle of the stream that is current on the
        current device as its ``ptr``, quickly: one look tells that a stream is current, and its device too.

        None where the keeper has no such function, or where `handle_reader` gives None.
        """

    def set_current_stream(self, device: Device, stream: Stream) -> Any:
        """Makes the stream and its device current.  Returns a token if `restore` has more to do than bring back what
        `save` found, else None."""

    def push_stream(self, device: Device, stream: Stream) -> Any:
        """`set_current_stream` for a guard: where a ``with`` of the library's own ends inside, this stream is current
        again.  Returns a token where `restore` has to undo that, before it brings back what `save` found, else None."""

    def exchange(self, device: Device, stream: Stream) -> Any:
        """`save` and `push_stream` in one, where the device is the current one already."""

    def set_aside(self, token: Any) -> None:
        """For a guard that stays open while its thread does other things: a ``with`` of the library's own does not come
        back to the stream that was pushed.  What is current does not change."""

    def take_up(self, token: Any) -> None:
        """Undoes `set_aside`, before the token may be restored."""

    def restore(self, token: Any) -> None:
        """Brings back exactly what the token holds, the device too."""


class Library(StreamKeeper, Protocol):
    """One array library.  `name` is ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or ``"numba"``.

    `keeps_readonly`: arrays of it can be read-only, so that memory nobody may write can be shown without a copy.
    """

    name: str
    keeps_readonly: bool

    def recorder(self, stream: Stream) -> Recorder | None:
        """Who captures graphs on the stream where this library's own way must be taken, so that its memory and its
        random numbers are part of them (torch); None where the backend's will do.  Does not touch the device."""

    def owns(self, value: object) -> bool:
        """Whether the value is an array of this library.  Does not touch the device."""

    def device_of(self, array: Any) -> Device:
        """Where the array is, whatever else is wrong with it.  Does not touch the device."""

    def index_reader(self) -> Callable[[Any], int] | None:
        """A function that tells the number of the GPU that an array is on, -1 elsewhere, quickly; it does not touch the
        device.  None for a library without current streams."""

    def address_reader(self) -> Callable[[Any], int] | None:
        """A function that tells an array's address quickly, for a library whose arrays may be given other memory
        (torch); it does not touch the device.  None where an array keeps the memory that it was made with."""

    def memory_of(self, array: Any) -> object:
        """What keeps the memory that the array has now, whatever becomes of the array.  Does not touch the device."""

    def resolve(self, array: Any, *, detach: bool = False) -> Any:
        """The array with what exists only in its library settled: torch's conjugate and negative bits and, with
        `detach`, its gradient history.  Raises `ArrayError` where it requires grad and `detach` is off.

        Enqueues on the current stream where that takes a copy.
        """

    def describe(self, array: Any) -> ArrayInfo:
        """What the array is and where.  Raises `ArrayError` for what cannot travel, naming the remedy.

        Does not touch the device.
        """

    def join(self, array: Any, stream: Stream) -> None:
        """Enqueues on `stream` a wait for all that the array is known to wait on (its library's current stream, JAX's
        definition event, numba's bound stream).  Does not block the host."""

    def retain(self, array: Any, stream: Stream) -> Any:
        """What keeps the array's memory as long as any view of it lives, for who wants it kept until `stream` is done.

        Where the library can see to that itself it is told, too.  Does not block the host.
        """

    def refusal(self, dtype: str, device: Device) -> str | None:
        """Why this library cannot hold the dtype on the device, with the remedy; None if it can.

        Does not touch the device.
        """

    def holds(self, dtype: str, device: Device) -> bool:
        """Whether `wrap` can hold this dtype on this device.  Does not touch the device."""

    def accepts(self, info: ArrayInfo) -> bool:
        """Whether `adopt` can show an array of this layout without a copy.  Does not touch the device."""

    def empty(self, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
        """A C-contiguous array whose contents are not set, usable at once on the current stream of the device."""

    def wrap(
        self, address: int, nbytes: int, shape: tuple[int, ...], dtype: str, device: Device, holder: object
    ) -> Any:
        """A C-contiguous array over memory of the runtime; `holder` lives as long as any alias of the array does.

        The caller has made a stream current that is ordered after the memory's contents.  Raises `ArrayError` for a
        dtype or a device that the library cannot hold.
        """

    def export(self, array: Any, stream: Stream | None) -> Any:
        """A DLPack capsule; enqueues on `stream` (None: no order is wanted) what `join` does.

        Does not block the host, but for JAX on the CPU, which has no other order to offer.
        """

    def adopt(self, source: Library, array: Any, info: ArrayInfo) -> Any:
        """The same memory as an array of this library, ordered on its current stream.  Zero-copy; see `accepts`."""

    def as_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A NumPy view of an array in host memory, read-only where the array is.  Raises `ArrayError` on a GPU."""

    def contiguous(self, array: Any) -> Any:
        """The array itself if it is C-contiguous, else a C-contiguous copy.  Enqueues on the current stream."""

    def copied(self, array: Any, dtype: str | None = None) -> Any:
        """A C-contiguous copy on the same device, of another dtype if asked.  Enqueues on the current stream."""

    def upload(self, array: np.ndarray[Any, Any], device: Device) -> Any:
        """A copy of plain memory on a GPU.  Enqueues on the current stream; the source may be changed at once."""

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy of a GPU array in plain memory.  Blocks the host."""


_FILES = {
    "numpy": ("streamrt.libraries.numpy_library", "NumpyLibrary", "numpy"),
    "cupy": ("streamrt.libraries.cupy_library", "CupyLibrary", "cupy"),
    "torch": ("streamrt.libraries.torch_library", "TorchLibrary", "torch"),
    "jax": ("streamrt.libraries.jax_library", "JaxLibrary", "jax"),
    "numba": ("streamrt.libraries.numba_library", "NumbaLibrary", "numba.cuda"),
}
NAMES = tuple(_FILES)
_NOT_HERE = "is not installed here; install it to use its arrays"
_libraries: dict[str, Library] = {}
_loaded: tuple[Library, ...] = ()
_missing: tuple[tuple[str, str], ...] = tuple((name, module) for name, (_, _, module) in _FILES.items())
_owners: dict[type, Library] = {}  # array classes only: there are few, and they are never made on the fly


def library(name: str) -> Library:
    """The library of that name; its module is imported when it is used.  Does not touch the device.

    Raises `ArrayError` for a name that is none, `UnavailableError` with the remedy where it is not installed.
    """
    found = _libraries.get(name)
    if found is None:
        if name not in _FILES:
            raise ArrayError(f"{name!r} is no array library; use one of {', '.join(NAMES)}")
        file, class_name, module = _FILES[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UnavailableError(f"{name} {_NOT_HERE} ({error})") from error
        made: Library = getattr(importlib.import_module(file), class_name)()
        found = _libraries.setdefault(name, made)
    return found


def check_installed(name: str) -> None:
    """Raises `UnavailableError` with the remedy where the library of that name is not installed; imports nothing."""
    package = _FILES[name][2].partition(".")[0]
    there = sys.modules[package] if package in sys.modules else importlib.util.find_spec(package)
    if there is None:
        raise UnavailableError(f"{name} {_NOT_HERE}")


def loaded() -> tuple[Library, ...]:
    """The libraries whose modules this process has imported, in a fixed order.  Does not touch the device."""
    for _, module in _missing:
        if module in sys.modules:
            _look_again()
            break
    return _loaded


def _look_again() -> None:
    """A module that another thread is importing just now counts as missing: waiting for it here could deadlock."""
    global _loaded, _missing
    here, missing = [], []
    for name, (_, _, module) in _FILES.items():
        found = sys.modules.get(module)
        if found is None or getattr(getattr(found, "__spec__", None), "_initializing", False):
            missing.append((name, module))
            continue
        here.append(library(name))
    _loaded, _missing = tuple(here), tuple(missing)


def library_of(value: object) -> Library | None:
    """The library that the array belongs to, None for anything that is no array.  Does not touch the device."""
    kind = type(value)
    known = _owners.get(kind)
    if known is not None:
        return known
    if kind.__module__ == "builtins":
        return None
    for candidate in loaded():
        if candidate.owns(value):
            _owners[kind] = candidate
            return candidate
    return None
