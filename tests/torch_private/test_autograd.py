"""Autograd and `torch.func`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoac import torch_private
from autoac.record.tape.formulas import FITTING_OPS, NODES_FITTED_AFTERWARDS
from tests.torch_private.modes import Seen


def test_call_below_autograd():
    weight = torch.ones(2, 2, requires_grad=True)
    found: list[Any] = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> None:
        found.append((torch.is_grad_enabled(), torch.mm(left, right)))

    with Seen() as mode, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch_private.call_below_autograd(multiply, weight, weight)
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
        torch_private.call_below_autograd(fail)
    assert torch.is_grad_enabled()
    assert (torch.ones(2, requires_grad=True) * 2).requires_grad


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

                    torch_private.call_below_autograd(again)
            return result

    with Outputs():
        nn.LSTM(8, 8)(torch.ones(3, 2, 8))
    if not found:
        pytest.skip("this build of torch has no oneDNN LSTM")
    assert found == [4, 3, 4]


def test_any_autocast():
    assert not torch_private.any_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_private.any_autocast()
        with torch.autocast("cpu", enabled=False):
            assert not torch_private.any_autocast()
    assert not torch_private.any_autocast()


def test_inside_autocast():
    assert not torch_private.inside_autocast()
    with torch.autocast("cpu", enabled=False):
        assert torch_private.inside_autocast()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch_private.inside_autocast()
        assert torch_private.inside_autocast()
    assert not torch_private.inside_autocast()


def test_top_saved_tensors_hooks():
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert torch_private.top_saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            top = torch_private.top_saved_tensors_hooks()
            assert top is not None
            assert (top[0], top[1]) == (pack, unpack)
        inner = torch_private.top_saved_tensors_hooks()
        assert inner is not None
        assert inner[0] is not pack
    assert torch_private.top_saved_tensors_hooks() is None


def test_saved_tensors_hooks_allowed():
    assert torch_private.saved_tensors_hooks_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not torch_private.saved_tensors_hooks_allowed()
    with torch.autograd.graph.save_on_cpu():
        assert torch_private.saved_tensors_hooks_allowed()


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


def test_inside_of_backward():
    found: list[tuple[str, bool, str, bool]] = []

    def look(func: Any, args: Any) -> None:
        node = torch_private.current_node()
        name = "" if node is None else node.name()
        found.append((str(func), torch_private.in_backward(), name, torch_private.backward_keeps_graph()))

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
    assert not torch_private.in_backward()


def test_when_backward_ends():
    """Not if it fails."""
    ended: list[int] = []

    def begin(gradient: torch.Tensor) -> None:
        torch_private.when_backward_ends(lambda: ended.append(torch_private.current_backward()))

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("in a hook")

    def backward(*hooks: Callable[[torch.Tensor], None]) -> None:
        x = torch.ones(3, requires_grad=True)
        y = x.sin()
        for hook in hooks:
            y.register_hook(hook)
        y.sum().backward()

    backward(begin)
    assert len(ended) == 1
    with pytest.raises(RuntimeError, match="in a hook"):
        backward(begin, fail)
    assert len(ended) == 1
    backward(begin)
    assert len(ended) == 2


def test_current_backward():
    """One number for a backward, and another for the next."""
    seen: list[int] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.current_backward())
        return tensor

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            torch.ones(3, requires_grad=True).sin().cos().sum().backward()
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert torch_private.current_backward() == -1
    assert torch_private.current_node() is None


def test_nodes_are_numbered_in_the_order_they_were_made():
    numbers: dict[str, int] = {}

    def look(func: Any, args: Any) -> None:
        node = torch_private.current_node()
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
    with Seen(lambda func, args: numbers.append(torch_private.next_node_number() - 1)):
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
    """What `FITTING_OPS` of formulas.py is about: then what a hook has unpacked is gone, before it is released."""
    seen: list[tuple[str, bool]] = []
    packed: list[torch.Tensor] = []
    unpacked: list[Any] = []

    def unpack(index: int) -> torch.Tensor:
        tensor = packed[index].clone()
        unpacked.append(torch_private.storage_ref(tensor))
        return tensor

    def look(func: Any, args: Any) -> None:
        found = torch_private.current_node()
        if found is not None and found.name() == node:
            seen.append((str(func), any(ref() is not None for ref in unpacked)))

    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor.detach()) or len(packed) - 1, unpack
    ):
        y = function(torch.rand(3, 4, requires_grad=True) * 1.0)
    gradient = torch.ones_like(y)
    with Seen(look):
        y.backward(gradient)
    fitted = [(name, alive) for name, alive in seen if name in FITTING_OPS]
    assert node in NODES_FITTED_AFTERWARDS
    assert {name for name, _ in fitted} >= (set() if fitting is None else {fitting})
    assert not any(alive for _, alive in fitted)
    assert bool(fitted) == (fitting is not None)
    assert any(alive for name, alive in seen if name not in FITTING_OPS)


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
    """What NOTE [ The recorded step ] 4 of tape.py puts right: where this changes, `Formulas.in_place` must."""
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
        names[mode] = {event.name for event in every(torch_private.raw_events(profile))}
    assert plain in names[False]
    assert under_a_mode not in names[False]
    assert under_a_mode in names[True]


def every(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from every(event.children)


def test_the_tensor_behind_a_transform():
    x, seen = torch.randn(3, 4), []

    def look(t: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.behind_transforms(t))
        return t.sum()

    torch.func.vmap(look)(x)
    torch.func.vmap(torch.func.vmap(look))(x)
    torch.func.jvp(look, (x,), (x,))
    assert [torch_private.storage_key(t) for t in seen] == [torch_private.storage_key(x)] * 3
    assert torch_private.behind_transforms(x) is x


def test_a_function_runs_outside_of_transforms():
    seen: list[bool] = []

    @torch_private.outside_of_transforms
    def look(x: torch.Tensor) -> int:
        seen.append(torch_private.in_function_transform())
        return int((torch.ones(2) * x.shape[0]).sum())  # as of a plan that is made here: plain values

    def mapped(x: torch.Tensor) -> torch.Tensor:
        assert look(x) == 2 * x.shape[0]
        seen.append(torch_private.in_function_transform())
        return x * 2

    assert torch.equal(torch.func.vmap(mapped)(torch.ones(3, 4)), torch.full((3, 4), 2.0))
    assert look(torch.ones(3)) == 6
    assert seen == [False, True, False]


def test_function_transforms_are_noticed():
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_private.in_function_transform())
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


def test_batched_gradients_are_noticed():
    found: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            found.append(torch_private.is_transformed(gradients[0]))
            return gradients[0] * 2

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Look.apply(x), x, torch.eye(3), is_grads_batched=True)
    torch.autograd.grad(Look.apply(x), x, torch.ones(3))
    torch.func.vmap(lambda t: found.append(torch_private.is_transformed(t)) or t)(torch.ones(2, 3))
    assert found == [True, False, True]


def test_numbers_of_nodes():
    x = torch.ones(3, requires_grad=True).sin()
    y = x.exp()
    assert torch_private.node_number(y.grad_fn) == torch_private.node_number(x.grad_fn) + 1
