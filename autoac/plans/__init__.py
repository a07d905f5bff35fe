"""The plan as users see it: its contents (`view`), its use on a model (`plan`), and curves of plans (`tradeoff`)."""

from autoac.plans.plan import Model, Plan
from autoac.plans.tradeoff import Tradeoff

__all__ = ["Model", "Plan", "Tradeoff"]
