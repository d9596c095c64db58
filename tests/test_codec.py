"""The codec: what goes in comes out, what cannot go says where and why, and no body from outside does harm."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fractions
import functools
import math
import re
import socket
import threading
import tracemalloc
import types
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamrt
import transport
from streamrt.errors import ArrayError
from transport.codec import BULK_BYTES, MAX_BODY_BYTES, MAX_DEPTH, Encoded, Ext, decode, encode
from transport.codec_types import default_parts
from transport.errors import CodecError, LocalProtocolError
from transport.launch.functions import ByValue


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def through(value: Any, *, allow_pickle: bool = False) -> Any:
    encoded = encode(value, is_array, allow_pickle=allow_pickle)
    return decode(encoded.body, encoded.arrays, allow_pickle=allow_pickle)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types all the way down, and NaN is NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and (one == other or (one != one and other != other))
    if isinstance(one, (complex, np.inexact)):
        return repr(one) == repr(other)
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return bool(one == other)


hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()), max_size=6)
    | st.binary(max_size=6)
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
scalars = (
    st.floats()
    | st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True), np.complex64(1 - 2j), np.float64("nan")])
    | st.sampled_from([np.uint64(2**64 - 1), np.datetime64("2026-01-01"), np.timedelta64(5, "us"), np.str_("é\0")])
    | st.sampled_from([np.dtype("f4"), np.dtype(">i2"), np.dtype([("a", "f8"), ("b", "i4", (2,))]), np.float16])
    | st.sampled_from([ml_dtypes.bfloat16(0.5), np.dtype(ml_dtypes.float8_e4m3fn), ml_dtypes.bfloat16])
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers())
    | st.sampled_from([..., range(3, 9, 2), bytearray(b"mutable"), collections.OrderedDict([(1, 2), (0, 3)])])
    | st.builds(collections.deque, st.lists(st.integers(), max_size=3), st.none() | st.just(2))
)
values = st.recursive(
    hashable | scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(values)
def test_every_value_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    assert same(through(value), value)


@pytest.mark.parametrize(
    "value", [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**5000, -(2**5000), True]
)
def test_integers_at_the_borders(value: int) -> None:
    assert same(through([value]), [value])


# arrays ---------------------------------------------------------------------------------------------------------------


def test_arrays_go_beside_the_skeleton_as_they_are() -> None:
    x, y = np.arange(5), np.ones((2, 2))
    encoded = encode(((x, [y, {"x": x}]), {"w": y}), is_array)
    assert [id(array) for array in encoded.arrays] == [id(x), id(y)]
    (first, (second, named)), keywords = decode(encoded.body, ["first", "second"])
    assert (first, second, named, keywords) == ("first", "second", {"x": "first"}, {"w": "second"})


@pytest.mark.parametrize("count", [*range(11), 100])
def test_arguments_that_are_arrays_alone(count: int) -> None:
    """The commonest bodies are made once; they are those that the encoder makes."""
    arrays = tuple(np.full(2, number) for number in range(count))
    encoded = encode((arrays, {}), is_array)
    mixed = encode(((*arrays, 1), {}), is_array)
    assert encoded.arrays == list(arrays) == mixed.arrays
    args, kwargs = decode(encoded.body, arrays)
    assert type(args) is tuple
    assert list(map(id, args)) == list(map(id, arrays))
    assert kwargs == {}
    args, _ = decode(encoded.body, (*arrays, np.empty(3)))
    assert len(args) == count, "an array more changes nothing"
    assert encode((list(arrays), {}), is_array).body != encoded.body


def test_one_array_alone() -> None:
    x, other = np.ones(3), np.ones(2)
    encoded = encode(x, is_array)
    assert encoded.arrays == [x]
    assert decode(encoded.body, [x]) is x
    assert decode(encoded.body, [x, other]) is x
    with pytest.raises(CodecError, match="array 0 of 0"):
        decode(encoded.body, [])


def test_b46_the_same_array_is_sent_once_and_aliases_stay_aliases() -> None:
    """pytorch/pytorch#35766, ray-project/ray#58063: [x] * 1000 holds x's bytes once; equal arrays stay two."""
    x = np.ones(1 << 20)
    encoded = encode([x] * 1000, is_array)
    assert len(encoded.arrays) == 1
    assert len(encoded.body) < 10_000
    back = decode(encoded.body, encoded.arrays)
    assert len(back) == 1000
    assert all(item is back[0] for item in back)
    assert len(encode([x, x.copy(), x[:]], is_array).arrays) == 3


def test_b36_large_bytes_are_outside_msgpack() -> None:
    """msgpack/msgpack-python#532: msgpack's lengths are 32-bit; bulk data travel as arrays, without a copy."""
    large, small = bytes(BULK_BYTES), bytes(BULK_BYTES - 1)
    encoded = encode([large, small, np.ones(2), large], is_array)
    assert len(encoded.body) < BULK_BYTES + 100
    assert encoded.bulk == {0}
    assert encoded.arrays[0].dtype == np.uint8
    assert np.shares_memory(encoded.arrays[0], np.frombuffer(large, np.uint8))
    back = decode(encoded.body, encoded.arrays)
    assert (back[0], back[1], back[3]) == (large, small, large)
    assert type(back[0]) is bytes


def test_an_error_of_the_predicate_gets_a_note_of_the_place() -> None:
    def refuses(value: Any) -> bool:
        raise ArrayError("the tensor requires grad; detach it")

    with pytest.raises(ArrayError, match=r"^cannot send args\[1\]: .*requires grad"):
        encode(((1, np.ones(1)), {}), refuses, root=("args", "kwargs"))


# registered types -----------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Box:
    low: Any
    high: Any = None
    area: float = dataclasses.field(init=False, default=0.0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class Sparse:
    """What a sparse array is: a type of dense parts."""

    def __init__(self, indices: Any, data: Any, shape: tuple[int, ...]) -> None:
        self.indices, self.data, self.shape = indices, data, shape


for registered in (Point, Colour, Level, Box, Frozen):
    transport.register_type(registered)
transport.register_type(
    Sparse,
    "test.Sparse",
    lambda value: (value.indices, value.data, value.shape),
    lambda parts: Sparse(*parts),
)


def test_registered_types_of_every_default_kind() -> None:
    box = Box(Point(1, [2]), Colour.BLUE)
    box.area = 4.5
    value = [box, Frozen((Level.HIGH,)), Colour.RED, {Point(1, 2): Frozen(None)}]
    assert same(through(value), value)
    assert through(value)[0].area == 4.5


def test_a_sparse_array_is_a_registered_type_of_dense_parts() -> None:
    x, data = np.arange(3), np.ones(3)
    encoded = encode(Sparse(x, data, (9,)), is_array)
    back = decode(encoded.body, encoded.arrays)
    assert back.indices is x
    assert back.data is data
    assert back.shape == (9,)


def test_registering_wrongly_says_so() -> None:
    class Plain:
        pass

    with pytest.raises(LocalProtocolError, match="to_parts"):
        transport.register_type(Plain)
    with pytest.raises(LocalProtocolError, match="to_parts"):
        transport.register_type(Point, None, tuple)
    with pytest.raises(LocalProtocolError, match="already"):
        transport.register_type(Plain, "test.Sparse", vars, Plain)
    with pytest.raises(LocalProtocolError, match="as it is"):
        transport.register_type(dict, "x", list, dict)


def test_a_class_may_be_registered_again_when_its_module_is_loaded_again() -> None:
    def define() -> type:
        @transport.register_type
        @dataclasses.dataclass
        class Loaded:
            value: int

        return Loaded

    old, new = define(), define()
    assert type(through(new(3))) is new
    with pytest.raises(CodecError, match="register"):
        through(old(3))


def test_a_type_that_is_not_registered_at_the_receiver() -> None:
    body = msgpack.packb(msgpack.ExtType(Ext.REGISTERED, msgpack.packb(["their:Type", None])))
    with pytest.raises(CodecError, match=r"'their:Type'.*register_type"):
        decode(body, [])


def test_parts_that_do_not_make_the_type_are_a_codec_error() -> None:
    for name, parts in (("test.Sparse", 3), (f"{__name__}:Box", {"low": 1}), (f"{__name__}:Colour", "GREEN")):
        body = msgpack.packb(msgpack.ExtType(Ext.REGISTERED, msgpack.packb([name, parts])))
        with pytest.raises(CodecError, match="cannot be made here"):
            decode(body, [])


# what cannot be sent --------------------------------------------------------------------------------------------------


def wire(name: str, parts: Any) -> msgpack.ExtType:
    return msgpack.ExtType(Ext.REGISTERED, msgpack.packb([name, parts]))


ENDLESS = wire("range", msgpack.ExtType(Ext.TUPLE, msgpack.packb([0, 10**12, 1])))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bytearray", 1 << 30),
        ("bytearray", ENDLESS),
        ("deque", [ENDLESS, 0]),
        ("deque", [[1], "two"]),
        ("deque", [[1]]),
        ("OrderedDict", ENDLESS),
        ("OrderedDict", [ENDLESS]),
        ("OrderedDict", [msgpack.ExtType(Ext.TUPLE, msgpack.packb([1]))]),
        ("range", ENDLESS),
        ("range", [0, 1, 2]),
        ("range", msgpack.ExtType(Ext.TUPLE, msgpack.packb([0, True, 1]))),
        (f"{__name__}:Point", ENDLESS),
        (f"{__name__}:Colour", 1),
        (f"{__name__}:Box", ENDLESS),
    ],
)
@pytest.mark.timeout(20)
def test_parts_of_another_type_are_refused_before_anything_is_made_of_them(name: str, parts: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match=re.escape(f"a value of type {name!r} cannot be made here")):
            decode(msgpack.packb(wire(name, parts)), [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_scalar_of_text_is_text() -> None:
    body = msgpack.packb(msgpack.ExtType(Ext.SCALAR, msgpack.packb(["<U1", [1, 2]])))
    with pytest.raises(CodecError, match="text"):
        decode(body, [])


class Opaque:
    pass


class Unregistered(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "place", "remedy"),
    [
        (((), {"weights": Opaque()}), "kwargs['weights']", "register_type(Opaque, to_parts"),
        (((1, {"w": [0, Opaque()]}), {}), "args[1]['w'][1]", "register_type(Opaque, to_parts"),
        (((Box(Opaque()),), {}), "args[0].<parts of Box>['low']", "test_codec.Opaque"),
        ((({Opaque()},), {}), "args[0][0]", "register_type"),
        ((({3: Opaque()},), {}), "args[0][3]", "register_type"),
        ((({(1, Opaque()): 0},), {}), "args[0][a key of type tuple][1]", "register_type"),
        (((Unregistered(1),), {}), "args[0]", "register_type(Unregistered)"),
        ((((number for number in (1, 2)),), {}), "args[0]", "send a list of what it yields"),
        (((zip((1, 2), (3, 4), strict=True),), {}), "args[0]", "send a list of what it yields"),
        (((types,), {}), "args[0]", "send its name, and import it where it is needed"),
        (((fractions.Fraction(1, 2),), {}), "args[0]", "fractions.Fraction"),
        (((lambda: 0,), {}), "args[0]", "local_workers"),
        (((Opaque,), {}), "args[0]", "local_workers"),
        (((threading.Lock(),), {}), "args[0]", "_thread.lock"),
        (((np.dtype("O"),), {}), "args[0]", "Python objects"),
        (((range(3), collections.OrderedDict(a=Opaque())), {}), "args[1].<parts of OrderedDict>[0][1]", "register"),
    ],
)
def test_unsupported_values_name_type_place_and_remedy(value: Any, place: str, remedy: str) -> None:
    with pytest.raises(CodecError) as caught:
        encode(value, is_array, root=("args", "kwargs"))
    assert f"cannot send {place}, of type" in str(caught.value)
    assert remedy in str(caught.value)


def test_cycles_and_depth_are_clear_errors() -> None:
    loop: list[Any] = [1]
    loop.append({"again": (loop,)})
    with pytest.raises(CodecError, match=r"value\[1\]\['again'\]\[0\], of type builtins.list: it contains itself"):
        encode(loop, is_array)
    box = Box(None)
    box.low = [box]
    with pytest.raises(CodecError, match="contains itself"):
        encode(box, is_array)
    deep: Any = 0
    for _ in range(MAX_DEPTH):
        deep = (deep,)
    assert same(through(deep), deep)
    with pytest.raises(CodecError, match="nested deeper"):
        encode([deep], is_array)
    shared = [1]
    assert through([shared, shared]) == [[1], [1]]  # twice is no cycle


def test_a_value_that_unfolds_without_end_is_refused_soon() -> None:
    value: list[Any] = [0] * 100
    for _ in range(60):
        value = [value, value]
    with pytest.raises(CodecError, match="put the numbers into an array"):
        encode(value, is_array)


def test_a_skeleton_that_is_too_large_is_refused() -> None:
    with pytest.raises(CodecError, match="use an array"):
        encode("x" * (MAX_BODY_BYTES + 1), is_array)
    with pytest.raises(CodecError, match="are allowed"):
        decode(bytes(MAX_BODY_BYTES + 1), [])


# pickle ---------------------------------------------------------------------------------------------------------------


class Pickled:
    def __init__(self, content: Any) -> None:
        self.content = content


def test_pickled_values_go_to_own_children_only() -> None:
    scale = 3
    value = {"function": lambda x: x * scale, "class": Opaque, "object": Pickled([1, 2]), "plain": (1, 2)}
    encoded = encode(value, is_array, allow_pickle=True)
    back = decode(encoded.body, encoded.arrays, allow_pickle=True)
    assert back["function"](2) == 6
    assert back["class"] is Opaque
    assert back["object"].content == [1, 2]
    assert back["plain"] == (1, 2)
    with pytest.raises(CodecError, match="only from our own parent or children"):
        decode(encoded.body, encoded.arrays)


def test_unregistered_records_keep_their_arrays_beside_the_skeleton() -> None:
    @dataclasses.dataclass
    class Local:
        array: Any

    x = np.ones(3)
    encoded = encode([Local(x), Unregistered(x)], is_array, allow_pickle=True)  # type: ignore[arg-type]
    assert [id(array) for array in encoded.arrays] == [id(x)]
    local, record = decode(encoded.body, encoded.arrays, allow_pickle=True)
    assert local.array is x
    assert record == Unregistered(x)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="own parent"):
        decode(encoded.body, encoded.arrays)


def test_large_pickles_are_bulk_data_too() -> None:
    encoded = encode(Pickled(bytes(BULK_BYTES)), is_array, allow_pickle=True)
    assert encoded.bulk == {0}
    assert len(encoded.body) < 100
    assert len(decode(encoded.body, encoded.arrays, allow_pickle=True).content) == BULK_BYTES


def test_what_cannot_be_pickled_names_its_place() -> None:
    with pytest.raises(CodecError, match=r"value\[0\].*cannot be pickled") as caught:
        encode([threading.Lock()], is_array, allow_pickle=True)
    assert caught.value.__cause__ is not None


class Held:
    """Of a class that is pickled whole."""

    def __init__(self, **parts: object) -> None:
        self.__dict__.update(parts)

    def method(self) -> None: ...


A_LOCK = threading.Lock()


def uses_a_global(x: object) -> object:
    return (x, A_LOCK)


def by_value(function: Any) -> Any:
    """As of `__main__`: the function and what it refers to are pickled, not its name."""
    function.__module__ = "__main__"
    return function


def unpicklable() -> dict[str, tuple[Any, str]]:
    """Values, and what the error says of the part that keeps them from being pickled."""
    lock, opened, steps = threading.Lock(), socket.socket(), iter(range(3))
    opened.close()
    generator = (each for each in steps)
    stream = streamrt.Stream("host:0")
    kept = Held(deep={"a": [1, {"lock": lock}]})

    def closes_over(x: object) -> object:
        return (x, lock)

    def calls_another(x: object) -> object:
        return closes_over(x)

    def has_a_default(x: object, given: object = lock, *, named: object = None) -> object:
        return (x, given, named)

    def has_a_named_default(x: object, *, named: object = lock) -> object:
        return (x, named)

    name = "unpicklable.<locals>."
    return {
        "lock": (lambda: lock, f"{name}<lambda> cannot be pickled: lock in it is a _thread.lock (TypeError"),
        "socket": (lambda: opened, "opened in it is a socket.socket (TypeError"),
        "generator": (lambda: generator, "generator in it is a generator (TypeError"),
        "stream": (lambda: stream, "stream in it is a streamrt.stream.Stream (TypeError: <Stream host:0"),
        "event": (
            functools.partial(print, stream.record()),
            "print cannot be pickled: args[0] in it is a streamrt.",
        ),
        "function": (calls_another, f"{name}calls_another cannot be pickled: closes_over -> lock in it is a _thread"),
        "default": (has_a_default, "has_a_default cannot be pickled: given in it is a _thread.lock"),
        "named default": (has_a_named_default, "cannot be pickled: named in it is a _thread.lock"),
        "global": (by_value(uses_a_global), "uses_a_global cannot be pickled: A_LOCK in it is a _thread.lock"),
        "method": (kept.method, "Held.method cannot be pickled: self.deep['a'][1]['lock'] in it is a _thread.lock"),
        "partial": (functools.partial(closes_over, 1), "closes_over cannot be pickled: lock in it is a _thread.lock"),
        "keyword": (functools.partial(print, end={lock}), "print cannot be pickled: end{...} in it is a _thread.lock"),
        "named": (ByValue(closes_over, "stage one"), "stage one cannot be pickled: lock in it is a _thread.lock"),
        "object": (kept, "it cannot be pickled: .deep['a'][1]['lock'] in it is a _thread.lock"),
    }


@pytest.mark.parametrize("case", unpicklable())
def test_what_keeps_a_value_from_being_pickled_is_named(case: str) -> None:
    value, says = unpicklable()[case]
    with pytest.raises(CodecError, match=re.escape(says)) as caught:
        encode((value,), is_array, allow_pickle=True, root=("function",))
    said = str(caught.value)
    assert said.startswith("cannot send function, of type ")
    assert ("make it where the function runs, or send what it is made of as an argument" in said) is callable(value)


class Peevish:
    """Raises when it is shown or looked into."""

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise RuntimeError("is not shown")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"has no {name}")

    def __reduce__(self) -> Any:
        raise TypeError("is not pickled")

    def __call__(self) -> None: ...


def test_a_value_that_raises_when_it_is_looked_into_is_told_of_all_the_same() -> None:
    for value in (Peevish(), Held(by_key={Peevish(): Peevish()})):
        says = "it cannot be pickled nor looked into, which raises RuntimeError (TypeError: is not pickled)"
        with pytest.raises(CodecError, match=re.escape(says)):
            encode(value, is_array, allow_pickle=True)


def test_a_value_that_holds_itself_ends_the_search() -> None:
    ring = Held(lock=threading.Lock())
    ring.__dict__ = {"ring": ring, **ring.__dict__}
    with pytest.raises(CodecError, match=r"it cannot be pickled: \.lock in it is a _thread\.lock"):
        encode(ring, is_array, allow_pickle=True)
    deep: Any = threading.Lock()
    for _ in range(100):
        deep = Held(next=deep)
    with pytest.raises(CodecError, match=r"it cannot be pickled: (\.next){20} in it is"):
        encode(deep, is_array, allow_pickle=True)


def test_nothing_is_unpickled_before_it_is_allowed() -> None:
    """A body with the pickle of a call runs nothing."""
    ran: list[str] = []
    globals()["_tripwire"] = lambda: ran.append("code from the wire")
    attack = b"c" + __name__.encode() + b"\n_tripwire\n(tR."
    for code, payload in ((Ext.PICKLED, attack), (Ext.PICKLED_TYPE, [attack, {}])):
        body = msgpack.packb(msgpack.ExtType(code, msgpack.packb(payload)))
        with pytest.raises(CodecError):
            decode(body, [])
    assert ran == []
    decode(msgpack.packb(msgpack.ExtType(Ext.PICKLED, msgpack.packb(attack))), [], allow_pickle=True)
    assert ran == ["code from the wire"]


# hostile bodies -------------------------------------------------------------------------------------------------------


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_codec_error(body: bytes) -> None:
    try:
        decode(body, [])
    except CodecError:
        pass


@settings(max_examples=300, deadline=None)
@given(values, st.data())
def test_a_damaged_body_is_a_value_or_a_codec_error(value: Any, data: st.DataObject) -> None:
    body = bytearray(encode(value, is_array).body)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for damaged in (bytes(body), bytes(body[:cut])):
        try:
            decode(damaged, [])
        except CodecError:
            pass


def ext(code: int, *payload: Any) -> bytes:
    content = payload[0] if payload and isinstance(payload[0], bytes) else msgpack.packb(list(payload))
    packed: bytes = msgpack.packb(msgpack.ExtType(code, content))
    return packed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x01\x02",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        ext(99, b""),
        ext(Ext.ARRAY, (5).to_bytes(4, "little")),
        ext(Ext.ARRAY, b""),
        ext(Ext.ARRAY, (2**40).to_bytes(6, "little")),
        ext(Ext.BULK, (0).to_bytes(4, "little")),
        ext(Ext.TUPLE, msgpack.packb(3)),
        ext(Ext.SET, [1]),
        ext(Ext.SLICE, 1, 2),
        ext(Ext.COMPLEX, b"short"),
        ext(Ext.SCALAR, "<f8", b"short"),
        ext(Ext.SCALAR, "|O", bytes(8)),
        ext(Ext.SCALAR, "<f8"),
        ext(Ext.SCALAR, "V2000000000", b"x"),
        ext(Ext.DTYPE, msgpack.packb("O")),
        ext(Ext.DTYPE, msgpack.packb("os")),
        ext(Ext.DTYPE, msgpack.packb("finfo")),
        ext(Ext.DTYPE, msgpack.packb([["a", "O"]])),
        ext(Ext.DTYPE, msgpack.packb(7)),
        ext(Ext.REGISTERED, ["not a name"], 1),
        ext(Ext.REGISTERED, "deque", [[1], -5]),
        msgpack.packb({1: 2})[:-1],
        b"\x81\x90\x01",
    ],
)
def test_hostile_bodies(body: bytes) -> None:
    with pytest.raises(CodecError):
        decode(body, [])


def test_nesting_from_the_wire_is_bounded() -> None:
    body = msgpack.packb(1)
    for _ in range(MAX_DEPTH + 5):
        body = ext(Ext.TUPLE, b"\x91" + body)
    with pytest.raises(CodecError, match="nested"):
        decode(body, [])
    with pytest.raises(CodecError):
        decode(b"\x91" * 5000 + b"\x01", [])


def test_announced_counts_reserve_no_memory() -> None:
    """A megabyte of nested array headers, each announcing a million elements: gigabytes, if it were believed.

    msgpack before 1.2 believes it (seen with 1.1.2: 1.6 GB); later versions reserve little by themselves.
    """
    body = (b"\xdd" + (10**6).to_bytes(4, "big")) * 200 + bytes(10**6)
    small = (b"\xdc" + (900).to_bytes(2, "big")) * 300
    for hostile in (body, small):
        tracemalloc.start()
        with pytest.raises(CodecError):
            decode(hostile, [])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * len(hostile) + (8 << 20)


def test_encoded_says_nothing_of_its_arrays() -> None:
    assert encode(3, is_array) == Encoded(b"\x03", [], frozenset())
    assert default_parts(Opaque) is None
