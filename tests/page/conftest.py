"""A real browser with the real server on the bundled pair: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, Response, expect, sync_playwright

from tests.api.processes import Served, running
from vidspec_service.bench.common.scenes import write_scene

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Chromium has no sandbox when run as root; the other flags stop background traffic and fake a camera.
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--use-fake-device-for-media-stream",  # a camera that shows a test picture, without a permission prompt
    "--use-fake-ui-for-media-stream",
]
_PATIENCE_MS = 30_000

expect.set_options(timeout=_PATIENCE_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests if there is no browser."""
    if CHROMIUM is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a browser: apt-get install chromium"))


@dataclass
class Visit:
    """One tab; records problems and contacted hosts."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    num_bytes: int = 0
    expected: tuple[str, ...] = ()  # parts of messages that a test provokes

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._request)
        self.page.on("response", self._response)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _request(self, request: Request) -> None:
        if not request.url.startswith(("blob:", "data:")):
            self.hosts.add(urlsplit(request.url).netloc)

    def _response(self, response: Response) -> None:
        self.num_bytes += int(response.headers.get("content-length", 0))

    def open(self) -> Visit:
        self.page.goto(self.url)
        return self

    def ready(self) -> Visit:
        """Open the page and wait until it can be used."""
        self.open()
        expect(self.page.locator("#model.ready")).to_be_visible()
        return self

    def add_file(self, path: Path) -> None:
        self.page.locator("#files").set_input_files(path)
        expect(self.page.locator(".clip progress")).to_have_count(0)

    def ask(self, prompt: str) -> Locator:
        """Ask, and return the card of the finished answer."""
        num_before = self.page.locator(".answer").count()
        self.page.fill("#prompt", prompt)
        self.page.click("#send")
        return self.finished(num_before)

    def finished(self, place: int = 0) -> Locator:
        card = self.page.locator(".answer").nth(place)
        expect(card).to_have_attribute("aria-busy", "false")
        return card

    def setting(self, name: str, value: str) -> None:
        details = self.page.locator("#settings details")
        if details.get_attribute("open") is None:
            details.locator("summary").click()
        control = self.page.locator(f"#settings [name={name}]")
        if control.evaluate("node => node.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)

    def figure(self, card: Locator, label: str) -> str:
        return card.locator(".figures div", has_text=label).locator("dd").inner_text()

    def leave(self) -> None:
        """Close the tab; asserts that it had no unexpected problem and contacted no other host."""
        self.page.context.close()
        unexpected = [each for each in self.problems if not any(part in each for part in self.expected)]
        assert unexpected == []
        assert self.hosts == {urlsplit(self.url).netloc}


Open = Callable[..., Visit]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens a new tab at an address; the tab is checked at the end of the test."""
    visits: list[Visit] = []

    def opened(url: str, **options: object) -> Visit:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        context.set_default_timeout(_PATIENCE_MS)
        visits.append(Visit(context.new_page(), url))
        return visits[-1]

    yield opened
    for each in visits:
        each.leave()


@pytest.fixture(scope="package")
def server() -> Iterator[Served]:
    """`vidspec serve` on the bundled pair."""
    with running([sys.executable, "-m", "vidspec_service", "serve", "--port", "0", "--log-format", "json"]) as server:
        yield server


@pytest.fixture(scope="package")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clips") / "triangle.mp4"
    write_scene(7, path)
    return path


def as_json(card: Locator) -> object:
    """The answer's text, parsed as JSON."""
    return json.loads(card.locator(".words").inner_text())
