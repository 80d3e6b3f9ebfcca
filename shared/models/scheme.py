"""Which tensor gets how many bits: the named schemes a model can be built with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shared.errors import ConfigError
from shared.models.quantise import Precision

DRAFT_IDS = 1 << 16
"""Ids that a draft can propose. A BPE vocabulary is in the order of its merges, so the first ids are the frequent ones.
"""


class TensorClass(StrEnum):
    """The matrices of a decoder, by what they do."""

    VOCABULARY = "vocabulary"
    QKV = "qkv"
    ATTENTION_OUTPUT = "attention_output"
    GATE_UP = "gate_up"
    FFN_DOWN = "ffn_down"


@dataclass(frozen=True)
class Scheme:
    """A precision for each tensor class, and a better one for the layers that lose most.

    Those are the first and last eighth and every third between them, llama.cpp's choice for its mixed K-quants.
    """

    name: str
    accuracy_level: int
    precisions: Mapping[TensorClass, Precision]
    sensitive: Mapping[TensorClass, Precision] = field(default_factory=dict)
    num_ids: int | None = None  # how many of the vocabulary, the first ones, can be predicted; None for all
    splits_vocabulary: bool = False  # its 8 bits into two halves: see `SplitMatrix`
    weighted: bool = True  # by what is known of the importance of each input
    for_smaller: tuple[tuple[int, Scheme], ...] = ()  # (parameters, what a model of fewer gets instead), rising
    for_measured: Scheme | None = None  # what a larger model gets whose inputs' importance is known

    def for_source(self, num_parameters: int, *, measured: bool) -> Scheme:
        """This scheme, or its counterpart: small models lose more by fewer bits, and cost less anyhow; one whose
        rounding errors can be weighed loses less by larger blocks.
        """
        known = self.for_measured if measured else None
        return next((smaller for limit, smaller in self.for_smaller if num_parameters < limit), known or self)

    def precision(self, tensor: TensorClass, layer: int = 0, num_layers: int = 1) -> Precision:
        """How this tensor class is stored in this layer."""
        if tensor in self.sensitive and is_sensitive(layer, num_layers):
            return self.sensitive[tensor]
        return self.precisions[tensor]


def is_sensitive(layer: int, num_layers: int) -> bool:
    """Whether llama.cpp's mixed K-quants would give this layer more bits (`use_more_bits`)."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _uniform(name: str, layers: Precision, vocabulary: Precision) -> Scheme:
    kinds = dict.fromkeys(TensorClass, layers)
    return Scheme(name, 4, {**kinds, TensorClass.VOCABULARY: vocabulary})


def schemes() -> dict[str, Scheme]:
    """Every scheme by name."""
    eight, four = Precision(8, 128, True), Precision(4, 64, False)
    mixed_eight = dict.fromkeys(TensorClass, eight) | {TensorClass.GATE_UP: four}
    mixed = dict.fromkeys(TensorClass, four) | {TensorClass.VOCABULARY: eight}
    coarser = dict.fromkeys(TensorClass, Precision(4, 128, False)) | {TensorClass.VOCABULARY: eight}
    # Not weighted, so that they stay what draft heads were trained on.
    q8_mixed = Scheme("q8-mixed", 4, mixed_eight, weighted=False, splits_vocabulary=True)
    q8_half = Scheme("q8-half", 4, mixed_eight, {TensorClass.GATE_UP: eight}, weighted=False, splits_vocabulary=True)
    down_and_qkv = {TensorClass.FFN_DOWN: eight, TensorClass.QKV: eight}
    q4_mixed_128 = Scheme("q4-mixed-128", 4, coarser, down_and_qkv, splits_vocabulary=True)
    q8 = _uniform("q8", eight, eight)
    smaller = ((300_000_000, q8), (1_000_000_000, q8_half))
    made = (
        q8,
        _uniform("q4", four, eight),
        _uniform("q4-32", Precision(4, 32, False), eight),
        _uniform("q4-128", Precision(4, 128, False), eight),
        Scheme("draft", 4, dict.fromkeys(TensorClass, Precision(4, 128, False)), num_ids=DRAFT_IDS),
        q8_mixed,
        q8_half,
        Scheme("q4-mixed", 4, mixed, down_and_qkv, splits_vocabulary=True),
        q4_mixed_128,
        Scheme(
            "mixed",
            4,
            mixed,
            down_and_qkv,
            splits_vocabulary=True,
            for_smaller=smaller,
            for_measured=q4_mixed_128,
        ),
    )
    return {scheme.name: scheme for scheme in made}


def scheme_named(name: str) -> Scheme:
    """Raises ConfigError when there is no such scheme."""
    known = schemes()
    if name not in known:
        raise ConfigError(f"no quantisation scheme {name!r}; these are: {', '.join(known)}")
    return known[name]
