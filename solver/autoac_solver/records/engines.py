"""The engines' names, as in files; the engines are in `build.engines`."""

from typing import Literal

REPLAY, SAC, CHECKPOINT, COMPILE = "replay", "sac", "checkpoint", "compile"

EngineName = Literal["auto", "replay", "sac", "compile"] | str
"""The engine argument: one of the built-in names, listed for editors, or a registered one. "auto" chooses."""

PLANNED_FOR = [REPLAY, SAC, COMPILE]
"""Engines that plans can be made for, the default first."""

COMPILING = {COMPILE}
"""Engines that compile regions and choose among the measured points of each."""


def compiles(name: str | None) -> bool:
    """Whether an engine, given as the caller's argument, compiles regions."""
    return name in COMPILING


def check_engine(name: str) -> None:
    """Check that plans can be made for this engine.

    Raises:
        ValueError: unknown engine.
    """
    if name not in PLANNED_FOR:
        raise ValueError(f"engine is {name!r}; possible are {', '.join(map(repr, PLANNED_FOR))}")
