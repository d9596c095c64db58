"""The wire format: what goes out comes in equal, and nothing malformed gets by or raises anything else."""

from __future__ import annotations

import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import any_message, frame_lists, sequences

from transport import messages, wire
from transport.events import BufferHeader, Side
from transport.wire import Malformed, check, decode, encode

SESSION = bytes(range(16))


@given(any_message, sequences)
def test_what_is_encoded_decodes_to_the_same(message: messages.Message, sequence: int) -> None:
    check(message)
    assert decode(encode(message, sequence, SESSION)) == (sequence, SESSION, message)


@given(any_message)
def test_views_decode_as_bytes_do(message: messages.Message) -> None:
    frames = [memoryview(frame) for frame in encode(message, 1, SESSION)]
    assert decode(frames)[2] == message


@given(frame_lists)
@settings(max_examples=300)
def test_random_frames_raise_malformed_or_nothing(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except Malformed:
        pass


@given(any_message, st.data())
@settings(max_examples=500)
def test_mutated_frames_raise_malformed_or_decode_to_a_message_that_checks(
    message: messages.Message, data: st.DataObject
) -> None:
    header = bytearray(encode(message, 3, SESSION)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    frames = [bytes(header[: data.draw(st.integers(0, len(header)))]) or b"\x90", *encode(message, 3, SESSION)[1:]]
    try:
        _, _, got = decode(frames)
    except Malformed:
        return
    if not (isinstance(got, messages.Hello) and not got.nonce):
        check(got)


def test_bulk_bytes_are_not_copied() -> None:
    payload = memoryview(bytearray(100))
    frames = encode(messages.Data(1, Side.REQUEST, 0, 0, "staging", payload), 0, SESSION)
    assert frames[1] is payload
    got = decode(frames)[2]
    assert isinstance(got, messages.Data)
    assert got.payload is payload


def test_long_bodies_go_in_a_frame_of_their_own() -> None:
    body = bytes(wire.INLINE_BODY_BYTES + 1)
    frames = encode(messages.Reply(1, body, ()), 0, SESSION)
    assert len(frames) == 2
    assert frames[1] is body


def test_the_largest_call_fits_its_header() -> None:
    name = "x" * wire.MAX_NAME_BYTES
    descriptor = bytes(wire.MAX_ENCLOSED_BYTES)
    buffers = tuple(BufferHeader(2**50, name, name, name, descriptor) for _ in range(wire.MAX_BUFFERS))
    call = messages.Call(
        2**63 - 1, "f" * wire.MAX_FUNCTION_BYTES, bytes(wire.INLINE_BODY_BYTES), buffers, 1.0, notify=False
    )
    check(call)
    assert decode(encode(call, 2**62, SESSION))[2] == call


def test_sizes_over_4_gib_have_64_bits() -> None:
    call = messages.Call(1, "f", b"", (BufferHeader(2**32 + 3, "cpu", "staging", "cpu"),), None, notify=False)
    assert decode(encode(call, 0, SESSION))[2] == call
    data = messages.Data(1, Side.REPLY, 0, 2**32 + 1, "staging", b"ab")
    assert decode(encode(data, 0, SESSION))[2] == data


HEAD: list[object] = [0, SESSION]
BAD_HEADERS: dict[str, list[object]] = {
    "no fields": [],
    "unknown type": [99, *HEAD],
    "type is a bool": [True, *HEAD],
    "negative sequence": [12, -1, SESSION],
    "sequence is a float": [12, 1.0, SESSION],
    "session is text": [12, 0, "x"],
    "session too long": [12, 0, bytes(17)],
    "too many fields": [12, *HEAD, 1],
    "too few fields": [9, *HEAD],
    "credit of nothing": [9, *HEAD, 0],
    "credit is a bool": [9, *HEAD, True],
    "credit over 63 bits": [9, *HEAD, 2**63],
    "call id 0": [8, *HEAD, 0],
    "wrong magic": [1, *HEAD, b"streamRT", 1, 1, bytes(16), 1, {}],
    "versions in the wrong order": [1, *HEAD, b"streamrt", 2, 1, bytes(16), 1, {}],
    "body is text": [6, *HEAD, 1, "body", []],
    "body is missing": [6, *HEAD, 1, None, []],
    "buffers is a map": [6, *HEAD, 1, b"", {}],
    "buffer of three": [6, *HEAD, 1, b"", [[1, "cpu", "staging"]]],
    "buffer of negative size": [6, *HEAD, 1, b"", [[-1, "cpu", "staging", "cpu"]]],
    "buffer without a device": [6, *HEAD, 1, b"", [[1, "", "staging", "cpu"]]],
    "buffers over 63 bits in all": [6, *HEAD, 1, b"", [[2**62, "c", "s", "c"]] * 3],
    "too many buffers": [6, *HEAD, 1, b"", [[0, "c", "s", "c"]] * (wire.MAX_BUFFERS + 1)],
    "function too long": [4, *HEAD, 1, "f" * 513, b"", [], None, False],
    "notify is a number": [4, *HEAD, 1, "f", b"", [], None, 0],
    "endless deadline": [4, *HEAD, 1, "f", b"", [], float("inf"), False],
    "deadline is no number": [4, *HEAD, 1, "f", b"", [], float("nan"), False],
    "deadline is past": [4, *HEAD, 1, "f", b"", [], -1.0, False],
    "channel is a list": [5, *HEAD, 1, 0, 0, 0, []],
    "side 2": [10, *HEAD, 1, 2, 0, ""],
    "data without a payload": [5, *HEAD, 1, 0, 0, 0, "staging"],
    "info with a number for a key": [2, *HEAD, 1, bytes(16), 1, {"a": [{"b": {"c": {"d": {"e": {"f": {}}}}}}]}],
}


@pytest.mark.parametrize("fields", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_headers_are_malformed(fields: list[object]) -> None:
    with pytest.raises(Malformed):
        decode([msgpack.packb(fields)])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [msgpack.packb([12, 0, SESSION]), b"extra"],
        [msgpack.packb([12, 0, SESSION]) + b"\x00"],
        [msgpack.packb([12, 0, SESSION]), b"", b""],
        [msgpack.packb({"a": 1})],
        [msgpack.packb([6, 0, SESSION, 1, None, []]), b"short body"],
        [msgpack.packb([6, 0, SESSION, 1, b"both", []]), bytes(wire.INLINE_BODY_BYTES + 1)],
        [msgpack.packb([5, 0, SESSION, 1, 0, 0, 2**63 - 1, "staging"]), b"past the end"],
        [bytes(wire.MAX_HEADER_BYTES + 1)],
        [b"\x91" * 5000],
        [msgpack.packb([12, 0, msgpack.ExtType(5, b"x")])],
        [msgpack.packb([12, 0, msgpack.Timestamp(1, 1)])],
        [b"\x93\x0c\x00\xa2\xff\xff"],
    ],
)
def test_bad_frames_are_malformed(frames: list[bytes]) -> None:
    with pytest.raises(Malformed):
        decode(frames)


def test_a_payload_over_the_limit_is_malformed() -> None:
    payload = bytes(wire.MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(Malformed, match="payload"):
        decode([msgpack.packb([5, 0, SESSION, 1, 0, 0, 0, "staging"]), payload])


@pytest.mark.parametrize("claim", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_claimed_sizes_allocate_nothing(claim: bytes) -> None:
    """A few bytes that claim 4 GiB, also nested as deeply as the header is long, take no memory to speak of."""
    header = (b"\xdd" + struct.pack(">I", 4000)) * 500 + claim + struct.pack(">I", 0xFFFFFFFF)
    padded = ((b"\xdd" + struct.pack(">I", 200_000)) * 500).ljust(wire.MAX_HEADER_BYTES, b"\x00")
    tracemalloc.start()
    try:
        for one in (claim + struct.pack(">I", 0xFFFFFFFF), header, padded):
            with pytest.raises(Malformed):
                decode([one])
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "message",
    [
        messages.Cancel(0),
        messages.Call(1, "f\ud800", b"", (), None, notify=False),
        messages.Call(1, "f", b"", (BufferHeader(-1, "cpu", "staging", "cpu"),), None, notify=False),
        messages.Call(1, "f", b"", (BufferHeader(1, "cpu", "staging", "cpu", b"x"),), None, notify=False),
        messages.Call(1, "f", b"", (BufferHeader(0, "cpu", "ucx", "cpu", b"x"),), None, notify=False),
        messages.Call(1, "f", b"", (BufferHeader(1, "cpu", "ucx", "cpu", bytes(65)),), None, notify=False),
        messages.Call(1, "f", bytes(wire.MAX_BODY_BYTES + 1), (), None, notify=False),
        messages.Reply(1, bytearray(b"x"), ()),  # type: ignore[arg-type]
        messages.Welcome(1, bytes(16), 1, {"info": object()}),
        messages.Welcome(1, bytes(16), 1, {"info": 2**70}),
        messages.Welcome(1, bytes(16), 1, {"info": bytes(wire.MAX_HEADER_BYTES)}),
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(message: messages.Message) -> None:
    with pytest.raises(Malformed):
        check(message)


@given(st.text(alphabet=st.characters(), max_size=40), st.integers(0, 40))
def test_clip_is_valid_and_short(text: str, limit: int) -> None:
    assert len(wire.clip(text + "\ud800", limit).encode()) <= limit


@given(any_message)
def test_peek_data_reads_staged_data_and_nothing_else(message: messages.Message) -> None:
    got = wire.peek_data(encode(message, 0, SESSION)[0])
    if isinstance(message, messages.Data) and message.channel == "staging" and message.call:
        assert got == (message.call, message.side, message.buffer, message.offset)
    else:
        assert got is None
    staged = messages.Data(3, Side.REPLY, 1, 2**33, "staging", b"x")
    assert wire.peek_data(encode(staged, 0, SESSION)[0]) == (3, Side.REPLY, 1, 2**33)


@given(st.binary(max_size=80))
def test_peek_data_never_raises(header: bytes) -> None:
    wire.peek_data(header)


def test_a_hello_of_another_shape_still_tells_its_versions() -> None:
    header = msgpack.packb([1, 0, b"", b"streamrt", 7, 9, "what version 7 says", 1, 2, 3])
    assert decode([header])[2] == messages.Hello(7, 9, b"", 1, {})
