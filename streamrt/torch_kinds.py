"""What the values of a torch.fx graph surely are: tensors, several tensors together, or not known.

Only tensors leave a guard.  Nothing is run to find out: example values say it, schemas of operators, what a function or
a module says that it returns, and uses that only a tensor can have.
"""

from __future__ import annotations

import functools
import operator
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.immutable_collections import immutable_list

from streamrt.torch_nodes import (
    FRESH,
    VIEW_ATTRIBUTES,
    is_metadata,
    is_object,
    is_torchs,
    module_of,
    name_of,
    unpacks,
    value_of,
    words,
)

TENSOR, SEVERAL = "a tensor", "several tensors"
Kinds = dict[Node, str | None]

_OTHERS = (tuple, list, dict, set, str, int, float, complex, np.ndarray)
# Operators that give a tensor for tensors and numbers.
_ARITHMETIC = words(
    "abs add and_ eq floordiv ge gt inv invert le lshift lt matmul mod mul ne neg or_ pos pow rshift sub truediv xor"
)
_CASTS = words("bfloat16 bool cuda double float half int long short")
_PLAIN = (int, float, bool)


def kinds_of(graph: Graph) -> Kinds:
    """What each value is: `TENSOR`, `SEVERAL` (a tuple or list of them), or None where that is not known.

    Does not touch the device.
    """
    kinds: Kinds = {}
    for node in graph.nodes:
        value = value_of(node)
        kind = _by_target(node, kinds) if value is None else _by_value(value)
        kinds[node] = TENSOR if kind is None and value is None and any(_shows(node)) else kind
    return kinds


def not_tensors(run: Sequence[Node], kinds: Kinds) -> dict[Node, str]:
    """The values of a run that leave it and may be something else than tensors, each with the reason.

    Does not touch the device.
    """
    inside = set(run)
    found = {}
    for value in run:
        users = [user for user in value.users if user not in inside]
        for source in _sources(value, inside) if users else ():
            if not _can_leave(source, users if source is value else [value], kinds):
                found[source] = _reason(source)
    return found


def _sources(value: Node, inside: set[Node]) -> Iterable[Node]:
    """Itself, or of what is told again outside of the run, what it is told of."""
    asked, seen = [value], {value}
    while asked:
        node = asked.pop()
        if not is_metadata(node):
            yield node
            continue
        for source in node.all_input_nodes:
            if source in inside and source not in seen:
                seen.add(source)
                asked.append(source)


def _can_leave(value: Node, users: Sequence[Node], kinds: Kinds) -> bool:
    """Whether it is a tensor where it is used outside, or taken apart into tensors."""
    if kinds.get(value) == TENSOR:
        return True
    apart = [user for user in users if unpacks(user)]
    whole = (
        type(value_of(value)) in (tuple, list, immutable_list) and kinds.get(value) == SEVERAL
    )  # a named one would lose its names
    return all(kinds.get(user) == TENSOR for user in apart) and (whole or len(apart) == len(users))


def _reason(value: Node) -> str:
    name, example = name_of(value), value_of(value)
    if example is not None:
        return f"{name} gives a {type(example).__name__.removeprefix('immutable_')}, and only tensors leave a guard"
    return (
        f"nothing says that {name} gives a tensor, and only tensors leave a guard; example values in the graph would, "
        "or a return annotation"
    )


def _by_value(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return TENSOR
    if isinstance(value, tuple | list) and all(isinstance(one, torch.Tensor) for one in value):
        return SEVERAL
    return None


def _by_target(node: Node, kinds: Kinds) -> str | None:
    target = node.target
    if node.op == "get_attr":
        return TENSOR if node.graph.owning_module is not None and not is_object(node) else None
    if node.op == "call_module":
        module = module_of(node)
        if isinstance(module, GraphModule):
            return _by_graph(module)
        return None if module is None else _annotated(type(module).forward)
    if node.op == "call_method":
        return _of_name(str(target)) if _is_tensor(node.args[0], kinds) else None
    if node.op != "call_function":
        return None
    if isinstance(target, torch._ops.OpOverload):
        return _returned([target])
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _returned([getattr(target, overload) for overload in target.overloads()])
    if target is getattr:
        return TENSOR if _is_tensor(node.args[0], kinds) and node.args[1] in VIEW_ATTRIBUTES else None
    if target is operator.getitem:
        return _element(node, kinds)
    if getattr(operator, getattr(target, "__name__", ""), None) is target:
        return _arithmetic(node, kinds)
    return (_of_name(target.__name__) if is_torchs(target) else None) or _annotated(target)


def _is_tensor(value: Any, kinds: Kinds) -> bool:
    return isinstance(value, Node) and kinds.get(value) == TENSOR


def _element(node: Node, kinds: Kinds) -> str | None:
    source, index = node.args
    value = value_of(source) if isinstance(source, Node) else None
    if isinstance(value, tuple | list) and isinstance(index, int) and -len(value) <= index < len(value):
        return _by_value(value[index])
    if not isinstance(source, Node) or (kinds.get(source) == SEVERAL and not isinstance(index, int)):
        return None
    return None if kinds.get(source) is None else TENSOR


def _arithmetic(node: Node, kinds: Kinds) -> str | None:
    """A tensor, where at least one is given, and else only numbers."""
    tensors = [_is_tensor(one, kinds) for one in node.args]
    others = [one for one, tensor in zip(node.args, tensors, strict=True) if not tensor]
    numbers = all(is_metadata(one) if isinstance(one, Node) else isinstance(one, _PLAIN) for one in others)
    return TENSOR if node.target.__name__ in _ARITHMETIC and any(tensors) and numbers else None


@functools.cache
def _of_name(name: str) -> str | None:
    """What a function or method of torch gives, told by the operators of the same name."""
    if name in _CASTS:
        return TENSOR
    packet = None if name.startswith("__") or "max_pool" in name else getattr(torch.ops.aten, name, None)
    return None if packet is None else _returned([getattr(packet, overload) for overload in packet.overloads()])


def _returned(overloads: Sequence[Any]) -> str | None:
    """What operators give, of those that take a tensor; None if that is not the same for all."""
    kinds = {_by_schema(one._schema.returns) for one in overloads if any(map(_takes, one._schema.arguments))}
    return kinds.pop() if len(kinds) == 1 else None


def _takes(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]", "List[Tensor]")


def _by_schema(returns: Sequence[Any]) -> str | None:
    types = [str(one.type) for one in returns]
    if types == ["Tensor"]:
        return TENSOR
    return SEVERAL if types == ["List[Tensor]"] or (types and set(types) == {"Tensor"}) else None


def _by_graph(module: GraphModule) -> str | None:
    (output,) = module.graph.find_nodes(op="output")
    kinds = kinds_of(module.graph)
    (given,) = output.args
    if isinstance(given, Node):
        return kinds[given]
    together = isinstance(given, tuple | list) and all(isinstance(one, Node) and kinds[one] == TENSOR for one in given)
    return SEVERAL if together else None


def _annotated(function: Callable[..., Any]) -> str | None:
    """What a function says that it returns."""
    try:
        said = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):  # names that are not there, or nothing that has annotations
        return None
    if said is torch.Tensor:
        return TENSOR
    each = [one for one in typing.get_args(said) if one is not Ellipsis]
    together = typing.get_origin(said) in (tuple, list) and each
    return SEVERAL if together and all(one is torch.Tensor for one in each) else None


def _shows(node: Node) -> Iterable[bool]:
    """For each use of a value, whether it could be used so if it were no tensor."""
    for user in node.users:
        target = user.target
        if isinstance(target, torch._ops.OpOverload):
            for number, argument in enumerate(target._schema.arguments):
                at = user.args[number] if number < len(user.args) else user.kwargs.get(argument.name)
                kind = str(argument.type)
                yield (kind == "Tensor" and at is node) or (
                    kind == "List[Tensor]" and isinstance(at, tuple | list) and node in at
                )
        elif user.op == "call_method":
            mine = user.args[0] is node and hasattr(torch.Tensor, str(target))
            yield mine and not any(hasattr(other, str(target)) for other in _OTHERS)
        elif user.op == "call_function" and is_torchs(target):
            yield name_of(user) in FRESH - {"cat", "stack"} and bool(user.args) and user.args[0] is node
