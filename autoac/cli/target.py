"""The input of a command: the user's model, or a recorded profile."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import typer

from autoac.cli.users_code import TargetError, shown, where_in

if TYPE_CHECKING:
    from autoac_solver.records.policies import Policy
    from autoac_solver.records.profile import Profile

_FORM = "Write package.module:factory or file.py:factory."
_RETURNS = (
    "It must return (model, sample), (model, sample, loss), or a mapping with the keys model, sample, and if you like "
    "loss and optimizer."
)
_KEYS = ("model", "sample", "loss", "optimizer")


@dataclass(frozen=True)
class Target:
    """The result of the user's factory; the fields are as for `autoac.plan`.

    Args:
        spec: the factory as the user wrote it.
    """

    spec: str
    model: Any
    sample: Any
    loss: Any = None
    optimizer: Any = None


def load_target(spec: str, arguments: Sequence[str] | None = None) -> Target:
    """The model that `package.module:factory` or `file.py:factory` makes.

    Args:
        arguments: for the factory, as "name=value".

    Raises:
        typer.BadParameter: `spec` or an argument has another form, or `spec` names something that does not exist.
        TargetError: the user's file or factory failed, or returned something else.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise _bad(f"{spec!r} names no factory. {_FORM}")
    keywords = _keywords(arguments or ())
    import torch  # a model needs it: if it is missing, fail here

    module = _module_from_file(Path(place)) if place.endswith(".py") else _module(place)
    factory = getattr(module, name, None)
    if factory is None:
        raise _bad(f"{place} has no {name!r}{_similar(module)}.")
    if not callable(factory):
        raise _bad(f"{spec} is a {type(factory).__name__}, not a function. {_FORM}")
    return _checked(spec, _call(spec, factory, keywords), torch.nn.Module)


def _keywords(arguments: Sequence[str]) -> dict[str, Any]:
    """`["layers=8", "name=tiny"]` as {"layers": 8, "name": "tiny"}: values are JSON if possible, else text."""
    found: dict[str, Any] = {}
    for text in arguments:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"{text!r} is no NAME=VALUE.", param_hint="'--arg'")
        if name in found:
            raise typer.BadParameter(f"{name} is given twice.", param_hint="'--arg'")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def no_arguments(arguments: Sequence[str] | None) -> None:
    """Refuse arguments for a factory if there is no factory."""
    if arguments:
        raise typer.BadParameter("it is for a factory.", param_hint="'--arg'")


def is_recorded(source: str) -> bool:
    """Whether the user named a file, not a model."""
    return source.endswith(".json")


@dataclass(frozen=True)
class Recorded:
    """Contents of a file to plan from.

    Args:
        profile: the file's own, or the one that its plan carries.
        engine, policies: the plan's, which hold for plans that are made from it.
    """

    profile: Profile
    engine: str = "auto"
    policies: tuple[Policy, ...] = ()

    def engine_for(self, asked: str) -> dict[str, str]:
        """The requested engine, or with "auto" the plan's and the reason, as arguments of the solver."""
        if asked != "auto" or self.engine == "auto":
            return {"engine": asked}
        return {"engine": self.engine, "engine_reason": "as in the plan that this was made from"}


def recorded(source: str) -> Recorded:
    """Load a file: a profile or a plan.

    Raises:
        typer.BadParameter: there is no such file.
        ProfileError: it is neither.
    """
    path = Path(source)
    if not path.is_file():
        raise _bad(f"there is no file {source!r}.")
    from autoac_solver.records import plan
    from autoac_solver.records.disk.files import schema_of
    from autoac_solver.records.profile import Profile

    if schema_of(path) == plan.SCHEMA:
        record = plan.PlanRecord.load(path)
        return Recorded(record.profile, record.engine, tuple(applied.policy for applied in record.policies))
    return Recorded(Profile.load(path))


# -- the user's code -----------------------------------------------------------------------------------------------


def _module_from_file(path: Path) -> Any:
    if not path.is_file():
        raise _bad(f"there is no file {str(path)!r}.")
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.parent.resolve()}"
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    sys.modules[name] = module  # data classes and pickling look there
    try:
        description.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _import_failed(shown(path), error) from error
    return module


def _module(name: str) -> Any:
    sys.path.insert(0, "")  # as for `python -m`
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        found = None
    except Exception as error:
        raise _import_failed(name, error) from error
    if found is None:
        raise _bad(f"there is no module {name!r} here or among what is installed. {_FORM}")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(what: str, error: BaseException) -> TargetError:
    hint = ""
    if isinstance(error, ModuleNotFoundError):
        hint = f"Is {error.name!r} installed in this environment ({shown(sys.prefix)})?"
    return TargetError(f"{what} cannot be imported: {_said(error)}", hint)


def _call(spec: str, factory: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    try:
        return factory(**keywords)
    except (Exception, SystemExit) as error:  # as from a script's own argument parser
        hint = (
            "--arg NAME=VALUE passes an argument to the factory."
            if isinstance(error, TypeError) and "argument" in str(error)
            else ""
        )
        raise TargetError(f"{spec} failed: {_said(error)}", hint) from error


def _said(error: BaseException) -> str:
    message = (str(error).strip() or "no message").split("\n")[0]
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {message}"
    return f"{type(error).__name__}{where_in(error)}: {message}"


def _checked(spec: str, made: Any, module_class: type) -> Target:
    if isinstance(made, Mapping):
        unknown = [repr(key) for key in made if key not in _KEYS]
        missing = [repr(key) for key in _KEYS[:2] if key not in made]
        if unknown or missing:
            what = f"with the unknown key {unknown[0]}" if unknown else f"without the key {missing[0]}"
            raise TargetError(f"{spec} returned a mapping {what}.", _RETURNS)
        target = Target(spec, **made)
    elif isinstance(made, tuple) and len(made) in (2, 3):
        target = Target(spec, *made)
    else:
        kind = type(made).__name__
        article = "an" if kind[0] in "aeiou" else "a"
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"{article} {kind}"
        raise TargetError(f"{spec} returned {what}.", _RETURNS)
    if not isinstance(target.model, module_class):
        raise TargetError(
            f"the model that {spec} returned is a {type(target.model).__name__}, not a torch.nn.Module.",
            _RETURNS,
        )
    return target


def _similar(module: Any) -> str:
    """The module's functions, as suggestions after a typo."""
    own = module.__name__
    functions = {name: value for name, value in vars(module).items() if isinstance(value, FunctionType)}
    names = [name for name, f in functions.items() if f.__module__ == own and not name.startswith("_")]
    return f" (it has {', '.join(names[:8])})" if names else ""


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="'MODEL'")
