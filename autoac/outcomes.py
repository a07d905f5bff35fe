"""One plan for several samples: the one with the highest peak is planned for, the others are evaluated under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoac.plans import Plan
from autoac_solver.plan.baselines import checkpointed
from autoac_solver.plan.recorded.transfer import outcome_of
from autoac_solver.records.format import format_bytes
from autoac_solver.records.outcome import Outcome
from autoac_solver.records.profile import Profile


def largest_first(recorded: Sequence[tuple[Any, Profile]]) -> list[tuple[Any, Profile]]:
    """Batches and their profiles by the steps' peaks with nothing recomputed, the highest first."""
    return sorted(recorded, key=lambda one: unplanned_bytes(one[1]), reverse=True)


def unplanned_bytes(profile: Profile) -> int:
    """Peak of the step with nothing recomputed."""
    return checkpointed(profile, ()).peak_bytes


def with_others(profiles: Sequence[Profile]) -> Profile:
    """The first profile, with a note on the peaks of the others."""
    first, *others = profiles
    if not others:
        return first
    words = "; ".join(f"{one.sample or 'another'}: {format_bytes(unplanned_bytes(one))}" for one in others)
    note = f"of {len(profiles)} samples that with the highest peak; with nothing recomputed the others take {words}"
    return replace(first, notes=(*first.notes, note))


def with_outcomes(plan: Plan, others: Sequence[Profile]) -> Plan:
    """The plan, with the predicted outcomes of these steps under it."""
    return told_of(plan, [outcome_of(plan.record, profile) for profile in others])


def told_of(plan: Plan, outcomes: Sequence[Outcome]) -> Plan:
    """The plan, with outcomes of other samples and a note on them."""
    if not outcomes:
        return plan
    note = f"of {len(outcomes) + 1} samples that with the highest peak; under its plan, " + "; ".join(
        map(_in_words, outcomes)
    )
    profile = replace(plan.record.profile, notes=(*plan.record.profile.notes, note))
    return Plan(replace(plan.record, profile=profile, others=tuple(outcomes)))


def _in_words(outcome: Outcome) -> str:
    time = "" if outcome.overhead is None else f", step time {outcome.overhead:+.1%}"
    fits = "fits" if outcome.fits else "does NOT fit"
    return f"{outcome.sample or 'another'}: peak {format_bytes(outcome.peak_bytes)}{time}, {fits}"
