"""transport: calls between processes that carry device buffers, under one caller/callee stream protocol.

Layers, lower first; a file imports only from those above it in this list:

- `errors`, `events`, `limits`, `wire`, `lease`, `protocol` and their parts: the sans-io connection, standard library
  only
- `codec`, `payload`, `device_map`, `lend`: values and where they go
- `links/`, `channels/`, `pinned`, `transfer`: control paths and data paths
- `service`, `context`, `driver`, `agent`: functions, and what drives connections
- `peer`, `group`, `launch/`, `worker`: what users hold
- `pipeline`, `demo/`, `cli`: what is built on it
"""

from __future__ import annotations

from transport.agent import Agent, default_agent
from transport.channels.exports import set_export_limit
from transport.codec import register_type
from transport.context import cancelled
from transport.device_map import merge_device_maps
from transport.errors import (
    AddressError,
    AuthError,
    CodecError,
    DeadlineError,
    DeviceMapError,
    LocalProtocolError,
    PeerLostError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    UnknownFunctionError,
    VersionError,
)
from transport.group import Group, group
from transport.launch.local import LocalWorker, LocalWorkers, local_workers
from transport.peer import Peer, PeerStatistics, caller, connect, loopback
from transport.pipeline import Pipeline, Restart, Stage, StageError, StageLostError, pipeline, stage
from transport.service import Service

__all__ = [
    "AddressError",
    "Agent",
    "AuthError",
    "CodecError",
    "DeadlineError",
    "DeviceMapError",
    "Group",
    "LocalProtocolError",
    "LocalWorker",
    "LocalWorkers",
    "Peer",
    "PeerLostError",
    "PeerStatistics",
    "Pipeline",
    "RemoteError",
    "RemoteProtocolError",
    "Restart",
    "Service",
    "Stage",
    "StageError",
    "StageLostError",
    "TransportError",
    "UnknownFunctionError",
    "VersionError",
    "caller",
    "cancelled",
    "connect",
    "default_agent",
    "group",
    "local_workers",
    "loopback",
    "merge_device_maps",
    "pipeline",
    "register_type",
    "set_export_limit",
    "stage",
]
