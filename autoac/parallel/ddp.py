"""`DistributedDataParallel`: gradients are reduced in buckets, which stay allocated.

The reducer allocates one flat tensor per bucket when it is built, and rebuilds the buckets in the order of the first
backward after that, with the same total size (`Reducer::initialize_buckets`, `Reducer::rebuild_buckets` in
torch/csrc/distributed/c10d/reducer.cpp). So the buckets' number and order and `bucket_cap_mb` do not affect their
bytes. With `gradient_as_bucket_view`, a gradient that backward has made is copied into its place in a bucket, and
replaced by that view (`Reducer::mark_variable_ready_dense`); without, gradients exist in addition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from autoac.parallel.protocol import Parallel
from autoac.record.tape.storages import allocated_bytes
from autoac.torch_private import bucket_options
from autoac_solver.records.profile import BUCKETS, NEVER, Profile, Storage

_INT_BYTES = 4


@dataclass(frozen=True)
class DDP(Parallel):
    """`torch.nn.parallel.DistributedDataParallel`.

    Args:
        gradient_as_bucket_view: the wrapper's option.
        is_here: whether the ranks are running, and all of them call this.
    """

    gradient_as_bucket_view: bool = False
    is_here: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]

    @classmethod
    def of(cls, ddp: torch.nn.Module, *, is_here: bool) -> DDP:
        """The options of a wrapper."""
        return cls(bucket_options(ddp)[0], is_here)

    def with_lifetimes(self, profile: Profile, model: torch.nn.Module) -> Profile:
        """See `Parallel`; the profile of a step that reduced gradients itself already has the buckets."""
        if any(op.name.startswith("c10d.allreduce_") for op in profile.tape):
            return profile
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        device = torch.device(profile.device)
        sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
        # The map of used parameters, on the host and on the device: `Reducer::initialize_local_used_map`.
        used = _INT_BYTES * len(trained) * (2 if device.type == "cpu" else 1)
        buckets = allocated_bytes(sum(sizes), device) + allocated_bytes(used, device)
        table = list(profile.storage_table)
        if self.gradient_as_bucket_view:
            if profile.has_gradients_before:
                return profile  # gradients from before the step are in the buckets, and counted
            table = _copied_at_once(profile, table)
        table.append(Storage(buckets, NEVER, profile.end, "Gradient", BUCKETS))
        return replace(profile, storage_table=tuple(table))

    @contextlib.contextmanager
    def as_wrapped(self, model: torch.nn.Module) -> Iterator[None]:
        """See `Parallel`: gradients that have a place in the buckets are freed when they are made."""
        moved = [p for p in model.parameters() if self.gradient_as_bucket_view and p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(_dropped) for p in moved if p.grad is None]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _dropped(parameter: torch.Tensor) -> None:
    parameter.grad = None


def with_new_buckets_only(profile: Profile, wrapped: Parallel) -> Profile:
    """The profile of a loop's step in which the reducer has rebuilt its buckets, with the new ones alone.

    It does so when the second step's forward begins. With `gradient_as_bucket_view`, gradients of the step before are
    views of the old buckets, which then live until the loop clears these gradients. Later steps begin with the new
    ones.

    Args:
        wrapped: the parallelism of the model's training.
    """
    if not (isinstance(wrapped, DDP) and wrapped.gradient_as_bucket_view):
        return profile
    table, backward = list(profile.storage_table), min(op.tick for op in profile.tape if op.backward)
    gradients = [(index, storage) for index, storage in enumerate(table) if storage.kind == "Gradient"]
    old = [index for index, storage in gradients if storage.alloc == 0 and storage.free < profile.end]
    new = [index for index, storage in gradients if 0 < storage.alloc < backward]
    if sum(table[index].bytes for index in old) != sum(table[index].bytes for index in new):
        return profile
    for index in old:  # in place of the new ones, which an op of this step has made
        table[index] = replace(table[index], alloc=NEVER, free=profile.end, name=BUCKETS)
    for index in new:
        table[index] = replace(table[index], bytes=0)
    return replace(profile, storage_table=tuple(table))


def _copied_at_once(profile: Profile, table: Iterable[Storage]) -> list[Storage]:
    """The table with gradients freed at the op after the last one that adds to them."""
    table = list(table)
    last: dict[int, int] = {}
    for index, op in enumerate(profile.tape):
        for storage in (*op.creates, *op.writes, *op.reads):
            last[storage] = index
    for storage, record in enumerate(table):
        if record.kind == "Gradient" and record.alloc > 0 and storage in last:
            after = min(profile.tape[last[storage]].tick + 1, record.free)
            table[storage] = replace(record, free=after)
    return table
