"""Token ids become text one by one: no character is split, and no part of a stop string is shown."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # a tokenizer's text for bytes that are no character, or not yet
_MAX_HELD = 64  # tokens; a character has at most four bytes, so these make none, and each step decodes them again


class DecodeStream:
    """Decodes tokens one by one to the text that decoding all of them at once gives.

    The library's class of this name raises if bytes that are no character change text that it has returned.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._previous: list[int] = []  # the last tokens that gave text; decoded after them, the next keep their spaces
        self._held: list[int] = []  # tokens since then

    def step(self, token: int) -> str:
        """Take the next token; returns the text that is now certain, which never ends in the middle of a character."""
        self._held.append(token)
        text = self.rest()
        if (not text or text.endswith(_REPLACEMENT)) and len(self._held) < _MAX_HELD:
            return ""
        self._previous = self._held if text else self._previous
        self._held = []
        return text

    def rest(self) -> str:
        """Text that was not handed out, such as an incomplete character."""
        before, both = self._decode(self._previous), self._decode(self._previous + self._held)
        # A byte-fallback decoder replaces a whole run of byte tokens if one of them makes no character.
        return both[len(before) :] if both.startswith(before) else self._decode(self._held)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Detokenizer:
    """Feeds ids through one stream: never splits a character, never shows text that may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], stop_token_ids: Sequence[int] = ()) -> None:
        """`stop_token_ids` add no text, like the model's own end tokens."""
        self._stream = DecodeStream(tokenizer)
        self._stop = tuple(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._decoded = ""  # all text of the stream
        self._shown = 0  # characters of it already handed out
        self.num_tokens = 0  # tokens up to and including the one that completed a stop string
        self.steps: list[str] = []  # what each of the tokens last pushed adds to the text
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Take committed ids; return text that is now certain. After a stop string, nothing more."""
        self.steps = []
        for token in ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            self.steps.append("" if token in self._stop_token_ids else self._stream.step(token))
            self._decoded += self.steps[-1]
            self._find_stop()
        return self._release(len(self._decoded) if self.is_stopped else self._safe_length())

    def finish(self) -> str:
        """The rest, once no more ids come: held-back text and the remains of an incomplete character."""
        if not self.is_stopped:
            self._decoded += self._stream.rest()
            self._find_stop()
        return self._release(len(self._decoded))

    def _release(self, upto: int) -> str:
        text = self._decoded[self._shown : upto]
        self._shown = max(self._shown, upto)
        return text

    def _find_stop(self) -> None:
        starts = [at for at in (self._decoded.find(text, self._shown) for text in self._stop) if at >= 0]
        if starts:
            self._decoded = self._decoded[: min(starts)]
            self.is_stopped = True

    def _safe_length(self) -> int:
        """Length of the text before its longest ending that could be the start of a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for held in range(min(longest, len(self._decoded) - self._shown), 0, -1):
            if any(text.startswith(self._decoded[-held:]) for text in self._stop):
                return len(self._decoded) - held
        return len(self._decoded)
