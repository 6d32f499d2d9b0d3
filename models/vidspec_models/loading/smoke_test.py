"""A smoke test of a loaded model: what would spoil every request is an error at start, not at the first request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.errors import ContextOverflow, ModelLoadError
from vidspec_models.loading.files import first_line, weight_files
from vidspec_models.loading.sampling_defaults import sampling_defaults
from vidspec_models.prompt import Prompt, pruned
from vidspec_models.request import VIDEO, Turn, Video
from vidspec_models.video_lm import VideoLM

_QUESTION = Turn(role="user", parts=(VIDEO, "What happens?"))
_GREY = Video(
    frames=np.full((2, 60, 100, 3), 128, np.uint8),  # no square: some wrong settings spoil all others only
    source_indices=(0, 1),
    source_fps=1.0,
    source_num_frames=2,
    duration_s=2.0,
)


def run_smoke_test(model: VideoLM, folder: Path) -> None:
    """Raise ModelLoadError unless the model makes a prompt of a video and finite numbers from it, and its settings for
    frames and sampling can be used. The weights are in `folder`.
    """
    sampling_defaults(model.family.model)
    try:
        _ = (model.family.default_num_frames, model.family.max_frames)
        prompt = model.prepare([_QUESTION], [_GREY])
    except ContextOverflow:
        return  # a context this small has room for text alone
    except (ModelLoadError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # settings of a processor can be wrong in any way
        raise ModelLoadError(
            f"it cannot read a video: {first_line(error)}; compare the processor's settings (processor_config.json, "
            "preprocessor_config.json, video_preprocessor_config.json) with those of the checkpoint it comes from"
        ) from error
    if not _makes_numbers(model, prompt):
        why = _not_finite(folder) or f"{model.decoder.dtype_name} is too small for its numbers; choose another dtype"
        raise ModelLoadError(f"what it computes is not finite: {why}")


@torch.inference_mode()
def _makes_numbers(model: VideoLM, prompt: Prompt) -> bool:
    """Whether the video's rows and what the language model makes of the text are finite."""
    words = pruned(prompt, torch.empty(0, dtype=torch.int64, device=prompt.is_video.device))
    logits = model.prefill(words, KVCache(model.decoder.geometry, words.num_tokens), words.num_tokens)
    assert logits is not None
    found = [prompt.embeddings, logits, *([] if prompt.deepstack is None else [prompt.deepstack])]
    return all(bool(rows.isfinite().all()) for rows in found)


def _not_finite(folder: Path) -> str | None:
    """The first tensor in the files that has an infinity or a NaN, and the remedy."""
    for file in weight_files(folder):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                if not tensors.get_tensor(name).float().isfinite().all():
                    return f"tensor {name!r} in {file.name} is damaged; download it again"
    return None
