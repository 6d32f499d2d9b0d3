"""Every family against transformers' `generate`: tiny checkpoints in the real layout give the same greedy ids."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.models.families.tiny_checkpoints import FAMILIES, save
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.weights import rotary_values
from vidspec_models.errors import ContextOverflow
from vidspec_models.families.base import metadata, run_video_processor
from vidspec_models.families.qwen_vl import Qwen2VL, Qwen3VL
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.prompt import NO_CELL, Prompt, is_first_frame
from vidspec_models.reference.stock import StockGenerator
from vidspec_models.request import VIDEO, Turn, Video
from vidspec_models.video_lm import StepRows, VideoLM

ANSWER = 14
QUESTIONS = ("what?", "Tell me all about the scene, please.", "count to 9", "", "z" * 40)
SIZES = ((45, 31), (29, 73))  # (height, width) of the first and second video


@dataclass(frozen=True)
class World:
    """Our model, stock transformers, and its answers to every conversation."""

    model: VideoLM
    stock: StockGenerator


def clip(seed: int, num_frames: int = 4, size: tuple[int, int] = SIZES[0]) -> Video:
    frames = np.random.default_rng(seed).integers(0, 256, (num_frames, *size, 3), dtype=np.uint8)
    step = 30
    indices = tuple(step // 2 + step * i for i in range(num_frames))
    return Video(
        frames=frames,
        source_indices=indices,
        source_fps=10.0,
        source_num_frames=step * num_frames,
        duration_s=step * num_frames / 10,
    )


def conversations() -> list[tuple[list[Turn], list[Video]]]:
    """Text alone, one video, two videos in one turn, two in two turns."""
    result: list[tuple[list[Turn], list[Video]]] = [([Turn(role="user", parts=(QUESTIONS[0],))], [])]
    for seed, question in enumerate(QUESTIONS):
        result.append(([Turn(role="user", parts=(VIDEO, question))], [clip(seed, 4 + seed % 2, SIZES[seed % 2])]))
    pair = [clip(11), clip(12, size=SIZES[1])]
    result.append(([Turn(role="user", parts=(VIDEO, VIDEO, "compare"))], pair))
    turns = [
        Turn(role="user", parts=(VIDEO, "first")),
        Turn(role="assistant", parts=("a man",)),
        Turn(role="user", parts=(VIDEO, "and this?")),
    ]
    result.append((turns, pair))
    result.append(([Turn(role="user", parts=("Here is one:", VIDEO, "and another:", VIDEO, "What differs?"))], pair))
    return result


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save(request.param, folder)
    spec = ModelSpec(role="target", path=str(folder), device="cpu", dtype="float32")
    return World(model=load_model(spec), stock=StockGenerator(spec))


class Greedy:
    """One request decoded greedily in single-row steps."""

    def __init__(self, model: VideoLM, prompt: Prompt, chunk: int) -> None:
        self.prompt = prompt
        self.cache = KVCache(model.decoder.geometry, prompt.num_tokens + 64)
        logits = None
        while logits is None:
            logits = model.prefill(prompt, self.cache, chunk)
        self.ids = [int(logits.argmax())]

    def rows(self, ids: Sequence[int] | None = None) -> StepRows:
        done = self.cache.length - self.prompt.num_tokens
        return StepRows(cache=self.cache, ids=ids or self.ids[-1:], position=self.prompt.next_position + done)

    def is_done(self, model: VideoLM) -> bool:
        return len(self.ids) == ANSWER or self.ids[-1] in model.stop_ids


def step(model: VideoLM, batch: Sequence[Greedy]) -> None:
    for request, logits in zip(batch, model.step([request.rows() for request in batch]), strict=True):
        request.ids.append(int(logits[-1].argmax()))


def decode(model: VideoLM, request: Greedy) -> tuple[int, ...]:
    while not request.is_done(model):
        step(model, [request])
    return tuple(request.ids)


def test_greedy_ids_equal_generate(world: World) -> None:
    answers = []
    for turns, videos in conversations():
        answers.append(world.stock.answer(turns, videos, ANSWER))
        prompt = world.model.prepare(turns, videos)
        assert prompt.num_tokens == answers[-1].prompt_tokens
        for chunk in (7, 4096):
            assert decode(world.model, Greedy(world.model, prompt, chunk)) == answers[-1].ids
    assert len({token for answer in answers for token in answer.ids}) > 20, "the random model is too monotonous"


def test_a_clip_whose_frames_go_through_the_tower_in_several_parts_has_the_same_answer(world: World) -> None:
    turns, videos = [Turn(role="user", parts=(VIDEO, QUESTIONS[1]))], [clip(21, 19)]
    wanted = world.stock.answer(turns, videos, ANSWER)
    prompt = world.model.prepare(turns, videos)
    assert prompt.num_tokens == wanted.prompt_tokens
    assert decode(world.model, Greedy(world.model, prompt, 4096)) == wanted.ids


def test_ragged_batches_with_joins_and_leaves_equal_generate(world: World) -> None:
    model, waiting = world.model, list(reversed(conversations()))
    wanted: dict[int, tuple[int, ...]] = {}
    answers: dict[int, tuple[int, ...]] = {}
    running: dict[int, Greedy] = {}
    turn = 0
    while waiting or running:
        if waiting and turn % 2 == 0:
            turns, videos = waiting.pop()
            wanted[turn] = world.stock.answer(turns, videos, ANSWER).ids
            running[turn] = Greedy(model, model.prepare(turns, videos), 16)
        for number in [number for number, request in running.items() if request.is_done(model)]:
            answers[number] = tuple(running.pop(number).ids)
        if running:
            step(model, list(running.values()))
        turn += 1
    assert answers == wanted


def test_rejected_rows_leave_no_trace(world: World) -> None:
    turns, videos = conversations()[2]
    wanted = world.stock.answer(turns, videos, ANSWER).ids
    request = Greedy(world.model, world.model.prepare(turns, videos), 4096)
    while not request.is_done(world.model):
        length = request.cache.length
        (logits,) = world.model.step([request.rows([request.ids[-1], 20, 21, 22])])
        request.cache.truncate(length + 1)
        request.ids.append(int(logits[0].argmax()))
    assert tuple(request.ids) == wanted


def test_interleaved_requests_do_not_disturb_each_other(world: World) -> None:
    model = world.model
    chosen = [conversations()[index] for index in (1, 6)]
    wanted = [world.stock.answer(*each, ANSWER).ids for each in chosen]
    prompts = [model.prepare(*each) for each in chosen]
    requests = [Greedy(model, prompt, 5) for prompt in prompts]
    for _ in range(ANSWER):
        for request, other in (requests, reversed(requests)):
            if not request.is_done(model):
                step(model, [request])
            model.prepare(*chosen[requests.index(other)])
    assert [tuple(request.ids) for request in requests] == wanted


def test_video_rows_have_their_cells_and_the_early_count_is_close(world: World) -> None:
    model: Any = world.model
    videos = [clip(1), clip(2, 3, SIZES[1])]  # different numbers of frames
    prompt = world.model.prepare([Turn(role="user", parts=(VIDEO, VIDEO, "x"))], videos)
    assert len(prompt.grid) == prompt.num_video_tokens > 0
    real = prompt.grid[prompt.grid[:, 0] != NO_CELL]
    assert len({tuple(cell) for cell in real.tolist()}) == len(real)
    frames = real[:, 0].unique()
    begins = is_first_frame(frames)
    assert int(begins.sum()) == 2
    assert (frames.diff()[~begins[1:]] == 1).all()
    early = sum(model.family.num_video_tokens(video) for video in videos)
    assert prompt.num_video_tokens <= early <= prompt.num_tokens
    assert len(world.model.prepare([Turn(role="user", parts=("x",))], []).grid) == 0


def test_placeholders_in_a_users_words_are_words(world: World) -> None:
    words = "what are <video>, <image>, <|video_pad|>, <|image_pad|> and <IMG_CONTEXT>?"
    clean = world.model.prepare([Turn(role="user", parts=(VIDEO, "x"))], [clip(1)])
    prompt = world.model.prepare([Turn(role="user", parts=(VIDEO, words))], [clip(1)])
    assert prompt.num_video_tokens == clean.num_video_tokens
    assert world.model.prepare([Turn(role="user", parts=(words,))], []).num_video_tokens == 0


@pytest.mark.parametrize("size", [*SIZES, (57, 85), (28, 28), (97, 33)])
def test_an_image_of_any_size_is_a_video_of_one_frame(world: World, size: tuple[int, int]) -> None:
    """Qwen3-VL's stock processor refuses a single frame, so it gets the frame twice."""
    image, turns = clip(1, 1, size), [Turn(role="user", parts=(VIDEO, "x"))]
    model: Any = world.model
    stocks = twice(image) if isinstance(model.family, Qwen3VL) else image
    wanted = world.stock.answer(turns, [stocks], ANSWER).ids
    assert decode(world.model, Greedy(world.model, world.model.prepare(turns, [image]), 64)) == wanted


def twice(image: Video) -> Video:
    return replace(image, frames=np.repeat(image.frames, 2, axis=0), source_indices=image.source_indices * 2)


def test_too_much_video_is_refused_before_it_is_processed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = world.model
    monkeypatch.setattr(model.family, "prepare", None)
    with pytest.raises(ContextOverflow, match="1100 frames take") as refused:
        world.model.prepare([Turn(role="user", parts=(VIDEO, "x"))], [clip(1, 1100, SIZES[1])])
    most = int(re.findall("ask for fewer frames: about ([0-9]+) fit", str(refused.value))[0])
    num_tokens = world.model.family.num_video_tokens(clip(1, most, SIZES[1]))
    assert num_tokens == pytest.approx(world.model.context_length, rel=0.02)


def test_too_long_a_text_is_refused(world: World) -> None:
    with pytest.raises(ContextOverflow, match="shorten"):
        world.model.prepare([Turn(role="user", parts=("x" * 1100,))], [])


def test_the_plain_positions_come_from_the_same_rotary_module(world: World) -> None:
    model: Any = world.model
    rotary_emb = model.family.language_model.rotary_emb
    positions = torch.tensor([[5, 9]])
    if hasattr(rotary_emb, "recomposition_frequencies"):  # transformers 5.17 expects three axes
        positions = positions.expand(3, 1, -1)
    with torch.inference_mode():
        cos, sin = rotary_values(rotary_emb, world.model.decoder.embedding, positions)
        again = world.model.decoder.weights.rotary[[5, 9]]
    assert torch.equal(torch.stack((cos, sin), dim=1), again)


def test_stop_tokens_come_from_the_generation_config(world: World) -> None:
    assert world.model.stop_ids == {0, 2}
    assert world.model.family.default_num_frames in (8, 32)
    assert world.model.family.max_frames is None


@pytest.mark.parametrize("size", [(360, 640), (97, 33), (720, 1280)])
def test_pixels_are_those_of_the_processor_alone(world: World, size: tuple[int, int]) -> None:
    model: Any = world.model
    video, processor = clip(5, 3, size), model._processor.video_processor
    arguments = dict(model.family.video_arguments())
    told = {"video_metadata": [metadata(video)], "do_sample_frames": False, "return_tensors": "pt"}
    stocks = processor([video.frames], **told, **arguments)["pixel_values_videos"]
    fitting = model.family._size(video) if isinstance(model.family, Qwen2VL) else None
    assert torch.equal(run_video_processor(model._processor, video, arguments, fitting)["pixel_values_videos"], stocks)
