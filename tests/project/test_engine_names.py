"""Engines are registered once; names that stand where no engine can be asked are the same."""

import importlib
import inspect
import runpy
import typing
from pathlib import Path
from typing import Any, get_args

import pytest

from autoac.cli import options
from autoac.compare.run import compare
from autoac_solver.build.engines import DEFAULT, engine_model
from autoac_solver.records import engines

COMMANDS = sorted(path.stem for path in Path(options.__file__).parent.glob("commands/[a-z]*.py"))
BUILT_IN = get_args(engines.BuiltIn)


def engine_option(command: str) -> set[str] | None:
    """The engines that a command takes, "auto" aside; None if it has no such option."""
    main = importlib.import_module(f"autoac.cli.commands.{command}").main
    hint: Any = typing.get_type_hints(main).get("engine")
    return None if hint is None else set(get_args(hint)) - {"auto"}


def test_names_in_files_are_those_of_the_models():
    fresh = runpy.run_path(engines.__file__)  # as it is before `register` adds to it
    models = {name: engine_model(name) for name in (*BUILT_IN, engines.CHECKPOINT)}
    assert fresh["PLANNED_FOR"] == list(BUILT_IN) == [name for name in models if models[name].selects]
    assert fresh["COMPILING"] == {name for name in models if models[name].compiles}
    assert all(models[name].name == name for name in models)


def test_the_command_line_has_the_same_engines():
    assert get_args(options.EngineName) == BUILT_IN
    assert options.DEFAULT_ENGINE == DEFAULT
    assert inspect.signature(compare).parameters["engine"].default == DEFAULT


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_the_registered_engines(command: str):
    only_compiling = command == "profile"  # whether regions are compiled is all it asks
    expected = engines.COMPILING if only_compiling else set(BUILT_IN)
    assert engine_option(command) in (None, expected)


def test_commands_are_found():
    assert {command for command in COMMANDS if engine_option(command)} == {
        *("compare", "plan", "profile", "run", "tradeoff")
    }
