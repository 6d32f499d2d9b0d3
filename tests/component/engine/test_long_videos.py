"""A video with more tokens than either context holds, through the real engine: the same text in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.component.engine.family_world import FamilyWorld, TracedHarness, request, video
from tests.unit.models.families import tiny_checkpoints
from vidspec_models.request import VIDEO, Compression, GenerationRequest, SpeculationMode, Turn
from vidspec_service.errors import ContextLengthExceeded

MODES = (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)
_TRIES = 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedHarness]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_checkpoints._SMALL, "longest_edge", 320 * 320)
        world = FamilyWorld.make("qwen2_vl", tmp_path_factory.mktemp("long"))
    with world.engine() as harness:
        yield harness


def asked(mode: SpeculationMode, name: str, compression: Compression) -> GenerationRequest:
    return replace(
        request(mode, 0, name),
        turns=(Turn(role="user", parts=(VIDEO, "What happens?")),),
        videos=(video(4, 70, (320, 320)),),  # 35 pairs of 121 cells, in three parts
        compression=compression,
        compression_ratio=0.1,
    )


@pytest.mark.parametrize("compression", [Compression.V_CAST, Compression.VIDCOM2])
def test_every_mode_gives_the_ids_of_a_target_with_a_tenth_of_its_tokens(
    engine: TracedHarness, compression: Compression
) -> None:
    alone = engine.answer(asked(SpeculationMode.OFF, "alone", compression))
    assert 35 * 9 <= alone.started.video_tokens <= 35 * 14
    num_proposed = 0
    for number in range(_TRIES):
        for mode in MODES:
            answer = engine.answer(asked(mode, f"{compression}-{number}", compression))
            assert answer.ids == alone.ids, mode
            num_proposed += answer.finished.speculation.num_draft_tokens
        if num_proposed:  # its part fits the draft, which may be late on a busy machine
            return
    pytest.fail("the draft has proposed nothing")


def test_without_compression_it_is_refused_with_what_would_fit(engine: TracedHarness) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"compression_ratio of at most 0\.22"):
        engine.answer(asked(SpeculationMode.AUTO, "whole", Compression.NONE))
