"""A real Chromium for tests of pages; Debian's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LIMIT_MS = 120_000
"""Of the start, and of a page's waits: a busy host needs some of it."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Skips the test where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=LIMIT_MS)
        yield found
        found.close()


def new_page(browser: Any, **options: Any) -> Any:
    page = browser.new_page(**options)
    page.set_default_timeout(LIMIT_MS)
    return page
