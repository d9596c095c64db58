"""Edits of torch.fx graphs that guards take: what is in one, what goes in, and nodes moved, told again or taken out.

Nothing here touches a device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from streamrt.errors import LifetimeError
from streamrt.torch_nodes import is_metadata, is_object
from streamrt.torch_ops import enter_compute_stream, exit_compute_stream


def is_enter(node: Node) -> bool:
    """Whether the node enters a guard."""
    ours = (enter_compute_stream, torch.ops.streamrt.enter_compute_stream)
    return node.target in ours or node.target is torch.ops.streamrt.enter_compute_stream.default


def is_exit(node: Node) -> bool:
    """Whether the node leaves a guard."""
    ours = (exit_compute_stream, torch.ops.streamrt.exit_compute_stream)
    return node.target in ours or node.target is torch.ops.streamrt.exit_compute_stream.default


def hoist(first: Node, last: Node) -> None:
    """Moves what is there from the beginning from between two nodes, in front of both."""
    node = first
    while node is not last:
        following = node.next
        if node.op in ("placeholder", "get_attr"):
            first.prepend(node)
        node = following


def inputs_of(run: Sequence[Node]) -> list[Node]:
    """What the run uses from outside, in the order of its use."""
    inside = set(run)
    return list(dict.fromkeys(value for node in run for value in node.all_input_nodes if value not in inside))


def retell(graph: Graph, value: Node, inside: set[Node], last: Node) -> None:
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


def guards_of(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Each entry of the graph with its exit.  Raises `LifetimeError` where one is missing."""
    for node in graph.nodes:
        if is_enter(node):
            exits = [user for user in node.users if is_exit(user)]
            if len(exits) != 1:
                raise LifetimeError(f"the guard {node.name} has {len(exits)} exits in its graph; it needs exactly one")
            yield node, exits[0]


def nodes_between(enter: Node, leave: Node) -> list[Node]:
    """What is in a guard."""
    nodes, node = [], enter.next
    while node is not leave:
        nodes.append(node)
        node = node.next
    return nodes


def extracted(
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


DYNAMO = ("_backend_id", "_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason")


def like(source: GraphModule, graph: Graph, name: str) -> GraphModule:
    """A module with that graph, an edited copy of the source's, and its state; also with what `torch.compile` notes
    beside a graph, of which it makes guards."""
    made = GraphModule(source, graph, name)
    made.meta = dict(source.meta)
    for attribute in DYNAMO:
        if hasattr(source, attribute):
            setattr(made, attribute, getattr(source, attribute))
    pairs = zip(made.graph.find_nodes(op="placeholder"), source.graph.find_nodes(op="placeholder"), strict=True)
    for node, original in pairs:
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    return made
