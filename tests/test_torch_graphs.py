"""The pass that guards runs of engines: what it finds, that nothing escapes, and that compilers keep it.

The engines are those of `bench/engines.py`.  The GPU's own cases are in the last section.
"""

from __future__ import annotations

import copy
import gc
import io
import operator
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch_guards import (  # noqa: E402
    BACKENDS,
    COMPILER,
    ON_ONE,
    PLAIN,
    QUIET,
    WATCHDOG,
    assign,
    current,
    default,
    opened,
    targets,
    tensor,
    values,
    waits,
)

from bench import engines  # noqa: E402
from bench.engines import is_engine, scale, shift  # noqa: E402
from streamrt import torch_ops  # noqa: E402
from streamrt.device import Device  # noqa: E402
from streamrt.errors import ArrayError, LifetimeError  # noqa: E402
from streamrt.testing import Latch, assert_no_host_sync, without  # noqa: E402
from streamrt.torch_graphs import GuardedModule, guard_engines, guarded_backend  # noqa: E402
from streamrt.torch_ops import enter_compute_stream, exit_compute_stream, guarded_run, open_guards, unwinding  # noqa: E402

pytest_plugins = ["torch_fixtures"]
pytestmark = [
    *QUIET,
    pytest.mark.usefixtures("fresh_torch", "nothing_is_left"),
]


@pytest.fixture(params=ON_ONE)
def device(request: pytest.FixtureRequest) -> Device:
    """A device with the kernels of these tests loaded: the first launch of one blocks the host behind a latch."""
    found = opened(request.param)
    x = tensor(found, 1.0, 1.0)
    model(x)
    assign(x, 1.0)
    default(found).synchronize(WATCHDOG)
    engines.engine_calls.clear()
    return found


def model(x: Any) -> Any:
    """Eight engines and seven graph breaks."""
    for number in range(8):
        x = scale(x, 2.0)
        if number < 7:
            x = shift(x, 1.0)
    return x


def expected(x: float) -> float:
    for number in range(8):
        x = 2 * x + (number < 7)
    return x


def guard(function: Callable[..., Any]) -> GuardedModule:
    return guard_engines(torch.fx.symbolic_trace(function), is_engine)


def done(device: Device) -> None:
    if device.has_streams:
        default(device).synchronize(WATCHDOG)


class Counted:
    """How many guards are entered through the dispatcher, by whoever calls ``streamrt::enter_compute_stream``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operators = 0
        usual = torch_ops.enter_compute_stream

        def counting(inputs: Any) -> Any:
            self.operators += 1
            return usual(inputs)

        monkeypatch.setattr(torch_ops, "enter_compute_stream", counting)


def test_run_as_it_is_a_guard_does_not_go_through_the_dispatcher(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where somebody looks at operators, it does: a mode, a transform, autograd, a subclass."""

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        pass

    x, guarded, counted = tensor(device, 3.0), guard(model), Counted(monkeypatch)
    with torch.no_grad():
        assert values(guarded(x)) == [expected(3.0)]
    assert (counted.operators, engines.engine_calls) == (0, [False] * 8)
    with Mode():
        guarded(x)
    assert counted.operators == 1
    torch.vmap(guarded)(x.unsqueeze(0))
    assert counted.operators == 2
    guarded(torch.ones(2, requires_grad=True))
    assert counted.operators == 3
    guarded(x.as_subclass(Own))
    assert counted.operators == 4
    with torch.no_grad():
        guarded(torch.nn.Parameter(x))
    assert counted.operators == 4
    done(device)


def test_a_graph_that_is_edited_and_its_hooks_are_what_runs() -> None:
    guarded = guard(lambda x: scale(scale(x, 2.0), 3.0))
    x = torch.ones(2)
    assert guarded(x)[0] == 6
    node = next(node for node in guarded.graph_module.graph.nodes if is_engine(node))
    node.args = (node.args[0], 5.0)
    guarded.graph_module.recompile()
    assert guarded(x)[0] == 15
    seen: list[Any] = []
    handle = guarded.graph_module.register_forward_hook(lambda module, args, output: seen.append(output))
    assert guarded(x) is seen[0]
    handle.remove()
    guarded(x)
    assert len(seen) == 1


class Weighted(torch.nn.Module):
    """Two engines between which lies a parameter of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return scale(scale(x, 2.0) * self.weight, 3.0)


class Doubled(torch.nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight * 2


def test_a_guarded_graph_runs_with_the_state_that_its_module_has_at_the_call() -> None:
    """Also where that is not in the dictionaries any more that it had at the first call."""
    guarded = guard(Weighted())
    x, inner = torch.ones(2), guarded.graph_module
    with torch.no_grad():
        assert guarded(x)[0] == 6
        given = {"graph_module.weight": torch.full((2,), 5.0)}
        assert torch.func.functional_call(guarded, given, x)[0] == 30
        torch.nn.utils.parametrize.register_parametrization(inner, "weight", Doubled())
        assert guarded(x)[0] == inner(x)[0] == 12
        torch.nn.utils.parametrize.remove_parametrizations(inner, "weight")
        inner._parameters = {"weight": torch.nn.Parameter(torch.full((2,), 7.0))}  # as replicas and shards have it
        assert guarded(x)[0] == inner(x)[0] == 42


def test_what_runs_beside_a_graph_runs_with_it() -> None:
    """Hooks of all modules, another forward, and what `torch.nn.Module.compile` made."""
    guarded = guard(lambda x: scale(scale(x, 2.0), 3.0))
    x, inner = torch.ones(2), guarded.graph_module
    seen: list[Any] = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append(module))
    guarded(x)
    handle.remove()
    assert inner in seen
    inner.compile(backend=lambda module, example: lambda *args: (torch.zeros(2),))
    assert guarded(x)[0] == inner(x)[0] == 0
    inner._compiled_call_impl = None
    assert guarded(x)[0] == 6
    inner.forward = lambda x: x
    assert guarded(x) is x


def test_only_tensors_leave_a_guard_that_was_entered_directly() -> None:
    x = tensor(opened("host:0"), 1.0)
    with unwinding():
        token = torch_ops.enter_directly([x])
        with pytest.raises(ArrayError, match="a int leaves a guard"):
            torch_ops.exit_directly([1], token)
    assert open_guards() == 0
    with pytest.raises(ArrayError, match="a int leaves a guard"):
        torch_ops.exit_directly([1], None)


@pytest.mark.parametrize("outer_first", [True, False])
def test_the_exit_of_a_guard_that_was_left_with_one_around_it_does_nothing(outer_first: bool) -> None:
    x = tensor(opened("host:0"), 1.0)
    outer = torch_ops.enter_directly([x])
    inner = torch_ops.enter_directly([x])
    for token in (outer, inner) if outer_first else (inner, outer):
        assert torch_ops.exit_directly([x], token)[0] is x
    assert open_guards() == 0
    with pytest.raises(LifetimeError, match="once each"):
        torch_ops.exit_directly([x], inner)


def test_a_guard_that_was_entered_directly_belongs_to_its_thread() -> None:
    x = tensor(opened("host:0"), 1.0)
    token = torch_ops.enter_directly([x])
    with ThreadPoolExecutor(1) as pool, pytest.raises(LifetimeError, match="on this thread"):
        pool.submit(torch_ops.exit_directly, [x], token).result()
    assert torch_ops.exit_directly([x], token)[0] is x
    with pytest.raises(LifetimeError, match="once each"):
        torch_ops.exit_directly([x], token)


# what is found


def test_eight_engines_with_seven_breaks_have_one_guard() -> None:
    guarded = guard(model)
    called = targets(guarded.graph_module)
    assert [called[0], *called[-2:]] == ["enter_compute_stream", "exit_compute_stream", "getitem"]
    assert ["scale" in name for name in called[1:-2]] == [True, False] * 7 + [True]
    report = guarded.report
    assert (report.fences_before, report.fences_after) == (8, 1)
    (run,) = report.runs
    assert (len(run.engines), run.between, run.inputs, run.ended_by) == (8, 7, ("x",), "the graph's output")
    assert str(report).startswith("8 engine calls: 8 pairs of fences, now 1")


def test_the_graph_is_the_one_of_the_field() -> None:
    """pytorch/TensorRT#3977: pack what goes in, enter, the engine, exit, unpack."""
    graph = guard(lambda x: scale(x, 2.0)).graph_module.graph
    x, enter, engine, leave, unpacked, output = graph.nodes
    assert enter.args == ([x],)
    assert engine.args[0] is x
    assert leave.args == ([engine], enter)
    assert (unpacked.target, unpacked.args) == (operator.getitem, (leave, 0))
    assert output.args == (unpacked,)


def test_the_module_that_was_given_is_not_changed() -> None:
    traced = torch.fx.symbolic_trace(model)
    before = traced.code
    guard_engines(traced, is_engine)
    assert traced.code == before


def test_an_operator_that_writes_ends_the_run() -> None:
    traced = torch.fx.symbolic_trace(two(lambda y, x: operator.add(x, y)))
    (node,) = (node for node in traced.graph.nodes if node.target is operator.add)
    node.target = operator.iadd
    traced.recompile()
    guarded = guard_engines(traced, is_engine)
    assert guarded.report.runs[0].ended_by == "iadd writes to what may lie outside of the run"


@torch.fx.wrap
def unknown(x: Any) -> Any:
    return x + 1


class Net(torch.nn.Module):  # type: ignore[misc]
    """Engines around a module."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Any) -> Any:
        return scale(self.between(scale(x, 2.0)), 3.0)


def two(between: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Two engines with something between, which is given the first one's result and the input."""

    def function(x: Any) -> Any:
        y = scale(x, 2.0)
        return scale(between(y, x), 3.0), y

    return function


INSIDE = {
    "arithmetic": lambda y, x: (y + x).relu() * 2,
    "a function": lambda y, x: torch.nn.functional.gelu(torch.cat([y, x])),
    "an operator": lambda y, x: torch.ops.aten.mul.Tensor(y, x),
    "a size": lambda y, x: y.reshape(y.size(0) * 1, 1) + y.shape[0],
    "a tuple": lambda y, x: torch.split(y, 1)[0],
    "writing to what the run made": lambda y, x: shift(y, 1.0).add_(1),
    "writing to an engine's result": lambda y, x: y.mul_(2),
    "a property": lambda y, x: y.reshape(1, -1).T.flatten(),
    "the type of another": lambda y, x: y.to(x.dtype),
    "moving where the device stays": lambda y, x: y.to(torch.float64).to(torch.float32),
}
OUTSIDE = {
    "a number": (lambda y, x: y * y.sum().item(), "item reads on the host"),
    "a list": (lambda y, x: y * y.tolist()[0], "tolist reads on the host"),
    "to the host": (lambda y, x: y.cpu(), "cpu reads on the host"),
    "to the host, by name": (lambda y, x: y.to("cpu"), "to reads on the host"),
    "what is not zero": (lambda y, x: y[y.nonzero()].flatten(), "nonzero reads on the host"),
    "writing to an input": (lambda y, x: x.add_(y), "add_ writes to what may lie outside"),
    "writing to a view of an input": (lambda y, x: x.view(-1).add_(y), "add_ writes to what may lie outside"),
    "writing to a part": (lambda y, x: (x.__setitem__(0, 7.0), y)[1], "setitem__ writes to what may lie outside"),
    "writing by an argument": (lambda y, x: torch.add(y, 1, out=x), "add writes to what may lie outside"),
    "what nobody knows": (lambda y, x: unknown(y), "unknown is not known"),
}


@pytest.mark.parametrize("between", INSIDE.values(), ids=INSIDE)
def test_what_lies_between_engines_is_in_the_run(between: Any) -> None:
    function = two(between)
    guarded = guard(function)
    assert [len(run.engines) for run in guarded.report.runs] == [2]
    x = torch.tensor([1.0, 2.0])
    assert all(map(torch.equal, guarded(x.clone()), function(x.clone())))


@pytest.mark.parametrize(("between", "reason"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_could_escape_ends_the_run(between: Any, reason: str) -> None:
    function = two(between)
    guarded = guard(function)
    assert [len(run.engines) for run in guarded.report.runs] == [1, 1]
    assert reason in guarded.report.runs[0].ended_by
    x = torch.tensor([1.0, 2.0])
    ours, theirs = x.clone(), x.clone()
    assert all(map(torch.equal, guarded(ours), function(theirs)))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("between", "runs"),
    [
        (torch.nn.Linear(2, 2), 1),
        (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), 1),
        (torch.nn.ReLU(inplace=True), 2),
        (torch.nn.BatchNorm1d(2), 2),
        (torch.nn.BatchNorm1d(2).eval(), 1),
        (torch.fx.symbolic_trace(lambda x: x.relu() + 1), 1),
        (torch.fx.symbolic_trace(lambda x: x + x.sum().item()), 2),
        (torch.fx.symbolic_trace(lambda x: x.add_(1)), 2),
    ],
)
def test_modules_between_engines(between: Any, runs: int) -> None:
    net = Net(between)
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda module, _: True
    guarded = guard_engines(torch.fx.GraphModule(net, tracer.trace(net)), is_engine)
    assert len(guarded.report.runs) == runs
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    with torch.no_grad():
        assert torch.equal(guarded(x), net(x))


def test_a_size_is_told_again_outside_of_the_run() -> None:
    def function(x: Any) -> Any:
        y = scale(x, 2.0)
        length = y.size(0) * 2
        z = scale(y + length, 3.0)
        return z.reshape(1, length // 2), length

    guarded = guard(function)
    assert len(guarded.report.runs) == 1
    x = torch.ones(3)
    assert torch.equal(guarded(x)[0], function(x)[0])
    assert guarded(x)[1] == 6


def test_a_tuple_that_leaves_is_unpacked_in_the_run() -> None:
    def function(x: Any) -> Any:
        first, second = torch.split(scale(x, 2.0), 2)
        return scale(first, 3.0), second, first

    guarded = guard(function)
    assert [len(run.engines) for run in guarded.report.runs] == [2]
    x = torch.arange(4.0)
    assert all(map(torch.equal, guarded(x), function(x)))


def test_a_tuple_that_is_used_as_a_whole_is_unpacked_too() -> None:
    reports = []

    def backend(module: Any, _: Any) -> Any:
        (split,) = (node for node in module.graph.nodes if node.name.startswith("split"))
        (result,) = module.graph.find_nodes(op="output")
        result.args = ((result.args[0][0], split),)
        module.recompile()
        guarded = guard_engines(module, is_engine)
        reports.append(guarded.report)
        return lambda *args: [(one := guarded(*args))[0], *one[1]]

    def function(x: Any) -> Any:
        parts = torch.split(scale(x, 2.0), 2)
        return scale(parts[0], 3.0), parts[0], parts[1]

    x = torch.arange(4.0)
    assert all(map(torch.equal, torch.compile(function, backend=backend)(x), function(x)))
    assert len(reports[0].runs) == 1


def test_constants_are_there_before_the_run() -> None:
    class Constant(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.ones(2))

        def forward(self, x: Any) -> Any:
            return scale(scale(x, 2.0) + self.bias, 3.0)

    net = Constant()
    guarded = guard(net)
    (run,) = guarded.report.runs
    assert run.inputs == ("x", "bias")
    net.bias.fill_(5.0)
    assert values(guarded(torch.ones(2))) == [21.0, 21.0]


class Factor:
    """An engine's own object, as TensorRT's engines are beside their operator."""

    value = 2.0


def run_with(x: Any, factor: Factor) -> torch.Tensor:
    return scale(x, factor.value)


def test_an_engine_may_take_an_object_of_the_module() -> None:
    root = torch.nn.Module()
    root.factor = Factor()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for _ in range(2):
        x = graph.call_function(run_with, (x, graph.get_attr("factor")))
    graph.output(x)
    module = torch.fx.GraphModule(root, graph)
    guarded = guard_engines(module, lambda node: node.target is run_with)
    (run,) = guarded.report.runs
    assert run.inputs == ("x",)
    for call in (guarded, guarded.folded, torch.compile(guarded, backend="aot_eager")):
        assert values(call(torch.ones(1))) == [4.0]


def test_without_engines_nothing_changes() -> None:
    guarded = guard(lambda x: x + 1)
    assert (guarded.report.fences_before, guarded.report.fences_after, guarded.report.runs) == (0, 0, ())
    assert values(guarded(torch.ones(1))) == [2.0]


def test_engines_may_be_modules() -> None:
    class TorchTensorRTModule(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> torch.Tensor:
            return scale(x, 2.0)

    class Whole(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = TorchTensorRTModule(), TorchTensorRTModule()

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x).relu())

    net = Whole()
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda module, _: True
    guarded = guard_engines(torch.fx.GraphModule(net, tracer.trace(net)))
    assert [run.engines for run in guarded.report.runs] == [("first", "second")]
    assert values(guarded(torch.ones(1))) == [4.0]


@pytest.fixture(scope="module")
def writing() -> Any:
    """An engine that writes to what it is given."""
    with torch.library._scoped_library("writing", "DEF") as library:
        library.define("engine(Tensor x, Tensor(a!) out) -> ()")
        library.impl("engine", lambda x, out: out.copy_(x * 2) and None, "CompositeExplicitAutograd")
        torch.library.register_fake("writing::engine", lambda x, out: None, lib=library)
        yield torch.ops.writing.engine.default


def test_an_engine_that_writes_to_the_outside_keeps_its_own_fences(writing: Any) -> None:
    def function(x: Any, out: Any) -> Any:
        y = scale(x, 2.0)
        writing(y, out)
        z = scale(out, 3.0)
        made = torch.empty_like(z)
        writing(z, made)
        return scale(made, 1.0)

    guarded = guard_engines(torch.fx.symbolic_trace(function), lambda n: is_engine(n) or n.target is writing)
    assert [len(run.engines) for run in guarded.report.runs] == [1, 3]
    ((name, reason),) = guarded.report.unguarded
    assert name.startswith("engine")
    assert "writes to what lies outside" in reason
    assert (guarded.report.fences_before, guarded.report.fences_after) == (5, 3)
    assert "unguarded: engine" in str(guarded.report)
    assert values(guarded(torch.ones(1), torch.zeros(1))) == [24.0]


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(ArrayError, match="symbolic_trace"):
        guard_engines(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_guard_without_its_exit_is_refused() -> None:
    with pytest.raises(LifetimeError, match="0 exits"):
        guard(lambda x: enter_compute_stream([x]))


# order and values


def test_a_guarded_graph_is_fenced_once_and_ordered(device: Device) -> None:
    guarded = guard(model)
    x = tensor(device, 0.0, 0.0)
    guarded(x)
    engines.engine_calls.clear()
    with Latch(default(device)), waits() as seen, assert_no_host_sync():
        assign(x, 3.0)
        y = guarded(x)
    done(device)
    assert values(y) == [expected(3.0)] * 2
    assert seen == ["guard.enter", "guard.exit"]
    assert engines.engine_calls == [False] * 8


def test_on_a_stream_of_the_users_it_adds_no_fence(device: Device) -> None:
    import streamrt

    x, guarded = tensor(device, 1.0), guard(model)
    with streamrt.using(streamrt.Stream(device)) as users, waits() as seen:
        y = guarded(x)
        users.streams[0].synchronize(WATCHDOG)
    assert values(y) == [expected(1.0)]
    assert seen == []


def test_a_captured_graph_of_the_runtime_holds_the_engines(device: Device) -> None:
    import streamrt

    x, guarded = tensor(device, 1.0, 1.0), guard(model)
    with streamrt.compute_stream(x):
        graph = streamrt.capture(lambda x: guarded(x), x)
        engines.engine_calls.clear()
        for value in (2.0, 3.0):
            graph.replay(tensor(device, value, value))
            current(device).synchronize(WATCHDOG)
            assert values(graph.result) == [expected(value)] * 2
    assert engines.engine_calls == []


def compiled(function: Any, backend: str, how: str) -> Any:
    """The function with guards, compiled in one of three ways."""
    if how == "guarded module":
        return torch.compile(guard(function), backend=backend, fullgraph=True)
    made = guarded_backend(backend, is_engine=is_engine, compile_between=how == "backend, between too")
    return torch.compile(function, backend=made, fullgraph=True)


WAYS = ["guarded module", "backend", "backend, between too"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", WAYS)
def test_compiled_graphs_are_fenced_once_and_ordered(device: Device, backend: str, how: str) -> None:
    call = compiled(model, backend, how)
    x = tensor(device, 1.0, 2.0)
    call(x)
    done(device)
    engines.engine_calls.clear()
    with Latch(default(device)), waits() as seen:
        assign(x, 3.0)
        y = call(x)
    done(device)
    assert values(y) == [expected(3.0)] * 2
    assert seen == ["guard.enter", "guard.exit"]
    assert engines.engine_calls == [False] * 8


@pytest.mark.parametrize("between", [False, True])
def test_what_lies_between_is_compiled_if_asked_for(between: bool) -> None:
    graphs = []

    def keep(module: Any, _: Any) -> Any:
        graphs.append([name for name in targets(module) if name != "getitem"])
        return module.forward

    def function(x: Any) -> Any:
        for _ in range(12):  # more than what is kept of one function
            x = scale(torch.sin(x), 2.0)
        return torch.cos(x)

    call = torch.compile(function, backend=guarded_backend(keep, is_engine=is_engine, compile_between=between))
    x = torch.ones(2)
    for _ in range(2):
        torch.testing.assert_close(call(x), function(x))
    assert graphs == [["sin", "guarded_run", "cos"], *[["sin"]] * (11 if between else 0)]


@pytest.mark.parametrize("asked", [{}, {"mode": "reduce-overhead"}, {"options": {"level": 3}}], ids=str)
def test_mode_and_options_go_to_the_inner_backend(asked: dict[str, Any]) -> None:
    seen = []

    def keep(module: Any, _: Any, **options: Any) -> Any:
        seen.append(options)
        return module.forward

    def function(x: Any) -> Any:
        return scale(torch.sin(scale(x, 2.0)), 2.0)

    made = guarded_backend(keep, is_engine=is_engine, compile_between=True)
    x = torch.ones(2)
    torch.testing.assert_close(torch.compile(function, backend=made, **asked)(x), function(x))
    assert seen == [asked] * 2  # of the graph, and of what lies between


def test_inductor_takes_them_as_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `torch.compile` alone; what lies between is no CUDA graph inside that of the whole."""
    from torch._inductor import compile_fx

    seen = []
    usual = compile_fx.compile_fx

    def keep(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("config_patches"):  # not where it calls itself
            seen.append(kwargs["config_patches"])
        return usual(*args, **kwargs)

    def function(x: Any) -> Any:
        return scale(torch.sin(scale(x, 2.0)), 2.0)

    monkeypatch.setattr(compile_fx, "compile_fx", keep)
    x = torch.ones(2)
    own = {"max_autotune": False, "epilogue_fusion": False}
    for asked, known in (
        ({"options": own}, own),
        ({"mode": "max-autotune"}, torch._inductor.list_mode_options("max-autotune")),
    ):
        torch.compiler.reset()
        seen.clear()
        made = guarded_backend(is_engine=is_engine, compile_between=True)
        torch.testing.assert_close(torch.compile(function, backend=made, **asked)(x), function(x))
        assert made.reset.__self__.config == known  # type: ignore[attr-defined]  # for torch.compiler.reset()
        assert seen == [known, {key: value for key, value in known.items() if key != "triton.cudagraphs"}]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"options": {"nonsense": 1}}, "Unexpected optimization option nonsense"),
        ({"options": {"max_autotune": "yes"}}, "Unexpected type of attr max_autotune"),
        ({"mode": "nonsense"}, "Unrecognized mode=nonsense"),
    ],
    ids=str,
)
def test_what_inductor_does_not_know_is_refused_as_ever(asked: dict[str, Any], says: str) -> None:
    made = guarded_backend(is_engine=is_engine)
    with pytest.raises(Exception, match=says):
        torch.compile(lambda x: scale(x, 2.0), backend=made, **asked)(torch.ones(2))


def test_compiled_code_that_falls_back_to_python_keeps_its_guard(device: Device) -> None:
    def function(x: Any) -> Any:
        y = shift(x, 1.0)
        torch._dynamo.graph_break()
        token = enter_compute_stream([y])
        torch._dynamo.graph_break()
        z = scale(y, 2.0)
        print(end="")
        (z,) = exit_compute_stream([z], token)
        return z

    call = torch.compile(function, backend="eager")
    for value in (1.0, 2.0):
        with waits() as seen:
            y = call(tensor(device, value))
        done(device)
        assert values(y) == [2 * value + 2]
        assert seen == ["guard.enter", "guard.exit"]


def mixed(x: Any, n: int = 2) -> Any:
    """What compilers make kernels of, before, between and after engines, with sizes and views."""
    a = torch.sin(x) * n
    y = scale(a, 2.0)
    b = torch.cos(y) + a
    first, second = torch.split(b, 1)
    z = scale(first, 3.0)
    return torch.exp(z) + y.shape[0], second, b.t()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", WAYS)
def test_compiled_values_are_those_of_eager(backend: str, how: str) -> None:
    call = compiled(mixed, backend, how)
    for rows, columns in ((2, 3), (2, 5)):  # the second one makes shapes dynamic
        x = torch.arange(float(rows * columns)).reshape(rows, columns)
        for ours, theirs in zip(call(x), mixed(x), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_what_torch_notes_beside_a_graph_is_kept() -> None:
    """Of that it makes its guards, for arguments that are one tensor, say."""
    kept = []

    def keep(module: Any, _: Any) -> Any:
        kept.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, _)

    def function(x: Any, y: Any) -> Any:
        z = scale(x, 2.0)
        return scale(z + y, 3.0)

    call = torch.compile(function, backend=guarded_backend(keep, is_engine=is_engine))
    one, other = torch.ones(2), torch.full((2,), 5.0)
    for x, y in ((one, one), (one, other), (other, one)):
        assert torch.equal(call(x, y), function(x, y))
    assert all(hasattr(node, "_dynamo_source") for node in kept[0].graph.find_nodes(op="placeholder"))
    assert hasattr(kept[0], "_param_name_to_source")
    assert "dynamo_compile_id" in kept[0].meta


def test_a_run_that_says_all_of_itself_has_one_name_for_good() -> None:
    """So caches of compiled code find it in the next process; another factor, a module or a function has another."""

    def names(function: Callable[..., Any]) -> list[str]:
        folded = guard(function).folded
        return [node.args[1] for node in folded.graph.nodes if node.target is guarded_run]

    def one(factor: float) -> Callable[..., Any]:
        return lambda x: scale(torch.sin(scale(x, factor)), 3.0)

    assert names(one(2.0)) == names(one(2.0))
    assert names(one(2.0)) != names(one(2.5))
    net = Net(torch.nn.Linear(2, 2))
    assert names(net) != names(net)


IN_A_PROCESS = """
import torch
from bench.engines import is_engine, scale
from streamrt.torch_graphs import guard_engines

guarded = guard_engines(torch.fx.symbolic_trace(lambda x: scale(scale(x, 2.0) + 1, 3.0).cos()), is_engine)
with torch.no_grad():
    x = torch.ones(2)
    torch.testing.assert_close(torch.compile(guarded, backend="inductor")(x), guarded(x))
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="takes long; HYPOTHESIS_PROFILE=thorough"
)
def test_the_next_process_finds_what_was_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0"}
    found = [
        subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS], env=environment, check=True, timeout=120, capture_output=True
        ).stdout.split()[-1]
        for _ in range(2)
    ]
    assert found == [b"0", b"1"]


def test_two_modules_may_share_a_run_and_go_one_after_the_other() -> None:
    def make_one() -> GuardedModule:
        return guard(lambda x: scale(scale(x, 2.0), 7.0))

    one, other = make_one(), make_one()
    x = torch.ones(2)
    calls = [torch.compile(module, backend="eager", fullgraph=True) for module in (one, other)]
    assert [values(call(x)) for call in calls] == [[14.0, 14.0]] * 2
    del other, calls[1]
    gc.collect()
    assert values(calls[0](x)) == [14.0, 14.0]


def test_numbers_of_the_host_may_go_into_a_run() -> None:
    def function(x: Any, factor: float, length: int, keep: bool = True) -> Any:
        y = scale(x, 2.0) * factor + length
        return scale(y.sum(0, keepdim=keep), 3.0)

    guarded = guard(function)
    x = torch.ones(2)
    call = torch.compile(guarded, backend="aot_eager", dynamic=True)
    for factor, length in ((0.5, 3), (0.25, 7)):
        for keep in (True, False):
            assert torch.equal(call(x, factor, length, keep), function(x, factor, length, keep))
    run = guarded.folded.guarded_runs[0].plain
    (name,) = (node.args[1] for node in guarded.folded.graph.nodes if node.target is guarded_run)
    assert torch.equal(guarded_run([x, 0.5, 3, True], name)[0], run(x, 0.5, 3, True)[0])


def test_the_operator_takes_a_whole_run_out_of_the_compilers_hands() -> None:
    """A compiler that moves each engine as far up as the data allows.

    It moves engines out of a guard that is written by hand; a run that is one operator it cannot take apart.
    """
    moved = []

    def upwards(module: Any, _: Any) -> Any:
        for node in list(module.graph.nodes):
            if is_engine(node):
                last = max(node.all_input_nodes, key=list(module.graph.nodes).index)
                if last.next is not node:
                    moved.append(node.name)
                    last.append(node)
        module.recompile()
        return module.forward

    def written(x: Any) -> Any:
        token = enter_compute_stream([x])
        (y,) = exit_compute_stream([scale(x, 2.0)], token)
        return y

    device = opened("host:0")
    x = tensor(device, 1.0)
    torch.compile(written, backend=upwards)(x)
    assert len(moved) == 1
    assert engines.engine_calls == [True], "the engine ran outside of its guard"
    engines.engine_calls.clear()
    moved.clear()
    for call in (
        torch.compile(guard(written), backend=upwards),
        torch.compile(lambda x: scale(x, 2.0), backend=guarded_backend(upwards, is_engine=is_engine)),
    ):
        assert values(call(x)) == [2.0]
    assert moved == []
    assert engines.engine_calls == [False, False]


def test_guards_by_hand_become_runs_of_the_backend(device: Device) -> None:
    def function(x: Any) -> Any:
        token = enter_compute_stream([x])
        y = scale(x, 2.0)
        size = y.shape[0]
        exit_compute_stream([y], token)
        return scale(y.reshape(size), 3.0)

    graphs = []

    def keep(module: Any, _: Any) -> Any:
        graphs.append(targets(module))
        return module.forward

    x = tensor(device, 1.0, 2.0)
    with waits() as seen:
        y = torch.compile(function, backend=guarded_backend(keep, is_engine=is_engine))(x)
    done(device)
    assert values(y) == [6.0, 12.0]
    assert seen == ["guard.enter", "guard.exit"] * 2
    assert [name for name in graphs[0] if "guard" in name or "compute" in name] == ["guarded_run", "guarded_run"]


# without its edges it fails


@pytest.mark.parametrize("how", ["as it is", *WAYS])
@pytest.mark.parametrize("edge", ["guard.enter", "guard.exit", None])
def test_each_edge_is_needed(device: Device, how: str, edge: str | None) -> None:
    _each_edge(device, guard(held) if how == "as it is" else compiled(held, "aot_eager", how), edge)


def held(x: Any) -> Any:
    return shift(scale(shift(latched(shift(x, 1.0)), 1.0), 2.0), 1.0)


_doors: list[Latch | None] = []


@torch.library.custom_op("guardtests::latched", mutates_args=())
def latched(x: torch.Tensor) -> torch.Tensor:
    """An engine that closes a door on its stream first, if the test has asked for one."""
    if _doors:
        import streamrt

        _doors[0] = Latch(current(streamrt.device_of(x)))
    return scale(x, 3.0)


@latched.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_ENGINES = is_engine


def is_engine(node: Any) -> bool:  # type: ignore[no-redef]
    return _ENGINES(node) or node.target in (latched, torch.ops.guardtests.latched.default)


def _each_edge(device: Device, call: Any, edge: str | None, answer: Callable[[float], float] | None = None) -> None:
    """Runs it with a door before it, or in its first engine, and one edge less."""
    answer = answer or (lambda x: ((x + 1) * 3 + 1) * 2 + 1)
    x, seen = tensor(device, 1.0, 1.0), tensor(device, -1.0, -1.0)
    for value in (1.0, 2.0):  # twice: what one call leaves in freed memory is not the answer of the last one
        assign(x, value)
        seen_copy(seen, call(x))
        done(device)
    try:
        if edge == "guard.enter":
            with without(edge), Latch(default(device)):
                assign(x, 5.0)
                seen_copy(seen, call(x))
        elif edge == "guard.exit":
            assign(x, 5.0)
            _doors.append(None)
            with without(edge):
                seen_copy(seen, call(x))
            done(device)  # it does not wait for the door
            early = values(seen)
            _doors[0].open()  # type: ignore[union-attr]
            current_sides_done(device)
            assert early != [answer(5.0)] * 2
            return
        else:
            _doors.append(None)
            with Latch(default(device)):
                assign(x, 5.0)
                seen_copy(seen, call(x))
            _doors[0].open()  # type: ignore[union-attr]
        done(device)
        assert (values(seen) == [answer(5.0)] * 2) is (edge is None)
    finally:
        if _doors and _doors[0] is not None:
            _doors[0].open()
        _doors.clear()


def current_sides_done(device: Device) -> None:
    """Waits for the thread's side stream, so that nothing of one test runs on in the next."""
    from streamrt.compute import compute_stream

    with compute_stream(device=device) as side:
        assert side is not None
        side.synchronize(WATCHDOG)


def seen_copy(seen: Any, result: Any) -> None:
    """Enqueues a copy of a result on the default stream."""
    import streamrt

    if seen.is_cuda:
        seen.copy_(result)
    else:
        source, target = result.numpy(), seen.numpy()
        default(streamrt.device_of(seen)).launch(target.__setitem__, slice(None), source)


# errors and threads


@torch.library.custom_op("guardtests::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    """An engine that fails."""
    raise KeyError("the engine failed")


@failing.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def breaks(x: Any) -> Any:
    return scale(failing(scale(x, 2.0)), 3.0)


@pytest.mark.parametrize("how", ["as it is", "guarded module", "backend"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_that_raises_leaves_the_thread_as_it_was(device: Device, how: str, backend: str) -> None:
    call = guard(breaks) if how == "as it is" else compiled(breaks, backend, how)

    def fail() -> None:
        before = current(device)
        with pytest.raises(KeyError, match="the engine failed"):
            call(tensor(device, 1.0))
        assert current(device) == before
        assert open_guards() == 0
        done(device)

    fail()
    fail()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fail).result(WATCHDOG)


@pytest.mark.parametrize("backend", PLAIN)
def test_a_guard_by_hand_in_compiled_code_is_unwound(device: Device, backend: str) -> None:
    def function(x: Any, y: Any) -> Any:
        token = enter_compute_stream([x])
        z = failing(x)
        y.add_(1)  # written from outside: no run
        exit_compute_stream([z], token)
        return y, z

    before = current(device)
    call = torch.compile(function, backend=guarded_backend(backend, is_engine=is_engine))
    with pytest.raises(KeyError, match="the engine failed"):
        call(tensor(device, 1.0), tensor(device, 2.0))
    assert current(device) == before
    assert open_guards() == 0


class Exported(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return breaks(x)


def without_unwinding(how: str, x: Any) -> Any:
    """A guarded graph that is called with nothing around it."""
    if how == "graph_module":
        return guard(breaks).graph_module
    module = torch.export.export(Exported(), (x,)).module()
    return torch.export.export(guard_engines(module, is_engine), (x,)).module()


@pytest.mark.parametrize("how", ["graph_module", "exported"])
def test_a_graph_that_raises_leaves_the_side_stream_to_the_next_operator_or_to_unwinding(
    device: Device, how: str
) -> None:
    x, before = tensor(device, 1.0), current(device)
    call = without_unwinding(how, x)
    with pytest.raises(KeyError, match="the engine failed"), unwinding():
        call(x)
    assert (current(device), open_guards()) == (before, 0)
    for _ in range(2):
        with pytest.raises(KeyError, match="the engine failed"):
            call(x)
        assert open_guards() == 1
    with waits() as seen:
        y = guard(model)(x)
    assert (current(device), open_guards()) == (before, 0)
    assert seen == ["guard.exit", "guard.enter", "guard.exit"]
    done(device)
    assert values(y) == [expected(1.0)]


def test_threads_share_a_guarded_module(device: Device) -> None:
    guarded = guard(model)
    together = threading.Barrier(4)

    def many(x: float) -> list[float]:
        mine, found = tensor(device, x), []
        together.wait(WATCHDOG)
        for _ in range(5):
            y = guarded(mine)
            done(device)
            found += values(y)
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(many, float(x)) for x in range(4)]
    assert [one.result(WATCHDOG) for one in found] == [[expected(float(x))] * 5 for x in range(4)]


# copies, state, export


def test_a_copy_outlives_its_source_and_both_forms_have_one_state() -> None:
    net = Net(torch.nn.Linear(2, 2))
    guarded = copy.deepcopy(guard(net))
    x = torch.ones(1, 2)
    for state in (net.state_dict(), {key: value + 1 for key, value in net.state_dict().items()}):
        guarded.load_state_dict({f"graph_module.{key}": value for key, value in state.items()})
        wanted = Net(torch.nn.Linear(2, 2))
        wanted.load_state_dict(state)
        with torch.no_grad():
            torch.testing.assert_close(guarded(x), wanted(x))
            torch.testing.assert_close(torch.compile(guarded, backend="aot_eager")(x), wanted(x))


def test_a_guarded_module_can_be_pickled() -> None:
    guarded = pickle.loads(pickle.dumps(guard(lambda x: scale(shift(scale(x, 2.0), 1.0), 3.0))))
    assert guarded.report.fences_after == 1
    for call in (guarded, torch.compile(guarded, backend="aot_eager")):
        assert values(call(torch.ones(1))) == [9.0]


@torch.fx.wrap
def own_engine(x: Any) -> torch.Tensor:
    return x * 2


def written_later(x):  # type: ignore[no-untyped-def]  # torch cannot pickle graphs with annotations that are text
    y = own_engine(x)
    z = own_engine(torch.sin(y))
    w = torch.cos(x)
    w.add_(1)
    return z + w


@pytest.mark.parametrize("form", [lambda it: it, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_what_is_an_engine_is_known_in_all_forms_of_a_module(form: Callable[..., Any]) -> None:
    """A result of an engine is no view, so the run may be one operator although the graph writes to memory later."""
    traced = torch.fx.symbolic_trace(written_later)
    guarded = form(guard_engines(traced, lambda node: node.target is own_engine))
    assert guarded.report.fences_after == 1
    assert [name for name in targets(guarded.folded) if name == "guarded_run"] == ["guarded_run"]
    assert [name for name in targets(guarded.folded) if name == "own_engine"] == []
    x = torch.ones(2)
    for call in (guarded, guarded.folded, torch.compile(guarded, backend="aot_eager")):
        assert torch.equal(call(x), written_later(x))


@pytest.mark.parametrize("strict", [False, True])
def test_a_guarded_module_is_exported_with_its_guards(device: Device, strict: bool) -> None:
    x = tensor(device, 1.0, 2.0)
    exported = torch.export.export(guard(model), (x,), strict=strict)
    assert exported.graph_module.code.count("compute_stream.default") == 2
    saved = io.BytesIO()
    torch.export.save(exported, saved)
    saved.seek(0)
    module = torch.export.load(saved).module()
    for call in (module, torch.compile(module, backend=guarded_backend("aot_eager", is_engine=is_engine))):
        engines.engine_calls.clear()
        with waits() as seen:
            y = call(x)
        done(device)
        assert values(y)[0] == expected(1.0)
        assert seen == ["guard.enter", "guard.exit"]
        assert engines.engine_calls == [False] * 8


def test_an_exported_program_can_be_guarded() -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return {"y": model(x)}

    module = torch.export.export(Model(), (torch.ones(2),)).module()
    guarded = guard_engines(module, is_engine)
    assert guarded.report.fences_after == 1
    assert values(guarded(torch.ones(2))["y"]) == [expected(1.0)] * 2


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("how", WAYS)
def test_a_compiled_run_is_for_inference(backend: str, how: str) -> None:
    net = Net(torch.nn.Linear(2, 2))
    guarded, x = guard(net), torch.ones(1, 2)
    guarded.graph_module(x)  # as it is, gradients go where the engines let them
    call = compiled(net, backend, how)
    with torch.no_grad():
        torch.testing.assert_close(call(x), net(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no_grad"):
        compiled(net, backend, how)(x)  # its parameters require grad
    torch._dynamo.reset()
    x.requires_grad_()
    with pytest.raises(Exception, match="no_grad"):
        compiled(lambda x: scale(x, 2.0), backend, how)(x)


@pytest.mark.parametrize("backend", PLAIN)
def test_views_that_leave_a_run_and_are_written_to_later(backend: str) -> None:
    """One operator cannot give two views of one memory: such a run has no guard under a compiler, and is right."""

    def function(x: Any) -> Any:
        y = scale(x, 2.0)
        view = y.view(-1)
        z = scale(view, 3.0)
        y.add_(1)
        return view, y[0], z

    for how in WAYS:
        torch._dynamo.reset()
        x = torch.ones(2)
        assert all(map(torch.equal, compiled(function, backend, how)(x), function(x)))


@pytest.mark.parametrize("backend", PLAIN)
def test_guards_by_hand_in_each_other_and_across(backend: str) -> None:
    def nested(x: Any) -> Any:
        outer = enter_compute_stream([x])
        inner = enter_compute_stream([x])
        y = scale(x, 2.0)
        exit_compute_stream([y], inner)
        z = scale(y, 3.0)
        exit_compute_stream([z], outer)
        return z, y

    def across(x: Any) -> Any:
        first = enter_compute_stream([x])
        y = scale(x, 2.0)
        second = enter_compute_stream([y])
        z = scale(y, 3.0)
        exit_compute_stream([z], second)
        exit_compute_stream([y], first)
        return z, y

    def empty(x: Any) -> Any:
        token = enter_compute_stream([x])
        exit_compute_stream([x], token)
        return scale(x, 6.0), scale(x, 2.0)

    def sizes(x: Any) -> Any:
        token = enter_compute_stream([x])
        y = scale(x, 2.0)
        length = y.shape[0]
        exit_compute_stream([y], token)
        return scale(y, 3.0), y.reshape(length * 1)

    device = opened("host:0")
    for function in (nested, across, empty, sizes):
        torch._dynamo.reset()
        made = guarded_backend(backend, is_engine=is_engine)
        call = torch.compile(function, backend=made, dynamic=True)
        for length in (2, 3):
            z, y = call(tensor(device, *[1.0] * length))
            done(device)
            assert (values(z), values(y)) == ([6.0] * length, [2.0] * length)


# any graph


OPERATIONS: list[Callable[..., Any]] = [
    lambda x, y: scale(x, 2.0),
    lambda x, y: scale(y, 0.5),
    lambda x, y: x + y,
    lambda x, y: torch.maximum(x, y),
    lambda x, y: x.view(-1),
    lambda x, y: x * y.sum().item(),
    lambda x, y: x.add_(1),
    lambda x, y: torch.split(x, 2)[0].repeat(2),
    lambda x, y: x + y.shape[0],
    lambda x, y: unknown(x),
    lambda x, y: x.clone().mul_(y),
    lambda x, y: x[:],
    lambda x, y: x.unsqueeze(0)[0],
    lambda x, y: x.mul_(2),
]
STEP = st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 30), st.integers(0, 30))


def program(steps: list[tuple[int, int, int]], leaving: list[int]) -> Callable[..., Any]:
    """A function of two tensors that does these steps and returns some of what they gave."""

    def function(x: Any, y: Any) -> Any:
        made = [x, y]
        for number, one, other in steps:
            made.append(OPERATIONS[number](made[one % len(made)], made[other % len(made)]))
        return [made[place % len(made)] for place in leaving]

    return function


@settings(max_examples=150)
@given(st.lists(STEP, min_size=1, max_size=14), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_any_graph_has_the_same_values_and_nothing_escapes(steps: Any, leaving: Any) -> None:
    function = program(steps, leaving)
    guarded = guard(function)
    _nothing_escapes(guarded.graph_module.graph)
    assert sum(len(run.engines) for run in guarded.report.runs) == sum(number < 2 for number, _, _ in steps)
    for form in (guarded, guarded.folded):
        ours, theirs = ([torch.arange(4.0), torch.ones(4)] for _ in range(2))
        for one, other in zip(form(*ours), function(*theirs), strict=True):
            assert torch.equal(one, other)
        assert all(map(torch.equal, ours, theirs)), "inputs are written to as before"


def _nothing_escapes(graph: Any) -> None:
    """By the nodes alone: inside a guard nothing is used but what was made there or goes in, and outside nothing of it
    but through the exit."""
    inside: set[Any] = set()
    enter: Any = None
    past: set[Any] = set()
    for node in graph.nodes:
        if node.target is enter_compute_stream:
            assert enter is None, "guards in a row, not in each other"
            enter, inside = node, set()
        elif node.target is exit_compute_stream:
            assert node.args[1] is enter
            assert set(node.args[0]) <= inside
            past |= inside
            enter = None
        elif enter is not None:
            assert node.op not in ("placeholder", "get_attr", "output")
            assert node.target != "item"
            assert node.target is not unknown
            if not isinstance(node.target, str) or node.target not in ("size",):
                known = {*inside, *enter.args[0]}
                assert all(value in known or "shape" in str(value.args) for value in node.all_input_nodes)
            inside.add(node)
        else:
            assert not past.intersection(node.all_input_nodes), f"{node} uses what did not go through its exit"
    assert enter is None


# GPUs


@pytest.mark.gpu
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("edge", ["guard.enter", "guard.exit", None])
@pytest.mark.parametrize("how", WAYS)
def test_generated_kernels_before_between_and_after_are_ordered(how: str, edge: str | None) -> None:
    """inductor launches its kernels on a stream that its code has looked up: it must have looked at the right time."""
    device = opened("cuda:0")

    def function(x: Any) -> Any:
        a = (x + 1) * 2 - x  # x + 2
        y = latched(a)  # 3 x + 6
        b = (y + y) * 2 - y  # 9 x + 18
        z = scale(b, 2.0)  # 18 x + 36
        return (z - 1) * 3  # 54 x + 105

    call = compiled(function, "inductor", how)
    x = tensor(device, 1.0, 1.0)
    torch.testing.assert_close(call(x), function(x))
    torch.cuda.synchronize()
    _each_edge(device, call, edge, lambda x: 54 * x + 105)


@pytest.mark.gpu
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("edge", ["guard.enter", "guard.exit", None])
def test_generated_kernels_in_a_guard_by_hand_are_ordered(edge: str | None) -> None:
    """Given to inductor alone: each kernel reads the current stream where it is launched."""
    from torch._inductor.utils import run_and_get_code

    device = opened("cuda:0")

    def function(x: Any) -> Any:
        a = (x + 1) * 2 - x  # x + 2
        token = enter_compute_stream([a])
        y = latched(a)  # 3 x + 6
        b = (y + y) * 2 - y  # 9 x + 18
        z = scale(b, 2.0)  # 18 x + 36
        exit_compute_stream([z], token)
        return (z - 1) * 3  # 54 x + 105

    call = torch.compile(function, backend="inductor", fullgraph=True)
    x = tensor(device, 1.0, 1.0)
    result, codes = run_and_get_code(call, x)
    torch.testing.assert_close(result, function(x))
    assert "".join(codes).count("= get_raw_stream(0)") >= 3  # one a kernel
    torch.cuda.synchronize()
    engines.engine_calls.clear()
    _each_edge(device, call, edge, lambda x: 54 * x + 105)
    assert not any(engines.engine_calls)  # none on a stream of its own: all were inside


@pytest.mark.gpu
def test_the_memory_of_results_is_kept_for_the_default_stream() -> None:
    device = opened("cuda:0")
    guarded = guard(lambda x: scale(scale(x, 2.0), 2.0))
    x = torch.ones(1 << 20, device="cuda:0")
    y = guarded(x) + 1
    torch.cuda.synchronize()
    with Latch(default(device)):
        kept = []
        for number in range(4):
            x.fill_(float(number))
            kept.append(guarded(x) + 1)  # each result is dropped while the default stream is held up
    torch.cuda.synchronize()
    assert [float(one[0]) for one in kept] == [1.0, 5.0, 9.0, 13.0]
    assert float(y[0]) == 5.0


@pytest.mark.gpu
def test_on_a_stream_of_torchs_own_the_engines_stay_there() -> None:
    """CuPy's current stream is the default one meanwhile: it is joined, and the work stays where torch is."""
    device = opened("cuda:0")
    guarded, x = guard(model), tensor(device, 1.0, 2.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    for call in (guarded, torch.compile(guarded, backend="aot_eager")):
        engines.engine_calls.clear()
        with torch.cuda.stream(stream):
            y = call(x)
            assert torch.cuda.current_stream() == stream
        stream.synchronize()
        assert values(y) == [expected(1.0), expected(2.0)]
        assert engines.engine_calls == [False] * 8


@pytest.mark.gpu
def test_cuda_graphs_of_the_compiler_hold_runs() -> None:
    """pytorch/TensorRT#3755: a graph with breaks gave zeros when it was replayed."""
    opened("cuda:0")
    call = torch.compile(guard(model), mode="reduce-overhead")
    with torch.no_grad():
        for number in range(6):
            x = torch.full((4,), float(number), device="cuda:0")
            assert values(call(x).clone()) == [expected(float(number))] * 4


@pytest.mark.gpu
def test_a_captured_graph_holds_a_guarded_module() -> None:
    """On a capture's stream the guard stays where it is, and a replay runs the engines."""
    opened("cuda:0")
    guarded = guard(model)
    x = torch.ones(4, device="cuda:0")
    guarded(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = guarded(x)
    x.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert values(y) == [expected(2.0)] * 4


def test_engines_may_be_named_by_their_operators() -> None:
    """In place of a function of the node, which has to know that an operator's target is its overload."""

    def function(x: Any) -> Any:
        return scale(torch.sin(scale(x, 2.0)), 3.0)

    graph = torch.fx.symbolic_trace(function)
    packet = torch.ops.engines.scale
    for named in (packet, scale, [packet], {scale}):
        assert guard_engines(graph, named).report.fences_before == 2
    none = guard_engines(graph, torch.ops.aten.relu)
    assert none.report.fences_before == 0
    assert "none was found" in str(none.report)
    for wrong in ("engines::scale", 3, [3]):
        with pytest.raises(ArrayError, match=r"torch\.ops\.mine\.engine"):
            guard_engines(graph, wrong)
    with pytest.raises(ArrayError, match="guarded already"):
        guard_engines(guard_engines(graph, packet), packet)
