"""What is no sensible argument is said in a sentence, before anything is solved or profiled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autoac_solver.plan.batches import plan_batches
from autoac_solver.plan.choices import Choices
from autoac_solver.plan.planning import plan_budgets, plan_profile
from autoac_solver.records.arguments import matched
from autoac_solver.records.errors import AutoacError, ProfilingError
from autoac_solver.records.profile import Profile
from tests.solver.profiles import scaled, two_blocks

ENTRIES: dict[str, Callable[..., Any]] = {
    "plan_profile": lambda **options: plan_profile(two_blocks(), 2000, **options),
    "plan_budgets": lambda **options: plan_budgets(two_blocks(), [2000], **options),
    "plan_batches": lambda **options: plan_batches({1: two_blocks()}, [2000], **options),
}


@pytest.fixture
def nothing_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "__init__", lambda *_: pytest.fail("the work was begun"))


def not_profiled(batch: int) -> Profile:
    pytest.fail(f"batch {batch} was profiled")


@pytest.mark.usefixtures("nothing_is_solved")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["time_limit_s", "gap"])
@pytest.mark.parametrize("value", [None, "x", "1", True, -1, -1e-9, math.nan, 1j])
def test_what_is_no_limit_for_the_solver(entry: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*; it takes a number of at least 0"):
        ENTRIES[entry](**{name: value})


@pytest.mark.parametrize("entry", ENTRIES)
def test_numbers_of_all_kinds_are_limits(entry: str) -> None:
    ENTRIES[entry](time_limit_s=np.float32(10), gap=np.int64(0))
    ENTRIES[entry](time_limit_s=math.inf, gap=math.inf)


def test_one_budget_is_a_curve_of_one_point() -> None:
    budgets: list[Any] = ["1.188 KB", 1188, np.int64(1188), iter([1188])]
    for budget in budgets:
        assert plan_budgets(two_blocks(), budget).frame["budget_bytes"].tolist() == [1188]


@pytest.mark.usefixtures("nothing_is_solved")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"budgets": []}, "budgets is empty; give at least one."),
        ({"budgets": 8}, "budgets is 8, one budget of so many bytes, .* write points=8."),
        ({"budgets": ["4MB", "lots"]}, "'lots' is not an amount of memory"),
        ({"budgets": 4e6}, r"4000000.0 is not an amount of memory; for bytes write int\(4000000.0\)"),
        ({"points": "5"}, "points is '5'; a curve takes at least 2, an int."),
        ({"points": 2.5}, "points is 2.5; a curve takes"),
        ({"points": True}, "points is True; a curve takes"),
        ({"points": None}, "points is None; a curve takes"),
        ({"points": 10_001}, "points is 10001; a curve takes at most 10000"),
        ({"points": 10**5000}, "points is a number of many digits; a curve takes at most 10000"),
    ],
)
def test_budgets_and_points_that_are_none(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_budgets(two_blocks(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"budgets": "lots"}, "'lots' is not an amount of memory"),
        ({"budgets": ["80%", None]}, "None is not an amount of memory"),
        ({"budgets": 5e9}, "for bytes write int"),
        ({"budgets": "1GB", "gap": -1}, "gap is -1"),
        ({"budgets": "1GB", "regions": 5}, "regions is a int"),
    ],
)
def test_batches_are_not_profiled_for_what_cannot_be(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_batches(not_profiled, batch_sizes=[1], **arguments)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (4, r"batch_sizes is 4; it takes several ints, .* write batch_sizes=\[4\]."),
        ("8", "batch_sizes is '8'; it takes several ints"),
        ({4: 1}, "batch_sizes is {4: 1}; it takes several ints"),
        ([], "batch_sizes is empty; give at least one."),
        ([4, 0], "batch_sizes holds 0; a batch size is an int of at least 1."),
        ([4, 2.5], "batch_sizes holds 2.5; a batch size is an int"),
        ([True], "batch_sizes holds True; a batch size is an int"),
        (np.array(4), r"batch_sizes is array\(4\); it takes several ints"),
    ],
)
def test_what_are_no_batch_sizes(sizes: Any, text: str) -> None:
    for profiles in (not_profiled, {4: two_blocks()}):
        with pytest.raises(ValueError, match=text):
            plan_batches(profiles, "1GB", batch_sizes=sizes)


def test_batch_sizes_without_a_profile() -> None:
    text = "batch_sizes holds 2, 16, of which no profile was given; there are profiles of 4, 8."
    with pytest.raises(ValueError, match=text):
        plan_batches({8: two_blocks(), 4: two_blocks()}, "1GB", batch_sizes=[16, 4, 2])


def test_batch_sizes_of_all_kinds() -> None:
    profiles = {4: two_blocks(), 8: two_blocks()}
    for sizes in ((8, 4, 8), {4, 8}, range(4, 9, 4), np.array([4, 8]), None):
        assert list(plan_batches(profiles, "1GB", batch_sizes=sizes).curves) == [4, 8]

    class Made(dict[int, Any]):
        def __missing__(self, batch: int) -> Any:
            return profiles[4]

    assert list(plan_batches(Made(), "1GB", batch_sizes=[4, 8]).curves) == [4, 8]


# -- regions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regions", "names"),
    [
        ("blocks.1", ["blocks.1"]),
        ("blocks.*", ["blocks.0", "blocks.1"]),
        (["blocks.[0]", "blocks.1"], ["blocks.0", "blocks.1"]),
        (["blocks.0", "blocks.*"], ["blocks.0", "blocks.1"]),
        (("blocks.1",), ["blocks.1"]),
        ("", [""]),
    ],
)
@pytest.mark.parametrize("entry", ENTRIES)
def test_names_and_globs(entry: str, regions: Any, names: list[str]) -> None:
    found = ENTRIES[entry](regions=regions)
    plan = found if entry == "plan_profile" else found.plans[0]
    assert [region.name for region in plan.regions] == names


def test_globs_are_matched_for_every_batch() -> None:
    found = plan_batches(lambda n: scaled(two_blocks(), n), 10_000, [1, 2], regions=iter(["blocks.*"]))
    assert all(len(plan.regions) == 2 for plan in found.plans)


@pytest.mark.usefixtures("nothing_is_solved")
@pytest.mark.parametrize(
    ("regions", "kind", "text"),
    [
        (5, ValueError, "regions is a int; it takes names or globs of modules"),
        ([3], ValueError, "regions holds a int; it takes names or globs"),
        ([None], ValueError, "regions holds a NoneType; it takes"),
        (lambda name, module: True, ValueError, "regions is a function; it takes names or globs"),
        ("layers.*", ProfilingError, r"regions='layers.*' matches no module. Modules of the profiled step are: 'b"),
        (["blocks.0", "nope"], ProfilingError, "regions='nope' matches no module"),
        (["", "blocks.0"], ProfilingError, "region 'blocks.0' is inside the model itself: choose one of them"),
        ([], AutoacError, "none of the regions"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("entry", ENTRIES)
def test_regions_that_are_none(entry: str, regions: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        ENTRIES[entry](regions=regions)


def test_modules_in_a_wrapper_of_torch_compile_are_known_without_it() -> None:
    names = ["", "0", "0._orig_mod", "0._orig_mod.linear"]
    assert matched(["0.linear"], names, "it") == {"0.linear": ["0._orig_mod.linear"]}
    assert matched(["0"], names[2:], "it") == {"0": ["0._orig_mod"]}
