"""Checks of callers' arguments, made before a step runs or anything is solved."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from autoac_solver.records.disk.limits import MOST_NUMBER
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.names import is_part, region_in_words

Tell = Callable[[str, float], None]
"""Progress callback, called with a description of the current work and the share that is done, 0 to 1."""

_NAMES = 'names or globs of modules ("layers.*"), or several of these'
MOST_CURVE_POINTS = 10_000
"""Each is a problem to solve."""
_FEW_BYTES = 1000
"""No step needs so few bytes: a smaller number passed as budgets was meant as something else."""


def check_effort(time_limit_s: Any, gap: Any) -> None:
    """Check the solver's limits.

    Raises:
        ValueError: one of them is not a number of at least 0.
    """
    for name, value, meaning in (
        ("time_limit_s", time_limit_s, "seconds for the solver, 60 for instance"),
        ("gap", gap, "a fraction of the step's time, 1e-3 for instance"),
    ):
        is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        value: Any = value  # numbers.Real declares no comparisons.
        # An int can be too large for a float; infinity is allowed.
        if not is_real or not value >= 0 or MOST_NUMBER < value < math.inf:
            raise ValueError(f"{name} is {_shown(value)}; it takes a number of at least 0: {meaning}.")


def _shown(value: Any) -> str:
    """For a message. Python does not write out an int of thousands of digits."""
    too_long = isinstance(value, int) and not -MOST_NUMBER <= value <= MOST_NUMBER
    return "a number of many digits" if too_long else f"{value!r:.80}"


def check_points(points: Any, budgets: Any) -> None:
    """Check the number of points, and that `budgets` is not a number of points by mistake.

    Raises:
        ValueError: `points` is no int from 2 to `MOST_CURVE_POINTS`, or `budgets` is an int too small for bytes.
    """
    if not hasattr(points, "__index__") or points < 2:
        raise ValueError(f"points is {_shown(points)}; a curve takes at least 2, an int.")
    if points > MOST_CURVE_POINTS:
        raise ValueError(f"points is {_shown(points)}; a curve takes at most {MOST_CURVE_POINTS}.")
    if hasattr(budgets, "__index__") and 0 < budgets < _FEW_BYTES:
        raise ValueError(
            f"budgets is {budgets!r}, one budget of so many bytes, and no step takes so few. For a curve over so many "
            f"budgets write points={budgets!r}."
        )


def several_budgets(budgets: Any) -> list[Any]:
    """One budget or several, as a list; the budgets themselves are not checked.

    Raises:
        ValueError: there is none.
    """
    found = list(budgets) if isinstance(budgets, Iterable) and not isinstance(budgets, str) else [budgets]
    if not found:
        raise ValueError("budgets is empty; give at least one.")
    return found


def check_batch_sizes(sizes: Any, profiles: Any) -> list[int]:
    """The batch sizes, ascending and without duplicates.

    Args:
        profiles: a mapping from batch size to profile; anything else is taken to make profiles.

    Raises:
        ValueError: they are not several ints of at least 1, or the mapping lacks a profile for one of them.
    """
    try:
        given = None if isinstance(sizes, (str, Mapping)) else list(sizes)
    except TypeError:
        given = None
    if given is None:
        hint = f" For this one write batch_sizes=[{sizes!r}]." if hasattr(sizes, "__index__") else ""
        raise ValueError(
            f"batch_sizes is {sizes!r:.80}; it takes several ints, [8, 16, 32] for instance.{hint}"
        )
    for size in given:
        if not hasattr(size, "__index__") or isinstance(size, bool) or size < 1:
            raise ValueError(f"batch_sizes holds {size!r:.80}; a batch size is an int of at least 1.")
    found = sorted({operator.index(size) for size in given})
    if not found:
        raise ValueError("batch_sizes is empty; give at least one.")
    is_whole = isinstance(profiles, Mapping) and not hasattr(profiles, "__missing__")
    if missing := [size for size in found if is_whole and size not in profiles]:
        raise ValueError(
            f"batch_sizes holds {', '.join(map(str, missing))}, of which no profile was given; there are profiles of "
            f"{', '.join(map(str, sorted(profiles)))}."
        )
    return found


def as_patterns(regions: Any, possible: str = _NAMES, what: str = "regions") -> list[str]:
    """Names and globs of modules as a list.

    Args:
        possible: the accepted values, as text for the message.
        what: the argument's name.

    Raises:
        ValueError: they are something else.
    """
    found: list[Any]
    if isinstance(regions, str) or callable(regions) or not isinstance(regions, Iterable):
        verb, found = "is", [regions]
    else:
        verb, found = "holds", list(regions)
    for item in found:
        if not isinstance(item, str):
            raise ValueError(
                f"{what} {verb} a {type(item).__name__}; it takes {possible}. A module's name is what "
                "model.named_modules() calls it."
            )
    return found


def matched(
    patterns: Sequence[str], names: Iterable[str], owner: str, what: str = "regions"
) -> dict[str, list[str]]:
    """Name or glob -> names of the modules that it matches.

    Args:
        names: names of all modules.
        owner: their owner, as text for the message.
        what: the argument's name.

    Raises:
        ProfilingError: one of them matches no module.
    """
    names = list(names)
    found = {}
    for pattern in patterns:
        found[pattern] = [
            n for n in names if any(k == pattern or (k and is_meant(k, pattern)) for k in known_as(n))
        ]
        if not found[pattern]:
            part = (
                " Parts of a call are chosen by the planner: leave regions= out." if is_part(pattern) else ""
            )
            raise ProfilingError(
                f"{what}={pattern!r} matches no module.{part} Modules of {owner} are: {some(names)}."
            )
    return found


def is_meant(name: str, pattern: str) -> bool:
    """Whether a pattern matches a name, exactly or as a glob. (A name may contain brackets itself.)"""
    return name == pattern or fnmatchcase(name, pattern)


def known_as(name: str) -> tuple[str, ...]:
    """A module's name, with and without the `_orig_mod` wrappers of `torch.compile`."""
    plain = ".".join(part for part in name.split(".") if part != "_orig_mod")
    return (name, plain) if plain and plain != name else (name,)


def outermost_matched(found: Mapping[str, Sequence[str]]) -> list[str]:
    """The matched modules that are inside no other matched one; a glob's "*" crosses dots and matches inner ones, too.

    Args:
        found: name or glob -> the modules that it matched.

    Raises:
        ProfilingError: all matches of a name or glob are inside others, which cannot be intended.
    """
    chosen = dict.fromkeys(name for names in found.values() for name in names)
    outer = [name for name in chosen if not any(_inside(name, other) for other in chosen)]
    for names in found.values():
        if not set(names) & set(outer):
            other = next(other for other in outer if _inside(names[0], other))
            raise ProfilingError(
                f"region {names[0]!r} is inside {region_in_words(other)}: choose one of them."
            )
    return outer


def some(names: Iterable[str]) -> str:
    """The first of these names as text for a message."""
    shown = [repr(name) for name in names if name]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "")


def _inside(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(f"{other}."))
