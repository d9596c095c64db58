"""What inductor makes of the operators of a guard: calls that stay where they are, or a refusal.

In its Python wrapper inductor reads the current stream in front of each kernel that it generated, so what lies behind
an entry runs on the side stream and what lies behind an exit on the default one, in whatever order the data allows: all
that is enqueued in between is fenced as a whole.  Calls of other operators, engines among them, are held inside by
dependencies of the scheduler, since the effect of an entry does not reach it.  (torch 2.11 and 2.13: ``with_effects``
notes its order by the name of the buffer, where the scheduler asks by that of the operation.)

Refused, before anything runs: the C++ wrapper, which reads the stream once; CUDA graphs of the compiler, whose parts
are captured apart from the entry; a torch whose wrapper does neither, which is tried out and not told by its version.

The memory of what is generated inside belongs to the side stream, and what inductor reuses of it outside is not
recorded on the stream there.  On the thread that made it that is safe to drop (`streamrt.compute`); for results that
other threads drop, `streamrt.torch_graphs.guarded_backend` is the way.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from streamrt.errors import UnavailableError

__all__ = ["reads_the_stream_each_time", "tell_inductor"]

_GENERATED = ("cuda",)  # devices whose kernels inductor generates, and for which there are side streams
_told = False


def tell_inductor() -> None:
    """Gives inductor, once it is imported, the lowerings of the guards' operators.  Called before it lowers any graph.

    Does not touch the device.
    """
    global _told
    lowering = sys.modules.get("torch._inductor.lowering")
    if _told or lowering is None or not hasattr(lowering, "fallback_handler"):
        return
    _told = True
    operators = torch.ops.streamrt
    for operation in (operators.enter_compute_stream.default, operators.exit_compute_stream.default):
        fall_back = lowering.fallback_handler(operation, add_to_fallback_set=False)
        lowering.register_lowering(operation, type_promotion_kind=None)(_held(fall_back))


def _held(fall_back: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of an entry or an exit."""

    def lower(tensors: Sequence[Any], *token: Any) -> Any:
        graph = _graph()
        if any(tensor.get_device().type in _GENERATED for tensor in tensors):
            reason = _why_not(graph)
            if reason is not None:
                raise UnavailableError(
                    f"between streamrt's enter and exit inductor's own kernels would have no order, since {reason}; "
                    "compile with backend=streamrt.torch_graphs.guarded_backend('inductor'), or the module of "
                    "guard_engines()"
                )
        before = len(graph.operations)
        lowered = fall_back(tensors, *token)
        _hold(graph, before)
        return lowered

    return lower


def _graph() -> Any:
    from torch._inductor.virtualized import V

    return V.graph


def _why_not(graph: Any) -> str | None:
    """Why kernels of this graph would not go where the guard says; None if they do."""
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    if graph.cpp_wrapper or graph.aot_mode or getattr(config, "fx_wrapper", False):
        return "only its Python wrapper reads the current stream for each"
    if config.triton.cudagraphs:
        return "its CUDA graphs capture them apart from the guard (mode='reduce-overhead', triton.cudagraphs)"
    if not reads_the_stream_each_time(PythonWrapperCodegen) or not hasattr(graph, "additional_buffer_deps"):
        return f"torch {torch.__version__} does not read the current stream for each"
    return None


class _Sheet:
    """As much of inductor's wrapper as it takes to write the call of a kernel; notes the lines."""

    def __init__(self, wrapper: Any) -> None:
        self.lines: list[str] = []
        self.kernel_autotune_calls = SimpleNamespace(writeline=len)
        self.write_get_raw_stream = functools.lru_cache(None)(functools.partial(wrapper.write_get_raw_stream, self))

    def writeline(self, line: str) -> None:
        self.lines.append(line)

    def prepare_triton_kernel_call(self, arguments: Any) -> Any:
        return arguments

    def write_get_raw_stream_header(self) -> None:
        pass


@functools.cache
def reads_the_stream_each_time(wrapper: Any) -> bool:
    """Whether code of that wrapper reads the current stream in front of every kernel: two calls are written to see.

    Does not touch the device.
    """
    try:
        sheet = _Sheet(wrapper)
        for _ in range(2):
            wrapper._generate_kernel_call_helper(sheet, "kernel", (), device=torch.device("cuda", 0), triton=False)
    except (AttributeError, TypeError):  # another torch, whose wrapper is made otherwise
        return False
    read = [number for number, line in enumerate(sheet.lines) if "get_raw_stream(" in line]
    called = [number for number, line in enumerate(sheet.lines) if "kernel.kernel(" in line]
    return len(read) == len(called) == 2 and read[0] < called[0] < read[1] < called[1]


# order

_fences: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # what a graph's last one became


def _hold(graph: Any, before: int) -> None:
    """Keeps calls of operators on their side of the entry or exit that was just lowered, and of the one before it.

    `before` is how many operations there were.  All dependencies are of later ones on earlier ones.
    """
    from torch._inductor.ir import ExternKernel, MultiOutput

    fence, last = graph.operations[before:], _fences.get(graph, [])
    since = graph.operations.index(last[-1]) + 1 if last else 0
    called = graph.operations[since:before]
    calls = [made for made in called if isinstance(made, ExternKernel) and not isinstance(made, MultiOutput)]
    for made in calls:
        _follow(graph, made, last)
    for made in fence:
        _follow(graph, made, [*last, *calls])
    _fences[graph] = fence


def _follow(graph: Any, made: Any, earlier: Sequence[Any]) -> None:
    """Whatever inductor does for the sake of memory or fusion, that operation comes after the earlier ones."""
    for one in earlier:
        graph.additional_buffer_deps[made.operation_name].add(one.get_name())
