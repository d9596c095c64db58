"""The demo's stages for JAX arrays, each compiled once a shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transport.demo import arithmetic
from transport.demo.arithmetic import HALO


@jax.jit
def denoise(image: jax.Array) -> jax.Array:
    """Stage 1: see `numpy_stages.denoise`.  Enqueues on XLA's own stream."""
    result: jax.Array = arithmetic.denoise(jnp, _taller(image))
    return result


@jax.jit
def filter_bank(image: jax.Array) -> dict[str, Any]:
    """Stage 2: see `numpy_stages.filter_bank`.  Enqueues on XLA's own stream."""
    return {"image": image, "edges": arithmetic.edges(jnp, _taller(image))}


@jax.jit
def finish(found: dict[str, Any]) -> dict[str, Any]:
    """Stage 3: see `numpy_stages.finish`.  Enqueues on XLA's own stream."""
    tall = _taller(found["image"])
    return {
        "image": arithmetic.tone(jnp, tall),
        "edges": arithmetic.to_bytes(jnp, found["edges"]),
        "corners": arithmetic.corners(jnp, tall),
    }


def _taller(image: jax.Array) -> jax.Array:
    tall: jax.Array = arithmetic.widen(jnp, image, -2, HALO)
    return tall
