"""Checks a plan's predictions by measurement: a step with and without the plan, and memory over the step."""
