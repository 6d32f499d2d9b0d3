"""One server on the bundled pair: both dialects and both ways to send a video give the same answer."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

_PROMPT = "Describe the video."
_TIMEOUT_S = 120.0


def _vidspec(*argv: str) -> list[str]:
    return [sys.executable, "-m", "vidspec_service", *argv]


@pytest.mark.slow
@pytest.mark.timeout(_TIMEOUT_S)
def test_the_same_question_has_the_same_answer_however_it_is_asked(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    subprocess.run(_vidspec("render-clip", "--seed", "7", str(clip)), check=True, timeout=_TIMEOUT_S)
    content = clip.read_bytes()
    url = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
    command = _vidspec("serve", "--port", "0", "--log-format", "json")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = (json.loads(line) for line in process.stderr if line.startswith("{"))
            base = next(line["url"] for line in lines if line["event"] == "ready")
            with httpx.Client(base_url=base, timeout=_TIMEOUT_S) as client:
                kept = client.post("/v1/videos", files={"video": content}).json()
                first = _chat(client, {"video": url})
                again = _chat(client, {"video_id": kept["id"]})
            assert (kept["duration_s"], kept["codec"]) == (4.0, "h264")
            assert first["video"] == again["video"]
            assert first["video"]["id"] == kept["id"]
            assert again["timings"]["decode_s"] < 0.01
            texts = {_text(first), _text(again)}
            with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S) as client:
                texts |= {_completed(client, {"type": "video_url", "video_url": {"url": url}}, stream=False)}
                texts |= {_completed(client, {"type": "file", "file": {"file_id": kept["id"]}}, stream=True)}
            assert len(texts) == 1
            assert "" not in texts
        finally:
            process.kill()


def _chat(client: httpx.Client, fields: dict[str, str]) -> dict[str, Any]:
    response = client.post("/v1/video-chat", json={"prompt": _PROMPT, "max_tokens": 16, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _text(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def _completed(client: openai.OpenAI, part: Any, *, stream: bool) -> str:
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": _PROMPT}]}]
    if not stream:
        whole = client.chat.completions.create(model=model, messages=messages, max_tokens=16)
        return whole.choices[0].message.content or ""
    chunks = client.chat.completions.create(model=model, messages=messages, max_tokens=16, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
