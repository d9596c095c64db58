"""Guards for the engines of a torch.fx graph: one pair around each run of engine calls, across graph breaks.

An *engine* is a call that works on a stream of its own when the current stream is the default one, fenced in and out,
and on the current stream otherwise, as TensorRT's do (pytorch/TensorRT#3977).  A *run* is engine calls that follow each
other, with what lies between them; inside a guard they all share one stream, and one fence at each end is enough.

Why nothing escapes unordered: a run is a contiguous part of the graph's order.  All that goes in is enqueued before
the guard, all that comes out is used through its exit, and what could reach the outside by other ways (numbers of the
host, writes to values from outside, calls that are not known) ends the run.  Should something that obeys only the
graph's data move an engine out of its guard, the engine fences itself.

Compilers do move work, and inductor launches its kernels on streams that it has looked up.  So under `torch.compile` a
whole run is one operator, ``streamrt::guarded_run``, into which nothing can move and out of which nothing can.
"""

from __future__ import annotations

import copy
import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from streamrt.errors import ArrayError, LifetimeError
from streamrt.torch_nodes import (
    IsEngine,
    is_metadata,
    is_object,
    is_tensorrt_engine,
    name_of,
    reason_outside,
    value_of,
    writes_to,
)
from streamrt.torch_ops import enter_compute_stream, exit_compute_stream, guarded_run, register_run, unwinding

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
        lines += [f"  run {number}: {run}" for number, run in enumerate(self.runs)]
        lines += [f"  unguarded: {name}, since {reason}" for name, reason in self.unguarded]
        return "\n".join(lines)


class GuardedModule(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A graph whose runs of engines are guarded: called as the module that it was made of, for inference.

    `graph_module` has the guards, `report` says where.  Exported or run as it is, the graph is that one; under
    `torch.compile`, each run is one operator.  The parameters and submodules are those of the source.
    """

    def __init__(self, graph_module: GraphModule, report: GuardReport) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.report = report
        self.__dict__["folded"] = _folded(graph_module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph.

        Enqueues on the side streams of its guards, and on the current streams the waits for them (edges "guard.enter",
        "guard.exit"); also after an exception the thread has the streams that it had.  Does not block the host.
        """
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return self.graph_module(*args, **kwargs)
            return self.folded(*args, **kwargs)
        with unwinding():
            return self.graph_module(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "folded"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["folded"] = _folded(self.graph_module)


def guard_engines(module: GraphModule, is_engine: IsEngine | None = None) -> GuardedModule:
    """Puts one guard around each run of engine calls; `report` of the result says how many fences that saves.

    `is_engine` is asked for each ``call_function`` and ``call_module`` node of the graph; without it, Torch-TensorRT's
    engines are found.  The module is not changed: the result shares its parameters and submodules.  What the graph
    returns and what it writes to stay the same.  Does not touch the device.  Raises `ArrayError` for what is no
    `torch.fx.GraphModule`, naming the way to one.
    """
    if not isinstance(module, GraphModule):
        raise ArrayError(
            f"guard_engines takes a torch.fx.GraphModule, not a {type(module).__name__}: trace it "
            "(torch.fx.symbolic_trace), take the module() of an exported program, or compile with guarded_backend()"
        )
    graph = copy.deepcopy(module.graph)
    graph.owning_module = module
    asked = is_engine or is_tensorrt_engine
    engines = {
        copied
        for source, copied in zip(module.graph.nodes, graph.nodes, strict=True)
        if source.op in ("call_function", "call_module") and asked(source)
    }
    found, unguarded = _find_runs(graph, engines.__contains__)
    runs = tuple(_guard(graph, run, ended_by, engines) for run, ended_by in found)
    graph.lint()
    guarded = GraphModule(module, graph, f"Guarded{type(module).__name__}")
    guarded.meta = dict(module.meta)
    _check(guarded.graph)
    return GuardedModule(guarded, GuardReport(runs, tuple(unguarded)))


def guarded_backend(
    inner: str | Callable[..., Any] = "inductor", *, is_engine: IsEngine | None = None, compile_between: bool = False
) -> Callable[..., Any]:
    """A backend for `torch.compile` that guards the engine calls of what is captured and hands the rest to `inner`.

    Each run is one operator: what lies before and after is compiled by `inner`, and what lies between its engines runs
    as it is, on the side stream.  With `compile_between` that is compiled too, piece by piece, at its first run; each
    piece costs the host some tens of microseconds, so it has to be large.  Guards that the code holds by itself become
    such runs, too.  Does not touch the device.
    """

    def backend(module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        guarded = guard_engines(module, is_engine)
        between = inner if compile_between else None
        folded = _folded(guarded.graph_module, between, is_engine or is_tensorrt_engine)
        compiled = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
        run = compiled(folded, example_inputs, **options)

        def call(*args: Any, folded: GraphModule = folded) -> Any:  # its runs are found by name, as long as it lives
            with unwinding():
                return run(*args)

        return call

    return backend


# finding runs


def _find_runs(graph: Graph, is_engine: IsEngine) -> tuple[list[tuple[list[Node], str]], list[tuple[str, str]]]:
    """The runs in the graph's order, each with what ended it; and the engines that no run can hold, with the reason."""
    runs: list[tuple[list[Node], str]] = []
    unguarded: list[tuple[str, str]] = []
    run: list[Node] = []
    since: list[Node] = []  # what came after the run's last engine, and is part of it if another one follows
    by_hand = 0  # guards that the code holds itself

    def end(reason: str) -> None:
        if run:
            runs.append((list(run), reason))
        run.clear()
        since.clear()

    for node in graph.nodes:
        if _is_enter(node) or _is_exit(node):
            end("a guard of the code's own")
            by_hand += 1 if _is_enter(node) else -1
        if by_hand or node.op in ("placeholder", "get_attr"):
            continue
        inside = {*run, *since}
        if is_engine(node):
            if all(written in inside for written in writes_to(node)):
                run += [*since, node]
                since.clear()
                continue
            reason = f"{name_of(node)} writes to what lies outside of the run"
            unguarded.append((node.name, reason))
            end(reason)
        elif run:
            outside = reason_outside(node, inside, is_engine)
            if outside is None:
                since.append(node)
            else:
                end(outside)
    end("the graph's end")
    return runs, unguarded


def _is_enter(node: Node) -> bool:
    ours = (enter_compute_stream, torch.ops.streamrt.enter_compute_stream)
    return node.target in ours or node.target is torch.ops.streamrt.enter_compute_stream.default


def _is_exit(node: Node) -> bool:
    ours = (exit_compute_stream, torch.ops.streamrt.exit_compute_stream)
    return node.target in ours or node.target is torch.ops.streamrt.exit_compute_stream.default


# guarding them


def _guard(graph: Graph, run: list[Node], ended_by: str, engines: set[Node]) -> GuardedRun:
    """Puts the guard around a run, and lets whoever uses its values outside use what its exit gives."""
    _hoist(graph, run[0], run[-1])
    run = _with_unpacking(graph, run)
    inside = set(run)
    inputs = [value for value in _inputs(run) if not is_metadata(value) and not is_object(value)]
    with graph.inserting_before(run[0]):
        token = graph.call_function(enter_compute_stream, (inputs,))
    for value in run:
        if is_metadata(value):
            _retell(graph, value, inside, run[-1])
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
    others = sum(node not in engines for node in run[: 1 + max(run.index(node) for node in run if node in engines)])
    return GuardedRun(
        names, others, tuple(node.name for node in inputs), tuple(node.name for node in leaving), ended_by
    )


def _hoist(graph: Graph, first: Node, last: Node) -> None:
    """Moves what is there from the beginning out of the run, in front of it."""
    node = first
    while node is not last:
        following = node.next
        if node.op in ("placeholder", "get_attr"):
            first.prepend(node)
        node = following


def _with_unpacking(graph: Graph, run: list[Node]) -> list[Node]:
    """The run with the ``getitem`` of its tuples in it, each right behind its tuple, wherever the graph had it."""
    inside = set(run)
    whole = []
    for node in run:
        whole.append(node)
        moved = [user for user in node.users if user not in inside and _unpacks(user)]
        value = value_of(node)
        if isinstance(value, tuple | list) and any(user not in inside and not _unpacks(user) for user in node.users):
            moved += _unpacked(graph, node, value, inside)
        for user in reversed(moved):
            node.append(user)
        whole += moved
        inside.update(moved)
    return whole


def _unpacks(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)


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
        if user not in inside and not _unpacks(user):
            swap = {node: together}
            user.args = torch.fx.map_arg(user.args, lambda used, swap=swap: swap.get(used, used))
            user.kwargs = torch.fx.map_arg(user.kwargs, lambda used, swap=swap: swap.get(used, used))
    return elements


def _inputs(run: Sequence[Node]) -> list[Node]:
    """What the run uses from outside, in the order of its use."""
    inside = set(run)
    return list(dict.fromkeys(value for node in run for value in node.all_input_nodes if value not in inside))


def _retell(graph: Graph, value: Node, inside: set[Node], last: Node) -> None:
    """Sizes and the like are told again behind the run, of the tensors that come out of it."""
    users = [user for user in value.users if user not in inside]
    if not users:
        return
    made: dict[Node, Node] = {}
    at = last

    def tell(node: Node) -> Node:
        nonlocal at
        if node not in inside or not is_metadata(node):
            return node
        if node not in made:
            for source in node.all_input_nodes:
                tell(source)
            with graph.inserting_after(at):
                at = made[node] = graph.node_copy(node, tell)
        return made[node]

    again = tell(value)
    for user in users:
        user.replace_input_with(value, again)


def _pairs(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Each entry of the graph with its exit.  Raises `LifetimeError` where one is missing."""
    for node in graph.nodes:
        if _is_enter(node):
            exits = [user for user in node.users if _is_exit(user)]
            if len(exits) != 1:
                raise LifetimeError(f"the guard {node.name} has {len(exits)} exits in its graph; it needs exactly one")
            yield node, exits[0]


def _between(enter: Node, leave: Node) -> list[Node]:
    nodes, node = [], enter.next
    while node is not leave:
        nodes.append(node)
        node = node.next
    return nodes


def _check(graph: Graph) -> None:
    """Holds what the module says: outside of a guard, what was made inside is used through its exit alone."""
    for enter, leave in _pairs(graph):
        inside = set(_between(enter, leave))
        for node in inside:
            for user in node.users:
                if user not in inside and user is not leave and not _is_written_exit(leave):
                    raise LifetimeError(f"{user.name} uses {node.name} past the exit {leave.name} of its guard")


def _is_written_exit(leave: Node) -> bool:
    """An operator that code calls itself gives nothing back: its outputs are used on, which it says that it writes."""
    return leave.target is not exit_compute_stream


# folding runs into one operator each


class _Run:
    """The inside of a guard, as ``streamrt::guarded_run`` calls it; `plain` is for tracing."""

    def __init__(self, plain: GraphModule, fast: Callable[..., Any]) -> None:
        self.plain = plain
        self.fast = fast
        self.trains = any(parameter.requires_grad for parameter in plain.parameters())


def _folded(
    module: GraphModule, between: str | Callable[..., Any] | None = None, is_engine: IsEngine | None = None
) -> GraphModule:
    """A copy of a guarded graph with one ``streamrt::guarded_run`` in the place of each guard and what is in it."""
    graph = copy.deepcopy(module.graph)
    graph.owning_module = module
    runs = [_fold(module, graph, enter, leave, between, is_engine) for enter, leave in list(_pairs(graph))]
    graph.lint()
    folded = GraphModule(module, graph, type(module).__name__)
    folded.meta = dict(module.meta)
    for name in ("_parameters", "_buffers", "_modules"):  # one state: what moves or loads the module does so for both
        folded.__dict__[name] = module.__dict__[name]
    folded.__dict__["guarded_runs"] = runs
    return folded


def _fold(
    module: GraphModule,
    graph: Graph,
    enter: Node,
    leave: Node,
    between: str | Callable[..., Any] | None,
    is_engine: IsEngine | None,
) -> _Run | None:
    if enter.next is not leave:
        _hoist(graph, enter.next, leave)
    run = _between(enter, leave)
    inside = set(run)
    inputs = _inputs(run)
    if any(written in inputs for node in run for written in writes_to(node)):
        return None  # written by hand: it stays as it is, and inductor refuses it on GPUs
    leaving = [value for value in run if any(user not in inside for user in value.users)]
    plain = _extracted(module, run, inputs, leaving)
    name = f"{run[0].name if run else 'nothing'}-{uuid.uuid4().hex}"  # no cache of an earlier process knows it
    fast = plain if between is None else _pieces(plain, between, is_engine or is_tensorrt_engine)
    inner = _Run(plain, fast)
    register_run(name, inner)
    with graph.inserting_after(leave):
        call = graph.call_function(guarded_run, ([value for value in inputs if not is_object(value)], name))
    last = call
    outside: dict[Node, Node] = {}
    for number, value in enumerate(leaving):
        with graph.inserting_after(last):
            last = outside[value] = graph.call_function(operator.getitem, (call, number))
        last.meta = copy.copy(value.meta)
        for user in list(value.users):
            if user not in inside and user is not leave:
                user.replace_input_with(value, last)
    for user in list(leave.users):
        value = leave.args[0][user.args[1]]
        user.replace_all_uses_with(outside.get(value, value))
        graph.erase_node(user)
    graph.erase_node(leave)
    graph.erase_node(enter)
    for node in reversed(run):
        graph.erase_node(node)
    return inner


def _extracted(
    owner: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]
) -> GraphModule:
    """Nodes of a graph as a module of their own, which is given its inputs and holds the objects among them."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for value in inputs:
        if is_object(value):
            copies[value] = graph.node_copy(value)
            continue
        copies[value] = graph.placeholder(value.name)
        copies[value].meta = copy.copy(value.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[value] for value in outputs))
    return GraphModule(owner, graph, "GuardedRun")


class _Piece(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A part of a run, compiled at its first call.

    The function around it has code of its own: what was compiled is kept by code object, a few for each, and inside of
    a backend a `GraphModule` that is given to `torch.compile` itself is passed over.
    """

    def __init__(self, plain: GraphModule, backend: str | Callable[..., Any]) -> None:
        super().__init__()

        def between(*values: Any) -> Any:
            return plain(*values)

        own = FunctionType(between.__code__.replace(), globals(), between.__name__, None, between.__closure__)
        self.__dict__["compiled"] = torch.compile(own, backend=backend)

    def forward(self, *values: Any) -> Any:
        return self.compiled(*values)


def _pieces(plain: GraphModule, backend: str | Callable[..., Any], is_engine: IsEngine) -> GraphModule:
    """The run with what lies between its engines compiled, piece by piece: each looks its stream up when it is called,
    and so runs on the side stream."""
    graph = copy.deepcopy(plain.graph)
    engines = {made for made, node in zip(graph.nodes, plain.graph.nodes, strict=True) if is_engine(node)}
    groups: list[list[Node]] = [[]]
    for node in graph.nodes:
        if node in engines:
            groups.append([])
        elif node.op not in ("placeholder", "output"):
            groups[-1].append(node)
    pieces: dict[str, Any] = {}
    for group in groups:
        if group:
            inputs, inside = _inputs(group), set(group)
            leaving = [value for value in group if any(user not in inside for user in value.users)]
            name = f"between_{len(pieces)}"
            pieces[name] = _Piece(_extracted(plain, group, inputs, leaving), backend)
            with graph.inserting_before(group[0]):
                call = graph.call_module(name, tuple(inputs))
                outside = [graph.call_function(operator.getitem, (call, number)) for number in range(len(leaving))]
            for value, given in zip(leaving, outside, strict=True):
                value.replace_all_uses_with(given, lambda user, inside=inside: user not in inside)
            for node in reversed(group):
                graph.erase_node(node)
    root = torch.nn.Module()
    root.__dict__["_modules"] = {**plain._modules, **pieces}
    return GraphModule(root, graph, "GuardedRun")
