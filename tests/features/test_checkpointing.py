"""What `torch.utils.checkpoint` offers, under a plan: early stop, determinism checks, debugging, nesting, variants."""

import contextlib
import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    GraphExecGroup,
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

import autoac
from autoac.ops.info import op_info
from tests.execute.exact.harness import (
    Case,
    assert_exact,
    assert_plan_exact,
    backward_from,
    differences,
    plan_with,
    planned,
    plans,
    run,
)
from tests.features.feature import feature

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)


class Block(nn.Module):
    """Products, dropout, and at its end ops of which autograd saves nothing, which early stop spares."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        y = self.second(torch.tanh(self.dropout(F.gelu(self.norm(self.first(x))))))
        return (x + y).neg() + 1


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block())


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


REGIONS = ("0", "1", "2")


def in_context(context: Any, backward: bool = True) -> Case:
    """A case whose steps run in a context."""

    def forward(model: nn.Module) -> torch.Tensor:
        with context():
            return mean_square(model)

    def go_back(loss: torch.Tensor) -> None:
        with context() if backward else contextlib.nullcontext():
            loss.backward()

    return Case(
        blocks, forward, REGIONS, backward=go_back, profiled=mean_square, profiled_backward=backward_from
    )


# -- early stop --------------------------------------------------------------------------------------------------------


@feature("early stop on (the default)")
def test_early_stop_on(engine):
    assert_exact(Case(blocks, mean_square, REGIONS), engine)


@feature("`set_checkpoint_early_stop(False)`")
@pytest.mark.parametrize("around_backward", [True, False])
def test_early_stop_off(engine, around_backward):
    assert_exact(in_context(functools.partial(set_checkpoint_early_stop, False), around_backward), engine)


def test_early_stop_off_runs_what_it_spares_under_sac():
    """So the switch reaches torch: the ops behind the last saved tensor do run again."""

    class Tail(nn.Module):
        runs = 0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            y = torch.tanh(self.linear(torch.sin(x)))
            Tail.runs += 1
            return y

    case = Case(lambda: nn.Sequential(Tail(), Tail()), mean_square, ("0", "1"))
    plan = plan_with(case, "sac", lambda region, op, nth: True)
    counts = []
    for enabled in (True, False):
        model, Tail.runs = planned(case, plan), 0
        with set_checkpoint_early_stop(enabled):
            mean_square(model).backward()
        counts.append(Tail.runs)
    assert counts == [2, 4]


# -- determinism, and errors that say what differs ---------------------------------------------------------------------


class Flips(nn.Module):
    """Does something else in every second call: what no second run can repeat.

    It counts in an object of its own: the module's attributes are put back for a second run.
    """

    def __init__(self, other: Any = torch.sigmoid):
        super().__init__()
        self.act, self.linear, self.other = Act(self), nn.Linear(64, 64), other
        self.made = SimpleNamespace(calls=0)

    def forward(self, x):
        self.made.calls += 1
        return torch.sin(self.act(torch.tanh(self.linear(x))))


class Act(nn.Module):
    def __init__(self, owner: Flips):
        super().__init__()
        self.owner: Any
        self.__dict__["owner"] = owner  # not as a child

    def forward(self, x):
        return torch.cos(x[:64]) if self.owner.made.calls % 2 else self.owner.other(x[:64])


def sliced(x):
    return torch.cos(x[:3])


def added(x):
    return torch.cos(x) + 1


def flipping(other: Any = torch.sigmoid) -> Case:
    def profiled(model: Any) -> torch.Tensor:
        for flips in model:
            flips.made.calls = 0  # the step is run twice to profile it
        return mean_square(model)

    return Case(lambda: nn.Sequential(Flips(other), Flips(other)), mean_square, ("0", "1"), profiled=profiled)


def all_again(region: str, op: str, nth: int) -> bool:
    return True


@feature('determinism check "default": a mismatch is reported', "sac")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.sigmoid, "aten.sigmoid.default encountered during backward but not found"),
        (sliced, "aten.slice.Tensor .*encountered during backward but not found"),
    ],
)
def test_a_mismatch_is_reported(other, message):
    case = flipping(other)
    with pytest.raises(RuntimeError, match=message) as caught:
        run(case, plan_with(case, "sac", all_again), steps=1)
    assert "in the second run of region '1'" in "".join(caught.value.__notes__)


@feature('determinism check "default": a mismatch is reported', "replay", cell="no code runs twice")
@feature("`set_checkpoint_debug_enabled`: the op that differs", "replay", cell="no code runs twice")
def test_nothing_can_differ_under_replay():
    case = flipping()
    assert not differences(run(case, plan_with(case, "replay", all_again), steps=1), run(case, steps=1))


@feature('determinism check "none" (`plan.context_fn`)', "sac")
@feature('determinism check "none" (`plan.context_fn`)', "replay", cell="refused")
@pytest.mark.parametrize("check", ["default", "none"])
def test_determinism_check_of_the_users_own_call(check):
    """In a loop that calls checkpoint itself, all of its arguments are the user's."""
    case = Case(blocks, mean_square, REGIONS)
    plan = plans(case, "sac", [0.0])[0.0]

    def forward(model: Any) -> torch.Tensor:
        x = X
        for name, block in enumerate(model):
            options = {
                "use_reentrant": False,
                "determinism_check": check,
                "context_fn": plan.context_fn(str(name)),
            }
            x = checkpoint(block, x, **options)
        return x.square().mean()

    assert not differences(run(dataclasses.replace(case, forward=forward)), run(case))
    with pytest.raises(autoac.PlanMismatchError, match='plan with engine="sac"'):
        plans(case, "replay", [0.0])[0.0].context_fn("0")


@feature("`set_checkpoint_debug_enabled`: same results")
def test_debugging_changes_nothing(engine):
    assert_exact(in_context(functools.partial(set_checkpoint_debug_enabled, True)), engine)


@feature("`set_checkpoint_debug_enabled`: the op that differs", "sac")
@pytest.mark.parametrize("other", [torch.sigmoid, sliced, added])
@pytest.mark.parametrize("early_stop", [True, False])
def test_debugging_names_the_op_that_differs(other, early_stop):
    case = flipping(other)
    plan = plan_with(case, "sac", all_again)
    with (
        set_checkpoint_debug_enabled(True),
        set_checkpoint_early_stop(early_stop),
        pytest.raises(CheckpointError) as caught,
    ):
        run(case, plan, steps=1)
    message = str(caught.value)
    assert "region '1' did not do in its second run, for backward, what it did in forward" in message
    first = str(caught.value).splitlines()[1:3]
    was, module = ("sin", "1") if other is added else ("cos", "1.act")
    assert re.fullmatch(
        rf"  forward: +aten.{was}.default\(float32\[64, 64\]\)  in module '{module}', .*.py:\d+", first[0]
    )
    found = {torch.sigmoid: "sigmoid.default", sliced: "slice.Tensor", added: "add.Tensor"}[other]
    assert re.fullmatch(
        rf"  second run: +aten.{found}\(float32\[64, 64\]\)  in module '1.act', .*.py:\d+", first[1]
    )
    assert "Ops of forward (6):\n     1  aten.t.default" in message
    assert "Ops of the second run (" in message


def test_debugging_reaches_the_users_own_checkpoints_inside():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.linear = Flips(), nn.Linear(64, 64)

        def forward(self, x):
            return checkpoint(self.inner, torch.tanh(self.linear(torch.sin(x))), use_reentrant=False)

    def build():
        model = nn.Sequential(Outer(), Outer())
        for outer in cast("Any", model):
            outer.inner.other = lambda x: torch.cos(x.expand(2, 64, 64))
        return model

    def profiled(model):
        for outer in model:
            outer.inner.made.calls = 0
        return mean_square(model)

    case = Case(build, mean_square, ("0", "1"), profiled=profiled)
    with (
        set_checkpoint_debug_enabled(True),
        pytest.raises(CheckpointError, match="because you passed `debug=True`"),
    ):
        run(case, plan_with(case, "replay", all_again), steps=1)


# -- nesting and variants ----------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Checkpoints its inner module, if it is told to."""

    def __init__(self, inner: nn.Module, options: dict[str, Any] | None = None):
        super().__init__()
        self.inner, self.linear, self.on = inner, nn.Linear(64, 64), True
        self.options = options or {"use_reentrant": False}

    def forward(self, x):
        x = torch.sin(F.gelu(torch.tanh(self.linear(x))))
        return checkpoint(self.inner, x, **self.options) if self.on else self.inner(x)


def three_deep() -> nn.Module:
    return nn.Sequential(*(Deep(Deep(Deep(Block()))) for _ in range(2)))


@feature("nested checkpoints, three deep, inside a region")
def test_three_deep_inside_a_region(engine):
    case = Case(three_deep, mean_square, ("0", "1"))
    for saved in ("aten.tanh.default", "aten.gelu.default", "aten.addmm.default", ""):
        assert_plan_exact(case, plan_with(case, engine, lambda region, op, nth, saved=saved: op != saved))


@feature("a region inside the user's checkpoints, two deep")
def test_a_region_three_deep(engine):
    def without(model: nn.Module) -> torch.Tensor:
        for module in model.modules():
            if isinstance(module, Deep):
                module.on = False
        return mean_square(model)

    assert_exact(Case(three_deep, mean_square, ("*.inner.inner",), profiled=without), engine)


@feature("planned and checkpointed modules in turn")
def test_region_beside_nested_checkpoints(engine):
    """Planned and checkpointed modules in turn, both kinds nested."""

    def build() -> nn.Module:
        return nn.Sequential(Block(), Deep(Block()), Block(), Deep(Deep(Block())))

    assert_exact(Case(build, mean_square, ("0", "1", "2", "3")), engine)


@feature("reentrant checkpoints beside regions")
def test_reentrant_beside_regions(engine):
    def build() -> nn.Module:
        return nn.Sequential(Block(), Deep(Block(), {"use_reentrant": True}), Block())

    assert_exact(Case(build, mean_square, ("0", "2")), engine)


@feature("reentrant checkpoints inside a region")
def test_reentrant_inside_a_region(engine):
    def build() -> nn.Module:
        return nn.Sequential(*(Deep(Block(), {"use_reentrant": True}) for _ in range(2)))

    assert_exact(Case(build, mean_square, ("0", "1")), engine)


@feature("`checkpoint_sequential` beside regions")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_sequential_beside_regions(engine, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest, self.last = Block(), nn.Sequential(Block(), Block(), Block()), Block()

        def forward(self, x):
            x = checkpoint_sequential(self.rest, 2, self.first(x), use_reentrant=reentrant)
            return self.last(x)

    assert_exact(Case(Model, mean_square, ("first", "last")), engine)


@feature("a region inside a reentrant checkpoint")
def test_region_inside_a_reentrant_checkpoint(engine):
    def build() -> nn.Module:
        return nn.Sequential(Block(), *(Deep(Block(), {"use_reentrant": True}) for _ in range(2)))

    def without(model: nn.Module) -> torch.Tensor:
        for module in model.modules():
            if isinstance(module, Deep):
                module.on = False
        return mean_square(model)

    assert_exact(Case(build, mean_square, ("*.inner",), profiled=without), engine)


# -- backward in parts -------------------------------------------------------------------------------------------------


class TwoWays(nn.Module):
    """Two outputs that have nothing saved in common."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.made = SimpleNamespace(calls=0)

    def forward(self, x):
        self.made.calls += 1
        return torch.sin(torch.tanh(self.left(x))), torch.sin(torch.tanh(self.right(x)))


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([TwoWays(), TwoWays()])

    def forward(self, x):
        return [out.square().mean() for ways in self.ways for out in ways(x)]


@feature("`GraphExecGroup`: backward in parts, one recomputation")
def test_backward_in_parts(engine):
    def backward(losses: list[torch.Tensor]) -> None:
        with GraphExecGroup():
            for loss in losses:
                loss.backward()

    case = Case(Split, lambda model: model(X), ("ways.*",), backward=backward)
    assert_exact(case, engine)
    model = planned(case, plan_with(case, engine, all_again))
    backward(model(X))
    assert [ways.made.calls for ways in model.ways] == ([1, 1] if engine == "replay" else [2, 2])


@feature("backward in parts without a group", "replay")
def test_backward_in_parts_without_a_group():
    def backward(losses: list[torch.Tensor]) -> None:
        for loss in losses:
            loss.backward()

    assert_exact(Case(Split, lambda model: model(X), ("ways.*",), backward=backward), "replay")


@feature("backward in parts without a group", "sac", cell="refused")
def test_backward_in_parts_without_a_group_under_sac():
    """Each part recomputes for itself, and what was saved is given out once; all that is recomputed allows for it."""

    def backward(losses: list[torch.Tensor]) -> None:
        for loss in losses:
            loss.backward()

    case = Case(Split, lambda model: model(X), ("ways.*",), backward=backward)
    with pytest.raises(RuntimeError, match="You are only allowed to backward once on any region"):
        run(case, plan_with(case, "sac", lambda region, op, nth: op != "aten.tanh.default"), steps=1)
    assert not differences(run(case, plan_with(case, "sac", all_again)), run(case))


# -- ops that do not count ---------------------------------------------------------------------------------------------


@feature("the ops in `SAC_IGNORED_OPS`")
def test_ignored_ops(engine):
    """They are no ops of a plan, however often either run has them."""
    for op in SAC_IGNORED_OPS:
        assert op_info(op).ignored, op

    class Detaches(Block):
        def forward(self, x):
            y = super().forward(x.detach() + x)
            for _ in range(3):
                y = y * y.detach().abs() + torch.empty_like(y, device=y.device).fill_(0.5)
            return y

    assert_exact(Case(lambda: nn.Sequential(Detaches(), Detaches()), mean_square, ("0", "1")), engine)
