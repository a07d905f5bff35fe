"""Never wrong, whatever the decisions: replay with random ones, which no solver would make.

The decisions need not fit one another: an in-place op may be recomputed and what made its storage not, a mask saved and
what it was drawn into not. Modules first, then programs that are random themselves: views, in-place ops, noise.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoac.execute import replay
from autoac.execute.program import Program
from autoac.execute.sac import sac
from autoac.ops.info import op_info
from autoac_solver.build.build import build
from tests.execute.exact import test_in_place, test_models, test_random, test_tensors
from tests.execute.exact.harness import Case, differences, nothing_leaks, plan_with, planned

X, IMAGES, COMPLEX = test_tensors.X, test_tensors.IMAGES, test_tensors.X.to(torch.complex64)

MODULES = {
    "block": (test_models.Block, X),
    "dropouts": (test_random.dropouts, X),
    "own generator": (test_random.OwnGenerator, X),
    "attention": (test_random.Attention, X.reshape(8, 16, 32)),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        IMAGES,
    ),
    "residual": (test_in_place.Residual, X),
    "pre-activation": (test_in_place.PreActivation, X),
    "views": (test_in_place.Views, X),
    "buffers": (test_in_place.MovingAverage, X),
    "opaque": (test_in_place.OpaqueKernel, X),
    "experts": (test_models.Experts, test_models.TOKENS),
    "complex": (test_tensors.Complex, COMPLEX),
    "indexing": (test_tensors.Indexing, X),
    "strided": (test_tensors.Strided, X),
    "functions": (test_tensors.Functions, X),
    "recurrent": (lambda: nn.LSTM(32, 32), X.reshape(16, 8, 32)),
}

Runner = Callable[[Callable[..., Any], tuple[Any, ...]], Any]


class Names(TorchDispatchMode):
    """Lists the ops that a region's program counts."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op_info(func).ignored:
            self.names.append(op_info(func).name)
        return func(*args, **(kwargs or {}))


def names_of(step: Callable[[Runner], Any]) -> list[str]:
    mode = Names()

    def named(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with mode:
            return function(*args)

    step(named)
    return mode.names


def plain(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def checkpointed(names: list[str], rng: random.Random) -> Runner:
    """The same under torch's selective checkpointing."""
    program = random_decisions(names, rng)
    return lambda function, args: sac.run(program, function, args, {})


def replayed(names: list[str], rng: random.Random) -> Runner:
    """Runs a function as a region, of which about one op in five, half, four in five, or all are recomputed."""
    program = random_decisions(names, rng)
    return lambda function, args: replay.run(program, function, args, {})


def random_decisions(names: list[str], rng: random.Random) -> Program:
    share = rng.choice([0.2, 0.5, 0.8, 1.0])
    return Program("it", [(name, rng.random() < share) for name in names])


# -- modules -----------------------------------------------------------------------------------------------------------


def step_of(build: Callable[[], nn.Module], x: torch.Tensor, runner: Runner) -> dict[str, Any]:
    """One step of a new module behind an op, so that the module may change its input; and what it leaves behind."""
    torch.manual_seed(1)
    model = build().train()
    x = x.clone().requires_grad_()
    result = runner(model, (x * 1.5,))
    tensors = [t for t in (result if isinstance(result, tuple) else [result]) if isinstance(t, torch.Tensor)]
    loss = torch.stack([t.abs().square().mean() for t in tensors]).sum()
    loss.backward()
    left = {"loss": loss.detach(), "input": x.grad, "RNG": torch.get_rng_state()}
    left |= {name: parameter.grad for name, parameter in model.named_parameters()}
    left |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    if isinstance(model, test_random.OwnGenerator):
        left["generator"] = model.generator.get_state()
    return left


@pytest.mark.parametrize("name", MODULES)
def test_random_decisions_on_modules(name):
    build, x = MODULES[name]
    expected = step_of(build, x, plain)
    names = names_of(lambda runner: step_of(build, x, runner))
    rng = random.Random(7)
    with nothing_leaks():
        for trial in range(25):
            found = step_of(build, x, replayed(names, rng))
            assert not differences(found, expected), f"trial {trial}: {differences(found, expected)}"


REFUSALS = 'Plan with engine="replay"|modified by an inplace operation'


@pytest.mark.parametrize("name", MODULES)
def test_random_decisions_on_modules_under_sac(name):
    """They need to fit one another: what does not is refused, and never wrong."""
    build, x = MODULES[name]
    expected = step_of(build, x, plain)
    names = names_of(lambda runner: step_of(build, x, runner))
    rng = random.Random(7)
    for trial in range(15):
        try:
            found = step_of(build, x, checkpointed(names, rng))
        except RuntimeError as error:
            if not re.search(REFUSALS, str(error)):
                raise
            continue
        assert not differences(found, expected), f"trial {trial}: {differences(found, expected)}"


# -- random programs ---------------------------------------------------------------------------------------------------


def gates(t: torch.Tensor) -> torch.Tensor:
    """As in a recurrent cell: parts of one storage that autograd takes for separate, each written in place."""
    left, right = (t * 2).unsafe_chunk(2, 1)
    left.sigmoid_()
    right.mul_(left).tanh_()
    return torch.cat([right * left, left], 1)


class _Unchecked(torch.autograd.Function):
    """Writes a part of a tensor behind autograd's back, as the solvers of torchdiffeq do."""

    @staticmethod
    def forward(ctx: Any, scratch: torch.Tensor, value: torch.Tensor, column: int) -> torch.Tensor:
        ctx.column = column
        scratch.data[..., column] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0][..., ctx.column], None


def stages(t: torch.Tensor) -> torch.Tensor:
    """Each is computed from the earlier ones, and written beside them."""
    scratch = torch.empty(*t.shape, 3)
    for column in range(3):
        scratch = _Unchecked.apply(scratch, t.sin(), column)
        seen = scratch[..., : column + 1]
        t = t + (seen * seen).sum(-1)
    return t


UNARY = [
    gates,
    stages,
    torch.sin,
    torch.tanh,
    torch.exp,
    F.gelu,
    torch.relu,
    torch.clone,
    lambda t: t * 2,
    lambda t: t.softmax(-1),
    lambda t: t.cumsum(0),
    lambda t: t.detach() * t,
    lambda t: F.dropout(t, 0.3),
    lambda t: F.rrelu(t, training=True),
    lambda t: F.layer_norm(t, (4,)),
    lambda t: t.sort(-1).values,
    lambda t: t.max(-1, keepdim=True).values * t,
    lambda t: t.masked_fill(t > 0.5, 0.0),
    lambda t: torch.where(t > 0, t, t * t),
    lambda t: torch.empty_like(t).copy_(t),
    lambda t: torch.zeros_like(t).add_(t),
    lambda t: torch.empty(4, 4).bernoulli_(0.5) * t,
    lambda t: t.new_empty(4, 4).normal_().mul(t),
    lambda t: t.double().float(),
    lambda t: torch.complex(t, t * t).conj().imag * 1.0,
    lambda t: torch.view_as_real(torch.complex(t, t)).sum(-1),
    lambda t: torch.cat([t, t]).chunk(2)[1],
    lambda t: torch.stack([t, t * 2]).unbind(0)[0],
    lambda t: t.index_select(0, torch.tensor([1, 0, 2, 3])),
]
VIEW = [
    lambda t: t.t(),
    lambda t: t[:],
    lambda t: t.detach(),
    lambda t: t.view_as(t),
    lambda t: t.unsqueeze(0).squeeze(0),
    lambda t: t.expand(4, 4),
    lambda t: t.reshape(-1).reshape(4, 4),
]
BINARY = [
    torch.add,
    torch.mul,
    torch.mm,
    torch.maximum,
    F.linear,
    lambda a, b: a - b * 0.5,
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.addmm(a, b, b),
    lambda a, b: torch.addcmul(a, a, b),
    lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None], dropout_p=0.1)[
        0, 0
    ],
]
IN_PLACE = [
    lambda t: t.mul_(0.5),
    lambda t: t.tanh_(),
    lambda t: t.relu_(),
    lambda t: t.zero_(),
    lambda t: t.normal_(),
    lambda t: F.dropout(t, 0.2, inplace=True),
    lambda t: t[1:3].mul_(0.3),
    lambda t: t[0].exp_(),
    lambda t: t.t().add_(0.1),
    lambda t: t.masked_fill_(t > 0, 0.1),
    lambda t: t.copy_(t * 0.2),
    lambda t: t.t_(),
    lambda t: t.unsqueeze_(0).squeeze_(0),
]
IN_PLACE_BINARY = [
    lambda a, b: a.add_(b),
    lambda a, b: a.mul_(b),
    lambda a, b: a.copy_(b),
    lambda a, b: a[1:].add_(b[1:]),
    lambda a, b: a.t().sub_(b),
    lambda a, b: a.__setitem__(0, b[1]),
    lambda a, b: torch.ops.aten._foreach_mul_([a], [b]),
    lambda a, b: a.index_add_(0, torch.tensor([0, 2]), b[:2]),
]


def random_program(seed: int) -> Callable[..., list[torch.Tensor]]:
    """A function of two matrices: some ops on what there is so far, and a few of the last values."""
    rng = random.Random(seed)
    in_place = rng.choice([0.0, 0.15, 0.35])
    without_gradients = rng.random() < 0.2
    code: list[tuple[Any, tuple[int, ...], bool]] = []
    size = 2
    for _ in range(rng.randrange(3, 14)):
        pick = rng.random()
        if pick < in_place:
            unary = rng.random() < 0.5
            ops, writes = (IN_PLACE if unary else IN_PLACE_BINARY), True
        else:
            ops, writes = (
                next(o for p, o in ((0.2, VIEW), (0.5, BINARY), (2.0, UNARY)) if pick < in_place + p),
                False,
            )
            unary = ops is not BINARY
        arguments = tuple(rng.randrange(size) for _ in range(1 if unary else 2))
        code.append((rng.choice(ops), arguments, writes))
        size += not writes
    outputs = [rng.randrange(max(0, size - 4), size) for _ in range(rng.randrange(1, 4))]

    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        values = [*inputs]
        for op, arguments, writes in code:
            with torch.set_grad_enabled(not (writes and without_gradients)):
                result = op(*(values[index] for index in arguments))
            if not writes:
                values.append(result)
        return [values[index] for index in outputs]

    return function


def program_step(seed: int, runner: Runner, backward: str) -> dict[str, Any]:
    function = random_program(seed)
    torch.manual_seed(seed)
    x, y = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    outputs = runner(function, (x * 1.5, y.sin()) if seed % 2 else (x, y))
    loss = torch.stack([output.square().sum() for output in outputs]).sum()
    if backward == "once":
        loss.backward()
    elif backward == "twice":
        loss.backward(retain_graph=True)
        (loss * 2).backward()
    else:
        gradients = torch.autograd.grad(loss, (x, y), create_graph=True, materialize_grads=True)
        torch.stack([gradient.sin().sum() for gradient in gradients]).sum().backward()
    return {"loss": loss.detach(), "x": x.grad, "y": y.grad, "RNG": torch.get_rng_state()}


@pytest.mark.parametrize("backward", ["once", "twice", "through the gradient"])
def test_random_decisions_on_random_programs(backward):
    """Those programs that autograd itself refuses, as they write what it has saved, are left out."""
    checked = 0
    for seed in range(300):
        try:
            expected = program_step(seed, plain, backward)
        except RuntimeError:
            continue
        names = names_of(lambda runner, seed=seed: program_step(seed, runner, backward))
        rng = random.Random(seed)
        for _ in range(3):
            found = program_step(seed, replayed(names, rng), backward)
            assert not differences(found, expected), f"program {seed}: {differences(found, expected)}"
            checked += 1
    assert checked > 600


class ThrowsAway(nn.Module):
    """Layers whose results nobody uses, before and after one that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.used(x).tanh()
        self.unused(y).exp()
        return y.sin()


def test_what_nobody_needs_is_not_run_again(monkeypatch):
    """Though the decisions have it recomputed; a plan knows that when it says which ops run."""
    case = Case(
        build=lambda: nn.Sequential(ThrowsAway(), nn.Linear(64, 1)),
        forward=lambda model: model(X).square().mean(),
        regions=("0",),
    )
    profile = case.profile()
    region = next(index for index, call in enumerate(profile.calls) if call.fqn == "0")
    built = build(profile, [region], "replay")
    runs = built.runs(profile, [not group.must_save for group in built.problem.groups])
    reckoned = [
        profile.tape[op].name
        for op, replayed, run in zip(
            built.problem.position_op, built.problem.position_replayed, runs, strict=True
        )
        if replayed and run
    ]
    assert len(built.problem.groups) == 12
    found = []
    run_one = replay.ReplayCall._run_one
    monkeypatch.setattr(
        *(replay.ReplayCall, "_run_one"),
        lambda self, record, table: found.append(str(record.func)) or run_one(self, record, table),
    )
    case.forward(planned(case, plan_with(case, "replay", lambda region, op, nth: True))).backward()
    assert found == reckoned == ["aten.addmm.default", "aten.tanh.default"]


def test_a_storage_is_not_taken_for_one_that_is_gone(monkeypatch):
    """Memory that was made without values and dropped: the next storage often comes to its address."""

    def region(x: torch.Tensor) -> torch.Tensor:
        gone = [torch.empty_like(x) for _ in range(64)]
        del gone
        y = x * 2.0
        return y.sin()

    packed = []
    pack = replay.Recording.pack
    monkeypatch.setattr(
        replay.Recording, "pack", lambda self, t: packed.append(found := pack(self, t)) or found
    )
    program = Program(
        "it", [(f"aten.{op}", True) for op in (*["empty_like.default"] * 64, "mul.Tensor", "sin.default")]
    )
    for _ in range(50):
        x = X.clone().requires_grad_()
        replay.run(program, region, (x,), {}).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, (X * 2.0).cos() * 2.0)
    assert all(type(found) is replay.Handle for found in packed)
    assert len(packed) == 50
