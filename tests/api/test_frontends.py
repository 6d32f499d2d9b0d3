"""Request bodies of vLLM's bench client 0.33, GuideLLM 0.8 and Open WebUI 0.12 are accepted unchanged.

Only videos, images, prompts and the descriptions of Open WebUI's 36 tools are shortened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.api.chat import IMAGE_URL
from tests.api.world import DATA_URL, World

pytestmark = [pytest.mark.api, pytest.mark.anyio]

MODEL = "fake-target"
CHAT = "/v1/chat/completions"


def tool(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    parameters = {"properties": properties, **({"required": list(required)} if required else {}), "type": "object"}
    return {"type": "function", "function": {"name": name, "description": f"{name}\nit.", "parameters": parameters}}


WEB_UI_TOOLS = [
    tool("get_current_timestamp"),
    tool("calculate_timestamp", days_ago={"default": 0, "description": "Days (default: 0)", "type": "integer"}),
    tool(
        "ask_user", "questions",
        questions={"description": "1-3", "items": {"additionalProperties": True, "type": "object"}, "type": "array"},
        allow_other={"default": True, "description": "Whether", "type": "boolean"},
    ),
]  # fmt: skip
WEB_UI_TITLE = """### Task:
Generate a concise title summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: Describe the image.
ASSISTANT:\x20
</chat_history>"""

RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve, random-mm": (CHAT, {
        "model": MODEL,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "second-halfsentresent presentill"},
            {"type": "video_url", "video_url": {"url": DATA_URL}},
            {"type": "image_url", "image_url": {"url": IMAGE_URL}},
        ]}],
        "max_completion_tokens": 24, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }),
    "vllm bench serve, with sampling": (CHAT, {
        "model": MODEL,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "second-halfsentresent presentill"},
            {"type": "video_url", "video_url": {"url": DATA_URL}},
        ]}],
        "max_completion_tokens": 24, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        "top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.7,
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.05,
    }),
    "vllm bench serve, responses": ("/v1/responses", {
        "model": MODEL, "input": " wholesecond-halfsentresent", "max_output_tokens": 16, "stream": True,
        "store": False, "ignore_eos": True,
    }),
    "vllm bench serve, completions": ("/v1/completions", {
        "model": MODEL, "prompt": " wholesecond-halfsentresent", "repetition_penalty": 1.0, "max_tokens": 16,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }),
    "vllm bench serve, tokenize": ("/tokenize", {
        "model": MODEL, "prompt": " wholesecond-halfsentresent", "add_special_tokens": False,
    }),
    "GuideLLM": (CHAT, {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 24, "stop": None, "ignore_eos": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What moves?"}]}],
    }),
    "GuideLLM, a video": (CHAT, {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": DATA_URL}}]}],
    }),
    "Open WebUI, an image": (CHAT, {
        "stream": True, "model": MODEL,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": '<attached_files>\n<file type="file" name="frame.jpg"/>\n</attached_files>\n\n'},
            {"type": "text", "text": "Describe the image."},
            {"type": "image_url", "image_url": {"url": IMAGE_URL}},
        ]}],
        "tools": WEB_UI_TOOLS,
    }),
    "Open WebUI, a video through its API": (CHAT, {
        "model": MODEL,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Describe the video."}, {"type": "video_url", "video_url": {"url": DATA_URL}},
        ]}],
        "stream": False,
    }),
    "Open WebUI, a title": (CHAT, {
        "model": MODEL, "messages": [{"role": "user", "content": WEB_UI_TITLE}], "stream": False, "max_tokens": 1000,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
async def test_a_frontend_is_answered_as_it_asks(tmp_path: Path, name: str) -> None:
    world = World(tmp_path)
    path, body = RECORDED[name]
    response = await world.client.post(path, json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert re.search(r'"error": ?\{', response.text) is None
    assert world.leftovers == []
