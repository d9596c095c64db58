"""What inductor makes of a guard that is written by hand: calls that stay inside, kernels that read their stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_guards import COMPILER, QUIET, default, opened, tensor, values  # noqa: E402

from bench import engines  # noqa: E402
from bench.engines import scale  # noqa: E402
from streamrt import torch_inductor  # noqa: E402
from streamrt.torch_inductor import reads_the_stream_each_time  # noqa: E402
from streamrt.torch_ops import enter_compute_stream, exit_compute_stream  # noqa: E402

pytest_plugins = ["torch_fixtures"]
pytestmark = [
    *QUIET,
    pytest.mark.usefixtures("fresh_torch", "nothing_is_left"),
    pytest.mark.slow,
]
compiles = pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler on the CPU")


def two_guards(x: Any) -> Any:
    """Two guards that have nothing to do with each other but the input."""
    token = enter_compute_stream([x])
    y = scale(x, 2.0)
    exit_compute_stream([y], token)
    token = enter_compute_stream([x])
    z = scale(x, 3.0)
    exit_compute_stream([z], token)
    return y, z


# a GPU's rules, with the CPU in its place


@pytest.fixture
def _as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_inductor, "_GENERATED", ("cpu",))


def refused(function: Callable[..., Any], **options: Any) -> str:
    with pytest.raises(Exception, match="guarded_backend") as caught:
        torch.compile(function, backend="inductor", **options)(torch.ones(7))
    assert "UnavailableError" in str(caught.value)
    return str(caught.value)


@compiles
@pytest.mark.usefixtures("_as_gpu")
def test_where_each_kernel_reads_the_current_stream_a_guard_is_taken() -> None:
    x = torch.ones(7)
    for ours, theirs in zip(torch.compile(two_guards)(x), two_guards(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("_as_gpu")
@pytest.mark.parametrize(
    ("option", "reason"), [("triton.cudagraphs", "CUDA graphs capture"), ("cpp_wrapper", "only its Python wrapper")]
)
def test_where_the_stream_is_read_once_a_guard_is_refused(option: str, reason: str) -> None:
    assert reason in refused(two_guards, options={option: True})


@pytest.mark.usefixtures("_as_gpu")
def test_an_entry_alone_is_refused_too() -> None:
    def entry_alone(x: Any) -> Any:
        token = enter_compute_stream([x])
        y = scale(x, 2.0).sin()
        torch._dynamo.graph_break()
        exit_compute_stream([y], token)
        return y

    refused(entry_alone, options={"triton.cudagraphs": True})


@pytest.mark.usefixtures("_as_gpu")
def test_a_torch_that_reads_the_stream_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_inductor, "reads_the_stream_each_time", lambda _: False)
    assert f"torch {torch.__version__} does not read" in refused(two_guards)


class Wrapper:
    """One that writes what it is told."""

    each_time: bool

    def write_get_raw_stream(self: Any, index: int, graph: str) -> str:
        self.writeline(f"stream{index} = get_raw_stream({index})")
        return f"stream{index}"

    @classmethod
    def _generate_kernel_call_helper(
        cls, sheet: Any, kernel: str, arguments: Any, *, device: Any, triton: bool
    ) -> None:
        read = functools.partial(cls.write_get_raw_stream, sheet) if cls.each_time else sheet.write_get_raw_stream
        sheet.writeline(f"{kernel}.{kernel}({read(device.index, '')})")


@pytest.mark.parametrize("each_time", [True, False])
def test_how_a_wrapper_reads_the_stream_is_tried_out(each_time: bool) -> None:
    assert reads_the_stream_each_time(type("Kind", (Wrapper,), {"each_time": each_time})) is each_time


def test_the_wrapper_of_this_torch_reads_it_each_time_and_the_one_in_cpp_does_not() -> None:
    from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    assert reads_the_stream_each_time(PythonWrapperCodegen)
    assert not reads_the_stream_each_time(CppWrapperGpu)
    assert not reads_the_stream_each_time(SimpleNamespace)


# what stays inside


def engines_first(nodes: list[Any]) -> list[Any]:
    """An order that the data allows: engines as early as possible, then entries, and exits last."""

    def rank(node: Any) -> int:
        name = str(getattr(node.node, "op_overload", ""))
        return next((number for number, word in enumerate(("scale", "enter", "exit")) if word in name), 1)

    made: set[str] = set()
    all_made = {out.get_name() for node in nodes for out in node.get_outputs()}
    left, ordered = list(nodes), []
    while left:
        ready = [node for node in left if all(one.name in made or one.name not in all_made for one in needs(node))]
        first = min(ready, key=rank)
        left.remove(first)
        ordered.append(first)
        made.update(out.get_name() for out in first.get_outputs())
    return ordered


def needs(node: Any) -> list[Any]:
    return list(node.unmet_dependencies)


@compiles
@pytest.mark.parametrize("held", [True, False])
def test_no_order_of_inductors_takes_an_engine_out_of_its_guard(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not held:
        monkeypatch.setattr(torch_inductor, "_hold", lambda *_: None)
    device = opened("host:0")
    x = tensor(device, 1.0, 5.0)
    options = {"_post_fusion_custom_pass": engines_first, "reorder_for_peak_memory": False, "fx_graph_cache": False}
    y, z = torch.compile(two_guards, backend="inductor", options=options)(x)
    default(device).synchronize()
    assert (values(y), values(z)) == ([2.0, 10.0], [3.0, 15.0])
    assert engines.engine_calls == [not held] * 2  # on a stream of its own outside, and fenced by itself
