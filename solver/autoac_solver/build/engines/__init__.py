"""The engines that problems are built for: one file each, registered here."""

from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.engines.checkpoint import Checkpoint
from autoac_solver.build.engines.compile import Compile
from autoac_solver.build.engines.replay import Replay
from autoac_solver.build.engines.sac import Sac
from autoac_solver.records.engines import COMPILING, PLANNED_FOR
from autoac_solver.records.errors import PolicyError

__all__ = ["DEFAULT", "EngineModel", "check_supported", "engine_model", "planned_for", "register"]

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


def check_supported(engine: str, *asked: str) -> None:
    """Check that plans for this engine can have what is asked for; "auto" passes, what it resolves to is checked.

    Args:
        asked: among the names in `EngineModel.unsupported`.

    Raises:
        PolicyError: it follows no policies.
        ValueError: it does not support something else.
    """
    unsupported = _ENGINES[engine].unsupported if engine in _ENGINES else {}
    for what in asked:
        if (why := unsupported.get(what)) is not None:
            raise (PolicyError if what == "policies" else ValueError)(f"engine {engine!r} {why}")


def planned_for() -> tuple[str, ...]:
    """Names of the engines that plans are made for."""
    return tuple(PLANNED_FOR)


for _model in (Replay(), Sac(), Checkpoint(), Compile()):
    register(_model)
