"""One message's buffers on their way: which bytes have gone, which have come.

A buffer goes by one of two ways.  By *staging* its bytes travel in `Data` messages, in any order, each byte once.  By
any other channel it goes *by reference*: one `Data` carries a descriptor, the receiver's driver opens it, and answers
that the pull is enqueued (`Pulled`) or that it cannot (`OpenFailed`); then the sender tries the next channel of its
order.  The sender keeps such a buffer until its driver has seen the release (`Released`).  Where the receiver can
surely open it, the descriptor may be *enclosed* in the header: then nothing follows, and the sender is done.

Bytes are counted here and checked against the sizes in the header; what is wrong raises `Malformed`, and the caller
knows whose fault it is.

Standard library only.  Does not touch the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from transport.events import BufferHeader, Key, Pull, ReleaseSlot
from transport.limits import STAGING
from transport.messages import Frame
from transport.wire import MAX_DESCRIPTOR_BYTES, MAX_PAYLOAD_BYTES, Malformed, size

MAX_GAPS = 1024
"""Ranges that a buffer's bytes may be in at once; a driver that copies in parallel needs a few."""


class Coverage:
    """Which bytes of [0, total) are there; each may come once."""

    __slots__ = ("_ends", "_starts", "covered", "total")

    def __init__(self, total: int, *, full: bool = False) -> None:
        self.total = total
        self.covered = total if full else 0
        self._starts: list[int] = [0] if full else []
        self._ends: list[int] = [total] if full else []

    @property
    def complete(self) -> bool:
        return self.covered == self.total

    def add(self, offset: int, length: int) -> None:
        """Notes [offset, offset + length); raises `Malformed` outside the buffer, or where bytes are there already."""
        end = offset + length
        if length < 1 or offset < 0 or end > self.total:
            raise Malformed(f"bytes [{offset}, {end}) of a buffer of {self.total}")
        starts, ends = self._starts, self._ends
        place = bisect_right(starts, offset)
        if (place and ends[place - 1] > offset) or (place < len(starts) and starts[place] < end):
            raise Malformed(f"bytes [{offset}, {end}) came twice")
        left = place > 0 and ends[place - 1] == offset
        right = place < len(starts) and starts[place] == end
        if left and right:
            ends[place - 1] = ends[place]
            del starts[place], ends[place]
        elif left:
            ends[place - 1] = end
        elif right:
            starts[place] = offset
        elif len(starts) >= MAX_GAPS:
            raise Malformed(f"a buffer in more than {MAX_GAPS} pieces")
        else:
            starts.insert(place, offset)
            ends.insert(place, end)
        self.covered += length


def by_reference(header: BufferHeader) -> bool:
    """Whether a buffer goes as a descriptor instead of as bytes.  Does not touch the device."""
    return header.channel != STAGING and header.nbytes > 0


def enclosed(header: BufferHeader) -> bool:
    """Whether the header itself names the bytes: nothing follows it.  Does not touch the device."""
    return bool(header.descriptor)


def excess(buffers: Sequence[BufferHeader], limit: int) -> str:
    """What is wrong with a message that brings more bytes than `limit`, "" for any other.  Does not touch the device.

    It is no fault of the peer's, who may have more memory than we: its call ends, and the connection goes on.
    """
    total = sum(one.nbytes for one in buffers)
    if total <= limit:
        return ""
    devices = ", ".join(dict.fromkeys(one.device for one in buffers))
    return f"{total} bytes for {devices} in one message, where {limit} are allowed; send them in several calls"


def _check(header: BufferHeader, offset: int, payload: Frame) -> None:
    limit = MAX_DESCRIPTOR_BYTES if by_reference(header) else MAX_PAYLOAD_BYTES
    if size(payload) > limit:
        raise Malformed(f"a payload of {size(payload)} bytes by {header.channel}, where {limit} are allowed")
    if by_reference(header) and offset != 0:
        raise Malformed(f"a descriptor at offset {offset}")


class OutgoingTransfer:
    """A transfer that has its credit and whose bytes are going."""

    def __init__(self, key: Key, buffers: Sequence[BufferHeader]) -> None:
        self.key = key
        self.buffers = list(buffers)
        self._gone = [Coverage(one.nbytes, full=bool(one.descriptor)) for one in buffers]
        self._missing = sum(one.nbytes > 0 and not one.descriptor for one in buffers)
        self._released = False

    @property
    def all_sent(self) -> bool:
        """Every byte, or a descriptor in its place, has gone."""
        return self._missing == 0

    @property
    def complete(self) -> bool:
        """The memory is needed no longer."""
        return self.all_sent and (
            self._released or not any(by_reference(one) and not one.descriptor for one in self.buffers)
        )

    def send(self, index: int, offset: int, payload: Frame) -> None:
        """Counts bytes that go now; raises `Malformed`, then nothing has changed."""
        if not 0 <= index < len(self.buffers):
            raise Malformed(f"buffer {index} of {len(self.buffers)}")
        header, gone = self.buffers[index], self._gone[index]
        _check(header, offset, payload)
        gone.add(offset, header.nbytes if by_reference(header) else size(payload))
        self._missing -= gone.complete
        self._released &= not by_reference(header)

    def release(self) -> None:
        """The driver has seen every slot released that was given so far; a descriptor that goes later undoes it."""
        self._released = True

    def decline(self, index: int, channels: Sequence[str]) -> None:
        """The receiver cannot open a buffer: it goes again, by the channel after its own.  Raises `Malformed`."""
        if index >= len(self.buffers) or not by_reference(self.buffers[index]) or not self._gone[index].complete:
            raise Malformed(f"buffer {index} cannot be declined")
        header = self.buffers[index]
        if header.descriptor:
            raise Malformed(f"buffer {index} came with its header and cannot be declined")
        after = channels.index(header.channel) + 1 if header.channel in channels else len(channels) - 1
        self._missing += self._gone[index].complete
        self._gone[index] = Coverage(header.nbytes)
        self.buffers[index] = replace(header, channel=channels[after])


class IncomingTransfer:
    """A transfer that a peer has announced.  Data that comes before `grant` waits here; credit bounds it."""

    def __init__(self, key: Key, buffers: Sequence[BufferHeader], cost: int) -> None:
        self.key = key
        self.cost = cost
        self.buffers = list(buffers)
        self.granted = False
        self._come = [Coverage(one.nbytes) for one in buffers]
        self._missing = 0
        for one in buffers:
            self._missing += one.nbytes > 0
        self._early: list[Pull] = []
        self._unopened: dict[int, Frame] = {n: one.descriptor for n, one in enumerate(buffers) if one.descriptor}
        self._declined: dict[int, tuple[str, ...]] = {}

    @property
    def complete(self) -> bool:
        """Streams are there, and the copy of every byte is enqueued or about to be."""
        return self.granted and self._missing == 0

    def receive(self, index: int, offset: int, channel: str, payload: Frame) -> list[Pull]:
        """Counts bytes that came; what can be pulled now.  Raises `Malformed`."""
        if index >= len(self.buffers):
            raise Malformed(f"buffer {index} of {len(self.buffers)}")
        header = self.buffers[index]
        if header.channel != channel:
            declined = self._declined.get(index, ())
            if header.channel not in declined or channel in declined:
                raise Malformed(f"buffer {index} came by {channel} and was announced by {header.channel}")
            header = self.buffers[index] = replace(header, channel=channel)
        _check(header, offset, payload)
        if by_reference(header):
            if index in self._unopened or self._come[index].complete:
                raise Malformed(f"buffer {index} came twice")
            self._unopened[index] = payload
        else:
            self._come[index].add(offset, size(payload))
            self._missing -= self._come[index].complete
        pull = Pull(self.key, index, offset, payload, channel)
        if self.granted:
            return [pull]
        self._early.append(pull)
        return []

    def grant(self, opened: int = 0) -> list[Pull]:
        """Streams and memory are there: what has come so far can be pulled, but for the first `opened` enclosed ones.

        Raises `Malformed`.
        """
        enclosed_ones = [number for number, one in enumerate(self.buffers) if one.descriptor]
        if not 0 <= opened <= len(enclosed_ones):
            raise Malformed(f"{opened} buffers opened, of {len(enclosed_ones)} with a descriptor")
        self.granted = True
        for number in enclosed_ones[:opened]:
            self.pulled(number)
        early, self._early = self._early, []
        late = [
            Pull(self.key, number, 0, self.buffers[number].descriptor, self.buffers[number].channel)
            for number in enclosed_ones[opened:]
        ]
        return late + early

    def pulled(self, index: int) -> None:
        """A buffer that came by reference is opened and its pull enqueued.  Raises `Malformed`."""
        if not self.granted or self._unopened.pop(index, None) is None:
            raise Malformed(f"buffer {index} is not waiting to be opened")
        self._come[index].add(0, self.buffers[index].nbytes)
        self._missing -= 1

    def decline(self, index: int) -> None:
        """A buffer whose descriptor came cannot be opened: it will come by another channel.  Raises `Malformed`."""
        if not self.granted or self._unopened.pop(index, None) is None:
            raise Malformed(f"buffer {index} is not waiting to be opened")
        self._declined[index] = (*self._declined.get(index, ()), self.buffers[index].channel)

    def enclosed(self, index: int) -> bool:
        """Whether a buffer came with its header, so that it cannot be declined.  Does not touch the device."""
        return index < len(self.buffers) and enclosed(self.buffers[index])

    def unopened(self) -> list[ReleaseSlot]:
        """The descriptors that nobody has used: their slots are to be released by the host."""
        return [ReleaseSlot(self.key, buffer, descriptor) for buffer, descriptor in self._unopened.items()]
