"""What the tests of the command line share: calling it, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from autoac.cli import app

ROOT = Path(__file__).resolve().parents[2]
FACTORIES = "tests/cli/factories.py"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def repository(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the repository, tables have one width and no colour, and what is imported is forgotten."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments: Any, answer: str | None = None) -> Result:
    """A command in this process.

    Args:
        answer: what there is to be read from stdin.
    """
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)


def done(*arguments: Any) -> Result:
    """A command that must succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def environment(**others: str) -> dict[str, str]:
    """For a process that finds this repository's packages."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **others}


def command_line(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "autoac", *map(str, arguments)]


def process(*arguments: Any, cwd: str | Path = ROOT, **others: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, without a terminal."""
    return subprocess.run(
        command_line(*arguments),
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment(**others),
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for a process in which importing torch fails as where it is not installed."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text('raise ModuleNotFoundError("No module named \'torch\'", name="torch")\n')
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "solver")])}


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of `factories.py:small`, recorded by the command."""
    path = tmp_path_factory.mktemp("recorded") / "profile.json"
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        done("profile", f"{FACTORIES}:small", "-o", path)
    finally:
        os.chdir(before)
    return path
