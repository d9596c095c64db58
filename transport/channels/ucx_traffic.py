"""The messages of a UCX worker, from when they are asked for to their end.  Used by the worker's thread alone.

Out: a message is given to UCX when the event behind its bytes has been seen as done; it is over when UCX has ended it
and the receiver's receipt has come, an empty message of another tag.  In: what arrives is matched by its tag with what
is expected, and fetched when the event behind the memory's last use has been seen as done.  So no stream waits for a
peer, and UCX is given no memory for a message that was given up before it came: that one is dropped as it comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from streamrt.device import Device
from streamrt.errors import DeviceError
from transport.channels.ucx import Ucx
from transport.channels.ucx_messages import End, Message

ARRIVAL_SECONDS = 10.0  # from the peer's word that it has sent
REFUSAL_SECONDS = 2.0  # for which what nobody wants is looked out for, so that its sender can go on
LOOK_SECONDS = 0.01
MAX_EARLY = 1024  # messages that came before anybody asked for them


Changed = dict[Callable[[], None], None]
"""Who has something to look at: called back by the worker's thread, with nothing of its own held."""


class _Early(NamedTuple):
    """A message that nobody has asked for yet: the link's word of it is behind it, or it is a stranger's."""

    nbytes: int
    probed: Any
    since: float


class Traffic:
    """The messages on their way.  Nothing here blocks the host."""

    def __init__(self, ucx: Ucx, changed: Changed) -> None:
        """`changed` is where whoever has something to look at is noted.  Does not touch the device."""
        self._changed = changed
        self._ucx = ucx
        self._unsent: list[Message] = []
        self._sent: list[Message] = []
        self._receipts: dict[int, Message] = {}
        self._expected: dict[int, Message] = {}
        self._due: dict[int, float] = {}  # until when each of these has to come
        self._early: dict[int, _Early] = {}
        self._unwanted: dict[int, tuple[End, float]] = {}  # tags of what is dropped as it comes, and for how long
        self._arrived: list[tuple[Message, Any]] = []
        self._fetching: list[Message] = []
        self._empty: list[Any] = []  # requests that touch no memory: receipts, and what is dropped
        self._entered: set[Device] = set()
        self._next_look = 0.0  # at what has not come in time

    @property
    def underway(self) -> bool:
        """Whether UCX has to be progressed."""
        lines = (self._unsent, self._sent, self._arrived, self._fetching, self._empty)
        return any(lines) or bool(self._receipts or self._expected or self._unwanted)

    @property
    def touching(self) -> bool:
        """Whether UCX may touch somebody's memory."""
        return bool(self._sent or self._fetching)

    def uses(self, end: End) -> bool:
        """Whether a message to or from an end is UCX's, or about to be."""
        arrived = [message for message, _ in self._arrived]
        return any(one.end is end for line in (self._unsent, self._sent, self._fetching, arrived) for one in line)

    # what is asked for

    def send(self, message: Message) -> None:
        """Sends a message once it is ready."""
        self._unsent.append(message)

    def expect(self, message: Message) -> None:
        """Receives a message when it comes, into its memory."""
        if not message.wanted:
            self.refuse(message.end, message.tag)
            return
        if message.tag in self._expected:
            self._fail(message, "a message of this tag is expected already")
            return
        try:
            self._endpoint(message.end)  # by which a fetch can be broken off
        except Exception as error:  # noqa: BLE001 - whatever UCX raises ends this message, and no other
            self._fail(message, f"{type(error).__name__}: {error}")
            return
        self._expected[message.tag] = message
        self._due[message.tag] = time.monotonic() + ARRIVAL_SECONDS
        if (early := self._early.pop(message.tag, None)) is not None:
            self._match(message.tag, early.nbytes, early.probed)

    def abandon(self, message: Message) -> None:
        """Nobody waits for a message any more: it is sent or received no more, unless UCX has begun."""
        message.wanted = False
        if self._receipts.get(message.receipt) is message:
            del self._receipts[message.receipt]
        if self._expected.get(message.tag) is message:
            del self._expected[message.tag], self._due[message.tag]
            message.let_go()
            self.refuse(message.end, message.tag)

    def refuse(self, end: End, tag: int) -> None:
        """Drops the message of a tag when it comes from an end, or now."""
        if (early := self._early.pop(tag, None)) is not None:
            self._empty.append(self._ucx.drop(early.probed))
        elif not end.error:
            self._unwanted[tag] = (end, time.monotonic() + REFUSAL_SECONDS)

    def forget(self, end: End) -> None:
        """An end has been closed: nothing comes from there any more."""
        for tag in [tag for tag, (other, _) in self._unwanted.items() if other is end]:
            del self._unwanted[tag]

    # what can be done now

    def step(self) -> bool:
        """Does all that can be done now; whether anything moved."""
        moved = self._ucx.progress()
        while (arrived := self._ucx.arrived()) is not None:
            moved = True
            self._match(*arrived)
        moved |= self._forward(self._unsent, self._post)
        moved |= self._forward(self._arrived, self._fetch)
        moved |= self._finish()
        if self._empty:
            self._empty = [request for request in self._empty if not request.completed]
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._expire(now)
        return moved

    def wind_up(self) -> None:
        """Takes back from UCX what it ends now, and begins nothing any more."""
        while self._early:
            self._empty.append(self._ucx.drop(self._early.popitem()[1].probed))
        self._ucx.progress()
        self._finish()

    def _finish(self) -> bool:
        return self._forward(self._sent, self._finish_sent) | self._forward(self._fetching, self._finish_fetched)

    def enter(self, device: Device) -> None:
        """The thread is about to use a device: its context is current from now on, and no other is made."""
        if device.has_streams and device not in self._entered:
            self._entered.add(device)
            device.backend.agent_thread(device.index)

    @staticmethod
    def _forward(line: list[Any], step: Callable[[Any], bool]) -> bool:
        """Takes those out of a line that have taken their step; whether any has."""
        if not line:
            return False
        left = [one for one in line if not step(one)]
        moved = len(left) < len(line)
        line[:] = left
        return moved

    def _endpoint(self, end: End) -> Any:
        if end.error:
            raise ConnectionError(end.error)
        if end.endpoint is None:
            try:
                end.endpoint = self._ucx.endpoint(end.address)
            except Exception as error:
                end.error = f"{type(error).__name__}: {error}"
                raise
        return end.endpoint

    # out

    def _post(self, message: Message) -> bool:
        """Gives a message to UCX once its bytes are there."""
        if not message.wanted:
            message.let_go()
            return True
        try:
            if not message.ready():
                return False
            self.enter(message.device)
            message.request = self._ucx.send(
                self._endpoint(message.end), message.tag, message.address, message.nbytes, message.device
            )
        except DeviceError as error:
            return self._fail(message, f"its device has failed: {error}")
        except Exception as error:  # noqa: BLE001 - as in `expect`
            return self._fail(message, f"{type(error).__name__}: {error}")
        message.posted = True
        self._receipts[message.receipt] = message
        self._sent.append(message)
        self._changed[message.changed] = None
        return True

    def _finish_sent(self, message: Message) -> bool:
        if not self._ended(message):
            return False
        self._settle(message)
        return True

    def _settle(self, message: Message) -> None:
        """A sent message is over when UCX needs its bytes no longer, and the receiver has them."""
        if message.request is None and message.receipt not in self._receipts and not message.error:
            message.done = True
            self._changed[message.changed] = None

    # in

    def _match(self, tag: int, nbytes: int, probed: Any) -> None:
        """A message has arrived: who it is for, or that nobody wants it."""
        if (message := self._expected.pop(tag, None)) is not None:
            del self._due[tag]
            if nbytes == message.nbytes:
                self._arrived.append((message, probed))
                return
            self._fail(message, f"{nbytes} bytes came where {message.nbytes} were announced")
        elif (message := self._receipts.pop(tag, None)) is not None:
            self._settle(message)
        elif self._unwanted.pop(tag, None) is None and nbytes:  # without bytes it is a receipt that nobody waits for
            self._early[tag] = _Early(nbytes, probed, time.monotonic())
            if len(self._early) <= MAX_EARLY:
                return
            probed = self._early.pop(next(iter(self._early))).probed
        self._empty.append(self._ucx.drop(probed))

    def _fetch(self, arrived: tuple[Message, Any]) -> bool:
        """Lets UCX write a message that has arrived to its memory, once that is free."""
        message, probed = arrived
        fault = ""
        try:
            if message.wanted:
                if not message.ready():
                    return False
                self.enter(message.device)
                message.request = self._ucx.fetch(probed, message.address, message.nbytes, message.device)
                self._fetching.append(message)
                return True
        except DeviceError as error:
            fault = f"its device has failed: {error}"
        except Exception as error:  # noqa: BLE001 - as in `expect`
            return self._fail(message, f"{type(error).__name__}: {error}")
        self._empty.append(self._ucx.drop(probed))
        if fault:
            return self._fail(message, fault)
        self._tell(message)
        message.let_go()
        return True

    def _finish_fetched(self, message: Message) -> bool:
        if not self._ended(message):
            return False
        if not message.error:
            message.done = True
            self._tell(message)
            self._changed[message.changed] = None
        return True

    def _tell(self, message: Message) -> None:
        """Sends the receipt: the bytes have come, or are not wanted."""
        try:
            self._empty.append(self._ucx.signal(self._endpoint(message.end), message.receipt))
        except Exception as error:  # noqa: BLE001 - the sender keeps them until the connection ends
            message.end.error = message.end.error or f"{type(error).__name__}: {error}"

    # the end of one

    def _ended(self, message: Message) -> bool:
        """Whether UCX has ended a message; what became of it."""
        request = message.request
        if not request.completed:
            return False
        message.request = None
        fault = self._ucx.fault(request)
        if fault:
            if self._receipts.get(message.receipt) is message:
                del self._receipts[message.receipt]
            message.quarantine()
            self._fail(message, fault)
        else:
            message.let_go()
        return True

    def _fail(self, message: Message, error: str) -> bool:
        message.fail(error)
        self._changed[message.changed] = None
        return True

    def fail_all(self, error: str) -> None:
        """UCX does not work: nothing comes any more, and what it may still touch is kept."""
        self._settle_without_receipts(list(self._receipts.values()))
        for message in (*self._sent, *self._fetching):
            message.quarantine()
        arrived = [message for message, _ in self._arrived]
        for message in (*self._unsent, *self._sent, *self._expected.values(), *arrived, *self._fetching):
            self._fail(message, error)
        for line in (self._unsent, self._sent, self._arrived, self._fetching, self._empty):
            line.clear()
        for table in (self._receipts, self._expected, self._due, self._early, self._unwanted):
            table.clear()

    def _settle_without_receipts(self, messages: list[Message]) -> None:
        """No receipt can come any more for messages that UCX has brought: its own word has to do."""
        for message in messages:
            if message.request is None and self._receipts.pop(message.receipt, None) is message:
                self._settle(message)

    def _expire(self, now: float) -> None:
        """Gives up what has not come in its time, and what is held for nobody."""
        if self._receipts:
            self._settle_without_receipts([one for one in self._receipts.values() if not one.end.alive])
        for tag in [tag for tag, due in self._due.items() if due <= now]:
            del self._due[tag]
            message = self._expected.pop(tag)
            self._fail(message, f"it did not come within {ARRIVAL_SECONDS:g} s")
            self.refuse(message.end, tag)
        for tag in [tag for tag, (_, due) in self._unwanted.items() if due <= now]:
            del self._unwanted[tag]
        for tag in [tag for tag, early in self._early.items() if early.since + 2 * ARRIVAL_SECONDS <= now]:
            self._empty.append(self._ucx.drop(self._early.pop(tag).probed))
