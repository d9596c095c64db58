"""Messages, their frames, and the limits that every one of them is held to.

A message is one header frame, a msgpack array `[type, sequence, session, *fields]`, and at most one frame more: the
payload of a `Data`, or the body of a `Call` or `Reply` that is too long to stand in the header.  Bulk bytes never pass
through msgpack, so its limits on lengths do not bind them, and offsets and sizes are 64-bit.

Rules of this file:

* What comes from the wire is checked before it is used: types exactly (a bool is no integer), ranges, counts, lengths.
  Whatever is wrong raises `Malformed` and nothing else, and no memory is taken by a claimed size: arrays and maps are
  bounded before msgpack makes room for them.
* The same checks hold for what we send, so that a message that leaves is a message that arrives.
* The first fields of `Hello`, and all of `Refuse`, keep their places in every version to come: two versions that share
  nothing else can still tell each other so.

Standard library and msgpack.  Does not know about connections, time or devices.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from transport.events import BufferHeader, Side
from transport.limits import STAGING
from transport.messages import (
    Announce,
    Bye,
    ByeAck,
    Call,
    Cancel,
    Credit,
    Data,
    Decline,
    Error,
    Frame,
    Hello,
    Message,
    Ping,
    Pong,
    Refuse,
    Reply,
    Retire,
    Welcome,
)

MAGIC: Final = b"streamrt"

MAX_HEADER_BYTES: Final = 320 * 1024
"""Holds a call with all its buffers named at full length (1024 x about 274 bytes) and an inline body."""
INLINE_BODY_BYTES: Final = 4096
"""A second frame costs a link about as much as copying this many bytes."""
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
"""Skeletons are small; this leaves room for pickled functions that go to own children."""
MAX_PAYLOAD_BYTES: Final = 16 * 1024 * 1024
"""Staging sends 0.5 to 4 MiB a frame; one much larger would stop heartbeats behind it."""
MAX_DESCRIPTOR_BYTES: Final = 4096
"""What a channel other than staging sends in place of the bytes: a handle (64 bytes for CUDA IPC), a slot."""
MAX_ANNOUNCED_BYTES: Final = 8192
"""A UCX worker's address: some hundred bytes, and some kilobytes on a host with many network devices."""
MAX_ENCLOSED_BYTES: Final = 64
"""Of a descriptor that stands in the header: it names a block of what the receiver has mapped."""
MAX_BUFFERS: Final = 1024
"""More than the parameters of one transformer block; a model's are sent in several calls or packed."""
MAX_NAME_BYTES: Final = 64
"""Device and channel names (`cuda:127`, `shared_memory`)."""
MAX_FUNCTION_BYTES: Final = 512
"""A module path and a qualified name."""
MAX_TYPE_NAME_BYTES: Final = 256
MAX_MESSAGE_BYTES: Final = 8 * 1024
MAX_TRACEBACK_BYTES: Final = 32 * 1024
"""About 300 frames; longer ones are cut by the sender, for the error matters more than its last frames."""
MAX_REASON_BYTES: Final = 1024
MAX_INFO_DEPTH: Final = 6
MAX_ITEMS: Final = 4096
"""Items of one array or map: bounds what versions of msgpack that trust a claimed count allocate (32 KiB a level)."""
MAX_INTEGER: Final = 2**63 - 1
MAX_REMAINING: Final = 1e9
"""Seconds; about 30 years."""
MAX_SESSION_BYTES: Final = 16
NONCE_BYTES: Final = 16


class Malformed(ValueError):
    """A message breaks the format or a limit.  Internal: a connection turns it into a local or a remote fault."""


# Checks of single fields ----------------------------------------------------------------------------------------------


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise Malformed("an integer of 0 to 2^63 - 1 is wanted")
    return value


def _positive(value: object) -> int:
    if type(value) is not int or not 0 < value <= MAX_INTEGER:
        raise Malformed("a positive integer, of at most 2^63 - 1, is wanted")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise Malformed("a boolean is wanted")
    return value


def _side(value: object) -> Side:
    if isinstance(value, Side):
        return value
    if type(value) is int and value in (0, 1):
        return Side(value)
    raise Malformed("a side of 0 (request) or 1 (reply) is wanted")


def _remaining(value: object) -> float | None:
    if value is None:
        return None
    if type(value) is not float or not math.isfinite(value) or not 0.0 <= value <= MAX_REMAINING:
        raise Malformed("a time of 0 to 1e9 seconds, or nil, is wanted")
    return value


def _text(limit: int) -> Callable[[object], str]:
    def check(value: object) -> str:
        if type(value) is not str:
            raise Malformed("text is wanted")
        try:
            size = len(value) if value.isascii() else len(value.encode())
        except UnicodeEncodeError:
            raise Malformed("text that is not valid Unicode") from None
        if size > limit:
            raise Malformed(f"text of {size} bytes where {limit} are allowed")
        return value

    return check


def _bytes(low: int, high: int) -> Callable[[object], bytes]:
    def check(value: object) -> bytes:
        if type(value) is not bytes or not low <= len(value) <= high:
            raise Malformed(f"{low} to {high} bytes are wanted")
        return value

    return check


def _name(value: object) -> str:
    if type(value) is not str:
        raise Malformed("text is wanted")
    return _known_name(value)


@functools.lru_cache(maxsize=256)  # the same few names in every message; bounded, for they come from the wire
def _known_name(text: str) -> str:
    if not text:
        raise Malformed("an empty name")
    return _NAME_TEXT(text)


_NAME_TEXT = _text(MAX_NAME_BYTES)


def _buffers(value: object) -> tuple[BufferHeader, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_BUFFERS:
        raise Malformed(f"a list of at most {MAX_BUFFERS} buffers is wanted; pack small arrays into one")
    if not value:
        return ()
    result = []
    total = 0
    for item in value:
        header = item if isinstance(item, BufferHeader) else _header(item)
        nbytes, descriptor = header.nbytes, header.descriptor
        total += _integer(nbytes)
        for name in (header.device, header.channel, header.source):
            _name(name)
        if descriptor and (header.channel == STAGING or not nbytes):
            raise Malformed("a descriptor is enclosed for a buffer of bytes that go by another channel than staging")
        if type(descriptor) is not bytes or len(descriptor) > MAX_ENCLOSED_BYTES:
            raise Malformed(f"a descriptor of at most {MAX_ENCLOSED_BYTES} bytes is wanted")
        result.append(header)
    if total > MAX_INTEGER:
        raise Malformed("the buffers of a message have more than 2^63 - 1 bytes")
    return tuple(result)


def _header(item: object) -> BufferHeader:
    if not isinstance(item, list | tuple) or not 4 <= len(item) <= 5:
        raise Malformed("a buffer is (bytes, device, channel, source), and perhaps a descriptor")
    return BufferHeader(*item)


def _fields(header: BufferHeader) -> tuple[object, ...]:
    fields = (header.nbytes, header.device, header.channel, header.source)
    return (*fields, header.descriptor) if header.descriptor else fields


def _info(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Malformed("a map of information is wanted")
    _plain(value, MAX_INFO_DEPTH)
    return value


def _plain(value: object, depth: int) -> None:
    if depth == 0:
        raise Malformed("the information is nested too deeply")
    if isinstance(value, dict):
        if len(value) > MAX_ITEMS:
            raise Malformed("too many items of information")
        for key, item in value.items():
            if type(key) is not str:
                raise Malformed("keys of information are text")
            _plain(item, depth - 1)
    elif isinstance(value, list | tuple):
        if len(value) > MAX_ITEMS:
            raise Malformed("too many items of information")
        for item in value:
            _plain(item, depth - 1)
    elif value is not None and type(value) not in (bool, int, float, str, bytes):
        raise Malformed(f"information of type {type(value).__name__}")


# The table: number, class, and the check of each field in its order ---------------------------------------------------

_FUNCTION = _text(MAX_FUNCTION_BYTES)
_REASON = _text(MAX_REASON_BYTES)
_BODY = _bytes(0, MAX_BODY_BYTES)
_NONCE = _bytes(NONCE_BYTES, NONCE_BYTES)
_SESSION = _bytes(0, MAX_SESSION_BYTES)

Check = Callable[[object], object]

_TABLE: Final[dict[int, tuple[type[Any], dict[str, Check]]]] = {
    1: (Hello, {"minimum": _positive, "maximum": _positive, "nonce": _NONCE, "window": _positive, "info": _info}),
    2: (Welcome, {"version": _positive, "nonce": _NONCE, "window": _positive, "info": _info}),
    3: (Refuse, {"code": _text(MAX_NAME_BYTES), "reason": _REASON, "minimum": _positive, "maximum": _positive}),
    4: (
        Call,
        {
            "call": _positive,
            "function": _FUNCTION,
            "body": _BODY,
            "buffers": _buffers,
            "remaining": _remaining,
            "notify": _flag,
        },
    ),
    5: (Data, {"call": _positive, "side": _side, "buffer": _integer, "offset": _integer, "channel": _name}),
    6: (Reply, {"call": _positive, "body": _BODY, "buffers": _buffers}),
    7: (
        Error,
        {
            "call": _positive,
            "type_name": _text(MAX_TYPE_NAME_BYTES),
            "message": _text(MAX_MESSAGE_BYTES),
            "traceback_text": _text(MAX_TRACEBACK_BYTES),
        },
    ),
    8: (Cancel, {"call": _positive}),
    9: (Credit, {"nbytes": _positive}),
    10: (Decline, {"call": _positive, "side": _side, "buffer": _integer, "reason": _REASON}),
    11: (Retire, {"buffer_id": _integer}),
    12: (Ping, {}),
    13: (Pong, {}),
    14: (Bye, {}),
    15: (ByeAck, {}),
    16: (Announce, {"channel": _name, "payload": _bytes(0, MAX_ANNOUNCED_BYTES)}),
}
_NUMBERS: Final = {message: number for number, (message, _) in _TABLE.items()}


def _reader(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """What gives the fields of a message, in the order of the table."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda message: tuple([getattr(message, name) for name in names])


_FIELDS: Final = {message: _reader(tuple(checks)) for message, checks in _TABLE.values()}
_BODY_AT: Final = {message: list(checks).index("body") for message, checks in _TABLE.values() if "body" in checks}
"""Of those with a body; their buffers follow it."""


def _plain_call(
    call: object, function: object, body: object, buffers: object, remaining: object, notify: object
) -> bool:
    return (
        _plain_reply(call, body, buffers)
        and type(function) is str
        and len(function) <= MAX_FUNCTION_BYTES
        and function.isascii()
        and remaining is None
        and type(notify) is bool
    )


def _plain_reply(call: object, body: object, buffers: object) -> bool:
    return (
        not buffers
        and (type(buffers) is tuple or type(buffers) is list)
        and type(call) is int
        and 0 < call <= MAX_INTEGER
        and type(body) is bytes
        and len(body) <= MAX_BODY_BYTES
    )


_PLAIN: Final[dict[type[Any], Callable[..., bool]]] = {Call: _plain_call, Reply: _plain_reply}
"""Whether the fields are those of a message of the commonest kind, without buffers, so that the table would pass each.
One look instead of one a field."""


def size(frame: Frame) -> int:
    """Bytes of a frame.  Does not touch the device."""
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def clip(text: str, limit: int) -> str:
    """`text` as valid UTF-8 of at most `limit` bytes, cut at its end.  Does not touch the device."""
    return text.encode("utf-8", "backslashreplace")[:limit].decode("utf-8", "ignore")


def check(message: Message) -> None:
    """Raises `Malformed` if a peer would refuse `message`.  Does not touch the device."""
    kind = type(message)
    if kind in _PLAIN and _PLAIN[kind](*_FIELDS[kind](message)):
        return
    for name, one in _TABLE[_NUMBERS[type(message)]][1].items():
        try:
            one(getattr(message, name))
        except Malformed as fault:
            raise Malformed(f"{type(message).__name__}.{name}: {fault}") from None
    if isinstance(message, Data):
        _check_payload(message)
    if isinstance(message, Hello | Welcome):
        encode(message, 0, bytes(MAX_SESSION_BYTES))


def _check_payload(message: Data) -> None:
    if size(message.payload) > MAX_PAYLOAD_BYTES:
        raise Malformed(f"a payload of {size(message.payload)} bytes where {MAX_PAYLOAD_BYTES} are allowed")
    if message.offset + size(message.payload) > MAX_INTEGER:
        raise Malformed("a payload that ends past 2^63 - 1")


def encode(message: Message, sequence: int, session: bytes) -> tuple[Frame, ...]:
    """The frames of `message`; its payload is passed on, not copied.  Does not touch the device."""
    kind = type(message)
    values = _FIELDS[kind](message)
    fields: list[object] = [_NUMBERS[kind], sequence, session, *values]
    last: tuple[Frame, ...] = ()
    if kind in _BODY_AT:
        place = _BODY_AT[kind]
        body, buffers = values[place : place + 2]
        if buffers:
            fields[4 + place] = [_fields(one) for one in buffers]
        if len(body) > INLINE_BODY_BYTES:
            last, fields[3 + place] = (body,), None
    elif isinstance(message, Data):
        last = (message.payload,)
    elif isinstance(message, Hello):
        fields.insert(3, MAGIC)
    try:
        header: bytes = msgpack.packb(fields)
    except (ValueError, OverflowError, TypeError, RecursionError) as fault:
        raise Malformed(f"{kind.__name__} cannot be packed: {fault}") from None
    if len(header) > MAX_HEADER_BYTES:
        raise Malformed(f"a header of {len(header)} bytes where {MAX_HEADER_BYTES} are allowed")
    return (header, *last)


def decode(frames: Sequence[Frame]) -> tuple[int, bytes, Message]:
    """`(sequence, session, message)` of one message's frames; raises `Malformed`.  Does not touch the device.

    Payloads are views into the frames given, bodies are copies.
    """
    if not 1 <= len(frames) <= 2:
        raise Malformed(f"a message of {len(frames)} frames")
    fields = _unpack(frames[0])
    if len(fields) < 3 or type(fields[0]) is not int or fields[0] not in _TABLE:
        raise Malformed("a header of no known type")
    sequence = _integer(fields[1])
    session = _SESSION(fields[2])
    message, checks = _TABLE[fields[0]]
    values = fields[3:]
    extra = frames[1] if len(frames) == 2 else None
    if message is Hello:
        return sequence, session, _decode_hello(values, extra)
    if len(values) != len(checks):
        raise Malformed(f"a {message.__name__} of {len(values)} fields")
    if extra is None and message in _PLAIN and _PLAIN[message](*values):
        values[_BODY_AT[message] + 1] = ()
        plain: Message = message(*values)
        return sequence, session, plain
    if extra is not None and message in _BODY_AT:
        position = _BODY_AT[message]
        if values[position] is not None or not INLINE_BODY_BYTES < size(extra) <= MAX_BODY_BYTES:
            raise Malformed(f"a {message.__name__} whose second frame is no body")
        values[position], extra = bytes(extra), None
    arguments: list[object] = []
    try:
        for one, value in zip(checks.values(), values, strict=True):
            arguments.append(one(value))
    except Malformed as fault:
        name = list(checks)[len(arguments)]
        raise Malformed(f"{message.__name__}.{name}: {fault}") from None
    if message is Data:
        if extra is None:
            raise Malformed("a Data without its payload")
        arguments.append(extra)
        data: Data = message(*arguments)
        _check_payload(data)
        return sequence, session, data
    if extra is not None:
        raise Malformed(f"a {message.__name__} of two frames")
    result: Message = message(*arguments)
    return sequence, session, result


_DATA: Final = next(number for number, (message, _) in _TABLE.items() if message is Data)


def peek_data(header: Frame) -> tuple[int, Side, int, int] | None:
    """`(call, side, buffer, offset)` of a staged `Data`'s header, so that its payload can be read in place; else None.

    Nothing is believed yet: `decode` and the connection check the whole message when it is there.
    """
    try:
        fields = _unpack(header)
        if len(fields) != 8 or fields[0] != _DATA or fields[7] != STAGING:
            return None
        return _positive(fields[3]), _side(fields[4]), _integer(fields[5]), _integer(fields[6])
    except Malformed:
        return None


def _decode_hello(values: list[object], extra: Frame | None) -> Hello:
    """Reads the places that never change; the rest only if it is of our shape (another version's may not be)."""
    if len(values) < 3 or values[0] != MAGIC:
        raise Malformed("this is no streamrt transport peer (wrong magic)")
    minimum, maximum = _positive(values[1]), _positive(values[2])
    if minimum > maximum:
        raise Malformed("a Hello whose lowest version is above its highest")
    try:
        if extra is not None or len(values) != 6:
            raise Malformed("a Hello of another shape")
        return Hello(minimum, maximum, _NONCE(values[3]), _positive(values[4]), _info(values[5]))
    except Malformed:
        return Hello(minimum, maximum, b"", 1, {})


def _unpack(header: Frame) -> list[object]:
    if size(header) > MAX_HEADER_BYTES:
        raise Malformed(f"a header of {size(header)} bytes where {MAX_HEADER_BYTES} are allowed")
    try:
        fields = msgpack.unpackb(
            header,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
            max_str_len=MAX_HEADER_BYTES,
            max_bin_len=MAX_HEADER_BYTES,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as fault:
        raise Malformed(f"a header that is no msgpack: {type(fault).__name__}") from None
    if type(fields) is not list:
        raise Malformed("a header that is no array")
    return fields
