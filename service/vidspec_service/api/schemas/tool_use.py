"""Which tools an answer may or must call, as one grammar, and how the calls are read from its text.

A call is structured output, as with `response_format`. `auto` leaves the choice to a model whose template knows tools:
then text is free up to `<tool_call>`, and a call of one of the tools follows.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vidspec_models.request import ToolFormat
from vidspec_service.api.grammars.grammar import Constraint, exact
from vidspec_service.api.schemas.answer_parser import CLOSES, OPENS, CallFormat
from vidspec_service.api.schemas.fields import MAX_TEXT, Strict
from vidspec_service.api.schemas.structured_output import Schema
from vidspec_service.errors import InvalidRequest

MAX_TOOLS = 128
TOOL_CHOICE_DESCRIPTION = (
    "`none`, `auto`, `required`, a function or `allowed_tools`; unset: `auto` if the model supports it, else `none`."
)
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
ToolMode = Literal["auto", "required"]
ToolChoice = Literal["none", "auto", "required"]


class ToolChoiceObject(Strict):
    """A tool choice that names tools."""

    @property
    @abstractmethod
    def chosen(self) -> tuple[ToolMode, list[str]]:
        """Whether one of them must be called, and their names."""


class Function(Strict):
    """A function that the model may ask the client to call."""

    name: ToolName
    description: Annotated[str, StringConstraints(max_length=MAX_TEXT)] | None = Field(
        None, description="Used if the model's chat template supports tools."
    )
    parameters: Schema | None = Field(
        None, description="A JSON schema of type object; unset: the function has no arguments."
    )
    strict: bool | None = Field(None, description="Has no effect: arguments always follow the schema.")

    @property
    def schema_(self) -> Schema:
        """What its arguments must look like."""
        return self.parameters or _NO_ARGUMENTS

    @property
    def described(self) -> str:
        """The function as JSON, in OpenAI's words, for a chat template."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.schema_}
        return json.dumps({"type": "function", "function": function}, ensure_ascii=False)

    @property
    def head(self) -> str:
        """The beginning of a call that states its name."""
        return f'{{"name": "{self.name}", "arguments": '


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a client says of its tools, whichever route it uses."""

    functions: Sequence[Function]
    choice: ToolChoice | None  # None: `auto` if the model can, else `none`
    allowed: Sequence[str] | None  # names of the tools that may be called; None: all of them
    allow_parallel: bool  # with `auto`: an answer may have several calls
    function_path: str  # path from a tool in the body to its function

    def check(self) -> None:
        """Raises InvalidRequest for tools and a choice that do not fit together."""
        names = [function.name for function in self.functions]
        for index, function in enumerate(self.functions):
            param = f"tools.{index}{self.function_path}"
            if function.name in names[:index]:
                raise InvalidRequest(f"{param}.name: another tool has the same name.", param=f"{param}.name")
            if function.parameters and function.parameters.get("type") != "object":
                raise InvalidRequest(
                    f"{param}.parameters: the schema's type must be object.", param=f"{param}.parameters"
                )
        if not set(self.allowed or ()) <= set(names):
            raise InvalidRequest("tool_choice: no tool in tools has this name.", param="tool_choice")
        if self.choice == "required" and not names:
            raise InvalidRequest("tool_choice: required needs at least one tool in tools.", param="tool_choice")
        if sum(map(len, self.described)) > MAX_TEXT:
            raise InvalidRequest(f"All tools together may have at most {MAX_TEXT} characters.", param="tools")

    def check_format(self, known: ToolFormat) -> None:
        """Raises InvalidRequest if the client asks for `auto` and the model's template does not support it."""
        if self.is_auto and self.choice == "auto" and known is not ToolFormat.HERMES:
            why = (
                "does not support tools" if known is ToolFormat.NONE else "writes calls in a format not supported here"
            )
            raise InvalidRequest(
                f"tool_choice: the model's chat template {why}, so auto is not possible; "
                "use required, a named tool or none.",
                param="tool_choice",
            )

    @property
    def is_auto(self) -> bool:
        """Whether the model chooses if it calls anything."""
        return bool(self.functions) and self.choice in (None, "auto")

    @property
    def described(self) -> tuple[str, ...]:
        """See `ChatTemplate.tools`; with `none` the model is told of no tools."""
        return () if self.choice == "none" else tuple(function.described for function in self.functions)

    @property
    def call_format(self) -> CallFormat | None:
        """How calls are written; None: there will be none."""
        callable_ = [function for _, function in self._callable]
        if self.is_auto:
            heads = {f"{OPENS}\n{function.head}": function.name for function in callable_}
            return CallFormat(heads=heads, tail=f"}}\n{CLOSES}", opens=OPENS)
        if len(callable_) == 1:
            return CallFormat(heads={"": callable_[0].name})
        return CallFormat(heads={each.head: each.name for each in callable_}, tail="}") if callable_ else None

    @property
    def constraints(self) -> list[Constraint]:
        """See `StructuredOutput.constraints`. If the only tool must be called, its arguments are the whole text."""
        if len(self._callable) == 1 and not self.is_auto:
            ((index, function),) = self._callable
            return [(self._parameters(index), "json", function.schema_)]
        return [self._as_grammar()] if self._callable else []

    def constraints_beside(self, constraints: Sequence[Constraint]) -> list[Constraint]:
        """With `auto`: calls that may be made, and what is wanted of the text. JSON and calls make one grammar."""
        match constraints:
            case [(_, "json", dict() as schema), *_]:  # any others say the same under other names
                return [self._as_grammar(schema)]
        return [*constraints, *self.constraints]

    @property
    def _callable(self) -> list[tuple[int, Function]]:
        """The tools that may be called, and their places."""
        if self.choice == "none":
            return []
        return [
            (at, each) for at, each in enumerate(self.functions) if self.allowed is None or each.name in self.allowed
        ]

    def _parameters(self, index: int) -> str:
        return f"tools.{index}{self.function_path}.parameters"

    def _as_grammar(self, schema: Schema | None = None) -> Constraint:
        # The tags are tokens of the model; without its tokenizer, as in the trial, they are plain strings.
        spelt = self._lark(json.dumps(OPENS), json.dumps(CLOSES), schema)
        return ("tools", "tools", (self._lark(OPENS, CLOSES, schema), spelt))

    def _lark(self, opens: str, closes: str, schema: Schema | None) -> str:
        """Lark grammar of one call; or, for `auto`, of text with calls in it, each between `opens` and `closes`.

        With a schema, which is for `auto` only, the answer is either JSON or calls, without other text.
        """
        lines = ["call: " + " | ".join(f"call_{index}" for index, _ in self._callable)]
        for index, function in self._callable:
            arguments = exact(self._parameters(index), function.schema_)
            lines.append(f'call_{index}: {json.dumps(function.head)} arguments_{index} "}}"')
            lines.append(f"arguments_{index}: %json {json.dumps(arguments)}")
        if not self.is_auto:
            return "\n".join(["start: call", *lines])
        if schema is not None:
            lines.append(f'tagged: {opens} "\\n" call "\\n" {closes}')
            lines.append(f"said: %json {json.dumps(exact('tools', schema))}")
            calls = 'tagged ("\\n" tagged)*' if self.allow_parallel else "tagged"
            return "\n".join([f"start: said | {calls}", *lines])
        tagged = f'tagged: TEXT {opens} "\\n" call "\\n" {closes}'
        calls = "tagged*" if self.allow_parallel else "tagged?"
        return "\n".join([f"start: {calls} TEXT", "TEXT: /(.|\\n)*/", tagged, *lines])
