# requires: jax
"""JAX arrays there and back, and a NumPy array that becomes one in the worker."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import transport


@jax.jit
def normalise(x: jax.Array) -> jax.Array:
    """A compiled function; the worker compiles it once."""
    return (x - x.mean()) / x.std()


def normalised(x: jax.Array) -> jax.Array:
    """What is sent: a plain function."""
    return normalise(x)


def main() -> None:
    """The kind of the reply is that of the call's first array."""
    x = np.linspace(0.0, 10.0, 1000, dtype=np.float32)
    with transport.local_workers(1, devices=["host:0"], arrays="jax") as workers:
        from_jax = workers[0].call(normalised, jnp.asarray(x))
        from_numpy = workers[0].call(normalised, x)
    assert isinstance(from_jax, jax.Array)
    assert isinstance(from_numpy, np.ndarray)
    assert np.allclose(from_numpy, np.asarray(from_jax), atol=1e-5)
    print("JAX in, JAX out; NumPy in, NumPy out; JAX in the worker")


if __name__ == "__main__":
    main()
