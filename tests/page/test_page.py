"""The page at `/` in a real browser, against the real server on the bundled pair: questions, streams and races."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Request, Route, expect

from tests.api.processes import ROOT, Served
from tests.clips import bar_codes, write_video
from tests.page.conftest import Open, Visit, as_json
from vidspec_models.bundled.captions import caption_marks
from vidspec_models.bundled.scene import sample_scene
from vidspec_service.bench.common.scenes import write_scene

ICON = ROOT / "service/vidspec_service/api/openapi/frame.jpg"
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
    marks = caption_marks(sample_scene(8), words.inner_text())
    assert all(is_right for _, is_right in marks), (
        "the first impression is of a clip that the bundled pair tells rightly"
    )
    assert words.locator(".by-draft, .by-target").count() > 8
    expect(tab.page.locator(".strip .frame")).to_have_count(8)
    expect(tab.page.locator("#told")).to_have_text("The answer is complete.")
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


def test_what_a_model_thinks_is_shown_whole_and_is_no_part_of_the_conversation(
    server: Served, visit: Open, clip: Path
) -> None:
    tab = visit(server.url + "/").ready()
    tab.add_file(clip)
    thought = ("I look", " again.\n", "</think>", "\n\n")
    details = [{"text": text, "source": "target"} for text in thought]

    def think(route: Route) -> None:
        """The server's own answer, after a thought."""
        answer = route.fetch().text()
        first = json.loads(answer.partition("data: ")[2].partition("\n")[0])
        first["choices"] = [{"index": 0, "delta": {"reasoning": "I look again."}, "token_details": details}]
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(first)}\n\n{answer}")

    tab.page.route("**/v1/video-chat", think)
    card = tab.ask("How many objects are there?")
    shown = card.locator(".words").inner_text()
    said = shown.removeprefix("I look again.\n</think>").strip()
    assert said != shown
    assert said
    assert card.locator(".words .thought").all_inner_texts() == list(thought)
    tab.page.unroute("**/v1/video-chat")
    with tab.page.expect_request(_is_question_about("Describe the video.")) as asked:
        tab.ask("Describe the video.")
    _, answered, _ = json.loads(asked.value.post_data or "")["messages"]
    assert answered == {"role": "assistant", "content": said}


def test_the_server_reads_a_clip_while_the_first_question_is_typed(server: Served, visit: Open, tmp_path: Path) -> None:
    write_scene(70, tmp_path / "new.mp4")
    tab = visit(server.url + "/").ready()
    tab.add_file(tmp_path / "new.mp4")
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.extend([request.url] if request.method == "POST" else []))
    with tab.page.expect_request_finished(_is_question_about("?")):
        tab.page.locator("#prompt").press_sequentially(" Which")
    first = tab.ask("Which letters are shown?")
    assert int(tab.figure(first, "prompt tokens cached").split()[0]) > 90
    tab.ask("What moves?")
    assert asked == [f"{server.url}/v1/video-chat"] * 3, "the clip is read ahead once"


def test_clips_are_dropped_pasted_and_recorded_and_all_of_it_can_be_taken_away(
    server: Served, visit: Open, clip: Path, tmp_path: Path
) -> None:
    tab = visit(server.url + "/", accept_downloads=True).ready()
    unshown = write_video(tmp_path / "old.avi", bar_codes(3), codec="mpeg4")  # a format that no browser plays
    _hand_over(tab, "drop", clip, unshown)
    _hand_over(tab, "paste", ICON)
    stop = tab.page.get_by_role("button", name="Stop")
    for is_kept in (False, True):
        tab.page.click("#record")
        tab.page.get_by_role("button", name="Start").click()
        expect(stop).to_be_enabled()
        stop.press("Enter" if is_kept else "Escape")
        expect(tab.page.locator("#record-dialog")).to_be_hidden()
    names = tab.page.locator(".clip .name")
    expect(names).to_have_text([clip.name, unshown.name, ICON.name, "recording.webm"])
    tab.setting("max_tokens", "4")
    card = tab.ask("Describe the video.")
    expect(tab.page.locator(".strip .frame canvas").nth(3)).to_be_visible()
    expect(tab.page.locator(".unplayable")).to_have_count(1)
    with tab.page.expect_download() as download:
        card.get_by_role("button", name="Export JSON").click()
    kept = json.loads(Path(download.value.path()).read_text())
    assert kept["clips"] == names.all_inner_texts()
    assert len(kept["videos"]) == 4
    assert "".join(token["text"] for token in kept["tokens"]) == kept["text"] != ""
    assert {"request", "timeline", "draft_view", "speculation", "timings"} <= kept.keys()


def test_acceptance_is_told_while_the_answer_is_written_as_what_it_is_at_least(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").open()
    sources = ["target", "draft", "draft", "target"]
    found = tab.page.evaluate(
        """async (sources) => {
          const { figures, unread } = await import("/page/reading.js");
          return figures({ ...unread(), tokens: sources.map((source) => ({ source })) });
        }""",
        sources,
    )
    assert (found["acceptance"], found["isLeast"]) == (0.5, True)


def _hand_over(tab: Visit, how: str, *paths: Path) -> None:
    """Drop files on the page or paste them into the question, as a user would."""
    files = [[path.name, base64.b64encode(path.read_bytes()).decode()] for path in paths]
    tab.page.evaluate(
        """([how, files]) => {
          const transfer = new DataTransfer();
          for (const [name, data] of files) {
            const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
            const type = name.endsWith("jpg") ? "image/jpeg" : "video/mp4";
            transfer.items.add(new File([bytes], name, { type }));
          }
          const options = { bubbles: true, cancelable: true };
          const event = how === "drop" ? new DragEvent("drop", { ...options, dataTransfer: transfer })
            : new ClipboardEvent("paste", { ...options, clipboardData: transfer });
          document.getElementById(how === "drop" ? "drop" : "prompt").dispatchEvent(event);
        }""",
        [how, files],
    )


def test_a_schema_is_checked_while_typed_and_binds_the_answer(server: Served, visit: Open, clip: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.expected = ("400",)
    tab.setting("schema", "{")
    expect(tab.page.locator("#schema-verdict")).to_contain_text("Not JSON")
    tab.setting("schema", '{"not": {}}')
    expect(tab.ask("What moves?").locator(".problem")).to_contain_text('Unimplemented keys: ["not"]')
    expect(tab.page.locator("#prompt")).to_have_value("What moves?")
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
    expect(tab.page.locator(".lane select:disabled")).to_have_count(2)
    expect(tab.page.locator(".verdict")).to_contain_text("Word for word the same text.")
    expect(tab.page.locator(".lane select:enabled")).to_have_count(2)
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
    expect(tab.ask("Describe the video.").locator(".note[role=status]")).to_contain_text("token limit")


def test_each_of_several_bad_files_is_told_until_a_new_conversation_begins(
    server: Served, visit: Open, tmp_path: Path
) -> None:
    tab = visit(server.url + "/").ready()
    tab.expected = ("415",)
    bad = [tmp_path / "one.mp4", tmp_path / f"{'two' * 60}.mp4"]
    for path in bad:
        path.write_text("not a video")
    tab.page.locator("#files").set_input_files(bad)
    for path in bad:
        expect(tab.page.locator("#clip-problem")).to_contain_text(f"{path.name}: ")
    assert tab.page.locator("#clips").evaluate("clips => clips.scrollWidth - clips.clientWidth") == 0
    tab.page.locator("#files").set_input_files(bad[:1])
    expect(tab.page.locator("#clip-problem")).not_to_contain_text("two")
    expect(tab.page.locator("#clip-problem")).to_contain_text("one")
    tab.page.click("#new")
    expect(tab.page.locator("#clip-problem")).to_be_hidden()


def test_a_sample_clip_that_arrives_after_a_new_conversation_has_begun_is_no_part_of_it(
    server: Served, visit: Open
) -> None:
    tab = visit(server.url + "/").ready()
    held: list[Route] = []
    tab.page.route("**/page/samples/*", lambda route: held.append(route))
    with tab.page.expect_request("**/page/samples/*"):
        tab.page.click("#sample")
    tab.page.click("#new")
    held[0].continue_()
    expect(tab.page.locator("#sample")).to_be_enabled()
    expect(tab.page.locator(".clip")).to_have_count(0)


def test_what_is_typed_while_a_question_waits_for_an_upload_is_kept(server: Served, visit: Open, clip: Path) -> None:
    tab = visit(server.url + "/").ready()
    held: list[Route] = []
    tab.page.route("**/v1/videos", lambda route: held.append(route))
    with tab.page.expect_request("**/v1/videos"):
        tab.page.locator("#files").set_input_files(clip)
    tab.page.fill("#prompt", "What moves?")
    tab.page.keyboard.press("Enter")
    tab.page.fill("#prompt", "And what else?")
    held[0].continue_()
    tab.finished()
    expect(tab.page.locator(".said")).to_have_text("What moves?")
    expect(tab.page.locator("#prompt")).to_have_value("And what else?")


def test_the_focus_is_not_lost_with_the_button_that_was_used(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    card = tab.ask("What moves?")
    card.get_by_role("button", name="Again").press("Enter")
    expect(tab.page.locator(".answer > .note")).to_have_text("The same text again.")
    expect(card.get_by_role("button", name="Again")).to_be_focused()
    tab.page.route("**/v1/video-chat", lambda _: None)  # it is never answered
    tab.page.click("#race")
    tab.page.locator("#stop").press("Enter")
    expect(tab.page.locator("#prompt")).to_be_focused()


def test_a_race_that_is_stopped_says_so_and_one_without_a_question_asks_for_it(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    tab.page.route("**/v1/video-chat", lambda _: None)  # it is never answered
    tab.page.click("#race")
    tab.page.click("#stop")
    expect(tab.page.locator(".verdict")).to_have_text("Stopped.")
    tab.page.fill("#prompt", "")
    tab.page.click("#race")
    expect(tab.page.locator("#prompt")).to_be_focused()


def test_a_browser_that_denies_the_clipboard_copies_all_the_same(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    tab.page.evaluate(
        """() => {
          navigator.clipboard.writeText = () => Promise.reject(new DOMException("denied", "NotAllowedError"));
          document.addEventListener("copy", () => { window.copied = String(document.activeElement.value); });
        }"""
    )
    card = tab.ask("What moves?")
    card.get_by_role("button", name="Copy text").click()
    expect(card.get_by_role("button", name="Copied")).to_be_visible()
    assert tab.page.evaluate("copied") == card.locator(".words").inner_text()


@pytest.mark.parametrize("body", ["null", '{"error": null}', "<html>"])
def test_what_a_proxy_answers_in_place_of_the_server_is_told_by_its_status(
    server: Served, visit: Open, body: str
) -> None:
    tab = visit(server.url + "/").ready()
    tab.expected = ("502",)
    tab.page.route("**/v1/video-chat", lambda route: route.fulfill(status=502, body=body))
    expect(tab.ask("What moves?").locator(".problem")).to_have_text("The server answered 502.")


def test_text_can_be_dragged_into_the_question(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    is_left_to_the_browser = tab.page.evaluate(
        """() => ["dragover", "drop"].every((name) => {
          const transfer = new DataTransfer();
          transfer.setData("text/plain", "What moves?");
          const event = new DragEvent(name, { dataTransfer: transfer, bubbles: true, cancelable: true });
          return document.getElementById("prompt").dispatchEvent(event);
        })"""
    )
    assert is_left_to_the_browser


def test_an_image_that_was_taken_away_before_it_failed_takes_no_other_clip_with_it(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    tab.expected = ("ERR_FILE_NOT_FOUND",)
    num_clips = tab.page.evaluate(
        """async () => {
          const clips = await import("/page/clips.js");
          const transfer = new DataTransfer();
          for (const name of ["bad", "good"]) transfer.items.add(new File(["x"], name, { type: "image/png" }));
          document.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, cancelable: true }));
          const [bad, good] = clips.current();
          bad.card.querySelector("[aria-label^=Remove]").click();
          good.ready = Promise.resolve();
          await bad.ready.catch(() => {});
          return clips.current().length;
        }"""
    )
    assert num_clips == 1


def test_frames_are_shown_at_the_clip_that_they_are_of(server: Served, visit: Open, clip: Path, tmp_path: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("max_tokens", "4")
    tab.add_file(clip)
    tab.ask("Describe the video.")
    tab.page.get_by_role("button", name=f"Remove {clip.name}").click()
    tab.add_file(write_video(tmp_path / "other.mp4", bar_codes(3)))
    tab.page.get_by_role("button", name="Again, same seed").click()
    expect(tab.page.locator(".answer > .note")).to_have_text("The same text again.")
    expect(tab.page.locator(".strip")).to_be_hidden()


def test_a_video_that_the_server_has_forgotten_is_uploaded_again(server: Served, visit: Open, clip: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.expected = ("404",)
    tab.add_file(clip)
    text = tab.ask("Describe the video.").locator(".words").inner_text()
    for action in ("ask", "Again, same seed"):
        for video in httpx.get(f"{server.url}/v1/videos").json()["data"]:
            httpx.delete(f"{server.url}/v1/videos/{video['id']}").raise_for_status()
        if action == "ask":
            assert tab.ask("Describe the video.").locator(".problem").is_hidden()
        else:
            tab.page.get_by_role("button", name=action).first.click()
            expect(tab.page.locator(".answer > .note").first).to_have_text("The same text again.")
    assert tab.page.locator(".answer .words").first.inner_text() == text


def test_a_clip_that_is_shown_twice_has_its_frames_and_the_warnings_about_them_twice(
    server: Served, visit: Open, clip: Path
) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("num_frames", "33")
    tab.setting("max_tokens", "4")
    for _ in range(2):
        tab.add_file(clip)
    tab.ask("Describe the video.")
    expect(tab.page.locator(".clip .strip:visible")).to_have_count(2)
    expect(tab.page.locator(".clip > .note", has_text="num_frames is lowered from 33")).to_have_count(2)


def test_a_video_of_which_the_browser_would_play_the_sound_only_is_called_unplayable(
    server: Served, visit: Open, tmp_path: Path
) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("max_tokens", "4")
    tab.add_file(write_video(tmp_path / "old.mp4", bar_codes(20), codec="mpeg4", with_audio=True))
    tab.ask("Describe the video.")
    expect(tab.page.locator(".unplayable")).to_be_visible()
    expect(tab.page.locator(".frame canvas")).to_have_count(8)
    sizes = tab.page.locator(".frame canvas").evaluate_all("all => all.map((each) => each.width)")
    assert min(sizes) > 16


def test_the_frames_of_a_tall_video_are_no_higher_than_the_page(server: Served, visit: Open, tmp_path: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("max_tokens", "4")
    tab.add_file(write_video(tmp_path / "tall.mp4", bar_codes(8, width=32, height=1024)))
    tab.ask("Describe the video.")
    expect(tab.page.locator(".frame canvas")).to_have_count(8)
    assert max(tab.page.locator(".frame").evaluate_all("all => all.map((each) => each.offsetHeight)")) < 250


def test_an_animated_image_is_a_video(server: Served, visit: Open, tmp_path: Path) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("max_tokens", "4")
    tab.add_file(write_video(tmp_path / "moving.gif", bar_codes(20), codec="gif", pix_fmt="rgb8"))
    expect(tab.page.locator(".clip img")).to_be_visible()
    tab.ask("Describe the video.")
    expect(tab.page.locator(".frame")).to_have_count(8)


def test_a_folder_is_called_so_in_place_of_a_server_that_cannot_be_reached(
    server: Served, visit: Open, tmp_path: Path
) -> None:
    tab = visit(server.url + "/").ready()
    tab.expected = ("ERR_FILE_NOT_FOUND", "ERR_ACCESS_DENIED")
    place = tab.page.locator("#drop").bounding_box()
    assert place is not None
    devtools = tab.page.context.new_cdp_session(tab.page)
    for kind in ("dragEnter", "dragOver", "drop"):
        files = {"items": [], "files": [str(tmp_path)], "dragOperationsMask": 1}
        event = {"type": kind, "x": place["x"] + 9, "y": place["y"] + 9, "data": files}
        devtools.send("Input.dispatchDragEvent", event)
    expect(tab.page.locator("#clip-problem")).to_contain_text("It cannot be read: it is a folder")


def test_what_is_transparent_in_an_image_is_white_to_the_model(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").open()
    pixel = tab.page.evaluate(
        """async () => {
          const { jpegOf } = await import("/page/frames.js");
          const drawing = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
          const sent = new Image();
          sent.src = `data:image/jpeg;base64,${await jpegOf(drawing.toDataURL("image/png"))}`;
          await sent.decode();
          const context = drawing.getContext("2d");
          context.drawImage(sent, 0, 0);
          return [...context.getImageData(4, 4, 1, 1).data];
        }"""
    )
    assert pixel == [255, 255, 255, 255]


def test_waiting_for_an_upload_can_be_stopped_and_a_new_conversation_tells_nothing_of_it(
    server: Served, visit: Open, clip: Path
) -> None:
    tab = visit(server.url + "/").ready()
    tab.page.route("**/v1/videos", lambda _: None)  # it never arrives
    for button in ("#stop", "#new"):
        tab.page.locator("#files").set_input_files(clip)
        tab.page.click("#send")
        tab.page.click(button)
        expect(tab.page.locator("#send")).to_be_enabled()
        expect(tab.page.locator("#turns")).to_be_empty()


def _is_question_about(what: str) -> Callable[[Request], bool]:
    return lambda request: (
        request.url.endswith("/v1/video-chat")
        and what in json.loads(request.post_data or "")["messages"][-1]["content"]
    )


def test_a_restored_conversation_about_an_image_goes_on_with_the_image(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("max_tokens", "4")
    tab.page.locator("#files").set_input_files(ICON)
    tab.ask("Describe the image.")
    tab.ask("Which colour is it?")
    kept = tab.page.evaluate("localStorage.getItem('vidspec.history')")
    assert kept.count("base64") == 1, "not once for each question"
    tab.page.reload()
    tab.page.click("#history")
    tab.page.locator("#history-list button").first.click()
    expect(tab.page.locator(".clip img")).to_be_visible()
    with tab.page.expect_request(_is_question_about("beside")) as request:
        tab.ask("And what is beside it?")
    assert json.loads(request.value.post_data or "")["videos"][0]["video"] in kept


def test_a_schema_that_the_browser_restores_is_checked(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("schema", "{")
    tab.page.goto(server.url + "/docs")
    tab.page.go_back()
    expect(tab.page.locator("#schema")).to_have_value("{")
    expect(tab.page.locator("#schema-verdict")).to_contain_text("Not JSON")


def test_a_question_from_right_to_left_ends_on_the_left(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    tab.setting("max_tokens", "4")
    tab.ask("מה זה?")
    first, last = tab.page.locator(".said").evaluate(
        """(said) => [0, 5].map((place) => {
          const range = document.createRange();
          range.setStart(said.firstChild, place);
          range.setEnd(said.firstChild, place + 1);
          return range.getBoundingClientRect().left;
        })"""
    )
    assert last < first


def test_forced_colours_leave_those_that_tell_who_wrote_a_word(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/", forced_colors="active").open()
    colours = tab.page.locator(".hint .key").evaluate_all(
        "keys => keys.map((key) => getComputedStyle(key, '::before').backgroundColor)"
    )
    assert len(set(colours)) == 3


def test_a_tip_stays_at_its_word_when_the_page_is_scrolled(server: Served, visit: Open, clip: Path) -> None:
    tab = visit(server.url + "/", viewport={"width": 390, "height": 500}).ready()
    tab.add_file(clip)
    words = tab.ask("Describe the video.").locator(".words")
    expect(tab.page.locator(".frame canvas").nth(7)).to_be_visible()
    tab.page.mouse.move(0, 0)
    words.focus()
    tab.page.keyboard.press("ArrowRight")
    gaps = []
    for distance in (0, 40):
        tab.page.evaluate(f"scrollBy(0, {distance})")
        word, tip = words.locator(".told").bounding_box(), tab.page.locator("#tip").bounding_box()
        assert word is not None
        assert tip is not None
        gaps.append(tip["y"] - word["y"])
    assert gaps[0] == gaps[1]


def test_a_history_that_does_not_fit_loses_the_oldest_conversations_only(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").open()
    kept = tab.page.evaluate(
        """async () => {
          const { begin, keep } = await import("/page/history.js");
          for (const prompt of ["first", "second", "third", "fourth".repeat(12)]) {
            begin();
            keep([{ prompt, body: { video: "x".repeat(2e6) }, names: [], answer: { finish: "stop" } }], []);
          }
          return JSON.parse(localStorage.getItem("vidspec.history")).map((each) => each.turns[0].prompt);
        }"""
    )
    assert kept == ["fourth" * 12, "third"]
    tab.page.click("#history")
    assert tab.page.locator("#history-list").evaluate("list => list.scrollWidth - list.clientWidth") == 0


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1280),
        ("dark", 390),
        pytest.param("dark", 1280, marks=pytest.mark.slow),
        pytest.param("light", 390, marks=pytest.mark.slow),
    ],
)
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
    tab.page.get_by_role("button", name="Again, same seed").click()
    expect(tab.page.locator(".answer > .note")).to_have_text("The same text again.")
    follow_up = tab.ask("How many objects are there?")
    assert not tab.figure(follow_up, "prompt tokens cached").startswith("0 ")


def test_what_is_copied_can_be_run_and_gives_the_same_text(
    server: Served, visit: Open, clip: Path, tmp_path: Path
) -> None:
    tab = visit(server.url + "/", permissions=["clipboard-read", "clipboard-write"]).ready()
    tab.add_file(Path(shutil.copy(clip, tmp_path / 'it\'s "a", b;c.mp4')))
    tab.setting("temperature", "0.7")
    card = tab.ask("Describe the video; don't hurry.")
    text = card.locator(".words").inner_text().strip()

    def copied(kind: str) -> str:
        card.get_by_role("button", name=kind).click()
        expect(card.get_by_role("button", name="Copied").last).to_be_visible()
        command: str = tab.page.evaluate("navigator.clipboard.readText()")
        return command

    python = subprocess.run(
        [sys.executable, "-c", copied("Copy as Python")], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert python.stdout.strip() == text
    curl = subprocess.run(["sh", "-c", copied("Copy as curl")], cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(curl.stdout)["choices"][0]["message"]["content"].strip() == text


def test_an_image_is_asked_about_and_a_word_tells_what_else_could_have_stood_there(server: Served, visit: Open) -> None:
    tab = visit(server.url + "/").ready()
    tab.page.locator("#files").set_input_files(ICON)
    expect(tab.page.locator(".clip img")).to_be_visible()
    tab.setting("max_tokens", "6")
    tab.page.locator("#settings [name=logprobs]").check()
    tab.setting("speculation", "off")
    card = tab.ask("Describe the image.")
    card.locator(".words span").first.hover()
    tip = tab.page.locator("#tip")
    expect(tip.locator(".alternative")).to_have_count(5)
    expect(tab.page.locator(".strip .frame canvas")).to_have_count(1)
    assert tab.figure(card, "draft tokens accepted") == "\u2013"
    tab.page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    card.locator(".words").focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowRight")
    second = card.locator(".words span").nth(1)
    expect(second).to_have_class(re.compile("told"))
    expect(tip).to_contain_text(re.compile(rf"^{re.escape(second.inner_text())}: .*, log probability -?\d"))
    tab.page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
