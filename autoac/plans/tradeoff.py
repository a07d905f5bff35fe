"""Plans over a range of budgets that can be put on models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from autoac.plans.plan import Plan
from autoac_solver.plan import curve
from autoac_solver.show.notebook import Page
from autoac_solver.show.page import render_report, write_report


class Tradeoff(curve.Tradeoff):
    """A `autoac_solver.plan.curve.Tradeoff` whose plans can be put on models."""

    @classmethod
    def of(cls, found: curve.Tradeoff) -> Tradeoff:
        """The same curve."""
        return cls(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found)})

    @functools.cached_property
    def plans(self) -> Sequence[Plan]:
        """The plan of each row, made on first access."""
        return curve.Lazy(len(self.points), lambda row: Plan(self.record(row)))

    def report(self, path: str | Path, row: int | None = None) -> None:
        """Write the curve and its plans as a page: one HTML file that opens offline.

        Args:
            path: the file to write, .html; an existing one is replaced.
            row: row of the plan that the page opens with; None for the knee's, or the first.

        Raises:
            FileNotFoundError, IsADirectoryError: no file can be written at this path; raised before the page is made.
        """
        write_report(self.record(self.opening_row if row is None else row), path, curve=self)

    def show(self, row: int | None = None, height: int = 900) -> Page:
        """The report page in a notebook: with hover and zoom, and a slider over budgets.

        Args:
            row: as for `report`.
            height: height of the frame, pixels.

        Returns:
            An object that Jupyter shows as the page if it is the last line of a cell.
        """
        return Page(render_report(self.record(self.opening_row if row is None else row), curve=self), height)
