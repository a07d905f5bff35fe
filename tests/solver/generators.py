"""Problems to test the solver with: one in the shape of a Llama, and small random ones."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from autoac_solver.problem import ALWAYS, Condition, Holder, Instance, Problem, RegionCost, SharedCost, Unit

MIB = 2**20
FORWARD_STEP, REPLAY_STEP, BACKWARD_STEP, LOSS_POSITIONS = 3, 2, 5, 60


@dataclass(frozen=True)
class Op:
    """One unit of a decoder layer: MiB of its output, microseconds, ops it reads, ops whose backward needs it."""

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
    """A decoder of `layers` equal regions of 34 units, about 340 positions and 380 instances a layer.

    Args:
        noise: relative spread of the measured times of equal ops.
        wrap_s: cost of wrapping a layer.
    """
    rng = random.Random(seed)
    n_ops = len(LAYER)
    forward, replay, backward = n_ops * FORWARD_STEP, n_ops * REPLAY_STEP, n_ops * BACKWARD_STEP
    turn = layers * forward + LOSS_POSITIONS
    n_positions = turn + layers * (replay + backward)
    units: list[Unit] = []
    instances = [
        Instance(round(mib * MIB), turn - 40 + 5 * i, turn - 10 + i)
        for i, mib in enumerate((1002, 2004, 2004))
    ]
    for layer in range(layers):
        axis = _Axis(layer * forward, turn + (layers - 1 - layer) * (replay + backward), layer * n_ops)
        next_axis = _Axis((layer + 1) * forward, axis.replay_start - replay - backward, (layer + 1) * n_ops)
        for index, op in enumerate(LAYER):
            units.append(
                Unit(layer, op.us * 1e-6 * (1 + noise * rng.uniform(-1, 1)), ops=(axis.unit(index),))
            )
            last_layer = layer == layers - 1
            instances += _op_instances(index, op, axis, None if last_layer else next_axis)
        instances += _gradients(axis, rng, n_positions, gradient_mib)
    step_s = 3 * sum(unit.time_s for unit in units)
    regions = tuple(RegionCost(wrap_s, f"model.layers.{layer}") for layer in range(layers))
    return Problem(n_positions, 40 * 10**9, step_s, tuple(units), regions, tuple(instances))


@dataclass(frozen=True)
class _Axis:
    """Where the ops of one layer lie."""

    forward_start: int
    replay_start: int
    first_unit: int

    def unit(self, index: int) -> int:
        return self.first_unit + index

    def forward(self, index: int) -> int:
        return self.forward_start + index * FORWARD_STEP

    def replay(self, index: int) -> int:
        return self.replay_start + index * REPLAY_STEP

    def backward(self, index: int) -> int:
        return self.replay_start + len(LAYER) * REPLAY_STEP + (len(LAYER) - 1 - index) * BACKWARD_STEP


def _op_instances(index: int, op: Op, axis: _Axis, next_axis: _Axis | None) -> list[Instance]:
    """The forward and the replayed instance of an op's output, and the workspace of the large ones."""
    size, unit = round(op.mib * MIB), axis.unit(index)
    readers = [i for i, other in enumerate(LAYER) if index in other.reads]
    kept_by = [Holder(axis.replay(i) + 1, Condition(recomputed=axis.unit(i), kept=unit)) for i in readers]
    replayed_by = [Holder(axis.replay(i) + 1, Condition(recomputed=axis.unit(i))) for i in readers]
    if op.saved_by:
        release = max(axis.backward(i) for i in op.saved_by) + 1
        kept_by.append(Holder(release, Condition(kept=unit)))
        replayed_by.append(Holder(release))
    if index == len(LAYER) - 1 and next_axis is not None:
        # The next layer's input: what is replayed there holds it, whatever this layer does.
        entry = [i for i, other in enumerate(LAYER) if -1 in other.reads]
        kept_by += [Holder(next_axis.replay(i) + 1, Condition(recomputed=next_axis.unit(i))) for i in entry]
        last_forward = next_axis.forward(max(entry))
    else:
        last_forward = axis.forward(max(readers, default=index))
    born, reborn = axis.forward(index), axis.replay(index)
    instances = [
        Instance(size, born, last_forward + 1, holders=tuple(kept_by)),
        Instance(size, reborn, reborn + 1, Condition(recomputed=unit), tuple(replayed_by)),
    ]
    if op.us > 500:
        instances.append(Instance(32 * MIB, born, born + 1))
        instances.append(Instance(32 * MIB, reborn, reborn + 1, Condition(recomputed=unit)))
    return instances


def _gradients(axis: _Axis, rng: random.Random, n_positions: int, gradient_mib: float) -> list[Instance]:
    """What backward itself allocates: eight short-lived gradients an op, and the layer's weight gradients."""
    instances = [Instance(round(gradient_mib * MIB), axis.backward(0), n_positions)]
    for index, op in enumerate(LAYER):
        for _ in range(8):
            start = axis.backward(index) + rng.randrange(BACKWARD_STEP)
            size = round(op.mib * MIB / rng.choice((1, 4, 16)))
            instances.append(Instance(size, start, min(start + rng.randint(1, 6), n_positions)))
    return instances


def random_problem(rng: random.Random, n_units: int | None = None) -> Problem:
    """At most ten units in up to three regions, with every kind of condition, row and cost."""
    n_units = n_units or rng.randint(1, 10)
    n_regions = rng.randint(1, 3)
    n_positions = rng.randint(4, 30)
    scale = rng.choice((1, 1, 512, 10**9))
    units = tuple(_random_unit(rng, index, n_units, n_regions) for index in range(n_units))
    regions = tuple(RegionCost(rng.choice((0.0, 0.0, rng.uniform(0, 3)))) for _ in range(n_regions))
    instances = tuple(
        _random_instance(rng, n_units, n_regions, n_positions, scale) for _ in range(rng.randint(1, 40))
    )
    problem = Problem(
        n_positions, rng.choice((0, 1000)) * scale, rng.uniform(5, 20), units, regions, instances
    )
    return dataclasses.replace(problem, shared=_random_shared(rng, n_units))


def with_policies(rng: random.Random, problem: Problem) -> Problem:
    """The problem with constraints and hints on some of its units, perhaps more than any decision can follow."""
    units = []
    for unit in problem.units:
        hint_s = rng.choice((0.0, 0.0, 1, -1)) * rng.uniform(0, 2) * rng.choice((0.5, 1, unit.time_s))
        fate = rng.random()
        units.append(
            dataclasses.replace(
                unit,
                must_save=unit.must_save or fate < 0.15,
                must_recompute=not unit.must_save and fate > 0.8,
                hint_s=hint_s,
            )
        )
    return dataclasses.replace(problem, units=tuple(units))


def _random_unit(rng: random.Random, index: int, n_units: int, n_regions: int) -> Unit:
    requires = tuple({rng.randrange(n_units) for _ in range(rng.choice((0, 0, 0, 1, 2)))} - {index})
    same_as = rng.randrange(n_units) if rng.random() < 0.1 else -1
    time_s = rng.choice((rng.uniform(0, 2), float(rng.randint(0, 3))))
    return Unit(rng.randrange(n_regions), time_s, rng.random() < 0.1, requires, same_as)


def _random_shared(rng: random.Random, n_units: int) -> tuple[SharedCost, ...]:
    groups = [rng.sample(range(n_units), rng.randint(0, n_units)) for _ in range(rng.choice((0, 0, 1, 3)))]
    return tuple(SharedCost(tuple(group), rng.choice((0.0, rng.uniform(0, 2)))) for group in groups)


def _random_condition(rng: random.Random, n_units: int, n_regions: int) -> Condition:
    if rng.random() < 0.2:
        return ALWAYS
    return Condition(
        recomputed=rng.randrange(n_units) if rng.random() < 0.5 else -1,
        kept=rng.randrange(n_units) if rng.random() < 0.5 else -1,
        wrapped=rng.randrange(n_regions) if rng.random() < 0.2 else -1,
    )


def _random_instance(
    rng: random.Random, n_units: int, n_regions: int, n_positions: int, scale: int
) -> Instance:
    start = rng.randrange(n_positions)
    end = rng.randint(start, n_positions)
    holders = tuple(
        Holder(rng.randint(0, n_positions), _random_condition(rng, n_units, n_regions))
        for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))
    )
    size = rng.choice((rng.randint(0, 100), 2 ** rng.randint(0, 7))) * scale + rng.choice((0, 0, 1))
    return Instance(size, start, end, _random_condition(rng, n_units, n_regions), holders)


def tangled(seed: int, n_units: int = 1500, n_instances: int = 12000) -> Problem:
    """A large problem without structure, whose gap no solver closes in minutes."""
    rng = random.Random(seed)
    n_regions, n_positions = 30, 4000
    units = tuple(
        Unit(
            index * n_regions // n_units,
            rng.uniform(0.1, 2),
            requires=(rng.randrange(index),) if rng.random() < 0.05 and index else (),
        )
        for index in range(n_units)
    )
    regions = tuple(RegionCost(rng.uniform(0, 0.5)) for _ in range(n_regions))
    instances = []
    for _ in range(n_instances):
        start = rng.randrange(n_positions)
        end = min(n_positions, start + rng.randint(1, 30))
        holders = tuple(
            Holder(min(n_positions, end + rng.randint(0, 400)), _random_condition(rng, n_units, n_regions))
            for _ in range(rng.choice((0, 1, 1, 2, 3)))
        )
        exists = _random_condition(rng, n_units, n_regions) if rng.random() < 0.3 else ALWAYS
        instances.append(Instance(rng.randint(1, 10 ** rng.randint(3, 8)), start, end, exists, holders))
    step_s = 3 * sum(unit.time_s for unit in units)
    return Problem(n_positions, 0, step_s, units, regions, tuple(instances))
