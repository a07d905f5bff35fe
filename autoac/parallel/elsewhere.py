"""Record the step of one rank in a process that is no rank; nothing of the model is allocated."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace

import torch

from autoac.parallel.protocol import Sharded
from autoac.progress import Tell
from autoac.record.cuda.ops import capability_elsewhere
from autoac.record.on_fake import record_fake
from autoac.record.optimizer import with_optimizer
from autoac.step.model import device_of, model_fingerprint
from autoac.step.step import TrainingStep
from autoac_solver.records.devices import DeviceTable
from autoac_solver.records.errors import AutoacError, ProfilingError
from autoac_solver.records.profile import Profile


def record_sharded(
    spec: Sharded,
    step: TrainingStep,
    mode: str,
    table: DeviceTable | None,
    lean_losses: bool,
    progress: Tell | None,
) -> Profile:
    """The profile of one of the ranks that a spec describes; arguments as for `api._recorded`.

    Raises:
        ProfilingError: the step cannot be recorded this way.
    """
    kind = type(spec).__name__
    if mode == "real":
        raise ProfilingError(
            f"{kind}(world_size={spec.world_size}) is for ranks that are not here, so no step of theirs can be run: "
            'take mode="fake".'
        )
    if step.is_whole:
        raise ProfilingError(
            f"a callable sample runs your own model, and {kind}(world_size=...) shards a copy of it: pass the model's "
            "input as sample, and loss=."
        )
    if table is None and device_of(step.model).type not in ("cpu", "meta"):
        raise ProfilingError(
            f"{kind}(world_size={spec.world_size}) runs its step on fake CPU tensors: say which GPU the ranks have, "
            'with device="h200" or another.'
        )
    if table is None and spec.offloads:
        raise ProfilingError(
            "CPUOffloadPolicy keeps shards in the host's memory, and without device= the host is the device: say which "
            'GPU the ranks have, with device="h200" or another (--device).'
        )
    as_cuda = capability_elsewhere(table, torch.device("cpu"))  # the copy is on no device
    fingerprint = model_fingerprint(step.model)
    with spec.sharded(step.model) as (skeleton, shard):
        shards: dict[str, torch.nn.Parameter] = {}

        def shard_and_tell() -> None:
            try:
                shard()
            except AutoacError:
                raise
            except Exception as error:
                raise ProfilingError(f"{kind} cannot be put on this model: {error!s:.500}") from error
            shards.update(skeleton.named_parameters())  # the skeleton is restored afterwards

        recorded = record_fake(
            step.of(skeleton), progress, table is None, as_cuda, lean_losses, shard_and_tell
        )
        if step.optimizer is not None:
            recorded = with_optimizer(
                recorded,
                optimizer_of(step.optimizer, step.model, shards),
                measure=table is None,
                elsewhere=table.kind if table else "",
                in_host_memory=spec.offloads,
            )
    note = (
        f"of one rank of {spec.ranks} under {spec.in_words}, on fake tensors: collectives take the time of a copy, "
        "or that on a link of the device's table; buffers that a backend has of its own (gloo, NCCL) are not counted"
    )
    if spec.offloads:
        note += (
            "; parameters, gradients and optimizer are in the host's memory, and copies between it and the device take "
            "the time of one on the device"
        )
    return replace(recorded, model_fingerprint=fingerprint, notes=(*recorded.notes, note))


def optimizer_of(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, shards: dict[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy of a model's optimizer for the sharded parameters, of the same class and with the same options.

    Args:
        shards: by the names of the model's parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        own = [shards[names[id(p)]] if id(p) in names else p for p in group["params"]]
        groups.append({**group, "params": own})
    found = copy.copy(optimizer)
    vars(found).update(state=defaultdict(dict), param_groups=groups)
    return found
