"""The graceful end: four messages, of which the last two are proofs.

*Bye* says: I start no more calls, and mine have ended.  *ByeAck* answers it once the answerer has said its own Bye:
your calls have ended here too, also those without a reply, and every reply has gone.  An end with both acknowledgements
is graceful; a flushed socket would prove neither.

Who hears a Bye leaves too: it starts no calls but those that the functions it still runs for the peer need.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

from transport.errors import RemoteProtocolError
from transport.messages import Bye, ByeAck


class Farewell:
    """What each side has said.  `leaving`: our application wants to end."""

    def __init__(self) -> None:
        self.leaving = False
        self.heard = False
        self._said = False
        self._acknowledged = False
        self._proven = False

    @property
    def done(self) -> bool:
        """Whether both sides have proof."""
        return self._acknowledged and self._proven

    def may_start(self, serving: bool) -> bool:
        """Whether a call of ours may begin.  Does not touch the device."""
        return not self.leaving and not self._said and (serving or not self.heard)

    def on_bye(self) -> None:
        """The peer's calls have ended.  Raises `RemoteProtocolError`.  Does not touch the device."""
        if self.heard:
            raise RemoteProtocolError("a second Bye")
        self.heard = True

    def on_bye_ack(self) -> None:
        """Our calls have ended there.  Raises `RemoteProtocolError`.  Does not touch the device."""
        if not self._said or not self.heard or self._proven:
            raise RemoteProtocolError("a ByeAck where none was due")
        self._proven = True

    def due(self, *, calling: bool, serving: bool, replying: bool) -> list[Bye | ByeAck]:
        """What is to be said now; it counts as said.  Does not touch the device."""
        messages: list[Bye | ByeAck] = []
        if (self.leaving or self.heard) and not self._said and not calling and (self.leaving or not serving):
            self._said = True
            messages.append(Bye())
        if self._said and self.heard and not self._acknowledged and not serving and not replying:
            self._acknowledged = True
            messages.append(ByeAck())
        return messages
