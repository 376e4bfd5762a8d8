"""The laboratory: one JupyterLab and one browser for all tests; without a browser they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from . import lab as lab_module

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

    from .lab import Lab, Notebook


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A running JupyterLab."""
    reason = lab_module.missing()
    if reason is not None:
        pytest.skip(reason)
    running = lab_module.Lab(tmp_path_factory.mktemp("lab"))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def context(lab: Lab) -> Iterator[BrowserContext]:
    """A headless Chromium's profile, which all pages share."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = lab_module.launch(playwright)
        yield lab_module.context(browser)
        browser.close()


@pytest.fixture
def notebook(lab: Lab, context: BrowserContext) -> Iterator[Callable[..., Notebook]]:
    """``notebook(name, cells)``: a notebook open in the browser, run to its end; nothing may go wrong in it."""
    opened = []

    def make(name: str, cells: list[str], theme: str = "light", run: bool = True, html: str | None = None) -> Notebook:
        page = lab_module.Notebook(lab, context, lab.write(f"{name}-{theme}.ipynb", cells, html), theme)
        opened.append(page)
        if run:
            page.run_all()
        return page

    yield make
    for page in opened:
        page.close()
    assert [e for page in opened for e in page.errors] == []
    assert [u for page in opened for u in page.elsewhere] == []
