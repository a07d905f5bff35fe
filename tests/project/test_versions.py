"""The runner of other versions of torch, without another torch: what it reads, and the row that it writes."""

import datetime
import re
from pathlib import Path

from autoac import torch_private
from tests import versions

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two[x]"><failure message="no">no</failure></testcase>
<testcase classname="tests.a" name="test_two[x]"><error message="no">no</error></testcase>
<testcase classname="tests.b" name="test_two[x]"><failure message="no">no</failure></testcase>
<testcase classname="tests.b.TestC" name="test_two[x]"/>
<testcase classname="tests.a" name="test_three"><skipped type="pytest.skip" message="no GPU"/></testcase>
<testcase classname="tests.a" name="test_four"><skipped type="pytest.xfail" message="known"/></testcase>
</testsuite></testsuites>"""

DAY = datetime.date(2026, 1, 2)


def test_counts(tmp_path: Path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = versions.outcome(tmp_path / "junit.xml")
    failed = ("tests.a::test_two[x]", "tests.b::test_two[x]")
    assert found == versions.Outcome(passed=2, skipped=1, expected=1, failed=failed)
    row = versions.row("2.99.0+cu1", "3.11.7", DAY, ["tests/a.py"], found)
    names = ", ".join(f"`{name}`" for name in failed)
    assert row == f"| 2.99.0+cu1 | 3.11.7 | 2026-01-02 | `tests/a.py` | 2 | 2: {names} | 1 | 1 |\n"


def test_a_row_takes_the_place_of_one_of_the_same_kind_and_the_newest_torch_comes_first():
    page = f"before\n{versions.BEGIN}{versions.HEAD}{versions.END}after\n"
    good = versions.Outcome(7, 0, 0)
    for torch in ("2.9.0", "2.15.0+cpu", "2.13.0"):
        page = versions.with_row(page, versions.row(torch, "3.11.7", DAY, [], good))
    page = versions.with_row(page, versions.row("2.9.0", "3.11.9", DAY, [], versions.Outcome(8, 0, 0)))
    assert [row.split(" | ")[0] for row in versions.rows(page)] == ["| 2.15.0+cpu", "| 2.13.0", "| 2.9.0"]
    assert versions.rows(page)[-1].split(" | ")[4] == "8"
    page = versions.with_row(page, versions.row("2.9.0", "3.13.0", DAY, [], good))
    assert [row.split(" | ")[1] for row in versions.rows(page)] == ["3.11.7", "3.11.7", "3.11.9", "3.13.0"]
    assert page.startswith("before\n")
    assert page.endswith(versions.END + "after\n")


def test_what_is_called_tried_has_passed_all_tests():
    """The pinned version does so with every change, any other one in a row of the table."""
    rows = [row.strip("| \n").split(" | ") for row in versions.rows(versions.PAGE.read_text())]
    complete = {row[0].partition("+")[0] for row in rows if row[3] == versions.EVERYTHING and row[5] == "0"}
    pinned = re.search(r"torch==(\S+)", (versions.ROOT / "constraints" / "torch.txt").read_text())
    assert pinned is not None
    assert pinned[1] in torch_private.TRIED_VERSIONS
    assert set(torch_private.TRIED_VERSIONS) <= complete | {pinned[1]}


def test_the_oldest_version_that_is_accepted_is_one_that_was_tried():
    """By pip, and as the docs say."""
    requirement = re.search(r'"torch>=([\d.]+)"', (versions.ROOT / "pyproject.toml").read_text())
    assert requirement is not None
    assert f"{requirement[1]}.0" in torch_private.TRIED_VERSIONS
    assert f"| torch | {requirement[1]} and newer |" in versions.PAGE.read_text()
    assert f"torch {requirement[1]} or newer" in (versions.ROOT / "docs" / "quick-start.md").read_text()
