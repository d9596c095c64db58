"""What leaves a connection: its effects in order, and its messages under one sequence and one session.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

from transport.events import Effect, Send
from transport.messages import Message
from transport.wire import encode, size


class Outbox:
    """Effects that wait for `drain`; every message is numbered here, so that a number is never used twice."""

    def __init__(self, now: float) -> None:
        self.session = b""
        self.last_sent = now
        self.messages = 0
        self.nbytes = 0
        self._effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        """Appends an effect.  Does not touch the device."""
        self._effects.append(effect)

    def send(self, message: Message, now: float) -> None:
        """Numbers and encodes a message, and appends it as an effect.  Does not touch the device."""
        frames = encode(message, self.messages, self.session)
        self.messages += 1
        self.nbytes += sum(map(size, frames))
        self.last_sent = now
        self._effects.append(Send(frames))

    def drain(self) -> list[Effect]:
        """Takes the effects.  Does not touch the device."""
        effects, self._effects = self._effects, []
        return effects
