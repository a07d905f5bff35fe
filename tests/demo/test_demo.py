"""The demo's own arithmetic, with plain checkpointing of every block in the place of a plan."""

import dataclasses
import json
import types
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import autoac
from autoac.cli import app
from autoac.demo import gpt
from autoac.demo import run as demo_run
from autoac.demo.report import DemoReport, Side, render

BUDGET_OF_STAND_IN = 60_000_000


class StandIn:
    """Has what the demo asks of a plan."""

    predicted_overhead = 0.25

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.predicted_peak_bytes = budget_bytes - 1

    def apply(self, model: nn.Module) -> nn.Module:
        def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(type(block).forward, block, x, use_reentrant=False)

        for block in model.get_submodule("blocks").children():
            block.forward = types.MethodType(checkpointed, block)
        return model


class BreaksOneGradient(StandIn):
    def apply(self, model: nn.Module) -> nn.Module:
        model.get_parameter("head.bias").register_hook(lambda grad: grad + 1e-3)
        return super().apply(model)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and a text that take a fraction of a second."""
    monkeypatch.setattr(gpt, "BATCH", 4)
    monkeypatch.setattr(gpt, "WIDTH", 32)
    monkeypatch.setattr(gpt, "topics", {"only": "It was a bright cold day in April. " * 50})


def use(monkeypatch: pytest.MonkeyPatch, stand_in: type[StandIn], least_feasible_bytes: int = 0) -> None:
    def plan(model: nn.Module, sample: gpt.Batch, budget: int) -> StandIn:
        assert all(p.grad is None for p in model.parameters())
        if budget < least_feasible_bytes:
            raise autoac.InfeasibleBudgetError(budget, least_feasible_bytes)
        return stand_in(budget)

    monkeypatch.setitem(vars(autoac), "plan", plan)


def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(app, ["demo", "--steps", "4", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout), result.stderr


@pytest.mark.usefixtures("small")
def test_equal_and_within_half(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, StandIn)
    code, report, progress = run()

    assert code == 0
    assert report["is_exact"]
    assert report["is_within_budget"]
    assert report["half_is_feasible"]
    n_parameters = 2 + 8 * 12 + 2 + 2
    assert report["gradients_compared"] == 4 * n_parameters
    assert report["gradients_different"] == []
    plain, planned = report["without_plan"], report["with_plan"]
    assert len(plain["losses"]) == 4
    assert plain["losses"] == planned["losses"]
    assert plain["losses"][-1] < plain["losses"][0]
    assert report["budget_bytes"] == plain["measured_peak_bytes"] // 2
    assert planned["measured_peak_bytes"] < report["budget_bytes"]
    assert "step  4: loss" in progress


@pytest.mark.usefixtures("small")
def test_infeasible_half_takes_the_least_budget(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, StandIn, least_feasible_bytes=BUDGET_OF_STAND_IN * 10)
    code, report, progress = run()

    assert code == 0
    assert not report["half_is_feasible"]
    assert report["budget_bytes"] == BUDGET_OF_STAND_IN * 10
    assert "The least feasible budget is 600.0 MB" in progress.replace("\n", " ")


@pytest.mark.usefixtures("small")
def test_a_differing_gradient_is_named_and_fails(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, BreaksOneGradient)
    code, report, _ = run()

    assert code == 1
    assert not report["is_exact"]
    assert report["gradients_different"][0] == "step 1: head.bias"
    assert not report["weights_equal"]


@pytest.mark.usefixtures("small")
def test_the_start_is_what_it_was_before_planning(monkeypatch: pytest.MonkeyPatch):
    # Without recomputation the two runs are one run done twice.
    use(monkeypatch, type("Nothing", (StandIn,), {"apply": lambda self, model: model}))
    report = demo_run.run(3, progress=lambda line: None)

    assert report.is_exact
    assert report.with_plan.measured_peak_bytes == report.without_plan.measured_peak_bytes
    assert not report.is_within_budget


@pytest.mark.slow
def test_the_main_job_itself():
    code, report, _ = run("--steps", "3")

    assert code == 0
    assert report["is_exact"]
    assert report["is_within_budget"]
    assert report["half_is_feasible"]
    assert report["gradients_compared"] == 3 * 102
    assert report["with_plan"]["measured_peak_bytes"] == pytest.approx(
        report["predicted_peak_bytes"], rel=1e-3
    )


def report_of(**changes: Any) -> DemoReport:
    report = DemoReport(
        parameters=6_400_000,
        steps=16,
        torch_version="2.13.0",
        threads=2,
        without_plan=Side(340_000_000, 0.5, [4.7, 2.8]),
        with_plan=Side(169_000_000, 0.52, [4.7, 2.8]),
        budget_bytes=170_000_000,
        half_is_feasible=True,
        predicted_peak_bytes=169_000_000,
        predicted_overhead=0.03,
        planning_time_s=5.0,
        gradients_compared=1632,
        gradients_different=[],
        losses_equal=True,
        random_numbers_equal=True,
        weights_equal=True,
        total_time_s=60.0,
    )
    return dataclasses.replace(report, **changes)


def text_of(report: DemoReport) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


def test_table_shows_both_sides():
    text = text_of(report_of())
    for expected in (
        "340.0 MB",
        "169.0 MB",
        "170.0 MB",
        "0.500 s",
        "0.520 s",
        "+4.0%",
        "+3.0%",
        "1632 of 1632",
    ):
        assert expected in text
    assert "FAILED" not in text


def test_table_says_what_failed():
    text = text_of(
        report_of(
            with_plan=Side(171_000_000, 0.52, [4.7, 2.9]),
            gradients_different=["step 3: head.bias"],
            half_is_feasible=False,
            losses_equal=False,
        )
    )
    assert "Half of the peak is not feasible" in text
    assert "FAILED: 1 of 1632 gradients differ, first step 3: head.bias" in text
    assert "FAILED: not equal: losses" in text
    assert "FAILED: 1000000 bytes over the budget" in text


def test_wrong_usage_is_2():
    assert CliRunner().invoke(app, ["demo", "--steps", "2"]).exit_code == 2
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"autoac {autoac.__version__}\n")
