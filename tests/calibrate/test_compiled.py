"""Engine compile, from the profile to the trained step. What is compiled here takes the compiler half a minute."""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.calibrate.compiled import measured, on_disk, table
from autoac.calibrate.compiled.capture import captured
from autoac.calibrate.compiled.tried import peak_with, tried
from autoac.compare.compiled import ALL, by_torch
from autoac.compare.run import AT_BUDGET, compare
from autoac.compare.table import render
from autoac.compare.workload import Workload
from autoac.device import CpuDevice
from autoac.execute.compiled import code
from autoac.execute.compiled.code import compiled
from autoac.execute.compiled.survey import Survey
from autoac.measure import measure_peak
from autoac.plans import Plan
from autoac.step.step import TrainingStep
from autoac.torch_private import graphs_translated
from autoac_solver.plan.recorded.programs import with_regions
from autoac_solver.records.compiled import EAGER, TORCHS, CompiledTable
from autoac_solver.records.profile import Profile
from tests.small_models import WIDTH, Block, Blocks, assert_same, attributes, batch, step

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo looks there, and hides the warning itself where warnings are no errors."""


class Stemmed(Blocks):
    """All blocks are alike: the first one's input needs a gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(self.stem(x), scale)


def make() -> Stemmed:
    """Always the same model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Stemmed()


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the compiler keeps what it compiles, empty at first."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path))
        patch.setattr(table, "MOST_COMPILED", 3)
        yield path


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    """Three equal blocks with dropout, compiled at three points; the model is as it was."""
    torch._dynamo.reset()
    compiled.cache_clear()  # what other tests have compiled in this process is in no folder
    model = make()
    before, random = attributes(model), torch.get_rng_state()
    found = autoac.profile(model, batch(), loss=loss, engine="compile")
    assert attributes(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    return found


def budgets(profile: Profile, points: int = 3) -> list[int]:
    return [int(b) for b in autoac.tradeoff(profile, points=points, engine="compile").frame["budget_bytes"]]


def planned(profile: Profile, budget: int, model: Stemmed | None = None) -> Plan:
    """A plan that was tried, as `autoac.plan` does it."""
    return tried(
        profile,
        TrainingStep(model or make(), batch(), loss),
        budget,
        lambda found: autoac.solve(found, budget, engine="compile"),
    )


def test_equal_blocks_are_compiled_once_for_each_point(profile: Profile):
    assert isinstance(profile.compiled, CompiledTable)
    [region] = profile.compiled.regions
    assert [profile.calls[call].fqn for call in region.calls] == ["blocks.0", "blocks.1", "blocks.2"]
    assert region.heavy == ("addmm", "addmm")
    # Random numbers drawn by uncompiled code would be others, so the block as it is written is no point.
    assert next(point.name for point in region.points) == TORCHS
    assert {point.name.partition(":")[0] for point in region.points[1:]} == {"save"}
    kept = [point.kept_bytes for point in region.points]
    assert len(set(kept)) == len(kept)
    smallest = min(region.points, key=lambda point: point.kept_bytes)
    hidden = 64 * 4 * 16 * 4
    assert smallest.kept_bytes < hidden < region.points[0].kept_bytes
    assert smallest.backward_bytes > region.points[0].backward_bytes


def test_regions_whose_inputs_need_no_gradient_are_others():
    model = Blocks()
    found = captured(TrainingStep(model, batch(), loss), {(f"blocks.{i}", 0): "block" for i in range(3)})
    assert [calls for _, calls in found] == [[("blocks.0", 0)], [("blocks.1", 0), ("blocks.2", 0)]]
    first, others = (region for region, _ in found)
    assert (first.module, others.module) == (model.blocks[0], model.blocks[1])
    assert not first.args[0].requires_grad
    assert others.args[0].requires_grad
    assert others.args[0].is_leaf
    assert others.kwargs == {"scale": 1.0}
    assert not others.arguments()[0][0].is_leaf
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert model.seen == 0
    with pytest.raises(
        autoac.ProfilingError, match="'head' was called in the recorded step and not in the next"
    ):
        captured(TrainingStep(model, batch(), loss), {("head", 1): ""})


def test_a_whole_step_that_is_caught_between_two_optimizer_steps_is_undone():
    model, x = Blocks(), batch()
    adam = torch.optim.Adam(model.parameters())

    def micro_step() -> None:
        loss(model(x)).backward()
        adam.step()

    def step() -> None:
        micro_step()
        micro_step()

    micro_step()
    before = copy.deepcopy((model.state_dict(), adam.state_dict(), [p.grad for p in model.parameters()]))
    kinds = {("blocks.0", 0): "first", ("blocks.0", 1): "second"}
    assert [calls for _, calls in captured(TrainingStep(model, step), kinds)] == [[call] for call in kinds]
    after = model.state_dict(), adam.state_dict(), [p.grad for p in model.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_budgets_are_met_as_predicted_and_gradients_are_those_of_any_budget(profile: Profile):
    """The whole step by the allocator's own account; masks are the same, or gradients would be far off."""
    peaks, gradients = [], []
    for budget in budgets(profile):
        plan = planned(profile, budget)
        model = make()
        report = plan.verify(model, batch(), loss)
        assert report.ok, str(report)
        assert report.tolerance == 1e-6
        assert report.measured_peak_bytes <= budget
        assert report.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
        peaks.append(report.measured_peak_bytes)
        with plan.applied(model):
            gradients.append(step(model))
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.9 * peaks[-1]
    for found in gradients[1:]:
        for a, b in zip(gradients[0], found, strict=True):
            assert torch.equal(a, b) if not a.is_floating_point() else (a - b).norm() <= 1e-6 * a.norm()


class ConvBlock(nn.Module):
    """Backward reads its own output. Compiled, it keeps its input in another layout, and not the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Convs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for block in self.blocks:
            x = x + block(x) if self.kind == "residual" else block(x)
            outputs.append(x)
        return outputs if self.kind == "outputs held" else outputs[-1:]


@pytest.mark.parametrize("kind", ["plain", "residual", "outputs held"])
def test_what_code_frees_on_the_way_is_predicted(folder: Path, kind: str):
    model, x = Convs(kind), torch.randn(8, 16, 32, 32)
    last = lambda outputs: outputs[-1].square().mean()  # noqa: E731
    profile = autoac.profile(model, x, loss=last, engine="compile")
    assert profile.compiled is not None
    assert any(not p.holds_inputs for region in profile.compiled.regions for p in region.points)
    for budget in budgets(profile):
        plan = autoac.solve(profile, budget, engine="compile")
        measured_bytes = plan.resident_bytes + peak_with(plan, TrainingStep(model, x, last))
        # Workspaces of convolutions that are not compiled differ a little between a step and the region alone.
        assert measured_bytes == pytest.approx(plan.predicted_peak_bytes, rel=5e-3)


def test_a_step_with_masks_of_another_plan_would_be_noticed(profile: Profile):
    """The comparison above can fail: other random numbers give gradients that are far off."""
    plan, model = planned(profile, budgets(profile)[0]), make()
    with plan.applied(model):
        first, other = step(model, seed=5)[1], step(model, seed=6)[1]
    assert (first - other).norm() > 1e-2 * first.norm()


def test_a_plan_is_corrected_by_what_a_step_takes(profile: Profile):
    assert profile.compiled is not None
    budget = budgets(profile)[1]
    for unseen in (-300_000, 5_000):
        wrong = dataclasses.replace(
            profile, compiled=dataclasses.replace(profile.compiled, unseen_bytes=unseen)
        )
        plan = planned(wrong, budget)
        measured = plan.resident_bytes + peak_with(plan, TrainingStep(make(), batch(), loss))
        assert measured <= budget
        assert measured == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def test_a_least_peak_that_is_predicted_too_high_is_measured(profile: Profile):
    assert profile.compiled is not None
    least = budgets(profile)[0]
    unseen = profile.compiled.unseen_bytes + least // 50
    pessimist = dataclasses.replace(
        profile, compiled=dataclasses.replace(profile.compiled, unseen_bytes=unseen)
    )
    with pytest.raises(autoac.InfeasibleBudgetError):
        autoac.solve(pessimist, least, engine="compile")
    plan = planned(pessimist, least)
    assert plan.predicted_peak_bytes <= least
    assert plan.verify(make(), batch(), loss).ok
    with pytest.raises(autoac.InfeasibleBudgetError) as measured:
        planned(pessimist, int(0.99 * plan.predicted_peak_bytes))
    assert measured.value.minimum_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)


def test_plan_apply_remove_save_and_load(profile: Profile, tmp_path: Path):
    """`autoac.plan` itself, on a model whose blocks were compiled before in this process."""
    model, budget = make(), budgets(profile)[0]
    plan = autoac.plan(model, batch(), budget, loss=loss, engine="compile")
    assert plan.engine == "compile"
    assert plan.predicted_peak_bytes <= budget
    assert all(region.wrapped for region in plan.regions)
    before = attributes(model)
    plan.apply(model)
    expected = step(model)
    plan.remove(model)
    assert attributes(model) == before
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.explain() == plan.explain()
    model = make()
    with loaded.applied(model):
        assert_same(step(model), expected)
        with torch.no_grad():  # as it is written
            model(batch())


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "in place"])
def test_it_is_what_a_compiled_model_gets(profile: Profile, wrapped: bool):
    model, budget = make(), budgets(profile)[0]
    compiled_model: Any = torch.compile(model) if wrapped else model
    if not wrapped:
        for block in model.blocks:
            block.compile()
    before = attributes(model)
    plan = autoac.plan(compiled_model, batch(), budget, loss=loss)
    assert plan.engine == "compile"
    assert "(auto: the model is compiled)" in plan.explain()
    report = plan.verify(compiled_model, batch(), loss)
    assert report.ok, str(report)
    plan.apply(compiled_model)
    compiled_model(batch())
    plan.remove(compiled_model)
    assert [[name for name, _ in found] for found in attributes(model)] == [
        [name for name, _ in found] for found in before
    ]
    policies = [autoac.Policy("MUST_SAVE", op="*")]
    other = autoac.plan(compiled_model, batch(), "1GB", loss=loss, policies=policies)
    assert other.engine == "sac"
    assert "(auto: the model is compiled, and engine compile is not for policies)" in other.explain()


@pytest.mark.parametrize("how", ["wrapped before", "wrapped after", "in a compiled function"])
@pytest.mark.parametrize("engine", ["replay", "compile"])
def test_an_outer_compile_keeps_to_the_plan(profile: Profile, engine: str, how: str):
    """It was traced with the model: no region had its point, nor a loss its own memory, and nobody said so."""
    model = make()
    outer: Any = torch.compile(model) if how == "wrapped before" else model
    if engine == "compile":
        plan = planned(profile, budgets(profile)[0], model)
    else:
        recorded = autoac.profile(outer, batch(), loss=loss)
        plan = autoac.solve(recorded, recorded.least_peak_bytes)
    plan.apply(outer)
    if how == "wrapped after":
        outer = torch.compile(model)
    if how == "in a compiled function":
        outer = torch.compile(lambda x: model(x))

    x = batch()

    def run() -> None:
        loss(outer(x)).backward()
        model.zero_grad()

    run()
    peak = measure_peak(run).peak_above_start_bytes + plan.record.profile.resident_bytes
    assert peak <= plan.predicted_peak_bytes <= plan.budget_bytes


def test_a_compiled_model_of_which_no_block_can_be_compiled(folder: Path):
    model = make()
    for i in range(3):
        model.blocks[i] = Breaking(0.1)
    compiled_model: Any = torch.compile(model)
    plan = autoac.plan(compiled_model, batch(), "1GB", loss=loss)
    assert plan.engine == "sac"
    assert "auto: nothing of the model can be compiled: " in plan.explain()
    compiled_model = torch.compile(make(), backend="aot_eager")
    plan = autoac.plan(compiled_model, batch(), "1GB", loss=loss)
    assert plan.engine == "sac"
    assert "engine compile is not for code of another compiler than inductor" in plan.explain()
    tuned: Any = torch.compile(make(), options={"max_autotune": True})
    plan = autoac.plan(tuned, batch(), "1GB", loss=loss)
    assert plan.engine == "sac"
    assert "engine compile is not for settings of your own" in plan.explain()


def test_an_asynchronous_devices_own_time_counts(monkeypatch: pytest.MonkeyPatch):
    """It is busy until the host has launched the kernels of a region, as it took to launch them the time before."""
    busy_s: list[float] = []

    class Asynchronous(CpuDevice):
        def keep_busy(self, seconds: float) -> None:
            busy_s.append(seconds)

        def timed(self, call: Any) -> Any:
            return call(), 0.25

    monkeypatch.setattr(measured, "device_for", Asynchronous)
    block = make().blocks[0]
    x = torch.ones(4, WIDTH, requires_grad=True)
    region = measured.Captured(block, (x,), {}, (), "")
    launches, lasted = measured._Launches(), []
    for _ in range(2):
        lasted.append((launches.forward_s, launches.backward_s))
        seconds = measured._forward_and_backward(region, code.run_module, torch.device("cpu"), launches)
        assert seconds == (0.25, 0.25)
    assert lasted[0] == (0, 0)
    assert min(lasted[1]) > 0
    assert busy_s == [2 * host_s for host_s in lasted[1]]


def test_blocks_with_dropout_whose_compiled_code_is_slower_are_replayed_at_all_budgets(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
):
    """Compiled at some budgets and not at others, they would draw other numbers."""

    def slower(*args: Any) -> Any:
        return tuple(
            dataclasses.replace(point, forward_s=1.0, backward_s=0.5 if point.name == EAGER else 1.0)
            for point in points_of(*args)
        )

    points_of = table.measured_points
    monkeypatch.setattr(table, "measured_points", slower)
    monkeypatch.setattr(on_disk.PointsOnDisk, "read", lambda self: None)
    monkeypatch.setattr(on_disk.PointsOnDisk, "write", lambda self, points: None)
    model = make()
    found = autoac.profile(model, batch(), loss=loss, engine="compile")
    assert isinstance(found.compiled, CompiledTable)
    [region] = found.compiled.regions
    assert [point.name for point in region.points] == [EAGER]
    assert region.failure == "its compiled code takes 1.33 x the time, at any budget"
    assert any(
        note.startswith("'blocks.0' and what is like it is not compiled, so engine replay runs it: its")
        for note in found.notes
    )
    loose = autoac.solve(found, 10**9, engine="compile")
    plan = planned(found, loose.predicted_peak_bytes - 1, model)
    assert {region.point for region in plan.regions} == {EAGER}
    assert any(region.wrapped for region in plan.regions)
    assert (
        f"not compiled    'blocks.0' and 2 more, which engine replay runs: {region.failure}" in plan.explain()
    )
    report = plan.verify(model, batch(), loss=loss)
    assert report.equal, report  # to the bit with the uncompiled model
    assert report.measured_peak_bytes == plan.predicted_peak_bytes
    assert any(
        strategy.compiled == ALL and "compiled" in str(strategy.install)
        for strategy in by_torch(found, (1.0,))
    )


def test_points_that_do_not_fit_on_the_device_are_left_out(profile: Profile, monkeypatch: pytest.MonkeyPatch):
    """Nor are the others kept on disk: another time more of them may fit."""
    fits = [TORCHS]

    def point(kind: Any, name: str, inputs: str, tail: bool) -> Any:
        def run(*call: Any) -> Any:
            if name not in fits:
                raise torch.OutOfMemoryError("too large")
            return compiled(kind, name, inputs, tail=tail)(*call)

        return run

    monkeypatch.setattr(measured, "compiled", point)
    monkeypatch.setattr(on_disk.PointsOnDisk, "read", lambda self: None)
    monkeypatch.setattr(on_disk.PointsOnDisk, "write", lambda self, points: pytest.fail("kept"))
    found = autoac.profile(make(), batch(), loss=loss, engine="compile")
    assert isinstance(found.compiled, CompiledTable)
    [region] = found.compiled.regions
    assert [point.name for point in region.points] == fits
    fits.clear()
    with pytest.raises(autoac.ProfilingError, match=r"no region of the model can be compiled: .*too large"):
        autoac.profile(make(), batch(), loss=loss, engine="compile")


def test_another_plan_never_gets_the_code_of_the_first(
    profile: Profile, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """One folder for all: compiled anew, all is found there, and each point keeps what it kept."""
    from torch._dynamo.utils import counters

    assert profile.compiled is not None
    regions = profile.compiled.regions
    torch._dynamo.reset()
    compiled.cache_clear()
    counters.clear()
    model = make()
    monkeypatch.setattr(on_disk.PointsOnDisk, "read", lambda self: None)
    anew = table.with_compiled_regions(profile, TrainingStep(model, batch(), loss))
    assert counters["aot_autograd"]["autograd_cache_hit"] == sum(len(region.points) for region in regions)
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1  # the survey, which compiles nothing
    assert anew.compiled is not None
    sizes = [
        [(p.name, p.kept_bytes, p.forward_bytes, p.backward_bytes) for found in some for p in found.points]
        for some in (regions, anew.compiled.regions)
    ]
    assert sizes[0] == sizes[1]


def test_points_are_kept_on_disk(profile: Profile, folder: Path):
    from torch._dynamo.utils import counters

    files = sorted((folder / "autoac").iterdir())
    counters.clear()
    first, again = (
        table.with_compiled_regions(profile, TrainingStep(make(), batch(), loss)).compiled for _ in range(2)
    )
    assert first is not None
    assert again is not None
    assert again.regions == first.regions  # times as well
    assert (
        counters["aot_autograd"]["autograd_cache_hit"] == 0
    )  # nothing was compiled, nor taken from the compiler
    smaller = table.with_compiled_regions(profile, TrainingStep(make(), batch()[:32], loss)).compiled
    assert smaller is not None
    assert smaller.regions[0].points[0].kept_bytes < first.regions[0].points[0].kept_bytes
    assert len(list((folder / "autoac").iterdir())) > len(files)


def test_a_damaged_file_of_points_counts_as_none(
    profile: Profile, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    assert profile.compiled is not None
    points, cpu = profile.compiled.regions[0].points, torch.device("cpu")
    before = set((folder / "autoac").iterdir())
    kept = on_disk.PointsOnDisk(Survey((), (), True, "graph"), "float32[2]", cpu)
    assert kept.read() is None
    kept.write(points)
    assert kept.read() == points
    for graph, named, inputs in (
        ("other", (), "float32[2]"),
        ("graph", ("save:",), "float32[2]"),
        ("graph", (), "float32[3]"),
    ):
        assert on_disk.PointsOnDisk(Survey((), named, True, graph), inputs, cpu).read() is None
    with monkeypatch.context() as patch:
        patch.setattr(on_disk, "kernel_flags", lambda: ("others",))
        assert on_disk.PointsOnDisk(Survey((), (), True, "graph"), "float32[2]", cpu).read() is None
    (file,) = set((folder / "autoac").iterdir()) - before
    file.write_text(file.read_text().replace('"kept_bytes": [', '"kept_bytes": [-1, '))
    assert kept.read() is None
    assert "measured anew" in caplog.text
    file.unlink()
    file.mkdir()
    kept.write(points)
    assert "measured points are not kept" in caplog.text


class Breaking(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = super().forward(x, scale)
        torch._dynamo.graph_break()
        return x


def test_a_region_that_cannot_be_compiled_is_replayed_in_the_same_plan(profile: Profile):
    """Its values are recomputed one by one, masks and all, between regions that are compiled."""
    model = make()
    model.blocks[1] = Breaking(0.1)
    recorded = autoac.profile(model, batch(), loss=loss, engine="compile")
    assert recorded.compiled is not None
    failed = [region for region in recorded.compiled.regions if region.failure]
    assert [recorded.calls[call].fqn for region in failed for call in region.calls] == ["blocks.1"]
    assert "graph_break" in failed[0].failure
    assert sum("'blocks.1'" in note and "engine replay runs" in note for note in recorded.notes) == 1
    gradients, plans = [], [planned(recorded, budget, model) for budget in budgets(recorded, 2)]
    for plan in plans:
        assert [(r.fqn, r.point != "eager") for r in plan.regions] == [
            ("blocks.0", True),
            ("blocks.1", False),
            ("blocks.2", True),
        ]
        report = plan.verify(model, batch(), loss)
        assert report.ok, str(report)
        assert report.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
        fresh = copy.deepcopy(model)  # buffers change with each step
        with plan.applied(fresh):
            gradients.append((plan.regions[1].wrapped, step(fresh)))
    assert [wrapped for wrapped, _ in gradients] == [True, False]
    for a, b in zip(*(found for _, found in gradients), strict=True):
        assert torch.equal(a, b) if not a.is_floating_point() else (a - b).norm() <= 1e-6 * a.norm()
    assert "not compiled    'blocks.1', which engine replay runs" in plans[0].explain()


class BreakingLater(Block):
    """The graph does not show whether it breaks: blocks that do not break are alike."""

    breaks = False

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return super().forward(x, scale)


def with_a_break() -> Stemmed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Stemmed()
        for i in range(3):
            model.blocks[i] = BreakingLater(0.1)
    last = model.blocks[2]
    assert isinstance(last, BreakingLater)
    last.breaks = True
    return model


@pytest.mark.filterwarnings("error::UserWarning")
def test_one_of_several_alike_blocks_that_fails_alone_is_replayed(profile: Profile):
    """What is alike is compiled once; that the compiler fails on one of them shows when the plan is tried."""
    model = with_a_break()
    recorded = autoac.profile(model, batch(), loss=loss, engine="compile")
    assert recorded.compiled is not None
    assert [len(region.calls) for region in recorded.compiled.regions] == [3]
    least = budgets(recorded)[0]
    plan = planned(recorded, int(1.1 * least), model)
    assert [r.point != "eager" for r in plan.regions] == [True, True, False]
    assert "not compiled    'blocks.2', which engine replay runs" in plan.explain()
    assert sum(note.startswith("'blocks.2' is not") and "graph_break" in note for note in plan.notes) == 1
    report = plan.verify(model, batch(), loss)
    assert report.ok, str(report)
    plan.apply(model)
    step(model)


class Collecting(Stemmed):
    """Adds a hook in forward, as transformers does to collect router logits."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        norm = self.blocks[1].norm
        if not norm._forward_hooks:
            norm.register_forward_hook(lambda module, args, output: None)
        return super().forward(x, scale)


def test_hooks_that_forward_adds_are_noticed():
    model = Collecting()
    found = captured(TrainingStep(model, batch(), loss), {(f"blocks.{i}", 0): "block" for i in range(3)})
    assert [(region.hooked, calls) for region, calls in found] == [
        ("", [("blocks.0", 0), ("blocks.2", 0)]),
        ("norm", [("blocks.1", 0)]),
    ]
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_inside_of_a_region_are_run(profile: Profile):
    """Dynamo does not look for hooks that come later, and transformers collects outputs by them."""
    model, seen = make(), []
    model.blocks[1].norm.register_forward_hook(lambda *_: seen.append(1))
    recorded = autoac.profile(model, batch(), loss=loss, engine="compile")
    plan = autoac.solve(recorded, budgets(recorded, 2)[0], engine="compile")
    assert [r.fqn for r in plan.regions if r.point == "eager"] == ["blocks.1"]
    assert any("'norm' in it has hooks" in note for note in recorded.notes)
    seen.clear()
    with plan.applied(model):
        step(model)
        assert seen == [1]
        model.blocks[2].norm.register_forward_hook(lambda *_: seen.append(2))
        with pytest.warns(
            UserWarning, match=r"region 'blocks\.2' has hooks on module 'norm' since it was planned"
        ):
            step(model)
    assert seen == [1, 1, 2]


def test_where_nothing_can_be_compiled_it_says_so(folder: Path):
    model = make()
    for i in range(3):
        model.blocks[i] = Breaking(0.1)
    with pytest.raises(autoac.ProfilingError, match=r"no region of the model can be compiled.*graph_break"):
        autoac.plan(model, batch(), "1GB", loss=loss, engine="compile")
    model = make()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    with pytest.raises(autoac.ProfilingError, match=r"compile the module with module\.compile\(\) or not"):
        autoac.plan(model, batch(), "1GB", loss=loss, engine="compile")
    with pytest.raises(autoac.ProfilingError, match="no block that holds a twentieth"):
        table.with_compiled_regions(
            autoac.profile(nn.Linear(4, 4), torch.ones(2, 4)),
            TrainingStep(nn.Linear(4, 4), torch.ones(2, 4)),
            [],
        )


class Changing(Block):
    """Something in it changes from call to call."""

    def __init__(self, what: str) -> None:
        super().__init__(dropout=0.0)
        self.what, self.calls, self.log = what, 0, list[int]()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.what == "counter":
            self.calls += 1
        elif self.what == "list":
            self.log.append(0)
            scale = scale / len(self.log)
        return super().forward(x, scale)


def test_a_number_that_changes_from_call_to_call_becomes_an_input(folder: Path):
    torch._dynamo.reset()
    compiled.cache_clear()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Changing("counter") for _ in range(3)))
    found = autoac.profile(model, batch(), loss=loss, engine="compile", regions=["1", "2", "3"])
    assert found.compiled is not None
    [region] = found.compiled.regions
    assert region.failure == ""
    run = compiled(Changing, next(p.name for p in region.points if p.name != EAGER), region.inputs)
    translated = []
    for _ in range(8):
        run(model[1], (batch().requires_grad_(),), {})
        translated.append(graphs_translated())
    assert translated[-1] == translated[3]


def test_a_region_that_is_compiled_anew_at_every_call_is_left_to_replay(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Found where it is measured, or, where it begins to do so later, when it runs."""
    torch._dynamo.reset()
    compiled.cache_clear()
    blocks = [Changing("counter") for _ in range(3)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    wanted: Any = {"loss": loss, "engine": "compile", "regions": ["1", "2", "3"]}
    plan = autoac.solve(autoac.profile(model, batch(), **wanted), 10**9, engine="compile")
    compiled_block = replace(plan.regions[0], wrapped=True, point="save:")
    plan = Plan(with_regions(plan.record, (compiled_block, *plan.regions[1:])))

    def steps() -> None:
        for _ in range(10):
            loss(model(batch())).backward()

    for block in blocks:
        block.what = "list"
    with plan.applied(model):
        with pytest.warns(UserWarning, match="runs uncompiled from now on, as torch would compile it anew"):
            steps()
        assert plan.placement.not_compiled == {"1": "torch compiles it anew at every step"}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(autoac.ProfilingError, match="torch compiles it anew at every call"):
        autoac.profile(model, batch(), **wanted)


class Coded(Block):
    """Keeps an average of its inputs in a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.code = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            self.code.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.code, scale)


@pytest.mark.parametrize("steps_in_backward", [False, True])
def test_parameters_that_a_step_writes_are_put_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_in_backward: bool
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # so that the points are measured
    torch._dynamo.reset()
    compiled.cache_clear()
    model = nn.Sequential(nn.Embedding(50, WIDTH, max_norm=0.5), *(Coded() for _ in range(3)))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}
    for parameter in optimizers if steps_in_backward else ():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = [p.clone() for p in model.parameters()]
    tokens = torch.arange(50).repeat(2)
    plan = autoac.plan(model, tokens, 10**9, loss=loss, engine="compile", regions=["1", "2", "3"])
    assert plan.record.profile.compiled is not None
    assert all(map(torch.equal, before, model.parameters()))
    loss(model(tokens)).backward()
    assert not torch.equal(before[0], next(model.parameters()))


def test_more_kinds_of_arguments_than_torch_compiles_code_for(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    plan, model = planned(profile, budgets(profile)[0]), make()
    compiled.cache_clear()
    request.addfinalizer(compiled.cache_clear)
    monkeypatch.setattr(code, "RECOMPILATIONS", 1)
    with plan.applied(model), torch._dynamo.config.patch(recompile_limit=1):
        step(model)
        step(model, batch()[:7])
        with pytest.warns(UserWarning, match=r"region 'blocks\.\d' was called with more kinds of arguments"):
            gradients = step(model, batch()[:1])
    assert all(torch.isfinite(t).all() for t in gradients[:2])


def test_compared_with_torchs_own_budgets(profile: Profile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autoac.compare.compiled.FRACTIONS", (1.0, 0.0))
    budget, model = budgets(profile)[0], make()
    workload = Workload("blocks", "blocks", model, batch(), tuple(f"blocks.{i}" for i in range(3)), loss)
    result = compare(workload, [budget], engine="compile", rounds=1)
    rows = {row.name: row for row in result.rows}
    torchs, lowest = rows["torch.compile, budget 1"], rows["torch.compile, budget 0"]
    assert not torchs.error
    assert torchs.gradients_equal
    assert not lowest.gradients_equal  # torch draws masks anew, if this fails it has been mended
    assert rows["torch.compile, each block checkpointed"].peak_bytes < torchs.peak_bytes
    ours = rows[f"{AT_BUDGET}{budget}"]
    assert not ours.is_wrong
    assert ours.predicted_peak_bytes == pytest.approx(ours.peak_bytes, rel=0.01)
    assert all(not row.is_wrong for row in result.ours if not row.error)
    assert "gradients of compiled code" in str(list(render(result, {}, ()).renderables))


def test_smaller_batches_keep_to_the_budget_and_are_compiled_for_once(profile: Profile):
    """Code for another size is for all other sizes; the planned size keeps its own."""
    from torch._dynamo.utils import counters

    plan, model = planned(profile, budgets(profile)[0]), make()
    sizes, peaks, graphs = (64, 40, 24, 17, 64), [], []
    with plan.applied(model):
        for rows in sizes:
            step(model, batch()[:rows])
            model.zero_grad(set_to_none=True)
            graphs.append(counters["stats"]["unique_graphs"])
            found = measure_peak(lambda rows=rows: step(model, batch()[:rows])).peak_above_start_bytes
            peaks.append(plan.resident_bytes + found)
            model.zero_grad(set_to_none=True)
    assert len(set(graphs[1:])) == 1
    assert peaks[:4] == sorted(peaks[:4], reverse=True)
    assert peaks[4] == peaks[0] <= plan.budget_bytes


def test_several_samples(profile: Profile):
    """The largest is planned for; what is said of the others was measured, and holds in training."""
    budget, model = budgets(profile)[0], make()
    samples = autoac.Samples([batch()[:24].clone(), batch(), batch()[:40].clone()])
    plan = autoac.plan(model, samples, budget, loss=loss, engine="compile")
    assert plan.record.profile.sample == f"float32[64,{WIDTH}]"
    assert list(plan.samples["sample"]) == [f"float32[{rows},{WIDTH}]" for rows in (64, 40, 24)]
    assert plan.samples["fits"].all()
    assert plan.samples["overhead"].isna().tolist() == [False, True, True]
    assert any("of 3 samples that with the highest peak" in note for note in plan.record.profile.notes)
    with plan.applied(model):
        for rows, said in zip((64, 40, 24), plan.samples["peak_bytes"].tolist(), strict=True):
            resident = plan.resident_bytes - (64 - rows) * WIDTH * 4
            x = batch()[:rows].clone()
            found = measure_peak(lambda x=x: step(model, x)).peak_above_start_bytes
            model.zero_grad(set_to_none=True)
            assert resident + found == pytest.approx(said, rel=0.01)
            assert said <= budget


def test_infeasible(profile: Profile):
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, profile.resident_bytes + 1, engine="compile")
    least = caught.value.minimum_bytes
    assert caught.value.proven
    assert autoac.solve(profile, least, engine="compile").predicted_peak_bytes == least
    with pytest.raises(autoac.InfeasibleBudgetError):
        autoac.solve(profile, least - 1, engine="compile")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"granularity": "layers"}, "possible are 'blocks', 'whole'"),
        ({"granularity": "whole", "engine": "replay"}, "goes with engine='compile'"),
        ({"policies": [autoac.Policy("MUST_SAVE", op="aten.mm*")]}, "follows no policies"),
    ],
)
def test_what_cannot_be_asked_for(said: dict[str, Any], message: str):
    with pytest.raises((ValueError, autoac.PolicyError), match=message):
        autoac.plan(make(), batch(), "1GB", **{"engine": "compile", **said})


def test_what_does_not_go_with_compiled_regions(profile: Profile):
    plan, model = autoac.solve(profile, budgets(profile)[0], engine="compile"), make()
    with pytest.raises(ValueError, match=r"verify\(\) measures"):
        plan.measure_memory(model, batch(), loss)
    with pytest.raises(autoac.PlanMismatchError, match="engine 'compile'"):
        plan.policy_fn("blocks.0")


@pytest.mark.parametrize(
    ("said", "message"), [({"mode": "fake"}, "mode='fake'"), ({"device": "h200"}, "device=")]
)
def test_compiled_regions_are_measured_on_the_device_at_hand(said: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        autoac.profile(make(), batch(), engine="compile", **said)
