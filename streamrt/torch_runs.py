"""Whole runs of a guarded graph as one operator each, ``streamrt::guarded_run``, for compilers.

A compiler may move its kernels between an entry and an exit, and launch them on a stream that its code has looked up
before.  One operator leaves nothing to move.  Its inside is a graph module that runs as it is; or, piece by piece, what
the compiler makes of it.
"""

from __future__ import annotations

import copy
import hashlib
import operator
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from streamrt.torch_edits import (
    extracted,
    guards_of,
    hoist,
    inputs_of,
    is_enter,
    is_exit,
    like,
    nodes_between,
    retell,
)
from streamrt.torch_kinds import Kinds, kinds_of, not_tensors
from streamrt.torch_nodes import (
    IsEngine,
    is_fresh,
    is_marked,
    is_metadata,
    is_object,
    may_be_view,
    may_write,
    reason_outside,
    says_itself,
    writes_to,
)
from streamrt.torch_ops import Run, exit_compute_stream, guarded_run, register_run


class _Run:
    """The inside of a guard, as ``streamrt::guarded_run`` calls it; `plain` is for tracing."""

    def __init__(self, plain: GraphModule, fast: Callable[..., Any]) -> None:
        self.plain = plain
        self.fast = fast
        self.trains = any(parameter.requires_grad for parameter in plain.parameters())


def folded_graph(module: GraphModule, between: Mapping[str, Any] | None = None) -> GraphModule:
    """A copy of a guarded graph with one ``streamrt::guarded_run`` in the place of each guard and what is in it.

    Its engines are those that are marked.  What lies between them is compiled by `torch.compile` with the keywords of
    `between`, or runs as it is.
    """
    graph = copy.deepcopy(module.graph)
    graph.owning_module = module
    kinds = kinds_of(graph)
    pairs = reversed(list(guards_of(graph)))  # a guard in a guard first
    runs = [_fold(module, graph, enter, leave, between, kinds) for enter, leave in pairs]
    graph.lint()
    folded = like(module, graph, type(module).__name__)
    for name in ("_parameters", "_buffers", "_modules"):  # one state: what moves or loads the module does so for both
        folded.__dict__[name] = module.__dict__[name]
    folded.__dict__["guarded_runs"] = runs
    return folded


def _fold(
    module: GraphModule,
    graph: Graph,
    enter: Node,
    leave: Node,
    between: Mapping[str, Any] | None,
    kinds: Kinds,
) -> Run | None:
    """Puts one operator in the place of a guard, if that says the same.

    A guard written by hand that holds more than a run may stays as it is: inductor refuses it on GPUs.  A run whose
    values could be views that the graph writes to later is left unguarded, so that its engines fence themselves.
    """
    hoist(enter, leave)
    run = nodes_between(enter, leave)
    inside = set(run)
    by_hand = leave.target is not exit_compute_stream
    if by_hand and (not _could_be_run(run, is_marked) or not_tensors(run, kinds)):
        return None
    for value in run:
        if is_metadata(value):
            retell(graph, value, inside, leave)
    leaving = [value for value in run if any(user not in inside for user in value.users)]
    if not run or (any(may_be_view(value, is_marked) for value in leaving) and _written_after(leave)):
        _without_guard(graph, enter, leave, {})
        return None
    inputs = inputs_of(run)
    plain = extracted(module, run, inputs, leaving)
    name = f"{run[0].name}-{_content(plain) if between is None else uuid.uuid4().hex}"
    inner = register_run(name, _Run(plain, plain if between is None else _pieces(plain, between)))
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
    _without_guard(graph, enter, leave, outside)
    for node in reversed(run):
        graph.erase_node(node)
    return inner


def _content(plain: GraphModule) -> str:
    """What names a run: the same in each process, for caches of compiled code, where its text says all there is to say.

    Else, with parameters, modules and functions of Python's in it, new each time, so that no cache takes one for
    another.
    """
    if all(map(says_itself, plain.graph.nodes)):
        return hashlib.sha256(plain.code.encode()).hexdigest()[:32]
    return uuid.uuid4().hex


def _could_be_run(run: Sequence[Node], is_engine: IsEngine) -> bool:
    """Whether the pass itself would put this into one run."""
    inside: set[Node] = set()
    for node in run:
        if is_enter(node) or is_exit(node):  # guards that cross each other
            return False
        if is_engine(node):
            if not all(is_fresh(written, inside, is_engine) for written in writes_to(node)):
                return False
        elif reason_outside(node, inside, is_engine) is not None:
            return False
        inside.add(node)
    return True


def _written_after(leave: Node) -> bool:
    """Whether anything behind the guard may write to memory that is there already."""
    node = leave.next
    while node.op != "root":
        if may_write(node):
            return True
        node = node.next
    return False


def _without_guard(graph: Graph, enter: Node, leave: Node, outside: dict[Node, Node]) -> None:
    """Takes the guard's own nodes away; what its exit gave are the values themselves, or what stands for them."""
    for user in list(leave.users):
        value = leave.args[0][user.args[1]]
        user.replace_all_uses_with(outside.get(value, value))
        graph.erase_node(user)
    graph.erase_node(leave)
    graph.erase_node(enter)


class _Piece(torch.nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """A part of a run, compiled at its first call.

    The function around it has code of its own: what was compiled is kept by code object, a few for each, and inside of
    a backend a `GraphModule` that is given to `torch.compile` itself is passed over.
    """

    def __init__(self, plain: GraphModule, keywords: Mapping[str, Any]) -> None:
        super().__init__()

        def between(*values: Any) -> Any:
            return plain(*values)

        own = FunctionType(between.__code__.replace(), globals(), between.__name__, None, between.__closure__)
        self.__dict__["compiled"] = torch.compile(own, **keywords)

    def forward(self, *values: Any) -> Any:
        return self.compiled(*values)


def _pieces(plain: GraphModule, keywords: Mapping[str, Any]) -> GraphModule:
    """The run with what lies between its engines compiled, piece by piece: each looks its stream up when it is called,
    and so runs on the side stream."""
    graph = copy.deepcopy(plain.graph)
    engines = set(filter(is_marked, graph.nodes))
    groups: list[list[Node]] = [[]]
    for node in graph.nodes:
        if node in engines:
            groups.append([])
        elif node.op not in ("placeholder", "output"):
            groups[-1].append(node)
    pieces: dict[str, Any] = {}
    for group in groups:
        if group:
            inputs, inside = inputs_of(group), set(group)
            leaving = [value for value in group if any(user not in inside for user in value.users)]
            name = f"between_{len(pieces)}"
            pieces[name] = _Piece(extracted(plain, group, inputs, leaving), keywords)
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
