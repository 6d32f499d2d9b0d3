"""Who wrote each token, and what it adds to the text: for requests that ask."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from vidspec_models.request import GenerationRequest
from vidspec_service.engine.ipc.messages import Tokens
from vidspec_service.engine.types import TokenDetail, TokenSource


class TokenDetailer:
    """One request's tokens, in order. A stream of its own: what is held back of the answer's text is told here."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._silent = frozenset(request.stop_token_ids)
        for token in request.committed:
            self._text_of(token)

    def details(self, ids: tuple[int, ...], told: Tokens) -> tuple[TokenDetail, ...]:
        """Of `ids`, the tokens of `told` up to the answer's end."""
        return tuple(
            TokenDetail(text=self._text_of(token), source=_source(place, told)) for place, token in enumerate(ids)
        )

    def _text_of(self, token: int) -> str:
        return "" if token in self._silent else self._stream.step(self._tokenizer, token) or ""


def _source(place: int, told: Tokens) -> TokenSource:
    """What the grammar forces nobody had to guess, whoever said it; the accepted draft tokens come first."""
    if place in told.forced:
        return TokenSource.GRAMMAR
    return TokenSource.DRAFT if place < told.num_accepted else TokenSource.TARGET
