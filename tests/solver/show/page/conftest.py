"""A browser for the tests of the page, and pages in it that may not complain or ask for anything."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

Open = Callable[..., Any]
"""Called with a file's path and options of the browser's context; gives the page."""


def wait_until(page: Any, expression: str) -> None:
    """Until it is true in the page. Playwright's own `wait_for_function` needs eval there, which the policy forbids."""
    deadline = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"still not so after 20 s: {expression}"
        page.wait_for_timeout(20)


def chromium() -> str:
    """The browser's path. Without one the tests are skipped, or fail where AUTOAC_REQUIRE_BROWSER is set."""
    path = os.environ.get("AUTOAC_CHROMIUM") or shutil.which("chromium")
    if path is not None and importlib.util.find_spec("playwright"):
        return path
    missing = (
        "playwright is not installed (pip install -e '.[dev]')"
        if path is not None
        else "no Chromium: install Debian's chromium, or name one in AUTOAC_CHROMIUM"
    )
    if os.environ.get("AUTOAC_REQUIRE_BROWSER", "0") != "0":
        pytest.fail(f"AUTOAC_REQUIRE_BROWSER is set, but {missing}")
    pytest.skip(missing)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a file. At the end of the test no page may have had an error, or have asked for anything but itself."""
    contexts, complaints = [], []

    def open_page(path: Path, **options: Any) -> Any:
        size = options.pop("viewport", {"width": 1280, "height": 900})
        context = browser.new_context(offline=True, viewport=size, **options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        address = path.as_uri()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request", lambda request: request.url == address or complaints.append(f"asked for {request.url}")
        )
        page.goto(address)
        wait_until(page, "document.querySelector('#timeline svg') !== null")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
