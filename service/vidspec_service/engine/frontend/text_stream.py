"""TextStream: decodes tokens one by one to the text that decoding them all at once gives."""

from __future__ import annotations

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # a tokenizer's text for bytes that are no character, or not yet
_MOST_HELD = 64  # tokens; a character has at most four bytes, so these make none, and each step decodes them again


class TextStream:
    """Like the library's DecodeStream, which raises if bytes that are no character change text it has handed out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._said: list[int] = []  # the last tokens that gave text; decoded after them, the next keep their spaces
        self._held: list[int] = []  # tokens since then

    def step(self, token: int) -> str:
        """Take the next token; returns the text that is now certain, which never ends in the middle of a character."""
        self._held.append(token)
        text = self.rest()
        if (not text or text.endswith(_REPLACEMENT)) and len(self._held) < _MOST_HELD:
            return ""
        self._said = self._held if text else self._said
        self._held = []
        return text

    def rest(self) -> str:
        """Text that was not handed out, such as an incomplete character."""
        before, both = self._decode(self._said), self._decode(self._said + self._held)
        # A byte-fallback decoder replaces a whole run of byte tokens if one of them makes no character.
        return both[len(before) :] if both.startswith(before) else self._decode(self._held)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
