"""Hypothesis strategies for transport's messages and frames, within the limits of the wire."""

from __future__ import annotations

from hypothesis import strategies as st

from transport import messages, wire
from transport.events import BufferHeader, Side
from transport.limits import STAGING

names = st.text(min_size=1, max_size=12)
integers = st.integers(0, 2**63 - 1)
ids = st.integers(1, 2**63 - 1)
nonces = st.binary(min_size=16, max_size=16)
sequences = st.integers(0, 2**40)
payloads = st.binary(max_size=64)
bodies = st.one_of(
    st.binary(max_size=64), st.integers(wire.INLINE_BODY_BYTES - 1, wire.INLINE_BODY_BYTES + 2).map(bytes)
)

buffer_headers = st.builds(BufferHeader, st.integers(0, 2**48), names, names, names) | st.builds(
    BufferHeader,
    st.integers(1, 2**48),
    names,
    names.filter(lambda name: name != STAGING),
    names,
    st.binary(max_size=64),
)
buffers = st.lists(buffer_headers, max_size=4).map(tuple)
sides = st.sampled_from(Side)

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
infos = st.dictionaries(st.text(max_size=8), plain, max_size=4).filter(lambda info: depth(info) < wire.MAX_INFO_DEPTH)


def depth(value: object) -> int:
    """Levels of nesting."""
    if isinstance(value, dict):
        return 1 + max((depth(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth(item) for item in value), default=0)
    return 0


@st.composite
def hellos(draw: st.DrawFn) -> messages.Hello:
    """Hellos whose range of versions is one."""
    low, high = sorted((draw(st.integers(1, 9)), draw(st.integers(1, 9))))
    return messages.Hello(low, high, draw(nonces), draw(ids), draw(infos))


remaining = st.none() | st.floats(0, wire.MAX_REMAINING, allow_nan=False)
any_message = st.one_of(
    hellos(),
    st.builds(messages.Welcome, ids, nonces, ids, infos),
    st.builds(messages.Refuse, names, st.text(max_size=40), ids, ids),
    st.builds(messages.Call, ids, st.text(max_size=40), bodies, buffers, remaining, st.booleans()),
    st.builds(messages.Data, ids, sides, integers, st.integers(0, 2**62), names, payloads),
    st.builds(messages.Reply, ids, bodies, buffers),
    st.builds(messages.Error, ids, names, st.text(max_size=40), st.text(max_size=40)),
    st.builds(messages.Cancel, ids),
    st.builds(messages.Credit, ids),
    st.builds(messages.Decline, ids, sides, integers, st.text(max_size=40)),
    st.builds(messages.Retire, integers),
    st.builds(messages.Announce, names, payloads),
    *(st.just(one()) for one in (messages.Ping, messages.Pong, messages.Bye, messages.ByeAck)),
)
"""Every message that may be sent."""

small_ids = st.integers(1, 6)
near_message = st.one_of(
    st.builds(messages.Call, small_ids, st.just("f"), st.binary(max_size=8), buffers, remaining, st.booleans()),
    st.builds(messages.Data, small_ids, sides, st.integers(0, 3), st.integers(0, 40), st.just("staging"), payloads),
    st.builds(messages.Reply, small_ids, st.binary(max_size=8), buffers),
    st.builds(messages.Error, small_ids, names, names, names),
    st.builds(messages.Cancel, small_ids),
    st.builds(messages.Credit, st.integers(1, 2000)),
    st.builds(messages.Decline, small_ids, sides, st.integers(0, 3), names),
    *(st.just(one()) for one in (messages.Ping, messages.Pong, messages.Bye, messages.ByeAck)),
)
"""Well-formed messages that are likely to hit a call that exists, and to be wrong for its state."""

frame_lists = st.lists(st.binary(max_size=80), max_size=3)
