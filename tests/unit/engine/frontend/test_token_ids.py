"""Words become all token sequences that may spell them; an invalid token id is refused before the engine sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.frontend.test_output_processor import TOKENIZER
from vidspec_models.request import GenerationRequest, SamplingParams, Turn
from vidspec_service.engine.frontend.tokens import with_token_ids
from vidspec_service.errors import InvalidRequest


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


def test_a_bad_word_is_excluded_with_and_without_a_space_before_it() -> None:
    request = GenerationRequest(request_id="r", turns=(), sampling=SamplingParams(bad_words=(" ab", "c", "ab")))
    assert request.names_tokens
    found = with_token_ids(request, TOKENIZER).sampling.bad_word_ids
    assert found == (ids("ab"), ids(" ab"), ids("c"), ids(" c"))


@given(words=st.lists(st.text(min_size=1) | st.sampled_from(["\x1c", "\x1d", "\x1e", "\x1f", "\x1c a"])))
def test_a_bad_word_has_tokens_or_is_refused(words: list[str]) -> None:
    request = GenerationRequest(request_id="r", turns=(), sampling=SamplingParams(bad_words=tuple(words)))
    if all(word.strip() for word in words):
        assert all(with_token_ids(request, TOKENIZER).sampling.bad_word_ids)
    else:
        with pytest.raises(InvalidRequest, match="bad_words: a word has no characters") as caught:
            with_token_ids(request, TOKENIZER)
        assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (GenerationRequest(request_id="r", turns=(), stop_token_ids=(1, 300)), "stop_token_ids"),
        (GenerationRequest(request_id="r", turns=(), sampling=SamplingParams(logit_bias=((300, 1.0),))), "logit_bias"),
        (GenerationRequest(request_id="r", turns=(Turn(role="user", parts=(), token_ids=(1, 300)),)), "prompt"),
    ],
)
def test_an_id_beyond_the_tokenizer_is_refused_by_its_fields_name(request_: GenerationRequest, param: str) -> None:
    assert request_.names_tokens
    with pytest.raises(InvalidRequest, match="the model has no token 300") as caught:
        with_token_ids(request_, TOKENIZER)
    assert caught.value.param == param


def test_a_plain_request_names_none() -> None:
    assert not GenerationRequest(request_id="r", turns=()).names_tokens
