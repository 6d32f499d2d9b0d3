"""Writes a language model as the files that OpenVINO's pipelines read. Runs in a child process."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vidspec_service.bench.peers.stock_language import StockLanguageModel

_NAMES = ("input_ids", "attention_mask", "position_ids", "beam_idx")


def write_openvino(language: StockLanguageModel, weights: str, folder: Path) -> None:
    """Write model and tokenizer. Weights are f32, f16 or int8 (NNCF's, with a scale for each output).

    Input tables are not rounded to int8, because they hold a prompt's rows, which are not weights.
    """
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it would report every conversion to its maker
    import nncf
    import openvino
    from openvino_tokenizers import convert_tokenizer

    model = _converted(language)
    if weights == "int8":
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # hides its progress bars
            model = nncf.compress_weights(
                model, mode=nncf.CompressWeightsMode.INT8_ASYM, ignored_scope=nncf.IgnoredScope(types=["Gather"])
            )
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=weights == "f16")
    # The speculative pipeline requires a tokenizer, although it is given ids.
    tokenizer, detokenizer = convert_tokenizer(language.tokenizer, with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    language.decoder.config.save_pretrained(folder)


def _converted(language: StockLanguageModel) -> Any:
    """The converted model with keys and values as internal state, as OpenVINO's pipelines expect."""
    import openvino
    from openvino._offline_transformations import apply_make_stateful_transformation

    config = language.decoder.config
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    past = [torch.zeros(1, heads, 3, width) for _ in range(2 * config.num_hidden_layers)]
    example = (torch.ones(1, 2).long(), torch.ones(1, 5).long(), torch.tensor([[3, 4]]), torch.zeros(1).int(), *past)
    with torch.no_grad():
        model = openvino.convert_model(_Forward(language), example_input=example)
    inputs = [f"past_key_values.{i}.{what}" for i in range(config.num_hidden_layers) for what in ("key", "value")]
    outputs = [name.replace("past_key_values", "present") for name in inputs]
    shapes = [[-1, -1]] * 3 + [[-1]] + [[-1, heads, -1, width]] * len(inputs)
    for port, name, shape in zip(model.inputs, [*_NAMES, *inputs], shapes, strict=True):
        port.tensor.set_names({name})
        port.node.set_friendly_name(name)  # paged attention finds inputs by this name
        port.node.set_partial_shape(openvino.PartialShape(shape))
    for port, name in zip(model.outputs, ["logits", *outputs], strict=True):
        port.tensor.set_names({name})
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, dict(zip(inputs, outputs, strict=True)))
    _begin_empty(model, heads, width)
    return model


def _begin_empty(model: Any, heads: int, width: int) -> None:
    """Initialise the state before the first run: no rows, for as many sequences as the input has."""
    from openvino import opset13 as op

    batch = op.gather(op.shape_of(model.input("input_ids"), "i64"), op.constant([0]), op.constant(0))
    shape = op.concat([batch, op.constant([heads]), op.constant([0]), op.constant([width])], 0)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([op.broadcast(op.constant(0.0, dtype=node.get_output_element_type(0)), shape)])
    model.validate_nodes_and_infer_types()


class _Past:
    """A cache for the decoder whose keys and values are plain tensors, which tracing can follow."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> list[torch.Tensor]:
        mine = slice(2 * layer, 2 * layer + 2)
        self.tensors[mine] = [torch.cat(both, 2) for both in zip(self.tensors[mine], (keys, values), strict=True)]
        return self.tensors[mine]

    def get_seq_length(self, *_: object) -> int:
        return self.tensors[0].shape[2]


class _Forward(torch.nn.Module):
    """From ids and earlier keys and values to logits and all keys and values."""

    def __init__(self, language: StockLanguageModel) -> None:
        super().__init__()
        self._table = language.model.get_input_embeddings()
        self._decoder, self._head = language.decoder, language.head

    def forward(self, ids: Any, attention_mask: Any, position_ids: Any, beam_idx: Any, *past: Any) -> tuple[Any, ...]:
        cache = _Past([tensor.index_select(0, beam_idx) for tensor in past])
        columns = torch.arange(attention_mask.shape[1])
        # Used by pipelines without paged attention; paged attention has a mask of its own.
        mask = torch.where(columns[None, None, None] <= position_ids[:, None, :, None], 0.0, -65504.0)
        found = self._decoder(
            inputs_embeds=self._table(ids), attention_mask=mask, position_ids=position_ids, past_key_values=cache
        )
        return (self._head(found.last_hidden_state), *cache.tensors)
