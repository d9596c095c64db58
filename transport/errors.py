"""The transport's half of the error tree.  Each class is one thing that the caller may do next.

Standard library only (with `streamrt.errors`): the sans-io core imports this file.
"""

from __future__ import annotations

from typing import Any

from streamrt.errors import StreamrtError


class TransportError(StreamrtError):
    """Base of all that can go wrong between two processes."""


class LocalProtocolError(TransportError, RuntimeError):
    """We used the protocol wrongly; nothing was sent and the connection goes on."""


class RemoteProtocolError(TransportError, RuntimeError):
    """The peer broke the protocol; the connection is aborted."""


class VersionError(RemoteProtocolError):
    """The peer speaks another version of the protocol; install the same version on both sides."""


class PeerLostError(TransportError, ConnectionError):
    """The peer is gone, or cannot be reached: a call that was sent may have run, and its outcome is unknown."""


class DeadlineError(TransportError, TimeoutError):
    """The call's time ran out; the callee was told to stop and a late reply is dropped."""


class AddressError(TransportError, ValueError):
    """An address that is malformed, in use, or of an unknown kind; nothing was opened."""


class AuthError(TransportError, PermissionError):
    """The address or the peer is not allowed: not loopback and no keys, or keys that do not match."""


class CodecError(TransportError, TypeError):
    """A value that has no registered codec, or a header that is malformed."""


class DeviceMapError(TransportError, ValueError, RuntimeError):
    """A device has no target on the peer, or a map is not one-to-one.  Nothing was sent."""


class UnknownFunctionError(TransportError, LookupError):
    """The peer's service has no function of this name; the message lists those that it has."""


class RemoteError(TransportError, RuntimeError):
    """The peer's function raised.  `type_name`, `message` and `traceback_text` are the peer's."""

    def __init__(self, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text

    def __reduce__(self) -> tuple[Any, ...]:
        """As what it is made of.  Does not touch the device."""
        return RemoteError, (self.type_name, self.message, self.traceback_text), self.__dict__
