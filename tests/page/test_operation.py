"""The page in difficult settings: API keys, a path prefix, a full server, a worker that dies; and /docs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.api.processes import Served, served
from tests.page.conftest import Open
from vidspec_service.bench.common.scenes import write_scene

KEY = "the-key-0123456789abcdef"
_LONG = {"type": "array", "minItems": 60, "maxItems": 60, "items": {"enum": ["red", "green", "blue"]}}


def test_a_key_is_asked_for_once_and_kept_in_the_tab_behind_a_path_too(visit: Open, clip: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with served("--api-key-file", str(keys), "--root-path", "/video") as server:
        tab = visit(f"{server.url}/video/").open()
        tab.expected = ("401",)
        dialog = tab.page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        tab.page.fill("#key-field", "not-the-key-0123456789")
        tab.page.keyboard.press("Enter")
        expect(tab.page.locator("#key-reason")).to_have_text("The server does not know that key.")
        tab.page.fill("#key-field", KEY)
        tab.page.get_by_role("button", name="Use it").click()
        expect(tab.page.locator("#model.ready")).to_be_visible()
        tab.add_file(clip)
        assert tab.ask("What moves?").locator(".words").inner_text() == "A red squäre."
        tab.page.reload()
        expect(tab.page.locator("#model.ready")).to_be_visible()
        expect(dialog).to_be_hidden()
        assert KEY not in (tab.page.evaluate("JSON.stringify(localStorage)") or "")
        tab.leave()


def test_who_gives_no_key_is_not_asked_for_it_again_and_again(visit: Open, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with served("--api-key-file", str(keys)) as server:
        tab = visit(server.url + "/").open()
        tab.expected = ("401",)
        dialog = tab.page.locator("#key-dialog")
        dialog.get_by_role("button", name="Cancel").click()
        tab.page.click("#server")
        dialog.get_by_role("button", name="Cancel").click()
        tab.page.wait_for_timeout(2500)  # more than the panel's period
        expect(dialog).to_be_hidden()
        tab.leave()


def test_a_browser_that_lets_pages_keep_nothing_can_ask_all_the_same(visit: Open, clip: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with served("--api-key-file", str(keys)) as server:
        tab = visit(server.url + "/")
        tab.page.add_init_script("""
            for (const store of ["sessionStorage", "localStorage"])
              Object.defineProperty(window, store, { get() { throw new DOMException("denied", "SecurityError"); } });
        """)
        tab.open()
        tab.expected = ("401",)
        tab.page.fill("#key-field", KEY)
        tab.page.keyboard.press("Enter")
        expect(tab.page.locator("#model.ready")).to_be_visible()
        tab.add_file(clip)
        assert tab.ask("What moves?").locator(".words").inner_text() == "A red squäre."
        tab.page.click("#history")
        tab.page.click("#history-clear")
        tab.leave()


def test_a_key_that_is_given_late_is_told_of_in_the_header_and_left_out_of_what_is_copied(
    visit: Open, clip: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with served("--api-key-file", str(keys)) as server:
        tab = visit(server.url + "/", permissions=["clipboard-read", "clipboard-write"]).open()
        tab.expected = ("401",)
        tab.page.locator("#key-dialog").get_by_role("button", name="Cancel").click()
        expect(tab.page.locator("#state")).to_have_text("needs an API key")
        tab.page.locator("#files").set_input_files(clip)
        tab.page.fill("#key-field", KEY)
        tab.page.keyboard.press("Enter")
        expect(tab.page.locator("#model.ready")).to_be_visible()
        expect(tab.page.locator(".clip progress")).to_have_count(0)
        card = tab.ask("What moves?")
        for kind, run in (("Copy as curl", ["sh", "-c"]), ("Copy as Python", [sys.executable, "-c"])):
            card.get_by_role("button", name=kind).click()
            expect(card.get_by_role("button", name="Copied").last).to_be_visible()
            copied = tab.page.evaluate("navigator.clipboard.readText()")
            assert KEY not in copied
            command = ["env", f"KEY={KEY}", *run, copied]
            done = subprocess.run(command, cwd=clip.parent, capture_output=True, text=True, check=True)
            assert "A red squ" in done.stdout
        tab.leave()


def test_a_lost_connection_is_called_so_and_the_focus_stays_where_the_user_has_put_it(visit: Open) -> None:
    with served() as server:
        tab = visit(server.url + "/").ready()
        tab.expected = ("ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_REFUSED")
        tab.ask("What moves?")
        expect(tab.page.locator("#prompt")).to_be_focused()
        tab.page.fill("#prompt", "wait")
        with tab.page.expect_response(server.url + "/v1/video-chat"):
            tab.page.click("#send")
        tab.page.locator("#settings summary").click()
        tab.page.locator("#settings [name=seed]").focus()
        server.process.kill()
        expect(tab.finished(1).locator(".problem")).to_have_text("The connection to the server was lost.")
        expect(tab.page.locator("#settings [name=seed]")).to_be_focused()
        tab.leave()


def test_the_header_tells_that_a_server_has_gone_and_come_back(visit: Open) -> None:
    with served() as server:
        tab = visit(server.url + "/")
        tab.page.clock.install()
        tab.ready().expected = ("ERR_FAILED",)
        name = tab.page.locator("#state").inner_text()
        tab.page.route("**/health/ready", lambda route: route.abort())
        tab.page.clock.fast_forward(11_000)
        expect(tab.page.locator("#state")).to_have_text("The server cannot be reached.")
        expect(tab.page.locator("#model.ready")).to_have_count(0)
        tab.page.unroute("**/health/ready")
        tab.page.clock.fast_forward(2_000)
        expect(tab.page.locator("#model.ready #state")).to_have_text(name)
        tab.leave()


def test_a_server_that_cannot_be_reached_is_called_so(visit: Open) -> None:
    with served() as server:
        tab = visit(server.url + "/").ready()
        tab.expected = ("ERR_FAILED",)
        tab.page.route("**/v1/video-chat", lambda route: route.abort())
        expect(tab.ask("What moves?").locator(".problem")).to_have_text("The server cannot be reached.")
        tab.leave()


def test_stopping_stops_and_a_full_server_says_so(visit: Open) -> None:
    with served("--max-running-requests", "1", "--max-queued-requests", "0") as server:
        first, second = visit(server.url + "/").ready(), visit(server.url + "/").ready()
        second.expected = ("503",)
        first.page.fill("#prompt", "wait")
        with first.page.expect_response(server.url + "/v1/video-chat"):
            first.page.click("#send")
        expect(second.ask("What moves?").locator(".problem")).to_contain_text("try again")
        first.page.click("#stop")
        card = first.finished()
        expect(card.locator(".problem")).to_have_text("Stopped.")
        expect(card.locator(".words")).to_have_text("A red")
        assert second.ask("What moves?").locator(".words").inner_text() == "A red squäre."
        for tab in (first, second):
            tab.leave()


@pytest.mark.slow
def test_text_goes_on_after_a_worker_is_killed(server: Served, visit: Open, clip: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.add_file(clip)
    tab.setting("max_tokens", "1000")
    tab.setting("schema", json.dumps(_LONG))
    tab.page.click("#send")
    expect(tab.page.locator(".words span").nth(5)).to_be_visible()
    os.kill(_pid_of(server, "vidspec-target"), signal.SIGKILL)
    card = tab.finished()
    expect(card.locator(".problem")).to_be_hidden()
    text = card.locator(".words").inner_text()
    assert len(json.loads(text)) == _LONG["minItems"]
    card.get_by_role("button", name="Again, same seed").click()
    expect(tab.page.locator(".answer > .note")).to_have_text("The same text again.")
    assert tab.page.locator(".answer .words").inner_text() == text


def _pid_of(server: Served, name: str) -> int:
    """The id of the server's process of that name."""
    return next(pid for pid in server.family() if Path(f"/proc/{pid}/comm").read_text().strip() == name)


@pytest.mark.slow
def test_docs_can_be_tried_out_as_they_come(server: Served, visit: Open, tmp_path: Path) -> None:
    tab = visit(server.url + "/docs").open()
    tab.expected = ("Could not find component",)
    write_scene(1, tmp_path / "clip.mp4")
    for path in ("/v1/video-chat", "/v1/chat/completions", "/v1/completions", "/v1/videos"):
        block = tab.page.locator(".opblock-post", has=tab.page.locator(f'[data-path="{path}"]'))
        block.locator(".opblock-summary-control").click()
        block.locator(".try-out__btn").click()
        for field in block.locator("input[type=file]").all():
            field.set_input_files(tmp_path / "clip.mp4")
        with tab.page.expect_response(server.url + path) as response:
            block.locator(".execute").click()
        assert response.value.status == 200, (path, response.value.text())
        block.locator(".opblock-summary-control").click()
