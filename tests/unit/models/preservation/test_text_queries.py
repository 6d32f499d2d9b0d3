"""Attention recomputed from cached keys against the maps that transformers' eager attention returns."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText

from vidspec_models.bundled import BUNDLED_TARGET
from vidspec_models.bundled.render import render, slot_times
from vidspec_models.bundled.scene import TEST_SEEDS, sample_scene
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.preservation.text_queries import SoftmaxOver, TextQueries, video_attention
from vidspec_models.prompt import Prompt
from vidspec_models.request import VIDEO, Turn, Video
from vidspec_models.video_lm import VideoLM

NUM_FRAMES = 8


@pytest.fixture(scope="module")
def target() -> VideoLM:
    return load_model(ModelSpec(path="bundled", role="target", device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def prompt(target: VideoLM) -> Prompt:
    frames = render(sample_scene(TEST_SEEDS[0]), slot_times())
    video = Video(frames=frames, source_indices=tuple(range(8)), source_fps=2.0, source_num_frames=8, duration_s=4.0)
    return target.prepare([Turn(role="user", parts=(VIDEO, "How many objects are there?"))], [video])


@pytest.fixture(scope="module")
def maps(prompt: Prompt) -> Tensor:
    """Attention maps [layers, heads, P, P] of the stock model for the same embeddings."""
    stock: Any = AutoModelForImageTextToText.from_pretrained(
        BUNDLED_TARGET, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        output = stock.model.language_model(inputs_embeds=prompt.embeddings[None].clone(), output_attentions=True)
    return torch.cat(output.attentions)


def measured(target: VideoLM, prompt: Prompt, law: SoftmaxOver, chunks: tuple[int, ...]) -> Tensor | None:
    geometry = target.decoder.geometry
    cache = KVCache(geometry, prompt.num_tokens)
    queries = TextQueries(prompt, geometry, target.decoder.scale)
    for chunk in chunks:
        num_rows = min(chunk, prompt.num_tokens - cache.length)
        target.prefill(prompt, cache, num_rows, queries.observer(cache.length, num_rows))
    return queries.relevance(cache, law)


@pytest.mark.parametrize("chunks", [(4096,), (512, 512), (519, 3, 1, 4096)], ids=["whole", "as_served", "in_pieces"])
@pytest.mark.parametrize("among_video", [False, True])
def test_rebuilt_attention_equals_the_eager_maps(
    target: VideoLM, prompt: Prompt, maps: Tensor, chunks: tuple[int, ...], among_video: bool
) -> None:
    law: SoftmaxOver = "video" if among_video else "all"
    video = prompt.is_video.nonzero()[:, 0]
    first = int(video[-1]) + 1
    of_text = maps[:, :, first:][..., video]  # [layers, heads, text rows, V]
    expected = (of_text / of_text.sum(-1, keepdim=True) if among_video else of_text).mean((0, 1))
    relevance = measured(target, prompt, law, chunks)
    torch.testing.assert_close(relevance, expected.mean(0), atol=1e-5, rtol=1e-3)


def test_text_rows_that_were_reused_do_not_count(target: VideoLM, prompt: Prompt, maps: Tensor) -> None:
    video = prompt.is_video.nonzero()[:, 0]
    num_reused = int(video[-1]) + 5
    cache = KVCache(target.decoder.geometry, prompt.num_tokens)
    target.prefill(prompt, cache, num_reused)
    queries = TextQueries(prompt, target.decoder.geometry, target.decoder.scale)
    target.prefill(prompt, cache, 4096, queries.observer(num_reused, prompt.num_tokens - num_reused))
    expected = maps[:, :, num_reused:][..., video].mean((0, 1, 2))
    torch.testing.assert_close(queries.relevance(cache, "all"), expected, atol=1e-5, rtol=1e-3)


def test_noting_queries_changes_no_bit_of_the_prefill(target: VideoLM, prompt: Prompt) -> None:
    caches = [KVCache(target.decoder.geometry, prompt.num_tokens) for _ in range(2)]
    queries = TextQueries(prompt, target.decoder.geometry, target.decoder.scale)
    alone = target.prefill(prompt, caches[0], 4096)
    watched = target.prefill(prompt, caches[1], 4096, queries.observer(0, prompt.num_tokens))
    assert alone is not None
    assert watched is not None
    assert torch.equal(alone, watched)
    assert torch.equal(caches[0].keys, caches[1].keys)


def test_heads_read_the_keys_of_their_own_group() -> None:
    """Two groups of two heads on opposite keys: each half of the weights goes to its group's key."""
    queries = torch.tensor([[[1.0, 0.0]] * 4])  # one row, four heads
    keys = torch.zeros(2, 3, 2)
    keys[0, 0] = keys[1, 1] = torch.tensor([100.0, 0.0])
    weights = video_attention(queries, keys, torch.arange(2), first_row=2, scale=1.0, among_video=True)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.0], [0.0, 2.0]]))


@pytest.mark.parametrize("among_video", [False, True])
def test_more_keys_than_are_taken_at_once_change_nothing(among_video: bool) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(5, 4, 8), torch.randn(2, 2505, 8)
    video = torch.arange(100, 2400)
    found = video_attention(queries, keys, video, first_row=2500, scale=0.3, among_video=among_video)
    scores = torch.einsum("nhd,hkd->hnk", queries, keys.repeat_interleave(2, 0)) * 0.3
    behind = torch.arange(2505)[None] > torch.arange(2500, 2505)[:, None]
    scores = scores[..., video] if among_video else scores.masked_fill(behind, -torch.inf)
    expected = scores.softmax(-1).unflatten(0, (2, 2)).sum((1, 2))
    torch.testing.assert_close(found, expected if among_video else expected[:, video])


def test_without_video_or_without_text_there_is_no_relevance(target: VideoLM, prompt: Prompt) -> None:
    cache = KVCache(target.decoder.geometry, prompt.num_tokens)
    text = target.prepare([Turn(role="user", parts=("Hello.",))], [])
    assert TextQueries(text, target.decoder.geometry, 1.0).observer(0, text.num_tokens) is None
    assert TextQueries(text, target.decoder.geometry, 1.0).relevance(cache, "video") is None
    assert TextQueries(prompt, target.decoder.geometry, 1.0).relevance(cache, "video") is None  # nothing was recorded


@pytest.mark.parametrize("num_heads", [14, 64])
def test_on_a_gpu_scores_take_64_megabytes_however_long_text_and_video_are(num_heads: int) -> None:
    """What the KV cache leaves there is reckoned without them; the device "meta" has shapes only."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.ndim == 3 and found.shape[0] * found.shape[1] == 128 * num_heads:
                self.numel = max(self.numel, found.numel())
            return found

    with Largest() as largest:  # type: ignore[no-untyped-call]
        video_attention(
            torch.empty(128, num_heads, 16, device="meta"),
            torch.empty(num_heads, 30_128, 16, device="meta"),
            torch.empty(30_000, dtype=torch.int64, device="meta"),
            first_row=30_000,
            scale=1.0,
            among_video=True,
        )
    assert 2**23 < largest.numel <= 2**24
