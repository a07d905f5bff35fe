"""Each private torch interface that autoac uses still means what it meant in the versions that were tried.

When a test here fails after an update of torch, the function of the same name in `autoac/compat.py` (or the assumption
named in the test) is to be looked at again, before anything else.
"""

import contextlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoac import compat
from autoac.engine import replay
from autoac.tape import _FITTING_OPS, _NODES_FITTED_AFTERWARDS, LeanRecording, Tape

FLOAT = 4


class Seen(TorchDispatchMode):
    """Calls a function for every op that reaches it.

    Args:
        look: called with the op and its arguments, before it runs.
    """

    def __init__(self, look: Callable[[Any, tuple[Any, ...]], None] = lambda *_: None):
        super().__init__()
        self.look = look
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        self.look(func, args)
        return func(*args, **(kwargs or {}))


def test_this_version_was_tried():
    assert torch.__version__.split("+")[0] in compat.TRIED_VERSIONS


# -- ops and modes -----------------------------------------------------------------------------------------------------


def test_kinds_of_ops():
    seen: list[Any] = []
    with Seen(lambda func, _: seen.append(func)):
        torch.ones(2).add(1)
    assert seen
    assert all(isinstance(func, compat.OpOverload) for func in seen)
    assert not any(isinstance(func, compat.HigherOrderOperator) for func in seen)
    assert isinstance(torch.ops.higher_order.cond, compat.HigherOrderOperator)
    assert not isinstance(torch.ops.higher_order.cond, compat.OpOverload)


def test_disable_dispatch_modes():
    with Seen() as mode:
        context = compat.disable_dispatch_modes()
        with context:
            torch.ones(2)
        del context
        torch.zeros(2)
    assert mode.names == ["aten.zeros.default"]


def test_disable_dispatch_modes_acts_from_its_construction():
    with Seen() as mode:
        context = compat.disable_dispatch_modes()
        torch.ones(2)
        del context
        torch.zeros(2)
    assert mode.names == ["aten.zeros.default"]


def test_a_mode_set_aside_sees_nothing():
    with Seen() as below, Seen() as mode:
        assert not compat.set_aside(below)
        torch.ones(1)
        assert compat.set_aside(mode)
        torch.ones(2)
        compat.put_back(mode)
        torch.zeros(3)
    assert mode.names == ["aten.ones.default", "aten.zeros.default"]
    assert below.names == ["aten.ones.default", "aten.ones.default", "aten.zeros.default"]
    assert not compat.set_aside(mode)  # there is none


def test_in_compiled_autograd():
    """While the captured graph runs, which is when it calls unpack hooks."""
    import torch._dynamo.compiled_autograd

    found = []

    def unpack(x: torch.Tensor) -> torch.Tensor:
        found.append(compat.in_compiled_autograd())
        return x

    x = torch.ones(2, requires_grad=True)
    for context in (contextlib.nullcontext(), torch._dynamo.compiled_autograd._enable(lambda graph: graph)):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            loss = x.sin().sum()
        with context:
            loss.backward()
    assert found == [False, True]
    torch._dynamo.reset()


def test_our_modes_are_not_wrapped_by_the_compiler():
    """A wrapped `__torch_dispatch__` costs a microsecond an op."""
    for mode, file in ((replay.Recording, "replay.py"), (LeanRecording, "tape.py")):
        assert inspect.unwrap(mode.__torch_dispatch__) is mode.__torch_dispatch__
        assert mode.__torch_dispatch__.__code__.co_filename.endswith(file)
    assert (
        inspect.unwrap(Seen.__torch_dispatch__) is not Seen.__torch_dispatch__
    )  # what would be without our wish
    for name in ("_should_skip_dynamo", "ignore_compile_internals", "supports_higher_order_operators"):
        assert hasattr(TorchDispatchMode, name)
    assert Tape.ignore_compile_internals() is True


def test_is_compiled_wrapper():
    model = nn.Linear(2, 2)
    assert not compat.is_compiled_wrapper(model)
    compiled = torch.compile(model)
    assert compat.is_compiled_wrapper(compiled)
    assert compiled._orig_mod is model  # type: ignore[union-attr]
    assert getattr(model, "_compiled_call_impl", None) is None
    model.compile()
    assert model._compiled_call_impl is not None
    assert not compat.is_compiled_wrapper(model)


def test_compiled_attribute():
    model = nn.Linear(2, 2)
    assert compat.compiled_attribute(model) is None
    assert compat.compiled_attribute(torch.compile(model)) == "forward"  # type: ignore[arg-type]
    assert "forward" in vars(torch.compile(model))
    model.compile()
    assert compat.compiled_attribute(model) == "_compiled_call_impl"
    del model.__dict__["_compiled_call_impl"]
    assert model._compiled_call_impl is None
    assert compat.compiled_attribute(model) is None


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_name_of_the_node_of_compiled_code():
    compiled = torch.compile(lambda x: x.sin().cos(), backend="aot_eager")
    assert compiled(torch.zeros(2, requires_grad=True)).grad_fn.name() == compat.COMPILED_NODE
    torch._dynamo.reset()


def test_nothing_imports_the_compiler():
    """It takes seconds."""
    code = (
        "import sys, torch, autoac.planner, autoac.compat as c;"
        "c.is_compiled_wrapper(torch.nn.Linear(1, 1));"
        "print('torch._dynamo' in sys.modules)"
    )
    paths = [p for p in sys.path if p]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "False", result.stderr


def test_disable_dynamo():
    @compat.disable_dynamo
    def plain(x: torch.Tensor) -> torch.Tensor:
        assert not torch.compiler.is_compiling()
        return x + 1

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return plain(x) * 2

    assert plain(torch.zeros(2)).tolist() == [1, 1]
    assert compiled(torch.zeros(2)).tolist() == [2, 2]


# -- storages and versions ---------------------------------------------------------------------------------------------


def test_storage_key():
    a = torch.empty(4)
    assert compat.storage_key(a) == compat.storage_key(a[1:]) == compat.storage_key(a.view(2, 2).detach())
    assert compat.storage_key(a) != compat.storage_key(torch.empty(4))
    empty = [torch.empty(0) for _ in range(3)]  # all at address 0
    assert len({compat.storage_key(t) for t in empty}) == 3
    with pytest.raises(NotImplementedError):
        compat.storage_key(torch.eye(2).to_sparse())


def test_storage_ref_dies_with_the_storage():
    a = torch.empty(4)
    ref = compat.storage_ref(a)
    view = a[1:]
    del a
    assert ref() is not None
    node = (view.requires_grad_() * 2.0).exp()  # held by C++ only
    del view
    assert ref() is not None
    del node
    assert ref() is None


def test_storage_users():
    a = torch.empty(4)
    key = compat.storage_key(a)
    assert compat.storage_users(key) == 1
    same = a
    view = a[1:]
    assert compat.storage_users(key) == 2
    detached = a.detach()
    assert compat.storage_users(key) == 3
    del view, detached, same
    assert compat.storage_users(key) == 1
    storage = a.untyped_storage()  # no tensor, but torch counts it
    assert compat.storage_users(key) in (1, 2)
    del storage


@pytest.mark.parametrize("kept_by", ["nobody", "Python", "another tensor"])
def test_held_once_as_argument(kept_by: str):
    """Of two gradients that autograd adds up, the first is the engine's alone unless somebody keeps it."""
    kept: list[torch.Tensor] = []
    once: list[bool] = []

    def look(func: Any, args: Any) -> None:
        if str(func) == "aten.add.Tensor":
            old = args[0]
            once.append(compat.held_once_as_argument(old))

    x = torch.ones(5, requires_grad=True) * 1.0
    # In backward the second comes first; what a view hands on stands on the storage of what it was given.
    first, second = x.sin(), x.view_as(x) if kept_by == "another tensor" else x * 1.0
    if kept_by == "Python":
        assert second.grad_fn is not None
        second.grad_fn.register_hook(lambda gradients, _: kept.append(gradients[0]))
    loss = first.sum() + second.exp().sum()
    with Seen(look):
        loss.backward()
    assert once == [kept_by == "nobody"]


def test_is_dense():
    a = torch.empty(4, 6)
    assert compat.is_dense(a)
    assert compat.is_dense(a.t())
    assert compat.is_dense(a[1:3])
    assert not compat.is_dense(a[:, 1:3])
    assert not compat.is_dense(a[:1].expand(3, 6))


def test_dense_values():
    values = torch.arange(6.0).reshape(3, 2)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    with Seen() as seen:
        assert compat.dense_values(nested).shape == (3, 2)
        assert compat.dense_values(values) is values
    assert set(seen.names) <= {"prim.layout.default"}  # nothing that computes
    assert not isinstance(nested.shape[1], int)


def test_version_of():
    a = torch.zeros(3)
    before = compat.version_of(a)
    a.add_(1)
    assert compat.version_of(a) == before + 1
    assert compat.version_of(a[1:]) == before + 1
    with torch.inference_mode():
        assert compat.version_of(torch.zeros(3)) == -1


def test_counted_writes():
    tensors = [torch.ones(2), torch.ones(3)]
    versions = []

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for context in (contextlib.nullcontext, compat.counted_writes):
                before = [compat.version_of(t) for t in tensors]
                with context(tensors):
                    func(*args, **(kwargs or {}))
                versions.append([compat.version_of(t) - b for t, b in zip(tensors, before, strict=True)])

    with Writes():
        torch.ops.aten._foreach_mul_(tensors, 2.0)
    assert versions == [[0, 0], [1, 1]]  # were the first like the second, the context would be needed no more
    with compat.counted_writes(tensors):
        before = compat.version_of(tensors[0])
        tensors[0].add_(1)
    assert compat.version_of(tensors[0]) == before + 1  # not counted twice


def test_detach_sharing_version():
    results = {}

    def look(func: Any, args: Any) -> None:
        if str(func) == "aten.sin.default" and not results:
            results["with"] = compat.detach_sharing_version(args[0])

    a = torch.ones(3, requires_grad=True) * 2
    with Seen(look):
        a.sin()
    kept = results["with"]
    assert kept.grad_fn is None
    assert not kept.requires_grad
    assert compat.storage_key(kept) == compat.storage_key(a)
    before = compat.version_of(kept)
    with torch.no_grad():
        a.add_(1)
    assert compat.version_of(kept) == before + 1


# -- autograd ----------------------------------------------------------------------------------------------------------


def test_call_below_autograd():
    weight = torch.ones(2, 2, requires_grad=True)
    found: list[Any] = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> None:
        found.append((torch.is_grad_enabled(), torch.mm(left, right)))

    with Seen() as mode, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        compat.call_below_autograd(multiply, weight, weight)
        assert not torch.is_grad_enabled()
    [(grad, result)] = found
    assert grad
    assert result.dtype is torch.float32
    assert not result.requires_grad
    assert mode.names == ["aten.mm.default"]
    with torch.autocast("cpu", torch.bfloat16):
        after = torch.mm(weight, weight)
    assert after.dtype is torch.bfloat16
    assert after.requires_grad


def test_call_below_autograd_that_fails():
    def fail() -> None:
        raise ValueError("no")

    with torch.no_grad(), pytest.raises(ValueError, match="no"):
        compat.call_below_autograd(fail)
    assert torch.is_grad_enabled()
    assert (torch.ones(2, requires_grad=True) * 2).requires_grad


def test_detach_unseen():
    held = torch.ones(2, requires_grad=True) * 2
    parameter = nn.Parameter(torch.ones(2, 2))
    with Seen() as mode:
        found = [compat.detach_unseen(tensor) for tensor in (held, held.view(1, 2), parameter, parameter.t())]
    assert "aten.detach.default" not in mode.names
    for tensor in found:
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor._base is None
    assert compat.storage_key(found[0]) == compat.storage_key(held)
    assert found[1].shape == (1, 2)
    before = compat.version_of(found[0])
    with torch.no_grad():
        held.add_(1)
    assert compat.version_of(found[0]) == before + 1
    with FakeTensorMode():
        fake = torch.ones(2, requires_grad=True) * 2
        assert type(compat.detach_unseen(fake)) is type(fake)


def test_some_kernels_look_whether_gradients_are_on():
    """Why replay sets them as they were: see NOTE [ Replay ] in engine/replay.py."""
    found: list[int] = []

    class Outputs(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if str(func) == "aten.mkldnn_rnn_layer.default":
                found.append(sum(tensor is not None for tensor in result))
                for grad in (False, True):

                    def again(grad: bool = grad) -> None:
                        with torch.set_grad_enabled(grad):
                            found.append(sum(tensor is not None for tensor in func(*args)))

                    compat.call_below_autograd(again)
            return result

    with Outputs():
        nn.LSTM(8, 8)(torch.ones(3, 2, 8))
    if not found:
        pytest.skip("this build of torch has no oneDNN LSTM")
    assert found == [4, 3, 4]


def test_checkpoint_debug_enabled():
    assert compat.checkpoint_debug_enabled() is None
    for enabled in (True, False):
        with torch.utils.checkpoint.set_checkpoint_debug_enabled(enabled):
            assert compat.checkpoint_debug_enabled() is enabled


def test_being_traced():
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.being_traced())
        return x.sin()

    function(torch.ones(2))
    make_fx(function)(torch.ones(2))
    assert seen == [False, True]


def test_any_autocast():
    assert not compat.any_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert compat.any_autocast()
        with torch.autocast("cpu", enabled=False):
            assert not compat.any_autocast()
    assert not compat.any_autocast()


def test_top_saved_tensors_hooks():
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert compat.top_saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            top = compat.top_saved_tensors_hooks()
            assert top is not None
            assert (top[0], top[1]) == (pack, unpack)
        inner = compat.top_saved_tensors_hooks()
        assert inner is not None
        assert inner[0] is not pack
    assert compat.top_saved_tensors_hooks() is None


def test_inside_of_backward():
    found: list[tuple[str, bool, str, bool]] = []

    def look(func: Any, args: Any) -> None:
        node = compat.current_node()
        name = "" if node is None else node.name()
        found.append((str(func), compat.in_backward(), name, compat.backward_keeps_graph()))

    x = torch.ones(3, requires_grad=True)
    with Seen(look):
        y = x.sin().sum()
        y.backward(retain_graph=True)
        y.backward()
    assert [row[1:] for row in found if row[0] == "aten.sin.default"] == [(False, "", True)]
    assert [row[1:] for row in found if row[0] == "aten.cos.default"] == [
        (True, "SinBackward0", True),
        (True, "SinBackward0", False),
    ]
    assert not compat.in_backward()
    assert compat.current_node() is None


def test_nodes_are_numbered_in_the_order_they_were_made():
    numbers: dict[str, int] = {}

    def look(func: Any, args: Any) -> None:
        node = compat.current_node()
        if node is not None:
            numbers.setdefault(node.name(), node._sequence_nr())

    x = torch.ones(3, requires_grad=True)
    y = x.sin().exp().sum()
    with Seen(look):
        y.backward()
    assert numbers["SinBackward0"] + 1 == numbers["ExpBackward0"]


def test_the_next_nodes_number():
    numbers: list[int] = []
    x = torch.ones(3, requires_grad=True)
    with Seen(lambda func, args: numbers.append(compat.next_node_number() - 1)):
        y = x * 2.0
        z = y.sin()
    assert numbers == [node._sequence_nr() for node in (y.grad_fn, z.grad_fn) if node is not None]


def _column() -> torch.Tensor:
    return torch.rand(3, 1, requires_grad=True) + 1


@pytest.mark.parametrize(
    ("node", "function", "fitting"),
    [
        ("MulBackward0", lambda x: x * _column(), "aten.sum.dim_IntList"),
        ("MulBackward0", lambda x: x * _column().bfloat16(), "aten._to_copy.default"),
        ("MulBackward0", lambda x: x * torch.rand(3, 4, requires_grad=True), None),
        ("DivBackward0", lambda x: x / _column(), "aten.sum.dim_IntList"),
        ("DivBackward0", lambda x: x / _column().bfloat16(), "aten._to_copy.default"),
        ("DivBackward0", lambda x: x / (torch.rand(3, 4, requires_grad=True) + 1), None),
        ("AddcmulBackward0", lambda x: torch.addcmul(x, x, _column()), "aten.sum.dim_IntList"),
        ("AddcmulBackward0", lambda x: torch.addcmul(x, x, torch.rand(3, 4, requires_grad=True)), None),
        ("AddmmBackward0", lambda x: torch.addmm(_column(), x, x.t()), "aten.sum.dim_IntList"),
        ("AddmmBackward0", lambda x: torch.addmm(x.sum() * x, x @ x.t(), x), None),
        (
            "BaddbmmBackward0",
            lambda x: torch.baddbmm(_column(), x[None], x.t()[None]),
            "aten.sum.dim_IntList",
        ),
        ("BaddbmmBackward0", lambda x: torch.baddbmm(x[None], (x @ x.t())[None], x[None]), None),
    ],
)
def test_a_gradient_is_fitted_when_the_nodes_formula_is_over(node: str, function: Any, fitting: str | None):
    """What `_FITTING_OPS` of tape.py is about: then what a hook has unpacked is gone, before it is released."""
    seen: list[tuple[str, bool]] = []
    packed: list[torch.Tensor] = []
    unpacked: list[Any] = []

    def unpack(index: int) -> torch.Tensor:
        tensor = packed[index].clone()
        unpacked.append(compat.storage_ref(tensor))
        return tensor

    def look(func: Any, args: Any) -> None:
        found = compat.current_node()
        if found is not None and found.name() == node:
            seen.append((str(func), any(ref() is not None for ref in unpacked)))

    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor.detach()) or len(packed) - 1, unpack
    ):
        y = function(torch.rand(3, 4, requires_grad=True) * 1.0)
    gradient = torch.ones_like(y)
    with Seen(look):
        y.backward(gradient)
    fitted = [(name, alive) for name, alive in seen if name in _FITTING_OPS]
    assert node in _NODES_FITTED_AFTERWARDS
    assert {name for name, _ in fitted} >= (set() if fitting is None else {fitting})
    assert not any(alive for _, alive in fitted)
    assert bool(fitted) == (fitting is not None)
    assert any(alive for name, alive in seen if name not in _FITTING_OPS)


@pytest.mark.parametrize(
    ("function", "plain", "under_a_mode"),
    [
        (lambda x: (x.sin() + x.cos()).sum(), "aten::add_", "aten::add"),
        (lambda x: x.gather(0, torch.tensor([0, 1])).sum(), "aten::scatter_add_", "aten::scatter_add"),
        (lambda x: x.max(dim=0).values, "aten::scatter_", "aten::scatter"),
        (lambda x: x.max(), "aten::masked_fill_", "aten::logical_or_"),
        (lambda x: x.index_select(0, torch.tensor([1])).sum(), "aten::index_add_", "aten::index_add"),
        (lambda x: x[torch.tensor([0, 1])].sum(), "aten::_index_put_impl_", "aten::index_put"),
        (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(3)), "aten::sub_", "aten::sub"),
    ],
)
def test_a_mode_takes_autograd_out_of_place(function: Any, plain: str, under_a_mode: str):
    """What NOTE [ The recorded step ] 4 of tape.py puts right: where this changes, `_in_place_without_a_mode` must."""
    names = {}
    for mode in (False, True):
        x = torch.ones(3, requires_grad=True) * 1.0
        loss = function(x)
        with (
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], acc_events=False
            ) as profile,
            Seen() if mode else contextlib.nullcontext(),
        ):
            loss.backward()
        names[mode] = {event.name for event in every(compat.raw_events(profile))}
    assert plain in names[False]
    assert under_a_mode not in names[False]
    assert under_a_mode in names[True]


def every(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from every(event.children)


# -- random numbers ----------------------------------------------------------------------------------------------------


def test_default_generator():
    generator = compat.default_generator(torch.device("cpu"))
    assert isinstance(generator, torch.Generator)
    state = generator.get_state()
    torch.rand(2)
    assert not torch.equal(generator.get_state(), state)
    assert torch.equal(generator.get_state(), torch.get_rng_state())
    generator.set_state(state)
    assert torch.equal(torch.get_rng_state(), state)
    assert state.nbytes == 5056  # what one stashed state takes, see `CPU_RANDOM_STATE_BYTES`


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_default_generator_of_cuda():
    for device in (torch.device("cuda"), torch.device("cuda", 0)):
        generator = compat.default_generator(device)
        state = generator.get_state()
        torch.rand(2, device="cuda")
        assert not torch.equal(generator.get_state(), state)
        assert torch.equal(generator.get_state(), torch.cuda.get_rng_state(0))


# -- the profiler's events ---------------------------------------------------------------------------------------------


def test_allocation_ranges():
    kept = []
    with compat.AllocationRanges() as ranges:
        torch.empty(1000)
        with ranges.range("first"):
            a = torch.empty(10)
            b = torch.empty(20)
            del a
            kept.append(b)
        torch.empty(1000)
        with ranges.range("second"):
            kept.append(torch.empty(5))
        with ranges.range("nothing"):
            pass
    assert ranges.deltas == {
        "first": [10 * FLOAT, 20 * FLOAT, -10 * FLOAT],
        "second": [5 * FLOAT],
        "nothing": [],
    }


def test_allocations_inside_of_an_op():
    x = torch.randn(1000, 3).t()
    with compat.AllocationRanges() as ranges, ranges.range("sort"):
        result = torch.sort(x, dim=1)
    deltas = ranges.deltas["sort"]
    assert sum(deltas) == 3000 * (FLOAT + 8)  # values and indices stay
    live = [sum(deltas[: i + 1]) for i in range(len(deltas))]
    assert max(live) > sum(deltas)  # and there was more in between
    del result


def test_cpu_allocations():
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
    ) as profile:
        a = torch.empty(10)
        address = a.data_ptr()
        del a
    events = compat.cpu_allocations(compat.raw_events(profile))
    assert [(where, size) for _, where, size in events] == [(address, 10 * FLOAT), (address, -10 * FLOAT)]
    assert events[0][0] <= events[1][0]


# -- views -------------------------------------------------------------------------------------------------------------


def test_conjugate_view():
    a = torch.tensor([1 + 2j])
    view = compat.conjugate_view(a)
    assert view.is_conj()
    assert compat.storage_key(view) == compat.storage_key(a)
    assert view.resolve_conj().tolist() == [1 - 2j]


def test_negative_view():
    a = torch.tensor([3.0])
    view = compat.negative_view(a)
    assert view.is_neg()
    assert compat.storage_key(view) == compat.storage_key(a)
    assert view.resolve_neg().tolist() == [-3.0]


def test_cpu_ops_lists_ops_by_their_start_and_not_autograds_ranges():
    x = torch.randn(4, 4, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=False) as prof:
        x.mm(x).sin().sum().backward()
    found = compat.cpu_ops(compat.raw_events(prof))
    times = [when for when, _ in found]
    assert times == sorted(times)
    names = [name for _, name in found]
    assert [name for name in names if name in ("aten::mm", "aten::sin", "aten::cos")] == [
        *("aten::mm", "aten::sin"),  # forward
        *("aten::cos", "aten::mm", "aten::mm"),
    ]
    assert all(name.count("::") == 1 for name in names)


# -- torch's own planner -----------------------------------------------------------------------------------------------


def test_torchs_planner_is_where_it_was_and_takes_what_it_took():
    pytest.importorskip("pwlf")
    tools = compat.sac_tools()
    assert list(inspect.signature(tools.sac_milp).parameters)[:2] == ["graph", "memory_budget"]
    assert "ac_units" in inspect.signature(tools.sac_milp).parameters
    policy = tools.get_optimal_checkpointing_policy_per_module
    assert list(inspect.signature(policy).parameters) == ["sac_stats", "memory_budget"]
    assert torch.ops.aten.detach.default in tools.OPS_TO_ALWAYS_SKIP
    assert callable(tools.SACEstimator()._estimate_runtime)
    estimator = tools.RuntimeEstimator()
    estimator("operator-level-cost-model")  # what chooses the estimate that is replaced here
    assert callable(estimator._estimate)


def test_the_tensor_behind_a_transform():
    x, seen = torch.randn(3, 4), []

    def look(t: torch.Tensor) -> torch.Tensor:
        seen.append(compat.behind_transforms(t))
        return t.sum()

    torch.func.vmap(look)(x)
    torch.func.vmap(torch.func.vmap(look))(x)
    torch.func.jvp(look, (x,), (x,))
    assert [compat.storage_key(t) for t in seen] == [compat.storage_key(x)] * 3
    assert compat.behind_transforms(x) is x


# -- torch's cross entropy ---------------------------------------------------------------------------------------------


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_function_modes_see_cross_entropy_as_a_whole():
    logits, classes = torch.randn(3, 4), torch.tensor([1, 2, 3])
    assert compat.torchs_cross_entropy is F.cross_entropy
    assert compat.function_modes() == []
    with torch.device("cpu"), SeenFunctions() as mode:
        modes = compat.function_modes()
        assert [compat.is_device_mode(mode) for mode in modes] == [True, False]
        assert modes[1] is mode
        F.cross_entropy(logits, classes)
        nn.CrossEntropyLoss()(logits, classes)
    assert compat.function_modes() == []
    assert mode.seen == [F.cross_entropy] * 2


def test_function_modes_are_called_with_what_stands_in_cross_entropys_place(monkeypatch):
    original = F.cross_entropy
    patched = lambda *args, **kwargs: original(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(F, "cross_entropy", patched)
    logits, classes = torch.randn(3, 4), torch.tensor([1, 2, 3])
    with SeenFunctions() as mode:
        original(logits, classes)
    assert mode.seen == [patched]


def test_another_cross_entropy_in_torchs_place_is_noticed():
    program = """
import torch.nn.functional as F
original = F.cross_entropy
F.cross_entropy = lambda *args, **kwargs: original(*args, **kwargs)
from autoac import compat
print(compat.torchs_cross_entropy)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_cross_entropy_runs_the_ops_of_the_lean_one():
    for shape, kind in (((3, 4), "nll_loss"), ((2, 4, 3, 5), "nll_loss2d")):
        logits, classes = (
            torch.randn(shape, requires_grad=True),
            torch.zeros(shape[:1] + shape[2:], dtype=torch.long),
        )
        with Seen() as seen:
            F.cross_entropy(logits, classes).backward()
        assert [name for name in seen.names if "softmax" in name or "nll" in name] == [
            "aten._log_softmax.default",
            f"aten.{kind}_forward.default",
            f"aten.{kind}_backward.default",
            "aten._log_softmax_backward_data.default",
        ]


def test_function_transforms_are_noticed():
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(compat.in_function_transform())
        return x.sum()

    x = torch.ones(3)
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x)
    torch.func.jvp(look, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        look(x)
    look(x)
    assert found == [False, True, True, True, True, False]


def test_fake_tensors_are_told_by_their_type():
    with FakeTensorMode():
        fake = torch.ones(3)
    assert compat.is_fake_type(type(fake))
    assert not compat.is_fake_type(torch.Tensor)


def test_a_function_mode_is_taken_off_wherever_it_is():
    first, second, third = (SeenFunctions() for _ in range(3))
    for mode in (first, second, third):
        compat.put_function_mode_on(mode)
    compat.take_function_mode_off(second)
    assert compat.function_modes() == [first, third]
    compat.take_function_mode_off(second)
    assert compat.function_modes() == [first, third]
    compat.take_function_mode_off(third)
    compat.take_function_mode_off(first)
    assert compat.function_modes() == []


def test_batched_gradients_are_noticed():
    found: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            found.append(compat.is_transformed(gradients[0]))
            return gradients[0] * 2

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Look.apply(x), x, torch.eye(3), is_grads_batched=True)
    torch.autograd.grad(Look.apply(x), x, torch.ones(3))
    torch.func.vmap(lambda t: found.append(compat.is_transformed(t)) or t)(torch.ones(2, 3))
    assert found == [True, False, True]


def test_jit_tracing_is_noticed():
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(compat.being_jit_traced())
        return x + 1

    look(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert found == [False, True]


def test_a_tensor_that_has_its_storage_alone():
    alone = compat.has_its_storage_alone
    assert alone(torch.empty(3))
    tensor = torch.empty(3, requires_grad=True) * 1
    detached = tensor.detach()
    assert not alone(detached)
    del tensor
    assert alone(detached)
    for hold in (lambda t: t[1:], lambda t: t.untyped_storage(), lambda t: t.numpy()):
        assert alone(detached)
        held = hold(detached)
        assert not alone(detached)
        del held
    assert not alone(detached)  # numpy leaves a mark
    assert not alone(torch.from_numpy(torch.empty(3).numpy()))
    assert not alone(torch.empty(3).share_memory_())


def test_saved_tensors_hooks_allowed():
    assert compat.saved_tensors_hooks_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not compat.saved_tensors_hooks_allowed()
    with torch.autograd.graph.save_on_cpu():
        assert compat.saved_tensors_hooks_allowed()


def test_hooks_pack_an_input_under_its_own_version():
    """What a hook is given of a custom function's input shares its version, so that a change can be told."""
    packed: list[torch.Tensor] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, *gradients):
            raise AssertionError("not called")

    x = torch.ones(3, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.detach()) or packed[-1], lambda t: t
    ):
        loss = Saves.apply(x)
    before = packed[0]._version
    with torch.no_grad():
        x.mul_(2)
    assert packed[0]._version == before + 1
    assert loss.grad_fn.saved_tensors[0].grad_fn is x.grad_fn
