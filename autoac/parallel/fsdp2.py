"""FSDP2 (`fully_shard`): each rank holds a part of every parameter, and gathers a unit's parameters around its calls.

Its cost is not modelled here: the step is recorded with torch's own code, on the ranks if they are running, else on
fake tensors with torch's `fake` process group, whose collectives do nothing for any number of ranks. See
NOTE [ The recorded step ] 5 in `record/tape/tape.py` for gathered parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from autoac.parallel.protocol import Sharded
from autoac.record.tape.storages import host_memory
from autoac.step.modules import RegionChoice, is_called
from autoac.step.units import has_units
from autoac.torch_private import fake_ranks, offloads_copied, own_tensors
from autoac_solver.records.arguments import as_patterns, matched, outermost_matched
from autoac_solver.records.errors import ProfilingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class FSDP2(Sharded):
    """`torch.distributed.fsdp.fully_shard`.

    Args:
        world_size: number of ranks, to plan for one of them; None for the running ranks.
        units: the modules to call `fully_shard` with, besides the model itself: names, globs or a predicate; [] for
            none. None for the members of the model's outermost lists of modules (its blocks, mostly).
        reshard_after_forward, mp_policy, offload_policy: arguments of `fully_shard`, for all units. None lets the model
            itself keep its own parameters after forward. With torch's `CPUOffloadPolicy`, shards of parameters and
            gradients and the optimizer are in the host's memory; on a GPU this has not been measured yet. Absent ranks
            then need a `device`.
        replicas: number of groups of ranks that each hold all shards (HSDP); it divides `world_size`.
        prefetch: number of units that each unit gathers ahead, the next ones in forward and the previous ones in
            backward (`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`), in the order of the
            model's modules; None for FSDP2's own way, one in backward.
        is_here: whether the ranks are running, and all of them call this.
    """

    units: RegionChoice = None
    reshard_after_forward: bool | int | None = None
    mp_policy: Any = field(default=None, compare=False)
    replicas: int = 1
    prefetch: int | None = None
    offload_policy: Any = field(default=None, compare=False)
    is_here: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.world_size
        if size is not None and type(self.reshard_after_forward) is int:
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward} makes groups of ranks, which are recorded on real "
                "ranks only: plan there, or take True, False or None."
            )
        if not isinstance(self.replicas, int) or self.replicas < 1 or (size or self.replicas) % self.replicas:
            raise ValueError(f"replicas is {self.replicas!r}: it must divide the {size} ranks.")
        ahead = self.prefetch
        if ahead is not None and (not isinstance(ahead, int) or ahead < 1):
            raise ValueError(
                f"prefetch is {ahead!r}: how many units are gathered ahead, at least 1, or None."
            )
        if self.offload_policy is not None:
            from torch.distributed.fsdp import OffloadPolicy

            if not isinstance(self.offload_policy, OffloadPolicy):
                raise ValueError(
                    f"offload_policy is {self.offload_policy!r:.80}: pass torch.distributed.fsdp.CPUOffloadPolicy(), "
                    "or None."
                )

    @property
    def offloads(self) -> bool:
        """See `Sharded`."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @contextlib.contextmanager
    def sharded(self, model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Callable[[], None]]]:
        """See `Sharded`."""
        assert self.world_size is not None
        if has_units(model):
            raise ProfilingError(
                "this model is sharded already: leave parallel= out to plan for the ranks that are there, or pass the "
                "model before fully_shard to plan for others."
            )
        units = chosen_units(model, self.units)
        skeleton = without_values(model)
        with fake_ranks(self.world_size), self.copies_recorded():
            mesh = self._mesh()  # here, because it reads values, which fake tensors lack
            yield skeleton, lambda: self.shard(skeleton, units, mesh)

    def copies_recorded(self) -> contextlib.AbstractContextManager[None]:
        """Context in which copies between device and host are made on fake CPU tensors, where both are the CPU."""
        if not self.offloads:
            return contextlib.nullcontext()
        return offloads_copied(host_memory.as_target)

    def _mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        assert self.world_size is not None
        shards = self.world_size // self.replicas
        if self.replicas == 1:
            return init_device_mesh("cpu", (shards,))
        return init_device_mesh("cpu", (self.replicas, shards), mesh_dim_names=("replicate", "shard"))

    def shard(self, model: torch.nn.Module, units: Iterable[str], mesh: DeviceMesh) -> None:
        """Call `fully_shard` on these modules, by name, and on the model.

        Args:
            mesh: mesh of the ranks that shard together.
        """
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        # Whether the host's memory is pinned makes no difference to the device's, and fake tensors cannot be.
        offload = CPUOffloadPolicy(pin_memory=False) if self.offloads else self.offload_policy
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": self.mp_policy or MixedPrecisionPolicy(),
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": offload or OffloadPolicy(),
        }
        # Innermost first, as `fully_shard` requires.
        for name in sorted(units, key=lambda name: -name.count(".")):
            fully_shard(model.get_submodule(name), **options)
        fully_shard(model, **options)
        if self.offloads:
            host_memory.add(model.parameters())
        if self.prefetch is None:
            return
        chosen = set(units)
        in_order: list[Any] = [module for name, module in model.named_modules() if name in chosen]
        for place, unit in enumerate(in_order):
            unit.set_modules_to_forward_prefetch(in_order[place + 1 : place + 1 + self.prefetch])
            unit.set_modules_to_backward_prefetch(in_order[max(0, place - self.prefetch) : place][::-1])


def chosen_units(model: torch.nn.Module, units: RegionChoice) -> list[str]:
    """Names of the modules to shard one by one; a unit may hold others.

    Args:
        units: as `FSDP2.units`.

    Raises:
        ProfilingError: a name or glob matches no module that has a forward.
    """
    if units is not None:
        return _named(model, units)
    found: list[str] = []
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        for key, child in module.named_children():
            below = f"{name}.{key}" if name else key
            is_listed = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
            if is_listed and is_called(child) and next(child.parameters(), None) is not None:
                found.append(below)
            else:
                stack.append((below, child))
    return sorted(found)


def _named(model: torch.nn.Module, units: Any) -> list[str]:
    modules = {name: module for name, module in model.named_modules() if name and is_called(module)}
    if callable(units) and not isinstance(units, torch.nn.Module):
        return [name for name, module in modules.items() if units(name, module)]
    found = matched(as_patterns(units, what="units"), modules, "this model, with a forward", what="units")
    # Of the modules that one glob matches, the outermost; those of another may be inside them.
    return list(dict.fromkeys(name for names in found.values() for name in outermost_matched({"": names})))


def without_values(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model whose parameters, and floating or complex buffers, are on the meta device.

    Raises:
        ProfilingError: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for kind in own_tensors(module):
            for tensor in kind.values():
                if tensor is not None:
                    memo[id(tensor)] = _empty(tensor)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ProfilingError(
            f"{type(model).__name__} cannot be copied ({error!r:.200}), and a copy of it is what is sharded. Build the "
            'model on the meta device (`with torch.device("meta")`), without what copy.deepcopy refuses.'
        ) from error


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor  # positions, masks: small, and their values are read
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made
