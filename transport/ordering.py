"""Which order a connection's streams have: a pure function of what both ends say of themselves.

In *host order* an agent looks at the event before it sends, and no stream waits for a peer.  In *stream order* the
receiver's stream waits for a word, so that both hosts run ahead of long work.  `AUTO` looks first, and lets a stream
wait only where that is there not yet and a waiting stream costs nothing.  Who has no wish (`ANY`) gets host order: that
will be `AUTO` when stream order has been seen to hold between GPUs.

Source of the rules: docs/ordering.md ("What follows, for a channel with words").
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from streamrt.device import Device, opened_devices
from streamrt.device import device_info as info_of
from streamrt.errors import DeviceError
from transport.channels import can_share, can_tag
from transport.errors import LocalProtocolError
from transport.links.ring import usable as words_ordered
from transport.transfer import AUTO, HOST, STREAM

ANY = ""
ORDERS = (AUTO, HOST, STREAM)
ORDER_VARIABLE = "STREAMRT_ORDER"
"""Names the order that this process asks for where nothing else does: ``STREAMRT_ORDER=stream``."""
FEW_CONNECTIONS = 8
"""Hardware queues of a GPU: below, work that has nothing to do with it queues behind a waiting stream (at 1, five times
as slow)."""
FIELD = "order"


def asked(order: str | None = None) -> str:
    """The order that is asked for: the one given, else that of `ORDER_VARIABLE`, else `ANY`.

    Does not touch the device.  Raises `LocalProtocolError` for one that is none.
    """
    chosen = order if order is not None else os.environ.get(ORDER_VARIABLE, "").strip()
    if chosen not in ORDERS and chosen != ANY:
        where = "order" if order is not None else ORDER_VARIABLE
        raise LocalProtocolError(f"{where}={chosen!r} is no order; use one of {', '.join(ORDERS)}")
    return chosen


def describe(order: str, devices: tuple[Device, ...]) -> dict[str, object]:
    """What an end says of itself in a hello: what it asks for, whether its streams can wait for words, its GPUs, and
    why it had better not.  Does not touch the device."""
    opened = [device for device in opened_devices() if device.has_streams]
    gpus = {}
    for device in devices:
        if device.kind == "cuda":
            with contextlib.suppress(DeviceError):  # one that has failed is nobody's to wait on
                gpus[str(device)] = device.backend.uuid(device.index)
    return {
        "asked": order,
        "words": words_ordered() and all(info_of(device).self_test for device in opened),
        "gpus": gpus,
        "dear": _dear(),
    }


def _dear() -> str:
    """Why a waiting stream costs this process more than it brings, "" where it does not."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "CUDA_LAUNCH_BLOCKING is set"
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if connections.isdecimal() and int(connections) < FEW_CONNECTIONS:
        return f"CUDA_DEVICE_MAX_CONNECTIONS is {connections}"
    return ""


def agreed(local: Mapping[str, object], remote: Mapping[str, object]) -> str:
    """The order of a connection, the same at both its ends.  Does not touch the device.

    Host order where either end asks for it or its streams cannot wait; else stream order where either asks for that;
    else, where either asks for it, `AUTO`, unless one of them says why not or their arrays may go by UCX.
    """
    ends = [_said(local), _said(remote)]
    orders = [said.get("asked") for said in ends]
    if HOST in orders or not all(said.get("words") is True for said in ends) or not can_share(local, remote):
        return HOST
    if STREAM in orders:
        return STREAM
    if AUTO not in orders or can_tag(local, remote) or any(said.get("dear") for said in ends):
        return HOST
    return AUTO


def pays(local: Mapping[str, object], remote: Mapping[str, object], source: str, target: str) -> bool:
    """Whether a stream of the peer's device `target` should rather wait for one of ours, `source`, than our agent: they
    are two GPUs.

    On one GPU, work that is blocked keeps the other process's turn.  On virtual devices, plain code waits for its
    arrays in any case.  Does not touch the device.
    """
    ours, theirs = _gpus(local).get(source), _gpus(remote).get(target)
    return isinstance(ours, str) and isinstance(theirs, str) and ours != theirs


def _said(info: Mapping[str, object]) -> Mapping[str, object]:
    said = info.get(FIELD)
    return said if isinstance(said, dict) else {}


def _gpus(info: Mapping[str, object]) -> Mapping[str, object]:
    gpus = _said(info).get("gpus")
    return gpus if isinstance(gpus, dict) else {}
