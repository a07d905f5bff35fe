"""What is written in place: statistics, activations, a region's input, buffers, and what nobody sees written."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.execute.exact.harness import Case, assert_exact, decisions, plans, run
from tests.features.feature import feature

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
IMAGES = torch.linspace(-1, 1, 4 * 8 * 12 * 12).reshape(4, 8, 12, 12)


def two_of(block, x=X) -> Case:
    """Two blocks in a row, each of them a region."""
    return Case(
        build=lambda: nn.Sequential(block(), block()),
        forward=lambda model: model(x).square().mean(),
        regions=("0", "1"),
    )


# -- batch norm --------------------------------------------------------------------------------------------------------


@feature("batch norm: statistics updated once")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="usual"),
        pytest.param({"momentum": None}, id="cumulative"),  # its momentum is read off the counter
        pytest.param({"track_running_stats": False}, id="untracked"),
        pytest.param({"affine": False}, id="not affine"),
    ],
)
def test_batch_norm(engine, options):
    case = two_of(
        lambda: nn.Sequential(
            *(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.GELU()),
            *(nn.BatchNorm2d(8, **options), nn.Softplus(), nn.Tanh()),
        ),
        IMAGES,
    )
    expected = run(case)
    if options.get("track_running_stats", True):
        assert expected["buffer 0.3.num_batches_tracked of step 1"] == 2  # once a step
    made = assert_exact(case, engine)
    if engine == "replay":
        assert any(decisions(made[0.0], "aten.native_batch_norm.default"))


def test_batch_norm_1d(engine):
    assert_exact(two_of(lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU())), engine)


def test_batch_norm_in_evaluation_mode(engine):
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(model):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # as is usual when fine-tuning
        return model(IMAGES).square().mean()

    assert_exact(Case(lambda: nn.Sequential(block(), block()), forward, regions=("0", "1")), engine)


# -- activations and residuals -----------------------------------------------------------------------------------------


@feature("in-place ops")
def test_in_place_activations(engine):
    def block() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(64, 64), nn.ReLU(inplace=True)),
            *(nn.Linear(64, 64), nn.Dropout(0.2, inplace=True), nn.LeakyReLU(inplace=True)),
            *(nn.Linear(64, 64), nn.Hardtanh(inplace=True)),
        )

    assert_exact(two_of(block), engine)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.second(torch.tanh(self.first(x)))
        y += x
        y.add_(x.sin(), alpha=0.5)
        return torch.nn.functional.gelu(y)


def test_residual_added_in_place(engine):
    assert_exact(two_of(Residual), engine)


class PreActivation(nn.Module):
    """Writes its input in place, and has read it before and reads it after."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        gate = torch.sigmoid(x * 2)
        x = torch.relu_(x.mul_(0.5))
        y = torch.tanh(self.first(x))
        return x + self.second(y * gate)


INPUT_CHANGED = "input changed in place"


def case_with_inputs_changed() -> Case:
    return Case(
        lambda: nn.Sequential(Residual(), PreActivation(), PreActivation()),
        lambda model: model(X).square().mean(),
        regions=("0", "1", "2"),
    )


@feature(INPUT_CHANGED, "replay")
def test_input_changed_in_place():
    plan = assert_exact(case_with_inputs_changed(), "replay")[0.0]
    assert [region.fqn for region in plan.regions] == ["0", "1", "2"]


@feature(INPUT_CHANGED, "sac", cell="such regions are left untouched")
def test_input_changed_in_place_under_sac():
    """It keeps no copy of an input, and its second run needs it as it was."""
    plan = assert_exact(case_with_inputs_changed(), "sac")[0.0]
    assert [region.fqn for region in plan.regions] == ["0"]


def test_output_changed_in_place(engine):
    """By the code around the regions, in the profiled step as in every other."""

    def forward(model):
        x = model[0](X)
        x.mul_(2)
        y = model[1](x)
        y[:, :32].add_(1)
        return y.square().mean()

    def block() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64)
        )

    assert_exact(Case(lambda: nn.ModuleList([block(), block()]), forward, regions=("0", "1")), engine)


class Views(nn.Module):
    """Writes through views, and through lists of tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        y[:, :32].mul_(0.5)
        y[:, 32:].t()[3:9].tanh_()
        z = torch.zeros(64, 128)
        z[:, ::2] = y
        z[:, 1::2] = y.cos()
        z.unsqueeze_(0)
        return self.linear(z[0].view(64, 2, 64).sin().prod(1))


def test_writes_through_views(engine):
    assert_exact(two_of(Views), engine)


class Foreach(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        seen = y.t()
        torch.ops.aten._foreach_mul_([y], [torch.sigmoid(x)])
        return torch.tanh(seen) + torch.sin(y)


def test_writes_to_a_list_of_tensors(engine):
    """Torch's dispatch modes lose these writes, and with them gradients; torch's own checkpointing does, too."""
    assert_exact(two_of(Foreach), engine)


class ForeachTwice(nn.Module):
    """Writes a view, of what needs no gradient before, twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        z = torch.ones(64, 64).t()
        y = torch.sin(self.linear(x))
        torch.ops.aten._foreach_mul_([z], [y])
        torch.ops.aten._foreach_mul_([z], [torch.cos(y)])
        return torch.tanh(z)


def test_a_view_in_a_list_of_tensors_written_twice(engine):
    """Below a dispatch mode that does nothing, torch refuses the second write: "a leaf Variable ..."."""
    assert_exact(two_of(ForeachTwice), engine)


def test_a_view_in_a_list_of_tensors_written_outside_of_the_regions(engine):
    def forward(model):
        z = torch.ones(64, 64).t()
        for block in model:
            torch.ops.aten._foreach_mul_([z], [block(X)])
        return z.square().mean()

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softplus())

    assert_exact(Case(lambda: nn.ModuleList([block(), block()]), forward, regions=("0", "1")), engine)


class ReshapedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, mask):
        keep = mask.float() * 2
        mask.unsqueeze_(0)
        return torch.sin(self.linear(x) * keep) * mask[0]


def reshaping(model):
    return model[1](model[0](X, X > 0), X < 0.5).square().mean()


RESHAPING = Case(lambda: nn.ModuleList([ReshapedInput(), ReshapedInput()]), reshaping, regions=("0", "1"))


@feature("input reshaped in place", "replay")
def test_input_reshaped_in_place():
    assert_exact(RESHAPING, "replay")


@feature("input reshaped in place", "sac", cell="refused")
def test_input_reshaped_in_place_is_refused_under_sac():
    """Torch's checkpoint takes it for a write."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(RESHAPING, plans(RESHAPING, "sac", [0.0])[0.0])


# -- buffers -----------------------------------------------------------------------------------------------------------


class MovingAverage(nn.Module):
    """Keeps an average of its activations, what it has seen last and the largest of it, and counts."""

    average: torch.Tensor
    largest: torch.Tensor
    last: torch.Tensor
    count: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("average", torch.zeros(64))
        self.register_buffer("largest", torch.zeros(64))
        self.register_buffer("last", torch.zeros(2, 64, 64))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.last[int(self.count) % 2].copy_(y)
            self.count += 1
            where = torch.empty(64, dtype=torch.long)
            torch.max(y, 0, out=(self.largest, where))  # writes what is the region's and what is not
        return torch.sin(y - self.average) / self.count * y.gather(0, where[None])


def test_buffers_updated_in_place(engine):
    case = two_of(MovingAverage)
    assert run(case)["buffer 0.count of step 1"] == 2
    assert_exact(case, engine)


class Scheduled(nn.Module):
    """Computes with a number of its own that counts the steps: it is another one when the code runs again."""

    step: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("step", torch.tensor(1))

    def forward(self, x):
        factor = int(self.step)
        self.step += 1
        return torch.tanh(torch.cos(self.linear(x)) * factor)


def test_numbers_read_off_buffers(engine):
    assert_exact(two_of(Scheduled), engine)


class ReassignedBuffer(nn.Module):
    average: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("average", torch.zeros(64))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return torch.sin(y - self.average)


def test_buffers_put_in_place_of_others(engine):
    assert_exact(two_of(ReassignedBuffer), engine)


def test_spectral_norm(engine):
    """Its power iteration updates buffers in every forward, by ops with `out=`."""
    assert_exact(two_of(lambda: nn.Sequential(spectral_norm(nn.Linear(64, 64)), nn.GELU())), engine)


# -- opaque writes -----------------------------------------------------------------------------------------------------


class NumpyTanh(torch.autograd.Function):
    """A kernel that no dispatch mode sees: it fills a tensor from `empty`."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        np.tanh(x.detach().numpy(), out=y.numpy())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (y,) = grads, ctx.saved_tensors
        return grad * (1 - y * y)


class OpaqueKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = NumpyTanh.apply(self.linear(x))
        scale = torch.empty(64)
        scale.numpy()[:] = np.linspace(0.5, 1.5, 64)
        return torch.sin(y * scale) * torch.sigmoid(y)


def test_opaque_writes(engine):
    made = assert_exact(two_of(OpaqueKernel), engine)
    if engine == "replay":
        assert not any(decisions(made[0.0], "aten.empty_like.default"))


class Halved(torch.autograd.Function):
    """Halves its input in place. `mark_dirty` counts one more write of it, after the last op."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(0.5)
        ctx.mark_dirty(x)
        y = x.exp()
        ctx.save_for_backward(y)
        return x, y

    @staticmethod
    def backward(ctx, *gradients):
        (y,), (of_x, of_y) = ctx.saved_tensors, gradients
        return 0.5 * (of_x + of_y * y)


class Marks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            halved, exponential = Halved.apply(layer(x).tanh() * 1.0)
            x = halved * exponential
        return x


def test_a_function_that_marks_its_input_as_written(engine):
    assert_exact(two_of(Marks), engine, (0.0, 0.3, 0.6, 0.9, 1.0))
