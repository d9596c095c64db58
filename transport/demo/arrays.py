"""Values of the demo (an array, or a dict of arrays) as another library's or on another device."""

from __future__ import annotations

from typing import Any

from streamrt import arrays
from streamrt.device import Device


def as_kind(value: Any, kind: str) -> Any:
    """The value with its arrays as arrays of `kind` on the same device, without a copy where that can be.

    Does not block the host, but for JAX arrays on the CPU.
    """
    if isinstance(value, dict):
        return {name: as_kind(each, kind) for name, each in value.items()}
    return arrays.convert(value, kind)


def copied(value: Any) -> Any:
    """The value with copies of its arrays, as CuPy's, on the GPUs where they are.  Enqueues on the current streams."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return arrays.convert(value, "cupy", copy=True)


def to_host(value: Any) -> Any:
    """The value with its arrays as NumPy arrays in ordinary memory.  Blocks the host until they are copied."""
    if isinstance(value, dict):
        return {name: to_host(each) for name, each in value.items()}
    return arrays.convert(arrays.to(value, "cpu"), "numpy")


def to_device(array: Any, device: Device) -> Any:
    """A copy of a NumPy array on a GPU, as CuPy's.  Enqueues on the device's current stream."""
    return arrays.array(array, device, arrays="cupy")
