"""The README's quick start: two commands, and CI runs the second as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_compatibility_table_is_what_the_tests_say():
    """In another process: collecting tests from within a test would disturb it."""
    printed = subprocess.run(
        [sys.executable, "-m", "tests.compatibility"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed.count("\n") > 30
    assert in_readme() == printed, "run `python -m tests.compatibility --write`"
