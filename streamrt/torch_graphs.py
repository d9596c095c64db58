"""Guards for the engines of a torch.fx graph: one pair around each run of engine calls, across graph breaks.

An *engine* is a call that works on a stream of its own when the current stream is the default one, fenced in and out,
and on the current stream otherwise, as TensorRT's do (pytorch/TensorRT#3977).  A *run* is engine calls that follow each
other, with what lies between them; inside a guard they all share one stream, and one fence at each end is enough.

Why nothing escapes unordered: a run is a contiguous part of the graph's order.  All that goes in is enqueued before
the guard, all that comes out is used through its exit, and what could reach the outside by other ways (numbers of the
host, writes to values from outside, calls that are not known) ends the run.  Should something that obeys only the
graph's data move an engine out of its guard, the engine fences itself.

Compilers do move work, and plan memory across it.  So under `torch.compile` a whole run is one operator,
``streamrt::guarded_run``, into which nothing can move and out of which nothing can.

Run with torch 2.11 and 2.13; older ones have not been tried.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from streamrt.errors import ArrayError, LifetimeError
from streamrt.torch_edits import guards_of, hoist, inputs_of, is_enter, is_exit, like, nodes_between, retell
from streamrt.torch_kinds import kinds_of, not_tensors
from streamrt.torch_nodes import (
    Engines,
    IsEngine,
    asked_of,
    is_fresh,
    is_metadata,
    is_object,
    mark_engines,
    mark_places,
    name_of,
    places_of,
    reason_outside,
    unpacks,
    value_of,
    writes_to,
)
from streamrt.torch_ops import enter_compute_stream, enter_directly, exit_compute_stream, exit_directly, unwinding
from streamrt.torch_runs import folded_graph

__all__ = ["GuardReport", "GuardedModule", "GuardedRun", "guard_engines", "guarded_backend"]


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """One run: the names of its engine calls, of what goes in and of what comes out, how many other operations lie
    between the engines, and what ended it."""

    engines: tuple[str, ...]
    between: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ended_by: str

    def __str__(self) -> str:
        others = f" with {self.between} operations between" if self.between else ""
        return (
            f"{', '.join(self.engines)}{others}: in {', '.join(self.inputs) or 'nothing'}, "
            f"out {', '.join(self.outputs) or 'nothing'}; ended by {self.ended_by}"
        )


@dataclass(frozen=True, slots=True)
class GuardReport:
    """What `guard_engines` found: the runs, and the engine calls that keep their own fences, each with the reason."""

    runs: tuple[GuardedRun, ...]
    unguarded: tuple[tuple[str, str], ...]

    @property
    def fences_before(self) -> int:
        """Pairs of fences without guards: one for each engine call.  Does not touch the device."""
        return sum(len(run.engines) for run in self.runs) + len(self.unguarded)

    @property
    def fences_after(self) -> int:
        """Pairs of fences with the guards.  Does not touch the device."""
        return len(self.runs) + len(self.unguarded)

    def __str__(self) -> str:
        lines = [f"{self.fences_before} engine calls: {self.fences_before} pairs of fences, now {self.fences_after}"]
        if not self.fences_before:
            lines.append(
                "  none was found: is_engine says which nodes are engines; an operator's target is its overload"
            )
        lines += [f"  run {number}: {run}" for number, run in enumerate(self.runs)]
        lines += [f"  unguarded: {name}, since {reason}" for name, reason in self.unguarded]
        return "\n".join(lines)


class GuardedModule(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A graph whose runs of engines are guarded: called as the module that it was made of, for inference.

    `graph_module` has the guards, `report` says where.  Exported or traced, the graph is that one; run as it is, too,
    but that its guards do not go through torch's dispatcher where nobody would see them; under `torch.compile`, each
    run is one operator.  The parameters and submodules are those of the source.

    Calls of this module leave their guards also after an exception.  `graph_module` called by itself, and an exported
    program, cannot: the thread stays on the side stream until the exception is gone and the next guard on the thread
    begins.  Call them inside ``with streamrt.torch_ops.unwinding():``, which leaves the guards at once.
    """

    def __init__(self, graph_module: GraphModule, report: GuardReport) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.report = report
        self.__dict__["folded"] = folded_graph(graph_module)
        self.__dict__["direct"] = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph.

        Enqueues on the side streams of its guards, and on the current streams the waits for them (edges "guard.enter",
        "guard.exit"); also after an exception the thread has the streams that it had.  Does not block the host.
        """
        if torch.compiler.is_compiling():
            if _exporting():
                return self.graph_module(*args, **kwargs)
            return self.folded(*args, **kwargs)
        run = self._as_it_runs()
        with unwinding():
            return run(*args, **kwargs)

    def _as_it_runs(self) -> Callable[..., Any]:
        """The graph with its guards entered directly; itself where a trace has to find it, or something beside its
        graph is to run with it: hooks, another forward, what its `compile` made."""
        module = self.graph_module
        own = module.__dict__
        call: Callable[..., Any] = module
        if (
            _is_hooked(own)
            or torch.fx._symbolic_trace._is_fx_tracing_flag
            or "forward" in own
            or own.get("_compiled_call_impl") is not None
        ):
            return call
        made_of = type(module).forward
        direct = self.direct
        if direct is None or direct[0] is not made_of:  # it was edited and compiled again
            direct = self.__dict__["direct"] = made_of, _direct_forward(module)
        call = functools.partial(direct[1], module)
        return call

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in ("folded", "direct")}
        return {**state, "engines": places_of(self.graph_module.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        engines = state["engines"]
        super().__setstate__({key: value for key, value in state.items() if key != "engines"})
        mark_places(self.graph_module.graph, engines)
        self.__dict__["folded"] = folded_graph(self.graph_module)
        self.__dict__["direct"] = None


def _direct_forward(module: GraphModule) -> Callable[..., Any]:
    """What runs a guarded graph on its own module, with its guards entered and left by functions in place of operators.

    On that very module: its parameters, buffers and attributes are what they are at each call.
    """
    graph = copy.deepcopy(module.graph)
    graph.owning_module = module
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _DIRECTLY.get(node.target, node.target)
    forward: Callable[..., Any] = type(like(module, graph, type(module).__name__)).forward
    return forward


_global_hooks = tuple(
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def _is_hooked(own: dict[str, Any]) -> bool:
    """Whether a call of the module that has these attributes runs hooks, its own or those of all modules."""
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or any(_global_hooks)
    )


_DIRECTLY: dict[Any, Any] = {enter_compute_stream: enter_directly, exit_compute_stream: exit_directly}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _exporting() -> bool:
    """Whether torch.export asks.  To code that is compiled, torch before 2.13 says so always, were it not called."""
    return bool(torch.compiler.is_exporting())


def guard_engines(module: GraphModule, is_engine: Engines = None) -> GuardedModule:
    """Puts one guard around each run of engine calls; `report` of the result says how many fences that saves.

    `is_engine` is asked for each ``call_function`` and ``call_module`` node of the graph; an operator (what
    `torch.library.custom_op` gives, or ``torch.ops.mine.engine``), or a list of them, stands for its calls; without
    it, Torch-TensorRT's engines are found.  The module is not changed: the result shares its parameters and submodules.
    What the graph returns and what it writes to stay the same.

    Only tensors leave a guard.  An engine whose result leaves one is guarded where it is known to be a tensor, or a
    tuple or list of tensors that is taken apart: by example values in the graph (`torch.export`, `torch.compile` and
    `torch.fx.passes.fake_tensor_prop` leave them), the schema of an operator, an annotation of what the function or
    the module returns, or by a use that nothing but a tensor can have.  `report` names the others.

    Does not touch the device.  Raises `ArrayError` for what is no `torch.fx.GraphModule`, naming the way to one.
    """
    if isinstance(module, GuardedModule):
        raise ArrayError("the module is guarded already; give guard_engines what it was made of")
    if not isinstance(module, GraphModule):
        raise ArrayError(
            f"guard_engines takes a torch.fx.GraphModule, not a {type(module).__name__}: trace it "
            "(torch.fx.symbolic_trace), take the module() of an exported program, or compile with guarded_backend()"
        )
    graph = copy.deepcopy(module.graph)
    graph.owning_module = module
    asked = asked_of(is_engine)
    engines = {
        copied
        for source, copied in zip(module.graph.nodes, graph.nodes, strict=True)
        if source.op in ("call_function", "call_module") and asked(source)
    }
    mark_engines(graph, engines)
    found, unguarded = _runs_of_tensors(graph, engines.__contains__)
    runs = tuple(_guard(graph, run, ended_by, engines) for run, ended_by in found)
    graph.lint()
    guarded = like(module, graph, f"Guarded{type(module).__name__}")
    _check(guarded.graph)
    return GuardedModule(guarded, GuardReport(runs, tuple(unguarded)))


def guarded_backend(
    inner: str | Callable[..., Any] = "inductor", *, is_engine: Engines = None, compile_between: bool = False
) -> Callable[..., Any]:
    """A backend for `torch.compile` that guards the engine calls of what is captured and hands the rest to `inner`.

    Each run is one operator: what lies before and after is compiled by `inner`, and what lies between its engines runs
    as it is, on the side stream.  With `compile_between` that is compiled too, piece by piece, at its first run; each
    piece costs the host some tens of microseconds, so it has to be large.  Guards that the code holds by itself become
    such runs, too.  Does not touch the device.

    ``mode=`` and ``options=`` of `torch.compile` go to `inner` and to the pieces, as they do without guards: inductor
    takes them as its configuration, and refuses what it does not know; others are called with them.  Only pieces are
    no CUDA graphs of their own.
    """

    def backend(module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        guarded = guard_engines(module, is_engine)
        compiled, between = _with_options(inner, options)
        if hasattr(compiled, "reset"):  # torch.compiler.reset() asks its backends, for inductor's CUDA graphs
            vars(backend)["reset"] = compiled.reset
        folded = folded_graph(guarded.graph_module, between if compile_between else None)
        run = compiled(folded, example_inputs)

        def call(*args: Any, folded: GraphModule = folded) -> Any:  # its runs are found by name, as long as it lives
            with unwinding():
                return run(*args)

        return call

    return backend


def _with_options(
    inner: str | Callable[..., Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """What compiles a graph with what `torch.compile` gives a backend beside it (``mode``, ``options``), and how
    `torch.compile` is called for a piece of it."""
    if inner == "inductor" and options:
        configured = torch._TorchCompileInductorWrapper(options.get("mode"), options.get("options"), None)
        known = {key: value for key, value in configured.config.items() if key != "triton.cudagraphs"}
        return configured, {"backend": inner, "options": known}
    compiled = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
    return functools.partial(compiled, **options), {"backend": inner, **options}


# finding runs


Found = tuple[list[tuple[list[Node], str]], list[tuple[str, str]]]


def _runs_of_tensors(graph: Graph, is_engine: IsEngine) -> Found:
    """The runs out of which nothing comes but tensors.  What may be something else is left out, and others found."""
    kinds = kinds_of(graph)
    apart: dict[Node, str] = {}
    while True:
        found, unguarded = _find_runs(graph, is_engine, apart)
        others = [not_tensors(run, kinds) for run, _ in found]
        if not any(others):
            return found, unguarded
        for some in others:
            apart.update(some)


def _find_runs(graph: Graph, is_engine: IsEngine, apart: Mapping[Node, str]) -> Found:
    """The runs in the graph's order, each with what ended it; and the engines that no run can hold, with the reason.

    What is `apart` is in none, for that reason.
    """
    runs: list[tuple[list[Node], str]] = []
    unguarded: list[tuple[str, str]] = []
    run: list[Node] = []
    since: list[Node] = []  # what came after the run's last engine, and is part of it if another one follows
    inside: set[Node] = set()  # both
    by_hand = 0  # guards that the code holds itself

    def end(reason: str) -> None:
        if run:
            runs.append((list(run), reason))
        run.clear()
        since.clear()
        inside.clear()

    for node in graph.nodes:
        if is_enter(node) or is_exit(node):
            end("a guard of the code's own")
            by_hand += 1 if is_enter(node) else -1
        if by_hand or node.op in ("placeholder", "get_attr"):
            continue
        if is_engine(node):
            if node not in apart and all(is_fresh(written, inside, is_engine) for written in writes_to(node)):
                run += [*since, node]
                since.clear()
                inside.add(node)
                continue
            reason = apart.get(node) or f"{name_of(node)} writes to what lies outside of the run"
            unguarded.append((node.name, reason))
            end(reason)
        elif run:
            outside = apart.get(node) or reason_outside(node, inside, is_engine)
            if outside is None:
                since.append(node)
                inside.add(node)
            else:
                end(outside)
    end("the graph's end")
    return runs, unguarded


# guarding them


def _guard(graph: Graph, run: list[Node], ended_by: str, engines: set[Node]) -> GuardedRun:
    """Puts the guard around a run, and lets whoever uses its values outside use what its exit gives."""
    hoist(run[0], run[-1])
    run = _with_unpacking(graph, run)
    inside = set(run)
    inputs = [value for value in inputs_of(run) if not is_metadata(value) and not is_object(value)]
    with graph.inserting_before(run[0]):
        token = graph.call_function(enter_compute_stream, (inputs,))
    for value in run:
        if is_metadata(value):
            retell(graph, value, inside, run[-1])
    leaving = [value for value in run if any(user not in inside for user in value.users)]
    users = {value: [user for user in value.users if user not in inside] for value in leaving}
    with graph.inserting_after(run[-1]):
        left = graph.call_function(exit_compute_stream, (leaving, token))
    last = left
    for number, value in enumerate(leaving):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (left, number))
        last.meta = copy.copy(value.meta)
        for user in users[value]:
            user.replace_input_with(value, last)
    names = tuple(node.name for node in run if node in engines)
    last_engine = max(at for at, node in enumerate(run) if node in engines)
    others = sum(node not in engines for node in run[:last_engine])
    return GuardedRun(
        names, others, tuple(node.name for node in inputs), tuple(node.name for node in leaving), ended_by
    )


def _with_unpacking(graph: Graph, run: list[Node]) -> list[Node]:
    """The run with the ``getitem`` of its tuples in it, each right behind its tuple, wherever the graph had it."""
    inside = set(run)
    whole = []
    for node in run:
        whole.append(node)
        moved = [user for user in node.users if user not in inside and unpacks(user)]
        value = value_of(node)
        if isinstance(value, tuple | list) and any(user not in inside and not unpacks(user) for user in node.users):
            moved += _unpacked(graph, node, value, inside)
        for user in reversed(moved):
            node.append(user)
        whole += moved
        inside.update(moved)
    return whole


def _unpacked(graph: Graph, node: Node, value: Sequence[Any], inside: set[Node]) -> list[Node]:
    """For a tuple that is used as a whole outside of the run: its elements, which are used in its place."""
    elements = []
    with graph.inserting_after(node):
        for number, element in enumerate(value):
            made = graph.call_function(operator.getitem, (node, number))
            made.meta["val"] = element
            elements.append(made)
    together = tuple(elements) if isinstance(value, tuple) else elements
    for user in list(node.users):
        if user not in inside and not unpacks(user):
            swap = {node: together}
            user.args = torch.fx.map_arg(user.args, lambda used, swap=swap: swap.get(used, used))
            user.kwargs = torch.fx.map_arg(user.kwargs, lambda used, swap=swap: swap.get(used, used))
    return elements


def _check(graph: Graph) -> None:
    """Holds what the module says: outside of a guard, what was made inside is used through its exit alone.

    Where code calls the operators itself the exit gives nothing back: its outputs are used on, since it says that it
    writes to them.
    """
    for enter, leave in guards_of(graph):
        inside = set(nodes_between(enter, leave))
        for node in inside:
            for user in node.users:
                if user not in inside and user is not leave and leave.target is exit_compute_stream:
                    raise LifetimeError(f"{user.name} uses {node.name} past the exit {leave.name} of its guard")
