"""The engines that problems are built for: one file each, registered here."""

from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.engines.checkpoint import Checkpoint
from autoac_solver.build.engines.compile import Compile
from autoac_solver.build.engines.replay import Replay
from autoac_solver.build.engines.sac import Sac
from autoac_solver.records.engines import COMPILING, PLANNED_FOR

__all__ = ["DEFAULT", "EngineModel", "engine_model", "planned_for", "register"]

_ENGINES: dict[str, EngineModel] = {}
DEFAULT = PLANNED_FOR[0]
"""The engine used in eager mode."""


def register(model: EngineModel) -> None:
    """Register an engine; its name becomes valid in files, too."""
    _ENGINES[model.name] = model
    if model.selects and model.name not in PLANNED_FOR:
        PLANNED_FOR.append(model.name)
    if model.compiles:
        COMPILING.add(model.name)


def engine_model(name: str) -> EngineModel:
    """The engine of a name.

    Raises:
        ValueError: unknown name.
    """
    if name not in _ENGINES:
        raise ValueError(f"engine is {name!r}; known are {', '.join(map(repr, _ENGINES))}")
    return _ENGINES[name]


def planned_for() -> tuple[str, ...]:
    """Names of the engines that plans are made for."""
    return tuple(PLANNED_FOR)


for _model in (Replay(), Sac(), Checkpoint(), Compile()):
    register(_model)
