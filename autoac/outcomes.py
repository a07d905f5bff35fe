"""One plan for several samples: the one with the highest peak is planned for, the others are evaluated under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoac.plans import Plan
from autoac_solver.plan.baselines import checkpointed
from autoac_solver.plan.recorded.transfer import Outcome, outcome_of
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import Profile


def largest_first(profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles by their peaks with nothing recomputed, the highest first."""
    if len(profiles) == 1:
        return [*profiles]
    return sorted(profiles, key=_unplanned_bytes, reverse=True)


def _unplanned_bytes(profile: Profile) -> int:
    return checkpointed(profile, ()).peak_bytes


def with_others(profiles: Sequence[Profile]) -> Profile:
    """The first profile, with a note on the peaks of the others."""
    first, *others = profiles
    if not others:
        return first
    words = "; ".join(f"{one.sample or 'another'}: {format_bytes(_unplanned_bytes(one))}" for one in others)
    note = f"of {len(profiles)} samples that with the highest peak; with nothing recomputed the others take {words}"
    return replace(first, notes=(*first.notes, note))


def with_outcomes(plan: Plan, others: Sequence[Profile]) -> Plan:
    """The plan, with the outcomes of these steps under it."""
    outcomes = tuple(outcome_of(plan.record, profile) for profile in others)
    note = f"of {len(others) + 1} samples that with the highest peak; under its plan, " + "; ".join(
        map(_in_words, outcomes)
    )
    profile = replace(plan.record.profile, notes=(*plan.record.profile.notes, note))
    told = Plan(replace(plan.record, profile=profile))
    told.outcomes = outcomes
    return told


def _in_words(outcome: Outcome) -> str:
    fits = "fits" if outcome.fits else "does NOT fit"
    return (
        f"{outcome.sample or 'another'}: peak {format_bytes(outcome.peak_bytes)}, step time {outcome.overhead:+.1%}, "
        f"{fits}"
    )
