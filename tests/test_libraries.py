"""The array libraries in host memory: what they say of an array, and what cannot travel."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from streamrt import arrays, libraries
from streamrt.device import CPU, Device
from streamrt.errors import ArrayError, UnavailableError
from streamrt.libraries import dlpack, dtypes, library, library_of, loaded
from streamrt.stream import Stream
from streamrt.testing import Latch, schedules, without

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy
ml_dtypes = pytest.importorskip("ml_dtypes")

KINDS = ("numpy", "torch", "jax")


def test_names_are_known_and_others_refused() -> None:
    assert [library(name).name for name in KINDS] == list(KINDS)
    with pytest.raises(ArrayError, match="'tensorflow' is no array library; use one of numpy, cupy"):
        library("tensorflow")


def test_a_library_that_is_not_installed_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        libraries._FILES, "numba", ("streamrt.libraries.numba_library", "NumbaLibrary", "no_such_module")
    )
    monkeypatch.delitem(libraries._libraries, "numba", raising=False)
    with pytest.raises(UnavailableError, match="numba is not installed here; install it"):
        library("numba")


def test_loaded_follows_what_the_process_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {one.name for one in loaded()} >= set(KINDS)
    assert loaded() is loaded()
    half = types.ModuleType("numba.cuda")
    half.__spec__ = types.SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "numba.cuda", half)
    assert "numba" not in {one.name for one in loaded()}  # another thread is importing it


def test_library_of() -> None:
    assert library_of(np.ones(2)) is library("numpy")
    assert library_of(torch.nn.Parameter(torch.ones(2))) is library("torch")
    assert library_of(jnp.ones(2)) is library("jax")
    for value in (3, "text", None, [np.ones(2)], np.float32(1), object(), np.dtype("f4")):
        assert library_of(value) is None


# describing

NUMPY_CASES = {
    "plain": (np.arange(6, dtype="f4").reshape(2, 3), (2, 3), None),
    "transposed": (np.arange(6, dtype="f4").reshape(2, 3).T, (3, 2), (4, 12)),
    "reversed": (np.arange(6, dtype="f4")[::-1], (6,), (-4,)),
    "broadcast": (np.broadcast_to(np.float32(1), (2, 3)), (2, 3), (0, 0)),
    "0-d": (np.array(1, "f4"), (), None),
    "empty": (np.empty((0, 3), "f4"), (0, 3), None),
    "empty, sliced": (np.empty((4, 6), "f4")[::2, 3:3], (2, 0), None),
    "odd stride of one": (np.lib.stride_tricks.as_strided(np.arange(5, dtype="f4"), (1, 5), (99, 4)), (1, 5), None),
    "sliced": (np.arange(8, dtype="f4")[::2], (4,), (8,)),
}


@pytest.mark.parametrize("case", NUMPY_CASES)
def test_describe_numpy(case: str) -> None:
    array, shape, strides = NUMPY_CASES[case]
    info = library("numpy").describe(array)
    assert (info.shape, info.strides, info.dtype, info.itemsize) == (shape, strides, "float32", 4)
    assert info.address == (array.ctypes.data if array.size else 0)
    assert info.nbytes == array.size * 4
    assert (info.library, info.device) == ("numpy", CPU)
    assert info.readonly == (case == "broadcast")


@pytest.mark.parametrize("dtype", dtypes.ITEMSIZES)
def test_dtype_names_are_the_same_everywhere(dtype: str) -> None:
    described = 0
    for kind in KINDS:
        if library(kind).holds(dtype, CPU):
            array = library(kind).empty((2, 3), dtype, CPU)
            info = library(kind).describe(array)
            size = dtypes.itemsize(dtype)
            assert (info.dtype, info.itemsize, info.nbytes) == (dtype, size, 6 * size)
            assert dtypes.canonical(array.dtype) == dtype
            described += 1
    assert described >= 1


def test_canonical_dtypes() -> None:
    assert dtypes.canonical("f4") == "float32"
    assert dtypes.canonical(float) == "float64"
    assert dtypes.canonical("bfloat16") == "bfloat16"
    assert dtypes.canonical(torch.bfloat16) == "bfloat16"
    assert dtypes.canonical(jnp.float8_e5m2) == "float8_e5m2"
    assert dtypes.canonical(np.longlong) == "int64"


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (">f4", "newbyteorder"),
        ([("a", "f4")], "send its fields"),
        (object, "Python objects"),
        ("M8[s]", "view\\('int64'\\)"),
        ("U3", "convert it with .astype"),
        ("g", "convert it with .astype"),
    ],
)
def test_a_dtype_that_cannot_travel_names_the_remedy(dtype: Any, remedy: str) -> None:
    with pytest.raises(ArrayError, match=remedy):
        arrays.describe(np.zeros(3, dtype))


def test_unknown_dtypes() -> None:
    with pytest.raises(ArrayError, match="complex32"):
        dtypes.canonical(torch.complex32)
    with pytest.raises(ArrayError, match="'float31' is no dtype"):
        dtypes.canonical("float31")


def test_without_ml_dtypes_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.delitem(dtypes._dtypes, "bfloat16", raising=False)
    assert not library("numpy").holds("bfloat16", CPU)
    with pytest.raises(ArrayError, match="install ml_dtypes"):
        arrays.convert(torch.ones(2, dtype=torch.bfloat16), "numpy")
    tensor = torch.arange(3).to(torch.bfloat16)  # what needs no NumPy dtype still works
    assert torch.equal(arrays.convert(tensor, "torch", copy=True), tensor)
    assert arrays.convert(tensor, "jax").astype("float32").tolist() == [0, 1, 2]


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(ArrayError, match="filled"):
        arrays.describe(np.ma.masked_array(np.arange(3), [0, 1, 0]))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, of what is refused here
def test_torch_tensors_that_cannot_travel() -> None:
    with pytest.raises(ArrayError, match=r"detach\(\) or detach=True"):
        arrays.describe(torch.ones(2, requires_grad=True))
    assert arrays.describe(torch.ones(2, requires_grad=True), detach=True).shape == (2,)
    with pytest.raises(ArrayError, match="dense parts"):
        arrays.describe(torch.eye(3).to_sparse())
    with pytest.raises(ArrayError, match="int_repr"):
        arrays.describe(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    with pytest.raises(ArrayError, match="cannot travel"):
        arrays.describe(torch.ones(2, device="meta"))


def test_torch_conjugate_and_negative_bits_are_worked_out() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (z.conj(), z.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        with pytest.raises(ArrayError, match="resolve"):
            arrays.describe(lazy)
        assert arrays.convert(lazy, "numpy").tolist() == lazy.tolist()
        assert arrays.convert(lazy, "jax").tolist() == lazy.tolist()
        assert arrays.describe(arrays.resolve(lazy)).shape == (2,)
        assert not arrays.resolve(lazy).is_neg()


def test_jax_values_that_cannot_travel() -> None:
    with pytest.raises(ArrayError, match="tracer"):
        jax.jit(arrays.describe)(jnp.ones(2))
    with pytest.raises(ArrayError, match="key_data"):
        arrays.describe(jax.random.key(0))
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(ArrayError, match="deleted or donated"):
        arrays.describe(gone)


def test_jax_layouts_of_imported_memory() -> None:
    source = arrays.empty((2, 3), "float32", "cpu")
    source[:] = np.arange(6).reshape(2, 3)
    shared = arrays.convert(source.T, "jax")
    info = arrays.describe(shared)
    assert (info.address, info.shape, info.strides) == (source.ctypes.data, (3, 2), (4, 12))
    assert info.readonly
    view = arrays.convert(shared, "numpy")
    assert (view.ctypes.data, view.strides) == (source.ctypes.data, (4, 12))
    assert np.array_equal(view, source.T)
    assert not view.flags.writeable


# memory and its holder


class Holder:
    """Something that keeps memory alive."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_holder_lives_as_long_as_any_alias(kind: str) -> None:
    memory = arrays.empty((4,), "float32", "host:0")
    holder = Holder()
    holder.memory = memory  # type: ignore[attr-defined]
    alive = weakref.ref(holder)
    array = arrays.wrap(memory.ctypes.data, 16, (2, 2), "float32", "host:0", holder, kind)
    memory[:] = [1, 2, 3, 4]
    assert np.asarray(array).tolist() == [[1, 2], [3, 4]]
    del holder
    alias = arrays.convert(array, "jax" if kind == "torch" else "numpy")
    del array
    gc.collect()
    assert alive() is not None
    assert np.asarray(alias).tolist() == [[1, 2], [3, 4]]
    del alias
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", KINDS)
def test_wrap_checks_the_size(kind: str) -> None:
    memory = arrays.empty((4,), "float32", "cpu")
    with pytest.raises(ArrayError, match=r"has 20 bytes, not 16"):
        arrays.wrap(memory.ctypes.data, 16, (5,), "float32", "cpu", memory, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_placement_follows_the_address(kind: str) -> None:
    array = arrays.empty((8, 8), "float32", "host:1", kind)
    assert arrays.device_of(array) == Device("host", 1)
    for other in KINDS:
        assert arrays.device_of(arrays.convert(array, other, copy=False)) == Device("host", 1)
    assert arrays.device_of(arrays.convert(array, "numpy")[2:, 3:]) == Device("host", 1)
    assert arrays.device_of(np.ones(3)) == CPU


@pytest.mark.parametrize("kind", KINDS)
def test_a_contiguous_copy_is_queued_and_stays_on_its_device(kind: str) -> None:
    source = arrays.empty((4, 4), "float32", "host:1")
    source[:] = 0
    sliced = arrays.convert(source.T, kind, copy=False)
    stream = Stream.borrow(0, "host:1")

    def fill() -> None:
        source[:] = np.arange(16).reshape(4, 4)

    with Latch(stream):
        stream.launch(fill)
        copy = library(kind).contiguous(sliced)
        assert not stream.query()
    stream.synchronize(60)
    info = arrays.describe(copy)
    assert (info.device, info.strides) == (Device("host", 1), None)
    assert np.array_equal(np.asarray(copy), np.arange(16).reshape(4, 4).T)
    assert library(kind).contiguous(copy) is copy


@pytest.mark.parametrize("kind", KINDS)
def test_join_waits_for_the_current_stream(kind: str) -> None:
    array = arrays.empty((4,), "float32", "host:0", kind)
    current, other = Stream.borrow(0, "host:0"), Stream("host:0")
    with Latch(current):
        library(kind).join(array, other)
        assert not other.query()
        fresh = Stream("host:0")
        with without("array.join"):
            library(kind).join(array, fresh)
        fresh.synchronize(60)
    other.synchronize(60)


def test_join_of_jax_results_on_the_cpu_is_queued() -> None:
    with schedules("lazy"):
        stream = Stream("host:0")
        library("jax").join(jnp.ones(3) + 1, stream)
        assert not stream.query()
        stream.synchronize(60)


# DLPack


@pytest.mark.parametrize("number", [-1, 0, 1, 2, 0x1234, True, 1.5, object()])
def test_b47_in_host_memory_the_stream_must_be_none(number: object) -> None:
    """pytorch/pytorch#101318, #67618, #150217, cupy/cupy#5970: numbers of streams mean nothing for host memory."""
    array = np.ones(3)
    exported = dlpack.Exported(library("numpy"), array, CPU)
    with pytest.raises(ArrayError, match="stream=None"):
        exported.__dlpack__(stream=number)
    assert np.from_dlpack(exported).ctypes.data == array.ctypes.data


@pytest.mark.parametrize("number", [0, -2, True, 1.5, object(), "1"])
def test_b47_what_is_no_stream_of_a_gpu(number: object) -> None:
    """pytorch/pytorch#101318: 0 is disallowed, since it does not tell the legacy from the per-thread stream."""
    for expected in (ValueError, TypeError):
        with pytest.raises(expected):
            dlpack.consumer_stream(number, Device("cuda", 0))


def test_b47_no_order_is_no_stream() -> None:
    """mitsuba-renderer/drjit#198: -1 asks for no order, and is not a handle."""
    assert dlpack.consumer_stream(-1, Device("cuda", 0)) is None


def test_an_export_makes_no_copies() -> None:
    exported = dlpack.Exported(library("numpy"), np.ones(3), CPU)
    for wrong in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="makes no copies"):
            exported.__dlpack__(**wrong)  # type: ignore[arg-type]


def test_over_4_gib_is_counted_in_64_bits() -> None:
    array = np.broadcast_to(np.zeros(1, np.float64), (1 << 20, 1 << 10))
    assert arrays.describe(array).nbytes == 1 << 33
    assert arrays.describe(torch.from_numpy(np.zeros(1)).expand(1 << 20, 1 << 10)).nbytes == 1 << 33
    assert dtypes.count((1 << 20, 1 << 20, 8)) == 1 << 43


# nesting


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Plain:
    x: Any
    lock: Any = None


class Slotted:
    __slots__ = ("__hidden", "never_set", "x")

    def __init__(self, x: Any, hidden: Any) -> None:
        self.x = x
        self.__hidden = hidden


class Boxed(list[Any]):
    """A list with something beside its items."""


def test_find_arrays_looks_everywhere_once_and_in_order() -> None:
    a, b, c, d, e, f, g, h = (np.full(1, number) for number in range(8))
    boxed = Boxed([f])
    boxed.beside = g  # type: ignore[attr-defined]
    value = {
        "list": [a, (b, {"x": c})],
        "dataclass": Plain(d, threading.Lock()),
        "slots": Slotted(e, boxed),
        "ordered": OrderedDict(h=deque([h, a])),
        "set": {1, "text", frozenset({2})},
        "others": (threading.Event, len, sys, 1.5, None, b"bytes", lambda: a),
    }
    value["self"] = value
    found = arrays.find_arrays(value)
    assert [int(array[0]) for array in found if array.shape == (1,)] == [0, 1, 2, 3, 5, 6, 4, 7]
    assert arrays.find_arrays(Pair(a, [b])) == [a, b]
    assert arrays.find_arrays(a) == [a]
    assert arrays.find_arrays(3) == []


def test_find_arrays_of_three_libraries_and_of_modules() -> None:
    tensor, value = torch.ones(2), jnp.ones(2)
    found = arrays.find_arrays([tensor, {"v": value}, np.ones(1)])
    assert [library_of(array).name for array in found] == ["torch", "jax", "numpy"]  # type: ignore[union-attr]
    layer = torch.nn.Linear(2, 3)
    assert {id(array) for array in arrays.find_arrays(layer)} == {id(layer.weight), id(layer.bias)}


def test_find_arrays_goes_deep() -> None:
    value: Any = np.ones(1)
    leaf = value
    for _ in range(100_000):
        value = [value]
    assert arrays.find_arrays(value)[0] is leaf


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_their_dense_parts() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    assert [tuple(part.shape) for part in arrays.find_arrays(dense.to_sparse())] == [(2, 2), (2,)]
    rows = arrays.find_arrays([dense.to_sparse_csr()])
    assert [part.tolist() for part in rows] == [[0, 1, 2], [1, 0], [2.0, 3.0]]
    assert len(arrays.find_arrays(dense.to_sparse_csc())) == 3


def test_registered_containers() -> None:
    class Closed:
        def __init__(self, inner: Any) -> None:
            self.give = lambda: inner

    class Derived(Closed):
        pass

    array = np.ones(1)
    assert arrays.find_arrays(Derived(array)) == []
    arrays.register_container(Closed, lambda value: [value.give()])
    try:
        assert arrays.find_arrays([Derived(array)])[0] is array
    finally:
        del libraries.nesting._registered[Closed]
