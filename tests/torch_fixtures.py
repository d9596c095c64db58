"""Fixtures of the tests of guards in torch graphs, a pytest plugin; a file names those that all its tests want."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch_guards import EVERYWHERE, let_go, opened

from bench import engines
from streamrt.device import Device
from streamrt.torch_ops import open_guards, unwinding


@pytest.fixture(params=EVERYWHERE)
def anywhere(request: pytest.FixtureRequest) -> Device:
    return opened(request.param)


@pytest.fixture(scope="module")
def nothing_is_left() -> Iterator[None]:
    """What the file's tests leave to be collected is, at its end."""
    yield
    let_go()


@pytest.fixture
def fresh_torch() -> Iterator[None]:
    """Nothing compiled, no engine call counted; and no guard is left open."""
    torch._dynamo.reset()
    engines.engine_calls.clear()
    with unwinding():  # so that a test that fails does not let the next ones fail
        yield
        assert open_guards() == 0
