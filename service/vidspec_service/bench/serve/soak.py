"""A long run of clients that come in all sizes and often leave early, and what the server holds before and after."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from vidspec_service.bench.common.report import Row, Tell
from vidspec_service.bench.serve.exchange import Asker, Outcome, Question
from vidspec_service.bench.serve.load import closed_load
from vidspec_service.bench.serve.server import Server

_CANCEL_SHARE, _HANG_UP_SHARE = 0.25, 0.15
_NUM_SAMPLES = 50
_QUIET_TIMEOUT_S, _LOOK_S = 30.0, 0.5


async def soak(
    asker: Asker,
    server: Server,
    questions: Iterator[Question],
    num_requests: tuple[int, int],
    concurrency: int,
    tell: Tell,
) -> tuple[list[Outcome], float, Row]:
    """(warm-up, measured) requests; outcomes and duration of what came after warm-up, and the footprints.

    Those are of the whole process tree: `before` after warm-up, `after` at the end, both with nothing to do, and
    `samples` under load, each with the number of requests that had ended.
    """
    num_warm_up, total = num_requests
    warm_up = (next(questions) for _ in range(num_warm_up))
    await closed_load(asker, warm_up, concurrency, lambda done: tell("warming up", done, num_warm_up))
    before = await _quiet_footprint(server)
    samples = [(0, before)]
    every = max(total // _NUM_SAMPLES, 1)

    def watch(done: int) -> None:
        tell("soaking", done, total)
        if done % every == 0:
            samples.append((done, server.footprint()))

    outcomes, duration_s = await closed_load(asker, (next(questions) for _ in range(total)), concurrency, watch)
    after = await _quiet_footprint(server)
    result = {
        "num_requests": total,
        "num_warm_up": num_warm_up,
        "before": before,
        "after": after,
        "samples": samples,
        "growth": after["resident_bytes"] / before["resident_bytes"] - 1,
    }
    return outcomes, duration_s, result


def mixed_questions(
    clips: Iterator[bytes], most_tokens: int, num_frames: int | None, dice: random.Random
) -> Iterator[Question]:
    """Answers of any length; a quarter are cancelled, some of the rest are never fully sent."""
    for clip in clips:
        fate = dice.random()
        yield Question(
            clip=clip,
            max_tokens=dice.randint(1, most_tokens),
            num_frames=dice.choice((None, 1, 4, 8)) if num_frames is None else num_frames,
            leave_after_events=dice.randint(1, 1 + most_tokens // 4) if fate < _CANCEL_SHARE else None,
            leave_after_bytes=dice.randrange(len(clip)) if fate > 1 - _HANG_UP_SHARE else None,
        )


async def _quiet_footprint(server: Server) -> Row:
    """Once uploads are gone and nothing changes any more, or after a while as it is."""
    found = server.footprint()
    for _ in range(round(_QUIET_TIMEOUT_S / _LOOK_S)):
        await asyncio.sleep(_LOOK_S)
        earlier, found = found, server.footprint()
        if found["num_files"] == 0 and all(earlier[key] == found[key] for key in ("num_processes", "num_descriptors")):
            break
    return found
