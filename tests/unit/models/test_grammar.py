"""GrammarMask: a pure function of grammar and tokens; the remaining distribution is the model's, renormalised."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from vidspec_models.grammar import GrammarCompiler, GrammarError, GrammarMask, after_reasoning
from vidspec_models.loading.spec import ModelSpec, model_path
from vidspec_models.request import SamplingParams
from vidspec_models.sampling import CoupledSampler

END = 2
ENDS = frozenset({END, 0})
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["square", "circle"]}, "words": {"type": "array", "items": {"type": "string"}}},
    "required": ["shape", "words"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_path(ModelSpec(path="bundled", role="target")))


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), ENDS, len(tokenizer()))


def mask(grammar: str = JSON) -> GrammarMask:
    return grammars().mask(grammar)


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text))


def allowed(mask: GrammarMask, prefix: list[int], pending: list[int] | None = None) -> list[list[int]]:
    """The tokens that the mask allows for each row."""
    pending = pending or []
    rows = mask(torch.zeros(len(pending) + 1, len(tokenizer())), prefix, pending)
    return [row.isfinite().nonzero()[:, 0].tolist() for row in rows]


def answer(mask: GrammarMask, law: SamplingParams, logits: Tensor) -> list[int]:
    """The tokens sampled one by one, each from one row of the logits."""
    sampler, ids = CoupledSampler(law, constraint=mask), list[int]()
    for row in logits:
        ids += sampler.sample(row[None], ids)
        if ids[-1] in ENDS:
            break
    return ids


def some_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, len(tokenizer()), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("law", [SamplingParams(), SamplingParams(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_rows_scored_together_choose_what_each_chooses_alone(law: SamplingParams) -> None:
    logits = some_logits(60)
    ids = answer(mask(), law, logits)
    for start, end in itertools.combinations(range(0, len(ids), 5), 2):
        sampler = CoupledSampler(law, constraint=mask())
        assert sampler.sample(logits[start : end + 1], ids[:start], ids[start:end]) == ids[start : end + 1]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (JSON, '{"shape":"square","words":["red","blue"]}'),
        ('start: a "there is" a "!"\na[stop="xy"]: /[a-z ]*/', "a redxythere is a bluexy!"),
        ('start: "x" a " there is" b "!"\na[max_tokens=3]: /[a-z]+/\nb[max_tokens=2]: "a thing" | "a house of cards"',
         "xth there isa ho!"),
    ],
    ids=["schema", "stop", "max_tokens"],
)  # fmt: skip
def test_what_was_asked_before_does_not_matter(grammar: str, text: str) -> None:
    """A draft's chain is replaced often, and a restarted worker begins in the middle."""
    ids = ids_of(text)
    dice, used = random.Random(1), mask(grammar)
    for _ in range(60):
        place = dice.randrange(len(ids))
        prefix = ids[:place]
        other = [*prefix, *dice.choices(range(5, 300), k=dice.randrange(4))]
        pending = other[place:] if dice.random() < 0.5 else ids[place : place + dice.randrange(6)]
        if dice.random() < 0.5:  # the asked rows, more rows, or other tokens
            used.prepare(prefix, [*pending, *dice.choices(range(5, 300), k=dice.randrange(3))])
        if dice.random() < 0.5:
            used.forced(ids[: dice.randrange(len(ids))])
        assert allowed(used, prefix, pending) == allowed(mask(grammar), prefix, pending)
        used.check()


def test_what_was_prepared_is_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread prepares once while the model computes; then choices are checked, and masks made if one fails."""
    used, whole = mask(), ids_of('{"shape":"square","words":["a"]}')
    ids, rest = whole[:5], whole[5:]
    used.prepare(ids, rest)
    monkeypatch.setattr(GrammarMask, "_find_forced", None)
    for num_rows in range(1, len(rest) + 1):
        assert used.num_allowed(rest[:num_rows], ids, rest[: num_rows - 1]) == num_rows
        used(some_logits(num_rows), ids, rest[: num_rows - 1])
        assert used.num_allowed([5] * num_rows, ids, rest[: num_rows - 1]) == 0
    assert used.num_allowed([5], ids[:-1], []) == 0
    with pytest.raises(TypeError):
        used.prepare(ids_of('{"shape":"circle"'), [])


def test_rows_after_a_forbidden_token_are_left_as_they_are() -> None:
    prefix, wrong = ids_of('{"'), ids_of("!")
    rows = allowed(mask(), prefix, [*wrong, *wrong])
    assert len(rows[0]) < 10
    assert [len(row) for row in rows[1:]] == [len(tokenizer())] * 2
    assert mask().num_allowed([rows[0][0], 5, 5], prefix, [*wrong, *wrong]) == 3
    assert [len(row) for row in allowed(mask("start: /a+/"), ids_of("a"), [END, 5])[1:]] == [len(tokenizer())] * 2


def test_to_take_guesses_back_costs_no_more_the_longer_the_answer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where llguidance takes no token back, the matcher begins again near the guesses and not at the start."""
    steps, repeat = list[int](), GrammarMask._repeat

    def noted(used: GrammarMask, place: int) -> None:
        steps.append(place - used._place)
        repeat(used, place)

    monkeypatch.setattr(GrammarMask, "_repeat", noted)
    ids, used = ids_of("a red. " * 40), mask('start: (a ". ")+\na[max_tokens=9]: /[a-z ]+/')
    for end in range(4, len(ids)):
        assert used.num_allowed(ids[end - 3 : end + 1], ids[: end - 3], ids[end - 3 : end]) == 4
        allowed(used, ids[: end - 3], ids[end - 3 : end])
    assert 0 < max(steps) <= 4


def test_of_a_long_proposal_the_first_rows_may_be_asked_for_alone() -> None:
    prefix, pending = ids_of('{"shape'), ids_of('":"square","')
    together = mask()(torch.zeros(len(pending) + 1, len(tokenizer())), prefix, pending)
    for num_rows in range(1, len(pending)):
        alone = mask()(torch.zeros(num_rows, len(tokenizer())), prefix, pending)
        assert torch.equal(alone, together[:num_rows])


@pytest.mark.parametrize("num_before", range(len(ids_of('{"shape":"square","words":["red"]}')) + 1))
def test_a_single_token_is_allowed_exactly_if_the_mask_lets_it_through(num_before: int) -> None:
    """Also inside a forced word, where llguidance allows only the tokenizer's own spelling."""
    used, ids = mask(), ids_of('{"shape":"square","words":["red"]}')[:num_before]
    (let_through,) = allowed(mask(), ids)
    assert [token for token in range(len(tokenizer())) if used.num_allowed([token], ids, [])] == let_through
    assert [token for token in let_through if used.num_allowed([5, token], [], [5])] == []  # nor after a wrong one


@pytest.mark.parametrize(
    "grammar", [JSON, LLMatcher.grammar_from_regex("(there is|thing)s? [a-z]{2,9}[.]"), "start: /a.c*/"]
)
def test_rows_are_masked_as_llguidance_masks_each(grammar: str) -> None:
    """Forced tokens are queried once, and choices are checked without a mask: neither may allow other tokens."""
    dice = random.Random(2)
    for _ in range(20):
        theirs, ours, ids = grammars().mask(grammar)._matcher, mask(grammar), list[int]()
        bits = np.empty((1, -(-len(tokenizer()) // 32)), np.int32)
        while len(ids) < 40 and not set(ids[-1:]) & ENDS:
            theirs.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            expected = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
            assert allowed(ours, ids) == [expected]
            assert [token for token in range(len(tokenizer())) if ours.num_allowed([token], ids, [])] == expected
            ids.append(dice.choice(expected))
            theirs.try_consume_tokens(ids[-1:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_what_is_chosen_without_a_mask_is_what_would_be_chosen_with_it(temperature: float, num_rows: int) -> None:
    """The model's choice mostly follows the grammar, but not always."""
    law = SamplingParams(temperature=temperature, seed=4)
    ids = ids_of('{"shape":"square","words":["red","blue"]}')
    logits = some_logits(len(ids))
    masked, num_free = mask(), 0
    for row in range(0, len(ids), 2):
        logits[row, ids[row]] += 50
    for start in range(len(ids) - num_rows):
        rows, pending = logits[start : start + num_rows], ids[start : start + num_rows - 1]
        sampler = CoupledSampler(law, constraint=mask())
        with_mask = sampler.scores(rows, ids[:start], pending).argmax(-1).tolist()
        assert sampler.sample(rows, ids[:start], pending) == with_mask
        num_free += masked.num_allowed(with_mask, ids[:start], pending) == num_rows
    assert num_free == len(ids) - num_rows


def test_the_end_is_allowed_exactly_where_the_grammar_accepts() -> None:
    used = mask(LLMatcher.grammar_from_regex("(ab)+"))
    steps = [(text, bool(ENDS & set(allowed(used, ids_of(text))[0]))) for text in ("", "a", "ab", "aba", "abab")]
    assert steps == [("", False), ("a", False), ("ab", True), ("aba", False), ("abab", True)]
    whole = ids_of('{"shape":"circle","words":[]}')
    assert set(allowed(mask(), whole)[0]) == ENDS


def test_forced_tokens_are_the_only_ones_allowed_and_are_all_of_them() -> None:
    used, ids, num_forced = mask(), list[int](), 0
    whole = ids_of('{"shape":"square","words":["red"]}')
    while len(ids) < len(whole):
        forced = used.forced(ids)
        (choices,) = allowed(mask(), ids)
        assert (forced[:1] == choices) == bool(forced) == (len(choices) == 1)
        num_forced += bool(forced)
        ids.append(whole[len(ids)])
    assert num_forced > len(whole) / 2


@pytest.mark.parametrize("text", ["<video>", "<|im_end|>", "to <video> and <|im_end|> on"])
def test_a_text_that_spells_a_special_token_is_written_in_other_tokens(text: str) -> None:
    used = mask(LLMatcher.grammar_from_lark(f'start: "{text}"'))
    ids = answer(used, SamplingParams(), some_logits(60))
    used.check()
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["cafe\u0301 \u212b", "\u0938\u095c\u0915", "\u1100\u1161"])
def test_characters_that_the_tokenizer_writes_in_another_form_are_written_as_the_grammar_says(text: str) -> None:
    """Qwen's tokenizers put a text into NFC: what a Hindi keyboard or a macOS file name has is not that."""
    core = PreTrainedTokenizerFast.from_pretrained(model_path(ModelSpec(path="bundled", role="target")))
    core.backend_tokenizer.normalizer = normalizers.NFC()
    assert core.decode(core.encode(text)) != text
    used = GrammarCompiler(core, ENDS, len(core)).mask(LLMatcher.grammar_from_lark(f'start: "{text}" /[ab]/'))
    ids = answer(used, SamplingParams(), some_logits(60))
    used.check()
    assert core.decode(ids, skip_special_tokens=True)[:-1] == text


def test_what_ends_a_complete_answer_is_forced_where_there_is_one_way() -> None:
    one = GrammarCompiler(tokenizer(), frozenset({END}), len(tokenizer())).mask("start: /ab/")
    assert one.forced(ids_of("ab")) == [END]
    assert one.forced([*ids_of("ab"), END]) == []
    assert mask("start: /ab/").forced(ids_of("ab")) == []


def test_sampling_under_a_grammar_follows_the_renormalised_law() -> None:
    """Pearson's chi-square of the first token under 4,000 seeds; 7 degrees of freedom, 99.9 % quantile 24.3."""
    logits, law = 1.5 * some_logits(1, seed=5), 0.8
    letters = [token for letter in "abcdefgh" for token in ids_of(letter)]
    expected = torch.softmax(logits[0, letters] / law, dim=-1) * 4_000
    used, counts = mask(LLMatcher.grammar_from_regex("[a-h]")), dict.fromkeys(letters, 0)
    for seed in range(4_000):
        sampler = CoupledSampler(SamplingParams(temperature=law, seed=seed), noise_rows=1, constraint=used)
        counts[sampler.sample(logits, [])[0]] += 1
    found = torch.tensor(list(counts.values()))
    assert ((found - expected) ** 2 / expected).sum().item() < 24.3


def test_top_p_is_of_what_the_grammar_leaves() -> None:
    """The likeliest token is forbidden; a nucleus of that token alone would leave nothing."""
    logits = some_logits(1)
    logits[0, ids_of("!")] = 50.0
    law = SamplingParams(temperature=1.0, top_p=0.5, top_k=3, seed=1)
    (token,) = CoupledSampler(law, constraint=mask(LLMatcher.grammar_from_regex("[a-h]"))).sample(logits, [])
    assert tokenizer().decode([token]) in "abcdefgh"


def test_a_grammar_that_is_none_is_refused() -> None:
    with pytest.raises(GrammarError, match="unknown name"):
        mask("start: WORD")


def with_tokens(*tokens: str) -> GrammarCompiler:
    """For a model that has these tokens only."""
    known = {token: place for place, token in enumerate(["<end>", *tokens])}
    core = Tokenizer(models.BPE(vocab=known, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    return GrammarCompiler(fast, frozenset({0}), len(known))


def test_a_text_that_the_tokenizer_cannot_write_is_an_error_and_no_answer() -> None:
    used = with_tokens("a", "b").mask("start: /ac/")
    used(torch.zeros(1, 3), [], [])
    used.check()
    assert used.num_allowed([0], [1], []) == 0
    used(torch.zeros(1, 3), [1], [])
    with pytest.raises(GrammarError):
        used.check()


def test_a_grammar_whose_first_token_the_tokenizer_cannot_write_is_refused_before_an_answer_begins() -> None:
    with pytest.raises(GrammarError, match="no token of the model"):
        with_tokens("a", "b").mask("start: /[c-z]a/")


def test_a_grammar_that_is_too_much_work_for_the_models_long_tokens_is_refused_before_an_answer_begins() -> None:
    """It is tried with single bytes before; llguidance's message comes without the state of its parser."""
    spaces = ["\u0120" * count for count in range(2, 100)]  # as in released vocabularies
    model = with_tokens(*pre_tokenizers.ByteLevel.alphabet(), *spaces)
    with pytest.raises(GrammarError, match=r"too many expressions constructed$"):
        model.mask(LLMatcher.grammar_from_regex("(.{1,100} ){1,100}"))


def test_a_grammar_with_more_ways_to_read_a_text_than_any_needs_is_refused() -> None:
    """Each way is compared with all others: with llguidance's own limit a step may take minutes."""
    grammar = "start: (a | b | c) start |\na: /[a-r]/\nb: /[a-q]/\nc: /[b-p]/"
    tokens = ["w", *"abcdefghijklmnopqr", *map("".join, itertools.product("abcdefghijklmnopqr", repeat=3))]

    def follow() -> None:
        used = with_tokens(*tokens).mask(grammar)
        used(torch.zeros(1, len(tokens) + 1), [1], [])
        used.check()

    with pytest.raises(GrammarError, match="Too many items"):
        follow()


@pytest.mark.parametrize("ask", [
    lambda used, ids: used.prepare(ids, []),
    lambda used, ids: used.num_allowed(ids[:1], [], []),
    lambda used, ids: used(some_logits(1), [], []),
], ids=["prepare", "num_allowed", "mask"])  # fmt: skip
def test_steps_that_take_longer_than_usual_are_an_error_once_they_have_taken_a_second_more(
    ask: Callable[[GrammarMask, list[int]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other answers wait for them. Steps of the usual length are never too many."""
    for step_s, most in ((0.004, 300), (0.3, 4)):
        monkeypatch.setattr("time.thread_time", partial(next, itertools.count(step=step_s)))
        used, texts = mask("start: /[a-z]+/"), itertools.product("abcdefgh", repeat=3)
        asked = 0
        while asked < 300 and not used._find_error():
            ask(used, ids_of("".join(next(texts))))
            asked += 1
        assert asked <= most
        assert asked == most or most == 4
    monkeypatch.setattr(LLMatcher, "try_consume_tokens", None)
    used.prepare(ids_of("xyz"), [])
    assert used.forced(ids_of("xyz")) == []
    assert used.num_allowed(ids_of("x"), [], []) == 0
    assert allowed(used, []) == [list(range(len(tokenizer())))]
    with pytest.raises(GrammarError, match="too much time"):
        used.check()


def test_an_answer_that_is_not_of_the_grammar_is_an_error() -> None:
    used = mask()
    allowed(used, ids_of("no"))
    with pytest.raises(GrammarError, match="so far"):
        used.check()
    assert used.num_allowed(ids_of("{"), ids_of("no"), []) == 0
    allowed(used, [])
    used.check()


def test_of_tokens_chosen_freely_those_before_the_first_forbidden_one_are_confirmed() -> None:
    ids = ids_of('{"shape":"square","words":["red"]}')
    sampler, margins = CoupledSampler(SamplingParams(), constraint=mask()), [1.0] * len(ids)
    assert sampler.can_run_ahead
    assert sampler.is_constrained
    assert sampler.confirmed(ids, margins, []) == ids
    for wrong in (0, 1, 5, len(ids) - 1):
        assert sampler.confirmed([*ids[:wrong], 5, *ids[wrong + 1 :]], margins, []) == ids[:wrong]
    assert sampler.confirmed(ids[4:], margins[4:], ids[:4]) == ids[4:]


@pytest.mark.parametrize("grammar", [JSON, 'start: "[" /[a-z]+/ "]"', LLMatcher.grammar_from_regex("[ab]+")])
def test_after_reasoning_the_answer_follows_the_grammar_and_reasoning_is_any_text(grammar: str) -> None:
    close, *said = ids_of("}"), *(ids_of(text) for text in ("It is {", "\n\n"))
    thought, line = said
    text = {JSON: '{"shape": "square", "words": []}'}.get(grammar, "[ab]" if "[a-z]" in grammar else "ab")
    found = mask(after_reasoning(grammar, close[0]))
    rows = allowed(found, [], thought)
    assert all(END not in row and close[0] in row and len(row) > 500 for row in rows)
    assert found.forced([*thought, close[0]])[: len(line)] == line
    answer = [*thought, close[0], *line, *ids_of(text)]
    assert END in allowed(mask(after_reasoning(grammar, close[0])), answer)[0]
    assert found.num_allowed(ids_of("x"), [*thought, close[0], *line], []) == 0


def test_a_grammar_that_refers_to_itself_by_name_still_does_after_reasoning() -> None:
    nested = json.dumps({"grammars": [{"name": "nested", "lark_grammar": 'start: "[" (@nested | "x") "]"'}]})
    close = ids_of("}")[0]
    answer = [close, *ids_of("\n\n"), *ids_of("[[x]]")]
    assert END in allowed(mask(after_reasoning(nested, close)), answer)[0]
