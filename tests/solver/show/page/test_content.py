"""The data in the page against the plans' own tables, and the page as a file; no browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoac
from autoac_solver.plan.planning import plan_budgets, plan_profile
from autoac_solver.plan.recorded.programs import with_profile, with_regions
from autoac_solver.plan.recorded.report import KINDS
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import STREAMS, Profile
from autoac_solver.show.explanation import explain
from autoac_solver.show.page import render_report, write_report
from autoac_solver.show.page.columns import changes, encode
from autoac_solver.show.page.content import DECISIONS, page_content
from autoac_solver.show.page.render import embedded_json
from tests.small_models import Block, batch, make
from tests.solver.show.page.synthetic import decoder_profile, plans_by_share, tradeoff

ROOT = Path(__file__).resolve().parents[4]
HOSTILE = "</script><img src=x onerror=alert(1)><!--\u2028&amp;\"'{{data}}"


def decode(text: str) -> list[int]:
    """What data.js does, in Python."""
    values, value = [], 0
    for run in text.split(" ") if text else []:
        difference, _, count = run.partition("*")
        for _ in range(int(count or "1", 36)):
            value += int(difference, 36)
            values.append(value)
    return values


@given(st.lists(st.integers(-(2**52), 2**52)))
def test_columns_come_back(values: list[int]) -> None:
    assert decode(encode(values)) == values


def test_columns_are_short_where_they_are_regular() -> None:
    assert encode([5, 6, 7, 8]) == "5 1*3"
    assert encode([7] * 1000) == "7 0*rr"
    assert encode([]) == ""


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_changes_lead_from_one_column_to_the_next(pairs: list[tuple[int, int]]) -> None:
    before, after = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in (0, 1))
    told = changes(before, after)
    before[decode(told["at"])] = decode(told["to"])
    assert before.tolist() == after.tolist()


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Modules that are called twice, dropout, a buffer that is counted up in place."""
    return autoac.profile(make(rounds=2), batch())


@pytest.fixture(scope="module")
def budget(profile: Profile) -> int:
    """Somewhat less than what it takes with nothing recomputed."""
    peak = plan_profile(profile, 2**40).unplanned_peak_bytes
    return peak * 3 // 4


@pytest.mark.parametrize("engine", ["replay", "sac", "compile"])
def test_the_page_adds_up_the_memory_of_every_plan_at_every_op(profile: Profile, engine: str) -> None:
    if engine == "compile":
        profile = Profile.load(ROOT / "profiles" / "gpt2-medium-compiled-h200.json")
    plans = list(plan_budgets(profile, points=4, engine=engine).plans)
    content = page_content(plans, 1)
    sizes = [content["storages"]["sizes_bytes"][i] for i in decode(content["storages"]["size"])]
    kind_of = decode(content["storages"]["kind"])
    latest: dict[int, dict[str, np.ndarray]] = {}
    for plan, row in zip(plans, content["plans"], strict=True):
        axis = {k: decode(v) if isinstance(v, str) else v for k, v in content["axes"][row["axis"]].items()}
        columns = latest.setdefault(
            row["axis"],
            {"lasts": np.zeros(len(axis["start"]), int), "decided": np.zeros(len(axis["value_group"]), int)},
        )
        for name, column in columns.items():
            column[decode(row[name]["at"])] = decode(row[name]["to"])
        live = np.zeros((len(KINDS), len(axis["op"]) + 1), dtype=np.int64)
        nameless = iter(zip(axis["nameless_bytes"], axis["nameless_keeper"], strict=True))
        for start, lasts, storage in zip(axis["start"], columns["lasts"], axis["storage"], strict=True):
            size, keeper = (sizes[storage], -1) if storage >= 0 else next(nameless)
            without = KINDS.index("Temp" if keeper < 0 else "Activation")
            kind = kind_of[storage] if storage >= 0 else without
            if lasts:
                live[kind, start] += size
                live[kind, start + lasts] -= size
        live = np.cumsum(live, axis=1)[:, :-1] + np.array(content["resident_bytes"])[:, None]
        table = step_of(plan).timeline
        for kind, column in zip(KINDS, live, strict=True):
            assert column.tolist() == table[kind].tolist()
        names = [content["names"][decode(content["ops"]["name"])[op]] for op in axis["op"]]
        assert names == table["op"].tolist()
        decisions = step_of(plan).decisions
        decisions = decisions[decisions["storage"] >= 0]  # of values; a compiled region's has none
        assert [DECISIONS[i] for i in columns["decided"]] == decisions["decision"].tolist()
        assert axis["value_storage"] == decisions["storage"].tolist()
        assert [axis["regions"][axis["group_region"][u]] for u in axis["value_group"]] == decisions[
            "region"
        ].tolist()
        assert row["peak_bytes"] == plan.predicted_peak_bytes == live.sum(axis=0).max()


def data_of(page: str) -> dict[str, Any]:
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(block)


@given(st.text(st.characters(), max_size=40))
def test_no_text_ends_the_data_or_is_changed_by_it(text: str) -> None:
    written = embedded_json([text])
    assert not re.search("[<>&\u2028\u2029]", written)
    assert json.loads(written) == [text]


@pytest.fixture(scope="module")
def hostile_plans() -> list[PlanRecord]:
    return plans_by_share(decoder_profile(3, model=HOSTILE, prefix=HOSTILE), [1.0, 0.4, 0.0])


def test_hostile_names_stay_text(hostile_plans: list[PlanRecord]) -> None:
    page = render_report(hostile_plans[1], curve=tradeoff(hostile_plans))
    assert page.lower().count("<script") == page.lower().count("</script>") == 2
    assert "<img" not in page
    assert f"{HOSTILE}0.mlp" in data_of(page)["modules"]
    assert "{{data}}" in page  # as part of the name, not put in a second time


def test_a_step_that_was_not_run_says_so(hostile_plans: list[PlanRecord]) -> None:
    plan = hostile_plans[0]
    tape = tuple(dataclasses.replace(op, time_from="table") for op in plan.profile.tape)
    profile = dataclasses.replace(
        plan.profile,
        mode="fake",
        device_name="Some GPU",
        notes=("note <1>",),
        tape=tape,
        sample="x float32[2,3]",
    )
    page = render_report(with_profile(plan, profile), points=0)
    for words in (
        "without running it",
        "Some GPU (cpu)",
        f"{len(tape):,} from a device&#39;s cost table",
        "note &lt;1&gt;",
        '<span class="badge">times from a cost table</span>',
        "Sample: x float32[2,3]",
    ):
        assert words in page
    guessed = dataclasses.replace(
        profile, tape=tuple(dataclasses.replace(op, time_from="estimated") for op in tape)
    )
    page = render_report(with_profile(plan, guessed), points=0)
    assert '<span class="badge">times estimated</span>' in page


def test_half_a_surrogate_pair_can_be_written(hostile_plans: list[PlanRecord], tmp_path: Path) -> None:
    plan = dataclasses.replace(hostile_plans[0], model="a\ud800b")
    write_report(plan, tmp_path / "page.html", curve=tradeoff([plan]))
    assert "<h1>a?b</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_modules_come_with_the_place_of_their_code(profile: Profile, budget: int) -> None:
    """Of classes that are not torch's own."""
    content = page_content([plan_profile(profile, budget)], 0)
    line = Block.forward.__code__.co_firstlineno
    places = dict(zip(content["modules"], content["sources"], strict=True))
    assert places["blocks.0"] == f"Block, small_models.py:{line}"
    assert places["blocks.0.norm"] == "LayerNorm"
    assert not places[""]  # which is outside of all modules, too
    assert all("/" not in place for place in places.values())


def test_a_plan_file_alone_is_enough(profile: Profile, budget: int, tmp_path: Path) -> None:
    plan_profile(profile, budget).save(tmp_path / "plan.json")
    said: list[tuple[str, float]] = []
    write_report(
        PlanRecord.load(tmp_path / "plan.json"),
        tmp_path / "page.html",
        progress=lambda *what: said.append(what),
    )
    content = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(content["plans"]) == 21
    assert content["plans"][content["chosen"]]["budget_bytes"] == budget
    assert sorted(row["budget_bytes"] for row in content["plans"]) == [
        r["budget_bytes"] for r in content["plans"]
    ]
    assert len(said) >= 20
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_a_page_that_cannot_be_written_is_not_made(
    hostile_plans: list[PlanRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "autoac_solver.show.page.render.render_report", lambda *_, **__: pytest.fail("it was made")
    )
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        write_report(hostile_plans[0], tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_report(hostile_plans[0], tmp_path / "nowhere" / "page.html")


class Wrapped:
    """What a plan on the torch side is to the page: something with a record."""

    def __init__(self, record: PlanRecord) -> None:
        self.record = record


def test_plans_or_their_records_make_the_same_page(hostile_plans: list[PlanRecord]) -> None:
    curve = tradeoff(hostile_plans)
    wrapped = dataclasses.replace(curve, plans=tuple(map(Wrapped, curve.plans)))
    bare, other = (render_report(hostile_plans[0], curve=c) for c in (curve, wrapped))
    assert data_of(bare) == data_of(other)


def test_a_curve_of_something_else_is_refused(
    hostile_plans: list[PlanRecord], profile: Profile, budget: int
) -> None:
    with pytest.raises(ValueError, match="another profile"):
        render_report(hostile_plans[0], curve=plan_budgets(profile, [budget]))
    with pytest.raises(ValueError, match="engine='replay'"):
        render_report(plan_profile(profile, budget), curve=plan_budgets(profile, [2 * budget], engine="sac"))


def test_a_plan_that_contradicts_its_profile_is_refused(hostile_plans: list[PlanRecord]) -> None:
    plan = hostile_plans[0]
    nothing = [
        dataclasses.replace(r, wrapped=False, steps=tuple((op, False) for op, _ in r.steps))
        for r in plan.regions
    ]
    for broken, words in (
        (with_regions(plan, nothing), "do not give its predicted peak"),
        (
            dataclasses.replace(plan, regions=tuple(dataclasses.replace(r, fqn="x") for r in plan.regions)),
            "does not know",
        ),
    ):
        with pytest.raises(ProfileError, match=words):
            render_report(broken, curve=tradeoff([broken]))


def test_the_page_names_no_address_and_allows_nothing(hostile_plans: list[PlanRecord]) -> None:
    page = render_report(hostile_plans[0], curve=tradeoff(hostile_plans))
    assert set(re.findall(r"https?://[^\s\"'<]*", page)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert "unsafe" not in page.partition("</head>")[0]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", page)
    assert not re.search(r"\sstyle=", page)  # the policy would refuse it


def test_the_page_lists_every_module_that_is_no_region() -> None:
    recorded = decoder_profile(8, prefix=HOSTILE)
    refused = [f"{HOSTILE}{layer}" for layer in range(6)]
    calls = [
        dataclasses.replace(call, once=STREAMS) if call.fqn in refused else call for call in recorded.calls
    ]
    profile = dataclasses.replace(recorded, calls=tuple(calls))
    record = plan_profile(profile, 10**12, regions=[f"{HOSTILE}6", f"{HOSTILE}7"])
    assert "no region       and 2 more modules (plan.refused)" in explain(record)
    listed = render_report(record, curve=tradeoff([record])).partition('<dl class="words" id="refused">')[2]
    rows = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", listed.partition("</dl>")[0])
    assert [html.unescape(name) for name, _ in rows] == refused
    assert all("it runs on more than one stream of the GPU" in reason for _, reason in rows)

    allowed = plan_profile(recorded, 10**12)
    assert 'id="refused"' not in render_report(allowed, curve=tradeoff([allowed]))


def test_a_built_wheel_has_the_page_and_the_cost_tables(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assets = ROOT / "solver" / "autoac_solver" / "show" / "page" / "assets"
    expected = {f"autoac_solver/show/page/assets/{file.name}" for file in assets.iterdir()}
    assert len(expected) > 10
    with zipfile.ZipFile(wheel) as content:
        assert expected <= set(content.namelist())
        content.extractall(tmp_path / "installed")
    code = "import autoac_solver.records.devices as d; print(d.__file__, d.find_device('h200').title)"
    path = str(tmp_path / "installed")
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.startswith(path), done.stderr


def test_values_without_a_choice_have_their_reason() -> None:
    profile = decoder_profile(2)
    op = next(op.name for op in profile.tape if op.name.startswith("aten.mm"))
    record = plan_profile(profile, 10**12, policies=[autoac.Policy("MUST_SAVE", op=op)])
    content = page_content([record], 0)
    (axis,) = content["axes"]
    groups = step_of(record).built.problem.groups
    assert any(group.must_save for group in groups)
    assert [content["reasons"][number] for number in decode(axis["group_reason"])] == [
        group.reason if group.must_save else "" for group in groups
    ]
