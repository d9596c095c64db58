"""The demo's stages for JAX arrays, each compiled once a shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transport.demo import arithmetic
from transport.demo.arithmetic import HALO


def denoise(image: Any) -> Any:
    """Stage 1: see `numpy_stages.denoise`.  Enqueues on XLA's own stream."""
    return _denoise(image)


def filter_bank(image: Any) -> dict[str, Any]:
    """Stage 2: see `numpy_stages.filter_bank`.  Enqueues on XLA's own stream."""
    return {"image": image, "edges": _edges(image)}


def finish(found: dict[str, Any]) -> dict[str, Any]:
    """Stage 3: see `numpy_stages.finish`.  Enqueues on XLA's own stream."""
    image, corners = _finish(found["image"])
    return {"image": image, "edges": found["edges"], "corners": corners}


def _taller(image: Any) -> Any:
    return arithmetic.widen(jnp, image, -2, HALO)


@jax.jit  # type: ignore[untyped-decorator]
def _denoise(image: Any) -> Any:
    return arithmetic.denoise(jnp, _taller(image))


@jax.jit  # type: ignore[untyped-decorator]
def _edges(image: Any) -> Any:
    return arithmetic.to_bytes(jnp, arithmetic.edges(jnp, _taller(image)))


@jax.jit  # type: ignore[untyped-decorator]
def _finish(image: Any) -> tuple[Any, Any]:
    tall = _taller(image)
    return arithmetic.tone(jnp, tall), arithmetic.corners(jnp, tall)
