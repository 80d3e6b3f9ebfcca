"""Building a model directory out of a GGUF file, tensor by tensor, all or nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import onnx

from shared.cpus import usable_cpus
from shared.models.blocks import DATA_FILE, ExternalData, LayerWeights, RotaryTables
from shared.models.directory import (
    CHECKED_FILE,
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    ArchitectureRecord,
    Manifest,
    PrecisionRecord,
    file_record,
    genai_config,
)
from shared.models.gguf_source import FloatArray, GgufSource, RawTensor
from shared.models.graph import DecoderGraph, Vocabulary
from shared.models.importance import Importance
from shared.models.quantise import (
    Precision,
    QuantisedMatrix,
    carries_over,
    carry_over,
    quantise,
    split_quantise,
    stack,
    stack_split,
)
from shared.models.scheme import Scheme, TensorClass, scheme_named
from shared.models.whole_directory import whole_directory

BUILDER_VERSION = 5
DEFAULT_CONTEXT = 8192
CHUNK_ELEMENTS = 1 << 18
SAME_MATRIX = 0.1  # relative difference under which an output matrix is a requantised copy of the embedding

T = TypeVar("T")
Progress = Callable[[str, float], None]
Role = Literal["target", "draft"]


def default_scheme(role: str) -> Scheme:
    """The scheme of a role (`target`, `draft`), or the one of that name. Raises ConfigError for neither."""
    return scheme_named("mixed" if role == "target" else role)


def build_model(
    gguf_path: Path,
    directory: Path,
    *,
    role: str | Scheme = "target",
    progress: Progress,
    context_length: int | None = None,
    importance: Importance | None = None,
) -> Manifest:
    """Build `directory` from the GGUF; `role` is `target`, `draft`, the name of a scheme or a scheme.

    The directory appears, or is replaced, only when it is complete (`whole_directory`).
    `progress` gets what is being done and the fraction done, 0 to 1. `context_length` bounds the sequence (default: the
    model's own, at most 8,192). `importance` weighs rounding errors (default: what was measured for this file).

    Raises ModelFileError and UnsupportedModelError as GgufSource does, ConfigError for an unknown scheme.
    """
    scheme = role if isinstance(role, Scheme) else default_scheme(role)
    with whole_directory(directory) as working:
        manifest = _build_into(working, gguf_path, scheme, progress, context_length, importance)
    progress("done", 1.0)
    return manifest


@dataclass
class _Quantiser:
    """Quantises a source's matrices for a scheme and counts what was chosen."""

    source: GgufSource
    scheme: Scheme
    importance: Importance
    chosen: dict[TensorClass, Counter[Precision]] = field(default_factory=dict)

    def matrix(self, raws: list[RawTensor], kind: TensorClass, layer: int = 0) -> QuantisedMatrix:
        """The tensors above each other as one matrix."""
        wanted = self.scheme.precision(kind, layer, self.source.architecture.num_layers)
        precision = _exact_precision(raws, wanted) or wanted.fitted(raws[0].columns)
        self.chosen.setdefault(kind, Counter())[precision] += 1
        weights = self.importance.weights(kind, layer)
        return stack(_by_chunks(raws, lambda chunk: _quantise_chunk(chunk, precision, weights)))

    def vocabulary(self, raw: RawTensor) -> Vocabulary:
        """An embedding or a vocabulary projection, split where the scheme says so."""
        wanted = self.scheme.precision(TensorClass.VOCABULARY)
        if not self.scheme.splits_vocabulary:
            return self.matrix([raw], TensorClass.VOCABULARY)
        precision = wanted.fitted(raw.columns)
        self.chosen.setdefault(TensorClass.VOCABULARY, Counter())[precision] += 1
        return stack_split(_by_chunks([raw], lambda chunk: split_quantise(chunk.to_float(), precision.block)))

    def records(self) -> dict[str, list[PrecisionRecord]]:
        return {
            str(kind): [PrecisionRecord(**asdict(precision), matrices=count) for precision, count in counts.items()]
            for kind, counts in self.chosen.items()
        }


def _by_chunks(raws: list[RawTensor], make: Callable[[RawTensor], T]) -> list[T]:
    """What is made of each chunk of the tensors, in their order; all cores at work."""
    with ThreadPoolExecutor(usable_cpus()) as pool:
        return list(pool.map(make, [chunk for raw in raws for chunk in raw.chunks(CHUNK_ELEMENTS)]))


def _exact_precision(raws: list[RawTensor], wanted: Precision) -> Precision | None:
    """The precision that carries all these tensors over without loss, if it needs no more bits than wanted."""
    exact = Precision(wanted.bits, 32, True)
    return exact if all(carries_over(raw.kind, exact) for raw in raws) else None


def _quantise_chunk(chunk: RawTensor, precision: Precision, importance: FloatArray | None) -> QuantisedMatrix:
    if carries_over(chunk.kind, precision):
        return carry_over(chunk)
    return quantise(chunk.to_float(), precision, importance)


def _build_into(
    working: Path,
    gguf_path: Path,
    scheme: Scheme,
    progress: Progress,
    context_length: int | None,
    importance: Importance | None,
) -> Manifest:
    progress("reading", 0.0)
    source = GgufSource(gguf_path)
    sha256 = source.sha256()
    known = importance or Importance.of_source(sha256)
    scheme = scheme.for_source(source.num_parameters, measured=bool(known.squares))
    context = min(context_length or DEFAULT_CONTEXT, source.architecture.context_length)
    fingerprint = _write_tokenizer(gguf_path, working)
    quantiser = _Quantiser(source, scheme, known if scheme.weighted else Importance({}))
    onnx.save_model(_graph(working, quantiser, context, progress), working / MODEL_FILE)
    config = genai_config(source.architecture, context, *_special_ids(source, working))
    (working / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    progress("checking", 0.98)
    manifest = Manifest(
        builder_version=BUILDER_VERSION,
        source_name=source.name,
        source_file=gguf_path.name,
        source_sha256=sha256,
        source_bytes=gguf_path.stat().st_size,
        scheme=scheme.name,
        accuracy_level=scheme.accuracy_level,
        precisions=quantiser.records(),
        architecture=ArchitectureRecord.model_validate(asdict(source.architecture)),
        context_length=context,
        tokenizer_fingerprint=fingerprint,
        files={path.name: file_record(path) for path in sorted(working.iterdir()) if path.name != CHECKED_FILE},
    )
    (working / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=2))
    return manifest


def _write_tokenizer(gguf_path: Path, working: Path) -> str:
    from shared.tokenizer import write_tokenizer

    return write_tokenizer(gguf_path, working)


def _special_ids(source: GgufSource, working: Path) -> tuple[int | None, list[int], int | None]:
    """Begin-of-sequence id, the ids that end an answer, and the padding id."""
    bos = source.field("tokenizer.ggml.bos_token_id")
    pad = source.field("tokenizer.ggml.padding_token_id")
    ends = json.loads((working / "generation_config.json").read_bytes())["eos_token_id"]
    return bos, ends if isinstance(ends, list) else [ends], pad


def _graph(working: Path, quantiser: _Quantiser, context: int, progress: Progress) -> onnx.ModelProto:
    source = quantiser.source
    layers = source.architecture.num_layers
    data = ExternalData(working / DATA_FILE)
    try:
        graph = DecoderGraph(source.architecture, data, quantiser.scheme.accuracy_level)
        graph.add_lengths()
        graph.add_rotary(RotaryTables.of(source.rope_frequencies(), context))
        progress("quantising the vocabulary", 0.05)
        embedding, own = _vocabulary(quantiser)
        head = (own or embedding).first(quantiser.scheme.num_ids or embedding.rows)
        graph.add_vocabulary(embedding, head, tied=own is None)
        for layer in range(layers):
            progress(f"quantising layer {layer + 1} of {layers}", 0.15 + 0.82 * layer / layers)
            graph.add_layer(_layer(quantiser, layer))
        return graph.finish(source.vector("output_norm.weight"), head)
    finally:
        data.close()


def _vocabulary(quantiser: _Quantiser) -> tuple[Vocabulary, Vocabulary | None]:
    """The embedding, and the vocabulary projection or None when one matrix serves as both."""
    source = quantiser.source
    embedding = source.raw("token_embd.weight")
    if not source.has("output.weight"):
        return quantiser.vocabulary(embedding), None
    output = source.raw("output.weight")
    head = quantiser.vocabulary(output)
    return (head, None) if _are_copies(output, embedding) else (quantiser.vocabulary(embedding), head)


def _are_copies(one: RawTensor, other: RawTensor) -> bool:
    """Whether two tensors hold one matrix at different precisions (a tied model whose file stores it twice)."""
    if (one.rows, one.columns) != (other.rows, other.columns):
        return False
    sample = slice(one.rows // 2, one.rows // 2 + 64)
    first = one.row_range(sample.start, sample.stop).to_float()
    second = other.row_range(sample.start, sample.stop).to_float()
    return bool(np.linalg.norm(first - second) < SAME_MATRIX * np.linalg.norm(first))


def _layer(quantiser: _Quantiser, layer: int) -> LayerWeights:
    source, prefix = quantiser.source, f"blk.{layer}."
    architecture = source.architecture
    smoothing = quantiser.importance.smoothing(layer, architecture.hidden_size)

    def raw(part: str) -> RawTensor:
        return source.raw(f"{prefix}{part}.weight")

    def matrix(kind: TensorClass, *parts: RawTensor) -> QuantisedMatrix:
        return quantiser.matrix(list(parts), kind, layer)

    def norm(part: str) -> FloatArray:
        return source.vector(f"{prefix}{part}.weight")

    biases = [source.vector(f"{prefix}attn_{part}.bias") for part in "qkv"] if architecture.has_qkv_bias else None
    return LayerWeights(
        attention_norm=norm("attn_norm") / smoothing,
        qkv=matrix(TensorClass.QKV, *(raw(f"attn_{part}").scaled(smoothing) for part in "qkv")),
        qkv_bias=None if biases is None else np.concatenate(biases),
        query_norm=norm("attn_q_norm") if architecture.has_qk_norm else None,
        key_norm=norm("attn_k_norm") if architecture.has_qk_norm else None,
        attention_output=matrix(TensorClass.ATTENTION_OUTPUT, raw("attn_output")),
        ffn_norm=norm("ffn_norm"),
        gate_up=matrix(TensorClass.GATE_UP, raw("ffn_gate"), raw("ffn_up")),
        ffn_down=matrix(TensorClass.FFN_DOWN, raw("ffn_down")),
    )
