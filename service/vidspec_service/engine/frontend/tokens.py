"""Single tokens by the engine's tokenizer: those that a request names, and the log probabilities that it asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from vidspec_models.request import GenerationRequest
from vidspec_service.engine.types import Logprob, RowLogprobs, TokenLogprob
from vidspec_service.errors import InvalidRequest

_MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM says the same
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# GPT-2's alphabet: printable Latin-1 bytes stand for themselves, all others for U+0100, U+0101, ... in order.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))
}
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def with_token_ids(request: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """The request with its bad words as tokens.

    Raises InvalidRequest for an id that the tokenizer does not have, and for a word that it has no id for.
    """
    sampling = request.sampling
    for param, ids in (
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("prompt", [token for turn in request.turns for token in turn.token_ids]),
    ):
        for token in ids:
            if tokenizer.id_to_token(token) is None:
                raise InvalidRequest(f"{param}: the model has no token {token}.", param=param)
    # The word at the start of a text, and the word after another one: vLLM excludes both, too.
    spelt = [f"{space}{word.lstrip()}" for word in sampling.bad_words for space in ("", " ")]
    ids_of_words = dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in spelt)
    if () in ids_of_words:  # for example U+001C: a space to Python, though not to the request's schema
        raise InvalidRequest("bad_words: a word has no characters that become tokens.", param="bad_words")
    return replace(request, sampling=replace(sampling, bad_word_ids=tuple(ids_of_words)))


class LogprobsProcessor:
    """Adds tokens' bytes, which may be parts of a character, to their log probabilities, as in OpenAI's API."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._is_byte_level = isinstance(tokenizer.decoder, ByteLevel)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token adds to a text, at any position."""
        piece = self._tokenizer.id_to_token(token) or ""
        if token in self._added:
            return self._added[token].encode()
        if self._is_byte_level:
            # A word that was put into the vocabulary as it is, outside the alphabet, is also told as it is.
            return bytes(map(_BYTES.__getitem__, piece)) if _BYTES.keys() >= {*piece} else piece.encode()
        if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        return piece.replace("\u2581", " ").encode()

    def process(
        self, ids: Sequence[int], offsets: Sequence[int], rows: Sequence[RowLogprobs]
    ) -> tuple[TokenLogprob, ...]:
        """The committed tokens `ids`, their places in the text, and what else each row of log probabilities has."""
        return tuple(
            TokenLogprob(
                offset=offset,
                token=Logprob(self.bytes_of(token), max(logprob, _MIN_LOGPROB)),
                top=tuple(Logprob(self.bytes_of(other), max(least, _MIN_LOGPROB)) for other, least in alternatives),
            )
            for token, offset, (logprob, alternatives) in zip(ids, offsets, rows, strict=True)
        )
