"""The pair's tokenizer: byte-level BPE learned from the domain's own text, one token per attribute word.

Words keep their hyphens ("top-left" is one token); any other text still tokenises, down to single bytes. The pieces of
JSON descriptions and plain answers are added after the learned vocabulary, so that older text keeps its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.questions import CAPTION_PROMPTS, QUESTION_TYPES, ask
from vidspec_models.bundled.scene import TRAIN_SEEDS, WORDS, sample_scene

PAD, START, END, IMAGE, VIDEO = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"
MAX_POSITIONS = 16384
VOCAB_SIZE = 768  # embedding rows; the learned vocabulary is smaller, the rest is padding
_WORDS = Regex(r" ?[\p{L}\-]+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_CORPUS_CLIPS = 3000
ADDED_PIECES = (  # each becomes one token; every merge that this needs costs a row of the embedding
    '{"', '":"', '","', '"},{"', '":[{"', '"}],"', '"}]}', '":[]',
    "shape", "size", "colour", "last", "moves", "visible", "letter", "corner", "time",
    "yes", "no", "second", "same",
)  # fmt: skip

# The layout of LLaVA-OneVision: media first, then the text; a plain string is accepted as content, too.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] }}{% endfor %}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ '\\n' + message['content'] }}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\\n' + content['text'] }}{% endfor %}{% endif %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def attribute_words() -> tuple[str, ...]:
    """All words that name a fact; each must be one token, with and without a leading space."""
    words = (word for group in (*WORDS.values(), ("none", "unchanged")) for word in group)
    return tuple(dict.fromkeys(words))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Learn the tokenizer from captions, questions and attribute words of the first training clips."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, START, END, IMAGE, VIDEO],
        show_progress=False,
    )
    core.train_from_iterator(_corpus(), trainer)
    core = _with_pieces(core, ADDED_PIECES)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens={"image_token": IMAGE, "video_token": VIDEO},
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _with_pieces(core: Tokenizer, pieces: tuple[str, ...]) -> Tokenizer:
    """The tokenizer with merges that make each piece one token, ranked after all others."""
    for piece in pieces:
        state = json.loads(core.to_str())
        vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
        whole, *rest = core.encode(piece, add_special_tokens=False).tokens
        for part in rest:
            merges.append([whole, part])
            whole += part
            vocabulary[whole] = len(vocabulary)
        core = Tokenizer.from_str(json.dumps(state))
    return core


def _corpus() -> Iterator[str]:
    # Repeated so that the rarest attribute outweighs every accidental merge.
    for word in attribute_words():
        for _ in range(200):
            yield word
            yield f"the {word}"
    for _ in range(50):
        yield from CAPTION_PROMPTS
        yield "user \nassistant\nsystem "
    rng = np.random.default_rng(0)
    for seed in TRAIN_SEEDS[:_CORPUS_CLIPS]:
        scene = sample_scene(seed)
        yield caption(scene)
        for kind in QUESTION_TYPES:
            if question := ask(scene, kind, rng):
                yield question.text
                yield question.answer
