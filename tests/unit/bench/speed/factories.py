"""Handmade samples and costs, for tests of the figures computed from them."""

from __future__ import annotations

from vidspec_models.request import SpeculationMode
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed.costs import ForwardTimes, ProbedCosts
from vidspec_service.bench.speed.options import Mode
from vidspec_service.engine.types import SpeculationStats


def sample(
    mode: Mode,
    prompt: int,
    ids: tuple[int, ...],
    *,
    at: float = 0.0,
    per_token_s: float = 0.01,
    group: int | None = None,
    stats: SpeculationStats | None = None,
) -> Sample:
    """A sample submitted at `at`, with its first token 0.1 s later and the others at even intervals."""
    return Sample(
        mode=mode,
        group=prompt if group is None else group,
        prompt=prompt,
        ids=ids,
        prompt_tokens=500,
        submitted=at,
        times=tuple(at + 0.1 + per_token_s * index for index in range(len(ids))),
        speculation=stats or SpeculationStats(),
    )


def stats(judged: int, accepted: int, verifications: int) -> SpeculationStats:
    return SpeculationStats(
        mode=SpeculationMode.PARALLEL,
        num_drafts=verifications,
        num_draft_tokens=judged,
        num_accepted_tokens=accepted,
        num_verifications=verifications,
    )


def costs(
    target_s: float = 0.010, row_s: float = 0.0005, draft_s: float = 0.001, alone_s: float = 0.010
) -> ProbedCosts:
    """Costs of a draft and of a target whose forward time is linear in the rows."""
    rows = (1, 2, 5, 9, 17)
    return ProbedCosts(
        context=600,
        target=ForwardTimes(
            threads=1, seconds={n: target_s + row_s * (n - 1) for n in rows}, device="cpu", dtype="float32"
        ),
        alone=ForwardTimes(
            threads=2, seconds={n: alone_s + row_s * (n - 1) for n in rows}, device="cpu", dtype="float32"
        ),
        draft=ForwardTimes(threads=1, seconds={1: draft_s}, device="cpu", dtype="float32"),
    )
