"""The details that a request may get about how its answer was made are true, complete, and do not change it."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

from tests.component.engine.harness import EngineHarness, ask, lasting, scene_video
from tests.component.engine.test_grammar import GRAMMARS
from vidspec_models.request import GenerationRequest, Include, Preservation, SpeculationMode
from vidspec_service.engine.types import (
    Activity,
    DraftView,
    Finished,
    GenerationEvent,
    Phase,
    TextDelta,
    TokenSource,
)

EVERYTHING = frozenset(Include)
PARALLEL, OFF = SpeculationMode.PARALLEL, SpeculationMode.OFF


def events_of(engine: EngineHarness, request: GenerationRequest) -> list[GenerationEvent]:
    async def drained() -> list[GenerationEvent]:
        async with aclosing(engine.engine.generate(request)) as events:
            return [event async for event in events]

    return engine.run(drained())


def question(name: str, mode: SpeculationMode = PARALLEL, **fields: object) -> GenerationRequest:
    request = ask(name, "Describe the video.", [scene_video(3)], speculation=mode, max_tokens=60)
    return replace(request, **fields)  # type: ignore[arg-type]


def deltas(events: list[GenerationEvent]) -> list[TextDelta]:
    return [event for event in events if isinstance(event, TextDelta)]


def test_everything_is_told_and_the_tokens_are_the_same(engine: EngineHarness) -> None:
    plain = events_of(engine, lasting(question("plain")))
    assert not [event for event in plain if isinstance(event, Activity | DraftView)]
    assert not any(delta.details for delta in deltas(plain))
    events = events_of(engine, lasting(question("told", include=EVERYTHING)))
    ids = [token for delta in deltas(events) for token in delta.ids]
    assert ids == [token for delta in deltas(plain) for token in delta.ids]

    details = [detail for delta in deltas(events) for detail in delta.details]
    assert len(details) == len(ids)
    assert "".join(detail.text for detail in details) == "".join(delta.text for delta in deltas(events))
    finished = events[-1]
    assert isinstance(finished, Finished)
    by_draft = sum(detail.source is TokenSource.DRAFT for detail in details)
    assert by_draft == finished.speculation.num_accepted_tokens > 0

    views = [event for event in events if isinstance(event, DraftView)]
    (cells,) = views[-1].videos
    assert cells.shape == (8, 8, 8)
    num_seen = sum(byte.bit_count() for byte in cells.bits)
    assert num_seen <= finished.speculation.draft_video_tokens <= num_seen + 1, "one row is no cell"

    work = [event for event in events if isinstance(event, Activity)]
    assert {(each.worker, each.phase) for each in work} == {
        *((worker, phase) for worker in ("target", "draft") for phase in (Phase.PREPARE, Phase.PREFILL)),
        ("draft", Phase.PROPOSE),
        ("target", Phase.VERIFY),
    }
    assert all(each.start <= each.end for each in work)
    verified = [each for each in work if each.phase is Phase.VERIFY]
    assert all(first.end <= second.start for first, second in pairwise(verified))
    assert len(verified) == finished.speculation.num_verifications


def test_what_a_grammar_forces_is_told_whoever_says_it(engine: EngineHarness) -> None:
    found = {}
    for mode in (PARALLEL, OFF):
        request = question(f"f-{mode}", mode, grammar=GRAMMARS["schema"], include=EVERYTHING)
        details = [detail for delta in deltas(events_of(engine, request)) for detail in delta.details]
        found[mode] = [detail.text for detail in details if detail.source is TokenSource.GRAMMAR]
        assert len(found[mode]) < len(details)
    assert "".join(found[PARALLEL]).replace(" ", "").startswith('{"objects":[{"shape":"')
    assert found[PARALLEL] == found[OFF]


def test_a_request_chooses_what_its_draft_sees(engine: EngineHarness) -> None:
    def seen(name: str, preservation: Preservation | None, ratio: float | None) -> tuple[DraftView, list[int]]:
        request = question(name, include=EVERYTHING, preservation=preservation, prune_ratio=ratio)
        events = events_of(engine, lasting(request))
        view = next(event for event in reversed(events) if isinstance(event, DraftView))
        return view, [token for delta in deltas(events) for token in delta.ids]

    server, ids = seen("server", None, None)
    assert (server.preservation, server.prune_ratio) == (Preservation.HIPPO, 0.9)
    for name, preservation, ratio, num_cells in (
        ("half", Preservation.UNIFORM, 0.5, 256),
        ("all", Preservation.NONE, None, 512),
        ("specvlm", Preservation.SPECVLM, 0.75, 128),
    ):
        view, same = seen(name, preservation, ratio)
        assert view.preservation is preservation
        assert sum(byte.bit_count() for byte in view.videos[0].bits) == num_cells
        assert same == ids
