"""Which two ends of a connection are in this process, as this process itself knows it.

What a peer says of itself proves nothing: everything in a hello can be learnt and repeated.  So every end draws a token
of its own, tells it, and notes here which token it was told; the two ends of a connection are one process's when each
has noted the other's.  A token that was copied from another connection's hello fails that: its end has met another.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Mapping

from streamrt import forks

FIELD = "same_process"
_TOKEN_BYTES = 16

_met: dict[str, str] = {}  # a token of ours, and the one that its connection's other end has told
_lock = threading.Lock()
forks.renew(sys.modules[__name__], _lock=threading.Lock, _met=dict)


def register() -> str:
    """A token for one end of a new connection, to be told under `FIELD`.  Does not touch the device."""
    token = secrets.token_hex(_TOKEN_BYTES)
    with _lock:
        _met[token] = ""
    return token


def meet(local: Mapping[str, object], remote: Mapping[str, object]) -> None:
    """The handshake is done: notes what the other end has told.  Does not touch the device."""
    told = remote.get(FIELD)
    with _lock:
        if (token := token_of(local)) in _met and isinstance(told, str):
            _met[token] = told


def forget(local: Mapping[str, object]) -> None:
    """The connection has ended.  Does not touch the device.  Idempotent."""
    with _lock:
        _met.pop(token_of(local), None)


def paired(local: Mapping[str, object], remote: Mapping[str, object]) -> bool:
    """Whether this end's connection has both its ends in this process.  Does not touch the device."""
    ours, theirs = token_of(local), token_of(remote)
    if local.get("process") != remote.get("process"):
        return False
    with _lock:
        return bool(ours) and bool(theirs) and _met.get(theirs) == ours and _met.get(ours) == theirs


def token_of(info: Mapping[str, object]) -> str:
    """The token in what a side says of itself, empty where there is none.  Does not touch the device."""
    token = info.get(FIELD)
    return token if isinstance(token, str) else ""
