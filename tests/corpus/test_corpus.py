"""A few of a stranger's models, the same ones in each run; AUTOAC_CORPUS_DRAW=1, 2, ... draws others.

All of them: `python -m tests.corpus`.
"""

import os
import warnings

import pytest

from tests import contract
from tests.corpus import check as checking
from tests.corpus.check import check, drawn
from tests.corpus.exceptions import KNOWN
from tests.corpus.families import ELSEWHERE, families
from tests.corpus.make import NotMadeError, make

pytestmark = pytest.mark.usefixtures("one_thread")

SLOTS = 4


@pytest.mark.parametrize("slot", range(SLOTS))
def test_families_that_are_drawn(slot: int):
    """The first family in this slot's order that the rules can make, and that has something to save."""
    number = int(os.environ.get("AUTOAC_CORPUS_DRAW", "0"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries', about configurations as small as these
        for family in drawn(number, slot, SLOTS):
            found = check(family)
            if found.kind in ("not made", "nothing to save"):
                continue
            assert found.kind in ("kept", "known"), f"{family.name}: {found.words}"
            return
    raise AssertionError("no family at all could be checked")


def test_all_have_their_turn():
    every = families()
    draws = range(-(-len(every) // SLOTS))
    firsts = {next(drawn(number, slot, SLOTS)) for number in draws for slot in range(SLOTS)}
    assert firsts == set(every)


def test_there_are_forty_more_families_and_the_rules_make_most_of_those_looked_at():
    every = families()
    assert len(every) >= 300
    assert not ELSEWHERE & {family.name for family in every}
    assert set(KNOWN) <= {family.name for family in every}
    made = 0
    for family in every[::12]:
        try:
            made += make(family).model.training
        except NotMadeError:
            continue
    assert made >= len(every[::12]) // 2


def test_a_broken_contract_is_found(monkeypatch: pytest.MonkeyPatch):
    family = next(family for family in families() if family.name == "opt")
    monkeypatch.setattr(contract, "TOLERANCE", -1.0)
    monkeypatch.setattr(checking, "ENGINES", ("replay",))
    monkeypatch.setattr(checking, "FRACTIONS", (0.5,))
    found = check(family)
    assert found.kind == "broken"
    assert all("the prediction is off" in words for words in found.words)
    monkeypatch.setitem(KNOWN, "opt", ("over the budget", "made up"))
    assert check(family).kind == "broken"
    monkeypatch.setitem(KNOWN, "opt", ("the prediction is off", "made up"))
    assert check(family).kind == "known"
