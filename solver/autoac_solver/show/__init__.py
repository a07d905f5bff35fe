"""Presentation of plans: summary, explanation, plots, notebook output, the report page."""
