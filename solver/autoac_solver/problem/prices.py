"""Linear costs for the integer program where host and device have separate clocks.

NOTE [ Prices of one path ]
  A step ends at the end of its longest path through host and device work. The integer program needs sums, so it adds up
  the seconds of the pieces on one fixed path. No plan ends before that path does, so
      seconds added  >=  sum of prices  -  slack,
  where the slack is the longest path's length minus this path's length, both with nothing recomputed. The first path is
  the longest one with nothing recomputed: its slack is zero. If the plan found has another longest path, that path's
  prices are tried too. The path must exist in every plan, so it returns from device to host only at pieces that wait
  and are always done.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoac_solver.problem.problem import RECOMPUTE, Action, Literal, Option, Problem
from autoac_solver.records.clocks import longest_path


def priced(problem: Problem, done: np.ndarray | None = None) -> tuple[Problem, float]:
    """Replace the problem's seconds by prices along the longest path.

    Args:
        problem: has `work`. Its options and regions carry their own seconds, or another path's prices.
        done: bool per piece, shape (pieces,): done in the plan whose longest path is priced. None: the pieces that are
            always done.

    Returns:
        The problem, and the slack in seconds.
    """
    work = problem.work
    always = np.array([not piece.literals and piece.wrapped < 0 for piece in work], dtype=bool)
    done = always if done is None else done
    host_s = np.array([piece.host_s for piece in work])
    device_s = np.array([piece.device_s for piece in work])
    waits = np.array([piece.waits for piece in work], dtype=bool) & always
    on_host, on_device = longest_path(host_s * done, device_s * done, waits)
    price_s = host_s * on_host + device_s * on_device
    start_host, start_device = longest_path(host_s * always, device_s * always, waits)
    start_s = ((host_s * start_host + device_s * start_device) * always).sum()
    slack_s = float(max(0.0, start_s - (price_s * always).sum()))
    return _with_prices(problem, price_s), slack_s


def _with_prices(problem: Problem, price_s: np.ndarray) -> Problem:
    of_literals: dict[tuple[Literal, ...], float] = {}
    of_region = [0.0] * len(problem.regions)
    for piece, price in zip(problem.work, price_s.tolist(), strict=True):
        if piece.wrapped >= 0:
            of_region[piece.wrapped] += price
        elif piece.literals:
            of_literals[piece.literals] = of_literals.get(piece.literals, 0.0) + price
    groups = []
    for index, group in enumerate(problem.groups):
        price = of_literals.pop((Literal(index, RECOMPUTE),), 0.0)
        groups.append(replace(group, options=tuple(_priced(option, price) for option in group.options)))
    return replace(
        problem,
        groups=tuple(groups),
        regions=tuple(replace(r, wrap_s=price) for r, price in zip(problem.regions, of_region, strict=True)),
    )


def _priced(option: Option, price_s: float) -> Option:
    return replace(option, time_s=price_s) if option.time_s or option.action is Action.RECOMPUTE else option
