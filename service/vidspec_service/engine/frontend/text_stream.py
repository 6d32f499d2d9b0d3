"""TextStream: tokens become text one by one, as decoding them all at once would spell them."""

from __future__ import annotations

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # what a tokenizer says for bytes that are no character, or not yet
_MOST_HELD = 64  # tokens; a character has at most four bytes, so they make none, and each step would read them again


class TextStream:
    """As the library's DecodeStream, which raises where bytes that make no character undo a text it has handed out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._said: list[int] = []  # the last tokens that gave a text; with them in front the next have their spaces
        self._held: list[int] = []  # those since then

    def step(self, token: int) -> str:
        """Take the next token; what is certain to follow, which never ends in the middle of a character."""
        self._held.append(token)
        text = self.rest()
        if (not text or text.endswith(_REPLACEMENT)) and len(self._held) < _MOST_HELD:
            return ""
        self._said, self._held = self._held, []
        return text

    def rest(self) -> str:
        """What was not handed out: of a character that is not complete."""
        before, both = self._decode(self._said), self._decode(self._said + self._held)
        # A decoder of single bytes gives up all that stand together if one makes no character.
        return both[len(before) :] if both.startswith(before) else self._decode(self._held)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
