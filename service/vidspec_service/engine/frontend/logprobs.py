"""Log probabilities of an answer's tokens, with each token's bytes, for requests that ask for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from vidspec_service.engine.types import Logprob, RowLogprobs, TokenLogprob

_MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM says the same
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# GPT-2's alphabet: printable Latin-1 bytes stand for themselves, all others for U+0100, U+0101, ... in order.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))
}
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


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
