"""Tiny random checkpoints of every family in the real layout: real classes, a real tokenizer and processor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.video_lm import VideoLM

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<img>", "</img>", "<IMG_CONTEXT>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_VOCABULARY = 288  # rows; the tokenizer has fewer
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": _VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_CLIP = {**_VISION, "image_size": 56, "patch_size": 14}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}
_CROP = {"size": {"height": 56, "width": 56}, "crop_size": {"height": 56, "width": 56}}
_SMALL = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
_SMALL_VIDEO = {"shortest_edge": 4 * 56 * 56, "longest_edge": 8 * 56 * 56}  # pixels of a whole video


def _template(video: str, image: str) -> str:
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'video' %}" + video + "{% elif part['type'] == 'image' %}" + image + "{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def _byte_pairs(num_words: int = 0) -> models.BPE:
    """Special tokens, bytes, and words that never occur in a tokenised text."""
    words = (f"word{number}" for number in range(num_words))
    tokens = (*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words)
    return models.BPE({token: index for index, token in enumerate(tokens)}, [])


def _tokenizer(named: dict[str, str], **options: Any) -> Any:
    """Bytes and the special tokens: ids up to 267; the rest of the 288 rows is padding, as in real checkpoints."""
    core = Tokenizer(_byte_pairs())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=_SPECIAL[0],
        eos_token="<|im_end|>",
        additional_special_tokens=list(_SPECIAL),
        extra_special_tokens=named,
        model_max_length=1024,
        **options,
    )


def _id(token: str) -> int:
    return _SPECIAL.index(token)


def _llava_onevision() -> tuple[Any, Any]:
    tokenizer = _tokenizer({"image_token": "<image>", "video_token": "<video>"})
    config = tf.LlavaOnevisionConfig(
        text_config=tf.Qwen2Config(**_TEXT),
        vision_config=tf.SiglipVisionConfig(**_CLIP, vision_use_head=False),
        image_token_index=_id("<image>"),
        video_token_index=_id("<video>"),
        image_grid_pinpoints=[[56, 56]],
    )
    processor = tf.LlavaOnevisionProcessor(
        image_processor=tf.LlavaOnevisionImageProcessor(image_grid_pinpoints=[[56, 56]], size=_CROP["size"]),
        video_processor=tf.LlavaOnevisionVideoProcessor(size=_CROP["size"]),
        tokenizer=tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=_template("<video>", "<image>"),
    )
    return tf.LlavaOnevisionForConditionalGeneration(config), processor


def _llava_next_video() -> tuple[Any, Any]:
    tokenizer = _tokenizer({"image_token": "<image>", "video_token": "<video>"})
    config = tf.LlavaNextVideoConfig(
        text_config=tf.LlamaConfig(**_TEXT),
        vision_config=tf.CLIPVisionConfig(**_CLIP),
        image_token_index=_id("<image>"),
        video_token_index=_id("<video>"),
        image_grid_pinpoints=[[56, 56]],
    )
    small = {"size": {"shortest_edge": 56}, "crop_size": _CROP["crop_size"]}
    processor = tf.LlavaNextVideoProcessor(
        image_processor=tf.LlavaNextImageProcessor(image_grid_pinpoints=[[56, 56]], **small),
        video_processor=tf.LlavaNextVideoVideoProcessor(**small),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_template("<video>", "<image>"),
    )
    return tf.LlavaNextVideoForConditionalGeneration(config), processor


def _internvl() -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    )
    config = tf.InternVLConfig(
        text_config=tf.Qwen2Config(
            **_TEXT,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
            tie_word_embeddings=True,
        ),
        vision_config=tf.InternVLVisionConfig(**_CLIP),
        image_token_id=_id("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    processor = tf.InternVLProcessor(
        image_processor=tf.GotOcr2ImageProcessor(size=_CROP["size"]),
        video_processor=tf.InternVLVideoProcessor(size=_CROP["size"]),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=_template("<video>\\n", "<IMG_CONTEXT>\\n"),
    )
    return tf.InternVLForConditionalGeneration(config), processor


def _qwen_processor(kind: Any, video_processor: Any, patch_size: int) -> Any:
    template = "<|vision_start|><|video_pad|><|vision_end|>"
    return kind(
        image_processor=tf.Qwen2VLImageProcessor(patch_size=patch_size, size=_SMALL),
        video_processor=video_processor,
        tokenizer=_tokenizer({"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}),
        chat_template=_template(template, template.replace("video", "image")),
    )


def _qwen_ids() -> dict[str, int]:
    return {
        "image_token_id": _id("<|image_pad|>"),
        "video_token_id": _id("<|video_pad|>"),
        "vision_start_token_id": _id("<|vision_start|>"),
        "vision_end_token_id": _id("<|vision_end|>"),
    }


def _qwen2_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 14}
    config = tf.Qwen2VLConfig(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, **_qwen_ids())
    processor = _qwen_processor(tf.Qwen2VLProcessor, tf.Qwen2VLVideoProcessor(size=_SMALL), 14)
    return tf.Qwen2VLForConditionalGeneration(config), processor


def _qwen2_5_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {
        **_QWEN_VISION,
        "hidden_size": 32,
        "intermediate_size": 48,
        "patch_size": 14,
        "fullatt_block_indexes": [1],
        "window_size": 56,
        "tokens_per_second": 2,
    }
    config = tf.Qwen2_5_VLConfig(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, **_qwen_ids())
    processor = _qwen_processor(tf.Qwen2_5_VLProcessor, tf.Qwen2VLVideoProcessor(size=_SMALL), 14)
    return tf.Qwen2_5_VLForConditionalGeneration(config), processor


def _qwen3_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {
        **_QWEN_VISION,
        "hidden_size": 32,
        "intermediate_size": 48,
        "patch_size": 14,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    config = tf.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 16, "rope_parameters": rope}, vision_config=vision, **_qwen_ids()
    )
    video_processor = tf.Qwen3VLVideoProcessor(patch_size=14, size=_SMALL_VIDEO)
    return tf.Qwen3VLForConditionalGeneration(config), _qwen_processor(tf.Qwen3VLProcessor, video_processor, 14)


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava_next_video": _llava_next_video,
    "internvl": _internvl,
    "qwen3_vl": _qwen3_vl,
}


def save(name: str, folder: Path, noise: float = 0.0, *, loud_padding: bool = False, num_words: int = 0) -> None:
    """Write one checkpoint: config, generation config, safetensors, tokenizer and processor files.

    With `noise`, the weights differ slightly from the plain checkpoint: a draft that is often right. Rows that pad the
    vocabulary are zeros, which never win; with `loud_padding` there are more rows, which often would win. `num_words`
    adds tokens.
    """
    torch.manual_seed(0)
    model, processor = FAMILIES[name]()
    if num_words:
        processor.tokenizer.backend_tokenizer.model = _byte_pairs(num_words)
        model.resize_token_embeddings(_VOCABULARY + num_words, mean_resizing=False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(8.0)  # with the small initial weights every token would be the same
            elif "norm" not in parameter_name:
                torch.nn.init.normal_(parameter, std=0.3)  # biases of zero would hide a mistake
        for parameter in model.parameters():
            parameter.mul_(1.0 + noise * torch.randn_like(parameter))
        num_tokens = len(processor.tokenizer)
        if loud_padding:
            model.resize_token_embeddings(_VOCABULARY + 32, mean_resizing=False)
            model.lm_head.weight[num_tokens:] = 2.0 * model.lm_head.weight[: len(model.lm_head.weight) - num_tokens]
        else:
            model.lm_head.weight[num_tokens:] = 0.0
    model.generation_config = tf.GenerationConfig(eos_token_id=[_id("<|im_end|>"), 0], pad_token_id=0, do_sample=False)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def load(family: str, folder: Path) -> VideoLM:
    """Save one and load it as a target."""
    save(family, folder)
    return load_model(ModelSpec(role="target", path=str(folder), device="cpu", dtype="float32"))
