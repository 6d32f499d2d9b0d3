"""Checks what a request says about single tokens against the engine's tokenizer."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import Tokenizer

from vidspec_models.request import GenerationRequest
from vidspec_service.errors import InvalidRequest


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
