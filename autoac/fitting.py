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
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.costs import now
from autoac.plans import Plan
from autoac.recorder import device_of
from autoac.step import Loss, call_model, make_step
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

_OF_REPLAY = ("replay_op", "replay_record", "replay_saved", "replay_call", "replay_pause")
_OF_WRAPPING = (
    "replay_op",
    "replay_saved",
    "replay_call",
    "replay_pause",
    "sac_op",
    "sac_saved",
    "sac_call",
)
"""What is scaled by what wrapping takes in forward. Of engine sac, too, which is not measured: the caches that its
bookkeeping finds are the same."""


def fitted(
    profile: Profile,
    model: torch.nn.Module,
    sample: Any,
    loss: Loss | None,
    free_bytes: int,
    progress: Progress | None = None,
) -> Profile:
    """The profile with the engines' bookkeeping, and where that weighs much its ops, as in the model's own steps.

    It stays as it is where bookkeeping hardly counts, and where the model should not be run without need: its step does
    not fit without a plan, takes too long, may leave a trace, or is one of several processes'. The model and the sample
    are left as they were.

    Args:
        profile: of the model's step with this sample, which is not a callable, and this loss.
        free_bytes: what the device has left.
        progress: called before the model is run.
    """
    stack = stacked(profile, partitions(profile)[0], "replay", ())
    recomputed = _all_that_can_be(stack.built.problem.units, stack.built.loss)
    nothing, everything = (simulate(stack.built.problem, d) for d in ([False] * len(recomputed), recomputed))
    fits = 2 * (nothing.peak_bytes - profile.resident_bytes) < free_bytes
    if not (fits and _changes_only_buffers(profile) and _can_be_put_back(model)):
        return profile
    units = stack.built.problem.units
    again_s = sum(
        profile.tape[op].again_s for u, chosen in enumerate(recomputed) if chosen for op in units[u].ops
    )
    bookkeeping_s = everything.extra_s - again_s
    round_s = 2 * profile.step_s + everything.extra_s
    if bookkeeping_s > _WEIGHS * profile.step_s and _ROUNDS[0] * round_s < _MOST_S:
        if progress is not None:
            progress("steps without and with a plan", 0.97)
        plan = _plan(profile, stack, recomputed)
        rounds = min(max(int(_TIME_S / round_s), _ROUNDS[0]), _ROUNDS[1])
        try:
            plain_s, planned_s = _measured(model, sample, loss, plan, rounds)
        except Exception as error:
            # It is not like the recorded ones, or counts how often it runs: that is no reason to have no profile.
            what = "the step could not be timed as a whole, times are those of its ops by themselves"
            return _noted(profile, what, error)
        ops = _unless_noise(plain_s / profile.step_s)
        replay = _unless_noise((planned_s - plain_s - ops * again_s) / bookkeeping_s)
        return replace(
            profile,
            tape=tuple(_scaled(op, ops) for op in profile.tape),
            views_s=ops * profile.views_s,
            costs=_scaled_costs(profile.costs, replay, _OF_REPLAY),
        )
    # On other devices forward is over for the host before it is for them.
    if bookkeeping_s > _COUNTS * profile.step_s and torch.device(profile.device).type == "cpu":
        return _fitted_to_forward(profile, model, sample, progress)
    return profile


def _fitted_to_forward(
    profile: Profile, model: torch.nn.Module, sample: Any, progress: Progress | None
) -> Profile:
    """The profile with the costs of wrapping as they are in the model's forward, as far as that can be measured."""
    round_s = _PASSES * sum(op.time_s for op in profile.tape if not op.backward)
    stack = stacked(profile, _many_regions(profile), "replay", ())
    said_s = _forward_wrapping_s(profile, stack)
    if _FORWARD_ROUNDS[0] * round_s > _MOST_S or said_s <= 0:
        return profile
    if progress is not None:
        progress("forward passes with regions wrapped", 0.97)
    plan = _plan(profile, stack, (False,) * len(stack.built.problem.units))
    rounds = min(max(int(_FORWARD_TIME_S / round_s), _FORWARD_ROUNDS[0]), _FORWARD_ROUNDS[1])
    try:
        wrapping_s, error_s = _measured_forward(model, sample, plan, rounds)
    except Exception as error:
        what = "what the engine's bookkeeping takes could not be measured in the model's forward, it is an estimate"
        return _noted(profile, what, error)
    # Both count, by how exact they are.
    chains, in_place = error_s**2, (_CHAINS_ERROR * said_s) ** 2
    likely_s = (chains * said_s + in_place * wrapping_s) / (chains + in_place)
    factor = _unless_noise(likely_s / said_s)
    return replace(profile, costs=_scaled_costs(profile.costs, factor, _OF_WRAPPING))


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


def _forward_wrapping_s(profile: Profile, stack: Stacked) -> float:
    """Seconds that the profile says of what `_measured_forward` measures."""
    wrapping_s = sum(region.wrap_s for region in stack.built.problem.regions)
    calls = [profile.calls[region.call] for region in stack.built.regions]
    saved = sum(call.start <= tensor.tick < call.end for call in calls for tensor in profile.saved)
    return wrapping_s - saved * profile.costs.replay_saved / 2  # they are unpacked in backward


def _measured_forward(model: torch.nn.Module, sample: Any, plan: Plan, rounds: int) -> tuple[float, float]:
    """Seconds that wrapping all of the plan's regions, with nothing recorded, takes in forward, and the standard error.

    Every other module is wrapped in the first and the fourth pass of a round, the others in the second and the third.
    What a module takes with and without is compared. So the machine's drift, which is larger than the whole, cancels:
    for each module as far as it is steady, and else between the two halves.

    Raises:
        RuntimeError: a pass runs other ops than the recorded step did, or runs regions other than by calling them.
    """
    names = list(dict.fromkeys(region.fqn for region in plan.record.regions))
    first, second = ((names[k::2], _plan_wrapping(plan, names[k::2])) for k in (0, 1))
    extra: dict[str, list[float]] = {name: [] for name in names}
    with (
        untouched(model, sample),
        _kept(model),
        uncompiled(model),
        warnings.catch_warnings(),
        _timed_modules(model, names) as seconds,
        _not_collecting(),
    ):
        warnings.simplefilter("ignore")  # as in `_measured`

        def run(half: Plan) -> None:
            seconds.update(dict.fromkeys(names, 0.0))
            with half.applied(model), untouched(model, sample):
                call_model(model, sample)
            if half.is_not_followed:
                raise RuntimeError("its forward runs other ops than that of the recorded step did")
            if not all(taken > 0 for taken in seconds.values()):
                raise RuntimeError("it runs the forward of modules without calling them")

        for _, half in (first, second):
            run(half)  # sets up what is set up once
        for _ in range(rounds):
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
    return Plan(replace(plan.record, regions=tuple(regions), chunked_losses=False))


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


def _scaled_costs(costs: EngineCosts, factor: float, names: Sequence[str]) -> EngineCosts:
    return replace(costs, **{name: factor * getattr(costs, name) for name in names})
