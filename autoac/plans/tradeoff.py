"""Plans over a range of budgets, which can be put on models."""

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
        """The plan of each row; it is made when it is first looked at."""
        return curve.Lazy(len(self.points), lambda row: Plan(self.record(row)))

    def report(self, path: str | Path, row: int | None = None) -> None:
        """Write the curve and its plans as a page: one HTML file that opens offline.

        Args:
            path: of the file, .html; one that is there is replaced.
            row: of the plan that the page opens with; None for the knee's, or the first.

        Raises:
            FileNotFoundError, IsADirectoryError: no file can be at this path; before the page is made.
        """
        write_report(self.record(self.opening_row if row is None else row), path, curve=self)

    def show(self, row: int | None = None, height: int = 900) -> Page:
        """The report page in a notebook: with hover and zoom, and a slider over budgets.

        Args:
            row: as for `report`.
            height: of the frame, pixels.

        Returns:
            What Jupyter shows as the page, if it is the last line of a cell.
        """
        return Page(render_report(self.record(self.opening_row if row is None else row), curve=self), height)
