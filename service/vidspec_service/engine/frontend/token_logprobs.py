"""Log probabilities with their tokens spelt out, byte for byte, as OpenAI's API tells them."""

from __future__ import annotations

import re

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from vidspec_service.engine.types import Logprob, RowLogprobs, TokenLogprob

_LEAST = -9999.0  # JSON has no infinity; vLLM says the same
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# GPT-2's alphabet: a byte that is no printable character of Latin-1 is one of those from U+0100 on, in their order.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))
}
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


class TokenSpeller:
    """The bytes of a tokenizer's tokens, which may be parts of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._is_byte_level = isinstance(tokenizer.decoder, ByteLevel)

    def bytes_of(self, token: int) -> bytes:
        """What the token adds to a text, wherever in it."""
        piece = self._tokenizer.id_to_token(token) or ""
        if token in self._added:
            return self._added[token].encode()
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in piece)
        if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        return piece.replace("\u2581", " ").encode()

    def spell(self, ids: tuple[int, ...], rows: tuple[RowLogprobs, ...]) -> tuple[TokenLogprob, ...]:
        """The committed tokens `ids`, each with its row."""
        return tuple(
            TokenLogprob(
                token=Logprob(self.bytes_of(token), max(logprob, _LEAST)),
                top=tuple(Logprob(self.bytes_of(other), max(least, _LEAST)) for other, least in alternatives),
            )
            for token, (logprob, alternatives) in zip(ids, rows, strict=True)
        )
