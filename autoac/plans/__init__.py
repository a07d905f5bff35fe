"""The plan that users hold: what it says of itself (`view`), what it does to a model (`plan`), and curves of plans."""

from autoac.plans.plan import Model, Plan
from autoac.plans.tradeoff import Tradeoff

__all__ = ["Model", "Plan", "Tradeoff"]
