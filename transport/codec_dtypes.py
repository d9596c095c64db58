"""NumPy dtypes as values that msgpack holds, and back without trusting what came.

Plain dtypes are their `str`, structured ones what the npy format makes of them; bfloat16, float8 and their like are
named, because their `str` forgets which one it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transport.errors import CodecError


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """A dtype as text, or as nested lists and tuples.  Does not touch the device."""
    if dtype.kind == "V" and dtype.type is not np.void:
        return dtype.name
    if dtype.names is None and dtype.subdtype is None:
        return dtype.str
    return np.lib.format.dtype_to_descr(dtype)


def make_dtype(described: Any) -> np.dtype[Any]:
    """The dtype that `describe_dtype` described.  Does not touch the device.

    Raises `CodecError` for one that is not known here or holds Python objects, `TypeError` or `ValueError` for what is
    no description.
    """
    if isinstance(described, str) and described.isidentifier():
        dtype = _named_dtype(described)
    else:
        dtype = np.lib.format.descr_to_dtype(described)
    if dtype.hasobject:
        raise CodecError("the peer sent a dtype of Python objects")
    return dtype


def _named_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        pass  # not one of NumPy's own
    try:
        import ml_dtypes
    except ImportError as error:
        raise CodecError(f"the peer sent the dtype {name!r}; install ml_dtypes") from error
    kind = getattr(ml_dtypes, name, None)
    if not (isinstance(kind, type) and issubclass(kind, np.generic)):
        raise CodecError(f"the peer sent the dtype {name!r}, which is not known here")
    return np.dtype(kind)
