"""Tensor parallelism (`parallelize_module`): each rank holds a part of a layer, and computes with it.

Its cost is not modelled here: the step is recorded with torch's own code, as for `FSDP2`. The tape and the engines see
the ops on the local parts, see NOTE [ The recorded step ] 6 in `record/tape/tape.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch

from autoac.parallel.fsdp2 import FSDP2, chosen_units, without_values
from autoac.parallel.protocol import Sharded
from autoac.step.units import holds_shards
from autoac.torch_private import fake_ranks, meshes_joined_for_real
from autoac_solver.records.errors import ProfilingError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class TensorParallel(Sharded):
    """`torch.distributed.tensor.parallel.parallelize_module`, and `fully_shard` on its result.

    Args:
        world_size: number of ranks that split layers, to plan for one of them; None for the running ranks.
        plan: as `parallelize_module` takes it: names or globs of modules, and their styles. None for the model's own
            plan, if it is a transformers model.
        fsdp: how the parts are sharded further; its `world_size` is the number of ranks that have the same part. None
            if they are not. Styles must fit so many ranks.
        is_here: whether the ranks are running, and all of them call this.
    """

    plan: Mapping[str, ParallelStyle] | None = field(default=None, compare=False)
    fsdp: FSDP2 | None = None
    is_here: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp is None:
            return
        if self.world_size is None or self.fsdp.world_size is None or self.fsdp.replicas != 1:
            raise ValueError(
                "fsdp= says how the parts of ranks that are not there are sharded further: give both a world_size, and "
                "FSDP2 one group of ranks (replicas=1)."
            )

    @property
    def ranks(self) -> int | None:
        """See `Sharded`."""
        if self.fsdp is None or self.fsdp.world_size is None or self.world_size is None:
            return self.world_size
        return self.world_size * self.fsdp.world_size

    @property
    def offloads(self) -> bool:
        """See `Sharded`."""
        return self.fsdp is not None and self.fsdp.offloads

    @property
    def in_words(self) -> str:
        """See `Sharded`."""
        return "tensor parallelism" + ("" if self.fsdp is None else " and FSDP2")

    @contextlib.contextmanager
    def sharded(self, model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Callable[[], None]]]:
        """See `Sharded`.

        Raises:
            ProfilingError: also if the model has no plan of its own, and none was given.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        assert self.world_size is not None
        assert self.ranks is not None
        if holds_shards(model):
            raise ProfilingError(
                "this model is split already: leave parallel= out to plan for the ranks that are there, or pass the "
                "model before parallelize_module to plan for others."
            )
        styles = dict(own_plan(model) if self.plan is None else self.plan)
        if unmatched := [pattern for pattern in styles if not _matches(model, pattern.split("."))]:
            raise ProfilingError(
                f"plan={{{unmatched[0]!r}: ...}} matches no module of {type(model).__name__}, so parallelize_module "
                "would split nothing for it. It has one name or glob for each level, as in 'layers.*.up'."
            )
        units = [] if self.fsdp is None else chosen_units(model, self.fsdp.units)
        skeleton = without_values(model)
        copies = contextlib.nullcontext() if self.fsdp is None else self.fsdp.copies_recorded()
        with fake_ranks(self.ranks), copies:
            mesh = init_device_mesh(
                "cpu", (self.ranks // self.world_size, self.world_size), mesh_dim_names=("shard", "split")
            )

            def split() -> None:
                parallelize_module(skeleton, mesh["split"], styles, src_data_rank=None)
                if self.fsdp is not None:
                    with meshes_joined_for_real():
                        self.fsdp.shard(skeleton, units, mesh["shard"])

            yield skeleton, split


def _matches(module: torch.nn.Module, path: Sequence[str]) -> bool:
    """Whether `parallelize_module` finds a module by this path of names and globs, one a level."""
    if not path:
        return True
    first, *others = path
    return any(_matches(child, others) for name, child in module.named_children() if fnmatch(name, first))


def own_plan(model: torch.nn.Module) -> dict[str, ParallelStyle]:
    """The parallel styles that a transformers model declares for its modules.

    Raises:
        ProfilingError: it has none, or a style that `parallelize_module` does not have.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    made: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    name = type(model).__name__
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not base:
        raise ProfilingError(
            f"{name} has no plan of its own for tensor parallelism: pass TensorParallel(plan={{'layers.*.up': "
            "ColwiseParallel(), ...}), as for parallelize_module."
        )
    prefix: Any = getattr(model, "base_model_prefix", "")
    is_whole = bool(prefix) and hasattr(model, prefix)
    words = {f"{prefix}.{module}" if is_whole else module: style for module, style in base.items()}
    if is_whole:
        words |= getattr(type(model), "_tp_plan", None) or {}
    unknown = sorted(set(words.values()) - set(made))
    if unknown:
        raise ProfilingError(
            f"{name}'s own plan for tensor parallelism has styles that parallelize_module does not have "
            f"({', '.join(map(repr, unknown))}): pass TensorParallel(plan=...)."
        )
    return {module: made[style]() for module, style in words.items()}
