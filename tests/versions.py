"""Run the tests on another torch, in an environment of its own: `python -m tests.versions 2.15.0 --write`.

The environment is made in the repository's root (`.venv-torch-2.15.0`) if it is not there; torch comes as pip finds it,
with its CUDA packages if that is the build that the index has. Tests may be named, as for pytest; all are run if none
is. `--write` puts a row into the table of `docs/compatibility.md`. A version may go into `TRIED_VERSIONS`
(`autoac/torch_private/versions.py`) when all tests have passed on it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN = "<!-- versions: python -m tests.versions VERSION --write -->\n"
END = "<!-- end of versions -->\n"
COLUMNS = ("torch", "Python", "date", "tests", "passed", "failed", "skipped", "expected to fail")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
EVERYTHING = "all"
OF_THE_LIST = "tests/torch_private/test_versions.py::test_this_version_was_tried"
"""Left out: it fails on every version that is not in the list yet."""


@dataclass(frozen=True)
class Outcome:
    """Counts of a run of pytest.

    Args:
        failed: the tests that failed or ended with an error, such as "tests.api.test_api::test_a_plan[sac]".
    """

    passed: int
    skipped: int
    expected: int
    failed: tuple[str, ...] = field(default=())


def outcome(junit: Path) -> Outcome:
    """The counts of a run, from the XML that pytest wrote."""
    passed = skipped = expected = 0
    failed = set()
    for case in ElementTree.parse(junit).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            # A test that fails and then ends with an error in its fixtures has two cases.
            failed.add(f"{case.attrib['classname']}::{case.attrib['name']}")
        elif skip is None:
            passed += 1
        elif skip.attrib.get("type") == "pytest.xfail":
            expected += 1
        else:
            skipped += 1
    return Outcome(passed, skipped, expected, tuple(sorted(failed)))


def row(torch: str, python: str, date: datetime.date, tests: Sequence[str], found: Outcome) -> str:
    """The run's row of the table."""
    named = " ".join(f"`{test}`" for test in tests) or EVERYTHING
    failed = ": ".join(
        (str(len(found.failed)), ", ".join(f"`{name}`" for name in found.failed)) if found.failed else ("0",)
    )
    cells = (torch, python, date.isoformat(), named, found.passed, failed, found.skipped, found.expected)
    return "| " + " | ".join(map(str, cells)) + " |\n"


def rows(page: str) -> list[str]:
    """The rows that the page has."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return table.removeprefix(HEAD).splitlines(keepends=True)


def with_row(page: str, new: str) -> str:
    """The page with a row in its table, in place of one for the same torch, Python and tests; newest torch first."""

    def key(row: str) -> tuple[str, str, str]:
        _, torch, python, _, tests, *_ = row.split("|")
        return torch, python.rpartition(".")[0], tests

    def release(row: str) -> tuple[int, ...]:
        return tuple(int(part) for part in row.split("|")[1].strip().partition("+")[0].split("."))

    kept = [*(row for row in rows(page) if key(row) != key(new)), new]
    before, _, rest = page.partition(BEGIN)
    table = "".join(sorted(kept, key=release, reverse=True))
    return before + BEGIN + HEAD + table + END + rest.partition(END)[2]


def environment(folder: Path, version: str) -> Path:
    """The Python of an environment with this torch and the project, which is made if it is not there."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    with tempfile.TemporaryDirectory() as scratch:
        constraint = Path(scratch) / "constraints.txt"
        constraint.write_text(f"torch=={version}\n")
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "-c", constraint, "-e", f"{ROOT}[dev]"], check=True
        )
    return python


def run_tests(python: Path, tests: Sequence[str], processes: int) -> Outcome:
    """Run pytest with that Python on tests, all of them if none is named."""
    with tempfile.TemporaryDirectory() as scratch:
        junit = Path(scratch) / "junit.xml"
        options = ["-q", "-p", "no:cacheprovider", "-n", str(processes), f"--junitxml={junit}"]
        command = [python, "-m", "pytest", *options, f"--deselect={OF_THE_LIST}", *tests]
        code = subprocess.run(command, cwd=ROOT, env=_with_project(os.environ)).returncode
        if code not in (0, 1):  # 1: tests have failed
            raise SystemExit(f"pytest ended with {code} before it had run all tests: no row is written.")
        return outcome(junit)


def _with_project(variables: Mapping[str, str]) -> dict[str, str]:
    return {**variables, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "solver")))}


def ask(python: Path, expression: str) -> str:
    """What an expression is in the environment."""
    command = [python, "-c", f"import platform, torch; print({expression})"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="of torch, as pip knows it: 2.15.0")
    parser.add_argument("tests", nargs="*", help="files, folders or tests; all if left out")
    parser.add_argument("--environment", type=Path, help="where it is or will be")
    parser.add_argument("--processes", type=int, default=2, help="that run tests at once")
    parser.add_argument("--write", action="store_true", help="put a row into docs/compatibility.md")
    given = parser.parse_args()
    python = environment(given.environment or ROOT / f".venv-torch-{given.version}", given.version)
    found = run_tests(python, given.tests, given.processes)
    made = row(
        ask(python, "torch.__version__"),
        ask(python, "platform.python_version()"),
        datetime.date.today(),
        given.tests,
        found,
    )
    if given.write:
        PAGE.write_text(with_row(PAGE.read_text(), made))
    print(HEAD + made, end="")
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
