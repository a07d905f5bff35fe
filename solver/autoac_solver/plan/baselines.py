"""Common manual strategies: torch's own checkpoint on every block, or on every second, third or fourth.

A block is recomputed as a whole at the first need in backward; its inputs are kept; recomputation stops after the last
tensor that autograd saves. The simulator computes the peak on the same tape as for a plan. The time is that of the
rerun ops, plus the cost of torch's checkpoint per call and per saved tensor. (Rerun views count as free, which favours
the baseline.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd

from autoac_solver.build.build import build
from autoac_solver.build.losses.cross_entropy import with_torchs_losses
from autoac_solver.plan.partitions import named_calls, partitions
from autoac_solver.problem.problem import RECOMPUTE
from autoac_solver.problem.simulator import Simulator, Timeline
from autoac_solver.records.engines import CHECKPOINT
from autoac_solver.records.profile import Profile

COLUMNS = ["name", "blocks", "peak_bytes", "extra_s", "overhead"]


def baselines(profile: Profile) -> pd.DataFrame:
    """Table of common manual checkpointing strategies: name, checkpointed blocks, peak_bytes, extra_s, overhead."""
    blocks = blocks_of(profile)
    ordinals = {2: "2nd", 3: "3rd", 4: "4th"}
    chosen = {"none": (), "every block": blocks}
    chosen |= {f"every {ordinals[k]} block": blocks[::k] for k in ordinals if len(blocks) >= k}
    if not blocks:
        del chosen["every block"]
    rows = []
    for name, calls in chosen.items():
        timeline = checkpointed(profile, calls)
        overhead = timeline.extra_s / profile.step_s if profile.step_s else 0.0
        rows.append((name, len(calls), timeline.peak_bytes, timeline.extra_s, overhead))
    return pd.DataFrame(rows, columns=COLUMNS)


def checkpointed(profile: Profile, calls: Sequence[int]) -> Timeline:
    """Simulate the step with these module calls under `torch.utils.checkpoint`.

    Args:
        calls: none inside another.
    """
    problem = build(with_torchs_losses(profile), calls, CHECKPOINT).problem
    return Simulator(problem).simulate([RECOMPUTE] * len(problem.groups))


def blocks_of(profile: Profile) -> tuple[int, ...]:
    """The module calls that users would checkpoint: members of module lists, "layers.3", "stages.1.layers.0".

    Of nested lists, the level with the lowest peak if all of its members are checkpointed. For a model without module
    lists, the coarsest choice of `partitions`.
    """
    levels: dict[int, set[str]] = {}
    for call in profile.calls:
        if call.grad and re.search(r"(^|\.)\d+$", call.fqn):
            levels.setdefault(len(re.findall(r"(?:^|\.)\d+(?=\.|$)", call.fqn)), set()).add(call.fqn)
    parents = {call.parent for call in profile.calls}
    candidates = [
        calls
        for _, names in sorted(levels.items())
        if len(calls := named_calls(profile, sorted(names))) > 1 and parents.intersection(calls)
    ]
    if not candidates:
        return partitions(profile)[0]
    return tuple(min(candidates, key=lambda calls: checkpointed(profile, calls).peak_bytes))
