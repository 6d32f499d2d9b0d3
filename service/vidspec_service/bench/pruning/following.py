"""An experiment: does it help if the draft's choice follows the target's attention while the answer grows?

One choice before the answer loses what later words need (DyCoke's observation, arXiv 2411.15024). Here, every r tokens
the draft sees what the rows verified last look at. Its prefix is read anew each time, which an engine would have to
avoid; acceptance is what such an engine would get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vidspec_models.inputs import Prompt
from vidspec_models.preservation import RelevanceLaw, find_strategy, grid_checksum, kept_of_prompt, pruned
from vidspec_models.video_lm import VideoLM
from vidspec_service.bench.pruning.asking import Asked
from vidspec_service.bench.pruning.judging import Answered, LoadedPair
from vidspec_service.bench.pruning.statistics import Estimate, added, difference, rate
from vidspec_service.bench.pruning.teacher_forcing import matches, prefilled
from vidspec_service.engine.types import Preservation

THIRDS = ("first", "middle", "last")
_STRATEGY = Preservation.HIPPO


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """One caption: where the draft's choice was the target's, chosen once and chosen anew."""

    clip: int
    once: tuple[bool, ...]
    anew: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingThird:
    """One third of the captions."""

    third: str
    once: Estimate
    anew: Estimate
    gain: Estimate


@torch.inference_mode()
def followed(models: LoadedPair, asked: Asked, answer: Answered, every: int, ratio: float) -> Followed | None:
    """None for models whose video cells are not the same."""
    strategy = find_strategy(_STRATEGY)
    assert strategy.relevance is not None
    attention = _attention(models.run_as("target"), answer, strategy.relevance, models.chunk)
    draft = models.run_as("draft")
    whole = models.prompt("draft", asked)
    if grid_checksum(whole) != grid_checksum(answer.prompt):
        return None
    num_asked = len(attention) - len(answer.ids)
    hits: dict[bool, list[bool]] = {False: [], True: []}
    for start in range(0, len(answer.ids), every):
        stop = min(start + every, len(answer.ids))
        for is_anew, found in hits.items():
            rows = attention[:num_asked]
            if is_anew and start:  # what was asked, and what was verified last, in equal parts
                last = attention[num_asked + max(0, start - every) : num_asked + start]
                rows = torch.stack((rows.mean(0), last.mean(0)))
            kept = kept_of_prompt(strategy, ratio, whole, rows.mean(0))
            prompt = pruned(whole, kept)
            after = prefilled(draft, prompt, models.chunk, stop)
            found += matches(draft, prompt, after, answer.ids[:stop])[start:]
    return Followed(clip=asked.clip, once=tuple(hits[False]), anew=tuple(hits[True]))


def by_third(captions: Sequence[Followed]) -> tuple[FollowingThird, ...]:
    """Early, middle and late tokens apart."""
    thirds = []
    for index, name in enumerate(THIRDS):
        once, anew = (
            added([_third(caption.clip, hits, index) for caption, hits in pairs])
            for pairs in (
                [(caption, caption.once) for caption in captions],
                [(caption, caption.anew) for caption in captions],
            )
        )
        thirds.append(FollowingThird(third=name, once=rate(once), anew=rate(anew), gain=difference(anew, once)))
    return tuple(thirds)


def _third(clip: int, hits: Sequence[bool], index: int) -> tuple[int, int, int]:
    part = hits[index * len(hits) // 3 : (index + 1) * len(hits) // 3]
    return clip, sum(part), len(part)


def _attention(target: VideoLM, answer: Answered, law: RelevanceLaw, chunk: int) -> Tensor:
    """float32 [text rows behind the video and answer rows, video rows]."""
    prompt = _with_answer(target, answer.prompt, answer.ids)
    after = prefilled(target, prompt, chunk, 0, [law], most_rows=prompt.num_tokens)
    attention = after.queries[law].attention(after.cache)
    assert attention is not None
    return attention


def _with_answer(model: VideoLM, prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """The prompt continued by the answer, as rows of one prefill."""
    device = prompt.embeddings.device
    positions = torch.arange(prompt.next_position, prompt.next_position + len(ids), device=device)
    additions = prompt.layer_additions
    rotary = model.decoder.rotary(positions)
    return replace(
        prompt,
        ids=prompt.ids + tuple(ids),
        embeddings=torch.cat((prompt.embeddings, model.decoder.embed(torch.tensor(ids, device=device)))),
        rotary=(torch.cat((prompt.rotary[0], rotary[0])), torch.cat((prompt.rotary[1], rotary[1]))),
        is_video=torch.cat((prompt.is_video, torch.zeros(len(ids), dtype=torch.bool, device=device))),
        next_position=prompt.next_position + len(ids),
        layer_additions=None
        if additions is None
        else torch.cat((additions, additions.new_zeros(len(additions), len(ids), additions.shape[2])), 1),
    )
