"""The service of the workers that one agent has many connections to."""

from __future__ import annotations

from typing import Any

import transport

service = transport.Service()


@service.function
def double(x: Any) -> Any:
    """Twice the argument."""
    return x * 2
