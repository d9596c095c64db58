"""Fixtures of the RPC tests, a pytest plugin: workers that serve `rpc_service`, a peer of one, names for gates."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from rpc_processes import Worker

import transport


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker with two virtual devices."""
    with Worker("rpc_service:service", "--device", "host:0", "--device", "host:1") as running:
        yield running


@pytest.fixture(scope="module")
def other() -> Iterator[Worker]:
    """A second worker, for calls that go on to a third process."""
    with Worker() as running:
        yield running


@pytest.fixture
def peer(worker: Worker) -> Iterator[transport.Peer]:
    """A connection to the worker of the file."""
    with transport.connect(worker.address) as connected:
        yield connected


@pytest.fixture
def name() -> str:
    """A name for gates and counters that no other test uses."""
    return uuid.uuid4().hex
