"""The page in Chromium: what it shows against the plans, by mouse, by keyboard and on a phone."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from autoac_solver.plan.planning import plan_budgets, plan_profile
from autoac_solver.plan.recorded.programs import with_profile
from autoac_solver.plan.recorded.report import KINDS
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.format import format_bytes
from autoac_solver.records.plan import PlanRecord
from autoac_solver.show.notebook import Page
from autoac_solver.show.page import write_report
from tests.solver.show.page.conftest import Open, wait_until
from tests.solver.show.page.synthetic import decoder_profile, plans_by_share, tradeoff

LEFT, RIGHT = 64, 4  # what timeline.js leaves beside the picture, pixels
ROWS = "#rows tr"
PHONE = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def plans() -> list[PlanRecord]:
    """Five plans of a small decoder, by budget; the page is about the second."""
    profile = decoder_profile(4, helpers=0, backward=2)
    curve = list(plan_budgets(profile, points=4).plans)
    chosen = plan_profile(profile, (curve[0].budget_bytes + curve[1].budget_bytes) // 2)
    return [curve[0], chosen, *curve[1:]]


@pytest.fixture(scope="module")
def report(plans: list[PlanRecord], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(plans[1], path, curve=tradeoff(plans))
    return path


def exact(title: str | None) -> int:
    """The number in a title such as "1,024 bytes"."""
    assert title is not None
    return int(title.removesuffix(" bytes").replace(",", ""))


def decimal(n_bytes: int) -> str:
    return format_bytes(n_bytes).partition(" = ")[0]


def hover(page: Any, position: int, n_positions: int) -> None:
    """Put the mouse on an op in the whole step, which has a pixel for each."""
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#timeline").bounding_box()
    across = (position + 0.5) / n_positions * (box["width"] - LEFT - RIGHT)
    page.mouse.move(box["x"] + LEFT + across, box["y"] + 100)


def memory_shown(page: Any) -> dict[str, int]:
    """Bytes by kind beside the timeline, and together."""
    rows = page.locator("#read-kinds tr")
    shown = {
        row.get_attribute("data-kind"): exact(row.locator("td").get_attribute("title")) for row in rows.all()
    }
    return shown | {"total": exact(page.locator("#read-total").get_attribute("title"))}


def value_text(page: Any) -> str:
    return page.locator("#timeline").get_attribute("aria-valuetext")


def test_the_slider_shows_every_plan_as_it_is_recorded(
    open_page: Open, report: Path, plans: list[PlanRecord]
) -> None:
    page = open_page(report)
    assert page.locator("#budget").input_value() == "1"
    outlines = set()
    for index, plan in enumerate(plans):
        page.locator("#budget").fill(str(index))
        selected = page.locator("#selected").inner_text()
        assert selected.startswith(decimal(plan.budget_bytes))
        assert ("(this plan)" in selected) == (index == 1) == page.locator("#back").is_disabled()
        assert f"peak {decimal(plan.predicted_peak_bytes)}" in selected
        assert f"+{plan.predicted_extra_s / plan.predicted_step_s:.1%}" in selected
        assert f"the optimum is at least +{plan.bound_s / plan.predicted_step_s:.1%}" in selected
        assert f'budget={plan.budget_bytes}, engine="replay")' in page.locator("#use").inner_text()
        assert (
            f"{(step_of(plan).decisions['decision'] == 'recompute').sum()} of {len(step_of(plan).decisions)} values"
            in selected
        )
        for decision in ("save", "recompute", "skip"):
            part = step_of(plan).decisions[step_of(plan).decisions["decision"] == decision]
            shown = page.locator(f'#sums [data-decision="{decision}"]')
            assert exact(shown.locator("strong").get_attribute("title")) == part["bytes"].sum()
            assert f"{len(part)} value" in shown.inner_text()
            assert page.locator(f"#count-{decision}").inner_text() == str(len(part))
        other = step_of(plans[1]).decisions.merge(step_of(plan).decisions, on="storage")
        changed = (other["decision_x"] != other["decision_y"]).sum()
        assert page.locator("#count-changed").inner_text() == str(changed)
        assert step_of(plan).peak_where.partition(" in ")[0] in page.locator("#peak-words").inner_text()
        assert (
            page.locator("#curve-table .here th").text_content().startswith(format_bytes(plan.budget_bytes))
        )
        assert page.locator("#curve-selected").text_content().startswith(decimal(plan.budget_bytes))
        wait_until(
            page, f"document.querySelector('#timeline').ariaValueMax === '{len(step_of(plan).timeline)}'"
        )
        outlines.add(page.locator('#timeline [data-kind="Activation"]').get_attribute("d"))
    assert len(outlines) == len(plans)


def test_the_cursor_tells_what_is_alive_to_the_byte(
    open_page: Open, report: Path, plans: list[PlanRecord]
) -> None:
    page = open_page(report)
    for index in (0, 1, len(plans) - 1):
        page.locator("#budget").fill(str(index))
        table = step_of(plans[index]).timeline
        wait_until(page, f"document.querySelector('#timeline').ariaValueMax === '{len(table)}'")
        for position in range(3, len(table), len(table) // 5):
            hover(page, position, len(table))
            wait_until(page, f"document.querySelector('#timeline').ariaValueNow === '{position + 1}'")
            row = table.iloc[position]
            shown = memory_shown(page)
            assert shown.pop("total") == row["live_bytes"]
            assert shown == {kind: row[kind] for kind in shown}
            assert all(row[kind] == 0 for kind in set(KINDS) - set(shown))
            assert page.locator("#read-code").inner_text() == ("Module, model.py:12" if row["module"] else "")
            tip = page.locator("#timeline .tip").inner_text()
            assert row["op"] in tip
            assert (row["module"] or "outside of all modules") in tip
            assert {"recompute": "recomputation"}.get(row["phase"], row["phase"]) in tip
        page.mouse.move(5, 5)
        page.locator("#timeline .tip").wait_for(state="hidden")


def grouped(plan: PlanRecord) -> list[tuple[str, str, int]]:
    """Kind, module and bytes at the peak, modules that differ only in the number of a list as one, largest first."""
    held: dict[tuple[str, str], tuple[list[str], int]] = {}
    for kind, module, size in step_of(plan).peak_holders:
        names, bytes_ = held.get(key := (kind, re.sub(r"(^|\.)\d+(?=[.#]|$)", r"\1*", module)), ([], 0))
        held[key] = ([*names, module], bytes_ + size)
    order = sorted(held.items(), key=lambda item: (-item[1][1], KINDS.index(item[0][0]), item[0][1]))
    return [(kind, names[0] if len(names) == 1 else name, size) for (kind, name), (names, size) in order]


def test_the_peak_and_its_holders(open_page: Open, report: Path, plans: list[PlanRecord]) -> None:
    page = open_page(report)
    for index, plan in enumerate(plans):
        page.locator("#budget").fill(str(index))
        assert exact(page.locator("#read-total").get_attribute("title")) == plan.predicted_peak_bytes
        expected = grouped(plan)
        rows = page.locator("#peak-holders tr").all()
        assert len(rows) == min(len(expected), 13)
        for row, (kind, module, size) in zip(rows[:12], expected[:12], strict=False):
            assert exact(row.locator("[title]").get_attribute("title")) == size
            assert row.locator("td").nth(0).inner_text() == kind
            assert row.locator("th").inner_text().startswith(module)
        shown = sum(exact(row.locator("[title]").get_attribute("title")) for row in rows)
        assert shown == plan.predicted_peak_bytes


def shown_rows(page: Any) -> pd.DataFrame:
    cells = page.evaluate("""Array.from(document.querySelectorAll('#rows tr'),
        row => Array.from(row.cells, cell => cell.title || cell.textContent))""")
    frame = pd.DataFrame(cells, columns=["no", "module", "op", "region", "bytes", "decision", "time", "rate"])
    return frame.assign(bytes=frame["bytes"].map(exact), no=frame["no"].str.replace(",", "").astype(int))


def test_the_table_sorts_filters_searches_and_turns_pages(
    open_page: Open, report: Path, plans: list[PlanRecord]
) -> None:
    page = open_page(report)
    decisions = step_of(plans[1]).decisions
    by_size = decisions.sort_values("bytes", ascending=False, kind="stable")
    first = shown_rows(page)
    assert first["bytes"].tolist() == by_size["bytes"].tolist()[:50]
    assert (first["no"] - 1).tolist() == by_size.index.tolist()[:50]
    for column in ("module", "op", "decision"):
        expected = by_size[column].tolist()[:50]
        assert [shown.startswith(word) for shown, word in zip(first[column], expected, strict=True)] == [
            True
        ] * 50

    page.get_by_role("button", name="Last").click()
    assert shown_rows(page)["bytes"].tolist() == by_size["bytes"].tolist()[len(decisions) // 50 * 50 :]
    assert page.get_by_role("button", name="Next").is_disabled()
    page.get_by_role("button", name="First").click()

    page.get_by_role("button", name="Bytes").click()
    assert page.get_by_role("columnheader", name="Bytes").get_attribute("aria-sort") == "ascending"
    assert shown_rows(page)["bytes"].tolist() == sorted(decisions["bytes"])[:50]
    page.get_by_role("button", name="To recompute").click()
    assert page.locator("[aria-sort]").count() == 1
    slowest = decisions.sort_values("time_s", ascending=False, kind="stable")
    assert (shown_rows(page)["no"] - 1).tolist() == slowest.index.tolist()[:50]

    page.get_by_role("radio", name="recompute").check()
    part = decisions[decisions["decision"] == "recompute"]
    assert (
        page.locator("#found")
        .inner_text()
        .startswith(f"{len(part)} values, {decimal(int(part['bytes'].sum()))}")
    )
    assert shown_rows(page)["decision"].str.startswith("recompute").all()
    page.get_by_role("searchbox").fill("LAYERS.1")
    part = part[part["module"].str.contains("layers.1", regex=False)]
    wait_until(page, f"document.querySelectorAll('{ROWS}').length === {len(part)}")
    assert len(part) > 3
    assert sorted(shown_rows(page)["no"] - 1) == part.index.tolist()
    page.get_by_role("radio", name="all").check()
    page.get_by_role("searchbox").fill("mm.default")
    products = decisions["op"].str.contains("mm.default", regex=False).sum()
    wait_until(page, f"document.querySelectorAll('{ROWS}').length === {products}")
    page.get_by_role("searchbox").fill("there is no such thing")
    wait_until(page, f"document.querySelectorAll('{ROWS}').length === 0")
    assert page.locator("#page-number").inner_text() == "nothing found"


def test_what_differs_from_the_plan_can_be_listed(
    open_page: Open, report: Path, plans: list[PlanRecord]
) -> None:
    page = open_page(report)
    page.get_by_role("radio", name="other than in this plan").check()
    assert page.locator(ROWS).count() == 0
    page.locator("#budget").fill(str(len(plans) - 1))
    was = step_of(plans[1]).decisions.merge(step_of(plans[-1]).decisions, on="storage")
    was = was[was["decision_x"] != was["decision_y"]]
    assert page.locator(ROWS).count() == min(50, len(was)) > 0
    assert shown_rows(page)["decision"].str.contains("this plan: recompute").any()
    page.get_by_role("button", name="Back").click()
    assert page.locator("#budget").input_value() == "1"
    assert page.locator(ROWS).count() == 0


def span(page: Any) -> tuple[int, int]:
    """The first and last op that the timeline shows, found by the keyboard's first and last step within it."""
    return page.evaluate("""() => {
        const overview = document.querySelector('#overview');
        if (overview.hidden) return [0, 1];
        const box = overview.querySelector('.overview-window');
        const all = overview.querySelector('svg').viewBox.baseVal.width - 68;
        const from = (Number(box.getAttribute('x')) - 64) / all;
        return [from, from + Number(box.getAttribute('width')) / all];
    }""")


def test_zoom_by_drag_wheel_buttons_and_back(open_page: Open, report: Path) -> None:
    page = open_page(report)
    timeline = page.locator("#timeline")
    timeline.scroll_into_view_if_needed()
    box = timeline.bounding_box()
    inner = box["width"] - LEFT - RIGHT

    def drag(a: float, b: float) -> None:
        page.mouse.move(box["x"] + LEFT + a * inner, box["y"] + 150)
        page.mouse.down()
        page.mouse.move(box["x"] + LEFT + b * inner, box["y"] + 150, steps=4)
        page.mouse.up()
        page.wait_for_timeout(80)

    assert span(page) == [0, 1]
    drag(0.25, 0.5)
    assert span(page) == pytest.approx([0.25, 0.5], abs=0.01)
    page.get_by_role("button", name="Whole step").click()
    page.wait_for_timeout(80)
    assert span(page) == [0, 1]
    drag(0.75, 0.5)  # backwards
    assert span(page) == pytest.approx([0.5, 0.75], abs=0.01)
    page.get_by_role("button", name="Later").click()
    page.wait_for_timeout(80)
    assert span(page) == pytest.approx([0.625, 0.875], abs=0.01)
    page.get_by_role("button", name="Zoom out").click()
    page.wait_for_timeout(80)
    assert span(page) == pytest.approx([0.5, 1.0], abs=0.01)
    timeline.click(position={"x": 300, "y": 150})
    page.keyboard.press("0")
    page.mouse.wheel(0, -600)
    page.wait_for_timeout(80)
    start, end = span(page)
    assert end - start < 0.95
    page.get_by_role("button", name="Whole step").click()
    page.wait_for_timeout(80)
    page.locator("#zoom-in").focus()
    timeline.scroll_into_view_if_needed()
    box = timeline.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 150)
    page.mouse.wheel(0, -60)  # the picture has not the focus: the page scrolls
    page.wait_for_timeout(80)
    assert span(page) == [0, 1]


def test_by_keyboard_alone(open_page: Open, report: Path, plans: list[PlanRecord]) -> None:
    page = open_page(report)
    reached = []

    def tab_to(selector: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
            if page.evaluate(f"document.activeElement.matches('{selector}')"):
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
                return
        raise AssertionError(f"{selector} was not reached: {reached}")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the curve"
    tab_to("#budget")
    page.keyboard.press("ArrowRight")
    assert page.locator("#selected").inner_text().startswith(decimal(plans[2].budget_bytes))
    assert page.locator("#budget").get_attribute("aria-valuetext").startswith(decimal(plans[2].budget_bytes))
    wait_until(page, "document.querySelector('#announced').textContent !== ''")
    assert decimal(plans[2].predicted_peak_bytes) in page.locator("#announced").inner_text()
    tab_to("#timeline")
    table = step_of(plans[2]).timeline
    for key, position in (
        ("Home", 0),
        ("ArrowRight", 1),
        ("End", len(table) - 1),
        ("ArrowLeft", len(table) - 2),
    ):
        page.keyboard.press(key)
        wait_until(page, f"document.querySelector('#timeline').ariaValueNow === '{position + 1}'")
        assert value_text(page).startswith(table["op"][position])
        assert f"{decimal(table['live_bytes'][position])} alive" in value_text(page)
    page.keyboard.press("p")
    wait_until(
        page, f"document.querySelector('#timeline').ariaValueNow === '{table['live_bytes'].argmax() + 1}'"
    )
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.wait_for_timeout(80)
    start, end = span(page)
    assert end - start == pytest.approx(0.25, abs=0.01)
    page.keyboard.press("Escape")
    tab_to("#search")
    page.keyboard.type("mm.default")
    products = step_of(plans[2]).decisions[step_of(plans[2]).decisions["op"] == "aten.mm.default"]
    wait_until(page, f"document.querySelectorAll('{ROWS}').length === {len(products)}")
    tab_to('[data-column="module"]')
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.column") == "module"
    assert page.locator('[aria-sort="ascending"]').inner_text() == "Module"
    assert shown_rows(page)["module"].tolist() == sorted(products["module"])


def test_the_code_can_be_copied(open_page: Open, report: Path, plans: list[PlanRecord]) -> None:
    page = open_page(report)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy").click()
    wait_until(page, "document.querySelector('#copied').textContent !== ''")
    assert page.locator("#copied").inner_text() == "Copied."
    code = page.evaluate("navigator.clipboard.readText()")
    assert code.startswith(f"plan = autoac.plan(model, sample, budget={plans[1].budget_bytes}, ")
    page.locator("#budget").fill("0")
    assert page.locator("#copied").inner_text() == ""


def test_what_the_device_has_is_a_line_where_it_is_near(
    open_page: Open, plans: list[PlanRecord], tmp_path: Path
) -> None:
    highest = plans[-1].predicted_peak_bytes
    for name, device_bytes, lines in (
        ("near", highest * 11 // 10, 1),
        ("far", 100 * highest, 0),
        ("none", 0, 0),
    ):
        profile = dataclasses.replace(plans[1].profile, device_bytes=device_bytes)
        path = tmp_path / f"{name}.html"
        curve = [with_profile(plan, profile) for plan in plans]
        write_report(curve[1], path, curve=tradeoff(curve))
        page = open_page(path)
        assert page.locator("#capacity").count() == page.locator("#capacity-line").count() == lines
        words = page.locator("#capacity-words").inner_text()
        assert words.startswith(f"The device has {decimal(device_bytes)}" if device_bytes else "")
        assert ("dotted line" in words) == bool(lines)


def test_the_page_in_a_frame_of_a_notebook(
    browser: Any, report: Path, plans: list[PlanRecord], tmp_path: Path
) -> None:
    """The slider works in it, and it can reach nothing outside."""
    shown = Page(report.read_text(encoding="utf-8"), height=700)
    assert "report(path)" in repr(shown)
    path = tmp_path / "notebook.html"
    path.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><p>a cell</p>{shown._repr_html_()}", encoding="utf-8"
    )
    page = browser.new_context(offline=True).new_page()
    page.goto(path.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("#timeline svg").first.wait_for()
    frame.locator("#budget").fill("0")
    assert frame.locator("#selected").inner_text().startswith(decimal(plans[0].budget_bytes))
    assert page.locator("iframe").bounding_box()["height"] == 700
    frame.get_by_role("button", name="Copy").click()
    frame.locator("#copied", has_text="opi").wait_for()
    page.context.close()


def test_a_screen_reader_finds_names_for_everything(open_page: Open, report: Path) -> None:
    page = open_page(report)
    snapshot = page.locator("body").aria_snapshot()
    for expected in (
        'heading "Decoder" [level=1]',
        'slider "Budget"',
        'img "Extra step time against the budget',
        'slider "Memory over the step: position of the cursor"',
        'group "Zoom"',
        'button "Zoom in"',
        'table "Alive at the cursor, by kind"',
        'searchbox "Search module, op or region"',
        'group "Show"',
        'radio "recompute',
        'table "Decisions"',
        'columnheader "Module"',
        'columnheader "Bytes"',
        'navigation "Pages of the table"',
        'region "This plan in words"',
        "status",
    ):
        assert expected in snapshot, snapshot
    assert page.locator("html").get_attribute("lang") == "en"
    nameless = page.evaluate("""() => Array.from(document.querySelectorAll('button, input, [tabindex="0"]'))
        .filter(e => !['aria-label', 'aria-labelledby'].some(name => e.getAttribute(name)))
        .filter(e => !e.textContent.trim() && !e.labels?.length)
        .map(e => e.outerHTML)""")
    assert nameless == []
    assert page.evaluate("""() => { const ids = Array.from(document.querySelectorAll('[id]'), e => e.id);
        return ids.length === new Set(ids).size }""")


@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, PHONE], ids=["dark", "phone"])
def test_axe_finds_no_barrier(open_page: Open, report: Path, options: dict[str, Any]) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(report, **options)
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    page.get_by_role("searchbox").fill("layers.0.mlp")  # few rows stand for all: it takes its time for each
    wait_until(page, f"document.querySelectorAll('{ROWS}').length < 10")
    rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    results = Axe().run(page, options={"runOnly": rules})
    assert results.violations_count == 0, results.generate_report()
    assert len(results.response["passes"]) > 30


CONTRAST = """() => {
    const probe = document.body.appendChild(document.createElement('i'));
    const rgb = (name) => {
        probe.style.color = `var(--${name})`;
        return getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
    };
    const light = (c) => c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const contrast = (a, b) => {
        const [x, y] = [light(rgb(a)), light(rgb(b))].sort((p, q) => q - p);
        return (x + 0.05) / (y + 0.05);
    };
    const found = {};
    for (const under of ['paper', 'sheet']) {
        for (const text of ['ink', 'soft', 'accent']) found[`text ${text} on ${under}`] = contrast(text, under);
        const kinds = ['parameter', 'buffer', 'gradient', 'optstate', 'input', 'activation', 'temp'];
        for (const shape of [...kinds, 'save', 'recompute', 'skip'])
            found[`shape ${shape} on ${under}`] = contrast(shape, under);
    }
    probe.remove();
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_have_contrast(open_page: Open, report: Path, scheme: str) -> None:
    page = open_page(report, color_scheme=scheme)
    dark = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).every(v => v < 60)"
    )
    assert dark == (scheme == "dark")
    for pair, contrast in page.evaluate(CONTRAST).items():
        assert contrast >= (4.5 if pair.startswith("text") else 3), pair


def test_on_a_phone_nothing_is_wider_than_the_screen(
    open_page: Open, report: Path, plans: list[PlanRecord]
) -> None:
    page = open_page(report, **PHONE)
    for details in page.locator("summary").all():
        details.tap()
    for index in range(len(plans)):
        page.locator("#budget").fill(str(index))
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
    page.locator("#timeline").scroll_into_view_if_needed()
    page.locator("#timeline").tap(position={"x": 200, "y": 120})
    wait_until(page, "document.querySelector('#read-at').textContent === 'At the cursor'")
    assert (
        page.get_by_role("table", name="Decisions").get_by_role("row").count() == 51
    )  # still a table, drawn as cards


def test_nothing_moves_for_those_who_ask_for_it_and_print_has_no_controls(
    open_page: Open, report: Path
) -> None:
    page = open_page(report, reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.querySelector('#back')).transitionDuration") == "0s"
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.locator("#budget").is_visible()
    assert not page.locator("#filters").is_visible()
    assert page.locator("#timeline svg").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_hostile_names_are_shown_as_they_are(open_page: Open, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)><b title='\"&lt;"
    plans = plans_by_share(decoder_profile(3, model=hostile, prefix=hostile), [1.0, 0.4, 0.0])
    write_report(plans[1], tmp_path / "hostile.html", curve=tradeoff(plans))
    page = open_page(tmp_path / "hostile.html")
    assert page.locator("h1").inner_text() == hostile
    assert page.locator("img, b[title]").count() == 0
    assert shown_rows(page)["module"].str.startswith(hostile).any()
    assert hostile in page.locator("#peak-holders").inner_text()
    table = step_of(plans[1]).timeline
    hover(page, len(table) // 2, len(table))
    page.locator("#timeline .tip").wait_for(state="visible")
    assert hostile in page.locator("#timeline .tip").inner_text()


def test_the_policy_stops_scripts_and_requests(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    page.evaluate("""() => {
        window.refused = [];
        document.addEventListener('securitypolicyviolation', event => refused.push(event.effectiveDirective));
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        document.body.append(script);
        document.body.append(Object.assign(new Image(), { src: 'https://example.invalid/x.png' }));
        fetch('https://example.invalid/').catch(() => {});
    }""")
    wait_until(page, "refused.length >= 3")
    assert {d.removesuffix("-elem") for d in page.evaluate("refused")} == {
        "script-src",
        "img-src",
        "connect-src",
    }
    assert page.evaluate("window.ran") is None
    page.close()


def test_without_scripts_the_numbers_are_there(browser: Any, report: Path, plans: list[PlanRecord]) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(report.as_uri())
    text = page.locator("body").inner_text()
    assert "scripts are switched off" in re.sub(r"\s+", " ", text)
    assert decimal(plans[1].predicted_peak_bytes) in text
    assert "Plan for Decoder on cpu" in text
    assert not page.locator("#budget, #filters").first.is_visible()
    page.close()


def test_one_plan_alone(open_page: Open, plans: list[PlanRecord], tmp_path: Path) -> None:
    write_report(plans[0], tmp_path / "one.html", points=0)
    page = open_page(tmp_path / "one.html")
    assert page.locator("#budget").is_disabled()
    assert page.locator("#selected").inner_text().startswith(decimal(plans[0].budget_bytes))
    assert page.locator("[data-needs]:visible").count() == 0
    assert page.locator(".curve-too-small").count() == 0  # whether less would do, nobody has tried


def test_what_others_do_is_on_the_curve(open_page: Open, plans: list[PlanRecord], tmp_path: Path) -> None:
    by_hand = pd.DataFrame(
        {
            "name": ["every block", "<b>"],
            "peak_bytes": [plans[2].predicted_peak_bytes] * 2,
            "overhead": [0.1, 9.0],
        }
    )
    frame = pd.DataFrame(
        {
            "budget_bytes": [p.budget_bytes for p in plans],
            "greedy_overhead": [float("nan"), 0.2, 0.1, 0.05, 0],
        }
    )
    write_report(plans[1], tmp_path / "o.html", curve=tradeoff(plans, baselines=by_hand, frame=frame, knee=2))
    page = open_page(tmp_path / "o.html")
    where = f"by hand, every block: +10.0% at {decimal(plans[2].predicted_peak_bytes)}"
    assert page.locator("#curve .curve-hand title").all_text_contents() == [where]
    assert page.locator("#curve .curve-greedy").count() == 4
    # A plan holds up to the next larger budget, a bound down to the next smaller one.
    for line, step in (("curve-line", r"H[\d.]+V[\d.]+"), ("curve-bound", r"V[\d.]+H[\d.]+")):
        drawn = page.locator(f"#curve .{line}").get_attribute("d")
        assert drawn
        assert re.fullmatch(rf"M[\d.]+ [\d.]+({step})+", drawn)
    assert page.locator("#knee").count() == 1
    assert page.locator("[data-needs]:visible").count() == 2
    assert "by hand: <b>" in page.locator("#curve-table").text_content()


def test_thirty_thousand_ops(open_page: Open, tmp_path: Path) -> None:
    profile = decoder_profile(80)
    assert len(profile.tape) > 30_000
    plans = plans_by_share(profile, [i / 5 for i in range(6)])
    path = tmp_path / "large.html"
    write_report(plans[2], path, curve=tradeoff(plans))
    assert path.stat().st_size < 2_000_000
    page = open_page(path)
    # Generous: it takes a twentieth of this. What is quadratic in the ops takes minutes.
    assert page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd") < 5_000
    for index in (0, 5, 3):
        assert (
            page.evaluate(f"""() => {{
            const start = performance.now();
            const slider = document.querySelector('#budget');
            slider.value = {index};
            slider.dispatchEvent(new Event('input'));
            return performance.now() - start;
        }}""")
            < 2_000
        )
        page.wait_for_timeout(100)
        assert exact(page.locator("#read-total").get_attribute("title")) == plans[index].predicted_peak_bytes
        # the picture is as high as the peak, however few pixels it has
        top = page.evaluate("""() => {
            const numbers = Array.from(document.querySelectorAll('#timeline .layer'), p => p.getAttribute('d'))
                .flatMap(d => Array.from(d.matchAll(/V([0-9.]+)/g), m => Number(m[1])));
            return [Math.min(...numbers), Number(document.querySelector('#peak-dot').getAttribute('cy'))];
        }""")
        assert top[0] == pytest.approx(top[1], abs=0.11)
    page.get_by_role("searchbox").fill("layers.7.mlp")
    wait_until(page, "document.querySelector('#found').textContent.startsWith('18 values')")
    assert page.locator(ROWS).count() <= 50
