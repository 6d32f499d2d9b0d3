"""Every request body, in one list for the OpenAPI document, the docs page and error messages."""

from __future__ import annotations

from pydantic import BaseModel

from vidspec_service.api.schemas.chat_completions import ChatCompletionRequest
from vidspec_service.api.schemas.completions import CompletionRequest
from vidspec_service.api.schemas.responses import ResponsesRequest
from vidspec_service.api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from vidspec_service.api.schemas.video_chat import VideoChatForm, VideoChatJson
from vidspec_service.api.schemas.videos import VideoUploadForm, VideoUploadJson

FORMS: tuple[type[BaseModel], ...] = (VideoChatForm, VideoUploadForm)
BODIES: tuple[type[BaseModel], ...] = (
    *FORMS,
    VideoChatJson,
    VideoUploadJson,
    ChatCompletionRequest,
    ResponsesRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
