"""From a profile to a plan: budgets, the curve, errors, determinism."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoac
from autoac_solver.records.profile import Profile
from tests.fuzz.check import with_given_times
from tests.small_models import batch, make

ENGINES = ["replay", "sac"]
PROFILES = Path(__file__).resolve().parents[2] / "profiles"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Net(nn.Module):
    def __init__(self, blocks: int = 5, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sample() -> torch.Tensor:
    return torch.randn(64, 8, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    return autoac.profile(Net(), sample())


def least(profile: Profile, engine: str) -> int:
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, 1, engine=engine)
    return caught.value.minimum_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_the_least_feasible_budget_is_exact_to_the_byte(profile: Profile, engine: str) -> None:
    minimum = least(profile, engine)
    assert autoac.solve(profile, minimum, engine=engine).predicted_peak_bytes == minimum
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, minimum - 1, engine=engine)
    assert caught.value.minimum_bytes == minimum
    assert caught.value.proven


def test_an_infeasible_budget_says_what_holds_the_peak_and_what_would_lower_it(profile: Profile) -> None:
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, "100KB")
    error = caught.value
    assert error.budget_bytes == 100_000
    assert sum(size for _, _, size in error.holders) <= error.minimum_bytes
    assert {kind for kind, _, _ in error.holders} >= {"Parameter", "Activation"}
    text = str(error)
    assert f"Ask for budget={error.minimum_bytes}" in text
    assert "The peak of that plan lies at" in text
    assert "a smaller batch" in text


@pytest.mark.parametrize("engine", ENGINES)
def test_the_curve_is_monotone_and_within_budget(profile: Profile, engine: str) -> None:
    curve = autoac.tradeoff(profile, points=9, engine=engine)
    frame = curve.frame
    assert frame["budget_bytes"].iloc[0] == least(profile, engine)
    assert frame["overhead"].is_monotonic_decreasing
    assert frame["overhead"].iloc[-1] == 0
    assert all(frame["peak_bytes"] <= frame["budget_bytes"])
    assert all(frame["bound"] <= frame["overhead"] + 1e-12)
    assert len(curve.plans) == len(frame)
    assert len(str(curve).splitlines()) == 10


def test_given_budgets_and_those_that_no_plan_meets(profile: Profile) -> None:
    minimum = least(profile, "replay")
    curve = autoac.tradeoff(profile, budgets=[2 * minimum, minimum, minimum - 1])
    assert list(curve.frame["budget_bytes"]) == [minimum, 2 * minimum]
    with pytest.raises(autoac.InfeasibleBudgetError):
        autoac.tradeoff(profile, budgets=[minimum - 1])


@pytest.mark.parametrize("share", [1.02, 1.1])
def test_many_small_steps_over_time_have_a_plan_in_time(share: float) -> None:
    """What the relaxation recomputes is too little in every rounding; the way to the least peak has a plan."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(8, 8, 2, batch_first=True)

        def forward(self, sequence: torch.Tensor) -> torch.Tensor:
            return self.cells(sequence)[0].sum()

    recorded = with_given_times(autoac.profile(Summed(), torch.randn(4, 40, 8)))
    profile = replace(recorded, parts=())
    budget = int(share * least(profile, "replay"))
    plan = autoac.solve(profile, budget, time_limit_s=4)
    assert plan.predicted_peak_bytes <= budget


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_profile_gives_the_same_plan(profile: Profile, engine: str) -> None:
    budget = int(1.3 * least(profile, engine))
    first, second = (autoac.solve(profile, budget, engine=engine) for _ in range(2))
    assert first.regions == second.regions
    assert first.predicted_peak_bytes == second.predicted_peak_bytes
    assert first.decisions.equals(second.decisions)


def test_replay_is_never_predicted_slower_than_sac_at_the_same_budget(profile: Profile) -> None:
    profile = dataclasses.replace(profile, costs={})  # measured ones depend on who else uses the machine
    budget = int(1.2 * least(profile, "sac"))
    replay = autoac.solve(profile, budget, engine="replay")
    sac = autoac.solve(profile, budget, engine="sac")
    assert replay.predicted_overhead < sac.predicted_overhead


def test_headroom_is_left_free(profile: Profile) -> None:
    minimum = least(profile, "replay")
    plan = autoac.solve(profile, minimum + 50_000, headroom=50_000)
    assert plan.predicted_peak_bytes == minimum
    assert plan.budget_bytes == minimum + 50_000
    assert "headroom" in plan.explain()
    with pytest.raises(ValueError, match="leaves nothing"):
        autoac.solve(profile, minimum, headroom=minimum)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_least_feasible_budget_includes_the_headroom(profile: Profile, engine: str) -> None:
    minimum = least(profile, engine) + 50_000
    plan = autoac.solve(profile, minimum, engine=engine, headroom=50_000)
    assert plan.predicted_peak_bytes == minimum - 50_000
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, minimum - 1, engine=engine, headroom=50_000)
    error = caught.value
    assert (error.budget_bytes, error.minimum_bytes, error.headroom_bytes) == (minimum - 1, minimum, 50_000)
    text = str(error)
    assert f"a budget of {minimum - 1} bytes" in text
    assert "with 50000 bytes (50 KB = 48.83 KiB) of headroom" in text
    assert f"the least possible peak is {minimum - 50_000} bytes" in text
    assert f"Ask for budget={minimum} or more" in text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["gpt-8-blocks", "unet-3-levels"])
def test_a_larger_budget_asked_for_by_itself_has_no_slower_plan(name: str, engine: str) -> None:
    recorded = Profile.load(PROFILES / f"{name}-cpu.json")
    low, high = least(recorded, engine), autoac.solve(recorded, "1TB", engine=engine).predicted_peak_bytes
    plans = [
        autoac.solve(recorded, low + (high - low) * part // 10, engine=engine, gap=1e-3)
        for part in range(0, 11, 2)
    ]
    overheads = [plan.predicted_overhead for plan in plans]
    for smaller, larger in itertools.pairwise(overheads):
        assert larger <= smaller + 1e-3
    assert overheads[0] > overheads[-1] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_another_process_makes_the_same_plan(engine: str) -> None:
    """Whatever order its sets have."""
    code = f"""
from autoac_solver.plan.planning import plan_profile
from autoac_solver.records.profile import Profile
profile = Profile.load({str(PROFILES / "unet-3-levels-cpu.json")!r})
peak = plan_profile(profile, 10**12).predicted_peak_bytes
record = plan_profile(profile, int(0.7 * peak), engine={engine!r})
print([(region.fqn, region.wrapped, region.steps) for region in record.regions], record.predicted_peak_bytes)
"""
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(PROFILES.parent / "solver"), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert "True" in found[0]


def test_an_ample_budget_leaves_everything_untouched(profile: Profile) -> None:
    plan = autoac.solve(profile, "1TB")
    model = Net()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    plan.apply(model)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert plan.predicted_overhead == 0


def test_named_regions(profile: Profile) -> None:
    budget = int(1.1 * least(profile, "replay"))
    plan = autoac.solve(profile, budget * 2, regions=["blocks.0", "blocks.1"])
    assert [region.fqn for region in plan.regions] == ["blocks.0", "blocks.1"]
    with pytest.raises(autoac.AutoacError, match=r"'blocks\.9' matches no module"):
        autoac.solve(profile, budget, regions="blocks.9")


def test_a_model_without_anything_to_recompute_fits_or_does_not() -> None:
    model = nn.Linear(4, 4)
    recorded = autoac.profile(model, torch.randn(2, 4))
    plan = autoac.solve(recorded, "1MB")
    assert plan.predicted_overhead == 0
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(recorded, plan.predicted_peak_bytes - 1)
    assert caught.value.minimum_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"budget": "20G"}, "20G"),
        ({"budget": -1}, "-1"),
        ({"budget": "1GB", "engine": "magic"}, "'auto', 'replay', 'sac'"),
    ],
)
def test_bad_arguments(profile: Profile, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        autoac.solve(profile, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_profiles_can_be_planned_from(path: Path) -> None:
    recorded = Profile.load(path)
    ample = autoac.solve(recorded, "1TB")
    less = 6 * ample.predicted_peak_bytes // 10
    plan = autoac.solve(recorded, less, time_limit_s=10.0)
    assert 0 < plan.predicted_overhead < 0.5
    assert plan.predicted_peak_bytes <= less


def test_what_is_no_profile_is_refused_with_a_hint() -> None:
    solve: Any = functools.partial(autoac.solve, budget=10**9)
    tradeoff: Any = autoac.tradeoff
    for act in (solve, tradeoff):
        with pytest.raises(
            ValueError, match=r"profile is a .*, not a recorded step: autoac\.profile makes it"
        ):
            act(make())
        with pytest.raises(ValueError, match=r"profile is a str.*Profile\.load reads one"):
            act("profile.json")


def test_what_is_no_optimizer_is_refused_before_anything_runs() -> None:
    model = make()
    model.register_forward_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(autoac.ProfilingError, match="pass the optimizer object that trains the model"):
        autoac.profile(model, batch(), optimizer=torch.optim.Adam)  # pyright: ignore[reportArgumentType]


def test_a_model_in_eval_mode_is_noted() -> None:
    assert any("in eval mode" in note for note in autoac.profile(make().eval(), batch()).notes)
    assert not any("in eval mode" in note for note in autoac.profile(make(), batch()).notes)
