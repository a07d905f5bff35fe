"""The README's quick start, whose second command CI runs as it stands there, and its session on the command line."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compatibility import in_readme

ROOT = Path(__file__).resolve().parent.parent


def quick_start_commands() -> list[str]:
    (section,) = re.findall(
        r"^## Quick start\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.M | re.S
    )
    return [block.strip() for block in re.findall(r"^```[a-z]*\n(.*?)^```$", section, re.M | re.S)]


def test_quick_start_has_two_commands():
    demo, tests = quick_start_commands()
    assert demo.endswith("autoac demo")
    assert "pytest" in tests
    for command in (demo, tests):
        assert "\n" not in command
        assert "-c constraints/torch.txt" in command


def test_ci_calls_the_second_command():
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert ci.read_text().splitlines()[-1] == quick_start_commands()[1]


def test_version_has_an_entry_in_the_changelog():
    from autoac import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


class Layer(nn.Module):
    """A layer with a choice of experts, as the README's policies are about."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, _ = self.router(x).softmax(-1).topk(2)
        return x + self.down(F.gelu(self.up(x))) * share.sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_snippets_run():
    """One after the other, as a reader runs them; only model, sample and optimizer are theirs."""
    model = Model()
    given = {
        "torch": torch,
        "build_model": Model,
        "model": model,
        "sample": torch.randn(64, 32),
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    snippets = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(snippets) >= 4
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), given)


def session() -> list[tuple[str, list[str]]]:
    """The commands of the command line's section, each with the lines that are shown of what it prints."""
    (section,) = re.findall(r"^## Command line\n(.*?)(?=^## )", (ROOT / "README.md").read_text(), re.M | re.S)
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", section, re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            elif line.strip() and line != "...":
                found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """A line without what depends on the machine: its numbers and their units, and the width of its columns.

    And, of torch's planner, what follows its peak and time: it decides by times it measures, and whether its gradients
    are equal, and so whether ours stand beside it, differs from run to run.
    """
    if line.lstrip().startswith("torch sac_milp"):
        line = re.sub(r"(equal|DIFFER).*", "", line)
    line = re.sub(r"[+-]?[0-9][0-9.]*", "N", line)
    line = re.sub(r"N ([mu]?s|[KMG]?B|[KMG]iB|bytes?)\b", "N", line)
    return re.sub(r"\s+|─+", " ", line).strip()


@pytest.mark.slow
def test_the_session_on_the_command_line_is_what_the_commands_print(tmp_path: Path):
    pytest.importorskip("pwlf")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")
    }
    commands = session()
    assert {command.split()[1] for command, _ in commands} == {
        "profile",
        "tradeoff",
        "plan",
        "run",
        "compare",
    }
    for command, shown in commands:
        program, *arguments = shlex.split(command)
        assert program == "autoac"
        done = subprocess.run(
            [sys.executable, "-m", "autoac", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": path},
        )
        infeasible = shown[0].startswith("error: No plan fits")
        assert done.returncode == (3 if infeasible else 0), done.stderr
        printed = {shape(line) for line in (done.stderr if infeasible else done.stdout).splitlines()}
        for line in shown:
            assert shape(line) in printed, (
                f"{command} does not print {line!r} but\n{done.stdout}{done.stderr}"
            )


def test_compatibility_table_is_what_the_tests_say():
    """In another process: collecting tests from within a test would disturb it."""
    printed = subprocess.run(
        [sys.executable, "-m", "tests.compatibility"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed.count("\n") > 30
    assert in_readme() == printed, "run `python -m tests.compatibility --write`"
