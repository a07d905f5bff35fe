"""A rank's bytes of parameters, gradients and optimizer, and the peak of one plan, for other numbers of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from autoac.device import device_for
from autoac.parallel.elsewhere import optimizer_of
from autoac.parallel.fsdp2 import FSDP2
from autoac.parallel.protocol import Sharded
from autoac.parallel.tensor import TensorParallel
from autoac.plans import Plan
from autoac.record.optimizer import with_optimizer
from autoac.step.model import device_of, model_fingerprint
from autoac.step.optimizer import real_optimizer
from autoac.step.units import own_name
from autoac.torch_private import local_part
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.devices import kind_of
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import NEVER, OPTIMIZER_STEP, Profile, Storage


@dataclass(frozen=True)
class Held:
    """Bytes held by one rank.

    Args:
        ranks: number of ranks.
        parameters_bytes, gradients_bytes, optimizer_bytes: of its shards, on the device or in the host's memory;
            gradients as they are after backward.
        peak_bytes: peak of the step with the same decisions; None without a plan, and where one number of ranks leaves
            a whole model to each and the other does not: there FSDP2 gathers and reduces nothing.
    """

    ranks: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    peak_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def held(
    spec: Sharded,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    profile: Profile,
    record: PlanRecord | None = None,
    sizes: Iterable[int] | None = None,
) -> list[Held]:
    """The bytes for other numbers of ranks, and for the requested one.

    Nothing is recorded again: shards are counted, and in the plan's step they are replaced by those of the other
    number. Gathered parameters and activations are the same, except for the padding of parameters that the ranks do not
    divide.

    Args:
        spec: what the profile was recorded with, `world_size` included. The number of replicas, and of ranks that split
            layers, stays the same.
        model: the model before it was sharded.
        optimizer: optimizer of the model; None if there is none.
        profile: profile of one rank.
        record: a plan for the profile.
        sizes: numbers of ranks; half as many, as many and twice as many if left out.
    """
    assert spec.ranks is not None
    if sizes is None:
        sizes = [spec.ranks, *_half_and_twice(spec.ranks, _multiple(spec))]
    state_bytes = functools.partial(_state_bytes, model, optimizer, profile, spec.offloads)
    own = _held(spec, model, profile, state_bytes)
    if not spec.offloads:
        recorded_bytes = sum(s.bytes for s in profile.storage_table if s.kind == "Optstate")
        own = replace(own, optimizer_bytes=recorded_bytes)
    found = [
        own if size == spec.ranks else _held(_with_ranks(spec, size), model, profile, state_bytes)
        for size in sorted(set(sizes))
    ]
    if record is None:
        return found
    return [
        replace(one, peak_bytes=_peak_bytes(record, own, one, spec.offloads))
        if _has_all(spec) == _has_all(_with_ranks(spec, one.ranks))
        else one
        for one in found
    ]


def by_world_size(
    plan: Plan,
    spec: FSDP2 | TensorParallel,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    sizes: Iterable[int] | None = None,
) -> pd.DataFrame:
    """One rank's memory by kind, and the peak of this plan's decisions, with other numbers of ranks.

    Nothing is recorded again: in the planned step the shards are replaced by those of the other number. Gathered
    parameters and activations stay as they are, except for the padding of parameters that the ranks do not divide.

    Args:
        plan: made with `parallel=spec`.
        spec: what it was made with. The number of replicas, and of ranks that split layers, stays the same.
        model, optimizer: what it was made for: the model before it is sharded.
        sizes: numbers of ranks in all; half as many, as many and twice as many if left out.

    Returns:
        One row per number of ranks, the index: parameters_bytes, gradients_bytes (as they are after backward) and
        optimizer_bytes of a rank's shards, on the device or (with `CPUOffloadPolicy`) in the host's memory, and
        peak_bytes, the predicted peak; it is missing where only one of both numbers of ranks leaves a whole model to
        each.

    Raises:
        ProfilingError: this process is a rank itself; torch shards the model here as one of that many.
        ValueError: the plan is for another model, `spec` names no number of ranks or shards nothing, or one of `sizes`
            makes no sense.
    """
    if not shards(spec):
        raise ValueError(
            f"spec is {spec!r}: pass the autoac.parallel.FSDP2(world_size=...), or the TensorParallel(...) with fsdp=, "
            "that the plan was made with. Another number of ranks that split layers is another step: plan for it."
        )
    sizes = None if sizes is None else list(sizes)
    for size in sizes or ():
        if not isinstance(size, int) or size < 1 or size % _multiple(spec):
            of = "replicas" if isinstance(spec, FSDP2) else "ranks that split layers"
            raise ValueError(
                f"{size!r} ranks cannot shard with {_multiple(spec)} {of}: pass positive multiples of that."
            )
    on_device = any(s.bytes for s in plan.record.profile.storage_table if _is_shard(s))
    if on_device == spec.offloads:
        raise ValueError(
            f"spec keeps the shards {'in host memory' if spec.offloads else 'on the device'}, and those of the plan's "
            "step are not there: pass the spec that the plan was made with."
        )
    if plan.record.model_fingerprint != model_fingerprint(model):
        raise ValueError(
            f"the plan was made for another model than this {own_name(model)}, or for a sharded one: pass the model "
            "that it was made for, as it is before it is sharded."
        )
    found = held(spec, model, optimizer, plan.record.profile, plan.record, sizes)
    return pd.DataFrame([one.as_json() for one in found]).set_index("ranks").astype({"peak_bytes": "Int64"})


def shards(spec: Any) -> bool:
    """Whether a spec shards parameters over a given number of ranks."""
    if isinstance(spec, TensorParallel):
        spec = spec.fsdp
    return isinstance(spec, FSDP2) and spec.world_size is not None


def _has_all(spec: Sharded) -> bool:
    """Whether each rank has a whole model, or a whole part of one."""
    return spec.ranks == _multiple(spec)


def _multiple(spec: Sharded) -> int:
    """The number of ranks is a multiple of this one."""
    if isinstance(spec, FSDP2):
        return spec.replicas
    assert spec.world_size is not None
    return spec.world_size


def _with_ranks(spec: Sharded, ranks: int) -> Sharded:
    """The spec with another number of ranks in all."""
    if isinstance(spec, FSDP2):
        return replace(spec, world_size=ranks)
    assert isinstance(spec, TensorParallel)
    assert spec.fsdp is not None
    return replace(spec, fsdp=replace(spec.fsdp, world_size=ranks // _multiple(spec)))


def _half_and_twice(size: int, multiple: int) -> list[int]:
    half = [size // 2] if size % 2 == 0 and size // 2 % multiple == 0 else []
    return [*half, 2 * size]


def _held(
    spec: Sharded,
    model: torch.nn.Module,
    profile: Profile,
    state_bytes: Callable[[dict[str, torch.nn.Parameter]], int],
) -> Held:
    assert spec.ranks is not None
    with spec.sharded(model) as (skeleton, shard):
        shard()
        # Those of rank 0, which are the largest.
        parts = {
            name: torch.nn.Parameter(local_part(p.detach()), requires_grad=p.requires_grad)
            for name, p in skeleton.named_parameters()
        }
    on_device = device_for(torch.device(profile.device)).allocated_bytes
    allocated = int if spec.offloads else on_device
    parameters_bytes = sum(allocated(_bytes_of(part)) for part in parts.values())
    # The gradients of a unit are views of one storage.
    gradients_bytes = sum(_bytes_of(part) for part in parts.values() if part.requires_grad)
    return Held(spec.ranks, parameters_bytes, allocated(gradients_bytes), allocated(state_bytes(parts)))


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _state_bytes(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    profile: Profile,
    offloads: bool,
    shards: dict[str, torch.nn.Parameter],
) -> int:
    """State bytes of an optimizer of these shards, counted on the model's device: other tensors are fake there."""
    if optimizer is None:
        return 0
    kind = device_of(model).type
    recorded = with_optimizer(
        replace(profile, device="cpu" if kind == "meta" else kind),
        optimizer_of(real_optimizer(optimizer, model), model, shards),
        measure=False,
        elsewhere="cpu" if offloads else kind_of(profile.device),
    )
    return recorded.storage_table[-1].bytes


def _peak_bytes(record: PlanRecord, own: Held, other: Held, offloads: bool) -> int:
    """The plan's peak with the shards of the other number of ranks."""
    step, profile = step_of(record), record.profile
    timeline, problem = step.timeline, step.built.problem
    ratio = other.gradients_bytes / own.gradients_bytes if own.gradients_bytes else 1.0
    sharded = _of_shards(profile)
    chosen = np.array([lifetime.storage in sharded for lifetime in problem.lifetimes])
    live = timeline["live_bytes"] + Simulator(problem).part(chosen).live_bytes(step.options) * (ratio - 1)
    if offloads:
        return int(live.max())
    resident = other.parameters_bytes + other.optimizer_bytes - own.parameters_bytes - own.optimizer_bytes
    kept = sum(storage.bytes for storage in profile.storage_table if storage.is_workspace)
    # step() takes memory of the shards
    at_step = (timeline["Temp"] - kept).where(timeline["op"] == OPTIMIZER_STEP, 0)
    return int((live + at_step * (ratio - 1)).max()) + resident


_REDUCE_SCATTERS = ("c10d._reduce_scatter_base_", "c10d.reduce_scatter_")
_OF_GATHERING = ("c10d.", "fsdp.")


def _of_shards(profile: Profile) -> set[int]:
    """The storages made in the step whose sizes are those of shards.

    These are gradients, results of reduce-scatters, and what is made of those and of shards alone: casts, copies
    between host and device, the buffer from which FSDP2 gathers.
    """
    table = profile.storage_table
    found = {i for i, storage in enumerate(table) if storage.kind == "Gradient" or _is_shard(storage)}
    empty: set[int] = set()
    for op in profile.tape:
        if op.name.startswith(_REDUCE_SCATTERS):
            found.update(op.writes)
        elif not op.name.startswith(_OF_GATHERING):
            given = set(op.reads) - set(op.writes)
            if op.uninitialised:
                empty.update(op.creates)
            elif given and given <= found:
                found.update(op.creates, empty.intersection(op.writes))
        empty.difference_update(op.writes)
    return {i for i in found if table[i].alloc != NEVER}


def _is_shard(storage: Storage) -> bool:
    return storage.kind == "Parameter" and not storage.is_gathered and storage.alloc == NEVER
