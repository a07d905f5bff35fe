"""The benchmarks run, and print the right tables; times are not checked."""

import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoac.compare.ours import budgets_between
from autoac.compare.results import ModelResult, Results, Row
from autoac.record import recorder
from benchmarks import checks, flat, guard_cost, models, op_cost, report
from benchmarks.compare import in_the_running, measure_model

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CPU = torch.device("cpu")


def row(name: str, kind: str, seconds: list[float], peak: int, **others) -> Row:
    fields = {
        "budget_bytes": 0,
        "predicted_peak_bytes": None,
        "predicted_overhead": None,
        "gradients_equal": True,
        "buffers_equal": True,
        "error": "",
        **others,
    }
    return Row(name=name, kind=kind, seconds=seconds, wall_s=seconds, turns=[], peak_bytes=peak, **fields)


def in_turns(rows: list[Row]) -> list[Row]:
    """The rows with turns, one round after the other."""
    return [
        dataclasses.replace(row, turns=[number + len(rows) * r for r in range(len(row.seconds))])
        for number, row in enumerate(rows)
    ]


def ours(number: int, budget: int, seconds: float, predicted: float) -> Row:
    return row(
        f"ours, budget {number}",
        "ours",
        [seconds] * 2,
        budget - 1,
        budget_bytes=budget,
        predicted_peak_bytes=budget - 1,
        predicted_overhead=predicted,
    )


@pytest.fixture
def by_hand() -> ModelResult:
    """No checkpointing takes 1 s, and twice the same; nothing else fits the first budget."""
    rows = [
        row("none", "none", [1.0, 1.0], 1000),
        row("none again", "none", [1.0, 1.0], 1000),
        row("full, each block", "other", [1.3, 1.2], 500),
        row("wrong", "other", [1.01, 1.01], 300, gradients_equal=False),
        row("broken", "other", [], 0, error="RuntimeError: no | yes"),
        row("policy", "other", [1.1, 1.12], 700),
        ours(1, 400, 1.2, 0.21),
        ours(2, 600, 1.1, 0.09),
        ours(3, 800, 1.04, 0.03),
        ours(4, 1000, 1.0, 0.0),
    ]
    budgets = [400, 600, 800, 1000]
    again = [0.22, 0.085, 0.031, 0.0]
    return ModelResult("by hand", "By hand", "replay", budgets, 100, 1.0, 1.0, 1.1, in_turns(rows), again)


def test_best_other_is_the_fastest_that_fits_with_right_gradients(by_hand: ModelResult):
    best = [by_hand.best_other(budget) for budget in by_hand.budgets]
    assert [other and other.name for other in best] == [None, "full, each block", "policy", "none"]


def test_overhead_and_noise(by_hand: ModelResult):
    overheads = {row.name: by_hand.overhead(row) for row in by_hand.rows if not row.error}
    assert overheads["full, each block"] == pytest.approx(0.25, abs=0.02)
    assert overheads["none"] == pytest.approx(-overheads["none again"], abs=1e-6)
    assert 0 <= by_hand.difference_of_none <= by_hand.noise < 0.1
    assert by_hand.rank_correlation == pytest.approx(1)


def test_samples_that_were_taken_again_are_reported(by_hand: ModelResult):
    assert "taken again" not in report.render(Results({}, [by_hand]))
    again = dataclasses.replace(by_hand, taken_again=7)
    assert "7 samples were taken again, as the machine's host" in report.render(Results({}, [again]))


@pytest.mark.parametrize("often", [1, 2])
def test_drift_of_the_machine_is_told_from_the_configurations(often: int):
    """The machine is up to three times as slow as at its best, in waves of some rounds."""
    costs = {"none": 1.0, "none again": 1.0, "a": 1.1, "b": 1.3, "c": 1.6}
    order = random.Random(0)
    round_ = [*costs, *["none", "none again"] * (often - 1)]
    taken = [name for _ in range(30) for name in order.sample(round_, len(round_))]
    turns = {name: [turn for turn, other in enumerate(taken) if other == name] for name in costs}
    rows = [
        dataclasses.replace(
            row(name, "none" if "none" in name else "other", [], 1),
            turns=turns[name],
            seconds=[cost * (2 + math.sin(turn / 6)) for turn in turns[name]],
            wall_s=[2 * cost * (2 + math.sin(turn / 6)) for turn in turns[name]],
        )
        for name, cost in costs.items()
    ]
    result = ModelResult("by hand", "By hand", "replay", [], 100, 1.0, 1.0, 1.1, rows)
    for measured in rows:
        assert result.overhead(measured) == pytest.approx(costs[measured.name] - 1, abs=0.01)
        assert result.wall_overhead(measured) == pytest.approx(costs[measured.name] - 1, abs=0.01)
    assert result.noise < 0.02


def test_only_what_may_be_the_best_gets_more_samples(by_hand: ModelResult):
    slow = row("slow", "other", [1.9, 1.9], 500)
    near = row("near", "other", [1.26, 1.26], 550)
    rows = in_turns([*by_hand.rows, slow, near])
    names = in_the_running(dataclasses.replace(by_hand, rows=rows))
    assert {"near", "policy", "full, each block", "none", "none again"} <= names
    assert not names & {"slow", "wrong"}
    assert {ours.name for ours in by_hand.ours} <= names


def test_checks_pass_and_fail(by_hand: ModelResult):
    assert [check.passed for check in checks.checks(by_hand)] == [True] * 7
    slow = dataclasses.replace(
        by_hand, rows=in_turns([*by_hand.rows[:-2], ours(3, 800, 1.3, 0.03), by_hand.rows[-1]])
    )
    assert [check.passed for check in checks.checks(slow)] == [True, False, True, False, False, True, True]
    unlike = dataclasses.replace(by_hand, predicted_step_s=1.2, predicted_again=[0.24, 0.085, 0.031, 0.0])
    assert [check.passed for check in checks.checks(unlike)] == [*[True] * 5, False, False]
    failed = dataclasses.replace(by_hand.rows[-1], seconds=[], wall_s=[], turns=[], error="RuntimeError: no")
    failing = dataclasses.replace(by_hand, rows=[*by_hand.rows[:-1], failed])
    assert [check.passed for check in checks.checks(failing)] == [False]
    assert "RuntimeError: no" in report.render(Results({"torch": "1"}, [failing]))
    wrong = dataclasses.replace(by_hand.rows[-1], gradients_equal=False)
    assert not checks.checks(dataclasses.replace(by_hand, rows=[*by_hand.rows[:-1], wrong]))[0].passed


def test_a_plan_that_fails_breaks_a_promise_and_one_that_cannot_be_made_does_not(by_hand: ModelResult):
    failed = dataclasses.replace(by_hand.rows[-1], error="RuntimeError: no")
    infeasible = dataclasses.replace(failed, predicted_peak_bytes=None, error="no plan fits")
    assert [row.is_wrong for row in (by_hand.rows[-1], failed, infeasible)] == [False, True, False]


def test_report_has_a_line_a_budget_and_a_line_a_strategy(by_hand: ModelResult):
    text = report.render(Results({"torch": "1"}, [by_hand]))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(by_hand.budgets) + 1 + 6
    assert text.count("\n- pass: ") == 7
    assert "RuntimeError: no / yes" in text


def test_results_are_read_back_as_written(by_hand: ModelResult, tmp_path: Path):
    results = Results({"torch": "1"}, [by_hand])
    results.save(tmp_path / "compare.json")
    assert Results.load(tmp_path / "compare.json") == results


def test_the_docs_say_what_was_measured():
    text = (ROOT / "docs" / "measured.md").read_text().replace(" %", "%")
    prose = " ".join(text.split())
    folders = {"1": RESULTS, "2": RESULTS / "two_threads"}
    found = {threads: Results.load(folder / "compare.json") for threads, folder in folders.items()}

    def both(model: ModelResult, row: Row) -> list[float]:
        return [0.0, 0.0] if row.kind == "none" else [model.overhead(row), model.wall_overhead(row)]

    def missed(results: Results) -> int:
        """In how many cases the prediction was not as near as it should be."""
        return sum(
            abs(model.wall_overhead(row) - (row.predicted_overhead or 0.0)) > checks.POINTS
            for model in results.models
            for row in model.ours
        )

    for threads, results in found.items():
        assert f", {threads} thread" in results.conditions["on"]
        for model in results.models:
            pairs = [(both(model, other), both(model, ours)) for ours, other in checks.contested(model)]
            (other, ours), (other_wall, ours_wall) = (
                [
                    statistics.fmean(overheads[clock] for overheads in side)
                    for side in zip(*pairs, strict=True)
                ]
                for clock in (0, 1)
            )
            assert f"| {other:.1%} / {other_wall:.1%} | {ours:.1%} / {ours_wall:.1%} |" in text
            assert f"{ours / other:.2f}" in text
            assert f"{ours_wall / other_wall:.2f}" in text
    assert f"within two points in {30 - missed(found['1'])} of 30 cases" in prose
    assert f"within two points in {30 - missed(found['2'])} of 30 on two threads" in prose
    models = found["1"].models
    gpt = models[0]
    for row in gpt.ours:
        cells = f"| {gpt.overhead(row):.1%} | {row.predicted_overhead:.1%} |"
        best = gpt.best_other(row.budget_bytes)
        if best is not None and best.kind == "other":
            cells = f"| {gpt.overhead(best):.1%} {cells}"
        assert f"| {row.budget_bytes / 1e6:.0f} " in text
        assert cells in text
    noise, noise_on_two = (max(model.noise for model in found[threads].models) for threads in "12")
    assert f"differ by up to {noise * 100:.1f} points in 95 of 100 cases" in prose
    assert f"({noise_on_two * 100:.1f} on two threads)" in prose
    ours = [row for results in found.values() for model in results.models for row in model.ours]
    assert "the measured peak was the predicted one to the byte" in prose
    assert all(row.gradients_equal and row.peak_bytes == row.predicted_peak_bytes for row in ours)
    samples = [len(row.seconds) for model in models for row in model.ours]
    assert f"the median of {min(samples)} to {max(samples)} samples" in prose


def test_the_readme_says_what_was_measured():
    text = (ROOT / "README.md").read_text().replace(" %", "%")
    models = Results.load(RESULTS / "compare.json").models
    assert "predicted one to the byte" in text
    assert f"differ by up to {max(model.noise for model in models) * 100:.1f} points" in " ".join(
        text.split()
    )
    for model in models:
        other, ours = (
            statistics.fmean(model.overhead(row) for row in side)
            for side in zip(*((other, ours) for ours, other in checks.contested(model)), strict=True)
        )
        full = next(row for row in model.rows if row.name == "full, each block")
        cells = [f"{other:.1%}", f"{ours:.1%}"]
        for row in (full, model.ours[0]):
            cells.append(f"{model.overhead(row):.1%} at {row.peak_bytes / 1e6:.0f} MB")
        assert f"| {' | '.join(cells)} |" in text


def test_budgets_include_both_ends():
    assert budgets_between(10, 100, 10) == list(range(10, 101, 10))


@pytest.mark.parametrize(
    "name",
    ["gpt", pytest.param("resnet", marks=pytest.mark.slow), pytest.param("t5", marks=pytest.mark.slow)],
)
def test_every_strategy_has_the_same_gradients(name: str):
    result = measure_model(name, "tiny", CPU, "replay", 3, 2)
    assert [row.name for row in result.of_kind("none")] == ["none", "none again"]
    assert [row.budget_bytes for row in result.ours] == result.budgets == sorted(result.budgets)
    for measured in result.rows:
        if (measured.name, measured.error) == ("torch sac_milp", "gives no advice at any budget"):
            continue
        assert not measured.error, measured
        assert measured.gradients_equal, measured
        samples = 4 if measured.kind == "none" else 2
        assert len(measured.seconds) == len(measured.wall_s) == samples
        assert measured.peak_bytes > result.resident_bytes
    for measured in result.ours:
        assert measured.buffers_equal
        assert measured.peak_bytes <= measured.budget_bytes
    assert result.rows[0].peak_bytes == result.budgets[-1]
    assert len(checks.checks(result)) == 7


def test_blocks_are_found():
    for name in models.MODELS:
        workload = models.make(name, "tiny", CPU)
        assert len(workload.blocks) >= 2
        assert workload.model.training


@pytest.mark.slow
def test_compare_writes_its_files(tmp_path: Path):
    done = run_module(
        "compare",
        "--model=gpt",
        "--size=tiny",
        "--rounds=1",
        "--more=0.05",
        "--budgets=2",
        f"--out={tmp_path}",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.json", "compare.md", "gpt.svg"]
    assert (tmp_path / "compare.md").read_text() == done.stdout.removesuffix("\n")
    assert "timing: round 1 of 1" in done.stderr
    assert "timing the best: round 1 of " in done.stderr


@pytest.mark.slow
def test_op_cost_writes_its_file(tmp_path: Path):
    path = tmp_path / "cost.json"
    assert "| 100% |" in run_module("op_cost", "--rounds=1", "--steps=1", f"--json={path}").stdout
    assert len(json.loads(path.read_text())["costs"]) == 2 + 3 * len(op_cost.MIXES)


def test_op_cost_compares_equal_gradients():
    costs = op_cost.measure(rounds=1, steps=1)  # asserts that they are equal
    assert {cost.way for cost in costs} == {"plain", "checkpoint", "selective", "engine sac", "engine replay"}
    assert sum(op_cost.decisions(0.25)) == op_cost.OPS // 4
    assert op_cost.render(costs).count("\n|") == 2 + len(op_cost.MIXES)


def run_module(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "solver"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_guard_cost_profiles_with_and_without():
    (cost,) = guard_cost.measure(["gpt"], "tiny", rounds=1)
    assert cost.ratio > 0
    assert guard_cost.render([cost]).count("\n|") == 2
    with guard_cost.off():
        assert recorder.Guard() is None
    assert recorder.Guard() is not None


def test_layers_side_by_side_take_no_more_memory_than_in_segments():
    rows = flat.measure(layers=8, width=32, batch=256, segments=(2, 4), rounds=1)
    assert [row.segments for row in rows] == [0, 2, 4]
    assert all(row.equal and row.our_peak_bytes <= row.peak_bytes for row in rows)
    assert flat.render(rows).count("\n|") == 4
