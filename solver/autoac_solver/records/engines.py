"""The engines' names, as they stand in files; `build.engines` has the engines."""

from typing import Literal

REPLAY, SAC, CHECKPOINT, COMPILE = "replay", "sac", "checkpoint", "compile"

EngineName = Literal["auto", "replay", "sac", "compile"] | str
"""An engine, as it is asked for: those that editors offer, or another one that is registered. "auto" chooses."""

PLANNED_FOR = [REPLAY, SAC, COMPILE]
"""Those that a plan can be for, the default one first."""

COMPILING = {COMPILE}
"""Those that have their regions compiled, and choose from what was measured of each."""


def compiles(name: str | None) -> bool:
    """Whether an engine, as it is asked for, has its regions compiled."""
    return name in COMPILING


def check_engine(name: str) -> None:
    """Check that a plan can be for this engine.

    Raises:
        ValueError: it is not known.
    """
    if name not in PLANNED_FOR:
        raise ValueError(f"engine is {name!r}; possible are {', '.join(map(repr, PLANNED_FOR))}")
