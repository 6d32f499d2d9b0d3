"""The other engines that are compared, the packages they need, and their weight widths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from vidspec_service.bench.peers.assisted import AssistedPair
from vidspec_service.bench.peers.llama import llama_pair
from vidspec_service.bench.peers.onnx_peer import onnx_pair
from vidspec_service.bench.peers.openvino_peer import OpenVinoPair
from vidspec_service.bench.peers.pair import Peer

GGML_BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8, "q4_0": 4}  # as `--weights` names them


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEngine:
    """Another engine that runs the bundled pair."""

    name: str  # in reports
    packages: tuple[str, ...]  # modules that it imports
    make: Callable[..., Peer]  # called in a child process with: weights (its own name), threads, end token, all prompts
    bits: Mapping[str, int]  # its own names of weight formats, and their bits
    runs_alone: bool = True  # whether it is also measured without draft tokens

    def weights(self, asked: Iterable[str]) -> Iterator[str]:
        """This engine's name for each of GGML's: the narrowest with at least as many bits; without duplicates."""
        bits = self.bits
        found = (
            each if each in bits else min((own for own in bits if bits[own] >= GGML_BITS[each]), key=bits.__getitem__)
            for each in asked
        )
        return iter(dict.fromkeys(found))

    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]


ENGINES = {
    "ik_llama.cpp": PeerEngine(
        name="ik_llama.cpp", packages=("gguf", "ik_llama_cpp"), make=llama_pair, bits=GGML_BITS
    ),
    "openvino": PeerEngine(
        name="OpenVINO",
        packages=("openvino", "openvino_genai", "openvino_tokenizers", "nncf"),
        make=OpenVinoPair,
        bits={"f32": 32, "f16": 16, "int8": 8},
    ),
    "onnxruntime": PeerEngine(
        name="ONNX Runtime",
        packages=("onnxruntime", "onnxruntime_genai", "onnx_ir"),
        make=onnx_pair,
        bits={"fp32": 32, "int8": 8, "int4": 4},
    ),
    # Without a draft this is the baseline, which always runs.
    "assisted": PeerEngine(
        name="transformers", packages=(), make=AssistedPair, bits={"float32": 32}, runs_alone=False
    ),
}  # fmt: skip
