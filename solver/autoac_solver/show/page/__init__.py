"""The report page: one HTML file that shows a plan and its alternatives, works offline and loads nothing."""

from autoac_solver.show.page.render import render_report, write_report

__all__ = ["render_report", "write_report"]
