"""The page at `/`: asked, watched and raced in a real browser, against the real server on the bundled pair."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.api.processes import Served
from tests.component.api.page.conftest import Open, as_json

_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def test_two_clicks_lead_from_the_address_to_words_that_tell_who_wrote_them(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/")
    began = time.monotonic()
    tab.open()
    expect(tab.page.locator("#model.ready")).to_be_visible()
    usable_s = time.monotonic() - began
    assert tab.num_bytes < 300_000
    assert usable_s < 5, "1 s on an idle machine"
    tab.page.click("#sample")
    tab.page.click("#send")
    card = tab.finished()
    words = card.locator(".words")
    assert len(words.inner_text()) > 40
    assert words.locator(".by-draft, .by-target").count() > 8
    expect(tab.page.locator(".strip .frame")).to_have_count(8)
    lanes = card.locator(".timeline canvas").get_attribute("aria-label")
    assert re.fullmatch(r"draft at work \d+ % of the time, target at work \d+ % of the time", lanes or "")


def test_a_follow_up_keeps_the_video_and_the_same_seed_gives_the_same_text(
    server: Served, visit: Open, clip: Path
) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("temperature", "0.9")
    tab.setting("speculation", "parallel")
    tab.add_file(clip)
    tab.ask("Describe the video.")
    second = tab.ask("How many objects are there?")
    assert not tab.figure(second, "prompt tokens cached").startswith("0 ")
    expect(tab.page.locator(".said")).to_have_count(2)
    tab.page.locator(".turn").first.get_by_role("button", name="Again, same seed").click()
    expect(tab.page.locator(".turn").first.locator(".answer > .note")).to_have_text("The same text again.")
    expect(tab.page.locator(".frame").first).to_be_visible()
    tab.page.locator(".frame").nth(4).click()
    assert tab.page.locator(".clip video").evaluate("video => video.currentTime") == pytest.approx(2.25, abs=0.1)


def test_a_schema_is_checked_while_typed_and_binds_the_answer(server: Served, visit: Open, clip: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("schema", '{"not": {}}')
    expect(tab.page.locator("#schema-verdict")).to_contain_text("cannot be kept to")
    tab.setting("schema", json.dumps(_SCHEMA))
    expect(tab.page.locator("#schema-verdict")).to_contain_text("will be JSON")
    tab.add_file(clip)
    card = tab.ask("Describe the video as JSON.")
    assert as_json(card) in ({"colour": "red"}, {"colour": "blue"})
    assert card.locator(".by-grammar").count() > 3


def test_a_race_shows_the_same_text_twice(server: Served, visit: Open, clip: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.add_file(clip)
    tab.page.click("#race")
    expect(tab.page.locator(".verdict")).to_contain_text("Word for word the same text.")
    left, right = tab.page.locator(".lane .words").all_inner_texts()
    assert left == right != ""


def test_a_bad_file_and_an_answer_cut_short_are_told(server: Served, visit: Open, clip: Path, tmp_path: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.expected = ("415",)
    bad = tmp_path / "notes.mp4"
    bad.write_text("not a video")
    tab.page.locator("#files").set_input_files(bad)
    expect(tab.page.locator("#clip-problem")).to_contain_text("notes.mp4: ")
    expect(tab.page.locator(".clip")).to_have_count(0)
    tab.add_file(clip)
    tab.setting("max_tokens", "8")
    expect(tab.ask("Describe the video.").locator(".note[role=status]")).to_contain_text("limit of tokens")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_no_violation(server: Served, visit: Open, clip: Path, scheme: str, width: int) -> None:
    tab = visit(server.url + "/", color_scheme=scheme, viewport={"width": width, "height": 844}).ready()
    axe = Axe()
    tab.add_file(clip)
    tab.ask("Describe the video.")
    tab.page.click("#server")
    tab.page.locator("#settings summary").click()
    expect(tab.page.locator(".frame").first).to_be_visible()
    found = axe.run(tab.page)
    assert found.violations_count == 0, found.generate_report()
    wide = tab.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width


def test_the_server_panel_tells_what_metrics_tell_and_history_keeps_the_words(
    server: Served, visit: Open, clip: Path
) -> None:
    tab = visit(server.url + "/").ready()
    tab.add_file(clip)
    text = tab.ask("Describe the video.").locator(".words").inner_text()
    tab.page.click("#server")
    expect(tab.page.locator("#server-panel dd").first).to_have_text(re.compile(r"\d+"))
    tab.page.reload()
    tab.page.click("#history")
    tab.page.locator("#history-list button").first.click()
    expect(tab.page.locator(".answer .words")).to_have_text(text)
    follow_up = tab.ask("How many objects are there?")
    assert not tab.figure(follow_up, "prompt tokens cached").startswith("0 ")
