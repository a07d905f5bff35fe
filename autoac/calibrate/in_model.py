"""Times fitted to the model's own steps, where the engine's bookkeeping weighs.

What the bookkeeping takes between a model's ops depends on what these leave in the caches. So the model's forward is
run with its regions wrapped, and what was measured on chains of tiny ops is scaled to that. Where the ops are so short
that they, too, take longer under a recording than without it, whole steps are run, without a plan and with one, and
what was measured op by op is scaled as well.

Forward passes that no backward follows are what a model runs that is evaluated with gradients on. Code that leaves
things for backward in some place of its own, outside of the graph, would find more there than it expects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.device import device_for
from autoac.measure import in_turn
from autoac.plans import Plan
from autoac.step.model import device_of
from autoac.step.restore import untouched, values_kept
from autoac.step.step import TrainingStep
from autoac.step.uncompiled import uncompiled
from autoac_solver.build.engine_model import costs_of
from autoac_solver.build.engines import DEFAULT, engine_model, planned_for
from autoac_solver.build.stacking import Stacked, stacked
from autoac_solver.optimise.algebra import brought_along
from autoac_solver.plan.partitions import partitions
from autoac_solver.plan.planning import Progress
from autoac_solver.plan.recorded.made import make_record
from autoac_solver.plan.recorded.programs import with_regions
from autoac_solver.problem.problem import RECOMPUTE, SAVE, DecisionGroup
from autoac_solver.problem.simulator import simulate
from autoac_solver.problem.solution import Solution
from autoac_solver.records.profile import NEVER, EngineCosts, Op, Profile

_WEIGHS = 0.1
"""Bookkeeping of a smaller share of the step than this cannot be told from the noise of whole steps."""
_COUNTS = 0.003
"""Of a smaller share than this it does not matter."""

_TIME_S = 2.0
_MOST_S = 10.0
_ROUNDS = 3, 15
_FORWARD_TIME_S = 5.0
_FORWARD_ROUNDS = 3, 5
_PASSES = 4
"""Of a round in `_measured_forward`."""
_MANY = 8
"""With so many modules the machine's drift cancels within a pass, see `_measured_forward`."""
_CHAINS_ERROR = 0.4
"""How far off, relatively, chains of tiny ops tell what the bookkeeping takes between a model's ops: standard error,
seen of three models."""

_MOST = 4.0
"""A larger factor than this, either way, is noise."""


def fitted(
    profile: Profile,
    step: TrainingStep,
    free_bytes: int,
    progress: Progress | None = None,
) -> Profile:
    """The profile with the engines' bookkeeping, and where that weighs much its ops, as in the model's own steps.

    It stays as it is where bookkeeping hardly counts, and where the model should not be run without need: its step does
    not fit without a plan, takes too long, may leave a trace, or is one of several processes'. The model and the sample
    are left as they were.

    Args:
        profile: of this step, whose sample is not a callable.
        free_bytes: what the device has left.
        progress: called with what is run and the share done of that.
    """
    tell = progress or (lambda *_: None)
    stack = stacked(profile, partitions(profile)[0], DEFAULT, ())
    groups = stack.built.problem.groups
    most = _all_that_can_be(groups, stack.built.loss)
    nothing, everything = (simulate(stack.built.problem, d) for d in ([SAVE] * len(groups), most))
    fits = 2 * (nothing.peak_bytes - profile.resident_bytes) < free_bytes
    if not (fits and _changes_only_buffers(profile) and _can_be_put_back(step.model)):
        return profile
    again_s = sum(
        profile.tape[op].again_s
        for group, option in zip(groups, most, strict=True)
        if option == RECOMPUTE
        for op in group.ops
    )
    bookkeeping_s = everything.extra_s - again_s
    round_s = 2 * profile.step_s + everything.extra_s
    if bookkeeping_s > _WEIGHS * profile.step_s and _ROUNDS[0] * round_s < _MOST_S:
        plan = _plan(profile, stack, most)
        rounds = min(max(int(_TIME_S / round_s), _ROUNDS[0]), _ROUNDS[1])
        try:
            plain_s, planned_s = _measured(step, plan, rounds, tell)
        except Exception as error:
            # It is not like the recorded ones, or counts how often it runs: that is no reason to have no profile.
            what = "the step could not be timed as a whole, times are those of its ops by themselves"
            return _noted(profile, what, error)
        ops = _unless_noise(plain_s / profile.step_s)
        factor = _unless_noise((planned_s - plain_s - ops * again_s) / bookkeeping_s)
        if profile.has_two_clocks:  # what a plan adds to a step is no sum there
            factor = 1.0
        costs = dataclasses.asdict(costs_of(profile, DEFAULT, engine_model(DEFAULT).costs))
        return replace(
            profile,
            tape=tuple(_scaled(op, ops) for op in profile.tape),
            views_s=ops * profile.views_s,
            costs=profile.costs | {DEFAULT: {part: factor * cost for part, cost in costs.items()}},
        )
    # On other devices forward is over for the host before it is for them.
    if bookkeeping_s > _COUNTS * profile.step_s and torch.device(profile.device).type == "cpu":
        return _fitted_to_forward(profile, step, tell)
    return profile


def _fitted_to_forward(profile: Profile, step: TrainingStep, tell: Progress) -> Profile:
    """The profile with the costs of wrapping as they are in the model's forward, as far as that can be measured."""
    round_s = _PASSES * sum(op.time_s for op in profile.tape if not op.backward)
    stack = stacked(profile, _many_regions(profile), DEFAULT, ())
    said_s = _forward_wrapping_s(profile, stack)
    if _FORWARD_ROUNDS[0] * round_s > _MOST_S or said_s <= 0:
        return profile
    plan = _plan(profile, stack, (SAVE,) * len(stack.built.problem.groups))
    rounds = min(max(int(_FORWARD_TIME_S / round_s), _FORWARD_ROUNDS[0]), _FORWARD_ROUNDS[1])
    try:
        wrapping_s, error_s = _measured_forward(step, plan, rounds, tell)
    except Exception as error:
        what = "what the engine's bookkeeping takes could not be measured in the model's forward, it is an estimate"
        return _noted(profile, what, error)
    # Both count, by how exact they are.
    chains, in_place = error_s**2, (_CHAINS_ERROR * said_s) ** 2
    likely_s = (chains * said_s + in_place * wrapping_s) / (chains + in_place)
    factor = _unless_noise(likely_s / said_s)
    return replace(profile, costs=_wrapping_scaled(profile, factor))


def _many_regions(profile: Profile) -> tuple[int, ...]:
    """The coarsest choice of regions that are many enough, or else the one with most, of a call of the model.

    What the loss calls besides is left out: it is not run here.
    """
    root = next((call for call in profile.calls if not call.fqn), None)
    if root is None:
        return ()
    within = [
        tuple(index for index in calls if root.start <= profile.calls[index].start < root.end)
        for calls in partitions(profile)
    ]

    def modules(calls: tuple[int, ...]) -> int:
        return len({profile.calls[index].fqn for index in calls})

    return next((calls for calls in within if modules(calls) >= _MANY), max(within, key=modules))


def _noted(profile: Profile, what: str, error: Exception) -> Profile:
    return replace(profile, notes=(*profile.notes, f"{what}: {error!r:.300}"))


def _all_that_can_be(groups: Sequence[DecisionGroup], loss: int = -1) -> tuple[int, ...]:
    """Every group recomputed that can be together with the others; not the losses: no engine records them."""
    saved = [group.must_save or index == loss for index, group in enumerate(groups)]
    brings = brought_along(groups)
    return tuple(SAVE if any(saved[other] for other in brought) else RECOMPUTE for brought in brings)


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


def _plan(profile: Profile, stack: Stacked, decisions: tuple[int, ...]) -> Plan:
    timeline = simulate(stack.built.problem, decisions)
    solution = Solution(decisions, "feasible", timeline.peak_bytes, timeline.extra_s, 0.0, 0.0, "", 0, 0.0)
    return Plan(make_record(profile, stack, solution, timeline.peak_bytes, 0, "to time it"))


def _measured(
    step: TrainingStep, plan: Plan, rounds: int, tell: Progress = lambda *_: None
) -> tuple[float, float]:
    """Seconds of a step without the plan, and of one with it, from steps that take turns; each round is told.

    Raises:
        RuntimeError: a step runs other ops than the recorded one did.
    """
    model = step.model
    device = device_for(device_of(model))
    leaves = [t for t in (*model.parameters(), *step.inputs) if t.is_leaf]

    def timed() -> float:
        for leaf in leaves:
            leaf.grad = None
        with untouched(model, step.inputs):  # the random numbers of the recorded step, and with them its ops
            start = device.now()
            step.run()
            return device.now() - start

    def planned() -> float:
        with plan.placement.unlooked(), plan.applied(model):
            taken = timed()
        if plan.is_not_followed:
            raise RuntimeError("its steps run other ops than the recorded one did")
        return taken

    with (
        untouched(model, step.inputs),
        values_kept(model.buffers(), places=model.parameters()),
        uncompiled(model),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # training will say it, to whom it concerns
        what = "steps without and with a plan"
        tell(what, 0.0)
        taken = in_turn(
            {"plain": timed, "planned": planned},
            1 + rounds,
            after_round=lambda done: tell(what, done / (1 + rounds)),
        )
    pairs = list(zip(taken["plain"], taken["planned"], strict=True))[1:]
    plain_s = statistics.median(without for without, _ in pairs)
    return plain_s, plain_s + statistics.median(with_it - without for without, with_it in pairs)


def _forward_wrapping_s(profile: Profile, stack: Stacked) -> float:
    """Seconds that the profile says of what `_measured_forward` measures."""
    wrapping_s = sum(region.wrap_s for region in stack.built.problem.regions)
    calls = [profile.calls[region.call] for region in stack.built.regions]
    saved = sum(call.start <= tensor.tick < call.end for call in calls for tensor in profile.saved)
    saved_s = costs_of(profile, DEFAULT, engine_model(DEFAULT).costs).saved
    return wrapping_s - saved * saved_s / 2  # they are unpacked in backward


def _measured_forward(
    step: TrainingStep, plan: Plan, rounds: int, tell: Progress = lambda *_: None
) -> tuple[float, float]:
    """Seconds that wrapping all of the plan's regions, with nothing recorded, takes in forward, and the standard error.

    Every other module is wrapped in the first and the fourth pass of a round, the others in the second and the third.
    What a module takes with and without is compared. So the machine's drift, which is larger than the whole, cancels:
    for each module as far as it is steady, and else between the two halves.

    Raises:
        RuntimeError: a pass runs other ops than the recorded step did, or runs regions other than by calling them.
    """
    model = step.model
    names = list(dict.fromkeys(region.fqn for region in plan.record.regions))
    first, second = ((names[k::2], _plan_wrapping(plan, names[k::2])) for k in (0, 1))
    extra: dict[str, list[float]] = {name: [] for name in names}
    with (
        untouched(model, step.inputs),
        values_kept(model.buffers(), places=model.parameters()),
        uncompiled(model),
        warnings.catch_warnings(),
        _timed_modules(model, names) as seconds,
        _not_collecting(),
    ):
        warnings.simplefilter("ignore")  # as in `_measured`

        def run(half: Plan) -> None:
            seconds.update(dict.fromkeys(names, 0.0))
            with half.placement.unlooked(), half.applied(model), untouched(model, step.inputs):
                step.forward()
            if half.is_not_followed:
                raise RuntimeError("its forward runs other ops than that of the recorded step did")
            if not all(taken > 0 for taken in seconds.values()):
                raise RuntimeError("it runs the forward of modules without calling them")

        what = "forward passes with regions wrapped"
        tell(what, 0.0)
        for _, half in (first, second):
            run(half)  # sets up what is set up once
        for index in range(rounds):
            tell(what, (1 + index) / (1 + rounds))
            round_s = dict.fromkeys(names, 0.0)
            for wrapped, half in (first, second, second, first):
                run(half)
                for name in names:
                    round_s[name] += seconds[name] if name in wrapped else -seconds[name]
            for name in names:
                extra[name].append(round_s[name] / 2)
    error_s = (sum(map(statistics.variance, extra.values())) / rounds) ** 0.5
    return sum(map(statistics.median, extra.values())), error_s


def _plan_wrapping(plan: Plan, names: Sequence[str]) -> Plan:
    """The plan with the regions of these modules wrapped, the others not, and nothing recomputed."""
    regions = [
        replace(region, wrapped=region.fqn in names, steps=tuple((op, False) for op, _ in region.steps))
        for region in plan.record.regions
    ]
    return Plan(replace(with_regions(plan.record, regions), chunked_losses=False))


@contextlib.contextmanager
def _not_collecting() -> Iterator[None]:
    """Context in which no garbage is collected: one module's call would be charged for it, with some 100 ms."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _timed_modules(model: torch.nn.Module, names: Sequence[str]) -> Iterator[dict[str, float]]:
    """Context in which the calls of these modules add their seconds to what it gives."""
    seconds: dict[str, float] = {}

    def started(name: str, *_: Any) -> None:
        seconds[name] -= time.perf_counter()

    def ended(name: str, *_: Any) -> None:
        seconds[name] += time.perf_counter()

    with contextlib.ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(functools.partial(started, name)).remove)
            hook = module.register_forward_hook(functools.partial(ended, name), always_call=True)
            hooks.callback(hook.remove)
        yield seconds


def _unless_noise(factor: float) -> float:
    return factor if 1 / _MOST <= factor <= _MOST else 1.0


def _scaled(op: Op, factor: float) -> Op:
    return replace(
        op,
        time_s=factor * op.time_s,
        spread_s=factor * op.spread_s,
        rerun_s=factor * op.rerun_s,
        host_s=factor * op.host_s,
    )


def _wrapping_scaled(profile: Profile, factor: float) -> EngineCosts:
    """The engines' costs with those of wrapping multiplied.

    Also of the engines that were not measured: the caches that their bookkeeping finds are the same.
    """
    costs = {
        name: dataclasses.asdict(costs_of(profile, name, engine_model(name).costs)) for name in planned_for()
    }
    return profile.costs | {
        name: {part: cost if part == "record" else factor * cost for part, cost in parts.items()}
        for name, parts in costs.items()
        if parts
    }
