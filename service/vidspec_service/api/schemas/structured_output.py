"""What an answer must look like, in the fields of OpenAI, vLLM and SGLang.

Each of them becomes one grammar, which both models follow while they answer.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, Self

import pydantic_core
from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from vidspec_service.api.grammars.grammar import MAX_GRAMMAR, Constraint, Grammar, one_grammar
from vidspec_service.api.schemas.fields import Strict
from vidspec_service.errors import InvalidRequest

MAX_CHOICES = 1024
_ANY_OBJECT = {"type": "object"}
# vLLM's older fields and SGLang's, and the kind of their values
_OTHER_NAMES = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")} | {
    "regex": "regex",
    "ebnf": "grammar",
}
Schema = dict[str, Any]
GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR)]
ChoiceText = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
ChoiceTexts = Annotated[list[ChoiceText], Field(min_length=1, max_length=MAX_CHOICES)]


def _parse_schema(value: object) -> object:
    """A schema that comes as its text, as an object: it is the same schema wherever it is compared or combined."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_GRAMMAR:
        raise ValueError(f"it may have at most {MAX_GRAMMAR} characters")
    return pydantic_core.from_json(value)


SchemaField = Annotated[Schema, BeforeValidator(_parse_schema, json_schema_input_type=Schema | GrammarText)]


class JsonSchema(Strict):
    """A JSON schema with a name, as in OpenAI's API."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = Field(
        description="For the client only; has no effect."
    )
    description: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        None, description="For the client only; has no effect."
    )
    schema_: Schema = Field(alias="schema", description="A JSON schema, draft 2020-12 or older.")
    strict: bool | None = Field(None, description="Has no effect: the answer always follows the schema.")


class ResponseFormat(Strict):
    """The form of the answer, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(
        None, description="Required with the type `json_schema`, not allowed with others."
    )

    @model_validator(mode="after")
    def _type_agrees(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "json_schema is required with the type json_schema and not allowed with others.",
                param="response_format.json_schema",
            )
        return self


class StructuredOutputs(Strict):
    """The form of the answer, as in vLLM; give exactly one field."""

    json_: SchemaField | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: GrammarText | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: ChoiceTexts | None = Field(None, description="The answer is one of these.")
    grammar: GrammarText | None = Field(None, description="A grammar: llguidance's form of Lark, or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class StructuredOutput(Strict):
    """The fields that say what the answer must look like; at most one may be given."""

    response_format: ResponseFormat | None = Field(
        None, description="Text, any JSON object, or JSON that follows a schema."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="One of `json`, `regex`, `choice`, `grammar` and `json_object`."
    )
    guided_json: SchemaField | None = Field(None, description="An older name of `structured_outputs.json`.")
    guided_regex: GrammarText | None = Field(None, description="An older name of `structured_outputs.regex`.")
    guided_choice: ChoiceTexts | None = Field(None, description="An older name of `structured_outputs.choice`.")
    guided_grammar: GrammarText | None = Field(None, description="An older name of `structured_outputs.grammar`.")
    regex: GrammarText | None = Field(None, description="SGLang's name of `structured_outputs.regex`.")
    ebnf: GrammarText | None = Field(None, description="SGLang's name of `structured_outputs.grammar`.")

    @model_validator(mode="after")
    def _is_said_once(self) -> Self:
        _ = self.grammar  # built here, in the thread that validates, and cached
        return self

    @cached_property
    def grammar(self) -> Grammar | None:
        """None: plain text. Raises InvalidRequest, see `one_grammar`."""
        constraints = self.constraints()
        return one_grammar(constraints) if constraints else None

    def constraints(self) -> list[Constraint]:
        """Every field that says what the answer looks like."""
        return [*self.text_constraints(), *self.answer_constraints()]

    def text_constraints(self) -> list[Constraint]:
        """What OpenAI's own fields say of the answer's text; they say nothing of calls."""
        form = self.response_format
        if form is None or form.type == "text":
            return []
        if form.json_schema is None:
            return [("response_format", "json", _ANY_OBJECT)]
        return [("response_format.json_schema.schema", "json", form.json_schema.schema_)]

    def answer_constraints(self) -> list[Constraint]:
        """What vLLM's and SGLang's fields say of the answer, whatever it is."""
        given = ((name, kind, getattr(self, name)) for name, kind in _OTHER_NAMES.items())
        return [*self._vllm_constraints(), *(each for each in given if each[2] is not None)]

    def _vllm_constraints(self) -> list[Constraint]:
        asked = self.structured_outputs
        if asked is None:
            return []
        kinds = {"json": asked.json_, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
        found = [(f"structured_outputs.{kind}", kind, value) for kind, value in kinds.items() if value is not None]
        if asked.json_object:
            found.append(("structured_outputs.json_object", "json", _ANY_OBJECT))
        if not found:
            raise InvalidRequest(
                "structured_outputs must have one of json, regex, choice, grammar and json_object.",
                param="structured_outputs",
            )
        return found
