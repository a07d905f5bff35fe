"""Tensors of every kind: layouts, types, indices and masks, and what a custom `autograd.Function` saves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from tests.execute.exact.harness import (
    Case,
    assert_exact,
    assert_plan_exact,
    decisions,
    least_budget,
    plan_with,
)
from tests.features.feature import feature

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
IMAGES = torch.linspace(-1, 1, 4 * 8 * 12 * 12).reshape(4, 8, 12, 12)


def two_of(block, x=X, build=lambda model: model) -> Case:
    """Two blocks in a row, each of them a region."""
    return Case(
        build=lambda: build(nn.Sequential(block(), block())),
        forward=lambda model: model(x).abs().square().mean(),
        regions=("0", "1"),
    )


# -- layouts and types -------------------------------------------------------------------------------------------------


def images_block() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.GroupNorm(4, 16)),
        *(nn.Conv2d(16, 8, 1), nn.Tanh(), nn.Softplus()),
    )


def test_channels_last(engine):
    last = torch.channels_last
    case = two_of(images_block, IMAGES.to(memory_format=last), lambda model: model.to(memory_format=last))
    assert case.model()(IMAGES.to(memory_format=last)).is_contiguous(memory_format=last)
    assert_exact(case, engine)


def test_float64(engine):
    assert_exact(two_of(images_block, IMAGES.double(), lambda model: model.double()), engine)


class Complex(nn.Module):
    """Conjugate and negative bits, real views of complex storages and complex views of real ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64) / 8)

    def forward(self, x):
        y = torch.fft.fft(x) @ self.weight.conj()
        y = torch.tanh(y) * y.conj() + y.mH.conj() * y.abs()
        parts = torch.view_as_real(y).sin()
        z = torch.view_as_complex(parts) * y.conj().imag * y.real.cos()
        return z / (1 + z.abs())


def test_complex(engine):
    assert_exact(two_of(Complex, X.to(torch.complex64)), engine)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex128(engine):
    assert_exact(two_of(Complex, X.to(torch.complex128), lambda model: model.to(torch.complex128)), engine)


class Strided(nn.Module):
    """Saves tensors with every kind of geometry: transposed, sliced, expanded, with an offset, of no elements."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = torch.sin(self.linear(x))
        left, right = y.chunk(2, dim=1)
        z = left.t() @ right
        z = z * y[1:33, ::2] * y[0, :32].expand(32, 32) * y.as_strided((32, 32), (1, 33), 7)
        heads = y.view(64, 4, 16).transpose(0, 1)
        scores = torch.softmax(heads @ heads.transpose(1, 2), -1) @ heads
        return (
            scores.transpose(0, 1).reshape(64, 64)
            + z.repeat(2, 2)
            + y[:0].sum()
            + y.unfold(1, 8, 8).prod(2).mean()
        )


def test_geometry_of_saved_tensors(engine):
    assert_exact(two_of(Strided), engine)


# -- integers and masks ------------------------------------------------------------------------------------------------


class Indexing(nn.Module):
    """Autograd saves integers and booleans, computed in the region: indices, masks, places of maxima."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        buckets = (torch.sigmoid(y[:, 0]) * 16).long()
        y = y + self.embedding(buckets)
        values, order = y.sort(dim=1)
        top, where = values.topk(8, dim=1)
        y = y.gather(1, order.flip(1)).masked_fill(y > 0.5, 0.0)
        y = y.scatter_add(1, where, top.sin())
        y = torch.where(y.abs() < 0.3, y * 2, y.tanh())
        pooled, _ = F.max_pool1d(y, 2, return_indices=True)
        chosen = y[buckets.unique()].sum(0)
        return y[order[:, 0]] + pooled.repeat(1, 2) + chosen.clamp(-1, 1) + y.cummax(1).values


def test_integer_and_boolean_saved_tensors(engine):
    made = assert_exact(two_of(Indexing), engine)
    if engine == "replay":
        assert any(decisions(made[0.0], "aten.sort.default"))


def test_max_pooling(engine):
    def block():
        return nn.Sequential(
            *(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.MaxPool2d(3, 1, 1)),
            *(nn.Softplus(), nn.AvgPool2d(3, 1, 1), nn.Tanh()),
        )

    assert_exact(two_of(block, IMAGES), engine)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(engine, kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.linear = kind(32, 32, 2, batch_first=True, dropout=0.1), nn.Linear(32, 32)

        def forward(self, x):
            y, _ = self.recurrent(torch.sin(self.linear(x)))
            return torch.tanh(y) * F.gelu(self.linear(y))

    assert_exact(two_of(Recurrent, X.reshape(32, 4, 32)), engine)


def test_sparse_gradients(engine):
    """An embedding whose gradient is sparse: its indices are what backward needs."""

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(100, 64, sparse=True), nn.Linear(64, 64)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            rows = self.embedding((y.abs() * 99).long()[:, 0])
            return torch.sin(y * rows) * torch.sigmoid(rows)

    assert_exact(two_of(Sparse), engine)


# -- custom functions --------------------------------------------------------------------------------------------------


class Swish(torch.autograd.Function):
    """Saves an intermediate that is neither input nor output, with both of them."""

    @staticmethod
    def forward(ctx, x, beta):
        gate = torch.sigmoid(x * beta)
        y = x * gate
        ctx.save_for_backward(x, gate, y, beta)
        return y

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (x, gate, y, beta) = grads, ctx.saved_tensors
        slope = gate * (1 - gate)
        return grad * (gate + beta * x * slope), (grad * x * x * slope).sum() + 0 * y.sum()


class Quantized(torch.autograd.Function):
    """Returns integers as well, keeps a tensor and a number as attributes, and saves nothing but a mask."""

    @staticmethod
    def forward(ctx, x):
        codes = torch.round(x * 16).to(torch.int8)
        ctx.scale, ctx.norm = 1 / 16, x.norm()
        ctx.save_for_backward(codes != 0)
        ctx.mark_non_differentiable(codes)
        return codes * ctx.scale, codes

    @staticmethod
    def backward(ctx, *grads):
        (grad, _), (mask,) = grads, ctx.saved_tensors
        return grad * mask / (1 + ctx.norm * ctx.scale)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride] (by the decorator)
        (grad,), (y,) = grads, ctx.saved_tensors
        return grad * (1 - y * y)


class WithSetup(torch.autograd.Function):
    """The newer way to write one, which also saves for forward mode."""

    @staticmethod
    def forward(x, y):
        product = x * y
        return product.sin(), product

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        (grad, grad_product), (x, y, product) = grads, ctx.saved_tensors
        grad = grad * product.cos() + grad_product
        return grad * y, grad * x


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.beta = nn.Linear(64, 64), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        y = Swish.apply(self.linear(x), self.beta)
        y, codes = Quantized.apply(y + x)
        y = InPlace.apply(self.linear(y) * 2)
        y, product = WithSetup.apply(y, x + codes)
        return torch.sigmoid(y) + product


@feature("custom `autograd.Function`")
def test_custom_functions(engine):
    made = assert_exact(two_of(Functions), engine)
    assert any(decisions(made[0.0], "aten.sigmoid.default"))


class Transposed(torch.autograd.Function):
    """Saves the view of its input that it returns, and with it itself: the engine must not hold its graph."""

    @staticmethod
    def forward(ctx, weight):
        view = weight.t()
        ctx.save_for_backward(view)
        return view

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (view,) = grads, ctx.saved_tensors
        return grad.t() + 0 * view.t()


class OwnLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.1, 0.1, 64 * 64).reshape(64, 64))

    def forward(self, x):
        return torch.relu(torch.sigmoid(x) @ Transposed.apply(self.weight)) + x @ self.weight.t()


@feature("custom `autograd.Function`")
def test_a_function_that_saves_the_view_of_a_weight_that_it_returns(engine):
    made = assert_exact(two_of(OwnLinear), engine)
    assert any(decisions(made[0.0], "aten.sigmoid.default"))


class OwnParameter(nn.Module):
    """Makes a parameter of what it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        scale = nn.Parameter(torch.tanh(self.linear(x)).detach() * 2, requires_grad=False)
        return torch.tanh(scale * self.linear(x))


def test_a_parameter_that_is_made_in_a_region_is_recomputed(engine):
    case = Case(lambda: nn.Sequential(*(OwnParameter() for _ in range(4))), mean_of, regions=tuple("0123"))
    made = assert_exact(case, engine)
    for plan in made.values():
        report = plan.verify(case.model(), torch.linspace(-1, 1, 256 * 64).reshape(256, 64))
        assert report.within_budget, report


def mean_of(model):
    return model(torch.linspace(-1, 1, 256 * 64).reshape(256, 64)).mean()


# -- sizes that change -------------------------------------------------------------------------------------------------


class Resizes(nn.Module):
    """Gives a tensor its size, and its storage, after it was made."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.wide, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        h = torch.tanh(self.wide(x))
        with torch.no_grad():
            if self.how == "out":
                z = torch.sigmoid(h, out=torch.empty(0))
            elif self.how == "out, named":
                z = torch.empty(0)
                torch.cat([h, h], out=z)
                z = z[:256]
            else:
                z = torch.zeros(3)
                z = z.resize_(h.shape).copy_(h) if self.how == "resize_" else z.resize_as_(h).copy_(h)
        return x + self.narrow(h * z)


@pytest.mark.parametrize("how", ["out", "out, named", "resize_", "resize_as_"])
def test_tensors_that_change_their_size(engine, how):
    """Kept from there on by engine replay; sac leaves such modules alone, and what they are beside is planned."""

    def block():
        return nn.Sequential(Resizes(how), nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)))

    case = Case(
        build=lambda: nn.Sequential(block(), block()),
        forward=mean_of,
        regions=("0.0", "0.1", "1.0", "1.1"),
    )
    for plan in assert_exact(case, engine).values():
        report = plan.verify(case.model(), torch.linspace(-1, 1, 256 * 64).reshape(256, 64))
        assert report.measured_peak_bytes == report.predicted_peak_bytes, report


@pytest.mark.parametrize("how", ["out", "resize_"])
def test_a_tensor_that_changes_its_size_where_the_plan_has_it_recomputed(how):
    """Decisions that fit another step: engine replay keeps the tensor all the same."""
    case = two_of(lambda: Resizes(how), torch.linspace(-1, 1, 256 * 64).reshape(256, 64))
    assert_plan_exact(case, plan_with(case, "replay", lambda *_: True))


# -- tensors that no op makes ------------------------------------------------------------------------------------------


class FromNumbers(nn.Module):
    """Makes tensors of Python's numbers, which no op does."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.wide, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        if self.where == "at the start":
            return x + self.narrow(torch.tanh(self.wide(x * torch.tensor(NUMBERS).view(256, 64))))
        y = self.narrow(torch.tanh(self.wide(x)))
        if self.where == "as an index":
            return x + y[list(range(255, -1, -1))]
        return x + y * torch.tensor(NUMBERS).view(256, 64)


NUMBERS = [float(i % 7) for i in range(256 * 64)]


@pytest.mark.parametrize("where", ["at the start", "at the end", "as an index"])
def test_tensors_of_pythons_numbers(engine, where):
    """They count as what the step makes, and under sac as what the second run makes again."""
    names = tuple("0123")
    case = Case(lambda: nn.Sequential(*(FromNumbers(where) for _ in names)), mean_of, regions=names)
    assert_exact(case, engine)
    x = torch.linspace(-1, 1, 256 * 64).reshape(256, 64)
    real, fake = (autoac.profile(case.model(), x, mode=mode, regions=names) for mode in ("real", "fake"))
    least = least_budget(real, engine, names)
    most = autoac.solve(real, 10**12, engine=engine, regions=names).predicted_peak_bytes
    assert least < most == autoac.solve(fake, 10**12, engine=engine, regions=names).predicted_peak_bytes
    for budget in (least, (least + most) // 2, most):
        report = autoac.solve(real, budget, engine=engine, regions=names).verify(case.model(), x)
        assert report.measured_peak_bytes == report.predicted_peak_bytes, report


# -- transforms of functions -------------------------------------------------------------------------------------------


class Transforms(nn.Module):
    """Calls its submodules inside of torch.func's transforms, where they are given wrapped tensors."""

    def __init__(self, kind):
        super().__init__()
        self.wide, self.narrow, self.kind = nn.Linear(64, 128), nn.Linear(128, 64), kind

    def forward(self, x):
        if self.kind == "vmap":
            return x + torch.func.vmap(self.inner)(x)
        return x + sum(torch.func.jvp(self.inner, (x,), (torch.ones_like(x),)))

    def inner(self, t):
        return self.narrow(torch.tanh(self.wide(t)))


@pytest.mark.parametrize("kind", ["vmap", "jvp"])
def test_transforms_of_functions(engine, kind):
    names = ("0", "1", "2")
    assert_exact(
        Case(lambda: nn.Sequential(*(Transforms(kind) for _ in names)), mean_of, regions=names), engine
    )


class Stretched(torch.autograd.Function):
    """Reads, in forward, what it returns and saves: an op's argument that only then gets the function's graph."""

    @staticmethod
    def forward(ctx, x):
        stretched = x * 3
        squashed = torch.tanh(stretched)
        ctx.save_for_backward(stretched)
        ctx.set_materialize_grads(False)
        return squashed, stretched

    @staticmethod
    def backward(ctx, *grads):
        (stretched,) = ctx.saved_tensors
        return grads[0] * 3 / torch.cosh(stretched).square()


class Stretches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + Stretched.apply(self.linear(x))[0] * torch.sigmoid(x)


@feature("custom `autograd.Function`")
@pytest.mark.parametrize("recomputed", ["aten.tanh.default", "aten.mul.Tensor"])
def test_a_function_whose_result_is_read_inside_of_it(engine, recomputed):
    case = two_of(Stretches)
    assert_exact(case, engine)
    assert_plan_exact(case, plan_with(case, engine, lambda region, name, nth: name == recomputed))
