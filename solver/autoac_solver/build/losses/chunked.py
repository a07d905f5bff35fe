"""Chunked cross entropies as one decision: which losses qualify, and the effect on lifetimes.

See `cross_entropy` for the pattern on the tape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from autoac_solver.build.draft import Draft
from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.groups import PINNED
from autoac_solver.build.losses.cross_entropy import ChunkableLoss, chunkable_losses
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import (
    ALWAYS,
    Condition,
    DecisionGroup,
    Extension,
    Lifetime,
    save_or_recompute,
    when_recomputed,
    when_saved,
)
from autoac_solver.records.profile import Profile

LOSS = "(loss)"
"""Name of the pseudo-region of the log-probabilities of cross entropies, which are in no region."""

CHUNKED = "chunked loss"
"""Name in `Profile.costs` of the measured seconds that chunks add to a loss, by `ChunkableLoss.kind`."""


def ops_of(losses: Iterable[ChunkableLoss]) -> set[int]:
    """The forward ops of the losses."""
    return {op for loss in losses for op in (*loss.forward, loss.loss)}


def loss_group(
    profile: Profile, losses: Sequence[ChunkableLoss], region: int, pinned: AbstractSet[int] = frozenset()
) -> DecisionGroup:
    """The group of the losses' log-probabilities.

    Args:
        region: index of the pseudo-region.
        pinned: ops whose values must be saved.
    """
    ops = tuple(loss.log_softmax for loss in losses)
    must_save = "" if pinned.isdisjoint(ops) else PINNED
    return save_or_recompute(region, _price_s(profile, losses), must_save=must_save, ops=ops)


def _price_s(profile: Profile, losses: Sequence[ChunkableLoss]) -> float:
    """Seconds that chunks add to the losses: as measured, or those of the ops that run again.

    The ops take less time on chunks that stay in the cache, and no memory of the logits' size has to be mapped.
    """
    measured, tape = profile.costs.get(CHUNKED, {}), profile.tape
    return sum(measured.get(loss.kind, sum(tape[op].again_s for op in loss.forward)) for loss in losses)


def decided_losses(step: Step, regions: Sequence[Region], engine: EngineModel) -> tuple[ChunkableLoss, ...]:
    """The cross entropies that may be chunked: outside of the regions, which must not hold their logits.

    A region that consists of such a loss alone does not count: it has no groups.
    """
    losses = chunkable_losses(step.profile) if engine.selects else ()
    if not losses:
        return ()
    tape = step.profile.tape
    others = [region for region in regions if not ops_of(losses).issuperset(region.ops)]
    ops = {op for region in others for op in region.ops}
    held = {storage for region in others for storage in step.profile.spans[region.call].inputs}
    held |= {storage for op in ops for storage in set(tape[op].reads) - set(tape[op].writes)}
    fine = all(ops.isdisjoint(loss.forward) and not (loss.alone and loss.logits in held) for loss in losses)
    return losses if fine else ()


def with_chunked_losses(draft: Draft, group: int, lifetimes: Iterable[Lifetime]) -> Iterator[Lifetime]:
    """Make lifetimes depend on whether the losses are chunked, and add the workspace of chunked losses.

    Args:
        group: the group of the losses.
    """
    for loss in draft.losses:
        lifetimes = _with_chunked(draft, group, loss, lifetimes)
    yield from lifetimes
    when, forward = when_recomputed(group), draft.axis.forward
    for loss in draft.losses:
        for op, extra in (
            (loss.log_softmax, loss.forward_bytes),
            (loss.loss, loss.loss_bytes),
            (loss.backward, loss.backward_bytes),
        ):
            yield Lifetime(extra, forward[op], forward[op] + 1, when)


def _with_chunked(
    draft: Draft, group: int, loss: ChunkableLoss, lifetimes: Iterable[Lifetime]
) -> Iterator[Lifetime]:
    gone, chunked = {loss.log_probabilities, *loss.passing}, when_recomputed(group)
    # If the gradient overwrites the logits, they hold it from then on.
    last = loss.gradient if loss.alone else loss.log_probabilities
    saves = [index for index, saved in enumerate(draft.step.profile.saved) if saved.storage == last]
    _, end, _ = draft.life(last, saves)
    begin, lifetimes = draft.axis.forward[loss.backward], list(lifetimes)
    beside = list(_held_by_an_engine(lifetimes, loss.logits, begin)) if loss.alone else [ALWAYS]
    for lifetime in lifetimes:
        if lifetime.storage == loss.gradient and (loss.alone or loss.passing):
            # A cast gradient is written by the chunk, before the op at which it would be cast as a whole.
            start = begin if loss.passing else lifetime.start
            yield replace(lifetime, exists=when_saved(group))
            yield from (replace(lifetime, exists=chunked & when, start=start) for when in beside)
        elif lifetime.storage in gone:
            yield replace(lifetime, exists=when_saved(group))
        elif lifetime.storage == loss.logits and lifetime.exists == ALWAYS and end > lifetime.end:
            yield replace(lifetime, extensions=(*lifetime.extensions, Extension(end, chunked)))
        else:
            yield lifetime


def _held_by_an_engine(lifetimes: Iterable[Lifetime], logits: int, begin: int) -> Iterator[Condition]:
    """When the engine itself holds the logits of a loss as its backward begins, so that they are not overwritten.

    Selective checkpointing keeps every output of a region that is not recomputed, needed or not.
    """
    for lifetime in lifetimes:
        if lifetime.storage == logits and lifetime.exists == ALWAYS:
            yield from dict.fromkeys(e.when for e in lifetime.extensions if e.end > begin)
