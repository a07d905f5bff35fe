"""What only a process of its own shows: exit codes, stdout apart from stderr, no torch, colours, completion, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autoac_solver.plan.curve import Tradeoff
from autoac_solver.records.profile import Profile
from tests.cli.conftest import FACTORIES, ROOT, command_line, environment, process

MODEL = f"{FACTORIES}:small"


def test_exit_codes_and_streams(recorded: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    resident_bytes = Profile.load(recorded).resident_bytes
    for code, arguments in (
        (0, ["plan", recorded, "--budget", "1GB"]),
        (1, ["plan", damaged, "--budget", "1GB"]),
        (2, ["plan", recorded]),
        (2, ["plan", recorded, "--budget", "20G"]),
        (3, ["plan", recorded, "--budget", resident_bytes]),
    ):
        found = process(*arguments)
        assert found.returncode == code, found.stderr
        assert bool(found.stdout) == (code == 0)
        assert bool(found.stderr) == (code != 0)
        assert "Traceback" not in found.stderr
        assert "\x1b" not in found.stdout + found.stderr
        as_json = process(*arguments, "--json")
        assert as_json.returncode == code
        if code in (0, 1, 3):
            said = json.loads(as_json.stdout)
            assert (said["error"]["exit_code"] == code) if code else (said["status"] == "optimal")


def test_json_is_alone_on_stdout_also_where_the_model_prints() -> None:
    found = process("run", f"{FACTORIES}:with_loss", "--budget", "1GB", "--steps", 3, "--json", "-v")
    assert found.returncode == 0, found.stderr
    assert len(json.loads(found.stdout)["losses"]) == 3
    assert "a user's model may print" in found.stderr
    assert "Training: step 3 of 3" in found.stderr


def test_help_waits_for_nothing() -> None:
    """All that takes long to import; the time itself would depend on the machine."""
    code = """
import sys
from typer.testing import CliRunner
from autoac.cli import app
for command in ([], ["profile"], ["plan"], ["tradeoff"], ["report"], ["run"], ["compare"], ["demo"]):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0 and "Usage:" in result.stdout
slow = {"torch", "pandas", "numpy", "pulp", "highspy", "matplotlib", "autoac_solver"} & set(sys.modules)
assert not slow, slow
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
    )
    assert found.returncode == 0, found.stderr


def test_recorded_files_need_no_torch(recorded: Path, tmp_path: Path, without_torch: dict[str, str]) -> None:
    plan, curve, page = tmp_path / "plan.json", tmp_path / "curve.csv", tmp_path / "report.html"
    budget = Profile.load(recorded).resident_bytes * 40
    for arguments in (
        ["plan", recorded, "--budget", budget, "-o", plan],
        ["plan", plan, "--budget", budget],
        ["tradeoff", plan, "--points", 3, "-o", curve],
        ["report", plan, "-o", page, "--points", 2],
    ):
        found = process(*arguments, **without_torch)
        assert found.returncode == 0, found.stderr
    assert all(path.is_file() for path in (plan, curve, page))
    for arguments in (
        ["profile", MODEL, "-o", tmp_path / "p.json"],
        ["run", MODEL, "--plan", plan],
        ["plan", MODEL, "--budget", 1],
    ):
        found = process(*arguments, **without_torch)
        assert found.returncode == 1
        error, hint = found.stderr.splitlines()
        assert error == "error: torch is not installed here."
        assert hint.startswith("hint: A model needs torch. plan, tradeoff and report also take files")


def test_colours_only_where_they_are_wanted(recorded: Path) -> None:
    arguments = ["tradeoff", recorded, "--points", 2]
    assert "\x1b" not in process(*arguments).stdout
    assert "\x1b[1m" in process(*arguments, FORCE_COLOR="1").stdout
    without = process(*arguments, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert "\x1b[3" not in without  # bold is no colour
    wrong = process("plan", recorded, "--budget", "20G", FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[3" not in wrong.stderr


def test_tables_are_not_cut_where_there_is_no_terminal(recorded: Path) -> None:
    long = process("plan", recorded, "--budget", "1GB").stdout
    assert max(map(len, long.splitlines())) > 80
    narrow = process("tradeoff", recorded, "--points", 2, COLUMNS="50").stdout
    assert max(map(len, narrow.splitlines())) <= 50


@pytest.mark.parametrize(
    ("words", "expected"), [("autoac pro", "profile"), ("autoac plan --head", "--headroom")]
)
def test_completion(words: str, expected: str) -> None:
    code = "from autoac.cli import app; app(prog_name='autoac')"
    variables = {
        "_AUTOAC_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**variables),
    )
    assert found.stdout.split() == [expected], found.stderr


def interrupted(arguments: list[object], after: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that gets Ctrl-C once a line of stderr has this text."""
    running = subprocess.Popen(
        command_line(*arguments, "-v"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    assert running.stderr is not None
    lines = []
    for line in running.stderr:
        lines.append(line)
        if after in line:
            os.kill(running.pid, signal.SIGINT)
            break
    out, err = running.communicate(timeout=120)
    return running.returncode, out, "".join(lines) + err


def test_ctrl_c_keeps_the_curve_so_far(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    code, out, err = interrupted(
        ["tradeoff", recorded, "--points", 400, "--json", "-o", path], "budget 4 of 400"
    )
    assert code == 130, err
    said = json.loads(out)
    assert said["interrupted"]
    assert 3 <= len(said["budgets"]) < 400
    loaded = Tradeoff.load(path)
    assert loaded.frame["budget_bytes"].tolist() == [row["budget_bytes"] for row in said["budgets"]]
    assert f"Interrupted: {len(said['budgets'])} of 400 budgets are done and kept." in err


def test_ctrl_c_ends_a_command_quietly(tmp_path: Path) -> None:
    code, out, err = interrupted(
        ["run", MODEL, "--budget", "1GB", "--steps", 1_000_000], "Training: step 10 of"
    )
    assert (code, out) == (130, "")
    assert err.rstrip().endswith("Interrupted.")
