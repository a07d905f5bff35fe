"""The problem with compiled regions: one group per region, whose options are the region's measured points.

NOTE [ Memory of a compiled region ]
  The tape shows a region's ops one by one; compiled, the region is one forward and one backward function. Storages that
  the tape shows inside it are ignored.
  1. While its forward runs, `forward_bytes` are alive on top of everything alive at its start. Storages that the tape
     frees during it live to its end.
  2. From there to the end of its backward, `kept_bytes` are alive. Inputs and outputs live as long if it holds them.
     A tail is the last to run in a call, and outputs that it holds are among its `kept_bytes`: a step that takes the
     loss only drops the logits in the tail's own window, as the tape shows it, and code holds them on.
  3. While its backward runs, from the first unpack to the last release of its saved tensors on the tape,
     `backward_bytes` are alive in addition. Storages that the tape allocates there and that outlive it (gradients)
     start at its end.
  4. Code frees its outputs and their gradients on the way if nothing else holds them, and takes `sole_backward_bytes`.
     So it is if the tape shows that the region reads gradients made before its backward, that all of them are gone
     when it ends, and so are its outputs. It is never less than `backward_bytes` by more than what is freed.
     Code needs a dense gradient of each output, and makes it if it is given none of an output's size: a copy of one
     that is expanded or a slice. For an output that nobody uses, compiled code makes zeros.
  5. If a step was measured to take less than predicted, what is resident counts as so much less, and if that is not
     enough, so do the bytes of backward.

NOTE [ Regions that are not compiled ]
  Engine replay runs them, with decisions on their individual values. So the axis, the groups and the lifetimes are
  those of replay for a step with only these regions; compiled regions are added on top. The groups of the compiled
  regions come after those of replay and of the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoac_solver.build.axis import Axis
from autoac_solver.build.built import Built, RegionTape
from autoac_solver.build.draft import Draft, Use
from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.engines.replay import Replay, lives_of, lives_of_ops
from autoac_solver.build.groups import Groups
from autoac_solver.build.losses.chunked import (
    LOSS,
    decided_losses,
    loss_group,
    ops_of,
    with_chunked_losses,
)
from autoac_solver.build.regions import Region, choose_regions
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import (
    Action,
    Condition,
    DecisionGroup,
    Extension,
    Lifetime,
    Literal,
    Option,
    Problem,
    RegionCost,
)
from autoac_solver.records.compiled import EAGER, CompiledPoint, undominated
from autoac_solver.records.errors import NotCompiledError
from autoac_solver.records.profile import NEVER, Profile

_REPLAY = Replay()


@dataclass(frozen=True)
class _Compiled:
    """A compiled region.

    Attributes:
        points: fastest first.
        forward, backward: its windows, positions [start, end).
        gradient_bytes, output_bytes: bytes of the gradients that it is given, and of its outputs, if nobody else holds
            any of them when its backward ends; else None.
        copied_bytes, zeros_bytes: bytes of the dense gradients that code makes before its backward.
        outputs: storages.
    """

    region: Region
    points: tuple[CompiledPoint, ...]
    forward: tuple[int, int]
    backward: tuple[int, int]
    group: int
    gradient_bytes: int | None
    output_bytes: int | None
    copied_bytes: int
    zeros_bytes: int
    outputs: frozenset[int]

    def backward_bytes(self, point: CompiledPoint) -> int:
        """Bytes that it takes in backward, see NOTE [ Memory of a compiled region ]."""
        made = self.copied_bytes + self.zeros_bytes * (point.name != EAGER)
        if self.gradient_bytes is None or (point.holds_output and self.output_bytes is None):
            return made + point.backward_bytes
        freed = made + self.gradient_bytes + (self.output_bytes or 0) * point.holds_output
        return made + max(point.sole_backward_bytes, point.backward_bytes - freed)


def build_compiled(profile: Profile, calls: Sequence[int], model: EngineModel) -> Built:
    """Build the problem with these regions compiled.

    Args:
        calls: module calls, none inside another. Those that were not measured are left untouched if all that were are
            compiled; else engine replay runs them, too.

    Raises:
        NotCompiledError: the profile has no measured regions.
    """
    if profile.compiled is None:
        raise NotCompiledError(
            "this profile has no measured points of compiled regions, which engine 'compile' chooses from: record it "
            "with autoac.profile(model, sample, engine='compile'), or plan with autoac.plan(..., engine='compile')."
        )
    table, step = profile.compiled, Step(profile)
    found, refused = choose_regions(step, calls, model)
    some = any(region.failure for region in table.regions)
    others = [refusal.call for refusal in refused if some or table.of_call(refusal.call) is not None]
    draft = _draft(step, found, others)
    replayed = {region.call for region in draft.regions}
    first = len(draft.groups.all) + bool(draft.losses)
    compiled = [_of(draft, region, first + index) for index, region in enumerate(found)]
    regions = sorted((*found, *draft.regions), key=lambda region: region.start)
    points = {c.region.call: tuple(point.name for point in c.points) for c in compiled}
    group = {c.region.call: c.group for c in compiled}
    storages: list[list[int]] = [[] for _ in draft.groups.all]
    for storage, index in draft.groups.of_storage.items():
        storages[index].append(storage)
    if draft.losses:
        storages.append([loss.log_probabilities for loss in draft.losses])
    return Built(
        model,
        tuple(_tape(draft, region, group.get(region.call, NEVER)) for region in regions),
        _problem(draft, compiled, regions),
        (*(tuple(sorted(own)) for own in storages), *(() for _ in compiled)),
        len(draft.groups.all) if draft.losses else -1,
        tuple(refusal for refusal in refused if refusal.call not in replayed),
        tuple(points.get(region.call, ()) for region in regions),
    )


def _draft(step: Step, compiled: Sequence[Region], others: Sequence[int]) -> Draft:
    """The part of the problem under engine replay: regions that are not compiled, and losses."""
    replayed, _ = choose_regions(step, others, _REPLAY)
    losses = decided_losses(step, (*compiled, *replayed), _REPLAY)
    of_losses = ops_of(losses)
    if any(not of_losses.isdisjoint(region.ops) for region in compiled):
        losses, of_losses = (), set()
    only_losses = {region.index for region in replayed if of_losses.issuperset(region.ops)}
    groups = Groups(step, replayed, _REPLAY, frozenset(), frozenset(), only_losses)
    return Draft(step, replayed, groups, Axis(step, replayed, groups, _REPLAY), losses)


def _tape(draft: Draft, region: Region, group: int) -> RegionTape:
    """The region on the tape; `group` is `NEVER` if it is replayed."""
    groups = (draft.groups.of_op.get(op, -1) if group == NEVER else group for op in region.ops)
    return RegionTape(region.call, tuple(region.ops), tuple(groups), (False,) * len(region.ops))


def _of(draft: Draft, region: Region, group: int) -> _Compiled:
    axis, table = draft.axis, draft.step.profile.compiled
    measured = None if table is None else table.of_call(region.call)
    assert measured is not None  # Regions that were not measured are refused.
    end = _ends_backward(draft.step, region)
    given, outputs = _given_gradients(draft.step, region, end), _outputs(draft.step, region)
    first, last = axis.position(region.begin_backward), axis.position(end)
    return _Compiled(
        region,
        undominated(measured.points),
        (axis.forward[region.ops[0]], axis.forward[region.ops[-1]] + 1),
        (min(first, len(axis) - 1), min(max(last, first + 1), len(axis))),
        group,
        _bytes_gone(draft.step, region, given, end) if given else None,
        _bytes_gone(draft.step, region, outputs, end),
        *_made_bytes(draft.step, region, given),
        frozenset(outputs),
    )


def _given_gradients(step: Step, region: Region, end: int) -> list[int]:
    """Storages made before the region's backward, which ends at tick `end`, and read in it."""
    table = step.profile.storage_table
    reads = {s for op in step.ops(region.begin_backward, end) for s in step.profile.tape[op].reads}
    found = (s for s in reads if region.end < table[s].alloc < region.begin_backward)
    return [storage for storage in found if table[storage].kind != "Gradient"]


def _outputs(step: Step, region: Region) -> list[int]:
    """Storages that the region makes and returns; those that outlive its forward if the profile does not tell."""
    made = {storage for op in region.ops for storage in step.profile.tape[op].creates}
    if told := step.profile.spans[region.call].outputs:
        return [storage for storage in told if storage in made]
    return [storage for storage in made if step.profile.storage_table[storage].free > region.end]


def _bytes_gone(step: Step, region: Region, storages: Sequence[int], end: int) -> int | None:
    """Bytes of storages, None if the step or graphs other than the region's hold any of them at tick `end`."""
    profile, others = step.profile, set(range(len(step.profile.saved))).difference(region.saved)
    held = {profile.saved[i].storage for i in others if profile.saved[i].released > end}
    if any(profile.storage_table[s].free > end or s in held for s in storages):
        return None
    return sum(profile.storage_table[s].bytes for s in storages)


def _made_bytes(step: Step, region: Region, given: Iterable[int]) -> tuple[int, int]:
    """`copied_bytes` and `zeros_bytes`, see `_Compiled`."""
    profile = step.profile
    sizes = Counter(profile.storage_table[storage].bytes for storage in given)
    later = {saved.storage for saved in profile.saved if saved.tick > region.end}
    later |= {s for op in profile.tape if op.tick > region.end and not op.backward for s in op.reads}
    copied = zeros = 0
    call = profile.spans[region.call]
    for storage in call.differentiable:
        if storage in call.inputs:
            continue  # compiled code returns the input itself
        size = profile.storage_table[storage].bytes
        if storage not in later:
            zeros += size
        elif sizes[size]:
            sizes[size] -= 1
        else:
            copied += size
    return copied, zeros


def _ends_backward(step: Step, region: Region) -> int:
    """The tick at which a region's backward is over.

    The first ops of a tail may save nothing (a cast of logits): their backward runs before the next unpack.
    """
    if region.call not in step.profile.tail_spans:
        return region.last_release
    later = (
        saved.unpacked
        for saved in step.profile.saved
        if saved.tick < region.start and saved.unpacked >= region.last_release
    )
    return min(later, default=region.last_release)


def _problem(draft: Draft, compiled: Sequence[_Compiled], regions: Sequence[Region]) -> Problem:
    profile, axis = draft.step.profile, draft.axis
    assert profile.compiled is not None
    inside = _inside(compiled)
    fastest_s = sum(c.points[0].time_s for c in compiled)
    outside_s = sum(op.time_s for index, op in enumerate(profile.tape) if axis.forward[index] not in inside)
    resident = sum(s.bytes for s in profile.storage_table if s.alloc == NEVER)
    # The measurement covers forward and backward, not the optimizer, which runs after the last op of backward.
    last = max(i for i, op in enumerate(profile.tape) if op.backward)
    unseen, optimizer = profile.compiled.unseen_bytes, 1 + axis.forward[last]
    less = max(0, min(-unseen, resident))
    freed = max(0, -unseen - less)
    groups, costs = _decided(draft, compiled, regions)
    return Problem(
        n_positions=len(axis),
        resident_bytes=resident - less,
        step_s=outside_s + fastest_s + profile.views_s + profile.outside_s,
        groups=groups,
        regions=costs,
        lifetimes=(
            *_storages(draft, compiled),
            *lives_of_ops(draft, inside),
            Lifetime(less, optimizer, len(axis)),
            Lifetime(max(0, unseen), 0, optimizer),
            *(lifetime for c in compiled for lifetime in _code(c, freed)),
        ),
        position_op=tuple(axis.op),
        position_replayed=tuple(axis.replayed),
    )


def _decided(
    draft: Draft, compiled: Sequence[_Compiled], regions: Sequence[Region]
) -> tuple[tuple[DecisionGroup, ...], tuple[RegionCost, ...]]:
    """The groups, and the cost of wrapping each region."""
    profile = draft.step.profile
    place = {region.call: index for index, region in enumerate(regions)}
    groups = [replace(g, region=place[draft.regions[g.region].call]) for g in draft.groups.all]
    costs = [RegionCost(0.0, profile.module_name(region.call)) for region in regions]
    for region in draft.regions:
        wrap_s = _REPLAY.wrap_s(draft, region)
        costs[place[region.call]] = RegionCost(wrap_s, profile.module_name(region.call))
    if draft.losses:
        groups.append(loss_group(profile, draft.losses, len(costs)))
        costs.append(RegionCost(0.0, LOSS))
    groups += (_group(place[c.region.call], c) for c in compiled)
    return tuple(groups), tuple(costs)


def _group(region: int, compiled: _Compiled) -> DecisionGroup:
    fastest_s = compiled.points[0].time_s
    return DecisionGroup(
        region,
        tuple(
            Option(Action.SAVE if point.name == EAGER else Action.COMPILED, point.time_s - fastest_s)
            for point in compiled.points
        ),
    )


def _inside(compiled: Sequence[_Compiled]) -> set[int]:
    """The positions inside the windows of compiled regions."""
    return {p for c in compiled for window in (c.forward, c.backward) for p in range(*window)}


def _when(compiled: _Compiled, option: int) -> Condition:
    return Condition((Literal(compiled.group, option),))


def _code(compiled: _Compiled, freed: int) -> Iterator[Lifetime]:
    """Memory of a region's compiled code at each point; see NOTE [ Memory of a compiled region ].

    Args:
        freed: bytes that its backward takes less than measured by itself.
    """
    (first, end), (begin, last) = compiled.forward, compiled.backward
    for option, point in enumerate(compiled.points):
        when = _when(compiled, option)
        yield Lifetime(point.forward_bytes, first, end, when)
        yield Lifetime(point.kept_bytes, end, last, when, call=compiled.region.call)
        yield Lifetime(max(0, compiled.backward_bytes(point) - freed), begin, last, when)


def _storages(draft: Draft, compiled: Sequence[_Compiled]) -> Iterator[Lifetime]:
    """Lifetimes of the tape's storages outside of compiled code."""
    windows = sorted(window for c in compiled for window in (c.forward, c.backward))
    lives = _outside(draft, compiled)
    loss = len(draft.groups.all) if draft.losses else -1
    for lifetime in with_chunked_losses(draft, loss, lives):
        start = lifetime.start
        if start >= len(draft.axis) or not draft.axis.replayed[start]:
            start = _born(windows, start)
        found = replace(
            lifetime,
            start=start,
            end=max(start, _ended(windows, lifetime.end)),
            extensions=tuple(Extension(_ended(windows, e.end), e.when) for e in lifetime.extensions),
        )
        if max((found.end, *(e.end for e in found.extensions))) > start:
            yield found


def _outside(draft: Draft, compiled: Sequence[_Compiled]) -> Iterator[Lifetime]:
    """Lifetimes of storages as held by autograd and replay, and also by compiled regions."""
    profile = draft.step.profile
    makers = {storage: i for i, op in enumerate(profile.tape) for storage in op.creates}
    made_in = {s: c for c in compiled for op in c.region.ops for s in profile.tape[op].creates}
    holder = _holder(compiled)
    held = dict.fromkeys(range(len(profile.storage_table)), 0)
    by_inputs: dict[int, list[_Compiled]] = {}  # storage -> regions that it is an input of
    for saved in profile.saved:
        c = holder(saved.tick)
        if c is None or holder(profile.storage_table[saved.storage].alloc) is c:
            continue
        if saved.storage not in profile.spans[c.region.call].inputs:
            held[saved.storage] = max(held[saved.storage], c.backward[1])
    for c in compiled:
        for storage in profile.spans[c.region.call].inputs:
            by_inputs.setdefault(storage, []).append(c)
            if all(point.holds_inputs for point in c.points):
                held[storage] = max(held[storage], c.backward[1])
    for use in draft.uses():
        saves = [index for index in use.saves if holder(profile.saved[index].tick) is None]
        maker = made_in.get(use.storage)
        lives = lives_of(draft, Use(use.storage, saves, use.reads, use.inputs), makers)
        first = next(lives)
        end = max(first.end, held[use.storage])
        kept = [e for e in first.extensions if e.end > end]
        kept += (
            Extension(c.backward[1], _when(c, option))
            for c in by_inputs.get(use.storage, ())
            for option, point in enumerate(c.points)
            if point.holds_inputs and c.backward[1] > end
        )
        if maker is not None and maker.region.call in profile.tail_spans:
            yield from _after_tail(maker, replace(first, end=end, extensions=tuple(kept)))
            continue
        if maker is not None:
            kept += (
                Extension(maker.backward[1], _when(maker, option))
                for option, point in enumerate(maker.points)
                if point.holds_output and maker.backward[1] > end and use.storage in maker.outputs
            )
        yield replace(first, end=end, extensions=tuple(kept))
        yield from lives


def _after_tail(tail: _Compiled, lifetime: Lifetime) -> Iterator[Lifetime]:
    """Lifetimes of a tail's output, which counts as kept at points that hold it: the step may drop it at once."""
    kept_until = tail.backward[1]
    yield replace(lifetime, start=kept_until, end=max(lifetime.end, kept_until))
    for option, point in enumerate(tail.points):
        if not point.holds_output:
            end = min(lifetime.end, kept_until)
            yield replace(
                lifetime,
                end=end,
                extensions=tuple(Extension(min(e.end, kept_until), e.when) for e in lifetime.extensions),
                exists=_when(tail, option),
            )


def _holder(compiled: Iterable[_Compiled]) -> Callable[[int], _Compiled | None]:
    """A function from a forward tick to the compiled region that runs then, None for none."""
    owner = list(compiled)
    return lambda tick: next((c for c in owner if c.region.owns(tick)), None)


def _born(windows: Sequence[tuple[int, int]], start: int) -> int:
    """Move a start inside a window to the window's end; an adjacent next window does not move it further."""
    born = float(start)
    for first, last in windows:
        if first <= born < last:
            born = last - 0.5
    return math.ceil(born)


def _ended(windows: Sequence[tuple[int, int]], end: int) -> int:
    """Move an end inside a window to the window's end."""
    return max((last for first, last in windows if first < end < last), default=end)
