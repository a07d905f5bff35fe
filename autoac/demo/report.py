"""Results of the demo, as a record and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Side:
    """Results of one of the two runs.

    Args:
        measured_peak_bytes: the highest peak of the measured steps, resident bytes included.
        step_time_s: median over the timed steps.
        losses: of every step.
    """

    measured_peak_bytes: int
    step_time_s: float
    losses: list[float]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All results of the demo.

    Args:
        half_is_feasible: whether some plan reaches half of the peak; if not, the budget is the least feasible.
        planning_time_s: profiling included.
        gradients_compared: number of tensors, over all steps.
        gradients_different: "step 3: blocks.0.up.weight" for each that was not equal to the bit.
    """

    parameters: int
    steps: int
    torch_version: str
    threads: int
    without_plan: Side
    with_plan: Side
    budget_bytes: int
    half_is_feasible: bool
    predicted_peak_bytes: int
    predicted_overhead: float
    planning_time_s: float
    gradients_compared: int
    gradients_different: list[str]
    losses_equal: bool
    random_numbers_equal: bool
    weights_equal: bool
    total_time_s: float

    @property
    def measured_overhead(self) -> float:
        return self.with_plan.step_time_s / self.without_plan.step_time_s - 1

    @property
    def is_exact(self) -> bool:
        same = self.losses_equal and self.random_numbers_equal and self.weights_equal
        return same and self.gradients_compared > 0 and not self.gradients_different

    @property
    def is_within_budget(self) -> bool:
        return self.with_plan.measured_peak_bytes <= self.budget_bytes

    def as_json(self) -> dict[str, Any]:
        """Plain data: the fields, and values derived from them."""
        return asdict(self) | {
            "measured_overhead": self.measured_overhead,
            "is_exact": self.is_exact,
            "is_within_budget": self.is_within_budget,
        }


def render(report: DemoReport) -> Group:
    """Both runs and the predictions side by side, then the verdict."""
    table = Table(title=f"GPT with {report.parameters / 1e6:.1f} M parameters, {report.steps} steps")
    table.add_column()
    for heading in ("without a plan", "with the plan", "predicted"):
        table.add_column(heading, justify="right")
    plain, planned = report.without_plan, report.with_plan
    table.add_row(
        "peak memory",
        mb(plain.measured_peak_bytes),
        mb(planned.measured_peak_bytes),
        mb(report.predicted_peak_bytes),
    )
    table.add_row("budget", "", mb(report.budget_bytes), "")
    table.add_row("step time, median", f"{plain.step_time_s:.3f} s", f"{planned.step_time_s:.3f} s", "")
    table.add_row("overhead", "", f"{report.measured_overhead:+.1%}", f"{report.predicted_overhead:+.1%}")
    table.add_row("first loss", f"{plain.losses[0]:.6f}", f"{planned.losses[0]:.6f}", "")
    table.add_row("last loss", f"{plain.losses[-1]:.6f}", f"{planned.losses[-1]:.6f}", "")
    return Group(table, *_verdict(report))


def _verdict(report: DemoReport) -> list[str]:
    compared, different = report.gradients_compared, report.gradients_different
    lines = []
    if not report.half_is_feasible:
        lines.append("Half of the peak is not feasible; the budget is the least feasible one.")
    if different:
        lines.append(f"FAILED: {len(different)} of {compared} gradients differ, first {different[0]}")
    else:
        lines.append(f"Every gradient is equal: {compared} of {compared}, to the bit.")
    for what, equal in (
        ("losses", report.losses_equal),
        ("weights afterwards", report.weights_equal),
        ("random numbers afterwards", report.random_numbers_equal),
    ):
        lines.append(f"{'Equal' if equal else 'FAILED: not equal'}: {what}.")
    over_bytes = report.with_plan.measured_peak_bytes - report.budget_bytes
    lines.append(
        "The peak is within the budget."
        if over_bytes <= 0
        else f"FAILED: {over_bytes} bytes over the budget."
    )
    lines.append(
        f"Planning took {report.planning_time_s:.1f} s, everything {report.total_time_s:.0f} s;"
        f" torch {report.torch_version}, {report.threads} threads."
    )
    return lines


def mb(size_bytes: int) -> str:
    """Millions of bytes, for a column in which all numbers have one unit."""
    return f"{size_bytes / 1e6:.1f} MB"
