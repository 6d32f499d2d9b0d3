"""Details that are sent once, times on the request's own clock, and which clip frame a model's frame is."""

from __future__ import annotations

import numpy as np

from vidspec_models.request import Include, Preservation
from vidspec_service.api.schemas.extras import ExtrasBuffer
from vidspec_service.engine.types import Activity, DraftView, Phase, SeenCells

WORK = Activity(request_id="r", worker="draft", phase=Phase.PROPOSE, start=101.5, end=102.0, num_tokens=3)


def view(*kept: tuple[int, int, int], shape: tuple[int, int, int]) -> DraftView:
    dense = np.zeros(shape, np.bool_)
    for place in kept:
        dense[place] = True
    cells = SeenCells(shape=shape, bits=np.packbits(dense, bitorder="little").tobytes())
    return DraftView(request_id="r", preservation=Preservation.HIPPO, prune_ratio=0.9, videos=(cells,))


def test_spans_count_from_the_request_s_beginning_and_are_told_once() -> None:
    extras = ExtrasBuffer(frozenset({Include.TIMELINE}), began=101.0)
    extras.add(WORK)
    (span,) = extras.take([])["timeline"]
    assert (span["start_s"], span["end_s"], span["num_tokens"]) == (0.5, 1.0, 3)
    assert extras.take([]) == {"timeline": []}


def test_cells_are_told_by_frame_in_reading_order() -> None:
    extras = ExtrasBuffer(frozenset({Include.DRAFT_VIEW}), began=0.0)
    extras.add(view((0, 1, 2), (0, 0, 1), (2, 0, 0), shape=(3, 2, 3)))
    (video,) = extras.take([[0.0, 0.5, 1.0]])["draft_view"]["videos"]
    assert (video["rows"], video["columns"]) == (2, 3)
    assert video["frames"] == [
        {"timestamp_s": 0.0, "cells": [1, 5]},
        {"timestamp_s": 0.5, "cells": []},
        {"timestamp_s": 1.0, "cells": [0]},
    ]
    assert extras.take([]) == {}


def test_a_frame_that_a_model_makes_of_two_has_the_time_of_the_first() -> None:
    extras = ExtrasBuffer(frozenset({Include.DRAFT_VIEW}), began=0.0)
    extras.add(view(shape=(2, 1, 1)))
    (video,) = extras.take([[0.0, 0.5, 1.0]])["draft_view"]["videos"]
    assert [frame["timestamp_s"] for frame in video["frames"]] == [0.0, 1.0]


def test_a_long_answer_is_told_in_a_bounded_number_of_spans() -> None:
    extras = ExtrasBuffer(frozenset({Include.TIMELINE}), began=0.0)
    for _ in range(10_001):
        extras.add(WORK)
    assert len(extras.take([])["timeline"]) == 10_000
