"""What surrounds a region: saved-tensor hooks, autocast, devices, random numbers, kinds of tensors, compilers."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.blocks import REGIONS, X, blocks, mean_square
from tests.execute.exact.harness import Case, assert_exact, backward_from, differences, planned, plans, run
from tests.features.draws_elsewhere import step_on
from tests.features.feature import feature
from tests.second_device import ran

# -- saved-tensor hooks ------------------------------------------------------------------------------------------------


def copies() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy)


def assert_exact_with(hooks: Any, case: Case, engine: str) -> None:
    """`save_on_cpu` on CPU keeps what it is given: without a plan, too, the graph then holds itself."""
    if hooks is copies:
        assert_exact(case, engine)
    for plan in plans(case, engine).values():
        assert not differences(run(case, plan), run(case))
    gc.collect()


@feature("`save_on_cpu` and other saved-tensor hooks around the step")
@pytest.mark.parametrize("hooks", [save_on_cpu, copies])
def test_hooks_around_the_step(engine, hooks):
    def forward(model: nn.Module) -> torch.Tensor:
        with hooks():
            return mean_square(model)

    assert_exact_with(hooks, Case(blocks, forward, REGIONS, profiled=mean_square), engine)


@feature("`save_on_cpu` and other saved-tensor hooks inside a region")
@pytest.mark.parametrize("hooks", [save_on_cpu, copies])
def test_hooks_inside_a_region(engine, hooks):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            x = torch.sin(torch.tanh(self.linear(x)))
            with hooks():
                y = torch.sigmoid(self.linear(torch.cos(x)))
            return torch.sin(F.gelu(y))

    assert_exact_with(hooks, Case(lambda: nn.Sequential(Hooked(), Hooked()), mean_square, ("0", "1")), engine)


@feature("hooks that are forbidden (`disable_saved_tensors_hooks`)", cell="refused")
def test_hooks_forbidden(engine):
    case = Case(blocks, mean_square, REGIONS)
    model = planned(case, plans(case, engine, [0.0])[0.0])
    with (
        pytest.raises(RuntimeError, match="no hooks here, please"),
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here, please"),
    ):
        mean_square(model)


# -- global state ------------------------------------------------------------------------------------------------------


@feature("autocast of forward holds in recomputation")
@pytest.mark.parametrize("cache", [True, False])
def test_autocast(engine, cache):
    def forward(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            return model(X).float().square().mean()

    assert_exact(Case(blocks, forward, REGIONS), engine)


@feature("autocast on in backward only does not leak in")
def test_autocast_around_backward_only(engine):
    def backward(loss: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()

    case = Case(blocks, mean_square, REGIONS, backward=backward, profiled_backward=backward_from)
    assert_exact(case, engine)


class MadeOnMeta(nn.Module):
    """What it computes depends on the device that `torch.device` as a context makes the default."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        gain = 2.0 if torch.empty(1).is_meta else 3.0
        return torch.sin(torch.tanh(self.linear(F.gelu(torch.sin(x)) * gain)))


@feature("device context of forward (`with torch.device(...)`) holds in recomputation")
def test_device_context(engine):
    def forward(model: nn.Module) -> torch.Tensor:
        with torch.device("meta"):
            return mean_square(model)

    case = Case(lambda: nn.Sequential(MadeOnMeta(), MadeOnMeta()), forward, ("0", "1"))
    assert_exact(case, engine)
    outside = Case(case.build, mean_square, ("0", "1"))
    assert differences(run(outside), run(case))  # so the context matters


@feature("random state (CPU) put back for recomputation, and left as it was")
def test_random_numbers(engine):
    assert_exact(step_on("cpu"), engine)


@feature("random state (CUDA) put back for recomputation, and left as it was")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_of_cuda(engine):
    case = step_on("cuda")
    expected, state = run(case), torch.cuda.get_rng_state()
    assert not differences(run(case, plans(case, engine, [0.0])[0.0]), expected)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@feature("random state (another device: one in host memory) put back for recomputation, and left as it was")
def test_random_numbers_of_another_device(engine, device_library):
    plans_made, note = ran("tests.features.draws_elsewhere", device_library, engine).splitlines()
    assert plans_made == "3 plans that recompute"
    assert note.startswith(
        "recorded on toy:0: autoac reads the clocks and the memory of CPU and CUDA devices only."
    )


# -- arguments and tensors ---------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Takes no tensor at all."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.randn(64, 64)), nn.Linear(64, 64)

    def forward(self, length, *, scale=1.0):
        return torch.sin(torch.tanh(self.linear(F.gelu(torch.sin(self.table[:length])) * scale)))


@feature("keyword arguments, and no tensor among the inputs")
def test_without_tensor_inputs(engine):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.others = Positions(), Positions()

        def forward(self, x):
            return x * self.positions(64, scale=0.5) * self.others(length=64)

    assert_exact(Case(Model, mean_square, ("positions", "others")), engine)


class Identity(torch.autograd.Function):
    """Its backward asks whether the integers it gets back are the tensor that was given to it."""

    @staticmethod
    def forward(ctx, x, places, same):
        ctx.save_for_backward(x, places)
        ctx.address, ctx.same = places.data_ptr(), same
        return x.sin()

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        x, places = ctx.saved_tensors
        ctx.same.append((places.data_ptr() == ctx.address, places is Identifies.places))
        return gradient * x.cos() * (places >= 0), None, None


class Identifies(nn.Module):
    places = torch.arange(64)

    def __init__(self):
        super().__init__()
        self.linear, self.same = nn.Linear(64, 64), []

    def forward(self, x):
        return torch.sin(Identity.apply(torch.tanh(self.linear(x)), Identifies.places, self.same))


@feature("identity of saved integer tensors")
def test_identity_of_saved_integers(engine):
    """What a region was given and autograd saved comes back as the very tensor, not a copy or an alias."""
    case = Case(lambda: nn.Sequential(Identifies(), Identifies()), mean_square, ("0", "1"))
    assert_exact(case, engine)
    model = planned(case, plans(case, engine, [0.0])[0.0])
    mean_square(model).backward()
    assert [same for block in model for same in block.same] == [(True, True)] * 2


@feature("nested tensors and their offsets")
def test_nested_tensors(engine):
    """Jagged ones, whose symbolic size is known by the identity of their offsets."""

    class Jagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, dense):
            y = torch.tanh(self.linear(torch.sin(x))) * x
            return torch.sin(y), torch.cos(torch.tanh(self.linear(dense)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Jagged(), Jagged()])

        def forward(self, values):
            offsets = torch.tensor([0, 10, 30, 64])
            x, dense = torch.nested.nested_tensor_from_jagged(values * 1, offsets), values
            for layer in self.layers:
                x, dense = layer(x, dense)
            return x.values().square().mean() + dense.square().mean()

    case = Case(Model, lambda model: model(X.clone().requires_grad_()), ("layers.*",))
    assert_exact(case, engine)
