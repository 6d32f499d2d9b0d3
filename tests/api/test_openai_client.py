"""The official OpenAI client against a server process: its requests are accepted, and it can parse the answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from tests.api.processes import Served, served
from tests.clips import bar_codes, write_video

pytestmark = pytest.mark.api

KEY = "the-key-0123456789abcdef"
TEXT = "A red squäre."
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    with served("--api-key-file", str(keys)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path: Path = write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", bar_codes(8), rate=8)
    return path.read_bytes()


def messages(clip: bytes, question: str = "What moves?") -> list[Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(clip).decode()}"
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": question}]
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake-target", "fake-alias"]


def test_a_whole_answer(client: openai.OpenAI, clip: bytes) -> None:
    answer = client.chat.completions.create(
        model="fake-target", messages=messages(clip), temperature=0.5, top_p=0.9, seed=3, stop=["END"], n=1,
        max_completion_tokens=9, extra_body={"speculation": "serial", "num_frames": 2},
    )  # fmt: skip
    assert answer.object == "chat.completion"
    assert answer.model_extra == {}
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is None
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (40, 5, 45)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 3


def nulls(params: type) -> dict[str, None]:
    """Every field that OpenAI says may be null, as null."""
    return {name: None for name, kind in get_type_hints(params).items() if type(None) in get_args(kind)}


def test_what_the_client_may_leave_open_with_null_is_no_error(client: openai.OpenAI, clip: bytes) -> None:
    chat: Any = nulls(CompletionCreateParamsBase)
    assert "moderation" in chat
    answer = client.chat.completions.create(model="fake-target", messages=messages(clip), **chat)
    assert answer.choices[0].message.content == TEXT
    fields: Any = nulls(ResponseCreateParamsBase)
    assert "context_management" in fields
    assert client.responses.create(model="fake-target", input="What moves?", **fields).output_text == TEXT


def test_an_answer_can_be_sent_back_as_a_turn(client: openai.OpenAI, clip: bytes) -> None:
    turns = messages(clip)
    first = client.chat.completions.create(model="fake-target", messages=turns)
    turns += [first.choices[0].message, {"role": "user", "content": "Where to?"}]
    assert client.chat.completions.create(model="fake-target", messages=turns).choices[0].message.content == TEXT


def test_a_stream_with_usage(client: openai.OpenAI, clip: bytes) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake-target", messages=messages(clip), stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 45
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_clients_own_stream_helper_puts_the_answer_together(client: openai.OpenAI, clip: bytes) -> None:
    with client.chat.completions.stream(model="fake-target", messages=messages(clip)) as stream:
        assert stream.get_final_completion().choices[0].message.content == TEXT


def test_the_clients_stream_helper_puts_a_response_together(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake-target", input="What moves?") as stream:
        assert stream.get_final_response().output_text == TEXT


def test_a_text_is_gone_on_with(client: openai.OpenAI) -> None:
    assert client.completions.create(model="fake-target", prompt="Once").choices[0].text == TEXT
    chunks = list(client.completions.create(model="fake-target", prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"n": 9}, openai.BadRequestError, "n"),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs"),
        ({"tools": [FUNCTION], "tool_choice": "auto"}, openai.BadRequestError, "tool_choice"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-4o"}, openai.NotFoundError, "model"),
    ],
)
def test_a_refusal_is_the_exception_that_it_should_be(
    client: openai.OpenAI, clip: bytes, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "fake-target", "messages": messages(clip), **fields})
    assert caught.value.param == param
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(server: Served) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"
