"""`autoac compare`, from the command to the table, the picture and the file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autoac.api import profiling as planner
from autoac.compare import quiet
from autoac.compare.picture import draw
from autoac.compare.results import Results
from autoac.measure import unique_storage_bytes
from autoac.plans import Plan
from tests.cli.conftest import FACTORIES, done, environment, invoke
from tests.small_models import batch, make

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_this_process(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(quiet, "restart_if_needed", lambda: None)


def compare(factory: str, *options: Any, code: int = 0) -> dict[str, Any]:
    result = invoke("compare", f"{FACTORIES}:{factory}", "--rounds", 2, "--json", *options)
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def test_everybody_takes_part_and_ours_stands_beside_each(tmp_path: Path) -> None:
    output, plot = tmp_path / "results.json", tmp_path / "picture.png"
    said = compare("with_optimizer", "--budget", "250KB", "-o", output, "--plot", plot)
    rows = {row["name"]: row for row in said["strategies"]}
    others = [
        "full, each block",
        "full, every 2. block",
        "save attention, every other matmul",
        "save attention and matmuls",
    ]
    assert list(rows)[:6] == ["none", "none again", *others]
    assert "ours at a budget of 250KB" in rows
    assert any(name.startswith("torch sac_milp") for name in rows)
    assert said["blocks"] == [f"blocks.{index}" for index in range(4)]
    for name in others:
        assert rows[name]["gradients_equal"]
        (beside,) = [
            row
            for row in said["strategies"]
            if row["kind"] == "ours" and row["budget_bytes"] == rows[name]["peak_bytes"]
        ]
        assert beside["peak_bytes"] <= rows[name]["peak_bytes"]
        assert beside["peak_bytes"] == pytest.approx(beside["predicted_peak_bytes"], abs=100)  # scalars
        assert beside["gradients_equal"]
        assert beside["buffers_equal"]
        assert len(beside["seconds"]) == 2
    peaks = [rows[name]["peak_bytes"] for name in ("full, each block", "full, every 2. block", "none")]
    assert peaks == sorted(set(peaks))
    assert rows["none"]["overhead"] == pytest.approx(-rows["none again"]["overhead"], abs=1e-9)
    (model,) = Results.load(output).models
    assert {row.name: row.peak_bytes for row in model.rows} == {
        name: r["peak_bytes"] for name, r in rows.items()
    }
    assert plot.read_bytes().startswith(b"\x89PNG")
    model = make(blocks=4)
    trained = sum(p.numel() * p.element_size() for p in model.parameters())
    there = unique_storage_bytes([*model.parameters(), *model.buffers(), batch()])
    assert (
        there + 2 * trained <= said["resident_bytes"] <= there + 2 * trained + 1000
    )  # AdamW's moments count


def test_the_optimizers_step_counts_on_neither_side() -> None:
    """Its temporaries are larger than this model's activations."""
    rows = compare("with_optimizer", "--rounds", "1")["strategies"]
    assert not [row["error"] for row in rows if row["error"] and row["kind"] == "ours"]


def test_steps_that_differ_by_themselves_cannot_be_compared() -> None:
    result = invoke("compare", f"{FACTORIES}:differs", "--rounds", 1)
    assert result.exit_code == 1
    assert "two steps without checkpointing differ by themselves" in result.stderr


def test_the_table_says_what_failed_and_what_noise_is() -> None:
    result = done("compare", f"{FACTORIES}:no_blocks", "--rounds", 1, "--budget", "1KB", "--budget", "1MB")
    lines = result.stdout.splitlines()
    assert any(line.split()[:1] == ["none"] for line in lines)
    why = "no list of equal blocks was found in this model: name them with --blocks"
    assert f"full, each block: {why}" in lines
    assert any(
        line.startswith("ours at a budget of 1KB: no plan fits: the least possible peak is") for line in lines
    )
    assert any("in 95 of 100 cases" in line for line in lines)


def test_a_step_of_the_users_own_takes_part_and_blocks_can_be_named() -> None:
    said = compare("whole_step", "--blocks", "blocks.0", "--blocks", "blocks.2")
    assert said["blocks"] == ["blocks.0", "blocks.2"]
    rows = {row["name"]: row for row in said["strategies"]}
    assert rows["full, each block"]["gradients_equal"]
    (milp,) = [row for name, row in rows.items() if name.startswith("torch sac_milp")]
    assert "runs a step of its own" in milp["error"] or "pwlf" in milp["error"]


def test_blocks_that_are_not_there() -> None:
    result = invoke("compare", f"{FACTORIES}:small", "--blocks", "layers.*")
    assert result.exit_code == 1
    assert "matches no module" in result.stderr


def test_a_wrong_plan_is_told_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Plan, model: nn.Module) -> nn.Module:
        inner = model.get_submodule("head").forward
        model.get_submodule("head").forward = lambda x: inner(x) * 2
        return model

    monkeypatch.setattr(Plan, "apply", apply)
    monkeypatch.setattr(planner, "fitted", lambda profile, *_: profile)  # it would run a step with a plan
    result = invoke("compare", f"{FACTORIES}:small", "--rounds", 1, "--budget", "200KB")
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout


def test_stored_results_are_still_readable() -> None:
    stored = sorted((ROOT / "benchmarks" / "results").rglob("compare.json"))
    assert stored
    for path in stored:
        for model in Results.load(path).models:
            assert model.ours
            assert all(row.counts for row in model.ours)
            assert model.overhead(model.of_kind("none")[0]) == pytest.approx(0, abs=0.1)


def test_a_picture_of_a_class_with_a_hostile_name(tmp_path: Path) -> None:
    """A title is no formula, and this would be one that does not end."""
    (model, *_) = Results.load(ROOT / "benchmarks" / "results" / "compare.json").models
    draw(replace(model, title="[/x]$x^$ of [/x].py:factory"), tmp_path / "[x].svg")
    assert "<!-- [/x]$x^$ of [/x].py:factory -->" in (tmp_path / "[x].svg").read_text()


def test_the_process_restarts_once_with_quiet_settings() -> None:
    code = (
        "import os; from autoac.compare.quiet import restart_if_needed; restart_if_needed(); "
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    variables = dict.fromkeys(quiet.SETTINGS, "")
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**variables),
    )
    assert (found.stdout, found.stderr) == ("PASSIVE\n", "")


def test_the_command_restarts_before_it_loads_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def restart() -> None:
        raise OSError(7, "restarted")

    monkeypatch.setattr(quiet, "restart_if_needed", restart)
    assert "restarted" in invoke("compare", f"{FACTORIES}:raises").stderr
