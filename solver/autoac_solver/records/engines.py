"""The engines' names, as in files; the engines are in `build.engines`."""

from typing import Literal, get_args

BuiltIn = Literal["replay", "sac", "compile"]
"""The built-in engines that plans can be made for, the default first. The command line has its own copy."""

EngineName = Literal["auto", BuiltIn] | str
"""The engine argument: one of the built-in names, listed for editors, or a registered one. "auto" chooses."""

PLANNED_FOR: list[str] = list(get_args(BuiltIn))
"""Engines that plans can be made for, the default first; `build.engines.register` adds to them."""

REPLAY, SAC, COMPILE = PLANNED_FOR[:3]
CHECKPOINT = "checkpoint"

COMPILING = {COMPILE}
"""Engines that compile regions and choose among the measured points of each; `build.engines.register` adds to them.

As the engines' models say (`EngineModel.compiles`), which files are read without.
"""


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
