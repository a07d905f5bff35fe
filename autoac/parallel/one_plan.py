"""One plan on all ranks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from autoac.plans import Plan
from autoac.ranks.all_or_none import Ranks, together
from autoac.step.model import model_fingerprint
from autoac.torch_private import has_process_group, ranks_of
from autoac.warned import warn
from autoac_solver.plan.recorded.transfer import outcome_of
from autoac_solver.records.errors import BudgetFormatError, InfeasibleBudgetError, ParallelError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import NEVER, Profile
from autoac_solver.records.units import parse_bytes


def agree(plan: Plan | None, model: torch.nn.Module) -> Plan:
    """Share one plan among all ranks that hold a model together; every one of them calls this.

    These are the ranks of its sharded tensors' meshes, or of its DDP's process group; else all. So each stage of a
    pipeline has a plan of its own.

    Args:
        plan: a rank's plan, or None. The one for the largest step is taken (unequal shards, or larger batches, make a
            difference), the first if several are equal.
        model: the rank's model, wrapped or not.

    Raises:
        ParallelError: no rank has a plan, the plan is not for a rank's model, or a rank has failed; raised on all
            ranks. Or there are no ranks: torch.distributed has no process group.
    """
    if not has_process_group():
        raise ParallelError(
            "there are no ranks to agree with: call torch.distributed.init_process_group first, in a process of each "
            "rank. In a single process a plan needs no agreement.",
            0,
        )
    with together("agree on a plan", members=ranks_of(model)) as ranks:
        sizes = ranks.all(-1 if plan is None else plan.record.unplanned_peak_bytes)
        if max(sizes) < 0:
            raise ParallelError(f"no rank has a plan: pass one on rank {ranks.members[0]}.", ranks.members[0])
        return shared(ranks, sizes.index(max(sizes)), plan, model)


def shared(ranks: Ranks, owner: int, plan: Plan | None, model: torch.nn.Module) -> Plan:
    """Send the plan of one rank to all ranks, and check it against their models."""
    text = _text_of(plan) if ranks.rank == owner and plan is not None else None
    taken = _plan_in(ranks.from_one(owner, text))
    taken.check(model)
    ids = ranks.all(taken.program_id)
    if len(set(ids)) > 1:
        raise ParallelError(
            f"the plan did not arrive as it was sent: its programs are {ids}.", ranks.members[owner]
        )
    taken.is_shared = True
    return taken


def same_everywhere(ranks: Ranks, facts: dict[str, str]) -> None:
    """Check that facts are the same on all ranks.

    Args:
        facts: names of facts, and their values on this rank.

    Raises:
        ParallelError: a value differs between ranks.
    """
    for name in facts:
        found = ranks.all(facts[name])
        odd = next((rank for rank, value in enumerate(found) if value != found[0]), None)
        if odd is not None:
            raise ParallelError(
                f"the ranks do not have the same {name}: rank {ranks.members[0]} has {found[0]}, rank "
                f"{ranks.members[odd]} has {found[odd]}.",
                ranks.members[odd],
            )


def facts_of(model: torch.nn.Module, **arguments: Any) -> dict[str, str]:
    """Facts for `same_everywhere`: the model, without wrappers, and the arguments that its plan depends on."""
    return {
        "model (fingerprint)": model_fingerprint(model),
        **{name: _in_words(value) for name, value in arguments.items()},
    }


def _in_words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return str([_in_words(item) for item in value])
    if callable(value):  # a policy function, whose text has its address in it
        return getattr(value, "__qualname__", type(value).__name__)
    try:
        return str(parse_bytes(value))  # "20GB" is 20000000000
    except BudgetFormatError:
        return str(value)


def needs_most(ranks: Ranks, profile: Profile) -> int:
    """Index of the rank whose step keeps the most bytes, as far as known before planning."""
    found = ranks.all(kept_bytes(profile))
    return found.index(max(found))


def for_all(
    ranks: Ranks,
    owner: int,
    model: torch.nn.Module,
    profile: Profile | None,
    make: Callable[[], Plan | None],
    goes_on: bool = False,
) -> Plan:
    """The plan of one rank, for all; that of the rank with the highest peak under it, if that is above the budget.

    Args:
        owner: index of the rank that plans first.
        profile: this rank's step, if it has recorded one.
        make: this rank's plan; called on the rank that plans.
        goes_on: if no plan fits all, go on under the last one, with a warning on the rank that takes the most.

    Raises:
        ParallelError: a rank's step exceeds the budget under the plan for its own step and under that of another.
    """
    for again in (False, True):
        plan = shared(ranks, owner, make() if ranks.rank == owner else None, model)
        record = plan.record
        own = -1 if profile is None or ranks.rank == owner else outcome_of(record, profile).peak_bytes
        peaks = ranks.all(own)
        highest = peaks.index(max(peaks))
        if peaks[highest] <= record.budget_bytes - record.headroom_bytes:
            return plan
        if not again:
            owner = highest
    words = (
        f"the ranks' steps differ so much that no plan fits all: under the plan for rank {ranks.members[owner]}'s "
        f"step, that of rank {ranks.members[highest]} takes {format_bytes(peaks[highest])}, above the budget of "
        f"{format_bytes(record.budget_bytes)}. Give the ranks batches of the same shape, or more memory."
    )
    if not goes_on:
        raise ParallelError(words, ranks.members[highest])
    if ranks.rank == highest:
        warn(words)
    return plan


def solved_by(
    ranks: Ranks,
    owner: int,
    model: torch.nn.Module,
    solve: Callable[[Profile], Plan],
    profile: Profile | None,
) -> Plan:
    """The plan of one rank, for all; nothing is compared with the other ranks' steps.

    Args:
        owner: index of the rank that solves.
        solve: its function from a profile to a plan.
        profile: the owner's.

    Raises:
        InfeasibleBudgetError: no plan fits; on all ranks, with words only on the owner, see `owner_first`.
    """
    plan = error = None
    if ranks.rank == owner:
        assert profile is not None
        try:
            plan = solve(profile)
        except InfeasibleBudgetError as found:
            error = found
    told = ranks.all(None if error is None else (error.budget_bytes, error.minimum_bytes))[owner]
    if told is not None:
        raise error or InfeasibleBudgetError(*told)
    return shared(ranks, owner, plan, model)


@contextlib.contextmanager
def owner_first(ranks: Ranks, owner: int) -> Iterator[None]:
    """Context that no plan's fitting ends on all ranks at once: the error of the one that has words for it is told."""
    try:
        yield
    except InfeasibleBudgetError:
        if ranks.rank != owner:
            ranks.all(None)  # raises it
        raise


def kept_bytes(profile: Profile) -> int:
    """Bytes that a step keeps: resident before it, or saved by autograd."""
    saved = {tensor.storage for tensor in profile.saved}
    return sum(s.bytes for i, s in enumerate(profile.storage_table) if s.alloc == NEVER or i in saved)


def _text_of(plan: Plan) -> str:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        return (Path(folder) / "plan.json").read_text()


def _plan_in(text: str) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_text(text)
        return Plan.load(Path(folder) / "plan.json")
