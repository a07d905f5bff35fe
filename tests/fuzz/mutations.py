"""Random damage to plans, and to files."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autoac_solver.plan.recorded.programs import step_facts, with_regions
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.plan import CallProgram, PlanRecord, RegionPlan

Steps = tuple[tuple[str, bool], ...]


# -- plans -------------------------------------------------------------------------------------------------------------


def _flipped(dice: random.Random, steps: Steps) -> Steps:
    share = dice.choice([0.0, 0.1, 0.5, 1.0])
    one = dice.randrange(len(steps))
    return tuple(
        (name, again ^ (index == one or dice.random() < share)) for index, (name, again) in enumerate(steps)
    )


def _all_recomputed(dice: random.Random, steps: Steps) -> Steps:
    return tuple((name, True) for name, _ in steps)


def _dropped(dice: random.Random, steps: Steps) -> Steps:
    one = dice.randrange(len(steps))
    return steps[:one] + steps[one + 1 :]


def _repeated(dice: random.Random, steps: Steps) -> Steps:
    one = dice.randrange(len(steps))
    return steps[:one] + steps[one : one + 1] + steps[one:]


def _renamed(dice: random.Random, steps: Steps) -> Steps:
    one = dice.randrange(len(steps))
    name = dice.choice(["aten.nothing.default", "no such thing", "", dice.choice(steps)[0]])
    return (*steps[:one], (name, steps[one][1]), *steps[one + 1 :])


def _reordered(dice: random.Random, steps: Steps) -> Steps:
    return tuple(dice.sample(steps, len(steps)))


def _swapped(dice: random.Random, steps: Steps) -> Steps:
    found = list(steps)
    a, b = dice.randrange(len(steps)), dice.randrange(len(steps))
    found[a], found[b] = found[b], found[a]
    return tuple(found)


STEPS = [_flipped, _flipped, _all_recomputed, _dropped, _repeated, _renamed, _reordered, _swapped]


def mutated(record: PlanRecord, modules: list[str], dice: random.Random) -> tuple[str, PlanRecord]:
    """What was done to a plan, and the plan with other decisions than the solver's, for other ops or other modules.

    Args:
        modules: names of the model's modules.
    """
    regions = list(record.regions)
    index = dice.randrange(len(regions))
    region = regions[index]
    what = dice.choice(
        ["steps", "steps", "steps", "module", "call", "wrapped", "engine", "all", "exchanged", "gone"]
    )
    if what == "steps" and region.steps:
        change: Callable[[random.Random, Steps], Steps] = dice.choice(STEPS)
        what = change.__name__
        regions[index] = replace(region, wrapped=True, steps=change(dice, region.steps))
    elif what == "module":
        regions[index] = replace(region, fqn=dice.choice(modules), call=0, calls=1, wrapped=True)
    elif what == "call":
        calls = dice.randrange(1, 4)
        regions[index] = replace(region, call=dice.randrange(calls), calls=calls, wrapped=True)
    elif what == "wrapped":
        regions[index] = replace(region, wrapped=not region.wrapped)
    elif what == "engine":
        engine = "sac" if record.engine == "replay" else "replay"
        return what, replace(record, engine=engine, step=step_facts(record.profile, engine))
    elif what == "all":
        regions = [
            replace(r, wrapped=True, steps=_flipped(dice, r.steps) if r.steps else ()) for r in regions
        ]
    elif what == "exchanged":
        other = dice.randrange(len(regions))
        regions[index], regions[other] = _exchanged(region, regions[other])
    elif what == "gone":
        del regions[index]
    try:
        return what, with_regions(record, regions)
    except ProfileError:  # the profile has no such call: a program for it, as a file may hold
        return what, replace(record, regions=tuple(regions), calls=tuple(map(_program, regions)))


def _program(region: RegionPlan) -> CallProgram:
    return CallProgram(
        *(region.fqn, region.call, region.calls, region.name, (region.name,), region.wrapped, region.steps)
    )


def _exchanged(a: RegionPlan, b: RegionPlan) -> tuple[RegionPlan, RegionPlan]:
    return replace(a, wrapped=True, steps=b.steps), replace(b, wrapped=True, steps=a.steps)


# -- files -------------------------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    10**6,
    10**18,
    10**30,
    -(10**30),
    0.5,
    -1.5,
    1e300,
    "",
    "x",
    "a\x1b[31mb",
]
JUNK += ["<script>alert(1)</script>", "\ud800", [], {}, [[]], {"a": 1}, [1, 2, 3], "aten.mm.default"]


def damaged(data: Any, dice: random.Random) -> Any:
    """A copy of a file's data with one to three values in it changed, moved, doubled or gone."""
    data = copy.deepcopy(data)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        _damage(data, dice)
    return data


def _damage(node: Any, dice: random.Random) -> None:
    """Descend to some place, wide containers as likely as narrow ones, and damage it."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = dice.choice(keys)
        inner = node[key]
        if isinstance(inner, (dict, list)) and inner and dice.random() < 0.93:
            node = inner
            continue
        kind = dice.random()
        if kind < 0.1 and isinstance(node, list):
            node.insert(key, copy.deepcopy(inner))
        elif kind < 0.2:
            del node[key]
        elif kind < 0.35:
            other = dice.choice(keys)
            node[key], node[other] = node[other], inner
        elif kind < 0.75 and isinstance(inner, (int, float)) and not isinstance(inner, bool):
            node[key] = dice.choice(
                [inner + 1, inner - 1, inner * 2, inner * 1000, -inner, inner // 2, dice.randrange(200)]
            )
        elif kind < 0.75 and isinstance(inner, bool):
            node[key] = not inner
        else:
            node[key] = dice.choice(JUNK)
        return


def damaged_text(data: Any, dice: random.Random) -> bytes:
    """The data as JSON with damage to its bytes, or to what JSON allows."""
    text = json.dumps(data).encode()
    kind, place = dice.randrange(8), dice.randrange(len(text))
    if kind == 0:
        return text[:place]
    if kind == 1:
        return text[:place] + dice.randbytes(dice.randrange(1, 9)) + text[place + 3 :]
    if kind == 2:
        return text + text
    if kind == 3:
        number = dice.choice(
            [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"9" * 5000, b"0x10", b"-0.0", b"1e-400"]
        )
        start = text.find(b": ", place)
        return text[: start + 2] + number + b", " + text[start + 2 :] if start >= 0 else text[place:]
    if kind == 4:
        opening = dice.choice([b"[", b'{"a":'])
        return opening * dice.choice([10, 1000, 100_000]) + text
    if kind == 5:
        start = text.find(b'"', place)
        return text[:start] + b'"tape": [], ' + text[start:] if start >= 0 else b""
    if kind == 6:
        return (
            dice.choice(["utf-16", "utf-32", "utf-8-sig"]).encode() + text
            if dice.random() < 0.3
            else text.decode().encode("utf-16")
        )
    return bytes(byte for byte in text if dice.random() > 0.001)
