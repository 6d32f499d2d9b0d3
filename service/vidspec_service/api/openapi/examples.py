"""The examples that /docs shows; tests hold them to the published schemas."""

from __future__ import annotations

import json
from typing import Any

DATA_URL = "data:video/mp4;base64,AAAAIGZ0eXBpc29t..."
VIDEO_ID = "video-1f0c5d5a9ce84f7d3a1b0e6c2d4f8a90"
FACTS: dict[str, Any] = {
    "usage": {
        "prompt_tokens": 180,
        "completion_tokens": 24,
        "total_tokens": 204,
        "prompt_tokens_details": {"video_tokens": 144, "cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 18, "rejected_prediction_tokens": 3},
    },
    "video": {
        "id": VIDEO_ID,
        "duration_s": 4.0,
        "num_frames": 4,
        "timestamps_s": [0.0, 1.0, 2.0, 3.0],
        "warnings": [],
    },
    "speculation": {
        "mode": "parallel",
        "acceptance_rate": 0.857143,
        "mean_accepted_tokens": 3.0,
        "draft_video_tokens": 14,
    },
    "timings": {
        "queue_s": 0.002,
        "decode_s": 0.041,
        "prefill_s": 0.088,
        "time_to_first_token_s": 0.131,
        "time_per_output_token_s": 0.004,
    },
}
_NAMED = {"id": "vchat-5b2f8a0c9d3e4f6071829304", "created": 1795000000, "model": "vidspec-bundled"}
WHOLE = {
    **_NAMED,
    "object": "video.chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "A red square moves left."},
            "finish_reason": "stop",
        }
    ],
    **FACTS,
}


def _event(choices: list[dict[str, Any]], **facts: Any) -> str:
    chunk = {**_NAMED, "object": "video.chat.completion.chunk", "choices": choices, **facts}
    return f"data: {json.dumps(chunk)}\n\n"


def _delta(delta: dict[str, str], finish_reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "finish_reason": finish_reason}]


EVENTS = "".join(
    [
        _event(_delta({"role": "assistant", "content": ""})),
        _event(_delta({"content": "A red square"})),
        _event(_delta({"content": " moves left."})),
        _event(_delta({}, "stop")),
        _event([], **FACTS),
        "data: [DONE]\n\n",
    ]
)

CHAT_COMPLETION = {
    "id": "chatcmpl-5b2f8a0c9d3e4f6071829304",
    "object": "chat.completion",
    "created": 1795000000,
    "model": "vidspec-bundled",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "A red square moves left.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": FACTS["usage"],
}

VIDEO_CHAT_FORMS = {
    "ask": {
        "summary": "curl -F video=@clip.mp4 -F prompt=...",
        "value": {"prompt": "Describe the video.", "stream": "true", "num_frames": "8"},
    }
}
VIDEO_CHATS = {
    "prompt": {
        "summary": "One question",
        "value": {"video": DATA_URL, "prompt": "Describe the video.", "max_tokens": 64},
    },
    "messages": {
        "summary": "A conversation about a video that was uploaded before",
        "value": {
            "video_id": VIDEO_ID,
            "messages": [
                {"role": "user", "content": "What moves?"},
                {"role": "assistant", "content": "A red square."},
                {"role": "user", "content": "Where to?"},
            ],
            "temperature": 0.7,
            "seed": 7,
            "stream": True,
        },
    },
}
CHAT_COMPLETIONS = {
    "video_url": {
        "summary": "A data URL",
        "value": {
            "model": "vidspec-bundled",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "video_url", "video_url": {"url": DATA_URL}},
                        {"type": "text", "text": "What moves?"},
                    ],
                }
            ],
        },
    },
    "image_url": {
        "summary": "An image",
        "value": {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoA..."}},
                        {"type": "text", "text": "What is in it?"},
                    ],
                }
            ],
        },
    },
    "file": {
        "summary": "A video that was uploaded before, streamed",
        "value": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [
                        {"type": "file", "file": {"file_id": VIDEO_ID}},
                        {"type": "text", "text": "What moves?"},
                    ],
                },
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 64,
        },
    },
}
UPLOADS = {"upload": {"summary": "A data URL", "value": {"video": DATA_URL}}}
