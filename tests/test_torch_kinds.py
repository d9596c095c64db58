"""What surely is a tensor, and that only that leaves a guard: everything else keeps an engine out of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_guards import WATCHDOG, current, default, opened, tensor  # noqa: E402

from streamrt.torch_graphs import GuardedModule, guard_engines  # noqa: E402
from streamrt.torch_kinds import SEVERAL, TENSOR, kinds_of  # noqa: E402
from streamrt.torch_ops import open_guards  # noqa: E402

pytest_plugins = ["torch_fixtures"]
pytestmark = pytest.mark.usefixtures("nothing_is_left")


@torch.fx.wrap
def single(x):  # type: ignore[no-untyped-def]  # what it gives, nobody says
    return x * 2


@torch.fx.wrap
def pair(x):  # type: ignore[no-untyped-def]
    return x * 2, x * 3


@torch.fx.wrap
def table(x: Any) -> dict[str, Any]:
    return {"a": x * 2, "b": x * 3}


@torch.fx.wrap
def one_and_nothing(x: Any) -> Any:
    return x * 2, None


@torch.fx.wrap
def counted(x: Any) -> tuple[torch.Tensor, int]:
    return x * 2, 7


@torch.fx.wrap
def said(x: Any) -> torch.Tensor:
    return x * 2


@torch.fx.wrap
def said_pair(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x * 3


ENGINES = (single, pair, table, one_and_nothing, counted, said, said_pair)


def guard(function: Callable[..., Any], *examples: Any) -> GuardedModule:
    traced = torch.fx.symbolic_trace(function)
    if examples:
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        FakeTensorProp(traced).propagate(*examples)
    return guard_engines(traced, lambda node: node.target in ENGINES)


NOT_GUARDED = {
    "what nobody knows": (lambda x: single(x), "nothing says that single gives a tensor"),
    "a tuple as a whole": (lambda x: pair(x), "nothing says that pair gives a tensor"),
    "a tuple as a whole, as was said": (lambda x: said_pair(x), "nothing says that said_pair"),
    "an element of what nobody knows": (lambda x: pair(x)[1] + 1, "nothing says that pair"),
    "a dict": (lambda x: table(x), "nothing says that table"),
    "an element of a dict": (lambda x: table(x)["a"] + 1, "nothing says that table"),
    "None": (lambda x: one_and_nothing(x)[1], "nothing says that one_and_nothing"),
    "None beside a tensor": (lambda x: ((y := one_and_nothing(x))[0].relu(), y[1]), "one_and_nothing"),
    "an int": (lambda x: x.relu() * counted(x)[1], "nothing says that counted"),
    "one behind another": (lambda x: single(single(x)), "nothing says that single"),
}


@pytest.mark.parametrize("name", ["cpu", "host:0"])
@pytest.mark.parametrize("examples", [False, True], ids=["unknown", "with examples"])
@pytest.mark.parametrize(("function", "reason"), NOT_GUARDED.values(), ids=NOT_GUARDED)
def test_what_may_be_no_tensor_does_not_leave_a_guard(function: Any, reason: str, examples: bool, name: str) -> None:
    device = opened(name)
    x = tensor(device, 1.0, 2.0)
    guarded = guard(function, *[x] * examples)
    if not examples:
        assert guarded.report.runs == ()
        assert any(reason in why for _, why in guarded.report.unguarded)
        assert reason in str(guarded.report)
    before = current(device) if device.has_streams else None
    for form in (guarded, guarded.folded):
        assert str(form(x)) == str(function(x))
    if before is not None:
        default(device).synchronize(WATCHDOG)
        assert (current(device), open_guards()) == (before, 0)


def test_the_report_says_what_an_example_is() -> None:
    guarded = guard(lambda x: table(x)["a"] + 1, torch.ones(2))
    ((name, reason),) = guarded.report.unguarded
    assert (name, reason) == ("table", "table gives a dict, and only tensors leave a guard")
    assert guarded.report.fences_after == 1


GUARDED = {
    "a function that says so": lambda x: said(said(x)),
    "elements of what says so": lambda x: (said_pair(x)[0], said(x), said_pair(x)[1]),
    "used as a tensor by a method": lambda x: single(x).relu(),
    "used as a tensor by a function": lambda x: torch.sin(single(x)),
    "used as a tensor by an operator": lambda x: torch.ops.aten.mul.Tensor(single(x), 2.0),
    "one of several, by an operator": lambda x: torch.ops.aten.cat.default([single(x), x]),
    "an element that is used as a tensor": lambda x: pair(x)[1].relu(),
    "an unknown one inside": lambda x: said(single(x)),
    "a size of it, and itself": lambda x: (y := single(x), y.relu(), y.shape[0])[1:],
}


@pytest.mark.parametrize("function", GUARDED.values(), ids=GUARDED)
def test_what_is_known_to_be_a_tensor_leaves_a_guard(function: Any) -> None:
    guarded = guard(function)
    assert guarded.report.unguarded == ()
    assert guarded.report.runs
    x = torch.tensor([1.0, 2.0])
    for form in (guarded, guarded.folded):
        assert str(form(x)) == str(function(x))


@pytest.mark.parametrize("function", [lambda x: single(x), lambda x: pair(x), lambda x: {"y": [pair(x), single(x)]}])
def test_example_values_guard_what_nobody_says(function: Any) -> None:
    x = torch.tensor([1.0, 2.0])
    assert guard(function).report.runs == ()
    guarded = guard(function, x)
    assert guarded.report.unguarded == ()
    assert str(guarded(x)) == str(function(x))


def test_an_operation_between_that_gives_no_tensor_ends_the_run() -> None:
    def function(x: Any) -> Any:
        y = said(x)
        where = operator.add(y.get_device(), 1)
        return where, said(y)

    guarded = guard(function)
    assert guarded.report.fences_after == 2
    x = torch.tensor([1.0, 2.0])
    assert str(guarded(x)) == str(function(x))


def kind_of(function: Callable[..., Any]) -> str | None:
    graph = torch.fx.symbolic_trace(function).graph
    (output,) = graph.find_nodes(op="output")
    kinds = kinds_of(graph)
    return kinds[output.args[0]]


KINDS = {
    "arithmetic": (lambda x: said(x) * 2 + x.shape[0], TENSOR),
    "arithmetic of what is not known": (lambda x: x * 2, None),
    "arithmetic with what is not known": (lambda x: said(x) + single(x), None),
    "a method": (lambda x: said(x).reshape(1, -1), TENSOR),
    "a method in place": (lambda x: said(x).add_(1), TENSOR),
    "a cast": (lambda x: said(x).half(), TENSOR),
    "a property": (lambda x: said(x).T, TENSOR),
    "parts": (lambda x: torch.split(said(x), 1), SEVERAL),
    "a part": (lambda x: torch.split(said(x), 1)[0], TENSOR),
    "some parts": (lambda x: torch.split(said(x), 1)[:1], None),
    "what depends on the arguments": (lambda x: said(x).max(), None),
    "a pool": (lambda x: torch.nn.functional.max_pool2d(said(x), 2, return_indices=True), SEVERAL),
    "a number": (lambda x: said(x).item(), None),
    "a device": (lambda x: said(x).get_device(), None),
    "a function that is annotated": (lambda x: torch.nn.functional.interpolate(x, 2), TENSOR),
    "an operator's packet": (lambda x: torch.ops.aten.relu(x), TENSOR),
    "an operator that gives several": (lambda x: torch.ops.aten.topk.default(x, 1), SEVERAL),
    "an operator that gives a number": (lambda x: torch.ops.aten.item.default(x), None),
    "a tuple of other things": (lambda x: counted(x), None),
}


@pytest.mark.parametrize(("function", "kind"), KINDS.values(), ids=KINDS)
def test_what_a_value_is(function: Any, kind: str | None) -> None:
    assert kind_of(function) == kind


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (torch.nn.Linear(2, 2), TENSOR),
        (torch.nn.LSTM(2, 2), None),
        (torch.fx.symbolic_trace(lambda x: torch.sin(x)), TENSOR),
        (torch.fx.symbolic_trace(lambda x: (torch.sin(x), torch.cos(x))), SEVERAL),
        (torch.fx.symbolic_trace(lambda x: (torch.sin(x), x.shape)), None),
    ],
)
def test_what_a_module_gives(module: Any, kind: str | None) -> None:
    root = torch.nn.Module()
    root.inner = module
    graph = torch.fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    whole = torch.fx.GraphModule(root, graph)
    kinds = kinds_of(whole.graph)
    assert [kinds[node] for node in whole.graph.find_nodes(op="call_module", target="inner")] == [kind]
