"""Times fitted to the model: its own steps, plain and with everything recomputed, where the ops are short.

Short ops take longer under a recording than without it, and what the engine's bookkeeping takes between them depends on
what is left in the caches. So where the bookkeeping weighs, the step is run as it will be, without a plan and with one,
and what was measured op by op is scaled to that.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.costs import now
from autoac.plans import Plan
from autoac.recorder import device_of
from autoac.step import Loss, make_step
from autoac.uncompiled import uncompiled
from autoac.untouched import Seen, put_back, tensors_of, untouched
from autoac_solver.partitions import partitions
from autoac_solver.plan_record import make_record
from autoac_solver.planning import Progress
from autoac_solver.problem import Unit
from autoac_solver.profile import NEVER, EngineCosts, Op, Profile
from autoac_solver.simulator import simulate
from autoac_solver.solution import Solution
from autoac_solver.stacking import Stacked, stacked

_WEIGHS = 0.1
"""A smaller share of the step than this is not worth running the step for, nor could it be told from noise."""

_TIME_S = 2.0
_MOST_S = 10.0
_ROUNDS = 3, 15

_MOST = 4.0
"""A larger factor than this, either way, is noise."""


def fitted(
    profile: Profile,
    model: torch.nn.Module,
    sample: Any,
    loss: Loss | None,
    free_bytes: int,
    progress: Progress | None = None,
) -> Profile:
    """The profile with its ops and the bookkeeping of engine replay as they are in the model's own steps.

    It stays as it is where bookkeeping hardly weighs, and where the step should not be run without need: it does not
    fit without a plan, takes too long, may leave a trace, or is one of several processes'. The model and the sample are
    left as they were.

    Args:
        profile: of the model's step with this sample, which is not a callable, and this loss.
        free_bytes: what the device has left.
        progress: called before the step is run.
    """
    stack = stacked(profile, partitions(profile)[0], "replay", ())
    recomputed = _all_that_can_be(stack.built.problem.units, stack.built.loss)
    units = stack.built.problem.units
    again_s = sum(
        profile.tape[op].again_s for u, chosen in enumerate(recomputed) if chosen for op in units[u].ops
    )
    nothing, everything = (simulate(stack.built.problem, d) for d in ([False] * len(recomputed), recomputed))
    bookkeeping_s = everything.extra_s - again_s
    round_s = 2 * profile.step_s + everything.extra_s
    fits = 2 * (nothing.peak_bytes - profile.resident_bytes) < free_bytes and _ROUNDS[0] * round_s < _MOST_S
    weighs = bookkeeping_s > _WEIGHS * profile.step_s
    if not (weighs and fits and _changes_only_buffers(profile) and _can_be_put_back(model)):
        return profile
    if progress is not None:
        progress("steps without and with a plan", 0.97)
    plan = _plan(profile, stack, recomputed)
    rounds = min(max(int(_TIME_S / round_s), _ROUNDS[0]), _ROUNDS[1])
    try:
        plain_s, planned_s = _measured(model, sample, loss, plan, rounds)
    except Exception as error:
        # It is not like the recorded ones, or counts how often it runs: that is no reason to have no profile.
        note = f"the step could not be timed as a whole, times are those of its ops by themselves: {error!r:.300}"
        return replace(profile, notes=(*profile.notes, note))
    ops = _unless_noise(plain_s / profile.step_s)
    replay = _unless_noise((planned_s - plain_s - ops * again_s) / bookkeeping_s)
    return replace(
        profile,
        tape=tuple(_scaled(op, ops) for op in profile.tape),
        views_s=ops * profile.views_s,
        costs=_replay_scaled(profile.costs, replay),
    )


def _all_that_can_be(units: Sequence[Unit], loss: int = -1) -> tuple[bool, ...]:
    """Every unit recomputed that can be recomputed together with the others; not the losses: no engine records them."""
    recomputed = [not unit.must_save and index != loss for index, unit in enumerate(units)]
    settled = False
    while not settled:
        settled = True
        for index, unit in enumerate(units):
            with_it = [*unit.requires, *((unit.same_as,) if unit.same_as >= 0 else ())]
            if recomputed[index] and not all(recomputed[other] for other in with_it):
                recomputed[index] = settled = False
            elif unit.same_as >= 0 and recomputed[unit.same_as] and not recomputed[index]:
                recomputed[unit.same_as] = settled = False
    return tuple(recomputed)


def _changes_only_buffers(profile: Profile) -> bool:
    """Whether the step changes, of what was there before it, nothing but buffers, as far as its ops tell."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False  # all processes would have to run as many steps
    before = {index: s.kind for index, s in enumerate(profile.storage_table) if s.alloc == NEVER}
    if "Gradient" in before.values():
        return False  # the step adds to them, and may read them
    # Statistics are read, as far as the op tells, and so are the weights beside them.
    kinds = {before[s] for op in profile.tape for s in op.writes if s in before}
    beside = {before[s] for op in profile.tape if op.side_effect for s in op.reads if s in before}
    own_generator = any(op.random_bytes and op.side_effect for op in profile.tape)
    return kinds <= {"Buffer"} and beside <= {"Buffer", "Parameter"} and not own_generator


def _can_be_put_back(model: torch.nn.Module) -> bool:
    """Whether the buffers are all that there is of their storages, and may be written."""
    return all(
        buffer.layout is torch.strided
        and buffer.untyped_storage().nbytes() == buffer.nbytes
        and not buffer.is_inference()
        for buffer in model.buffers()
    )


def _plan(profile: Profile, stack: Stacked, recomputed: tuple[bool, ...]) -> Plan:
    timeline = simulate(stack.built.problem, recomputed)
    solution = Solution(recomputed, "feasible", timeline.peak_bytes, timeline.extra_s, 0.0, 0.0, "", 0, 0.0)
    return Plan(make_record(profile, stack, solution, timeline.peak_bytes, 0, "to time it"))


def _measured(
    model: torch.nn.Module, sample: Any, loss: Loss | None, plan: Plan, rounds: int
) -> tuple[float, float]:
    """Seconds of a step without the plan, and of one with it, from steps that take turns.

    Raises:
        RuntimeError: a step runs other ops than the recorded one did.
    """
    device = device_of(model)
    leaves = [t for t in (*model.parameters(), *tensors_of(sample)) if t.is_leaf]
    step = make_step(model, sample, loss)

    def timed() -> float:
        for leaf in leaves:
            leaf.grad = None
        with untouched(model, sample):  # the random numbers of the recorded step, and with them its ops
            start = now(device)
            step()
            return now(device) - start

    plain: list[float] = []
    planned: list[float] = []
    with untouched(model, sample), _kept(model), uncompiled(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training will say it, to whom it concerns
        for _ in range(1 + rounds):
            plain.append(timed())
            with plan.applied(model):
                planned.append(timed())
            if plan.is_not_followed:
                raise RuntimeError("its steps run other ops than the recorded one did")
    pairs = list(zip(plain, planned, strict=True))[1:]
    plain_s = statistics.median(without for without, _ in pairs)
    return plain_s, plain_s + statistics.median(with_it - without for without, with_it in pairs)


@contextlib.contextmanager
def _kept(model: torch.nn.Module) -> Iterator[None]:
    """Context after which parameters and buffers have the values that they had before."""
    copies = [(buffer, Seen.of(buffer), buffer.detach().clone()) for buffer in model.buffers()]
    datas = [(parameter, parameter.data) for parameter in model.parameters()]

    def restore(buffer: torch.Tensor, seen: Seen, copy: torch.Tensor) -> None:
        seen.put_back()
        if not torch.equal(buffer, copy):
            buffer.data.copy_(copy)  # uncounted: a graph that holds it finds what it held

    def restore_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data

    try:
        yield
    finally:
        put_back(
            [
                *(functools.partial(restore, *pair) for pair in copies),
                *(functools.partial(restore_data, *pair) for pair in datas),
            ]
        )


def _unless_noise(factor: float) -> float:
    return factor if 1 / _MOST <= factor <= _MOST else 1.0


def _scaled(op: Op, factor: float) -> Op:
    return replace(op, time_s=factor * op.time_s, spread_s=factor * op.spread_s, rerun_s=factor * op.rerun_s)


def _replay_scaled(costs: EngineCosts, factor: float) -> EngineCosts:
    return replace(
        costs,
        replay_op=factor * costs.replay_op,
        replay_record=factor * costs.replay_record,
        replay_saved=factor * costs.replay_saved,
        replay_call=factor * costs.replay_call,
        replay_pause=factor * costs.replay_pause,
    )
