"""A profile small enough to work out by hand: two equal blocks and a loss."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict

from autoac_solver.build.engines.replay import ReplayCosts
from autoac_solver.build.engines.sac import SacCosts
from autoac_solver.records.profile import EngineCosts, ModuleCall, Op, Profile, Saved, Storage

FREE: EngineCosts = {"replay": asdict(ReplayCosts(0, 0, 0, 0)), "sac": asdict(SacCosts(0, 0, 0))}
"""Engines whose bookkeeping takes no time."""


def two_blocks(costs: EngineCosts = FREE, device: str = "cuda") -> Profile:
    """Two blocks, each `wide` (100 bytes, 2 s) and `narrow` (40 bytes, 1 s), then a loss of 8 bytes; 1000 resident.

    Autograd saves what `wide` makes for the backward of `narrow`, and the second block's input for that of its `wide`;
    as torch does, before the op that reads it runs, so early stop spares `narrow`.
    Each backward op makes a gradient of 20 bytes that lives until the next one is there. The device is not "cpu", so
    that no random states come on top. Ops by tick:

        3 wide.0   5 narrow.0   13 wide.1   15 narrow.1   30 loss
        40 d narrow.1   44 d wide.1   48 d narrow.0   52 d wide.0
    """
    storages = [
        Storage(1000, -1, 60, "Parameter", "weight"),
        Storage(100, 3, 6, "Activation"),
        Storage(40, 5, 14, "Activation"),
        Storage(100, 13, 16, "Activation"),
        Storage(40, 15, 31, "Activation"),
        Storage(8, 30, 60, "Activation"),
        *(Storage(20, tick, tick + 5, "Temp") for tick in (40, 44, 48, 52)),
    ]

    def op(name: str, tick: int, module: int, time_s: float, reads: tuple[int, ...], creates: int) -> Op:
        return Op(f"test.{name}.default", tick, module, tick >= 40, time_s, reads, (), (creates,))

    tape = [
        op("wide", 3, 2, 2.0, (0,), 1),
        op("narrow", 5, 1, 1.0, (1,), 2),
        op("wide", 13, 4, 2.0, (2,), 3),
        op("narrow", 15, 3, 1.0, (3,), 4),
        op("loss", 30, 0, 1.0, (4,), 5),
        *(op("backward", tick, -1, 2.0, (), 6 + i) for i, tick in enumerate((40, 44, 48, 52))),
    ]
    saved = [
        Saved(1, 1, 4, unpacked=47, released=49, dropped=49),
        Saved(2, 4, 12, unpacked=43, released=45, dropped=45),
        Saved(3, 3, 14, unpacked=39, released=41, dropped=41),
    ]
    calls = [
        ModuleCall("", 0, -1, "Net", True, 1, 32),
        ModuleCall("blocks.0", 0, 0, "Block", True, 2, 10, (0,)),
        ModuleCall("blocks.0.wide", 0, 1, "Wide", True, 2, 4, (0,)),
        ModuleCall("blocks.1", 0, 0, "Block", True, 12, 20, (2,)),
        ModuleCall("blocks.1.wide", 0, 3, "Wide", True, 12, 14, (2,)),
    ]
    return Profile(
        *("Net", "0", "0", device, 0, "2.13.0", 60),
        tape=tuple(tape),
        storage_table=tuple(storages),
        saved=tuple(saved),
        calls=tuple(calls),
        costs=costs,
    )


def scaled(profile: Profile, batch: int) -> Profile:
    """The profile of a batch that many times as large: activations and times grow with it."""
    storages = [
        s if s.alloc < 0 else dataclasses.replace(s, bytes=batch * s.bytes) for s in profile.storage_table
    ]
    tape = [dataclasses.replace(op, time_s=batch * op.time_s) for op in profile.tape]
    return dataclasses.replace(profile, storage_table=tuple(storages), tape=tuple(tape))
