"""The trade-off curve without torch: bounds, knee, files, interruption."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from autoac_solver.plan.curve import Tradeoff, knee_of
from autoac_solver.plan.planning import plan_budgets, plan_profile
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.errors import InfeasibleBudgetError, ProfileError, ProfilingError
from autoac_solver.records.profile import Profile
from autoac_solver.show import notebook  # noqa: F401  (what makes records show themselves)
from tests.solver.profiles import two_blocks

PROFILES = Path(__file__).resolve().parents[3] / "profiles"
RECORDED = sorted(path for path in PROFILES.glob("*.json") if path.stat().st_size < 300_000)


@pytest.mark.parametrize(
    ("x", "y", "knee"),
    [
        # Scaled: x 0, 1/4, 1/2, 1 and y 1, 0.4, 0.2, 0. Below the line: 0, 0.35, 0.3, 0.
        ([0, 1, 2, 4], [10, 4, 2, 0], 1),
        # y 1, 0.9, 0.1, 0: -0.15, 0.4.
        ([100, 101, 102, 104], [10, 9, 1, 0], 2),
        ([0, 1, 2], [2, 1, 0], None),  # a straight line
        ([0, 1, 2], [2, 1.9, 0], None),  # above the line
        ([0, 1], [1, 0], None),
        ([0, 1, 2], [1, 1, 1], None),
        ([0, 1, 2, 3], [1, 0, 0, 0], 1),
        ([5, 5, 5], [1, 1, 0], None),
    ],
)
def test_the_knee_by_hand(x: list[float], y: list[float], knee: int | None) -> None:
    assert knee_of(np.array(x, dtype=float), np.array(y, dtype=float)) == knee


def test_the_curve_of_two_blocks_by_hand() -> None:
    """Both wide values recomputed, or the first, or none: 4 s, 2 s, 0 s of 15 s."""
    budgets = [1179, 1180, 1187, 1188, 1287, 1288, 2000]
    curve = plan_budgets(two_blocks(), budgets, regions=["blocks.0", "blocks.1"], gap=0)
    frame = curve.frame
    assert frame["budget_bytes"].tolist() == [1180, 1187, 1188, 1287, 1288, 2000]
    assert frame["extra_s"].tolist() == [4, 4, 2, 2, 0, 0]
    assert frame["peak_bytes"].tolist() == [1180, 1180, 1188, 1188, 1288, 1288]
    assert frame["bound"].tolist() == pytest.approx((frame["extra_s"] / 15).tolist())
    assert set(frame["status"]) == {"optimal"}
    assert frame["greedy_overhead"].tolist() == pytest.approx((frame["extra_s"] / 15).tolist())
    assert curve.notes == ("1.179 KB = 1.151 KiB: infeasible",)
    assert "infeasible" in repr(curve)
    assert curve.baselines["peak_bytes"].tolist() == [1288, 1180, 1188]


def test_plans_hold_for_larger_budgets_bounds_for_smaller_ones() -> None:
    lines = plan_budgets(two_blocks(), [1180, 1188, 1288], gap=0).plot().get_lines()
    styles = {line.get_label(): line.get_drawstyle() for line in lines}
    assert {name: styles[name] for name in ("plan", "greedy", "bound")} == {
        "plan": "steps-post",
        "greedy": "steps-post",
        "bound": "steps-pre",
    }


def test_finer_and_coarser_regions_are_tried_for_every_budget() -> None:
    """The whole model as one region can recompute the second block's input, 40 bytes for 1 s."""
    frame = plan_budgets(two_blocks(), [1180, 1188, 1287], gap=0).frame
    assert frame["extra_s"].tolist() == [4, 2, 1]
    assert frame["regions"].tolist() == [2, 2, 1]


def test_budgets_by_themselves_go_from_the_least_to_the_peak() -> None:
    curve = plan_budgets(two_blocks(), points=5)
    assert curve.frame["budget_bytes"].tolist() == [1180, 1207, 1234, 1261, 1288]
    assert curve.knee == 1
    assert [line.endswith("<- knee") for line in str(curve).splitlines()] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_recorded_curve(path: Path, engine: str) -> None:
    profile, gap = Profile.load(path), 1e-3
    points = 5 if engine == "replay" else 3  # sac's problems are harder
    limit_s = 10.0  # some of a GPU's problems stay open for long
    curve = plan_budgets(profile, points=points, engine=engine, gap=gap, time_limit_s=limit_s)
    frame = curve.frame
    assert len(frame) == points
    assert frame["extra_s"].is_monotonic_decreasing
    assert frame["bound"].is_monotonic_decreasing
    assert (frame["peak_bytes"] <= frame["budget_bytes"]).all()
    assert (frame["bound"] <= frame["overhead"]).all()
    optimal = frame[frame["status"] == "optimal"]
    assert (optimal["overhead"] - optimal["bound"] <= gap + 1e-9).all()
    assert frame["overhead"].iloc[-1] == 0
    # Greedy has the same regions, so the optimum is not worse by more than the gap.
    greedy = optimal.dropna(subset=["greedy_overhead"])
    assert (greedy["overhead"] <= greedy["greedy_overhead"] + gap + 1e-9).all()
    assert (
        frame["greedy_peak_bytes"].dropna() <= frame["budget_bytes"][frame["greedy_peak_bytes"].notna()]
    ).all()
    for row in (0, 2):
        plan = curve.plans[row]
        assert plan.predicted_peak_bytes == frame["peak_bytes"][row]
        assert plan.predicted_extra_s == frame["extra_s"][row]
        if frame["status"][row] != "optimal":
            continue
        alone = plan_profile(
            profile, int(frame["budget_bytes"][row]), engine=engine, gap=gap, time_limit_s=limit_s
        )
        assert alone.predicted_extra_s == pytest.approx(plan.predicted_extra_s, abs=2 * gap * profile.step_s)


def test_uneven_layers_are_where_greedy_is_beaten() -> None:
    curve = plan_budgets(Profile.load(PROFILES / "unet-3-levels-cpu.json"), points=12)
    frame = curve.frame.dropna(subset=["greedy_overhead"])
    assert (frame["greedy_overhead"] - frame["overhead"]).max() > 0.005
    by_hand = curve.baselines.set_index("name")
    full = by_hand.loc["every block"]
    ours = frame[frame["budget_bytes"] <= full["peak_bytes"]]
    assert ours["overhead"].min() < full["overhead"]


def test_files(tmp_path: Path) -> None:
    curve = plan_budgets(two_blocks(), points=5)
    curve.save(tmp_path / "curve.json")
    loaded = Tradeoff.load(tmp_path / "curve.json")
    assert loaded.frame.equals(curve.frame)
    assert loaded.baselines.equals(curve.baselines)
    assert str(loaded) == str(curve)
    assert loaded.knee == curve.knee
    for ours, theirs in zip(loaded.plans, curve.plans, strict=True):
        assert ours.regions == theirs.regions
        assert step_of(ours).decisions.equals(step_of(theirs).decisions)
    curve.frame.to_csv(tmp_path / "curve.csv")
    assert (tmp_path / "curve.csv").read_text().count("\n") == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("profile"),
        lambda data: data.update(engine="magic"),
        lambda data: data["points"][0]["solution"].update(decisions="01"),
        lambda data: data["points"][0]["solution"].update(decisions="0000"),
        lambda data: data["points"][0]["solution"].update(decisions="ab01"),
        lambda data: data["points"][0]["solution"].update(peak_bytes=5),
        lambda data: data["points"][0]["solution"].update(bound_s=1e9),
        lambda data: data["points"][0]["solution"].update(solver=3),
        lambda data: data["points"][0].update(budget_bytes=5),
        lambda data: data["points"][0].update(calls=[99]),
        lambda data: data["points"][0].update(surprise=1),
        lambda data: data["baselines"].update(name=[1, 2, 3]),
        lambda data: data["baselines"].pop("name"),
        lambda data: data.update(points=3),
        lambda data: data.update(notes=[1]),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage) -> None:
    path = tmp_path / "curve.json"
    plan_budgets(two_blocks(), points=5).save(path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=r"curve\.json"):
        Tradeoff.load(path)


def interrupt_at(text: str):
    def progress(what: str, done: float) -> None:
        assert 0 <= done <= 1
        if what.startswith(text):
            raise KeyboardInterrupt

    return progress


def test_what_is_done_before_ctrl_c_is_kept() -> None:
    whole = plan_budgets(two_blocks(), points=5)
    curve = plan_budgets(two_blocks(), points=5, progress=interrupt_at("budget 4"))
    assert curve.frame.equals(whole.frame.iloc[:3])
    assert curve.notes == ("interrupted after 3 of 5 budgets",)
    assert curve.baselines.equals(whole.baselines)
    with pytest.raises(KeyboardInterrupt):
        plan_budgets(two_blocks(), points=5, progress=interrupt_at("budget 1"))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        plan_budgets(two_blocks(), points=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_budgets(two_blocks(), budgets=[1100, 1179])
    assert caught.value.minimum_bytes == 1180


def test_notebooks_show_a_picture_and_tables_and_no_markup_of_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evil = "<script>alert('$x$')</script>"
    profile = dataclasses.replace(two_blocks(), model=evil, notes=(evil,))
    calls = [dataclasses.replace(call, class_name=evil) for call in profile.calls]
    profile = dataclasses.replace(profile, calls=tuple(calls))
    curve = plan_budgets(profile, points=5)
    for shown in (profile, curve, curve.plans[1]):
        html = shown._repr_html_()
        assert html is not None
        assert "<svg" in html
        assert "<table" in html
        assert "<script" not in html
        assert html == shown._repr_html_()  # nothing random, nothing of the day
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    html = curve._repr_html_()
    assert "<svg" not in html
    assert "<table" in html
    with pytest.raises(ImportError, match=r"pip install autoac\[plot\]"):
        curve.plot()


def test_regions_that_were_not_compiled_are_refused():
    profile = Profile.load(PROFILES / "gpt2-medium-compiled-h200.json")
    with pytest.raises(ProfilingError, match=r"'blocks.0.up' was not compiled .*these were: blocks.0, "):
        plan_profile(profile, "20GB", regions="blocks.*.up", engine="compile")
    few = plan_profile(profile, "20GB", regions=["blocks.0", "blocks.1"], engine="compile")
    assert [region.fqn for region in few.regions] == ["blocks.0", "blocks.1"]


def test_a_peak_in_the_optimizers_step_says_so_and_what_helps():
    profile = Profile.load(PROFILES / "gpt2-medium-h200.json")
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_profile(profile, "3GB", engine="replay")
    assert caught.value.where == "optimizer.step, after backward"
    assert any("fused=True, or foreach=False" in text for text in caught.value.suggestions)


def test_strategies_beside_compiled_regions_have_one_base():
    """Extra time of both is over the step compiled at its fastest points, not over the uncompiled one."""
    profile = Profile.load(PROFILES / "gpt2-medium-compiled-h200.json")
    curve = plan_budgets(profile, points=2, engine="compile", gap=0.05)
    table = curve.baselines.set_index("name")
    assert curve.step_s != profile.step_s
    assert table.loc["none", "extra_s"] == pytest.approx(profile.step_s - curve.step_s)
    assert table["overhead"].tolist() == pytest.approx((table["extra_s"] / curve.step_s).tolist())
