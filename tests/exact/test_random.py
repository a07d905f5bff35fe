"""Random numbers: dropout that is partly saved, and generators of the user's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from tests.exact.harness import (
    Case,
    assert_exact,
    assert_plan_exact,
    decisions,
    differences,
    plans,
    redecided,
    run,
)

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
BERNOULLI = "aten.bernoulli_.float"  # what dropout draws its mask with on CPU


def blocks(make, count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(count)))


def dropouts() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()
    )


DROPOUTS = Case(lambda: blocks(dropouts), lambda model: model(X).square().mean(), regions="*")


def test_dropout(engine):
    assert_exact(DROPOUTS, engine)


@pytest.mark.parametrize("saved", range(3))
def test_one_of_three_dropouts_saved(saved):
    """The recomputed ones before and after it draw the same masks as in forward."""
    case = DROPOUTS
    plan = plans(case, "replay", [0.0])[0.0]
    calls = {"aten.empty_like.default", BERNOULLI, "aten.div_.Scalar"}
    partly = redecided(plan, lambda op, nth: not (op in calls and nth == saved))
    assert decisions(partly, BERNOULLI) == [nth != saved for nth in range(3)] * 2
    assert_plan_exact(case, partly)
