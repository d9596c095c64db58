"""streamrt: a framework-neutral stream runtime for CuPy, torch, JAX, numba and NumPy arrays.

Layers, lower first; a file imports only from those above it in this list:

- `errors`, `hooks`, `segment`, `timeline`, `views`: leaves
- `captures`, `device`, `host/`, `cuda/`: the backends behind one Protocol
- `stream`, `event`, `pool`, `kernels`: queues, marks, leases
- `libraries/`: array libraries behind one Protocol
- `steps`, `guard`, `arrays`: current streams; any array in, the wanted kind out
- `callbacks`, `buffers`, `memory`, `points`, `future`: what is in flight, and values that are coming
- `sides`, `guard_inputs`, `compute`: engines on side streams
- `graph`: what is enqueued, captured and replayed
- `torch_*`: guards in torch graphs (`torch_ops`, `torch_graphs`); imported by name, since they import torch
- `testing`: public tools for tests

Every name of `__all__` is exported from here alone.  Importing it touches no device and imports no array library but
NumPy.
"""

from __future__ import annotations

from streamrt.arrays import array, convert, describe, device_of, empty, find_arrays, is_array, register_container, to
from streamrt.compute import compute_stream, on_side_stream
from streamrt.device import (
    CPU,
    Backend,
    Device,
    DeviceInfo,
    cuda_available,
    default_device_kind,
    device_info,
    open_device,
    parse_device,
)
from streamrt.errors import (
    ArrayError,
    CaptureError,
    ClosedError,
    DeadlockError,
    DeviceError,
    ExhaustedError,
    LifetimeError,
    PendingError,
    PlacementError,
    RaceError,
    StreamrtError,
    UnavailableError,
)
from streamrt.event import Event, EventPool, event_pool
from streamrt.future import DeviceFuture, blocking_wait, wait_all
from streamrt.graph import Graph, capture
from streamrt.guard import current_stream, current_streams, device_guard, run_on, using
from streamrt.libraries import ArrayInfo
from streamrt.memory import Buffer, Snapshot, set_held_limit, set_snapshot_limit, snapshot, use
from streamrt.pool import StreamLease, StreamPool, stream_pool
from streamrt.segment import Segment, Word, WordTable
from streamrt.stream import Stream
from streamrt.timeline import Point, Timeline

__all__ = [
    # devices
    "CPU",
    "Backend",
    "Device",
    "DeviceInfo",
    "cuda_available",
    "default_device_kind",
    "device_info",
    "open_device",
    "parse_device",
    # streams
    "Event",
    "EventPool",
    "Point",
    "Segment",
    "Stream",
    "StreamLease",
    "StreamPool",
    "Timeline",
    "Word",
    "WordTable",
    "compute_stream",
    "current_stream",
    "current_streams",
    "device_guard",
    "event_pool",
    "on_side_stream",
    "run_on",
    "stream_pool",
    "using",
    # arrays and memory
    "ArrayInfo",
    "Buffer",
    "Snapshot",
    "array",
    "convert",
    "describe",
    "device_of",
    "empty",
    "find_arrays",
    "is_array",
    "register_container",
    "set_held_limit",
    "set_snapshot_limit",
    "snapshot",
    "to",
    "use",
    # graphs
    "Graph",
    "capture",
    # futures
    "DeviceFuture",
    "blocking_wait",
    "wait_all",
    # errors
    "ArrayError",
    "CaptureError",
    "ClosedError",
    "DeadlockError",
    "DeviceError",
    "ExhaustedError",
    "LifetimeError",
    "PendingError",
    "PlacementError",
    "RaceError",
    "StreamrtError",
    "UnavailableError",
]
