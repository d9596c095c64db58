"""The operators of the guards: what torch checks of operators, every way of tracing and compiling, and their order."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_guards import (  # noqa: E402
    BACKENDS,
    ON_ONE,
    QUIET,
    WATCHDOG,
    assign,
    current,
    default,
    opened,
    tensor,
    values,
    waits,
)

from bench import engines  # noqa: E402
from bench.engines import scale, shift  # noqa: E402
from streamrt import torch_ops  # noqa: E402
from streamrt.compute import compute_stream  # noqa: E402
from streamrt.device import Device  # noqa: E402
from streamrt.errors import ArrayError, LifetimeError  # noqa: E402
from streamrt.guard import using  # noqa: E402
from streamrt.stream import Stream  # noqa: E402
from streamrt.testing import Latch, without  # noqa: E402
from streamrt.torch_ops import (  # noqa: E402
    enter_compute_stream,
    exit_compute_stream,
    guarded_run,
    open_guards,
    register_run,
    unwinding,
)

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
    by_hand(x)
    assign(x, 1.0)
    default(found).synchronize(WATCHDOG)
    engines.engine_calls.clear()
    return found


def by_hand(x: Any) -> Any:
    """A guard written by hand, around two engines with a break; and a second one over the same input."""
    token = enter_compute_stream([x])
    y = scale(shift(scale(x, 2.0), 1.0), 3.0)
    (y,) = exit_compute_stream([y], token)
    token = enter_compute_stream([x])
    z = scale(x, 5.0)
    (z,) = exit_compute_stream([z], token)
    return shift(y, 1.0), shift(z, 1.0)


def expected(x: float) -> list[float]:
    return [(2 * x + 1) * 3 + 1, 5 * x + 1]


# what torch checks


def test_torch_finds_no_fault_with_the_operators() -> None:
    x, zero = torch.ones(3), torch.tensor(0)
    operators = torch.ops.streamrt
    with unwinding():
        torch.library.opcheck(operators.enter_compute_stream.default, ([x],))
        torch.library.opcheck(operators.exit_compute_stream.default, ([x.clone(), x.clone()], zero))
    run = Inner(lambda x, n, f: (x * n + f, x))
    register_run("checked", run)
    torch.library.opcheck(operators.guarded_run.default, ([x], [2], [0.5], "tif", "checked"))


def test_torch_finds_no_fault_with_an_entry_that_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """It enters time and again, and compares the tokens."""
    monkeypatch.setattr(torch_ops, "_to_order", lambda _: True)
    entered = torch_ops._stack.entered
    with unwinding():
        torch.library.opcheck(torch.ops.streamrt.enter_compute_stream.default, ([torch.ones(3)],))
        assert torch_ops._stack.entered > entered + 1


@pytest.mark.gpu
def test_torch_finds_no_fault_on_a_gpu() -> None:
    device = opened("cuda:0")
    x = tensor(device, 1.0, 2.0)
    with unwinding():
        torch.library.opcheck(torch.ops.streamrt.enter_compute_stream.default, ([x],))
    run = Inner(lambda x: (scale(x, 2.0),))
    register_run("on a GPU", run)
    torch.library.opcheck(torch.ops.streamrt.guarded_run.default, ([x], [], [], "t", "on a GPU"))


class Inner:
    """A run, as the operator sees it."""

    def __init__(self, function: Any, fast: Any = None) -> None:
        self.plain = function
        self.trains = False
        self.fast = fast or function


def test_fakes_need_no_device() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, device="cuda")
        token = enter_compute_stream([x])
        (y,) = exit_compute_stream([x], token)
        assert token.device.type == "cpu"
        assert y is x
        assert open_guards() == 0


def test_importing_the_runtime_imports_no_torch_and_the_operators_no_compiler() -> None:
    program = (
        "import sys, streamrt; assert 'torch' not in sys.modules; import streamrt.torch_graphs; "
        "assert 'torch._inductor.compile_fx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


# tracing and compiling


def test_symbolic_tracing_keeps_both(anywhere: Device) -> None:
    traced = torch.fx.symbolic_trace(by_hand)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    names = [node.name for node in traced.graph.nodes]
    assert [name.partition("_compute")[0] for name in names if "compute_stream" in name] == ["enter", "exit"] * 2
    with waits() as seen:
        y, z = traced(tensor(anywhere, 1.0, 2.0))
    default_done(anywhere)
    assert [values(y)[1], values(z)[1]] == expected(2.0)
    assert seen == ([] if anywhere.kind == "cpu" else ["guard.enter", "guard.exit"] * 2)


def default_done(device: Device) -> None:
    if device.has_streams:
        default(device).synchronize(WATCHDOG)


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_both(anywhere: Device, strict: bool) -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return by_hand(x)

    exported = torch.export.export(Model(), (tensor(anywhere, 1.0, 2.0),), strict=strict)
    lowered = exported.run_decompositions({})
    for program in (exported, lowered):
        assert program.graph_module.code.count("enter_compute_stream.default") == 2
        assert program.graph_module.code.count("exit_compute_stream.default") == 2
    with waits() as seen:
        y, z = exported.module()(tensor(anywhere, 1.0, 3.0))
    default_done(anywhere)
    assert [values(y)[1], values(z)[1]] == expected(3.0)
    assert seen == ([] if anywhere.kind == "cpu" else ["guard.enter", "guard.exit"] * 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["cpu", "host:0"])
def test_a_guard_by_hand_survives_compilers(name: str, backend: str) -> None:
    device = opened(name)
    compiled = torch.compile(by_hand, backend=backend, fullgraph=True)
    for x in (1.0, 2.0):
        with waits() as seen:
            y, z = compiled(tensor(device, 0.0, x))
        default_done(device)
        assert [values(y)[1], values(z)[1]] == expected(x)
    assert [edge for edge in seen if edge.startswith("guard")] == (
        [] if name == "cpu" else ["guard.enter", "guard.exit"] * 2
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_guard_by_hand_survives_compilers_on_a_gpu(backend: str) -> None:
    device = opened("cuda:0")
    compiled = torch.compile(by_hand, backend=backend, fullgraph=True)
    compiled(tensor(device, 0.0, 1.0))
    with waits() as seen:
        y, z = compiled(tensor(device, 0.0, 2.0))
    torch.cuda.synchronize()
    assert [values(y)[1], values(z)[1]] == expected(2.0)
    assert seen == ["guard.enter", "guard.exit"] * 2


def test_without_its_effect_two_entries_become_one() -> None:
    """Why entering is an ordered effect: compilers merge operators of the same inputs that say nothing of effects."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._higher_order_ops import effects

    name = "streamrt::enter_compute_stream"
    kind = effects._get_effect(name)
    assert kind is not None

    def entries() -> int:
        torch._dynamo.reset()
        found = []

        def count(module: Any, _: Any) -> Any:
            merged = torch.fx.GraphModule(module, fx_graph_cse(module.graph))
            found.append(merged.code.count("enter_compute_stream.default"))
            return module.forward

        torch.compile(by_hand, backend=aot_autograd(fw_compiler=count))(torch.ones(2))
        return sum(found)

    assert entries() == 2
    effects._register_effectful_op(name, None)
    try:
        assert entries() == 1
    finally:
        effects._register_effectful_op(name, kind)


# order


def test_what_is_inside_waits_for_what_was_before_and_what_is_after_for_it(device: Device) -> None:
    x = tensor(device, 0.0, 0.0)
    with Latch(default(device)):
        assign(x, 4.0)
        y, z = by_hand(x)
    default(device).synchronize(WATCHDOG)
    assert [values(y)[0], values(z)[0]] == expected(4.0)


def test_without_its_edge_the_entry_orders_nothing(device: Device) -> None:
    x = tensor(device, 0.0, 0.0)
    with Latch(default(device)), without("guard.enter"):
        assign(x, 4.0)
        token = enter_compute_stream([x])
        y = scale(x, 2.0)
        current(device).synchronize(WATCHDOG)
        exit_compute_stream([y], token)
    default(device).synchronize(WATCHDOG)
    assert values(y)[0] == 0.0


@pytest.mark.parametrize("ordered", [True, False])
def test_the_exit_orders_what_comes_after(device: Device, ordered: bool) -> None:
    x, seen = tensor(device, 4.0, 4.0), tensor(device, -1.0, -1.0)

    def run() -> None:
        token = enter_compute_stream([x])
        with Latch(current(device)) if latched else unwinding():
            y = scale(x, 2.0)
            (y,) = exit_compute_stream([y], token)
            copy_to(seen, shift(y, 1.0))
            if latched and not ordered:
                default(device).synchronize(WATCHDOG)

    latched = False
    run()
    default(device).synchronize(WATCHDOG)
    fill_pool(device)
    latched = True
    if ordered:
        run()
    else:
        with without("guard.exit"):
            run()
            first = values(seen)
    default(device).synchronize(WATCHDOG)
    if ordered:
        assert values(seen) == [9.0, 9.0]
    else:
        assert first != [9.0, 9.0]


def copy_to(target: Any, source: Any) -> None:
    """Enqueues a copy on the default stream."""
    if target.is_cuda:
        target.copy_(source)
    else:
        device = torch_ops.library("torch").device_of(target)
        default(device).launch(target.numpy().__setitem__, slice(None), source.numpy())


def fill_pool(device: Device) -> None:
    """What freed memory holds must not be the right answer by chance."""
    if device.kind == "cuda":
        torch.cuda.synchronize()
        with compute_stream(torch.empty(1, device=str(device))):
            kept = [torch.full((2,), -7.0, device=str(device)) for _ in range(64)]
        torch.cuda.synchronize()
        del kept


def test_on_another_stream_the_guard_changes_nothing(device: Device) -> None:
    import streamrt

    x = tensor(device, 1.0, 2.0)
    with streamrt.using(streamrt.Stream(device)) as guard, waits() as seen:
        token = enter_compute_stream([x])
        assert current(device) == guard.streams[0]
        y = scale(x, 2.0)
        exit_compute_stream([y], token)
        assert current(device) == guard.streams[0]
        guard.streams[0].synchronize(WATCHDOG)
    assert seen == []
    assert engines.engine_calls == [False]
    assert values(y) == [2.0, 4.0]


# entries, exits and threads


def test_an_exit_wants_an_open_guard_of_its_thread(device: Device) -> None:
    x = tensor(device, 1.0)
    token = enter_compute_stream([x])
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(LifetimeError, match="another thread"):
            pool.submit(exit_compute_stream, [x], token).result(WATCHDOG)
        assert pool.submit(open_guards).result(WATCHDOG) == 0
    exit_compute_stream([x], token)
    with pytest.raises(LifetimeError, match="left before"):
        exit_compute_stream([x], token)


def test_the_token_is_on_the_host_whatever_device_is_the_default(device: Device) -> None:
    x = tensor(device, 1.0)
    with torch.device("meta"):
        token = enter_compute_stream([x])
        exit_compute_stream([x], token)
    assert token.device.type == "cpu"


@pytest.mark.parametrize("around", ["compute_stream", "using"])
def test_an_exception_that_leaves_a_guard_around_an_entry_is_not_hidden(device: Device, around: str) -> None:
    """The guard around it takes the entry with it, and whoever would leave that afterwards has nothing to do."""
    x, before = tensor(device, 1.0), current(device)
    guard: Any = compute_stream(x) if around == "compute_stream" else using(Stream(device))

    def fail() -> None:
        with guard:
            kept.append(enter_compute_stream([x]))
            enter_compute_stream([x])
            raise KeyError("engine")

    kept: list[Any] = []
    with pytest.raises(KeyError, match="engine") as raised, unwinding():
        fail()
    assert not hasattr(raised.value, "__notes__")
    assert open_guards() == 0
    assert current(device) == before
    with pytest.raises(KeyError, match="engine"):  # with nobody to unwind it: the next operator does
        fail()
    assert current(device) == before
    kept.clear()
    exit_compute_stream([x], enter_compute_stream([x]))
    assert open_guards() == 0
    assert current(device) == before


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batched", ["both", "one", "result only"])
def test_vmap_enters_and_leaves_once_for_the_whole_batch(device: Device, depth: int, batched: str) -> None:
    x, y = tensor(device, 1.0, 2.0, 3.0, 4.0).reshape(2, 2), tensor(device, 5.0, 6.0, 7.0, 8.0).reshape(2, 2)
    if batched != "both":
        y = y[0] if depth == 1 else y[0, 0]
    inside, before = [], current(device)

    def engine(one: Any, other: Any) -> Any:
        token = enter_compute_stream([other] if batched == "result only" else [one, other])
        inside.append(current(device))
        result, scaled = one * other, other * 10
        result, scaled = exit_compute_stream([result, scaled], token)
        return result + 1, scaled

    call: Any = engine
    dims = 0 if batched == "both" else (0, None)
    for _ in range(depth):
        call = torch.func.vmap(call, in_dims=dims, out_dims=0)
    with waits() as seen:
        result, scaled = call(x, y)
        done = current(device)
    default(device).synchronize(WATCHDOG)
    torch.testing.assert_close(result.cpu(), x.cpu() * y.cpu() + 1)
    torch.testing.assert_close(scaled.cpu(), (y.cpu() * 10).expand(2, 2))
    assert seen == ["guard.enter", "guard.exit"]
    assert inside[0] != before
    assert done == before


def test_vmap_over_a_compiled_run_says_what_to_do() -> None:
    """Its engines have none of the batch; the guarded module itself is mapped with enter and exit."""
    run = register_run("doubled", _Doubled())
    assert run.trains is False
    with pytest.raises(ArrayError, match=r"no batching rule: call torch\.vmap on the guarded module as it is"):
        torch.func.vmap(lambda x: guarded_run([x], "doubled")[0])(torch.ones(3, 2))


class _Doubled:
    trains = False

    def plain(self, x: Any) -> list[Any]:
        return [2 * x]

    fast = plain


def test_an_exit_leaves_what_was_left_open_inside(device: Device) -> None:
    x = tensor(device, 1.0)
    before = current(device)
    outer = enter_compute_stream([x])
    enter_compute_stream([x])
    assert open_guards() == 2
    exit_compute_stream([x], outer)
    assert current(device) == before


def test_a_guard_that_was_left_with_one_around_it_may_be_left_once_more(device: Device) -> None:
    """Compilers keep to the data alone, and may put an entry in front of an exit."""
    x = tensor(device, 1.0)
    before = current(device)
    outer, inner = enter_compute_stream([x]), enter_compute_stream([x])
    assert int(outer) == int(inner)
    exit_compute_stream([x], outer)
    token = enter_compute_stream([x])
    exit_compute_stream([x], inner)
    assert current(device) != before
    with pytest.raises(LifetimeError, match="left before"):
        exit_compute_stream([x], inner)
    with pytest.raises(LifetimeError, match="no copy"):
        exit_compute_stream([x], token.clone())
    exit_compute_stream([x], token)
    assert current(device) == before


def test_unwinding_brings_the_thread_back(device: Device) -> None:
    x = tensor(device, 1.0)
    before = current(device)
    with pytest.raises(KeyError), unwinding():
        enter_compute_stream([x])
        assert current(device) != before
        enter_compute_stream([x])
        raise KeyError
    assert current(device) == before
    token = enter_compute_stream([x])
    with unwinding():
        enter_compute_stream([x])
    assert open_guards() == 1
    exit_compute_stream([x], token)


def raises_inside(x: Any) -> None:
    token = enter_compute_stream([x])
    if int(token):
        raise KeyError("inside")
    exit_compute_stream([x], token)


NEXT = {
    "an entry": lambda x: enter_compute_stream([x]),
    "an exit": lambda x: exit_compute_stream([x], torch.tensor(0)),
    "a run": lambda x: guarded_run([x], "sees what is current"),
    "unwinding": lambda x: unwinding().__enter__(),
}


@pytest.mark.parametrize("following", NEXT.values(), ids=NEXT)
def test_the_next_operator_closes_what_a_call_that_raised_left(device: Device, following: Any) -> None:
    x, before = tensor(device, 1.0), current(device)
    run = Inner(lambda x: (scale(x, 2.0),))
    register_run("sees what is current", run)
    gone = weakref.ref(x)
    with pytest.raises(KeyError, match="inside") as caught:
        raises_inside(x)
    assert current(device) != before
    assert enter_compute_stream([torch.ones(1)]) is not None
    assert open_guards() == 1, "its token is still in the traceback"
    del x, caught
    gc.collect()
    other = tensor(device, 2.0)
    with waits() as seen:
        token = following(other)
    assert seen[0] == "guard.exit"
    if following is NEXT["an entry"]:
        assert seen == ["guard.exit", "guard.enter"]
        exit_compute_stream([other], token)
    assert (current(device), open_guards()) == (before, 0)
    default(device).synchronize(WATCHDOG)
    torch_ops_drain()
    assert gone() is None, "what went in is let go"


def test_what_a_call_left_is_not_closed_in_what_was_opened_inside(device: Device) -> None:
    """Python guards that found nothing to do, or another stream that is current for a while."""
    import streamrt

    x, before = tensor(device, 1.0), current(device)
    left = []
    for guard in (lambda: compute_stream(x), lambda: streamrt.using(streamrt.Stream(device))):
        with pytest.raises(KeyError):
            raises_inside(x)
        gc.collect()
        with guard():
            inside = current(device)
            with unwinding():
                left.append(open_guards())
            exit_compute_stream([x], enter_compute_stream([x]))
            assert current(device) == inside
        with unwinding():
            assert (current(device), open_guards()) == (before, 0)
    assert left == [1, 1]


def test_unwinding_leaves_what_was_entered_in_it_also_if_what_was_there_before_has_ended(device: Device) -> None:
    x, before = tensor(device, 1.0), current(device)
    outer = enter_compute_stream([x])
    with pytest.raises(KeyError), unwinding():
        del outer
        kept = enter_compute_stream([x])
        assert open_guards() == 1
        raise KeyError(kept)
    assert (current(device), open_guards()) == (before, 0)


def test_only_tensors_leave_a_guard(device: Device) -> None:
    with pytest.raises(ArrayError, match="a float leaves"), unwinding():
        token = enter_compute_stream([tensor(device, 1.0), 3])
        exit_compute_stream([2.0], token)  # type: ignore[list-item]


def test_threads_have_guards_of_their_own(device: Device) -> None:
    def many(x: float) -> list[float]:
        found = []
        for _ in range(10):
            y, z = by_hand(tensor(device, x))
            default(device).synchronize(WATCHDOG)
            found += [*values(y), *values(z)]
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(many, float(x)) for x in range(4)]
    assert [one.result(WATCHDOG) for one in found] == [expected(float(x)) * 10 for x in range(4)]


# memory


def test_what_enters_lives_until_the_exit(device: Device) -> None:
    x = tensor(device, 1.0)
    gone = weakref.ref(x)
    token = enter_compute_stream([x])
    y = scale(x, 2.0)
    del x
    gc.collect()
    assert gone() is not None
    exit_compute_stream([y], token)
    gc.collect()
    default(device).synchronize(WATCHDOG)
    torch_ops_drain()
    assert gone() is None


def torch_ops_drain() -> None:
    from streamrt import memory

    memory.drain(everything=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_left_is_not_reused_while_it_is_read(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened("cuda:0")
    x = torch.ones(1 << 20, device="cuda:0")
    by_hand(x)
    if not recorded:
        monkeypatch.setattr(torch_ops, "_record", lambda outputs, inside: None)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with Latch(default(device)):
        token = enter_compute_stream([x])
        y = scale(x, 2.0)
        (y,) = exit_compute_stream([y], token)
        z = y + 1
        address = y.data_ptr()
        del y
        with compute_stream(x):
            again = torch.empty(1 << 20, device="cuda:0")
        assert (again.data_ptr() == address) is not recorded
    torch.cuda.synchronize()
    assert float(z[0]) == 3.0


# whole runs


def test_a_run_gives_copies_of_what_it_only_passes_on(anywhere: Device) -> None:
    x = tensor(anywhere, 1.0, 2.0)

    def function(x: Any) -> Any:
        y = scale(x, 2.0)
        return x, y, y[1:]

    run = Inner(function)
    register_run("passes on", run)
    passed, y, part = guarded_run([x], "passes on")
    default_done(anywhere)
    assert [values(passed), values(y), values(part)] == [[1.0, 2.0], [2.0, 4.0], [4.0]]
    assert len({one.untyped_storage().data_ptr() for one in (x, passed, y, part)}) == 4


def test_a_run_that_is_gone_and_values_that_it_cannot_take() -> None:
    with pytest.raises(LifetimeError, match="compile it again"):
        guarded_run([torch.ones(1)], "nobody's")
    with pytest.raises(ArrayError, match="not a str"):
        guarded_run([torch.ones(1), "text"], "nobody's")
    run = Inner(lambda x: (3,))
    register_run("gives a number", run)
    with pytest.raises(ArrayError, match="only tensors can"):
        guarded_run([torch.ones(1)], "gives a number")


def test_a_run_that_raises_leaves_the_streams_as_they_were(device: Device) -> None:
    def fails(x: Any) -> Any:
        assert current(device) != before
        raise KeyError("inside")

    before = current(device)
    run = Inner(fails)
    register_run("fails", run)
    with pytest.raises(KeyError, match="inside"):
        guarded_run([tensor(device, 1.0)], "fails")
    assert current(device) == before
