"""Times are fitted to the model's own steps where bookkeeping counts, and only where running these leaves no trace."""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoac
from autoac.api import profiling as planner
from autoac.calibrate import in_model as fitting
from autoac.calibrate.in_model import fitted
from autoac.execute.engines import ENGINES
from autoac.plans import Plan
from autoac.record.recorder import recorded_step
from autoac.step.step import TrainingStep
from autoac_solver.build.engines.replay import ReplayCosts
from autoac_solver.build.engines.sac import SacCosts
from autoac_solver.problem.problem import DecisionGroup, save_or_recompute
from autoac_solver.records.profile import EngineCosts, Profile
from tests.small_models import batch, make

pytestmark = pytest.mark.usefixtures("one_thread")

MUCH = 2**40


def given(*seconds: float) -> EngineCosts:
    """Of replay: op, record, saved, call; of sac: op, saved, call."""
    return {"replay": asdict(ReplayCosts(*seconds[:4])), "sac": asdict(SacCosts(*seconds[4:]))}


COSTS, LIGHT = (given(*(k * group for k in range(1, 8))) for group in (1e-5, 1e-7))


def factors_of(costs: EngineCosts, base: EngineCosts) -> dict[tuple[str, str], float]:
    """How many times as large they are as others, by engine and part."""
    return {(name, part): s / base[name][part] for name, parts in costs.items() for part, s in parts.items()}


def recorded(model: nn.Module, sample: Any, loss: Any = None) -> Profile:
    """With given times: an op of the step takes 10 us, the engine's bookkeeping as in `COSTS`."""
    profile = recorded_step(TrainingStep(model, sample, loss))[0]
    tape = tuple(replace(op, time_s=1e-5, rerun_s=2e-5, spread_s=1e-6) for op in profile.tape)
    return replace(profile, tape=tape, views_s=1e-5, costs=COSTS, notes=())


def measuring(monkeypatch: pytest.MonkeyPatch, plain_s: float, planned_s: float) -> list[Any]:
    """Let steps take as long as given; the plans that they would have been run with."""
    plans: list[Any] = []

    def measured(step: Any, plan: Any, rounds: int, tell: Any) -> tuple[float, float]:
        plans.append(plan)
        return plain_s, planned_s

    monkeypatch.setattr(fitting, "_measured", measured)
    return plans


def watched(monkeypatch: pytest.MonkeyPatch, name: str = "_measured") -> list[tuple[float, float]]:
    """What is measured from now on, for real."""
    found: list[tuple[float, float]] = []
    measure = getattr(fitting, name)

    def measured(*args: Any) -> tuple[float, float]:
        found.append(measure(*args))
        return found[-1]

    monkeypatch.setattr(fitting, name, measured)
    return found


def light(profile: Profile) -> Profile:
    """With bookkeeping that counts, and is too little for whole steps to tell it."""
    return replace(profile, costs=LIGHT)


def wrapping(monkeypatch: pytest.MonkeyPatch, share: float, error: float) -> list[float]:
    """Let wrapping take this share of what the profile says, with an error that is such a share, too."""
    said: list[float] = []
    says = fitting._forward_wrapping_s

    def saying(profile: Profile, stack: Any) -> float:
        said.append(says(profile, stack))
        return said[-1]

    monkeypatch.setattr(fitting, "_forward_wrapping_s", saying)
    monkeypatch.setattr(fitting, "_measured_forward", lambda *_: (share * said[-1], error * said[-1]))
    return said


def many_regions(profile: Profile) -> tuple[Any, Plan]:
    """The regions that are wrapped in turns, and a plan for them."""
    stack = fitting.stacked(profile, fitting._many_regions(profile), "replay", ())
    return stack, fitting._plan(profile, stack, (False,) * len(stack.built.problem.groups))


@pytest.mark.parametrize(("engine", "other"), [("replay", "sac"), ("sac", "replay")])
def test_what_is_predicted_of_the_measured_steps_is_what_they_took(
    monkeypatch: pytest.MonkeyPatch, engine: str, other: str
):
    profile = recorded(make(), batch())
    plain_s, planned_s = 0.6 * profile.step_s, 2.5 * profile.step_s
    plans = measuring(monkeypatch, plain_s, planned_s)
    found = fitted(profile, TrainingStep(make(), batch()), MUCH, engine=engine)
    [plan] = plans
    assert plan.engine == engine
    assert found.step_s == pytest.approx(plain_s)
    for op, before in zip(found.tape, profile.tape, strict=True):
        assert (op.time_s, op.rerun_s, op.spread_s) == pytest.approx((6e-6, 1.2e-5, 6e-7))
        assert replace(op, time_s=1e-5, rerun_s=2e-5, spread_s=1e-6) == before
    factors = factors_of(found.costs, COSTS)
    assert len({round(factor, 9) for (name, _), factor in factors.items() if name == engine}) == 1
    assert all(factor == 1.0 for (name, _), factor in factors.items() if name == other)
    # Of the plan that was measured, solved anew with the new times.
    decisions = tuple(plan.decisions["decision"] == "recompute")
    assert any(decisions)
    names = [region.fqn for region in plan.regions]
    again = autoac.solve(found, budget=plan.predicted_peak_bytes, regions=names, engine=engine)
    assert again.predicted_overhead <= (planned_s - plain_s) / plain_s * (1 + 1e-9)
    stack = fitting.stacked(found, fitting.partitions(found)[0], engine, ())
    everything = fitting._all_that_can_be(stack.built.problem.groups)
    assert fitting.simulate(stack.built.problem, everything).extra_s == pytest.approx(planned_s - plain_s)


def test_the_engine_that_is_asked_for_is_fitted_as_well(monkeypatch: pytest.MonkeyPatch):
    plans = measuring(monkeypatch, 1.0, 2.0)
    monkeypatch.setattr(
        planner, "recorded_step", lambda *a: (recorded(a[0].model, a[0].sample), recorded_step(*a)[1])
    )
    autoac.profile(make(), batch())
    autoac.profile(make(), batch(), engine="sac")
    assert [plan.engine for plan in plans] == ["replay", "replay", "sac"]


def test_time_in_which_others_ran_does_not_count(monkeypatch: pytest.MonkeyPatch):
    """Steps wait for three quarters of their time."""
    profile = recorded(make(), batch())
    stack = fitting.stacked(profile, fitting.partitions(profile)[0], "replay", ())
    plan = fitting._plan(profile, stack, fitting._all_that_can_be(stack.built.problem.groups))
    runs: list[Any] = []

    def a_second(run: Any, rounds: int, device: torch.device) -> list[float]:
        runs.append(run())
        return [1.0]

    monkeypatch.setattr(fitting, "seconds_of", a_second)
    monkeypatch.setattr(fitting, "without_waiting", lambda timed, _: (None, timed()[1] / 4))
    assert fitting._measured(TrainingStep(make(), batch()), plan, 3) == (0.25, 0.25)
    assert len(runs) == 2 * 4


@pytest.mark.parametrize(
    ("share", "error", "expected"),
    [(2.0, 0.0, 2.0), (0.5, 0.0, 0.5), (2.0, fitting._CHAINS_ERROR, 1.5), (2.0, 1e6, 1.0), (-1.0, 0.0, 1.0)],
)
def test_what_wrapping_takes_in_forward_counts_by_how_exact_it_is(
    monkeypatch: pytest.MonkeyPatch, share: float, error: float, expected: float
):
    profile = light(recorded(make(), batch()))
    said = wrapping(monkeypatch, share, error)
    found = fitted(profile, TrainingStep(make(), batch()), MUCH)
    assert len(said) == 1
    factors = factors_of(found.costs, LIGHT)
    assert factors.pop(("replay", "record")) == 1.0  # it is not part of what was measured
    assert factors == pytest.approx(dict.fromkeys(factors, expected))
    assert replace(found, costs=LIGHT) == profile
    assert fitting._forward_wrapping_s(found, many_regions(found)[0]) == pytest.approx(expected * said[0])


def test_forward_is_not_run_where_that_tells_nothing(monkeypatch: pytest.MonkeyPatch):
    said = wrapping(monkeypatch, 2.0, 0.0)
    profile = light(recorded(make(), batch()))
    on_cuda = replace(profile, device="cuda:0")
    without = replace(profile, costs=given(*[1e-12] * 7))
    slow = tuple(replace(op, time_s=1.0, rerun_s=1.0) for op in profile.tape)
    long = replace(profile, tape=slow, costs=given(*[1e-2] * 7))
    for other in (on_cuda, without, long):
        assert fitted(other, TrainingStep(make(), batch()), MUCH) is other
    assert fitted(profile, TrainingStep(make(), batch()), 1) is profile
    assert said == [said[0]]  # of the one that is too long
    assert fitted(profile, TrainingStep(make(), batch()), MUCH) is not profile


def test_where_whole_steps_take_too_long_forward_is_measured(monkeypatch: pytest.MonkeyPatch):
    plans = measuring(monkeypatch, 1.0, 2.0)
    said = wrapping(monkeypatch, 2.0, 0.0)
    profile = recorded(make(), batch())
    forward = sum(not op.backward for op in profile.tape)
    op_s = 2.4 / (fitting._PASSES * forward)  # 7.2 s of 10 for forward passes, more for three whole rounds
    tape = tuple(replace(op, time_s=op_s, rerun_s=op_s) for op in profile.tape)
    profile = replace(profile, tape=tape, costs=given(*[op_s / 2] * 7))
    assert fitted(profile, TrainingStep(make(), batch()), MUCH).costs["replay"]["op"] == pytest.approx(op_s)
    assert len(said) == 1
    assert not plans


@pytest.mark.parametrize("count", [8, 9, 3])
def test_wrapping_is_told_from_the_machines_drift(monkeypatch: pytest.MonkeyPatch, count: int):
    """Blocks take 10 ms, and in each pass 0.5 ms more than in the one before; wrapping takes 1 ms each time."""
    now, block_s = 0.0, 0.01

    class Timed(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += block_s
            return super().forward(input).tanh()

    class Slowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Timed(16, 16) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal block_s
            block_s += 5e-4
            collecting.append(gc.isenabled())
            for block in self.blocks:
                x = block(x)
            return x

    run, wrapped = ENGINES["replay"].run, 0
    collecting: list[bool] = []

    def slower(*args: Any) -> Any:
        nonlocal now, wrapped
        now += 1e-3
        wrapped += 1
        return run(*args)

    model = Slowing()
    profile = light(recorded(model, batch()))
    _, plan = many_regions(profile)
    assert len(plan.regions) == count
    assert gc.isenabled()
    monkeypatch.setattr(fitting, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(ENGINES["replay"], "run", slower)
    collecting.clear()
    wrapping_s, error_s = fitting._measured_forward(TrainingStep(model, batch()), plan, 5)
    assert wrapped == (1 + 2 * 5) * count
    assert gc.isenabled()
    assert collecting == [False] * (2 + 4 * 5)
    assert wrapping_s == pytest.approx(count * 1e-3)
    assert error_s == pytest.approx(0, abs=1e-9)


def test_regions_that_are_wrapped_in_turns():
    found = recorded(make(blocks=12), batch())
    names = [found.calls[index].fqn for index in fitting._many_regions(found)]
    assert {f"blocks.{index}" for index in range(12)} <= set(names)
    coarsest = recorded(nn.Sequential(*(nn.Sequential(make(), make()) for _ in range(2))), batch())
    finer = {coarsest.calls[index].fqn for index in fitting._many_regions(coarsest)}
    assert len(finer) >= fitting._MANY > len(fitting.partitions(coarsest)[0])
    model = make(rounds=4)  # twelve calls, of three blocks
    shared = recorded(model, batch())
    calls = [shared.calls[index] for index in fitting._many_regions(shared)]
    assert len({call.fqn for call in calls}) == max(
        len({shared.calls[index].fqn for index in choice}) for choice in fitting.partitions(shared)
    )


def test_what_the_loss_calls_besides_is_not_reckoned_with():
    model = make(blocks=8)
    profile = recorded(model, batch(), lambda y: (y - model(batch(2))).square().mean() + model.head(y).mean())
    calls = [profile.calls[index] for choice in fitting.partitions(profile) for index in choice]
    assert {("blocks.0", 0), ("blocks.0", 1)} <= {(call.fqn, call.call) for call in calls}
    calls = [profile.calls[index] for index in fitting._many_regions(profile)]
    assert {f"blocks.{index}" for index in range(8)} <= {call.fqn for call in calls}
    assert all(call.call == 0 for call in calls)
    fitting._measured_forward(
        TrainingStep(model, batch()), many_regions(profile)[1], 2
    )  # fails if one of them is not run


def test_modules_that_are_not_called_cannot_be_timed():
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block.forward(x)
            return x

    model = Direct()
    profile = light(recorded(model, batch()))
    found = fitted(profile, TrainingStep(model, batch()), MUCH)
    assert "without calling them" in found.notes[-1]
    assert "an estimate" in found.notes[-1]
    assert replace(found, notes=profile.notes) == profile


def test_modules_are_timed_for_a_while():
    model = make()
    with fitting._timed_modules(model, ["blocks.0", "head"]) as seconds:
        seconds |= {"blocks.0": 0.0, "head": 0.0}
        model(batch())
        assert all(taken > 0 for taken in seconds.values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("plain", [100.0, 0.001])
def test_what_is_noise_is_not_believed(monkeypatch: pytest.MonkeyPatch, plain: float):
    profile = recorded(make(), batch())
    measuring(monkeypatch, plain * profile.step_s, plain * profile.step_s)
    assert fitted(profile, TrainingStep(make(), batch()), MUCH) == profile


def test_long_ops_are_not_run_again(monkeypatch: pytest.MonkeyPatch):
    profile = recorded(make(), batch())
    plans = measuring(monkeypatch, 1.0, 2.0)
    said = wrapping(monkeypatch, 1.0, 0.0)
    for op_s, costs in ((1e-2, LIGHT), (1.0, given(*(k * 1.0 for k in range(1, 8))))):
        tape = tuple(replace(op, time_s=op_s, rerun_s=op_s) for op in profile.tape)
        long = replace(profile, tape=tape, costs=costs)
        assert fitted(long, TrainingStep(make(), batch()), MUCH) is long
    assert len(said) <= 1  # nothing is measured, even if it is asked what it would be
    assert not plans


def test_a_step_that_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch):
    profile = recorded(make(), batch())
    plans = measuring(monkeypatch, 1.0, 2.0)
    needed = autoac.solve(profile, MUCH).predicted_peak_bytes - profile.resident_bytes
    assert fitted(profile, TrainingStep(make(), batch()), 2 * needed) is profile
    assert not plans
    assert fitted(profile, TrainingStep(make(), batch()), 2 * needed + 1) is not profile


class Writing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = make()
        self.what = what
        self.generator = torch.Generator()
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)
        self.seen = torch.zeros(16)
        self.mean, self.variance = torch.zeros(16), torch.ones(16)
        if what == "part":
            self.register_buffer("first", self.seen[:8])
        if what == "expanded":
            self.register_buffer("expanded", torch.ones(1).expand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "parameter":
            self.scale.add_(0.1)
        if self.what in ("attribute", "part"):
            self.seen.add_(1)
        if self.what == "sample":
            x.mul_(1.0)
        if self.what == "statistics":
            x = F.batch_norm(x + x, self.mean, self.variance, training=True)
        if self.what == "generator":
            x = x + torch.randn(x.shape, generator=self.generator)
        return self.layers(x * self.scale)


@pytest.mark.parametrize(
    "what", ["parameter", "attribute", "part", "expanded", "sample", "statistics", "generator"]
)
def test_a_step_that_may_leave_a_trace_is_not_run(monkeypatch: pytest.MonkeyPatch, what: str):
    plans = measuring(monkeypatch, 1.0, 2.0)
    profile = recorded(Writing(what), batch())
    assert fitted(profile, TrainingStep(Writing(what), batch()), MUCH) is profile
    assert not plans
    assert fitted(recorded(Writing(""), batch()), TrainingStep(Writing(""), batch()), MUCH) is not profile
    assert plans


def test_gradients_that_are_there_are_not_added_to(monkeypatch: pytest.MonkeyPatch):
    plans = measuring(monkeypatch, 1.0, 2.0)
    model = make()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    profile = recorded(model, batch())
    assert fitted(profile, TrainingStep(model, batch()), MUCH) is profile
    assert not plans


def test_one_of_several_processes_does_not_run_more_steps_than_the_others(monkeypatch: pytest.MonkeyPatch):
    plans = measuring(monkeypatch, 1.0, 2.0)
    profile = recorded(make(), batch())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert fitted(profile, TrainingStep(make(), batch()), MUCH) is profile
    assert not plans


def test_gradients_of_others_are_theirs(monkeypatch: pytest.MonkeyPatch):
    """A loss with weights of its own: these would keep the gradients of the steps that are timed."""
    plans = measuring(monkeypatch, 1.0, 2.0)
    monkeypatch.setattr(
        planner,
        "recorded_step",
        lambda *a: (recorded(a[0].model, a[0].sample, a[0].loss), recorded_step(*a)[1]),
    )
    critic = nn.Linear(16, 1)
    autoac.profile(make(), batch(), loss=lambda y: critic(y).mean())
    assert critic.weight.grad is None
    assert not plans
    autoac.profile(make(), batch(), loss=lambda y: y.square().mean())
    assert plans


class Counting(nn.Module):
    """With statistics, a buffer that a graph holds, and weights that forward exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = make(), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.ones(16))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.layers.head.bias.data = self.layers.head.bias.data * 0.9
        return self.norm(self.layers(x)) * self.scale


@pytest.mark.parametrize("what", ["_measured", "_measured_forward"])
def test_the_step_is_measured_without_a_trace(monkeypatch: pytest.MonkeyPatch, what: str):
    torch.manual_seed(3)
    measured = watched(monkeypatch, what)
    model, x = Counting(), batch().requires_grad_()
    profile = recorded(model, x)
    if what == "_measured_forward":
        profile = light(profile)
    held = model(x).sum()
    x.grad = None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls, state = model.calls, torch.get_rng_state()
    found = fitted(profile, TrainingStep(model, x), MUCH)
    assert len(measured) == 1
    assert not found.notes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    assert model.calls == calls
    assert torch.equal(torch.get_rng_state(), state)
    held.backward()  # autograd would say so if the buffer had been written
    model.zero_grad()
    autoac.solve(found, MUCH).apply(model)  # no plan is on it


@pytest.mark.filterwarnings("error")
def test_a_model_that_goes_one_way_or_the_other_keeps_the_times_of_its_ops():
    """The recorded step's single draws were forced; whole steps that go the other way are not compared with it."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x.tanh())
            return x.exp().tanh() if torch.rand([]) < 0.5 else x.sigmoid().sin()

    torch.manual_seed(0)
    model = nn.Sequential(*(Either() for _ in range(4)))
    profile = recorded(model, batch())
    found = fitted(profile, TrainingStep(model, batch()), MUCH)
    assert "its steps run other ops than the recorded one did" in found.notes[-1]
    assert [op.time_s for op in found.tape] == [op.time_s for op in profile.tape]


@pytest.mark.filterwarnings("error")
def test_steps_that_differ_and_steps_that_fail_are_noted():
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x.tanh())
            return x.sigmoid() if recording else x.sin()

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.mean() * next(factors)

    recording, factors = True, iter([0.1] * 6)
    model = nn.Sequential(*(Changing() for _ in range(4)))
    profile = recorded(model, batch())
    recording = False
    [note] = fitted(profile, TrainingStep(model, batch()), MUCH).notes
    assert note.startswith("the step could not be timed as a whole")
    assert "other ops" in note
    [note] = fitted(light(profile), TrainingStep(model, batch()), MUCH).notes
    assert note.startswith("what the engine's bookkeeping takes could not be measured")
    assert "other ops" in note
    profile = recorded(make(), batch(), loss)
    found = fitted(profile, TrainingStep(make(), batch(), loss), MUCH)
    assert "StopIteration" in found.notes[-1]
    assert replace(found, notes=()) == profile


class Fickle(nn.Module):
    """Writes, once it has been profiled, to what its blocks were given: without a plan nobody minds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(16, 16)) for _ in range(3))
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            z = x + 1
            x = block(z)
            if self.writes:
                z.mul_(0.5)
        return x


def test_a_step_that_fails_under_a_plan_is_noted():
    model = Fickle()
    profile = recorded(model, batch())
    model.writes = True
    found = fitted(profile, TrainingStep(model, batch()), MUCH)
    assert "the step could not be timed as a whole" in found.notes[-1]
    assert "modified by an in-place operation" in found.notes[-1]
    assert replace(found, notes=profile.notes) == profile


def test_all_that_can_be_recomputed_together():
    def group(**rules: Any) -> DecisionGroup:
        return save_or_recompute(region=0, time_s=1.0, **rules)

    groups = [
        group(must_save="fixed"),
        group(requires=(0,)),
        group(),
        group(same_as=1),
        group(requires=(2,)),
        group(same_as=2),
    ]
    assert fitting._all_that_can_be(groups) == (False, False, True, False, True, True)
    assert fitting._all_that_can_be([group(same_as=1), group(must_save="fixed")]) == (False, False)
    assert fitting._all_that_can_be([group(must_save="fixed"), group(same_as=0)]) == (False, False)
