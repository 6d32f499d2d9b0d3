"""Many questions about one video: prompts that share the rows up to the video's end, and copies of their cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from vidspec_models.decoder import Decoder
from vidspec_models.inputs import Prompt
from vidspec_models.kv_cache import CacheGeometry, KVCache


def text_behind_video(prompt: Prompt) -> tuple[int, ...]:
    """The ids of the rows after the last video row."""
    return prompt.ids[int(prompt.is_video.nonzero()[-1]) + 1 :]


@torch.inference_mode()
def with_text(prompt: Prompt, ids: tuple[int, ...], decoder: Decoder) -> Prompt:
    """The prompt with other text after its video. Text behind a video has plain positions, in every family."""
    num_common = prompt.num_tokens - len(text_behind_video(prompt))
    first = prompt.next_position - (prompt.num_tokens - num_common)
    device = prompt.embeddings.device
    cos, sin = decoder.rotary(torch.arange(first, first + len(ids), device=device))
    additions = prompt.layer_additions
    return replace(
        prompt,
        ids=prompt.ids[:num_common] + ids,
        embeddings=torch.cat((prompt.embeddings[:num_common], decoder.embed(torch.tensor(ids, device=device)))),
        rotary=(torch.cat((prompt.rotary[0][:num_common], cos)), torch.cat((prompt.rotary[1][:num_common], sin))),
        is_video=torch.cat((prompt.is_video[:num_common], prompt.is_video.new_zeros(len(ids)))),
        next_position=first + len(ids),
        identity=None,
        layer_additions=None
        if additions is None
        else torch.cat(
            (additions[:, :num_common], additions.new_zeros(len(additions), len(ids), additions.shape[2])), 1
        ),
    )


def copied(cache: KVCache, geometry: CacheGeometry, num_tokens: int) -> KVCache:
    """A cache of its own with the same rows, and room for `num_tokens`."""
    fresh = KVCache(geometry, num_tokens)
    fresh.copy_rows(cache, cache.length)
    return fresh
