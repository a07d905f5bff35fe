"""Ways to spread a model over ranks, each with the options that the docs' table names."""

# pyright: reportPrivateImportUsage=false
# (the size of DDP's first bucket is a private name of torch)

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

Spread = Callable[[nn.Module], Any]
Step = Callable[[Any, Any], None]
"""Forward and backward of a step, for a spread model and its batch: (arguments, keywords)."""


@dataclass(frozen=True)
class Way:
    """One row of the table.

    Args:
        spread: wraps or shards a model.
        step: None for one call and one backward.
        ranks: how many it takes.
        copies: so many neighbouring ranks get the same batch: they hold parts of one model.
        alone: each rank has a part of its own, and a plan of its own.
    """

    name: str
    spread: Spread
    step: Step | None = None
    ranks: int = 2
    copies: int = 1
    alone: bool = False

    def run(self, model: Any, batch: Any) -> None:
        """Forward and backward of a step."""
        (self.step or once)(model, batch)


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def once(model: Any, batch: Any) -> None:
    args, kwargs = batch
    loss_of(model(*args, **kwargs)).backward()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the lists of modules."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    return [block for found in lists for block in found if any(True for _ in block.parameters())]


# -- DDP -----------------------------------------------------------------------------------------------------------


def ddp(**options: Any) -> Spread:
    return lambda model: DistributedDataParallel(model, **options)


def with_hook(make: Callable[[], tuple[Any, Any]], **options: Any) -> Spread:
    """DDP with a communication hook; `make` gives its state and the hook."""

    def spread(model: nn.Module) -> Any:
        wrapped = DistributedDataParallel(model, **options)
        wrapped.register_comm_hook(*make())
        return wrapped

    return spread


def _default(name: str) -> Callable[[], tuple[Any, Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return lambda: (dist.group.WORLD, getattr(default_hooks, name))


def _power_sgd() -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, min_compression_rate=1)
    return state, power.powerSGD_hook


def ddp_accumulates(model: Any, batch: Any) -> None:
    with model.no_sync():
        once(model, batch)
    once(model, batch)


# -- FSDP2 ---------------------------------------------------------------------------------------------------------


def fsdp(**options: Any) -> Spread:
    """Block by block, then the rest."""

    def spread(model: nn.Module) -> Any:
        for block in blocks_of(model):
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return spread


def then(spread: Spread, change: Callable[[Any], Any]) -> Spread:
    def both(model: nn.Module) -> Any:
        found = spread(model)
        change(found)
        return found

    return both


def prefetching(model: Any) -> None:
    units = blocks_of(model)
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        following.set_modules_to_backward_prefetch([unit])  # type: ignore[operator]


def fsdp_accumulates(model: Any, batch: Any) -> None:
    model.set_requires_gradient_sync(False)
    once(model, batch)
    model.set_requires_gradient_sync(True)
    once(model, batch)


def fsdp_keeps(model: Any, batch: Any) -> None:
    """Parameters stay gathered between micro-batches."""
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    once(model, batch)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    once(model, batch)


def root_only(model: nn.Module) -> Any:
    return fully_shard(model)


def some_ignored(model: nn.Module) -> Any:
    last = list(model.parameters())[-1]
    return fsdp(ignored_params={last})(model)


def in_groups(model: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp(mesh=mesh)(model)


def partly_frozen(spread: Spread) -> Spread:
    """Every second parameter is not trained."""

    def both(model: nn.Module) -> Any:
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(index % 2 == 1)
        return spread(model)

    return both


def with_adapters(spread: Spread) -> Spread:
    """LoRA: only small factors beside each linear layer are trained."""

    def both(model: nn.Module) -> Any:
        from peft import LoraConfig, inject_adapter_in_model

        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["up", "down"], lora_dropout=0.1, init_lora_weights=False)
        return spread(inject_adapter_in_model(config, model))

    return both


def with_shared(spread: Spread) -> Spread:
    """Stem and head have one weight."""

    def both(model: nn.Module) -> Any:
        model.head.weight = model.stem.weight  # type: ignore[union-attr]
        return spread(model)

    return both


def with_small_first_bucket(model: nn.Module) -> Any:
    before = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096
    try:
        return DistributedDataParallel(model, bucket_cap_mb=0.02)
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = before


# -- tensor parallelism --------------------------------------------------------------------------------------------


def mesh_of(ranks: int, split: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ranks // split, split), mesh_dim_names=("shard", "split"))


def styles_of(model: nn.Module) -> dict[str, Any]:
    """A transformers model's own plan; else the two linear layers that follow each other in each block, in parts."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from autoac.parallel.tensor import own_plan

    if getattr(getattr(model, "config", None), "base_model_tp_plan", None):
        return own_plan(model)
    ups = [
        name for name, _ in model.named_modules() if name.endswith((".up", ".intermediate.dense", ".mlp.fc1"))
    ]
    downs = [
        name for name, _ in model.named_modules() if name.endswith((".down", ".output.dense", ".mlp.fc2"))
    ]
    downs = [name for name in downs if "attention" not in name]
    assert len(ups) == len(downs) > 0, [name for name, _ in model.named_modules()]
    return {**{name: ColwiseParallel() for name in ups}, **{name: RowwiseParallel() for name in downs}}


def split_in_two(model: nn.Module) -> Any:
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(model, mesh_of(2, 2)["split"], styles_of(model))


def split_and_sharded(model: nn.Module) -> Any:
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = mesh_of(4, 2)
    parallelize_module(model, mesh["split"], styles_of(model))
    return fsdp(mesh=mesh["shard"])(model)


# -- pipelines -----------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """One of two stages of the small model, and its schedule, which is no module."""

    def __init__(self, model: Any, schedule: str) -> None:
        from torch.distributed import pipelining

        super().__init__()
        self.is_first = dist.get_rank() == 0
        parts = (nn.Sequential(model.stem, *model.layers), nn.Sequential(model.pair, model.head))
        self.part = parts[dist.get_rank()]
        stage = pipelining.PipelineStage(self.part, dist.get_rank(), 2, torch.device("cpu"))
        made = getattr(pipelining, schedule)(stage, 4, loss_fn=lambda found, _: found.square().mean())
        object.__setattr__(self, "run", (stage, made))


def in_stages(schedule: str) -> Spread:
    return lambda model: Stage(model, schedule)


def micro_batches(stage: Any, batch: Any) -> None:
    """One step of the schedule, after which the stage holds nothing of it."""
    (x,), _ = batch
    held, schedule = stage.run
    schedule.step(x) if stage.is_first else schedule.step(target=x)
    held.clear_runtime_states()


OFFLOADED = CPUOffloadPolicy(pin_memory=False)
BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

WAYS: tuple[Way, ...] = (
    Way("DDP", ddp()),
    Way("DDP, `bucket_cap_mb`, a small first bucket", with_small_first_bucket),
    Way("DDP, `gradient_as_bucket_view`", ddp(gradient_as_bucket_view=True)),
    Way("DDP, `find_unused_parameters`", ddp(find_unused_parameters=True)),
    Way("DDP, `no_sync` over micro-batches", ddp(), ddp_accumulates),
    Way("DDP, `no_sync`, `gradient_as_bucket_view`", ddp(gradient_as_bucket_view=True), ddp_accumulates),
    Way("DDP, hook `allreduce_hook`", with_hook(_default("allreduce_hook"))),
    Way("DDP, hook `fp16_compress_hook`", with_hook(_default("fp16_compress_hook"))),
    Way("DDP, hook PowerSGD", with_hook(_power_sgd)),
    Way("DDP, half of the parameters frozen", partly_frozen(ddp())),
    Way("DDP, LoRA", with_adapters(ddp())),
    Way("DDP, a shared parameter", with_shared(ddp())),
    Way("FSDP2 by block", fsdp()),
    Way("FSDP2, the model as one unit", fully_shard),
    Way("FSDP2, `reshard_after_forward=False`", fsdp(reshard_after_forward=False)),
    Way("FSDP2, `reshard_after_forward=True`", fsdp(reshard_after_forward=True)),
    Way("FSDP2, `mp_policy` bfloat16", fsdp(mp_policy=BFLOAT16)),
    Way("FSDP2, `offload_policy` CPU (on a model that is there)", fsdp(offload_policy=OFFLOADED)),
    Way("FSDP2, `ignored_params`", some_ignored),
    Way("FSDP2, `set_modules_to_forward_prefetch`, `..._backward_prefetch`", then(fsdp(), prefetching)),
    Way("FSDP2, `set_requires_gradient_sync` over micro-batches", fsdp(), fsdp_accumulates),
    Way("FSDP2, `set_reshard_after_backward` over micro-batches", fsdp(), fsdp_keeps),
    Way("FSDP2, half of the parameters frozen", partly_frozen(fsdp())),
    Way("FSDP2, LoRA", with_adapters(fsdp())),
    Way("FSDP2, a shared parameter", with_shared(fsdp())),
    Way("FSDP2, groups of ranks (HSDP)", in_groups, ranks=4),
    Way("tensor parallelism", split_in_two, copies=2),
    Way("tensor parallelism and FSDP2", split_and_sharded, ranks=4, copies=2),
    Way("two stages, `ScheduleGPipe`", in_stages("ScheduleGPipe"), micro_batches, alone=True),
    Way("two stages, `Schedule1F1B`", in_stages("Schedule1F1B"), micro_batches, alone=True),
)
