"""Array libraries behind one Protocol, one file each.

A library is *loaded* when its module is in `sys.modules`: the runtime never imports one by itself, and never chooses a
result's kind by what happens to be installed.  The current stream has one source of truth, the library that the array
belongs to; NumPy, numba and JAX have none of their own.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streamrt.errors import ArrayError, UnavailableError

if TYPE_CHECKING:
    from streamrt.device import Device
    from streamrt.stream import Stream


@dataclass(frozen=True, slots=True)
class ArrayInfo:
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


class Library(Protocol):
    """One array library.  `name` is ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or ``"numba"``; `module` its module."""

    name: str
    module: str

    def owns(self, value: object) -> bool:
        """Whether the value is an array of this library.  Does not touch the device."""

    def describe(self, array: Any) -> ArrayInfo:
        """What the array is and where.  Raises `ArrayError` for what cannot travel, naming the remedy.

        Does not touch the device.
        """

    def current_stream(self, device: Device) -> Stream | None:
        """The calling thread's current stream on the device, None where the library has no such notion there."""

    def set_current_stream(self, device: Device, stream: Stream) -> Any:
        """Makes the stream (and its device) current for the calling thread; returns a token for `restore`.

        None where the library has no such notion there.  Does not block the host.
        """

    def restore(self, token: Any) -> None:
        """Brings back exactly what was current before the `set_current_stream` that gave the token, the device too."""

    def join(self, array: Any, stream: Stream) -> None:
        """Enqueues on `stream` a wait for all that the array is known to wait on (its library's current stream, JAX's
        definition event, numba's bound stream).  Does not block the host."""

    def wrap(self, address: int, nbytes: int, shape: tuple[int, ...], dtype: str, device: Device, holder: object) -> Any:
        """A C-contiguous array over memory of the runtime; `holder` lives as long as any alias of the array does.

        The caller has made a stream current that is ordered after the memory's contents.  Raises `ArrayError` for a
        dtype or a device that the library cannot hold.
        """

    def holds(self, dtype: str, device: Device) -> bool:
        """Whether `wrap` can hold this dtype on this device.  Does not touch the device."""

    def contiguous(self, array: Any) -> Any:
        """The array itself if it is C-contiguous, else a C-contiguous copy.  Enqueues on the current stream."""


_FILES = {
    "numpy": ("streamrt.libraries.numpy_library", "NumpyLibrary", "numpy"),
    "cupy": ("streamrt.libraries.cupy_library", "CupyLibrary", "cupy"),
    "torch": ("streamrt.libraries.torch_library", "TorchLibrary", "torch"),
    "jax": ("streamrt.libraries.jax_library", "JaxLibrary", "jax"),
    "numba": ("streamrt.libraries.numba_library", "NumbaLibrary", "numba.cuda"),
}
NAMES = tuple(_FILES)
_libraries: dict[str, Library] = {}


def library(name: str) -> Library:
    """The library of that name; its module is imported when it is used.  Raises `UnavailableError` with the remedy."""
    found = _libraries.get(name)
    if found is None:
        if name not in _FILES:
            raise ArrayError(f"{name!r} is no array library; use one of {', '.join(NAMES)}")
        file, class_name, module = _FILES[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UnavailableError(f"{name} is not installed here; install it to use its arrays ({error})") from error
        found = _libraries[name] = getattr(importlib.import_module(file), class_name)()
    return found


def loaded() -> list[Library]:
    """The libraries whose modules this process has imported, in a fixed order.  Does not touch the device."""
    return [library(name) for name, (_, _, module) in _FILES.items() if name in _libraries or module in sys.modules]


def library_of(value: object) -> Library | None:
    """The library that the array belongs to, None for anything that is no array.  Does not touch the device."""
    module = type(value).__module__
    if module in ("builtins", "str"):
        return None
    for candidate in loaded():
        if candidate.owns(value):
            return candidate
    return None
