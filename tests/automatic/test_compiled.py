"""`autoac.auto` with engine compile: regions are compiled after two recorded steps, and the plan is kept true."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.automatic import compiling
from autoac_solver.records.compiled import CompiledPoint
from autoac_solver.records.profile import Profile

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

ROWS = 2048
STEPS = 7
PLANNED_AT = 2
"""Steps before the plan is there."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), *(Block() for _ in range(4)), nn.Linear(64, 10))


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(ROWS, 32, generator=generator), torch.randint(10, (ROWS,), generator=generator)


def train(model: nn.Module, after: Callable[[int], None] = lambda step: None, steps: int = STEPS) -> None:
    """Two micro-batches a step, under autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for half in (0, 1):
            x, y = batch(2 * step + half)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """The model after a loop without a plan."""
    model = make()
    train(model)
    return model


def assert_close(model: nn.Module, other: nn.Module) -> None:
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            found, expected, atol=2e-3, rtol=0
        )  # bf16: compiled code rounds less often


def assert_bare(model: nn.Module) -> None:
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__


@pytest.mark.slow
def test_a_loop_under_a_budget_with_compiled_regions(trained: nn.Module, tmp_path: Path) -> None:
    model, plans = make(), []
    handle = autoac.auto(model, "100MB", engine="compile", path=tmp_path / "plan.json")
    train(model, lambda step: plans.append(handle.plan))
    assert plans[:PLANNED_AT] == [None] * PLANNED_AT
    plan = plans[-1]
    assert plan is not None
    assert plan.engine == "compile"
    assert plan.record.profile.compiled is not None
    assert all(region.points for region in plan.record.profile.compiled.regions)
    assert handle.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    assert_close(model, trained)
    handle.remove()
    assert_bare(model)

    # Less, by what was measured: nothing but the plan is to be made.
    profile = plan.record.profile
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.solve(profile, 10_000, engine="compile")
    model = make()
    handle = autoac.auto(model, least.value.minimum_bytes * 102 // 100, engine="compile")
    train(model)
    assert handle.plan is not None
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= handle.plan.budget_bytes
    assert handle.plan.predicted_peak_bytes < plan.predicted_peak_bytes
    assert handle.measured_peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.01)
    assert_close(model, trained)

    # Another run takes the first plan up, and measures it as well.
    model = make()
    handle = autoac.auto(model, "100MB", engine="compile", path=tmp_path / "plan.json", verify=True)
    train(model, lambda step: plans.append(handle.plan), steps=3)
    assert plans[-3] is not None
    assert handle.report is not None
    assert handle.report.equal
    assert handle.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


@pytest.mark.slow
def test_a_plan_that_was_off_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the first plan is made from a table by which a step takes 2 MB less than it does."""
    with_caught_regions = compiling.with_caught_regions

    def too_little(*given: Any) -> Profile:
        profile = with_caught_regions(*given)
        assert profile.compiled is not None
        return replace(profile, compiled=replace(profile.compiled, unseen_bytes=-2_000_000))

    monkeypatch.setattr(compiling, "with_caught_regions", too_little)
    model, peaks, budget = make(), list[int | None](), 9_000_000
    handle = autoac.auto(model, budget, engine="compile")
    with caplog.at_level("INFO", "autoac"):
        train(model, lambda step: peaks.append(handle.measured_peak_bytes), steps=13)
    assert "planned again, from the measured peak," in caplog.text
    first = next(peak for peak in peaks if peak is not None)
    assert first > budget
    assert handle.plan is not None
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= budget
    assert handle.measured_peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.01)


@pytest.mark.slow
def test_where_corrections_go_astray_a_plan_that_was_measured_to_fit_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here a step within the budget is taken for one that takes 1.5 MB less than it did, so the next plan is over."""
    budget, fitting = 9_000_000, set[str]()

    def astray(plan: autoac.Plan, measured_bytes: int, with_optimizer: bool) -> autoac.Plan:
        known = corrected(plan, measured_bytes, with_optimizer)
        table = known.record.profile.compiled
        assert table is not None
        if measured_bytes > budget:
            return known
        fitting.add(plan.program_id)
        less = replace(table, unseen_bytes=table.unseen_bytes - 1_500_000)
        return known.on(replace(known.record.profile, compiled=less))

    corrected = compiling.corrected
    monkeypatch.setattr(compiling, "corrected", astray)
    model, peaks = make(), list[int | None]()
    handle = autoac.auto(model, budget, engine="compile")
    with caplog.at_level("INFO", "autoac"):
        train(model, lambda step: peaks.append(handle.measured_peak_bytes), steps=16)
    assert 1 < caplog.text.count("planned again, from the measured peak,") <= compiling._MOST_CORRECTIONS + 1
    assert max(peak for peak in peaks if peak is not None) > budget
    assert handle.plan is not None
    assert handle.plan.program_id in fitting
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize(("more_bytes", "budget"), [(600_000, 7_450_000), (0, 7_050_000)])
def test_a_budget_just_below_the_predicted_least_is_measured(
    monkeypatch: pytest.MonkeyPatch, more_bytes: int, budget: int
) -> None:
    """Here each point says that its backward takes more than it does, or it is right."""
    with_caught_regions, leasts = compiling.with_caught_regions, list[int]()

    def too_much(*given: Any) -> Profile:
        profile = with_caught_regions(*given)
        table = profile.compiled
        assert table is not None
        regions = tuple(
            replace(region, points=tuple(_with_more(point, more_bytes) for point in region.points))
            for region in table.regions
        )
        profile = replace(profile, compiled=replace(table, regions=regions))
        with pytest.raises(autoac.InfeasibleBudgetError) as error:
            autoac.solve(profile, budget, engine="compile")
        leasts.append(error.value.minimum_bytes)
        return profile

    monkeypatch.setattr(compiling, "with_caught_regions", too_much)
    model = make()
    handle = autoac.auto(model, budget, engine="compile")
    if not more_bytes:
        with pytest.raises(autoac.InfeasibleBudgetError, match="No plan fits a budget of 7050000 bytes"):
            train(model)
        assert handle.plan is None
        assert_bare(model)
        return
    train(model)
    assert budget < leasts[0] < 1.1 * budget
    assert handle.plan is not None
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= budget
    assert handle.measured_peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.01)


def _with_more(point: CompiledPoint, more_bytes: int) -> CompiledPoint:
    return replace(
        point,
        backward_bytes=point.backward_bytes + more_bytes,
        sole_backward_bytes=point.sole_backward_bytes + more_bytes,
    )


@pytest.mark.slow
def test_a_phase_that_comes_back_begins_with_its_plan(caplog: pytest.LogCaptureFixture) -> None:
    """Halves of the model are trained by turns, five steps each. The first plan does not count all of the state."""
    model, plans = make(), list[Any]()
    handle = autoac.auto(model, "100MB", engine="compile")

    def freeze(step: int) -> None:
        for index, block in enumerate(model.children()):
            block.requires_grad_((index < 3) is ((step // 5) % 2 == 0))

    def after(step: int) -> None:
        plans.append(handle.plan)
        freeze(step + 1)

    freeze(0)
    with caplog.at_level("INFO", "autoac"):
        train(model, after, steps=20)
    assert (
        caplog.text.count("other parameters are trained than in the recorded step: recording this step") == 2
    )
    assert caplog.text.count("other parameters are trained: put on the plan of") == 1
    assert all(plan is not None for plan in plans[10 + PLANNED_AT :])
    assert plans[15] is plans[9]
    assert handle.plan is not None
    assert handle.measured_plan is not None


class Masked(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if mask is None else x * mask)


class MaskingLater(nn.Sequential):
    """Makes masks for its blocks from some step on; it is called as before."""

    masks = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self[0](input)
        mask = (x > 0).to(x.dtype) if self.masks else None
        for index in range(1, len(self) - 1):
            x = self[index](x, mask)
        return self[-1](x)


@pytest.mark.slow
def test_blocks_that_are_given_more_tensors_later_are_planned_anew() -> None:
    torch.manual_seed(0)
    model = MaskingLater(nn.Linear(32, 64), *(Masked() for _ in range(4)), nn.Linear(64, 10))
    plans = []
    handle = autoac.auto(model, 9_000_000, engine="compile")

    def after(step: int) -> None:
        plans.append(handle.plan)
        model.masks = step >= 4

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # the compiler has warnings of its own
        train(model, after, steps=12)
    words = r"the plan is not followed: .* a call with .* came where one with"
    assert any(re.match(words, str(warning.message)) for warning in told)
    assert plans[4] is not None
    assert handle.plan is not None
    assert handle.plan is not plans[4]
    assert plans[-1] is plans[-2]


class Flagged(Block):
    more = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x) if self.more else x)


def test_another_path_in_blocks_under_the_same_inputs_is_planned_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It comes in the sixth step and goes in the twentieth, after which the plan is for the longer path still."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [Flagged() for _ in range(4)]
    model = nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = autoac.auto(model, "16MB", engine="compile")
    plans: list[Any] = []

    def step(index: int) -> None:
        for block in blocks:
            block.more = 5 <= index < 19
        model(batch(index)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(handle.plan)

    with caplog.at_level("INFO", "autoac"):
        for index in range(15):
            step(index)
    assert "a region was compiled anew for the same inputs" in caplog.text
    # The calls of the plan before are caught in the one step that is recorded.
    assert [plan is None for plan in plans[:9]] == [
        True,
        True,
        False,
        False,
        False,
        False,
        False,
        True,
        False,
    ]
    assert handle.measured_peak_bytes is not None
    assert plans[6].predicted_peak_bytes < handle.measured_peak_bytes <= 16_000_000
    assert handle.measured_peak_bytes == pytest.approx(plans[-1].predicted_peak_bytes, rel=0.01)
    for index in range(15, 24):
        step(index)
    assert plans[-1] is plans[14]


@pytest.mark.slow
def test_a_larger_batch_in_every_fourth_step_is_planned_for_once() -> None:
    torch._dynamo.reset()
    model, plans = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = autoac.auto(model, "100MB", engine="compile", on_larger="replan")
    for index in range(14):
        rows = ROWS + 64 * (index > PLANNED_AT and index % 4 == 0)
        model(torch.ones(rows, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(handle.plan)
    planned_rows = [plan and int(plan.record.profile.sample.split("[")[1].split(",")[0]) for plan in plans]
    assert planned_rows == [None] * PLANNED_AT + [ROWS] * 3 + [ROWS + 64] * 9


@pytest.mark.slow
def test_blocks_that_a_compiled_method_calls() -> None:
    """The compiler leaves our hooks on them out of the method's graphs."""
    torch._dynamo.reset()
    model, plain = make(), make()
    model.forward = torch.compile(model.forward, backend="eager")
    handle = autoac.auto(model, "100MB", engine="compile")
    train(model, steps=4)
    train(plain, steps=4)
    assert handle.plan is not None
    assert_close(model, plain)
    handle.remove()


class Broken(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class BreakingLater(Block):
    breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:region '3(#1)?' cannot be compiled for these inputs")
def test_a_block_that_fails_alone_among_alike_ones_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(32, 64), *(BreakingLater() for _ in range(4)), nn.Linear(64, 10))
    third = model[3]
    assert isinstance(third, BreakingLater)
    third.breaks = True
    handle = autoac.auto(model, "9MB", engine="compile")
    with caplog.at_level("INFO", "autoac"):
        train(model, steps=14)  # up to five plans, each measured in its second step
    assert "planned again" in caplog.text
    assert handle.plan is not None
    assert handle.measured_peak_bytes is not None
    assert all(region.point == "eager" for region in handle.plan.regions if region.fqn == "3")
    assert any(region.point != "eager" for region in handle.plan.regions)
    assert any(note.startswith("'3' is not compiled") for note in handle.plan.notes)
    assert handle.measured_peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.01)
    assert handle.measured_peak_bytes <= handle.plan.budget_bytes


def test_a_model_of_which_nothing_can_be_compiled_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 64), *(Broken() for _ in range(4)), nn.Linear(64, 10))
    autoac.auto(model, "100MB", engine="compile")
    with pytest.raises(autoac.ProfilingError, match=r"no region of the model can be compiled: .*graph_break"):
        train(model)
    assert_bare(model)
    train(model)


def test_a_loop_that_calls_other_modules_in_each_step_is_refused() -> None:
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(32, 64), nn.ModuleList(Block() for _ in range(6))
            self.last = nn.Linear(64, 10)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.first(x)
            for index, block in enumerate(self.blocks):
                if index == (self.calls - 1) // 2 % 6:
                    x = block(x)
            return self.last(x)

    model = Alternating()
    autoac.auto(model, "100MB", engine="compile", regions="blocks.*")
    with pytest.raises(autoac.ProfilingError, match=r"call other modules each time.* engine='compile'\)"):
        train(model, steps=9)
    assert_bare(model)
    train(model)


class Skipping(nn.Module):
    """Calls the blocks that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(32, 64), nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Linear(64, 10)
        self.called: Sequence[int] = range(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in self.called:
            x = self.blocks[index](x)
        return self.last(x)


def skips(model: Skipping, step: int) -> None:
    """Layer drop; one of the first steps calls all blocks, and the one after it a single block."""
    model.called = ((0, 1, 3), (0, 2, 3), range(5), (4,))[step] if step < 4 else range(5)


def calls_twice_later(model: Skipping, step: int) -> None:
    model.called = (*range(5), *range(5)) if step else range(5)


def unfreezes(model: Skipping, step: int) -> None:
    for block in (model.first, *model.blocks[:3]):
        block.requires_grad_(step > 1)


@pytest.mark.parametrize(("before", "calls"), [(skips, 5), (calls_twice_later, 10), (unfreezes, 5)])
def test_calls_that_come_later_are_compiled(before: Callable[[Skipping, int], None], calls: int) -> None:
    model = Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = autoac.auto(model, "16MB", engine="compile", regions="blocks.*")
    for step in range(7):
        before(model, step)
        model(batch(step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = handle.plan
    assert plan is not None
    table = plan.record.profile.compiled
    assert table is not None
    assert all(len(region.points) > 1 for region in table.regions)
    assert sum(len(region.calls) for region in table.regions) == calls
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_where_no_plan_fits_blocks_unfrozen_later_training_goes_on_with_the_least_peak() -> None:
    model, budget = Skipping(), 9_000_000
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = autoac.auto(model, budget, engine="compile", regions="blocks.*")

    def step(index: int) -> None:
        for block in (model.first, *model.blocks[:4]):
            block.requires_grad_(index > 3)
        model(batch(index)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for index in range(6):
        step(index)
    with pytest.warns(
        UserWarning, match="takes more than the budget under any plan. No plan fits a budget of 9000000"
    ):
        step(6)
    for index in range(7, 10):
        step(index)
    plan = handle.plan
    assert plan is not None
    assert plan.predicted_peak_bytes > budget
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        autoac.solve(plan.record.profile, 1000, engine="compile")
    assert plan.predicted_peak_bytes == pytest.approx(error.value.minimum_bytes, rel=0.01)
    assert handle.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def test_a_step_of_two_backwards_before_its_optimizer_steps() -> None:
    """As of SAM: the second one begins where the gradients of the first are cleared."""
    model, peaks = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = autoac.auto(model, "12MB", engine="compile")
    for step in range(7):
        model(batch(step)[0]).square().mean().backward()
        optimizer.zero_grad()
        model(batch(step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(handle.measured_peak_bytes)
    assert handle.plan is not None
    assert sum(not call.fqn for call in handle.plan.record.profile.calls) == 2
    assert peaks[-1] == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.01)


def test_a_step_that_is_not_as_recorded_and_takes_more_is_warned_of() -> None:
    model = make()
    handle = autoac.auto(model, "11MB", engine="compile")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(calls: int) -> None:
        outputs = [model(torch.ones(ROWS, 32)).square().mean() for _ in range(calls)]
        torch.stack(outputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(1)
    assert handle.plan is not None
    with pytest.warns(UserWarning, match="called 2 times"):
        step(2)  # the compiler may run in it
    with pytest.warns(UserWarning, match="a step under the plan took more than the budget"):
        step(2)


def test_only_steps_of_the_planned_sizes_correct_the_plan() -> None:
    """The larger of the recorded steps is planned for; the peak of a smaller one says nothing about the plan."""
    model, rows = make(), (64, 32, 64, 64, 32, 64, 64)
    handle = autoac.auto(model, "100MB", engine="compile")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    peaks: list[int | None] = []
    for count in rows:
        model(torch.ones(count, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(handle.measured_peak_bytes)
    assert handle.plan is not None
    assert handle.plan.record.profile.sample == "float32[64,32]"
    assert [peak is not None for peak in peaks] == [False] * 5 + [True] * 2
    assert peaks[-1] == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.01)


class MaskedLoss:
    """Steps whose loss leaves out rows; from the fifth one on, fewer."""

    def __init__(self, budget: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(make(), nn.Linear(10, 512))
        self.handle = autoac.auto(self.model, budget, engine="compile", measure=True, **options)

    def train(self, steps: int = 10) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        for step in range(steps):
            x, y = batch(step)
            kept = torch.arange(ROWS) < (ROWS // 2 if step < 5 else ROWS)
            F.cross_entropy(self.model(x)[kept], y[kept]).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_later_steps_are_measured_where_values_decide_on_sizes() -> None:
    """And where none fits, training goes on, at the least budget too."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(autoac.InfeasibleBudgetError) as least:
            MaskedLoss(1000).train()
        loop = MaskedLoss(least.value.minimum_bytes)
        loop.train()
    assert loop.handle.measured_peak_bytes is not None
    assert loop.handle.measured_peak_bytes > 1.05 * least.value.minimum_bytes
    assert sum("a step under the plan took more than the budget" in str(one.message) for one in told) == 1


def test_a_step_that_takes_more_is_planned_for_where_values_decide_on_sizes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ample = MaskedLoss(10**9)
        ample.train(5)
        assert ample.handle.plan is not None
        budget = ample.handle.plan.predicted_peak_bytes
        ample.handle.remove()
        loop = MaskedLoss(budget, on_larger="replan")
        loop.train(12)
    assert loop.handle.plan is not None
    assert loop.handle.measured_peak_bytes is not None
    assert loop.handle.measured_peak_bytes <= budget


def test_what_was_caught_in_a_step_that_failed_is_not_used() -> None:
    """It was larger than the recorded one."""
    model, rows = make(), (32, 64, 32, 32, 32)
    handle = autoac.auto(model, "100MB", engine="compile")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def fails(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no more")

    for count in rows:
        output = model(torch.ones(count, 32))
        if count == 64:
            output.register_hook(fails)
            with pytest.raises(torch.OutOfMemoryError):
                output.square().mean().backward()
        else:
            output.square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        del output
    assert handle.plan is not None
    table = handle.plan.record.profile.compiled
    assert table is not None
    assert [region.inputs for region in table.regions] == ["float32[32,64]"]


def test_nothing_is_left_on_the_model_where_a_recorded_step_ends() -> None:
    """Copies of the model are made there; and a forward may fail in the step in which calls are caught."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = autoac.auto(model, "100MB", engine="compile")
    for _ in range(2):
        model(torch.ones(64, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(module._forward_pre_hooks for module in model.modules())
    handle.remove()

    handle = autoac.auto(model, "100MB", engine="compile")
    model(torch.ones(64, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(64, 31))
    assert not any(module._forward_pre_hooks for module in model.modules())
    handle.remove()


def test_policies_are_refused() -> None:
    with pytest.raises(autoac.PolicyError, match="follows no policies"):
        autoac.auto(make(), "1GB", engine="compile", policies=[autoac.Policy("MUST_SAVE", op="aten.mm")])
