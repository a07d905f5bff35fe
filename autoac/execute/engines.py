"""Registry of the engines; each has a folder, and a line here."""

from __future__ import annotations

from autoac.execute.compiled.engine import CompileEngine
from autoac.execute.engine import Engine
from autoac.execute.replay.engine import ReplayEngine
from autoac.execute.sac.engine import SacEngine

ENGINES: dict[str, Engine] = {}
"""The engines by name; "auto" takes the first that can run the model."""


def register(engine: Engine) -> None:
    """Register an engine; its model must be registered with the planner (`autoac_solver.build.engines.register`)."""
    ENGINES[engine.model.name] = engine


def check_runnable(name: str) -> None:
    """Refuse an engine that the torch of this process cannot run.

    Args:
        name: of an engine, or "auto", which is never refused.

    Raises:
        RuntimeError: what it needs.
    """
    if name in ENGINES and ENGINES[name].refused:
        raise RuntimeError(ENGINES[name].refused)


def default_engine(*, compiled: bool) -> str:
    """The engine that "auto" stands for.

    Args:
        compiled: whether `torch.compile` has compiled the model as a whole.

    Raises:
        RuntimeError: the torch of this process cannot run it.
    """
    name = next(name for name, engine in ENGINES.items() if not (compiled and engine.eager_only))
    check_runnable(name)
    return name


for _engine in (ReplayEngine(), SacEngine(), CompileEngine()):
    register(_engine)
