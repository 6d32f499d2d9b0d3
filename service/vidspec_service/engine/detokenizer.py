"""Token ids to printable text increments, with stop strings cut out; pure apart from the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Feeds ids through one stream: never splits a character, never shows text that may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = ""  # everything the stream has said
        self._shown = 0  # characters of it already handed out
        self.num_tokens = 0  # tokens up to and including the one that completed a stop string
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Take committed ids; return text that is now certain. After a stop string, nothing more."""
        for token in ids:
            if self.is_stopped:
                break
            self._ids.append(token)
            self.num_tokens += 1
            self._decoded += self._stream.step(self._tokenizer, token) or ""
            self._find_stop()
        return self._release(len(self._decoded) if self.is_stopped else self._safe_length())

    def finish(self) -> str:
        """The rest, once no more ids come: held-back text and the remains of an incomplete character."""
        if not self.is_stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            if whole.startswith(self._decoded):
                self._decoded = whole
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
        """Up to the longest ending that a stop string could still grow from."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for held in range(min(longest, len(self._decoded) - self._shown), 0, -1):
            if any(text.startswith(self._decoded[-held:]) for text in self._stop):
                return len(self._decoded) - held
        return len(self._decoded)
