"""FSDP2 on a device that is not the CPU, where torch's `CPUOffloadPolicy` moves shards; `python -m` this with LIBRARY.

The device counts its bytes. Collectives do nothing, so that values are right for one rank only; their memory is that
of so many ranks. Prints what was predicted and counted, as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoac
from autoac.parallel import FSDP2
from autoac_solver.records.devices import DeviceTable
from autoac_solver.records.profile import Profile
from tests.parallel.models import Net, batch, make, sharded
from tests.second_device import NAME, end, load

UNITS = ["layers.*", "pair.*"]
OFFLOADED = CPUOffloadPolicy(pin_memory=False)
WIDER = MixedPrecisionPolicy(param_dtype=torch.float64)
CASES: dict[str, dict[str, Any]] = {
    "on the device": {},
    "offloaded": {"offload_policy": OFFLOADED},
    "offloaded, cast": {"offload_policy": OFFLOADED, "mp_policy": WIDER},
    "offloaded, not resharded": {"offload_policy": OFFLOADED, "reshard_after_forward": False},
    "offloaded, two ahead": {"offload_policy": OFFLOADED, "prefetch": 2},
    "offloaded, two replicas": {"offload_policy": OFFLOADED, "replicas": 2},
}


@contextmanager
def ranks(number: int) -> Iterator[None]:
    """This process is rank 0 of so many, whose collectives do nothing."""
    dist.init_process_group(f"cpu:fake,{NAME}:fake", store=FakeStore(), rank=0, world_size=number)
    yield
    dist.destroy_process_group()


def mesh_of(number: int, replicas: int = 1) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(NAME, (number,))
    return init_device_mesh(NAME, (replicas, number // replicas), mesh_dim_names=("replicate", "shard"))


def step_of(model: Net, x: torch.Tensor) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach().cpu()


def counted(model: Net, x: torch.Tensor) -> int:
    """The most bytes that the device holds in a step after the first."""
    gc.collect()  # models before this one are in cycles
    for _ in range(2):
        model.zero_grad()
        torch.ops.toy.reset_peak()
        step_of(model, x)
    return torch.ops.toy.peak_bytes()


def plans_of(profile: Profile, engine: str) -> list[autoac.Plan]:
    """For the least budget, and for one half way to that of a step without a plan."""
    loose = autoac.solve(profile, 10**12, engine=engine)
    try:
        autoac.solve(profile, 1, engine=engine)
    except autoac.InfeasibleBudgetError as error:
        least = error.minimum_bytes
        budgets = (least, (least + loose.predicted_peak_bytes) // 2)
        return [loose, *(autoac.solve(profile, budget, engine=engine) for budget in budgets)]
    raise AssertionError("a byte is enough")


def wrapped(plan: autoac.Plan) -> int:
    return sum(region.wrapped for region in plan.regions)


@functools.cache
def device_table() -> str:
    """File of a device that allocates each tensor's bytes and no more, as the one here does."""
    path = Path(tempfile.mkdtemp()) / "device.json"
    rates: dict[str, Any] = {"memory_bytes": 10**10, "block_bytes": 1, "matrix_flops": {"": 1e12}}
    rates |= {"bandwidth": 1e11, "launch_s": 1e-6, "efficiency": (1.0, 1.0)}
    DeviceTable("here", "cpu", "a device of the tests", source="datasheet", made={}, **rates).save(path)
    return str(path)


def absent(options: dict[str, Any]) -> dict[str, list[tuple[int, int, int]]]:
    """Peaks of one of four absent ranks: as predicted, as the device counts them; and the number of wrapped regions."""
    spec = FSDP2(4, UNITS, **options)
    profile = autoac.profile(make(), batch(), mode="fake", parallel=spec, device=device_table())
    found: dict[str, list[tuple[int, int, int]]] = {"replay": [], "sac": []}
    with ranks(4):
        replicas = options.pop("replicas", 1)
        model = sharded(make().to(NAME), mesh=mesh_of(4, replicas), **options)
        x = batch().to(NAME)
        for engine, peaks in found.items():
            for made in plans_of(profile, engine):
                plan = autoac.Plan(dataclasses.replace(made.record, device=f"{NAME}:0"))
                plan.apply(model)
                peaks.append((plan.predicted_peak_bytes, counted(model, x), wrapped(plan)))
                plan.remove(model)
    return found


def gathering(number: int) -> tuple[int, int]:
    """The peak of one of so many absent ranks where it lies at a gathering, and as the device counts it."""
    spec = FSDP2(number, UNITS, offload_policy=OFFLOADED)
    profile = autoac.profile(frozen(make()), batch(rows=2), mode="fake", parallel=spec, device=device_table())
    with ranks(number):
        model = sharded(frozen(make()).to(NAME), mesh=mesh_of(number), offload_policy=OFFLOADED)
        return profile.peak_bytes, counted(model, batch(rows=2).to(NAME))


def frozen(model: Net) -> Net:
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def here(engine: str) -> dict[str, Any]:
    """Plans for an offloaded model that is there, as the only rank."""
    with ranks(1):
        model = sharded(make().to(NAME), mesh=mesh_of(1), offload_policy=OFFLOADED)
        assert next(model.parameters()).device.type == "cpu"
        x = batch().to(NAME)

        def values() -> list[torch.Tensor]:
            model.zero_grad()
            loss = step_of(model, x)
            gradients = [p.grad for p in model.parameters()]
            assert all(isinstance(gradient, DTensor) for gradient in gradients)
            return [loss, *(cast(DTensor, gradient).full_tensor() for gradient in gradients)]

        profile = autoac.profile(model, x, optimizer=torch.optim.AdamW(model.parameters()))
        expected = values()
        waiting = [op.name for op in profile.tape if op.waits]
        found: dict[str, Any] = {"device": profile.device, "peaks": [], "equal": [], "waiting": waiting}
        for plan in plans_of(profile, engine):
            plan.apply(model)
            found["peaks"].append((plan.predicted_peak_bytes, counted(model, x), wrapped(plan)))
            found["equal"].append(all(map(torch.equal, values(), expected)))
            plan.remove(model)
    return found


def main(library: str) -> None:
    load(library)
    found = {name: absent(dict(options)) for name, options in CASES.items()}
    others = {engine: here(engine) for engine in ("replay", "sac")}
    print(json.dumps({"absent": found, "gathering": [gathering(n) for n in (1, 2, 4)], "here": others}))


if __name__ == "__main__":
    main(*sys.argv[1:])
    end()
