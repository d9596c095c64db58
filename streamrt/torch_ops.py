"""Guards as torch operators, for graphs: ``streamrt::enter_compute_stream`` and ``streamrt::exit_compute_stream``.

Importing this module imports torch and registers them.  `streamrt.compute_stream` does the work: which stream is
current is a value of the run, not of the graph (pytorch/TensorRT#3977).  Each thread has a stack of open guards.  The
token, an int64 tensor of the CPU, says by its value whether there is a guard to leave, so that equal entries give equal
values, and by its memory which one.

Rules:

- Entering is an ordered effect, so that no compiler drops, doubles or reorders it, and its token goes to the exit.
- An exit declares that it writes to its outputs.  It does not, but so whoever uses them afterwards depends on it, with
  no copy where operators run one by one.  (An operator may not return what it was given, and one that writes may not
  have effects.)
- What enters is kept until the exit, since its memory may otherwise go back to the stream that was left.  What leaves
  is recorded on the stream that goes on (`Tensor.record_stream`), since its memory belongs to the side stream.
- In compiled code other work may come to lie between the two.  That is no harm where it goes to the stream that is
  current then, as inductor's does (`streamrt.torch_inductor`, which refuses where it does not).  What an exit closes
  beside its own guard, since a compiler let it cross another one, is closed once.
- What a call that raised left open is closed by the next operator on the thread, once nobody has its token any more.
  ``with unwinding():`` around such calls (of exported programs, of code that was written by hand) closes it at once.
- `torch.vmap` enters and leaves once for the whole batch.
- `streamrt.torch_graphs` gives compilers a whole run as one operator, ``streamrt::guarded_run``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from streamrt.compute import compute_stream
from streamrt.errors import ArrayError, LifetimeError
from streamrt.libraries import library
from streamrt.torch_inductor import tell_inductor

__all__ = ["enter_compute_stream", "exit_compute_stream", "guarded_run", "open_guards", "register_run", "unwinding"]

# What may stand beside tensors; anything else may be a tensor, a proxy of one in a trace for instance.
_PLAIN = (int, float, complex, str, tuple, list, type(None), torch.SymInt, torch.SymFloat, torch.SymBool)
_NOTHING, _GUARD = torch.tensor(0, device="cpu"), torch.tensor(1, device="cpu")  # copied, which is the cheapest
REMEMBERED = 64  # guards that were left with one around them, and whose own exit may still come


_TENSORS = (torch.Tensor, torch.nn.Parameter)  # and no class that says itself what operators do with it
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transform, _jit_trace = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


class _Token:
    """Of a guard that was entered directly: who entered it leaves it, with `unwinding` around.

    `over`: it was left with one around it, and its own exit may still come.
    """

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False

    @staticmethod
    def expired() -> bool:
        return False


class _Open(NamedTuple):
    """A guard that is open on this thread, and what it keeps alive; `memory` is its token's.

    No exit can name a guard whose token is gone: the call that entered it has ended.
    """

    number: int
    address: int
    memory: StorageWeakRef | _Token
    guard: compute_stream
    inputs: list[torch.Tensor]


class _Stack(threading.local):
    """A thread's open guards, the innermost last."""

    def __init__(self) -> None:
        self.open: list[_Open] = []
        self.entered = 0  # guards so far
        self.ended: deque[tuple[int, StorageWeakRef]] = deque(maxlen=REMEMBERED)  # their tokens


_stack = _Stack()


def open_guards() -> int:
    """How many guards the calling thread has entered through the operators and not left.  Does not touch the device."""
    return len(_stack.open)


def enter_compute_stream(inputs: Sequence[Any]) -> torch.Tensor:
    """Enters `compute_stream(*inputs)` on the calling thread, as an operator that graphs can hold; returns its token.

    Enqueues on the side stream what `compute_stream` does (edge "guard.enter").  Does not block the host.  With tensors
    of ordinary memory only it orders nothing.
    """
    tensors = [value for value in inputs if not isinstance(value, _PLAIN)]
    token: torch.Tensor = torch.ops.streamrt.enter_compute_stream.default(tensors)
    return token


def exit_compute_stream(outputs: Sequence[torch.Tensor], token: torch.Tensor) -> list[torch.Tensor]:
    """Leaves the guard that the token names, and those opened in it; returns the outputs, for what comes after.

    Enqueues on the stream that was current at the entry a wait for the side stream (edge "guard.exit").  Does not block
    the host.  The exit of a guard that was left with one around it does nothing: compilers may move an entry in front
    of an exit.  Raises `LifetimeError` for a guard of another thread, or one that was left before.
    """
    outputs = list(outputs)
    for output in outputs:
        _check_leaves(output)
    torch.ops.streamrt.exit_compute_stream.default(outputs, token)
    return outputs


def _check_leaves(output: object) -> None:
    if isinstance(output, _PLAIN):
        raise ArrayError(f"a {type(output).__name__} leaves a guard, and only tensors can; read it after the exit")


def enter_directly(inputs: Sequence[Any]) -> Any:
    """`enter_compute_stream` for a graph that runs as it is, with no way through torch's dispatcher.

    Its token is for `exit_directly` alone, and the call has to be inside an `unwinding`.  Where anything but plain
    tensors goes in, or something looks at what operators run (a trace, a transform, autograd, a mode), it is the
    operator.
    """
    tensors = [value for value in inputs if not isinstance(value, _PLAIN)]
    if not _seen_by_nobody(tensors):
        return enter_compute_stream(inputs)
    stack = _stack
    if stack.open:
        _close_ended()
    if not _to_order(tensors):
        return None
    guard, token = compute_stream(*tensors), _Token()
    guard.__enter__()
    stack.entered += 1
    stack.open.append(_Open(stack.entered, 0, token, guard, tensors))
    return token


def exit_directly(outputs: Sequence[torch.Tensor], token: Any) -> list[torch.Tensor]:
    """`exit_compute_stream` of what `enter_directly` has entered."""
    outputs = list(outputs)
    for output in outputs:
        if type(output) not in _TENSORS:
            _check_leaves(output)
    if token is None:
        return outputs
    if not isinstance(token, _Token):
        return exit_compute_stream(outputs, token)
    stack = _stack.open
    depth = len(stack) - 1
    while depth >= 0 and stack[depth].memory is not token:
        depth -= 1
    if depth >= 0:
        _leave(depth, outputs)
    elif token.over:
        token.over = False
    else:
        raise LifetimeError("the guard is not open on this thread: enter and exit once each, in one call of the graph")
    return outputs


def _seen_by_nobody(tensors: Sequence[Any]) -> bool:
    """Whether operators on these tensors would run as they are, and nobody would hear of them."""
    for tensor in tensors:
        if type(tensor) not in _TENSORS:
            return False
    if _function_modes() or _dispatch_modes() or _transform() is not None or _jit_trace() is not None:
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


class unwinding:
    """Leaves at the end, also after an exception, what was entered through the operators inside the ``with`` and not
    left, so that an engine that raises does not leave its thread on a side stream.

    At its beginning it leaves what calls before it left open, as every operator does: those whose tokens are gone.

    Enqueues what `exit_compute_stream` does on the streams of the entries.  Does not block the host.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        stack = _stack
        if stack.open:
            _close_ended()
        self._before = stack.entered

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        stack = _stack.open
        if stack and stack[-1].number > self._before:
            _close_since(self._before)


def _close_since(number: int) -> None:
    """Closes what was entered after that one, the innermost first; one that fails does not keep the others from it."""
    stack, failure = _stack.open, None
    while stack and stack[-1].number > number:
        guard = stack.pop().guard
        if guard.is_over():  # with a guard around it, as where an exception goes through both
            continue
        try:
            guard.__exit__(None, None, None)
        except BaseException as error:  # noqa: BLE001 - raised below, when all had their turn
            failure = failure or error
    if failure is not None:
        raise failure


def _close_ended() -> None:
    """Closes what calls that have ended left open, while it is the innermost that is open on the thread: something else
    that is current now will be taken back before."""
    stack = _stack.open
    while stack and stack[-1].memory.expired():
        guard = stack[-1].guard
        if guard.is_innermost():
            stack.pop().guard.__exit__(None, None, None)
        elif guard.is_over():
            stack.pop()
        else:
            break


def _to_order(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there is anything to order: a tensor on a GPU, or in the memory of a virtual device.

    While a CUDA graph is captured there is not: its stream is the current one and no default stream, and a fence with
    another library's would break the capture.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            return not torch.cuda.is_current_stream_capturing()
        if tensor.is_cpu and library("torch").device_of(tensor).has_streams:
            return True
    return False


def _enter(inputs: list[torch.Tensor]) -> torch.Tensor:
    stack = _stack
    if stack.open:
        _close_ended()
    if not _to_order(inputs):
        return _NOTHING.clone()
    guard = compute_stream(*inputs)
    guard.__enter__()
    token = _GUARD.clone()
    stack.entered += 1
    memory = StorageWeakRef(token.untyped_storage())
    stack.open.append(_Open(stack.entered, token.data_ptr(), memory, guard, inputs))
    return token


def _exit(outputs: list[torch.Tensor], token: torch.Tensor) -> None:
    address, stack = token.data_ptr(), _stack.open
    if stack and stack[-1].address != address:
        _close_ended()
    for depth in range(len(stack) - 1, -1, -1):
        if stack[depth].address == address and not stack[depth].memory.expired():
            break
    else:
        if int(token) == 0 or _ended(address):
            return
        raise LifetimeError(
            "the token's guard is not open on this thread: it was left before, or entered by another thread; "
            "enter and exit once each, in one call of the graph, with the token itself and no copy of it"
        )
    _leave(depth, outputs)


def _leave(depth: int, outputs: Sequence[torch.Tensor]) -> None:
    """Leaves the open guard at that depth, and those inside it, with what goes on outside."""
    stack = _stack.open
    inside = _current(outputs)
    _give(stack[depth].guard, outputs)
    for inner in stack[depth + 1 :]:
        if isinstance(inner.memory, _Token):
            inner.memory.over = True
        else:
            _stack.ended.append((inner.address, inner.memory))
    _close_since(stack[depth].number - 1)
    _record(outputs, inside)


def _ended(address: int) -> bool:
    """Whether that guard was left with one around it; this exit of its own is then the last one."""
    ended = _stack.ended
    for number, (at, memory) in enumerate(ended):
        if at == address and not memory.expired():
            del ended[number]
            return True
    return False


def _current(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """The handle of torch's current stream on each GPU of the tensors."""
    return {tensor.get_device(): _handle(tensor.get_device()) for tensor in tensors if tensor.is_cuda}


def _handle(index: int) -> int:
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle


@functools.cache
def _default_stream(index: int) -> Any:
    return torch.cuda.default_stream(index)


def _record(outputs: Sequence[torch.Tensor], inside: dict[int, int]) -> None:
    """Tells torch's allocator that the streams which go on use what was made on those of `inside`."""
    for index, handle in inside.items():
        outside = _handle(index)
        if outside != handle:
            stream = torch.cuda.current_stream(index) if outside else _default_stream(index)
            for output in outputs:
                if output.is_cuda and output.get_device() == index:
                    output.record_stream(stream)


def _give(guard: compute_stream, outputs: Sequence[torch.Tensor]) -> None:
    """The same for memory of virtual devices, which is the runtime's own."""
    plain = [output for output in outputs if not output.is_cuda]
    if plain:
        guard.gives(plain)


# whole runs, for compilers


_INFERENCE = "a compiled run of engines is for inference: call it under torch.no_grad(), or detach what goes in"


class Run(Protocol):
    """What ``streamrt::guarded_run`` calls: `fast` runs it, `plain` is for tracing and says the same; `trains` tells
    whether it holds parameters that require grad."""

    trains: bool
    plain: Callable[..., Sequence[torch.Tensor]]
    fast: Callable[..., Sequence[torch.Tensor]]


_runs: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()


_registering = threading.Lock()


def register_run(name: str, run: Run) -> Run:
    """Lets ``streamrt::guarded_run`` find a run by its name, as long as the run lives; gives the one that it finds.

    That is another one if the name was taken: whoever gives two runs one name says that they are the same.  Does not
    touch the device.
    """
    with _registering:
        return _runs.setdefault(name, run)


def guarded_run(values: Sequence[Any], name: str) -> list[torch.Tensor]:
    """The registered run of that name, called with tensors and sizes under `compute_stream`, as one operator.

    Enqueues what `compute_stream` does, and what the run does on the side stream.  Does not block the host.  Raises
    `LifetimeError` where the run is gone, `ArrayError` for values that an operator cannot take and for those that
    require grad, unless gradients are off.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [value for value in values if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)]
    numbers = [value for value in values if isinstance(value, (float, torch.SymFloat))]
    kinds = "".join([_kind(value) for value in values])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ArrayError(_INFERENCE)
    outputs: list[torch.Tensor] = torch.ops.streamrt.guarded_run.default(tensors, sizes, numbers, kinds, name)
    return outputs


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "t"
    if isinstance(value, bool):
        return "T" if value else "F"
    if isinstance(value, (int, torch.SymInt)):
        return "i"
    if isinstance(value, (float, torch.SymFloat)):
        return "f"
    raise ArrayError(f"a guarded run takes tensors, ints and floats, not a {type(value).__name__}; make it a tensor")


def _find(name: str) -> Run:
    run = _runs.get(name)
    if run is None:
        raise LifetimeError(
            f"the guarded run {name!r} is gone: keep the guarded module, and compile it again in each process"
        )
    return run


def _values(tensors: Sequence[torch.Tensor], sizes: Sequence[Any], numbers: Sequence[Any], kinds: str) -> list[Any]:
    each = {"t": iter(tensors), "i": iter(sizes), "f": iter(numbers)}
    return [kind == "T" if kind in "TF" else next(each[kind]) for kind in kinds]


def _run(
    tensors: list[torch.Tensor], sizes: list[int], numbers: list[float], kinds: str, name: str
) -> list[torch.Tensor]:
    run, values = _find(name), _values(tensors, sizes, numbers, kinds)
    if _stack.open:
        _close_ended()
    if not _to_order(tensors):
        return _apart(run.fast(*values), tensors)
    guard = compute_stream(*tensors)
    guard.__enter__()
    try:
        outputs = _apart(run.fast(*values), tensors)
        inside = _current(outputs)
        _give(guard, outputs)
    finally:
        guard.__exit__(None, None, None)
    _record(outputs, inside)
    return outputs


def _fake_run(
    tensors: list[torch.Tensor], sizes: list[Any], numbers: list[Any], kinds: str, name: str
) -> list[torch.Tensor]:
    run, values = _find(name), _values(tensors, sizes, numbers, kinds)
    if run.trains and torch.is_grad_enabled():
        raise ArrayError(_INFERENCE)
    mode = torch._guards.detect_fake_mode(tensors)
    if mode is None:
        return _apart(run.plain(*values), tensors)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # the parameters of modules in the run
    try:
        return _apart(run.plain(*values), tensors)
    finally:
        mode.allow_non_fake_inputs = before


def _apart(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, where one shares memory with an input or an earlier output as a copy: operators may not alias."""
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    apart = []
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise ArrayError(f"a {type(output).__name__} leaves a guarded run, and only tensors can; read it after it")
        storage = output.untyped_storage()._cdata
        apart.append(output.clone() if storage in seen else output)
        seen.add(storage)
    return apart


# under torch.vmap: guards order whole tensors, so an entry and an exit take these as they are, batched or not


def _vmap_enter(info: Any, in_dims: Any, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, None]:
    return torch.ops.streamrt.enter_compute_stream.default(inputs), None


def _vmap_exit(info: Any, in_dims: Any, outputs: list[torch.Tensor], token: torch.Tensor) -> tuple[None, None]:
    torch.ops.streamrt.exit_compute_stream.default(outputs, token)
    return None, None


def _vmap_run(info: Any, in_dims: Any, *args: Any) -> NoReturn:
    raise ArrayError(
        "a compiled run of engines has no batching rule: call torch.vmap on the guarded module as it is, with no "
        "torch.compile around it, or give the engines the whole batch"
    )


# registration

_definitions = torch.library.Library("streamrt", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_definitions.define("enter_compute_stream(Tensor[] inputs) -> Tensor", tags=_tags)
_definitions.define("exit_compute_stream(Tensor(a!)[] outputs, Tensor token) -> ()", tags=_tags)
_definitions.define(
    "guarded_run(Tensor[] tensors, SymInt[] sizes, float[] numbers, str kinds, str name) -> Tensor[]", tags=_tags
)
for _name, _function in (("enter_compute_stream", _enter), ("exit_compute_stream", _exit), ("guarded_run", _run)):
    # Where code that is compiled falls back to Python, the compiler would look into these, too.
    _definitions.impl(_name, torch._disable_dynamo(_function), "CompositeExplicitAutograd")


def _fake_enter(inputs: list[torch.Tensor]) -> torch.Tensor:
    tell_inductor()
    return torch.empty((), dtype=torch.int64, device="cpu")


def _fake_exit(outputs: list[torch.Tensor], token: torch.Tensor) -> None:
    tell_inductor()


torch.library.register_fake("streamrt::enter_compute_stream", _fake_enter, lib=_definitions)
torch.library.register_fake("streamrt::exit_compute_stream", _fake_exit, lib=_definitions)
torch.library.register_fake("streamrt::guarded_run", _fake_run, lib=_definitions)
torch.library.register_vmap("streamrt::enter_compute_stream", _vmap_enter, lib=_definitions)
torch.library.register_vmap("streamrt::exit_compute_stream", _vmap_exit, lib=_definitions)
torch.library.register_vmap("streamrt::guarded_run", _vmap_run, lib=_definitions)


def _order_effects() -> None:
    """An ordered effect for the entry: with no tensor that it writes, data alone would not keep two of them apart."""
    from torch._higher_order_ops import effects

    kind = getattr(effects, "_EffectType", None) or effects.EffectType
    effects._register_effectful_op(torch.ops.streamrt.enter_compute_stream.default, kind.ORDERED)


_order_effects()
