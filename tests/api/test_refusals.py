"""Every invalid request gets its own status and code, and the name of the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.world import DATA_URL, FILE, URL, World
from tests.fakes import FakeDecodePool
from vidspec_service.errors import VideoTooLarge, VideoUnreadable, VideoUnsupported

pytestmark = [pytest.mark.api, pytest.mark.anyio]

USER = {"role": "user", "content": "Hm?"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "  \n"}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "x" * 200_001}, "prompt"),
        ({"messages": [USER]}, "prompt"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": None, "messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"prompt": None, "messages": [{"role": "user"}]}, "messages.0.content"),
        ({"prompt": None, "messages": [{"role": "user", "content": " "}]}, "messages.0.content"),
        ({"prompt": None, "messages": [{**USER, "name": "x"}]}, "messages.0.name"),
        ({"prompt": None, "messages": [USER, {"role": "assistant", "content": "x"}]}, "messages.1.role"),
        ({"prompt": None, "messages": [USER, {"role": "system", "content": "x"}, USER]}, "messages.1.role"),
        ({"prompt": None, "messages": [{"role": "user", "content": "x" * 150_000}] * 2}, "messages"),
        ({"video_id": "video-1"}, "video"),
        ({"video": "http://example.com/a.mp4"}, "video"),
        ({"video": "data:video/mp4;base64,@@@"}, "video"),
        ({"video": None, "video_url": "https://example.com/a.mp4"}, "video_url"),
        ({"fps": 2, "num_frames": 4}, "fps"),
        ({"fps": 0}, "fps"),
        ({"fps": -1.5}, "fps"),
        ({"fps": 1000.5}, "fps"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": 2.5}, "num_frames"),
        ({"max_frames": 0}, "max_frames"),
        ({"start_s": -1}, "start_s"),
        ({"end_s": 0}, "end_s"),
        ({"start_s": 3, "end_s": 3}, "end_s"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "12"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"speculation": "fast"}, "speculation"),
        ({"compression": "zip"}, "compression"),
        ({"n": 9}, "n"),
        ({"model": "x"}, "model"),
    ],
)
async def test_a_wrong_field_is_a_400_that_names_it(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    world = World(tmp_path)
    response = await world.ask(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_request", param)
    assert world.decoder.requests == []
    assert world.leftovers == []


@pytest.mark.parametrize("text", ["1e400", "NaN", "Infinity"])
async def test_numbers_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    body = f'{{"video": "{DATA_URL}", "prompt": "x", "temperature": {text}}}'
    response = await World(tmp_path).client.post(URL, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400


async def test_an_unknown_field_gets_a_suggestion_and_its_value_is_not_repeated(tmp_path: Path) -> None:
    response = await World(tmp_path).ask(num_frame="secret")
    error = response.json()["error"]
    assert error["message"] == "Unknown field 'num_frame'. Did you mean num_frames?"
    assert error["param"] == "num_frame"


async def test_video_data_in_the_field_for_addresses_is_told_its_own(tmp_path: Path) -> None:
    response = await World(tmp_path).ask(video=None, video_url=DATA_URL)
    assert response.json()["error"]["message"] == "video_url: it is an https address; a data: URL goes into video."


async def test_a_video_that_is_not_kept_is_a_404(tmp_path: Path) -> None:
    response = await World(tmp_path).ask(video=None, video_id="video-1")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("not_found", "video_id")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "Invalid JSON"),
        ("{", "Invalid JSON"),
        ("[]", "object"),
        ("null", "object"),
        ('{"video": "\ud800"}'.encode("utf-8", "surrogatepass"), "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
    ],
)
async def test_a_body_that_is_not_a_json_object_is_a_400(tmp_path: Path, body: str | bytes, message: str) -> None:
    response = await World(tmp_path).client.post(URL, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_a_byte_order_mark_before_json_is_skipped(tmp_path: Path) -> None:
    """Programs on Windows write one before a body, and before the schema that a form sends from a file."""
    world = World(tmp_path)
    body = '\ufeff{"prompt": "What moves?"}'.encode()
    response = await world.client.post(URL, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert (await world.ask_form(guided_json='\ufeff{"const": 5}')).status_code == 200


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("zstd", 415), ("Identity", 200), ("", 200)])
async def test_a_compressed_body_is_a_415_that_says_so(tmp_path: Path, coding: str, status: int) -> None:
    headers = {"content-type": "application/json", "content-encoding": coding}
    response = await World(tmp_path).client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == status
    assert ("uncompressed" in response.text) == (status == 415)


@pytest.mark.parametrize("content_type", ["Application/JSON", "application/json ; charset=utf-8"])
async def test_a_content_type_is_read_in_any_case_and_with_parameters(tmp_path: Path, content_type: str) -> None:
    headers = {"content-type": content_type}
    response = await World(tmp_path).client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "video/mp4"])
async def test_another_content_type_is_a_415(tmp_path: Path, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = await World(tmp_path).client.post(URL, content=b"x", headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        (FILE, {"prompt": "x", "fsp": "2"}, "fsp"),
        (FILE, {"prompt": "x", "fps": "two"}, "fps"),
        (FILE, {"prompt": "x", "fps": "nan"}, "fps"),
        (FILE, {"prompt": "x", "start_s": "nan"}, "start_s"),
        (FILE, {"prompt": "x", "end_s": "inf"}, "end_s"),
        (FILE, {"prompt": "x", "fps": "2", "num_frames": "3"}, "fps"),
        (FILE, {"prompt": ["x", "y"]}, "prompt"),
        (FILE, {}, "prompt"),
        (FILE, {"messages": "[{"}, "messages"),
        (FILE, {"messages": "[" * 100_000}, "messages"),
        (FILE, {"prompt": "x", "seed": ""}, "seed"),
        ({"video": (None, "clip.mp4")}, {"prompt": "x"}, "video"),
        ({"file": ("a.mp4", b"x")}, {"prompt": "x"}, "file"),
        ({"prompt": ("p.txt", b"\xff\xfe")}, {}, "prompt"),
        ([*FILE.items(), *FILE.items()], {"prompt": ["x", "y"]}, "prompt"),
    ],
)
async def test_a_wrong_form_is_a_400_that_names_the_part(
    tmp_path: Path, files: Any, data: dict[str, Any], param: str
) -> None:
    world = World(tmp_path)
    response = await world.client.post(URL, files=files, data=data)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert world.leftovers == []


async def test_an_empty_video_is_a_422(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await world.client.post(URL, files={"video": ("a.mp4", b"")}, data={"prompt": "x"})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "video_unreadable"
    assert world.leftovers == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (VideoUnsupported("Not a video.", param="video"), 415, "video_unsupported"),
        (VideoUnreadable("No frame can be decoded.", param="video"), 422, "video_unreadable"),
        (VideoTooLarge("Longer than 3600 s.", param="video"), 413, "video_too_large"),
    ],
)
async def test_what_the_decoder_refuses_has_its_own_status(
    tmp_path: Path, error: Exception, status: int, code: str
) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(error))
    response = await world.ask_form(stream="true")
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": str(error), "type": "invalid_request_error", "param": "video", "code": code
    }  # fmt: skip
    assert world.engine.requests == []
    assert world.leftovers == []
    assert world.admission.num_admitted == 0


async def test_a_body_of_a_million_fields_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    world = World(tmp_path)
    fields = ",".join(f'"k{index}":1' for index in range(1_000_000))
    asked = await world.client.post(URL, content="{" + fields + "}", headers={"content-type": "application/json"})
    assert (asked.status_code, asked.json()["error"]["code"]) == (400, "invalid_request")
    assert "more values in it" in asked.json()["error"]["message"]
    form = {"messages": "[" + "[]," * 200_000 + "[]]"}
    asked = await world.client.post(URL, files=FILE, data=form)
    assert "more values in it" in asked.json()["error"]["message"]
    assert world.leftovers == []
