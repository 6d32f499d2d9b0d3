"""What the routes of OpenAI's API have in common: a model's name, turns, and tools that may be called."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vidspec_models.request import DEFAULT_TEMPLATE, ChatTemplate, ToolFormat, Turn
from vidspec_service.api.errors import check_model_name
from vidspec_service.api.grammars.grammar import Constraint, one_grammar
from vidspec_service.api.schemas.chat_messages import PlacedTurn, check_conversation
from vidspec_service.api.schemas.chat_request import ChatRequest
from vidspec_service.api.schemas.client_fields import MediaKwargs, ProcessorKwargs, VideoKwargs, neutral
from vidspec_service.api.schemas.fields import ModelName
from vidspec_service.api.schemas.tool_use import Function, ToolChoiceObject, ToolUse
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.errors import InvalidRequest


class Conversation(ModelName, ChatRequest):
    """A body with turns."""

    add_special_tokens: Literal[False] | None = neutral(False, "the checkpoint's own template and processor are used")
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call if `tool_choice` is `auto`.")

    mm_processor_kwargs: ProcessorKwargs | None = Field(None, description="vLLM's name for `fps` and `num_frames`.")
    media_io_kwargs: MediaKwargs | None = Field(None, description="Another of vLLM's names for them.")

    newer_limit: ClassVar[str]  # the newer name of `max_tokens`
    function_path: ClassVar[str] = ""  # from a tool in the body to its function
    tool_choice: Any  # ToolChoice, ToolChoiceObject or None: each route writes it in its own way

    @property
    def template(self) -> ChatTemplate:
        return replace(DEFAULT_TEMPLATE, tools=self.tool_use.described)

    @property
    @abstractmethod
    def placed_turns(self) -> list[PlacedTurn]:
        """The turns of the conversation, each with its place in the body."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns."""
        return tuple(turn for _, turn in self.placed_turns)

    @property
    def prompts(self) -> list[tuple[Turn, ...]]:
        return [self.turns]

    @property
    def _vllms_frames(self) -> list[VideoKwargs]:
        both = (self.mm_processor_kwargs, None if self.media_io_kwargs is None else self.media_io_kwargs.video)
        return [each for each in both if each is not None and (each.fps or each.num_frames)]

    @property
    def frames(self) -> FrameRequest:
        frames, given = super().frames, self._vllms_frames
        counts = [each.num_frames for each in given if each.num_frames]
        if fps := [each.fps for each in given if each.fps]:
            most = min(filter(None, (*counts, frames.max_frames)), default=None)
            return replace(frames, fps=min(fps), max_frames=most)
        return replace(frames, num_frames=min(counts)) if counts else frames

    @property
    def most_tokens(self) -> int | None:
        return getattr(self, self.newer_limit) or self.max_tokens

    @property
    @abstractmethod
    def tool_functions(self) -> Sequence[Function]:
        """The tools."""

    @property
    def tool_use(self) -> ToolUse:
        """The tools that may or must be called."""
        choice = self.tool_choice
        mode, allowed = choice.chosen if isinstance(choice, ToolChoiceObject) else (choice, None)
        return ToolUse(
            functions=self.tool_functions,
            choice=mode,
            allowed=allowed,
            allow_parallel=self.parallel_tool_calls is not False,
            function_path=self.function_path,
        )

    def constraints(self) -> list[Constraint]:
        """Includes calls that must be made; `for_engine` adds those that may be made (`auto`).

        Where a call must be made there is no text, and so nothing that its format applies to: agents send the format of
        their last answer with every request.
        """
        calls = [] if self.tool_use.is_auto else self.tool_use.constraints
        return [*self.answer_constraints(), *calls] if calls else super().constraints()

    @model_validator(mode="after")
    def _conversation_agrees(self) -> Self:
        newer = getattr(self, self.newer_limit)
        if newer is not None and self.max_tokens not in (None, newer):
            raise InvalidRequest(f"Give {self.newer_limit} or max_tokens, not both.", param=self.newer_limit)
        if self._vllms_frames and (self.fps or self.num_frames):
            raise InvalidRequest(
                "Give fps and num_frames either by themselves or in mm_processor_kwargs and media_io_kwargs, not both.",
                param="fps" if self.fps else "num_frames",
            )
        check_conversation(self.placed_turns, is_continued=self.template.continue_final_message)
        self.tool_use.check()
        return self

    def for_engine(self, info: EngineInfo) -> Self:
        check_model_name(self.model, info.model_names)
        self.tool_use.check_format(info.tool_format)
        if info.tool_format is ToolFormat.NONE and any(turn.is_about_tools for turn in self.turns):
            raise InvalidRequest(
                "The model's chat template does not support tool calls and results; put them in user messages.",
                param=self.placed_turns[-1][0].partition(".")[0],
            )
        body = super().for_engine(info)
        if not self.tool_use.is_auto:
            return body
        if info.tool_format is not ToolFormat.HERMES:  # `auto` is only the default here: see `check_format`
            return body.model_copy(update={"tool_choice": "none"})
        body = body.model_copy(update={"grammar": one_grammar(self.tool_use.constraints_beside(self.constraints()))})
        body.check_end()
        return body
