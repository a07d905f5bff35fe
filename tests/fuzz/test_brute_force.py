"""What the builder makes of random models under both engines: the ILP's answer is that of exhaustive search.

The problems of `tests.solver.generators` are drawn as problems; these come from recorded steps with views, writes in
place, side effects and random numbers, in all the choices of regions that the planner looks at.
"""

import random
from collections import Counter

import pytest

import autoac
from autoac_solver.build.stacking import stacked
from autoac_solver.plan.partitions import partitions
from tests.fuzz.check import ENGINES, reference, with_given_times
from tests.fuzz.models import ModelSpec, build, loss_of, models, sample_of
from tests.fuzz.run import run_examples
from tests.solver.exhaustive import assert_agrees_with_exhaustive_search, budgets_around

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
]

EXAMPLES = 150
MOST_UNITS = 10
"""That may be recomputed, of a problem: there are up to 1024 choices."""


def check_problems(spec: ModelSpec, tally: Counter[str]) -> None:
    if reference(spec, tally) is None:
        return
    profile = with_given_times(autoac.profile(build(spec), sample_of(spec), loss=loss_of))
    for engine in ENGINES:
        for calls in partitions(profile, engine):
            problem = stacked(profile, calls, engine, ()).built.problem
            if not 0 < sum(not group.must_save for group in problem.groups) <= MOST_UNITS:
                continue
            dice = random.Random(spec.seed)
            tally["budgets"] += assert_agrees_with_exhaustive_search(problem, budgets_around(dice), "auto")
            tally[engine] += 1
            tally["several regions"] += len({group.region for group in problem.groups}) > 1
            tally["must be saved"] += any(group.must_save for group in problem.groups)
            tally["written in place"] += any(
                profile.tape[op].writes for group in problem.groups for op in group.ops
            )


@pytest.mark.slow
def test_equals_exhaustive_search():
    tally: Counter[str] = Counter()
    run_examples(lambda spec: check_problems(spec, tally), EXAMPLES, 0, models(5, 2, 4))
    print(dict(tally))
    assert min(tally[engine] for engine in ENGINES) >= 100, dict(tally)
    assert tally["several regions"] >= 100, dict(tally)
    assert tally["written in place"] >= 50, dict(tally)
    assert tally["must be saved"] >= 10, dict(tally)
