"""`DistributedDataParallel`: gradients are reduced in buckets, which are there all the time.

The reducer makes one flat tensor a bucket when it is built, and anew, of the same sizes together, in the order of the
first backward, after that (`Reducer::initialize_buckets`, `Reducer::rebuild_buckets` in
torch/csrc/distributed/c10d/reducer.cpp). So their number, their order and `bucket_cap_mb` do not matter to their
bytes. With `gradient_as_bucket_view` a gradient that backward has made is copied into its place in a bucket, and that
view takes its place (`Reducer::mark_variable_ready_dense`); without, gradients are there besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from autoac.parallel.protocol import Plain
from autoac.record.tape.storages import allocated_bytes
from autoac.torch_private import bucket_options
from autoac_solver.records.profile import NEVER, Profile, Storage

BUCKETS = "DDP's buckets"
_INT_BYTES = 4


@dataclass(frozen=True)
class DDP(Plain):
    """`torch.nn.parallel.DistributedDataParallel`.

    Args:
        gradient_as_bucket_view: as the wrapper is given it.
        is_here: whether the ranks are there, and all of them call this.
    """

    gradient_as_bucket_view: bool = False
    is_here: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]

    @classmethod
    def of(cls, ddp: torch.nn.Module, *, is_here: bool) -> DDP:
        """That of a wrapper."""
        return cls(bucket_options(ddp)[0], is_here)

    def with_lifetimes(self, profile: Profile, model: torch.nn.Module) -> Profile:
        """See `Parallel`; a step that reduced gradients itself has shown the buckets."""
        if any(op.name.startswith("c10d.allreduce_") for op in profile.tape):
            return profile
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        device = torch.device(profile.device)
        sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
        # Which parameters were used, on the host and on the device: `Reducer::initialize_local_used_map`.
        used = _INT_BYTES * len(trained) * (2 if device.type == "cpu" else 1)
        buckets = allocated_bytes(sum(sizes), device) + allocated_bytes(used, device)
        table = list(profile.storage_table)
        if self.gradient_as_bucket_view:
            if any(storage.kind == "Gradient" and storage.alloc == NEVER for storage in table):
                return profile  # they are in the buckets, and counted
            table = _copied_at_once(profile, table)
        table.append(Storage(buckets, NEVER, profile.end, "Gradient", BUCKETS))
        return replace(profile, storage_table=tuple(table))


def _copied_at_once(profile: Profile, table: Iterable[Storage]) -> list[Storage]:
    """Gradients live until the op after the last one that adds to them."""
    table = list(table)
    last: dict[int, int] = {}
    for index, op in enumerate(profile.tape):
        for storage in (*op.creates, *op.writes, *op.reads):
            last[storage] = index
    for storage, record in enumerate(table):
        if record.kind == "Gradient" and record.alloc != NEVER and storage in last:
            after = min(profile.tape[last[storage]].tick + 1, record.free)
            table[storage] = replace(record, free=after)
    return table
