"""What leaves a connection: its effects in order, and its messages under one sequence and one session.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

from transport.events import Effect, Send
from transport.messages import Message
from transport.wire import encode, size


class Outbox:
    """`effects` that wait to be drained; every message is numbered here, so that a number is never used twice."""

    def __init__(self, now: float) -> None:
        self.session = b""
        self.last_sent = now
        self.messages = 0
        self.nbytes = 0
        self.effects: list[Effect] = []

    def emit(self, effect: Effect) -> None:
        """Appends an effect.  Does not touch the device."""
        self.effects.append(effect)

    def send(self, message: Message, now: float) -> None:
        """Numbers and encodes a message, and appends it as an effect.  Does not touch the device."""
        frames = encode(message, self.messages, self.session)
        self.messages += 1
        for frame in frames:
            self.nbytes += size(frame)
        self.last_sent = now
        self.effects.append(Send(frames))
