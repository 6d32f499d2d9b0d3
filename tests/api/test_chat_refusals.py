"""/v1/chat/completions: unsupported fields are refused clearly; fields that change nothing are not refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.chat import ASK, IMAGE_URL, URL, VIDEO, ask, user
from tests.api.world import DATA_URL, FILE, World
from tests.fakes import FakeEngine

pytestmark = [pytest.mark.api, pytest.mark.anyio]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"top_logprobs": 3}, "top_logprobs", "only allowed with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "valid integer"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "greater than or equal to 0"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", "at most 300"),
        ({"bad_words": ["x", " "]}, "bad_words.1", "match pattern"),
        ({"bad_words": ["x"] * 65}, "bad_words", "at most 64"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids.0", "less than"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "more than max_tokens, 5"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "more than max_tokens, 5"),
        ({"num_frame": 3}, "num_frame", "Did you mean num_frames?"),
        ({"prompt": "x"}, "prompt", "Unknown field"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use", "include_usage?"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "not both"),
        ({"fps": 1, "num_frames": 2}, "fps", "not both"),
        ({"temperature": 3}, "temperature", ""),
        ({"messages": None}, "messages", ""),
        ({"messages": []}, "messages", ""),
        ({"messages": [{**user(VIDEO, ASK), "role": "system"}, user(ASK)]}, "messages.0.role", "in user messages"),
        (
            {"messages": [{"role": "system", "content": "x"}, {**user(VIDEO, ASK), "role": "system"}, user(ASK)]},
            "messages.1.role", "Only the first",
        ),
        ({"messages": [user(VIDEO, ASK), {"role": "assistant", "content": "x"}]}, "messages.1.role", "the role user"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", ""),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content", "must not be empty"),
        ({"messages": [{"role": "user", "content": []}, user(ASK)]}, "messages.0.content", "at least 1"),
        (
            {"messages": [user(ASK), {"role": "assistant", "content": ""}], "continue_final_message": True},
            "messages.1", "must have text",
        ),
        ({"messages": [user({"type": "text", "text": " "})]}, "messages.0.content", "must not be empty"),
        ({"messages": [user({"type": "image_url", "image_url": {}})]}, "messages.0.content.0.image_url.url", ""),
        ({"messages": [user({"type": "image_url", "image_url": {"url": DATA_URL}}, ASK)]}, "video", "data:image/"),
        ({"messages": [user({"type": "video_url", "video_url": {"url": IMAGE_URL}}, ASK)]}, "video", "data:video/"),
        ({"messages": [user(VIDEO, {"type": "input_audio"})]}, "messages.0.content.1", "does not accept audio"),
        ({"messages": [user(VIDEO, {"text": "x"})]}, "messages.0.content.1", ""),
        ({"messages": [user({"type": "video_url", "video_url": "x"})]}, "messages.0.content.0.video_url", ""),
        (
            {"messages": [user({"type": "video_url", "video_url": {"url": DATA_URL, "fps": 2}}, ASK)]},
            "video", "need a data:video/jpeg",
        ),
        (
            {"messages": [user({"type": "input_video", "input_video": {}}, ASK)]},
            "messages.0.content.0.input_video", "exactly one of data and url",
        ),
        (
            {"messages": [user({"type": "file", "file": {}}, ASK)]},
            "messages.0.content.0.file", "exactly one of file_id and file_data",
        ),
        ({"messages": [user({"type": "video_url", "video_url": {"url": "data:,x"}}, ASK)]}, "video", "data:video/"),
        (
            {"messages": [user({"type": "image_url", "image_url": {"url": "data:video/jpeg;base64,/9j/"}}, ASK)]},
            "video", "image must be a URL that starts with data:image/",
        ),
        (
            {"messages": [user({"type": "video_url", "video_url": {"url": "https://a.example/b"}}, ASK)]},
            "video_url", "(VIDSPEC_VIDEO_URL_HOSTS); send the file or a data URL.",
        ),
        (
            {"messages": [user({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, ASK)]},
            "video_url", "(VIDSPEC_VIDEO_URL_HOSTS); send the file or a data URL.",
        ),
    ],
)  # fmt: skip
async def test_what_is_not_done_here_is_a_400_that_says_so(
    tmp_path: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    world = World(tmp_path)
    response = await ask(world, **fields)
    world.assert_refused(response, param, words)


async def test_another_model_is_a_404(tmp_path: Path) -> None:
    error = await ask(World(tmp_path), model="gpt-4o")
    assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")
    assert "'fake-target'" in error.json()["error"]["message"]
    assert (await ask(World(tmp_path), model=None)).status_code == 200


async def test_only_json_is_taken(tmp_path: Path) -> None:
    response = await World(tmp_path).client.post(URL, files=FILE, data={"messages": "[]"})
    assert response.status_code == 415


async def test_its_bytes_have_the_same_limits_as_those_of_any_other_body(tmp_path: Path) -> None:
    assert (await ask(World(tmp_path, max_upload_bytes=10))).status_code == 413
    assert (await ask(World(tmp_path, max_json_bytes=100))).status_code == 413
    assert (await ask(World(tmp_path, FakeEngine(is_ready=False)))).status_code == 503
    world = World(tmp_path, max_running_requests=1, max_queued_requests=0)
    with world.admission.permit("", ""):
        assert (await ask(world)).status_code == 503
