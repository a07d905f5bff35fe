"""A plan explained: the numbers add up, the words are the same each time, and come from the file alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autoac_solver.plan.planning import plan_profile
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.policies import Policy
from autoac_solver.records.profile import Profile
from autoac_solver.show.explanation import explain, explanation
from tests.solver.profiles import scaled, two_blocks

PROFILES = Path(__file__).resolve().parents[3] / "profiles"


@pytest.fixture(scope="module")
def gpt() -> PlanRecord:
    return plan_profile(Profile.load(PROFILES / "gpt-8-blocks-cpu.json"), "170MB")


def test_two_blocks_by_hand() -> None:
    """Within 1188 bytes the first block's wide value is recomputed: 2 s for 100 bytes. At 1280 it need not be."""
    record = plan_profile(two_blocks(), 1188, regions=["blocks.0", "blocks.1"], gap=0)
    found = explanation(record)
    assert found.peak.startswith("The peak lies at test.loss.default in forward. 1.088 KB")
    assert found.peak_by_kind[["kind", "bytes"]].values.tolist() == [["Parameter", 1000], ["Activation", 188]]
    assert found.peak_by_module.values.tolist() == [
        ["Parameter", "-", 1, 1000],
        ["Activation", "blocks.*.wide", 1, 100],
        ["Activation", "blocks.*", 2, 80],
        ["Activation", "outside of all submodules", 1, 8],
    ]
    columns = ["decision", "op", "module_class", "values", "bytes", "time_s"]
    assert found.values[columns].values.tolist() == [
        ["save", "test.wide.default", "Wide", 1, 100, 2.0],
        ["save", "test.narrow.default", "Block", 1, 40, 1.0],
        ["recompute", "test.wide.default", "Wide", 1, 100, 2.0],
        ["skip", "test.narrow.default", "Block", 1, 40, 1.0],
    ]
    # 2 s for 100 bytes are 20 ms a byte.
    assert found.values["ms_per_MB"].tolist() == pytest.approx([2e7, 2.5e7, 2e7, 2.5e7])
    assert found.costs[0] == (
        "The budget costs 2 s a step and saves 100 bytes of the peak: 333 min 20 s for each MB."
    )
    assert found.more_memory.startswith(
        "118 bytes more would buy 2 s a step: an overhead of 0.0% instead of 13.3%"
    )


def test_what_compiled_modules_keep_is_theirs() -> None:
    profile = Profile.load(PROFILES / "gpt2-medium-compiled-h200.json")
    record = plan_profile(profile, "7.6GB", engine="compile", gap=0.02)
    kept = step_of(record).decisions.query("decision == 'compiled'")["bytes"].sum()
    by_module = explanation(record).peak_by_module.set_index(["kind", "module"])["bytes"]
    assert by_module["Activation", "blocks.*"] >= kept > 3e9
    assert "24, of which 24 are compiled, and 0 are left untouched" in explain(record)


def test_more_memory_that_buys_nothing_is_not_priced() -> None:
    """Ten samples take 3880 bytes; a wide value of 1000 is recomputed until there is room for all of it."""
    profile, names = scaled(two_blocks(), 10), ["blocks.0", "blocks.1"]
    record = plan_profile(profile, 2880, regions=names, gap=0)
    assert explanation(record).more_memory == (
        "288 bytes more would buy next to nothing; with 1 KB = 0.9766 KiB more nothing has to be recomputed."
    )
    must = Policy("MUST_RECOMPUTE", module="blocks.0.wide")
    followed = plan_profile(profile, 2880, regions=names, policies=[must], gap=0)
    assert explanation(followed).more_memory == "288 bytes more would buy next to nothing."


def test_tables_add_up(gpt: PlanRecord) -> None:
    found = explanation(gpt)
    assert found.peak_by_kind["bytes"].sum() == gpt.predicted_peak_bytes
    assert found.peak_by_module["bytes"].sum() == gpt.predicted_peak_bytes
    assert found.values["values"].sum() == len(step_of(gpt).decisions)
    assert found.values["bytes"].sum() == step_of(gpt).decisions["bytes"].sum()
    recomputed = found.values[found.values["decision"] == "recompute"]
    again = step_of(gpt).decisions.query("decision == 'recompute'").drop_duplicates("group")
    assert recomputed["time_s"].sum() == pytest.approx(again["time_s"].sum())
    assert recomputed["time_s"].sum() <= gpt.predicted_extra_s


def test_what_more_memory_buys_is_what_a_plan_for_it_says(gpt: PlanRecord) -> None:
    assert gpt.profile is not None
    names = sorted({region.fqn for region in gpt.regions})
    more = plan_profile(gpt.profile, 187_000_000, regions=names)
    share = more.predicted_extra_s / more.predicted_step_s
    assert f"an overhead of {share:.1%} instead of" in explanation(gpt).more_memory


def test_the_words_are_the_same_each_time_and_from_a_file(gpt: PlanRecord, tmp_path: Path) -> None:
    text = explain(gpt)
    assert explain(gpt) == text
    gpt.save(tmp_path / "plan.json")
    assert explain(PlanRecord.load(tmp_path / "plan.json")) == text
    for words in ("The peak lies at", "Activation", "save", "recompute", "skip", "ms/MB", "more would buy"):
        assert words in text
    assert max(map(len, text.splitlines())) < 200
    assert len(text.splitlines()) < 60


def test_an_ample_budget_costs_nothing() -> None:
    text = explain(plan_profile(two_blocks(), 5000))
    assert "The budget costs nothing" in text
    assert "More memory would buy nothing." in text


def test_names_are_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>"
    profile = two_blocks()
    calls = tuple(dataclasses.replace(call, class_name=evil) for call in profile.calls)
    record = plan_profile(dataclasses.replace(profile, model=evil, calls=calls), 1188)
    html = explanation(record)._repr_html_()
    assert "<img" not in html
    assert "&lt;img" in html


def test_rows_of_runs_are_the_ops_that_run() -> None:
    record = plan_profile(two_blocks(), 1188, regions=["blocks.0", "blocks.1"], gap=0)
    step = step_of(record)
    timeline = step.timeline[step.built.runs(record.profile, step.options)]
    assert timeline["op"].tolist()[:5] == [
        f"test.{name}.default" for name in ("wide", "narrow", "wide", "narrow", "loss")
    ]
    assert timeline["phase"].tolist() == [
        *["forward"] * 5,
        "backward",
        "backward",
        "recompute",
        "backward",
        "backward",
    ]
