"""What a node of a torch.fx graph does, as far as a guard has to know: read on the host, write in place, tell a shape.

Nothing is run for it: nodes are judged by the schemas of operators, and by name where there is none.  A node that is
not known counts as one that may do anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from streamrt.errors import ArrayError

IsEngine = Callable[[Node], bool]
Engines = Any
"""Which nodes are engines, as users say it: a function of the node, an operator, or several operators."""


def words(text: str) -> frozenset[str]:
    """The words of a text.  Does not touch the device."""
    return frozenset(text.split())


# What blocks the host, or ends in a number of the host's.
HOST_READS = words(
    "allclose argwhere bincount cpu data_ptr equal histc is_nonzero item local_scalar_dense masked_select nonzero "
    "numpy repeat_interleave tolist unique unique_consecutive unique_dim"
)
METADATA = words(
    "dim element_size is_complex is_contiguous is_floating_point ndimension nelement numel size storage_offset "
    "stride sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride"
)
VIEW_ATTRIBUTES = words("H T imag mH mT real")
METADATA_ATTRIBUTES = words("device dtype is_cuda itemsize layout nbytes ndim shape")
STATISTICS = words("batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm")
WRITING_OPERATORS = words(
    "delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem"
)
# What always gives memory of its own.  What is not here may be a view, or what it was given.
FRESH = words(
    "abs add addmm amax amin and baddbmm bmm bitwise_and bitwise_or cat clamp clone conv1d conv2d conv3d cos div "
    "empty_like eq erf exp floordiv full_like gelu ge gt layer_norm le leaky_relu linear log log_softmax lt matmul "
    "maximum mean minimum mm mod mul ne neg ones_like or pow relu rsqrt sigmoid silu sin softmax sqrt stack sub sum "
    "tan tanh truediv xor zeros_like"
)
TORCH_NAMESPACES = (torch, torch.nn.functional, torch._C._nn, torch.special, torch.linalg, torch.fft, torch.Tensor)


def asked_of(engines: Engines) -> IsEngine:
    """The question that `engines` stands for; Torch-TensorRT's where it is None.

    Does not touch the device.  Raises `ArrayError` for what is none.
    """
    if engines is None:
        return is_tensorrt_engine
    several = engines if isinstance(engines, (list, tuple, set, frozenset)) else (engines,)
    operators = [getattr(one, "_opoverload", one) for one in several]  # what `torch.library.custom_op` gives has one
    if all(isinstance(one, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) for one in operators):
        targets = {getattr(one, "overloadpacket", one) for one in operators}
        return lambda node: getattr(node.target, "overloadpacket", node.target) in targets
    if callable(engines):
        asked: IsEngine = engines
        return asked
    raise ArrayError(
        f"is_engine={engines!r} is neither a function of a node nor an operator; write is_engine=torch.ops.mine.engine "
        "(several in a list), or lambda node: ..."
    )


def is_tensorrt_engine(node: Node) -> bool:
    """Whether the node runs an engine of Torch-TensorRT: its operator, or a module that holds an engine.

    Does not touch the device.
    """
    if node.op == "call_function":
        return str(node.target).startswith("tensorrt.execute_engine")
    return node.op == "call_module" and "TensorRTModule" in type(module_of(node)).__name__


def unpacks(node: Node) -> bool:
    """Whether the node takes one element of a value.  Does not touch the device."""
    return node.target is operator.getitem and isinstance(node.args[1], int)


ENGINE = "streamrt_engine"


def mark_engines(graph: Graph, engines: Collection[Node]) -> None:
    """Notes in the nodes of a graph which ones run engines; copies of the nodes say so, too.

    Does not touch the device.
    """
    for node in graph.nodes:
        node.meta[ENGINE] = node in engines


def is_marked(node: Node) -> bool:
    """Whether `mark_engines` was told that the node runs an engine.  Does not touch the device."""
    return bool(node.meta.get(ENGINE))


def places_of(graph: Graph) -> list[tuple[str, int]]:
    """Where the marked nodes are: what each calls, and how many nodes in front of it call the same.

    That stays what it is where a graph is pickled, which keeps neither names nor notes.  Does not touch the device.
    """
    return [place for node, place in _places(graph) if is_marked(node)]


def mark_places(graph: Graph, places: Collection[tuple[str, int]]) -> None:
    """Marks the nodes at these places.  Does not touch the device."""
    mark_engines(graph, [node for node, place in _places(graph) if place in places])


def _places(graph: Graph) -> Iterator[tuple[Node, tuple[str, int]]]:
    seen: dict[str, int] = {}
    for node in graph.nodes:
        if node.op in ("call_function", "call_module"):
            called = f"{node.op} {_text(node.target)}"
            seen[called] = seen.get(called, -1) + 1
            yield node, (called, seen[called])


def _text(target: Any) -> str:
    if isinstance(target, str | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def module_of(node: Node) -> torch.nn.Module | None:
    """The module that a ``call_module`` node calls, None where the graph has no owner.  Does not touch the device."""
    owner = node.graph.owning_module
    return None if owner is None else owner.get_submodule(str(node.target))


def is_object(node: Node) -> bool:
    """Whether a ``get_attr`` node gives what is no tensor: an engine's own object.  Does not touch the device."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return False
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return not isinstance(found, torch.Tensor)


def name_of(node: Node) -> str:
    """The bare name of what a node calls: ``add`` of ``aten.add.Tensor``.  Does not touch the device."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).partition("::")[2].lstrip("_")
    if isinstance(target, str):
        return target.lstrip("_") if node.op == "call_method" else target
    return str(getattr(target, "__name__", target)).lstrip("_")


def value_of(node: Node) -> Any:
    """The example of its value that whoever made the graph left in the node, or None.  Does not touch the device."""
    for key in ("val", "example_value"):
        if node.meta.get(key) is not None:
            return node.meta[key]
    return None


def is_metadata(node: Node) -> bool:
    """Whether the value is of the host's own and known without the device: sizes, and what is calculated from them.

    Does not touch the device.
    """
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return False
    if node.op in ("placeholder", "get_attr"):
        return isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)
    if node.op == "call_method":
        return node.target in METADATA
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return len(node.args) > 1 and node.args[1] in METADATA_ATTRIBUTES
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return name_of(node) in METADATA
    if _module_name(node) in ("_operator", "operator", "math", "builtins") or name_of(node).startswith("sym_"):
        return name_of(node) not in WRITING_OPERATORS and all(map(is_metadata, node.all_input_nodes))
    return False


def _module_name(node: Node) -> str:
    return str(getattr(node.target, "__module__", ""))


def reason_outside(node: Node, inside: Collection[Node], is_engine: IsEngine) -> str | None:
    """Why the node may not lie in a run whose nodes so far are `inside`; None if it may.  Does not touch the device."""
    if node.op == "output":
        return "the graph's output"
    if is_metadata(node):
        return None
    name = name_of(node)
    if node.op in ("call_function", "call_method"):
        reason = _reason_of_call(node, name)
    elif node.op == "call_module":
        reason = _reason_of_module(module_of(node), name)
    else:
        reason = f"{node.op} is not known"
    if reason is not None:
        return reason
    value = value_of(node)
    if value is not None and not _all_tensors(value):
        return f"{name} gives the host a {type(value).__name__}"
    if any(not is_fresh(written, inside, is_engine) for written in writes_to(node)):
        return f"{name} writes to what may lie outside of the run"
    return None


def _all_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_all_tensors, value))
    return value is None or isinstance(value, torch.Tensor)


def _reason_of_call(node: Node, name: str) -> str | None:
    target = node.target
    reads = name in HOST_READS or (name == "where" and len(node.args) == 1)
    if reads or (name == "to" and _to_the_host(node)):
        return f"{name} reads on the host"
    if name in STATISTICS and not _not_training(node):
        return f"{name} may write its statistics"
    if isinstance(target, torch._ops.OpOverload):
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        return f"{name} reads on the host" if any(tag in target.tags for tag in tags) else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        return None
    if node.op == "call_method":
        return None if hasattr(torch.Tensor, str(target)) else f"{name} is no method of tensors"
    if target is getattr and len(node.args) > 1 and node.args[1] in VIEW_ATTRIBUTES:
        return None
    if _module_name(node) in ("_operator", "operator"):
        return None
    return None if is_torchs(target) else f"{name} is not known"


def is_torchs(target: Any) -> bool:
    """Whether it is a function of torch's own.  Does not touch the device."""
    plain = getattr(target, "__name__", "")
    return any(getattr(namespace, plain, None) is target for namespace in TORCH_NAMESPACES)


def says_itself(node: Node) -> bool:
    """Whether the text of a graph says all there is to say of a node: operators and functions of torch, by their names.

    Does not touch the device.
    """
    if node.op != "call_function":
        return node.op in ("placeholder", "call_method", "output")
    target = node.target
    operators = isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return operators or _module_name(node) in ("_operator", "operator", "math", "builtins") or is_torchs(target)


def _to_the_host(node: Node) -> bool:
    """Whether ``to`` goes to the CPU, or where only the run can tell."""
    for argument in (*node.args[1:], *node.kwargs.values()):
        if isinstance(argument, Node) and argument.target is getattr and argument.args[1] == "dtype":
            continue
        value = value_of(argument) if isinstance(argument, Node) else argument
        if isinstance(argument, Node) and value is None:
            return True
        device = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(device, str | torch.device) and torch.device(device).type == "cpu":
            return True
    return False


def _not_training(node: Node) -> bool:
    """Whether a batch norm says itself that it only reads its statistics."""
    return node.kwargs.get("training", node.args[5] if len(node.args) > 5 else None) is False


def _reason_of_module(module: torch.nn.Module | None, name: str) -> str | None:
    if isinstance(module, GraphModule):
        return _reason_of_graph(module, name)
    if module is None or not type(module).__module__.startswith("torch.nn.modules."):
        return f"what {name} does is not known"
    for child in module.modules():
        if not type(child).__module__.startswith("torch.nn.modules."):
            return f"what {name} does is not known"
        if child.training and any(True for _ in child.buffers(recurse=False)):
            return f"{name} may write its statistics"
        if getattr(child, "inplace", False):
            return f"{name} may write to what lies outside of the run"
    return None


def _reason_of_graph(module: GraphModule, name: str) -> str | None:
    """A submodule is inside as a whole: nothing in it may read on the host or write to what it was given."""
    inside: set[Node] = set()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        reason = reason_outside(node, inside, lambda _: False)
        if reason is not None:
            return f"in {name}, {reason}"
        inside.add(node)
    return None


def writes_to(node: Node) -> list[Node]:
    """The values that the node writes to in place.  Does not touch the device."""
    target, name = node.target, name_of(node)
    written: list[Any] = []
    if isinstance(target, torch._ops.OpOverload):
        for number, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                at = node.args[number] if number < len(node.args) else None
                written.append(node.kwargs.get(argument.name, at))
    elif node.op in ("call_function", "call_method"):
        bare = target if isinstance(target, str) else getattr(target, "__name__", "")
        in_place = bare.endswith("_") and not bare.endswith("__")
        in_place |= bare.startswith("__") and bare.strip("_") in WRITING_OPERATORS
        in_place |= _module_name(node) in ("_operator", "operator") and name in WRITING_OPERATORS
        if (in_place or node.kwargs.get("inplace")) and node.args:
            written.append(node.args[0])
        written.append(node.kwargs.get("out"))
    found: list[Node] = []
    torch.fx.map_arg(written, found.append)
    return found


def may_be_view(node: Node, is_engine: IsEngine) -> bool:
    """Whether the value may share memory with what the node was given.  Does not touch the device."""
    if is_engine(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return any(returned.alias_info is not None for returned in node.target._schema.returns)
    named = node.op in ("call_function", "call_method") and name_of(node).rstrip("_") in FRESH
    return not named or bool(writes_to(node)) or _reason_of_call(node, name_of(node)) is not None


def may_write(node: Node) -> bool:
    """Whether the node may write to memory that was there before.  Does not touch the device."""
    if node.op in ("placeholder", "get_attr", "output") or is_metadata(node):
        return False
    if node.op == "call_module":
        return _reason_of_module(module_of(node), name_of(node)) is not None
    reason = _reason_of_call(node, name_of(node))
    return bool(writes_to(node)) or (reason is not None and not reason.endswith("on the host"))


def is_fresh(node: Node, inside: Collection[Node], is_engine: IsEngine) -> bool:
    """Whether the memory of a value was surely made in the run: where it may be a view, that of what it may be of.

    Does not touch the device.
    """
    if node not in inside:
        return False
    return not may_be_view(node, is_engine) or all(
        is_fresh(source, inside, is_engine) for source in node.all_input_nodes
    )
