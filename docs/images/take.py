"""Takes the README's pictures of the page, of a server on the bundled pair: `python docs/images/take.py URL`.

Needs Debian's chromium and the dev extra's playwright. On an idle machine: the pictures show its speed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

_FOLDER = Path(__file__).parent
_SIZE = {"width": 1180, "height": 900}


def main(url: str) -> None:
    """Ask and watch, in light and in dark."""
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for scheme in ("light", "dark"):
            page = _watched(browser, url, scheme)
            page.screenshot(path=_FOLDER / f"page-{scheme}.png")


def _watched(browser: Browser, url: str, scheme: str) -> Page:
    """A page after its first answer; a first question on another page has warmed the server up."""
    for _ in range(2):
        page = browser.new_page(color_scheme=scheme, viewport=_SIZE)
        page.goto(url)
        page.locator("#model.ready").wait_for()
        page.click("#sample")
        page.locator(".clip").wait_for()
        page.click("#send")
        page.locator(".answer[aria-busy=false]").wait_for()
        page.locator(".frame canvas").nth(7).wait_for()
        page.mouse.move(1, 1)
        page.locator(".clip video").evaluate("video => { video.removeAttribute('controls'); video.currentTime = 2.25 }")
        page.wait_for_timeout(400)
    return page


if __name__ == "__main__":
    main(sys.argv[1])
