"""Arrays in host memory: making, moving and converting them, for every pair of NumPy, torch and JAX."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from streamrt import arrays
from streamrt.device import CPU, Device
from streamrt.errors import ArrayError, PlacementError
from streamrt.guard import current_stream, using
from streamrt.libraries import library
from streamrt.stream import Stream
from streamrt.testing import Latch, assert_no_host_sync, schedules, without

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
ml_dtypes = pytest.importorskip("ml_dtypes")

KINDS = ("numpy", "torch", "jax")
PAIRS = list(itertools.permutations(KINDS, 2))


def elements(array: Any) -> np.ndarray[Any, Any]:
    return library(arrays.describe(array).library).as_numpy(array)


def same(one: Any, other: Any) -> bool:
    left, right = elements(one), elements(other)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


# making


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "host:0", "host:1"])
def test_empty_and_array(kind: str, device: str) -> None:
    made = arrays.empty((2, 3), "int32", device, kind)
    assert (str(arrays.device_of(made)), arrays.describe(made).strides) == (device, None)
    assert arrays.describe(made).address % 64 == 0
    copy = arrays.array([[1, 2], [3, 4]], device, "float32", kind)
    assert elements(copy).tolist() == [[1, 2], [3, 4]]
    assert arrays.describe(copy).library == kind
    assert str(arrays.device_of(copy)) == device
    again = arrays.array(copy, device, "int32", "numpy")
    assert (again.dtype, again.tolist()) == (np.int32, [[1, 2], [3, 4]])
    assert again.ctypes.data != arrays.describe(copy).address


def test_defaults() -> None:
    assert isinstance(arrays.empty(3, device="host:0"), np.ndarray)
    assert arrays.empty(3, device="host:0").dtype == np.float32
    assert isinstance(arrays.array(torch.ones(2), "cpu"), np.ndarray)
    with pytest.raises(ArrayError, match="negative"):
        arrays.empty((2, -1), device="cpu")
    with pytest.raises(ArrayError, match="CuPy cannot hold memory of host:0"):
        pytest.importorskip("cupy")
        arrays.empty(2, device="host:0", arrays="cupy")
    with pytest.raises(ArrayError, match="jax_enable_x64"):
        arrays.empty(2, "float64", "host:0", "jax")


def test_what_is_no_array_is_refused() -> None:
    assert not arrays.is_array([1])
    for function in (arrays.describe, arrays.device_of, arrays.host_bytes):
        with pytest.raises(ArrayError, match="list is no array"):
            function([1])


@pytest.mark.parametrize("kind", KINDS)
def test_host_bytes_there_and_back(kind: str) -> None:
    source = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert arrays.host_bytes(arrays.convert(source.T, kind)) == source.T.tobytes()
    back = arrays.from_host_bytes(source.tobytes(), (2, 3), "float32", kind)
    assert same(back, source)
    assert arrays.describe(arrays.from_host_bytes(b"", (0, 2), "bfloat16", kind)).shape == (0, 2)
    with pytest.raises(ArrayError, match="3 bytes are no array"):
        arrays.from_host_bytes(b"abc", (1,), "float32", kind)


# converting


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("device", ["cpu", "host:1"])
def test_conversion_shares_memory(source: str, target: str, device: str) -> None:
    array = arrays.array(np.arange(6, dtype=np.float32).reshape(2, 3), device, None, source)
    shared = arrays.convert(array, target, copy=False)
    assert arrays.describe(shared).address == arrays.describe(array).address
    assert same(shared, array)
    assert str(arrays.device_of(shared)) == device
    copied = arrays.convert(array, target, copy=True)
    assert arrays.describe(copied).address != arrays.describe(array).address
    assert same(copied, array)
    assert str(arrays.device_of(copied)) == device


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "float16", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_b48_dtypes_arrive_bit_by_bit(source: str, target: str, dtype: str) -> None:
    """tensorflow/tensorflow#51598, jax-ml/jax#17784: bool refused, bfloat16 a segmentation fault."""
    array = arrays.array(np.arange(12).reshape(3, 4) % 3, "host:0", dtype, source)
    converted = arrays.convert(array, target)
    info = arrays.describe(converted)
    assert (info.library, info.dtype) == (target, dtype)
    assert same(converted, array)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_b48_jax_does_not_cut_64_bits_in_silence(source: str, dtype: str) -> None:
    """jax-ml/jax#17784 and its like: with x64 off the import was an int32 copy, with no word."""
    array = arrays.array([1, 2], "cpu", dtype, source)
    with pytest.raises(ArrayError, match="jax_enable_x64"):
        arrays.convert(array, "jax")
    with jax.enable_x64(True):
        assert same(arrays.convert(array, "jax"), array)


LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "transposed": lambda a: a.T,
    "reversed": lambda a: a[:, ::-1],
    "both reversed": lambda a: a[::-1, ::-1],
    "sliced": lambda a: a[::2, 1::2],
    "broadcast": lambda a: np.broadcast_to(a[:1], (3, 8)),
    "0-d": lambda a: a[1, 2, ...],
    "empty": lambda a: a[2:2],
    "empty, reversed": lambda a: a[2:2, ::-1],
    "unaligned": lambda a: a.reshape(-1)[1:],
    "one long, odd stride": lambda a: np.lib.stride_tricks.as_strided(a, (1, 5), (99 * 4, 4)),
    "off its own size": lambda a: np.frombuffer(a.reshape(-1).view("u1")[1:29].data, "f4"),
    "read-only": lambda a: np.frombuffer(a.tobytes(), "f4"),
    "swapped axes": lambda a: a.reshape(2, 3, 4).transpose(2, 0, 1),
}


@pytest.mark.parametrize(("source", "target"), [*PAIRS, ("numpy", "numpy")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b48_layouts_arrive_equal(source: str, target: str, layout: str) -> None:
    """jax-ml/jax#17784, pytorch/pytorch#83158, #188023, cupy/cupy#8801, NVIDIA/warp#1619."""
    expected = LAYOUTS[layout](np.arange(24, dtype=np.float32).reshape(3, 8))
    try:
        array = expected if source == "numpy" else arrays.convert(expected, source)
    except ArrayError:
        pytest.fail(f"{source} was given no copy of a layout that it cannot share")
    converted = arrays.convert(array, target)
    assert np.array_equal(elements(converted), expected)
    assert elements(converted).shape == expected.shape


@pytest.mark.parametrize("target", ["torch", "jax"])
@pytest.mark.parametrize("layout", ["reversed", "off its own size"])
def test_what_cannot_be_shared_is_refused_with_copy_false(target: str, layout: str) -> None:
    array = LAYOUTS[layout](np.arange(24, dtype=np.float32).reshape(3, 8))
    with pytest.raises(ArrayError, match="leave out copy=False"):
        arrays.convert(array, target, copy=False)
    with pytest.raises(ArrayError, match="copy='no': True copies always"):
        arrays.convert(array, target, copy="no")  # type: ignore[arg-type]


def test_b48_negative_strides_do_not_abort_the_process() -> None:
    """pytorch/pytorch#188023: a negative stride reached torch's importer, and the process was aborted."""
    program = textwrap.dedent("""
        import numpy as np, torch
        from streamrt import arrays
        a = np.arange(6, dtype=np.float32).reshape(2, 3)
        for reversed_array in (a[::-1], a[:, ::-1], a[::-1, ::-1], arrays.array(a, "host:0")[:, ::-1]):
            assert arrays.convert(reversed_array, "torch").tolist() == reversed_array.tolist()
            try:
                arrays.convert(reversed_array, "torch", copy=False)
            except TypeError:
                continue
            raise SystemExit("shared")
        print("alive")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_the_case_before_can_fail() -> None:
    """What the test above guards against: torch's own importer aborts the process on such an array."""
    program = "import numpy as np, torch; torch.from_dlpack(np.arange(3.0)[::-1])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0


@hypothesis.given(
    hnp.arrays(
        dtype=st.sampled_from(["?", "i1", "u2", "i4", "f2", "f4", "c8"]),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    st.data(),
)
def test_any_view_of_any_array_arrives_equal_in_each_library(base: np.ndarray[Any, Any], data: st.DataObject) -> None:
    view = base
    if base.ndim:
        view = np.asarray(base[data.draw(hnp.basic_indices(base.shape))])
        view = view.transpose(data.draw(st.permutations(range(view.ndim)))) if view.ndim else view
    chain = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    array: Any = view
    for kind in chain:
        array = arrays.convert(array, kind)
        assert arrays.describe(array).library == kind
    result = elements(array)
    assert (result.dtype, result.shape) == (view.dtype, view.shape)
    assert result.tobytes() == view.tobytes()


def test_immutable_memory_is_not_handed_out_as_writable() -> None:
    value = jax.numpy.arange(4.0)
    view = arrays.convert(value, "numpy")
    assert (view.flags.writeable, view.ctypes.data) == (False, value.unsafe_buffer_pointer())
    tensor = arrays.convert(value, "torch")
    tensor += 1
    assert value.tolist() == [0, 1, 2, 3]
    readonly = np.arange(4.0)
    readonly.flags.writeable = False
    arrays.convert(readonly, "torch").add_(1)
    assert readonly.tolist() == [0, 1, 2, 3]
    assert arrays.convert(readonly, "torch", copy=False).data_ptr() == readonly.ctypes.data
    assert np.shares_memory(arrays.convert(readonly, "numpy"), readonly)


def test_requires_grad() -> None:
    tensor = torch.ones(3, requires_grad=True)
    with pytest.raises(ArrayError, match="detach=True"):
        arrays.convert(tensor, "numpy")
    assert arrays.convert(tensor, "numpy", detach=True).tolist() == [1, 1, 1]
    assert arrays.convert(tensor, "torch") is tensor
    assert not arrays.convert(tensor, "torch", detach=True).requires_grad
    with pytest.raises(ArrayError, match="detach=True"):
        arrays.to(tensor, "host:0")
    assert arrays.to(tensor, "host:0", detach=True).tolist() == [1, 1, 1]


# moving


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("source", "target"), [("cpu", "host:0"), ("host:0", "host:1"), ("host:1", "cpu"), ("host:0", "cpu")]
)
def test_to_keeps_the_kind_and_the_bytes(kind: str, source: str, target: str) -> None:
    array = arrays.array(np.arange(6, dtype=np.float32).reshape(2, 3), source, "bfloat16", kind)
    moved = arrays.to(array, target)
    assert (arrays.describe(moved).library, str(arrays.device_of(moved))) == (kind, target)
    assert same(moved, array)
    assert arrays.to(moved, target) is moved
    assert arrays.describe(moved).address != arrays.describe(array).address


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"off its own size", "read-only"}))
def test_to_of_other_layouts(layout: str) -> None:
    plain = np.arange(24, dtype=np.float32).reshape(3, 8)
    expected = LAYOUTS[layout](plain)
    there = arrays.to(expected, "host:0")
    assert np.array_equal(there, expected)
    assert np.array_equal(arrays.to(there, "cpu"), expected)
    assert np.array_equal(arrays.to(LAYOUTS[layout](arrays.array(plain, "host:0")), "host:1"), expected)


def test_to_an_unknown_device() -> None:
    with pytest.raises(PlacementError, match="is no device"):
        arrays.to(np.ones(2), "gpu:0")
    with pytest.raises(PlacementError, match="there is no host:9999"):
        arrays.to(np.ones(2), "host:9999")


def test_the_source_in_plain_memory_may_be_changed_at_once() -> None:
    source = np.ones(4, np.float32)
    stream = Stream("host:0")
    with using(stream), Latch(stream), assert_no_host_sync():
        moved = arrays.to(source, "host:0")
        source[:] = 7
    stream.synchronize(60)
    assert moved.tolist() == [1, 1, 1, 1]


def move_behind_a_latch(closed: str) -> list[float]:
    """Fills and moves host:0 -> host:1, then overwrites the source, with one of the two streams held up."""
    here, there = Stream("host:0"), Stream("host:1")
    source = arrays.empty((64,), "float32", "host:0")
    source[:] = 0

    def fill(value: float) -> None:
        source[:] = value

    with using(here, there):
        with Latch(here if closed == "here" else there), assert_no_host_sync():
            here.launch(fill, 3.0)
            moved = arrays.to(source, "host:1")
            here.launch(fill, 5.0)
            done = there.record()
            if closed == "here" and done.query():
                return sorted(set(moved.tolist()))
        done.synchronize(60)
        here.synchronize(60)
        return sorted(set(moved.tolist()))


@pytest.mark.parametrize("closed", ["here", "there"])
def test_a_move_is_ordered_on_both_current_streams(closed: str) -> None:
    assert move_behind_a_latch(closed) == [3.0]


def read_before_reuse(*, ordered: bool) -> list[float]:
    """What a stream that is held up reads of memory that a move of another array then gets.

    The memory was freed on that stream, in whose order it may be used again: by the move, too, which copies elsewhere.
    """
    here, there = Stream("host:0"), Stream("host:1")
    source = arrays.array(np.full(64, 3.0), "host:0")
    old, out = arrays.array(np.full(64, 7.0), "host:1"), arrays.array(np.zeros(64), "host:1")
    for device in ("host:0", "host:1"):
        current_stream(device).synchronize(60)
    address = arrays.describe(old).address
    with using(here, there):
        with Latch(there):
            with assert_no_host_sync(), nullcontext() if ordered else without("arrays.enter"):
                there.copy(arrays.describe(out).address, address, out.nbytes)
                del old
                moved = arrays.to(source, "host:1")
            assert arrays.describe(moved).address == address, "the memory is not used again: nothing to see"
            if not ordered:
                here.synchronize(60)
        there.synchronize(60)
    assert moved.tolist() == [3.0] * 64
    return sorted(set(out.tolist()))


def test_a_move_waits_for_what_its_memory_was_used_for() -> None:
    assert read_before_reuse(ordered=True) == [7.0]
    assert read_before_reuse(ordered=False) == [3.0]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_move_without_its_exit_edge_shows_other_bytes(ordered: bool) -> None:
    with schedules("lazy"), nullcontext() if ordered else without("arrays.exit"):
        here, there = Stream("host:0"), Stream("host:1")
        source = arrays.array(np.full(64, 3.0), "host:0")
        current_stream("host:0").synchronize()
        with using(here, there):
            moved = arrays.to(source, "host:1")
            there.record().require()
            assert (moved.tolist() == [3.0] * 64) is ordered


def test_to_the_cpu_runs_what_the_array_needs() -> None:
    with schedules("lazy"):
        stream = Stream("host:0")
        array = arrays.empty((4,), "float32", "host:0")

        def fill() -> None:
            array[:] = 2

        with using(stream):
            stream.launch(fill)
            plain = arrays.to(array, "cpu")
        assert plain.tolist() == [2, 2, 2, 2]
        assert arrays.device_of(plain) == CPU


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_queued_arrays_are_queued(kind: str) -> None:
    """A copy that conversion makes on a virtual device is ordered like a kernel: it reads what was written."""
    array = arrays.empty((4, 4), "float32", "host:0")
    array[:] = 0

    def fill() -> None:
        array[:] = 9

    stream = Stream("host:0")
    with using(stream):
        with Latch(stream), assert_no_host_sync():
            stream.launch(fill)
            copy = arrays.convert(array[:, ::-1], kind, copy=True)
        stream.synchronize(60)
    assert np.asarray(copy).tolist() == [[9.0] * 4] * 4
    assert arrays.device_of(copy) == Device("host", 0)
