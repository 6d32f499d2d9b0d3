"""What a generation said, gathered for an answer that is not streamed; and what was asked for about its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from vidspec_service.api.generate.generation import Generation
from vidspec_service.api.schemas.dialects import Spoken, SpokenChoice
from vidspec_service.api.schemas.logprobs import logprobs_of
from vidspec_service.api.schemas.tellings import details_of
from vidspec_service.engine.types import Finished, TextDelta


async def spoken(generation: Generation) -> Spoken:
    """All of it, once it is complete."""
    said: list[list[TextDelta]] = [[] for _ in range(generation.n)]
    reasons: dict[int, str] = {}
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, Finished):
                reasons[piece.choice] = piece.finish_reason.value
            else:
                said[piece.choice].append(piece)
    choices = [
        SpokenChoice(
            text="".join(piece.text for piece in pieces), about=about(generation, pieces), finish_reason=reasons[index]
        )
        for index, pieces in enumerate(said)
    ]
    return Spoken(head=generation.head, choices=choices, facts={**generation.facts(), **generation.news()})


def about(generation: Generation, pieces: Sequence[TextDelta]) -> dict[str, Any]:
    """What was asked for about the tokens of an answer, or of a piece."""
    found: dict[str, Any] = {}
    if generation.tells_logprobs:
        found["logprobs"] = logprobs_of(each for piece in pieces for each in piece.logprobs)
    if generation.tells_details:
        found["token_details"] = details_of(each for piece in pieces for each in piece.details)
    return found
