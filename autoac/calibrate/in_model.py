"""Fits engine costs and op times to the model's own steps, if bookkeeping is a noticeable share of them.

The engine's bookkeeping time between a model's ops depends on what the ops leave in the caches. So the model's forward
runs with its regions wrapped, and the costs measured on chains of tiny ops are scaled to the result. If the ops are so
short that they, too, take longer under a recording than without it, whole steps run without and with a plan, and the
times of ops are scaled as well.

The forward passes have no backward, as in a model that is evaluated with gradients on. Code that stores things for
backward outside of the graph would find more there than it expects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.device import device_for
from autoac.measure import in_turn, seconds_of
from autoac.plans import Plan
from autoac.price.meters import without_waiting
from autoac.progress import Tell
from autoac.step.model import device_of
from autoac.step.restore import untouched
from autoac.step.step import TrainingStep
from autoac.step.trial import trial
from autoac.step.uncompiled import uncompiled
from autoac.torch_private import has_process_group
from autoac_solver.build.engine_model import costs_of
from autoac_solver.build.engines import DEFAULT, engine_model, planned_for
from autoac_solver.build.stacking import Stacked, stacked
from autoac_solver.optimise.algebra import brought_along
from autoac_solver.plan.partitions import partitions
from autoac_solver.plan.recorded.made import make_record
from autoac_solver.plan.recorded.programs import with_regions
from autoac_solver.problem.problem import RECOMPUTE, SAVE, DecisionGroup
from autoac_solver.problem.simulator import simulate
from autoac_solver.problem.solution import Solution
from autoac_solver.records.profile import FOREIGN, NEVER, EngineCosts, Op, Profile

_WEIGHS = 0.1
"""Bookkeeping below this share of the step is within the noise of whole steps."""
_COUNTS = 0.003
"""Bookkeeping below this share of the step does not matter."""

_TIME_S = 2.0
_MOST_S = 10.0
_ROUNDS = 3, 15
_FORWARD_TIME_S = 5.0
_FORWARD_ROUNDS = 3, 5
_PASSES = 4
"""Forward passes per round of `_measured_forward`."""
_MANY = 8
"""With at least this many modules the machine's drift cancels within a pass, see `_measured_forward`."""
_CHAINS_ERROR = 0.4
"""Relative standard error of bookkeeping costs from chains of tiny ops, against those between a model's ops.

Observed on three models.
"""

_MOST = 4.0
"""A factor above this, or below its inverse, is noise."""


def fitted(
    profile: Profile,
    step: TrainingStep,
    free_bytes: int,
    progress: Tell | None = None,
    engine: str = DEFAULT,
) -> Profile:
    """The profile with engine costs, and op times if bookkeeping is a large share, fitted to the model's own steps.

    The profile is returned unchanged if bookkeeping is negligible, or if the model should not be run without need: its
    step does not fit without a plan, takes too long, may leave a trace, or is one of several processes'. The model and
    the sample are restored.

    Args:
        profile: of this step, whose sample is not a callable.
        free_bytes: free memory of the device.
        progress: called with the current work and the share of it that is done.
        engine: whose costs are fitted.
    """
    tell = progress or (lambda *_: None)
    stack = stacked(profile, partitions(profile)[0], engine, ())
    groups = stack.built.problem.groups
    most = _all_that_can_be(groups, stack.built.loss)
    nothing, everything = (simulate(stack.built.problem, d) for d in ([SAVE] * len(groups), most))
    fits = 2 * (nothing.peak_bytes - profile.resident_bytes) < free_bytes
    if not (fits and _changes_only_buffers(profile, step.model) and _can_be_put_back(step.model)):
        return profile
    recomputed = {
        op for group, option in zip(groups, most, strict=True) if option == RECOMPUTE for op in group.ops
    }
    for region in stack.built.regions:
        recomputed -= set(itertools.compress(region.ops, region.free_of_choice))
    again_s = sum(profile.tape[op].again_s for op in recomputed)
    bookkeeping_s = everything.extra_s - again_s
    round_s = 2 * profile.step_s + everything.extra_s
    if bookkeeping_s > _WEIGHS * profile.step_s and _ROUNDS[0] * round_s < _MOST_S:
        plan = _plan(profile, stack, most)
        rounds = min(max(int(_TIME_S / round_s), _ROUNDS[0]), _ROUNDS[1])
        try:
            plain_s, planned_s = _measured(step, plan, rounds, tell)
        except Exception as error:
            # The step differs from the recorded ones, or counts its runs. The profile is still of use.
            what = "the step could not be timed as a whole, times are those of its ops by themselves"
            return _noted(profile, what, error)
        ops = _unless_noise(plain_s / profile.step_s)
        factor = _unless_noise((planned_s - plain_s - ops * again_s) / bookkeeping_s)
        if profile.has_two_clocks:  # a plan's extra time is no sum there
            factor = 1.0
        costs = dataclasses.asdict(costs_of(profile, engine, engine_model(engine).costs))
        return replace(
            profile,
            tape=tuple(_scaled(op, ops) for op in profile.tape),
            views_s=ops * profile.views_s,
            costs=profile.costs | {engine: {part: factor * cost for part, cost in costs.items()}},
        )
    # On an asynchronous device, forward ends on the host before it ends on the device.
    on_host = device_for(torch.device(profile.device)).on_hosts_processors
    if bookkeeping_s > _COUNTS * profile.step_s and on_host and engine == DEFAULT:
        return _fitted_to_forward(profile, step, tell)
    return profile


def _fitted_to_forward(profile: Profile, step: TrainingStep, tell: Tell) -> Profile:
    """The profile with the costs of wrapping fitted to the model's forward, as far as these can be measured."""
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
    # Both estimates, weighted by their inverse variances.
    chains, in_place = error_s**2, (_CHAINS_ERROR * said_s) ** 2
    likely_s = (chains * said_s + in_place * wrapping_s) / (chains + in_place)
    factor = _unless_noise(likely_s / said_s)
    return replace(profile, costs=_wrapping_scaled(profile, factor))


def _many_regions(profile: Profile) -> tuple[int, ...]:
    """The coarsest choice of regions with enough modules, or else the one with most, within one call of the model.

    Calls by the loss are left out: it is not run here.
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
    """Decisions that recompute all groups that can be recomputed together, except losses: no engine records them."""
    saved = [group.must_save or index == loss for index, group in enumerate(groups)]
    brings = brought_along(groups)
    return tuple(SAVE if any(saved[other] for other in brought) else RECOMPUTE for brought in brings)


def _changes_only_buffers(profile: Profile, model: torch.nn.Module) -> bool:
    """Whether the step writes no earlier tensor except buffers."""
    if any(call.once == FOREIGN for call in profile.calls):
        return False  # code that torch does not see writes others, perhaps parameters
    if has_process_group():
        return False  # all processes would have to run equally many steps
    before = {index: s.kind for index, s in enumerate(profile.storage_table) if s.alloc == NEVER}
    if "Gradient" in before.values():
        return False  # the step adds to them, and may read them
    # Ops with side effects read weights. Statistics that they update are in neither list of the tape, and may be
    # tensors that are no buffers.
    with_side_effects = [op for op in profile.tape if op.side_effect]
    if with_side_effects and any(
        isinstance(value, torch.Tensor) for m in model.modules() for value in vars(m).values()
    ):
        return False
    kinds = {before[s] for op in profile.tape for s in op.writes if s in before}
    beside = {before[s] for op in with_side_effects for s in op.reads if s in before}
    own_generator = any(op.random_bytes and op.side_effect for op in profile.tape)
    return kinds <= {"Buffer"} and beside <= {"Buffer", "Parameter"} and not own_generator


def _can_be_put_back(model: torch.nn.Module) -> bool:
    """Whether every buffer spans its whole storage, and may be written."""
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
    step: TrainingStep, plan: Plan, rounds: int, tell: Tell = lambda *_: None
) -> tuple[float, float]:
    """Seconds of a step without the plan and of one with it, from interleaved steps.

    Raises:
        RuntimeError: a step runs other ops than the recorded one did.
    """
    model = step.model
    where = device_of(model)
    leaves = [t for t in (*model.parameters(), *step.inputs) if t.is_leaf]

    def timed() -> float:
        for leaf in leaves:
            leaf.grad = None
        with untouched(model, step.inputs):  # random numbers, and so ops, of the recorded step
            return without_waiting(lambda: (None, seconds_of(step.run, 1, where)[0]), where)[1]

    def planned() -> float:
        with plan.placement.unlooked(), plan.applied(model):
            taken = timed()
        if plan.is_not_followed:
            raise RuntimeError("its steps run other ops than the recorded one did")
        return taken

    with (
        trial(model, step.inputs, model.buffers(), places=model.parameters()),
        uncompiled(model),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # training will issue them
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
    """The profile's prediction of what `_measured_forward` measures, seconds."""
    wrapping_s = sum(region.wrap_s for region in stack.built.problem.regions)
    calls = [profile.calls[region.call] for region in stack.built.regions]
    saved = sum(call.start <= tensor.tick < call.end for call in calls for tensor in profile.saved)
    saved_s = costs_of(profile, DEFAULT, engine_model(DEFAULT).costs).saved
    return wrapping_s - saved * saved_s / 2  # the half for unpacking is in backward


def _measured_forward(
    step: TrainingStep, plan: Plan, rounds: int, tell: Tell = lambda *_: None
) -> tuple[float, float]:
    """Seconds that wrapping all of the plan's regions, with nothing recorded, adds to forward; and the standard error.

    Every other module is wrapped in the first and the fourth pass of a round, the others in the second and the third.
    Each module's time with wrapping is compared with its time without. So the machine's drift, which is larger than the
    result, cancels: steady drift for each module, other drift between the two halves.

    Raises:
        RuntimeError: a pass runs other ops than the recorded step did, or runs a region without calling its module.
    """
    model = step.model
    names = list(dict.fromkeys(region.fqn for region in plan.record.regions))
    first, second = ((names[k::2], _plan_wrapping(plan, names[k::2])) for k in (0, 1))
    with (
        trial(model, step.inputs, model.buffers(), places=model.parameters()),
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

        def extra_s(wrapped: Sequence[str], half: Plan) -> dict[str, float]:
            """Seconds of each wrapped module, and those of the others, which count as less."""
            run(half)
            return {name: seconds[name] if name in wrapped else -seconds[name] for name in names}

        what = "forward passes with regions wrapped"
        tell(what, 0.0)
        for _, half in (first, second):
            run(half)  # one-time setup
        found = in_turn(
            {
                index: functools.partial(extra_s, *half)
                for index, half in enumerate((first, second, second, first))
            },
            rounds,
            after_round=lambda done: tell(what, (1 + done) / (1 + rounds)),
        )
    extra = {
        name: [sum(a[name] for a in passes) / 2 for passes in zip(*found.values(), strict=True)]
        for name in names
    }
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
    """Context without garbage collection, which would add some 100 ms to one module's call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _timed_modules(model: torch.nn.Module, names: Sequence[str]) -> Iterator[dict[str, float]]:
    """Context that yields seconds by module name, to which each call of these modules adds its time."""
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
    """The costs of all engines, with those of wrapping scaled.

    Engines that were not measured are scaled as well: their bookkeeping finds the same caches.
    """
    costs = {
        name: dataclasses.asdict(costs_of(profile, name, engine_model(name).costs)) for name in planned_for()
    }
    return profile.costs | {
        name: {part: cost if part == "record" else factor * cost for part, cost in parts.items()}
        for name, parts in costs.items()
        if parts
    }
