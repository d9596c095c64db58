"""Bytes on a device, for tests: put them there, change them in stream order, and get them back."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from streamrt.device import Block, Device, open_device
from streamrt.errors import UnavailableError
from streamrt.stream import Stream

WATCHDOG = 30.0  # seconds; what has not come by then hangs


def opened(name: str) -> Device:
    """The device, opened; the test is skipped where its backend is missing, and on no other error."""
    try:
        return open_device(name)
    except UnavailableError as error:
        pytest.skip(str(error))


def pinned(device: Device, data: bytes) -> Block:
    """Pinned host memory that holds `data`."""
    block = device.backend.allocate_pinned(len(data))
    ctypes.memmove(block.address, data, len(data))
    return block


def peek(block: Block) -> bytes:
    """What host memory holds now."""
    return ctypes.string_at(block.address, block.nbytes)


def put(stream: Stream, data: bytes) -> Block:
    """New device memory that holds `data`; the host waits for it."""
    source = pinned(stream.device, data)
    block = stream.device.backend.allocate(stream.device.index, len(data), stream.handle)
    stream.copy(block.address, source.address, len(data))
    stream.synchronize(WATCHDOG)
    return block


def empty(stream: Stream, nbytes: int) -> Block:
    """New device memory."""
    return stream.device.backend.allocate(stream.device.index, nbytes, stream.handle)


def get(stream: Stream, block: Block) -> bytes:
    """What device memory holds when the stream comes there; the host waits for it."""
    landing = stream.device.backend.allocate_pinned(block.nbytes)
    stream.copy(landing.address, block.address, block.nbytes)
    stream.synchronize(WATCHDOG)
    return peek(landing)


def fill(stream: Stream, block: Block, value: int) -> None:
    """Enqueues on the stream a kernel-like operation that sets every byte."""
    stream.launch(_fill, stream.device.kind, block, value)


def _fill(kind: str, block: Block, value: int) -> None:
    if kind == "host":
        ctypes.memset(block.address, value, block.nbytes)
    else:
        _memset(block, value)


def _memset(block: Block, value: int) -> Any:
    from cupy.cuda import get_current_stream, runtime

    return runtime.memsetAsync(block.address, value, block.nbytes, get_current_stream().ptr)
