"""The handshake's pure half: which version, and which sessions.

Each side brings a nonce of its own.  From both come two session ids, one per direction, and every later message carries
its direction's: frames that were captured on another connection, or sent back to who sent them, are refused.  (This
keeps calls from being run twice by accident or by a confused proxy.  It is no authentication: that is the link's.)

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

import hashlib

from transport.errors import VersionError
from transport.wire import MAX_SESSION_BYTES


def sessions(initiator: bytes, acceptor: bytes) -> tuple[bytes, bytes]:
    """Session ids of (initiator to acceptor, acceptor to initiator) from both nonces.  Does not touch the device."""
    both = initiator + acceptor
    forth = hashlib.blake2b(both, digest_size=MAX_SESSION_BYTES, person=b"to acceptor").digest()
    back = hashlib.blake2b(both, digest_size=MAX_SESSION_BYTES, person=b"to initiator").digest()
    return forth, back


def choose_version(ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """The highest version of both ranges; raises `VersionError` that names both.  Does not touch the device."""
    version = min(ours[1], theirs[1])
    if version < max(ours[0], theirs[0]):
        raise VersionError(mismatch(ours, theirs))
    return version


def mismatch(ours: tuple[int, int], theirs: tuple[int, int]) -> str:
    """The message of a mismatch, from our point of view.  Does not touch the device."""
    return (
        f"we speak version {_range(ours)} of the protocol and the peer speaks {_range(theirs)}; "
        "install the same streamrt on both sides"
    )


def _range(versions: tuple[int, int]) -> str:
    return str(versions[0]) if versions[0] == versions[1] else f"{versions[0]} to {versions[1]}"
