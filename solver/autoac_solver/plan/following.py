"""How the ops of another step of a call find their decisions in a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoac_solver.records.profile import NEVER


def planned_places(planned: Sequence[str], names: Sequence[str]) -> list[int]:
    """For each op of a call its place among the planned ops; `NEVER` if the plan does not know it.

    As the engines find it: by position while the ops equal the planned ones, after that by overload and its n-th call.
    No place is found twice.

    Args:
        planned, names: names of the overloads, of the planned call and of the one that runs.
    """
    seen: Counter[str] = Counter()
    by_call = {}
    for place, name in enumerate(planned):
        by_call[name, seen[name]] = place
        seen[name] += 1
    seen.clear()
    places = []
    for name in names:
        # While the ops are equal, the n-th call of an overload is the planned one at the same position.
        places.append(by_call.get((name, seen[name]), NEVER))
        seen[name] += 1
    return places
