"""What is wrong with a body, in one sentence that names the field and never repeats its value."""

from __future__ import annotations

import difflib
from functools import cache

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from vidspec_service.api.openapi.documents import BODIES
from vidspec_service.errors import InvalidRequest

_MAX_ERRORS = 4096
_MAX_NAME = 64  # characters of a client's field name that we compare with ours and repeat in the answer


def to_invalid_request(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """The first thing wrong, in one sentence that names the field and never repeats its value."""
    if error.error_count() > _MAX_ERRORS:  # listing them would hold up all other requests
        return InvalidRequest("The body has too many unknown or wrong fields to list them.")
    problem = error.errors(include_input=False)[0]
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return unknown_field_error(location[-1], ".".join([*_field_path(location[:-1]), location[-1]]), model)
    param = ".".join(_field_path(location)) or None
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "union_tag_invalid":
        message = f"its type must be one of {problem['ctx']['expected_tags']}"
        tag = str(problem["ctx"]["tag"])
        message += "; this server does not accept audio" if "audio" in tag else ""
        if tag == "item_reference":  # Vercel's AI SDK sends these unless it is told `store: false`
            message += "; this server does not store items: send the item itself"
    return InvalidRequest(f"{param}: {message}." if param else f"{message}.", param=param)


@cache
def _field_names() -> frozenset[str]:
    """The names of all fields of all bodies, as clients write them."""
    _, schemas = models_json_schema([(model, "validation") for model in BODIES])
    return frozenset(name for schema in schemas["$defs"].values() for name in schema.get("properties", ()))


def _field_path(location: list[str]) -> list[str]:
    """The location without the union branches that Pydantic puts into it: clients know only fields and list indices."""
    found: list[str] = []
    before = ""  # the last part that is no index
    for part in location:
        is_index = part.isdigit() and len(part) <= 20
        # After these comes the `type` of an object, which may have the name of a field
        is_tag = before in ("another", "format") and not is_index
        if is_index or (part in _field_names() and not is_tag):
            found.append(part)
        before = before if is_index else part
    return [word for index, word in enumerate(found) if index == 0 or word != found[index - 1]]


def unknown_field_error(name: str, param: str, model: type[BaseModel]) -> InvalidRequest:
    """The error for an unknown field, with the known field that may have been meant."""
    known = set(model.model_fields) if "." not in param else _field_names() - {name}  # a known name in the wrong place
    close = difflib.get_close_matches(name[: _MAX_NAME + 1], known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return InvalidRequest(f"Unknown field {name[:_MAX_NAME]!r}.{hint}", param=param[:_MAX_NAME])
