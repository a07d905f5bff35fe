"""The curve, batch sizes and measured memory with real models: plans apply, and predictions hold to the byte."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import autoac
from autoac.compare.strategies import checkpoint_module
from autoac.measure import measure_peak
from autoac.step.step import TrainingStep
from autoac_solver.plan.baselines import blocks_of, checkpointed
from autoac_solver.records.profile import Profile
from tests import real_models
from tests.small_models import WIDTH, assert_same, batch, least_bytes, make, step, tight_plan

ENGINES = ["replay", "sac"]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return autoac.profile(make(), batch())


@pytest.mark.parametrize("engine", ENGINES)
def test_plans_of_a_curve_apply_also_from_a_file(profile: Profile, engine: str, tmp_path: Path) -> None:
    curve = autoac.tradeoff(profile, points=4, engine=engine)
    curve.save(tmp_path / "curve.json")
    plan = autoac.Tradeoff.load(tmp_path / "curve.json").plans[0]
    assert plan.predicted_peak_bytes == least_bytes(profile, engine)
    expected = step(make())
    model = make()
    with plan.applied(model):
        assert_same(step(model), expected)


@pytest.mark.parametrize(("name", "every"), [("resnet", 1), ("t5", 1), ("cnn_with_skips", 2)])
def test_baselines_are_what_torchs_checkpoint_takes(name: str, every: int) -> None:
    """Every block, or every second one, under `torch.utils.checkpoint`: measured by the allocator."""
    torch.manual_seed(0)
    case = getattr(real_models, name)()
    model = case.model.train()
    run = TrainingStep(model, case.sample, case.loss).run
    recorded = autoac.profile(model, case.sample, loss=case.loss)
    calls = blocks_of(recorded)[::every]
    assert all(
        recorded.calls[call].call == 0 for call in calls
    )  # for a module is wrapped for all of its calls
    for call in calls:
        checkpoint_module(model.get_submodule(recorded.calls[call].fqn))
    run()
    model.zero_grad(set_to_none=True)
    measured = recorded.resident_bytes + measure_peak(run).peak_above_start_bytes
    assert checkpointed(recorded, calls).peak_bytes == pytest.approx(measured, rel=2e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_measured_memory_is_the_predicted_one_at_every_op(profile: Profile, engine: str) -> None:
    plan = tight_plan(profile, engine)
    model, before = make(), [p.detach().clone() for p in make().parameters()]
    measured = plan.measure_memory(model, batch())
    predicted = plan.memory_timeline()["live_bytes"].to_numpy()
    assert len(measured) == len(predicted)
    off = np.abs(measured.to_numpy() - predicted) / predicted
    # sac stashes random states between two ops, which the measurement counts to the first of them.
    assert (off < 1e-2).mean() >= {"replay": 1.0, "sac": 0.85}[engine]
    assert measured.max() == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_measured_step_that_is_another_one_is_refused(profile: Profile) -> None:
    plan = tight_plan(profile, "replay")
    with pytest.raises(autoac.ProfilingError, match="not the one that was profiled"):
        plan.measure_memory(
            make(),
            (batch(),),
            loss=lambda y: torch.stack([y.sin().cos().sin().mean() for _ in range(200)]).sum(),
        )
    tight_plan(profile, "sac").apply(model := make())
    with pytest.raises(autoac.PlanMismatchError, match="applied already"):
        plan.measure_memory(model, batch())


def test_pictures_of_memory(profile: Profile) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    plan = tight_plan(profile, "replay")
    axes = plan.plot_memory(measured=plan.memory_timeline()["live_bytes"])
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"Parameter", "Activation", "budget", "measured", "nothing recomputed"} <= set(labels)
    matplotlib.pyplot.close(axes.figure)
    assert "<svg" in plan._repr_html_()
    with pytest.raises(ValueError, match="one entry for each"):
        plan.plot_memory(measured=[1, 2, 3])


def test_which_batch_trains_fastest_is_one_call() -> None:
    def make_batch(size: int):
        return make(), torch.randn(size, WIDTH), lambda output: output.square().mean()

    found = autoac.batch_tradeoff(make_batch, ["70KB", "100KB"], [16, 4096])
    assert found.too_large == (4096,)
    assert found.largest_batch("100KB") == 16
    plan = found.plan("100KB")
    assert isinstance(plan, autoac.Plan)
    with plan.applied(make()):
        pass
    profiles = {size: curve.profile for size, curve in found.curves.items()}
    again = autoac.batch_tradeoff(profiles, ["70KB", "100KB"])
    assert again.frame.equals(found.frame)
    with pytest.raises(ValueError, match="are there already"):
        autoac.batch_tradeoff(profiles, "1MB", mode="real")


def test_the_optimizer_of_each_model_counts() -> None:
    def make_batch(size: int):
        return make(), torch.randn(size, WIDTH)

    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())

    plain, with_adam = (
        autoac.batch_tradeoff(make_batch, "10MB", [8], optimizer=optimizer) for optimizer in (None, adam)
    )
    assert with_adam.curves[8].resident_bytes > 2 * plain.curves[8].resident_bytes


def test_pictures_in_notebooks_take_the_colour_of_the_text(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that they can be read in a dark theme, too: no white ground, no black line."""
    pytest.importorskip("matplotlib")
    curve = autoac.tradeoff(profile, points=3)
    for html in (
        tight_plan(profile, "replay")._repr_html_(),
        curve._repr_html_(),
        profile._repr_html_() or "",
    ):
        picture = html[html.index("<svg") : html.index("</svg>")].lower()
        assert "currentcolor" in picture
        assert not re.search(r"#fff(fff)?\b|#000(000)?\b|#010203", picture)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'autoac[plot]'" in curve._repr_html_()


def test_a_plan_in_a_few_lines_as_a_page_and_in_a_cell(profile: Profile, tmp_path: Path) -> None:
    plan = tight_plan(profile, "replay")
    lines = plan.summary().splitlines()
    assert len(lines) <= 15
    assert lines[:4] == plan.explain().splitlines()[:4]
    assert set(profile.notes) <= set(plan.notes)
    curve = autoac.tradeoff(profile, points=3)
    plan.report(tmp_path / "plan.html", curve=curve)
    assert f"{plan.budget_bytes:,} bytes" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    curve.report(tmp_path / "curve.html", row=0)
    assert f"{curve[0].budget_bytes:,} bytes" in (tmp_path / "curve.html").read_text(encoding="utf-8")
    for page in (plan.show(curve), curve.show(), plan.show(points=0)):
        frame = page._repr_html_()
        assert frame.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
        assert frame.count("<") == 2  # the page is inside of an attribute


def test_a_summary_has_15_lines_whatever_there_is_to_say(profile: Profile) -> None:
    notes = tuple(f"note {i}" for i in range(9))
    policies = [
        autoac.Policy("PREFER_SAVE", op=op) for op in ("aten.relu", "aten.addmm", "aten.add", "aten.mul")
    ]
    noted = dataclasses.replace(profile, notes=notes, sample="x float32[64,16]")
    plan = autoac.solve(noted, "1GB", policies=policies)
    assert len(plan.summary().splitlines()) <= 14  # the command line adds one
    assert "more: explain(), or --details" in plan.summary()
    assert set(notes) <= set(plan.notes)
