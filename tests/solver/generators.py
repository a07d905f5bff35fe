"""Problems to test the solver with: one in the shape of a Llama, and small random ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from autoac_solver.problem.problem import (
    ALWAYS,
    RECOMPUTE,
    SAVE,
    Action,
    Condition,
    DecisionGroup,
    Extension,
    Lifetime,
    Literal,
    Option,
    Problem,
    RegionCost,
    Resource,
    save_or_recompute,
    when_recomputed,
    when_saved,
)
from autoac_solver.problem.simulator import Simulator

MIB = 2**20
FORWARD_STEP, REPLAY_STEP, BACKWARD_STEP, LOSS_POSITIONS = 3, 2, 5, 60


@dataclass(frozen=True)
class Op:
    """One group of a decoder layer: MiB of its output, microseconds, ops it reads, ops whose backward needs it."""

    mib: float
    us: float
    reads: tuple[int, ...]
    saved_by: tuple[int, ...] = ()


def _norm(first: int, source: int, saved_by: tuple[int, ...]) -> list[Op]:
    """Seven ops of an RMSNorm in float32, as Hugging Face writes it."""
    return [
        Op(128, 100, (source,), (first + 1, first + 4)),
        Op(128, 130, (first,)),
        Op(0.016, 65, (first + 1,)),
        Op(0.016, 5, (first + 2,), (first + 3, first + 4)),
        Op(128, 130, (first, first + 3)),
        Op(64, 100, (first + 4,), (first + 6,)),
        Op(64, 65, (first + 5,), saved_by),
    ]


def _rope(first: int, source: int, mib: float) -> list[Op]:
    """Four ops of a rotary embedding; attention (op 18) saves the result."""
    us = mib
    return [
        Op(mib, us, (source,)),
        Op(mib, us, (source,)),
        Op(mib, us, (first,)),
        Op(mib, 1.5 * us, (first + 1, first + 2), (18,)),
    ]


# Op -1 is the layer's input. Sizes of the 70B shape: hidden 8192, 8 key-value heads, MLP 28672, 4096 tokens.
LAYER = (
    *_norm(0, -1, (7, 8, 9)),
    Op(64, 1370, (6,)),
    Op(8, 170, (6,)),
    Op(8, 170, (6,), (18,)),
    *_rope(10, 7, 64),
    *_rope(14, 8, 8),
    Op(64.5, 690, (13, 17, 9), (18, 19)),
    Op(64, 1370, (18,)),
    Op(64, 100, (-1, 19)),
    *_norm(21, 20, (28, 29)),
    Op(224, 4800, (27,), (30, 31)),
    Op(224, 4800, (27,), (31,)),
    Op(224, 230, (28,), (31,)),
    Op(224, 350, (29, 30), (32,)),
    Op(64, 4800, (31,)),
    Op(64, 100, (20, 32)),
)


def llama(
    layers: int = 80, noise: float = 0.02, seed: int = 0, wrap_s: float = 2e-4, gradient_mib: float = 26
) -> Problem:
    """A decoder of `layers` equal regions of 34 groups, about 340 positions and 380 lifetimes a layer.

    Args:
        noise: relative spread of the measured times of equal ops.
        wrap_s: cost of wrapping a layer.
    """
    rng = random.Random(seed)
    n_ops = len(LAYER)
    forward, replay, backward = n_ops * FORWARD_STEP, n_ops * REPLAY_STEP, n_ops * BACKWARD_STEP
    turn = layers * forward + LOSS_POSITIONS
    n_positions = turn + layers * (replay + backward)
    groups: list[DecisionGroup] = []
    lifetimes = [
        Lifetime(round(mib * MIB), turn - 40 + 5 * i, turn - 10 + i)
        for i, mib in enumerate((1002, 2004, 2004))
    ]
    for layer in range(layers):
        axis = _Axis(layer * forward, turn + (layers - 1 - layer) * (replay + backward), layer * n_ops)
        next_axis = _Axis((layer + 1) * forward, axis.replay_start - replay - backward, (layer + 1) * n_ops)
        for index, op in enumerate(LAYER):
            groups.append(
                save_or_recompute(
                    layer, op.us * 1e-6 * (1 + noise * rng.uniform(-1, 1)), ops=(axis.group(index),)
                )
            )
            last_layer = layer == layers - 1
            lifetimes += _op_instances(index, op, axis, None if last_layer else next_axis)
        lifetimes += _gradients(axis, rng, n_positions, gradient_mib)
    step_s = 3 * sum(group.options[RECOMPUTE].time_s for group in groups)
    regions = tuple(RegionCost(wrap_s, f"model.layers.{layer}") for layer in range(layers))
    return Problem(n_positions, 40 * 10**9, step_s, tuple(groups), regions, tuple(lifetimes))


@dataclass(frozen=True)
class _Axis:
    """Where the ops of one layer lie."""

    forward_start: int
    replay_start: int
    first_group: int

    def group(self, index: int) -> int:
        return self.first_group + index

    def forward(self, index: int) -> int:
        return self.forward_start + index * FORWARD_STEP

    def replay(self, index: int) -> int:
        return self.replay_start + index * REPLAY_STEP

    def backward(self, index: int) -> int:
        return self.replay_start + len(LAYER) * REPLAY_STEP + (len(LAYER) - 1 - index) * BACKWARD_STEP


def _op_instances(index: int, op: Op, axis: _Axis, next_axis: _Axis | None) -> list[Lifetime]:
    """The forward and the replayed lifetime of an op's output, and the workspace of the large ones."""
    size, group = round(op.mib * MIB), axis.group(index)
    readers = [i for i, other in enumerate(LAYER) if index in other.reads]
    kept_by = [
        Extension(axis.replay(i) + 1, when_recomputed(axis.group(i)) & when_saved(group)) for i in readers
    ]
    replayed_by = [Extension(axis.replay(i) + 1, when_recomputed(axis.group(i))) for i in readers]
    if op.saved_by:
        release = max(axis.backward(i) for i in op.saved_by) + 1
        kept_by.append(Extension(release, when_saved(group)))
        replayed_by.append(Extension(release))
    if index == len(LAYER) - 1 and next_axis is not None:
        # The next layer's input: what is replayed there holds it, whatever this layer does.
        entry = [i for i, other in enumerate(LAYER) if -1 in other.reads]
        kept_by += [Extension(next_axis.replay(i) + 1, when_recomputed(next_axis.group(i))) for i in entry]
        last_forward = next_axis.forward(max(entry))
    else:
        last_forward = axis.forward(max(readers, default=index))
    born, reborn = axis.forward(index), axis.replay(index)
    lifetimes = [
        Lifetime(size, born, last_forward + 1, extensions=tuple(kept_by)),
        Lifetime(size, reborn, reborn + 1, when_recomputed(group), tuple(replayed_by)),
    ]
    if op.us > 500:
        lifetimes.append(Lifetime(32 * MIB, born, born + 1))
        lifetimes.append(Lifetime(32 * MIB, reborn, reborn + 1, when_recomputed(group)))
    return lifetimes


def _gradients(axis: _Axis, rng: random.Random, n_positions: int, gradient_mib: float) -> list[Lifetime]:
    """What backward itself allocates: eight short-lived gradients an op, and the layer's weight gradients."""
    lifetimes = [Lifetime(round(gradient_mib * MIB), axis.backward(0), n_positions)]
    for index, op in enumerate(LAYER):
        for _ in range(8):
            start = axis.backward(index) + rng.randrange(BACKWARD_STEP)
            size = round(op.mib * MIB / rng.choice((1, 4, 16)))
            lifetimes.append(Lifetime(size, start, min(start + rng.randint(1, 6), n_positions)))
    return lifetimes


def random_problem(rng: random.Random, n_groups: int | None = None, most_options: int = 2) -> Problem:
    """At most ten groups in up to three regions, with every kind of condition, row and cost.

    Args:
        most_options: of a group; at least two.
    """
    n_groups = n_groups or rng.randint(1, 10)
    n_regions = rng.randint(1, 3)
    n_positions = rng.randint(4, 30)
    scale = rng.choice((1, 1, 512, 10**9))
    sizes = [2 if most_options == 2 else rng.randint(2, most_options) for _ in range(n_groups)]
    groups = tuple(_random_group(rng, index, sizes, n_regions) for index in range(n_groups))
    regions = tuple(RegionCost(rng.choice((0.0, 0.0, rng.uniform(0, 3)))) for _ in range(n_regions))
    lifetimes = tuple(
        _random_lifetime(rng, sizes, n_regions, n_positions, scale) for _ in range(rng.randint(1, 40))
    )
    resident_bytes = rng.choice((0, 1000)) * scale
    return Problem(n_positions, resident_bytes, rng.uniform(5, 20), groups, regions, lifetimes)


def with_policies(rng: random.Random, problem: Problem) -> Problem:
    """The problem with constraints and hints on some of its groups, perhaps more than any decision can follow."""
    groups = []
    for group in problem.groups:
        time_s = group.options[-1].time_s
        hint_s = rng.choice((0.0, 0.0, 1, -1)) * rng.uniform(0, 2) * rng.choice((0.5, 1, time_s))
        fate = rng.random()
        changed = group.hinted(hint_s)
        if fate < 0.15:
            for option in range(1, len(group.options)):
                changed = changed.refusing(option, "fixed")
        elif fate > 0.8 and not group.must_save:
            changed = changed.refusing(SAVE, "wanted")
        groups.append(changed)
    return dataclasses.replace(problem, groups=tuple(groups))


def with_resources(rng: random.Random, problem: Problem) -> Problem:
    """The problem with one or two kinds of other memory, whose limits rule out some decisions, perhaps all."""
    sizes = [len(group.options) for group in problem.groups]
    resources = []
    for name in ("the host", "another device")[: rng.randint(1, 2)]:
        scale = rng.choice((1, 10**9))
        lifetimes = tuple(
            _random_lifetime(rng, sizes, len(problem.regions), problem.n_positions, scale)
            for _ in range(rng.randint(1, 15))
        )
        alone = Simulator(dataclasses.replace(problem, resident_bytes=0, lifetimes=lifetimes))
        peaks = [
            alone.simulate([rng.randrange(size) for size in sizes]).peak_bytes - rng.choice((0, 0, 1))
            for _ in range(4)
        ]
        resources.append(Resource(name, max(0, sorted(peaks)[rng.randint(0, 3)]), lifetimes))
    return dataclasses.replace(problem, resources=tuple(resources))


def _random_group(rng: random.Random, index: int, sizes: Sequence[int], n_regions: int) -> DecisionGroup:
    n_groups = len(sizes)
    requires = tuple({rng.randrange(n_groups) for _ in range(rng.choice((0, 0, 0, 1, 2)))} - {index})
    alike = [other for other, size in enumerate(sizes) if size == sizes[index]]
    same_as = alike[rng.randrange(len(alike))] if rng.random() < 0.1 else -1
    time_s = rng.choice((rng.uniform(0, 2), float(rng.randint(0, 3))))
    region = rng.randrange(n_regions)
    fixed = "fixed" if rng.random() < 0.1 else ""
    group = save_or_recompute(
        region, time_s, must_save=fixed, requires=requires if sizes[index] == 2 else (), same_as=same_as
    )
    others = (_random_option(rng, index, sizes) for _ in range(sizes[index] - 2))
    return dataclasses.replace(group, options=(*group.options, *others))


def _random_option(rng: random.Random, index: int, sizes: Sequence[int]) -> Option:
    """A third way, and more, to treat a group; it may require anything of another one."""
    others = [other for other in range(len(sizes)) if other != index]
    count = rng.choice((0, 0, 1)) if others else 0
    requires = tuple(_random_literal(rng, [rng.choice(others)], sizes) for _ in range(count))
    return Option(Action.RECOMPUTE, rng.uniform(0, 2), requires=requires)


def _not_saving(rng: random.Random, n_options: int) -> int:
    return RECOMPUTE if n_options == 2 else rng.randrange(1, n_options)


def _random_literal(rng: random.Random, groups: Sequence[int], sizes: Sequence[int]) -> Literal:
    group = rng.choice(groups)
    return Literal(group, rng.randrange(sizes[group]), rng.random() < 0.8)


def _random_condition(rng: random.Random, sizes: Sequence[int], n_regions: int) -> Condition:
    if rng.random() < 0.2:
        return ALWAYS
    groups = range(len(sizes))
    literals = []
    if rng.random() < 0.5:
        group = rng.randrange(len(sizes))
        literals.append(Literal(group, _not_saving(rng, sizes[group])))
    if rng.random() < 0.5:
        literals.append(Literal(rng.randrange(len(sizes)), SAVE))
    if max(sizes) > 2 and rng.random() < 0.3:
        literals.append(_random_literal(rng, groups, sizes))
    return Condition(tuple(literals), rng.randrange(n_regions) if rng.random() < 0.2 else -1)


def _random_lifetime(
    rng: random.Random, sizes: Sequence[int], n_regions: int, n_positions: int, scale: int
) -> Lifetime:
    start = rng.randrange(n_positions)
    end = rng.randint(start, n_positions)
    extensions = tuple(
        Extension(rng.randint(0, n_positions), _random_condition(rng, sizes, n_regions))
        for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))
    )
    size = rng.choice((rng.randint(0, 100), 2 ** rng.randint(0, 7))) * scale + rng.choice((0, 0, 1))
    return Lifetime(size, start, end, _random_condition(rng, sizes, n_regions), extensions)


def tangled(seed: int, n_groups: int = 1500, n_instances: int = 12000) -> Problem:
    """A large problem without structure, whose gap no solver closes in minutes."""
    rng = random.Random(seed)
    n_regions, n_positions = 30, 4000
    sizes = [2] * n_groups
    groups = tuple(
        save_or_recompute(
            index * n_regions // n_groups,
            rng.uniform(0.1, 2),
            requires=(rng.randrange(index),) if rng.random() < 0.05 and index else (),
        )
        for index in range(n_groups)
    )
    regions = tuple(RegionCost(rng.uniform(0, 0.5)) for _ in range(n_regions))
    lifetimes = []
    for _ in range(n_instances):
        start = rng.randrange(n_positions)
        end = min(n_positions, start + rng.randint(1, 30))
        extensions = tuple(
            Extension(min(n_positions, end + rng.randint(0, 400)), _random_condition(rng, sizes, n_regions))
            for _ in range(rng.choice((0, 1, 1, 2, 3)))
        )
        exists = _random_condition(rng, sizes, n_regions) if rng.random() < 0.3 else ALWAYS
        lifetimes.append(Lifetime(rng.randint(1, 10 ** rng.randint(3, 8)), start, end, exists, extensions))
    step_s = 3 * sum(group.options[RECOMPUTE].time_s for group in groups)
    return Problem(n_positions, 0, step_s, groups, regions, tuple(lifetimes))
