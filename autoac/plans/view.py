"""Contents and predictions of a plan; no model is needed for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd

from autoac.progress import progress_shown
from autoac_solver.plan.recorded.peak import peak_parts
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.outcome import Outcome
from autoac_solver.records.plan import PlanRecord
from autoac_solver.show import refusals
from autoac_solver.show.explanation import Explanation, explain, explanation
from autoac_solver.show.memory import plot_memory
from autoac_solver.show.notebook import Page, plan_html
from autoac_solver.show.page import render_report, write_report
from autoac_solver.show.regions import Regions
from autoac_solver.show.summary import notes, summary


class PlanView:
    """A plan's record, to be inspected and written.

    Args:
        record: the contents of the plan's file.
    """

    def __init__(self, record: PlanRecord):
        self.record = record
        self._regions = Regions(record)

    @property
    def predicted_peak_bytes(self) -> int:
        """Largest number of live bytes during the planned step, resident bytes included."""
        return self.record.predicted_peak_bytes

    @property
    def predicted_reserved_bytes(self) -> int | None:
        """Peak of the memory reserved by CUDA's caching allocator during the planned step, as simulated.

        None for plans for other devices, and if the allocator's options (`PYTORCH_CUDA_ALLOC_CONF`) are not understood;
        `explain` says why.
        """
        return self.record.predicted_reserved_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes alive before the step: parameters, buffers, optimizer state, the sample."""
        return self.record.resident_bytes

    @property
    def budget_bytes(self) -> int:
        """The requested limit."""
        return self.record.budget_bytes

    @property
    def predicted_overhead(self) -> float:
        """Extra step time / step time with nothing recomputed, the engine's own cost included."""
        step_s = self.record.predicted_step_s
        return self.record.predicted_extra_s / step_s if step_s else 0.0

    @property
    def optimality_gap(self) -> float:
        """How much faster another plan within the budget can be at most, as a fraction of the step's time."""
        return self.record.gap

    @property
    def status(self) -> str:
        """ "optimal" if no plan within the budget is faster by more than the requested gap, else "feasible"."""
        return self.record.status

    @property
    def engine(self) -> str:
        """The engine's name: "replay", "sac" or "compile"."""
        return self.record.engine

    @property
    def regions(self) -> Regions:
        """The regions: module name, call, whether it is wrapped, and the decision for each of its ops.

        `plan.regions.others` says for every other module that the step calls why it is none, `plan.regions.must_save`
        for every value that must be saved why; as text and in Jupyter all of this is tables.
        """
        return self._regions

    @property
    def refused(self) -> dict[str, str]:
        """Why modules can be no regions at any budget: reasons by the name of the outermost module ("" for all).

        Reasons are the engine's, or that a module has nothing to recompute: it runs with gradients off, or backward
        needs nothing that is saved in it. Modules that could be regions are not listed, nor are layers such as
        `Identity` that have nothing to recompute; `why` answers for every module.
        """
        return dict(self._regions.refused)

    @property
    def decisions(self) -> pd.DataFrame:
        """One row per value.

        Columns: region, module, op, bytes, decision ("save", "recompute" or "skip"), time_s, must_save and the reason,
        group (the index of its decision group), storage.
        """
        return step_of(self.record).decisions.copy()

    @property
    def samples(self) -> pd.DataFrame:
        """One row per sample that `autoac.plan` was given; the first is the one that was planned for.

        Columns: sample, peak_bytes, unplanned_peak_bytes, overhead, fits. With engine compile the others' peaks are
        measured and their overhead is NaN.
        """
        own = Outcome(
            self.record.profile.sample,
            self.predicted_peak_bytes,
            self.record.unplanned_peak_bytes,
            self.predicted_overhead,
            fits=True,
        )
        rows = [dataclasses.asdict(outcome) for outcome in (own, *self.record.others)]
        return pd.DataFrame(rows).astype({"overhead": float})

    def peak_parts(self) -> dict[str, int]:
        """Bytes alive at the predicted peak on one rank, by kind.

        Returns:
            parameters (shards, if sharded), gathered (parameters that FSDP2 has gathered at that point), gradients
            (with DDP's buckets), optimizer (its state), inputs (the sample, buffers and other memory from before the
            step), activations, and other (temporary memory of ops and collectives). They add up to the predicted peak.
        """
        return peak_parts(self.record)

    def memory_timeline(self) -> pd.DataFrame:
        """One row per op of the planned step: op, module, phase, live_bytes in total and by kind of memory."""
        return step_of(self.record).timeline.copy()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the plan: how its step was recorded, and what could be better."""
        return notes(self.record)

    def summary(self) -> str:
        """The plan in at most 15 lines; `explain` has everything."""
        return summary(self.record)

    def explain(self) -> str:
        """The plan in words: the peak and its holders, recomputed values and their cost, the gain from more memory."""
        return explain(self.record)

    def why(self, module: str) -> str:
        """The plan's decisions for a module, and their limits: why it is no region, which values in it must be saved.

        Args:
            module: its name in the model, "" for the model itself; or the name of a region of this plan.

        Raises:
            ProfilingError: the profiled step calls no module of this name.
            TypeError: it is no name.
        """
        if not isinstance(module, str):
            raise TypeError(
                f"why() takes a module's name, such as 'layers.0', and got {type(module).__name__}"
            )
        return refusals.why(self.record, module)

    def explanation(self) -> Explanation:
        """The contents of `explain` as tables. Takes a moment: it solves once more, for a little more memory."""
        return explanation(self.record)

    def plot_memory(self, axes: Any = None, measured: Any = None) -> Any:
        """Draw the live bytes over the step: by kind, with nothing recomputed, the budget, and as measured.

        Args:
            axes: matplotlib axes to draw on; None makes a new figure.
            measured: what `measure_memory` returned; None for none.

        Returns:
            The axes.
        """
        return plot_memory(self.record, axes, measured)

    def __repr__(self) -> str:
        return str(self.record)

    def _repr_html_(self) -> str:
        return plan_html(self.record)

    def show(self, curve: Any = None, points: int = 8, height: int = 900) -> Page:
        """The report page in a notebook: with hover and zoom, and a slider over budgets.

        Args:
            curve, points: as for `report`.
            height: height of the frame, pixels.

        Returns:
            An object that Jupyter shows as the page if it is the last line of a cell.
        """
        with progress_shown("planning other budgets", None) as tell:
            return Page(render_report(self.record, curve=curve, points=points, progress=tell), height)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no folder to write it in.
            IsADirectoryError: there is a folder of that name.
            ValueError: the name does not end in .json.
        """
        self.record.save(path)

    def report(self, path: str | Path, curve: Any = None, points: int = 20) -> None:
        """Write the plan as a page: one HTML file that opens offline.

        Args:
            path: the file to write, .html; an existing one is replaced.
            curve: plans for other budgets, from the same profile and for the same engine; None makes them, which takes
                a while.
            points: number of budgets to plan for if there is no curve; 0 shows this plan alone.

        Raises:
            ValueError: the curve is of another profile or engine.
            FileNotFoundError, IsADirectoryError: no file can be written at this path; raised before the page is made.
        """
        with progress_shown("planning other budgets", None) as tell:
            write_report(self.record, path, curve=curve, points=points, progress=tell)
