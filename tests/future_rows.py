"""Rows 71 to 82 of the conformance table: device futures, with no RPC.

The cases are `test_future.py`'s own; here each has its number, and runs on the kind of device that the table asks for,
with the user's work written in the form that it asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import test_future as cases
from device_arrays import opened

from streamrt.device import Device, parse_device
from streamrt.future import DeviceFuture

FutureRow = Callable[[str, str], None]


def accepts(kind: str, form: str, make: Callable[[Device], Any]) -> None:
    """A device object, its name or its index names the allowed device."""
    device = opened(f"{kind}:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMRT_DEVICE", kind)
        assert DeviceFuture[int]([make(device)]).allowed == {device}


def value_row(name: str) -> FutureRow:
    return lambda kind, form: cases.test_c75_to_c80_the_value_is_finished_where_it_is_read(f"{kind}:0", name, form)


def not_cuda(kind: str, form: str) -> None:
    cases.test_c74_cpu_has_no_index()


def not_allowed(kind: str, form: str) -> None:
    cases.test_c82_a_value_on_a_device_that_is_not_allowed(kind)


ROWS: dict[int, tuple[str, int, FutureRow]] = {
    71: ("cuda_future_device_as_int", 1, functools.partial(accepts, make=lambda device: device.index)),
    72: ("cuda_future_device_as_str", 1, functools.partial(accepts, make=str)),
    73: ("cuda_future_device_as_device", 1, functools.partial(accepts, make=lambda device: parse_device(device))),
    74: ("cuda_future_device_not_cuda", 1, not_cuda),
    75: ("cuda_future_can_extract_cuda_tensor", 1, value_row("c75_array")),
    76: ("cuda_future_can_extract_list_with_cuda_tensor", 1, value_row("c76_list")),
    77: ("cuda_future_can_extract_custom_class_with_cuda_tensor", 1, value_row("c77_class_with_lock_and_event")),
    78: ("cuda_future_can_extract_cuda_sparse_tensor", 1, value_row("c78_sparse")),
    79: ("cuda_future_can_extract_list_with_cuda_sparse_tensor", 1, value_row("c79_list_of_sparse")),
    80: ("cuda_future_can_extract_custom_class_with_cuda_sparse_tensor", 1, value_row("c80_class_of_sparse")),
    81: ("cuda_future_callback_changes_devices", 2, cases.test_c81_a_callback_changes_devices),
    82: ("cuda_future_value_on_bad_device", 2, not_allowed),
}
