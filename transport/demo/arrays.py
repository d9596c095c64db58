"""Arrays of one library shown as another's, in one process; what the transport does between two."""

from __future__ import annotations

import sys
from typing import Any

from streamrt.device import Device
from streamrt.libraries import library, library_of
from streamrt.stream import Stream


def as_kind(value: Any, kind: str) -> Any:
    """The value with its arrays (in dicts) as arrays of `kind` on the same device, without a copy where that can be.

    Does not block the host.
    """
    if isinstance(value, dict):
        return {name: as_kind(each, kind) for name, each in value.items()}
    owner = library_of(value)
    if owner is None or owner.name == kind:
        return value
    array = owner.contiguous(value)
    info = owner.describe(array)
    return library(kind).wrap(info.address, info.nbytes, info.shape, info.dtype, info.device, array)


def to_host(value: Any) -> Any:
    """The value with its arrays as NumPy arrays.  Blocks the host until they are copied."""
    if isinstance(value, dict):
        return {name: to_host(each) for name, each in value.items()}
    owner = library_of(value)
    if owner is None or owner.name == "numpy":
        return value
    if owner.name == "cupy":
        return value.get()
    return to_host(as_kind(value, "cupy" if owner.describe(value).device.kind == "cuda" else "numpy"))


def to_cupy(array: Any) -> Any:
    """A CuPy copy of a NumPy array on the active device.  Enqueues on the current stream."""
    library("cupy")  # imports it, or says what to install
    return sys.modules["cupy"].asarray(array)


def synchronize(value: Any, device: Device) -> None:
    """Blocks the host until all arrays of the value (in dicts) are computed."""
    for array in value.values() if isinstance(value, dict) else (value,):
        owner = library_of(array)
        if owner is not None and owner.name != "numpy":
            stream = Stream(device)
            owner.join(array, stream)
            stream.synchronize()
