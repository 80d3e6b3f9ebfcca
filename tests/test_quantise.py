"""Block formats: what maps exactly stays exact, the rest stays within its block's step."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import gguf
import numpy as np
import onnxruntime as ort
import pytest
from gguf.quants import quantize
from onnx import TensorProto, helper, numpy_helper

from shared.errors import ConfigError
from shared.models.gguf_source import RawTensor
from shared.models.quantise import (
    Precision,
    QuantisedMatrix,
    carries_over,
    carry_over,
    dequantise,
    quantise,
    split_quantise,
    stack,
    stack_split,
)
from shared.models.scheme import TensorClass, is_sensitive, scheme_named

ROWS, COLUMNS = 24, 256
WEIGHTS = np.random.default_rng(5).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def raw_tensor(kind: str) -> RawTensor:
    data = quantize(WEIGHTS, gguf.GGMLQuantizationType[kind])
    return RawTensor("blk.0.ffn_up.weight", kind, ROWS, COLUMNS, data)


def multiplied_by_onnx_runtime(matrix: QuantisedMatrix) -> np.ndarray:
    """The weights [rows, columns] as ONNX Runtime reads them: their product with the unit matrix."""
    arrays = {"codes": matrix.codes, "scales": matrix.scales}
    if matrix.zero_points is not None:
        arrays["zeros"] = matrix.zero_points
    p = matrix.precision
    node = helper.make_node(
        "MatMulNBits",
        ["x", *arrays],
        ["y"],
        domain="com.microsoft",
        K=matrix.columns,
        N=matrix.rows,
        bits=p.bits,
        block_size=p.block,
        accuracy_level=0,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", matrix.columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", matrix.rows])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": np.eye(matrix.columns, dtype=np.float32)})[0]).T


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q8_0", 8)])
def test_exact_formats_are_carried_over_without_loss(kind: str, bits: int) -> None:
    raw = raw_tensor(kind)
    assert carries_over(kind, Precision(bits, 32, True))
    assert not carries_over(kind, Precision(bits, 64, True))
    matrix = carry_over(raw)
    assert np.array_equal(dequantise(matrix), raw.to_float())
    assert np.array_equal(multiplied_by_onnx_runtime(matrix), raw.to_float())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_onnx_runtime_reads_the_codes_as_we_do(bits: int, block: int, symmetric: bool) -> None:
    matrix = quantise(WEIGHTS, Precision(bits, block, symmetric))
    assert np.allclose(multiplied_by_onnx_runtime(matrix), dequantise(matrix), atol=1e-6)


@pytest.mark.parametrize(("precision", "most"), [(Precision(8, 128, True), 0.01), (Precision(4, 64, False), 0.12)])
def test_the_error_is_that_of_the_bits(precision: Precision, most: float) -> None:
    error = dequantise(quantise(WEIGHTS, precision)) - WEIGHTS
    assert np.linalg.norm(error) < most * np.linalg.norm(WEIGHTS)


def test_the_search_beats_plain_rounding() -> None:
    found = dequantise(quantise(WEIGHTS, Precision(4, 64, False)))
    blocks = WEIGHTS.reshape(ROWS, -1, 64)
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    plain = (np.rint((blocks - low) / (high - low) * 15) / 15 * (high - low) + low).reshape(WEIGHTS.shape)
    assert np.linalg.norm(found - WEIGHTS) < np.linalg.norm(plain - WEIGHTS)


@pytest.mark.parametrize("block", [32, 128])
def test_the_halves_of_a_split_matrix_make_eight_bits(block: int) -> None:
    weights = WEIGHTS.copy()
    weights[0, :4] = 9, -9, 8.9, -8.9  # both extremes in one block
    weights[1, :block] = 0
    split = split_quantise(weights, block)
    whole = dequantise(split.coarse) + dequantise(split.fine)
    step = np.abs(weights.reshape(ROWS, -1, block)).max(-1, keepdims=True) / 119
    assert (np.abs((whole - weights).reshape(ROWS, -1, block)) <= 0.501 * step).all()
    assert np.linalg.norm(whole - weights) < 0.012 * np.linalg.norm(weights)
    assert np.linalg.norm(dequantise(split.coarse) - weights) < 0.2 * np.linalg.norm(weights)
    assert not whole[1, :block].any()
    assert np.allclose(multiplied_by_onnx_runtime(split.coarse), dequantise(split.coarse), atol=1e-6)
    parts = [split_quantise(weights[:8], block), split_quantise(weights[8:], block)]
    assert np.array_equal(dequantise(stack_split(parts).fine), dequantise(split.fine))
    assert np.array_equal(dequantise(split.first(5).fine), dequantise(split.fine)[:5])


def test_an_all_zero_block_stays_zero() -> None:
    for precision in (Precision(4, 32, True), Precision(4, 32, False), Precision(8, 32, True)):
        assert not dequantise(quantise(np.zeros((2, 64), np.float32), precision)).any()


def test_stacking_keeps_each_part() -> None:
    precision = Precision(4, 64, False)
    parts = [quantise(WEIGHTS[:8], precision), quantise(WEIGHTS[8:], precision)]
    assert np.array_equal(dequantise(stack(parts)), dequantise(quantise(WEIGHTS, precision)))
    with pytest.raises(ValueError, match="one precision"):
        stack([parts[0], quantise(WEIGHTS, Precision(8, 64, True))])


def test_blocks_shrink_until_they_divide_the_row() -> None:
    assert Precision(8, 128, True).fitted(896).block == 128
    assert Precision(8, 128, True).fitted(576).block == 64


def test_small_models_get_more_bits() -> None:
    scheme = scheme_named("mixed")
    for measured, large in ((False, "mixed"), (True, "q4-mixed-128")):
        sizes = (135_000_000, 494_000_000, 1_500_000_000)
        chosen = [scheme.for_source(size, measured=measured) for size in sizes]
        assert [one.name for one in chosen] == ["q8", "q8-half", large]
        assert chosen[1].precision(TensorClass.QKV).bits == 8
    assert [is_sensitive(layer, 24) for layer in (0, 3, 5, 23)] == [True, False, True, True]
    with pytest.raises(ConfigError, match="q7"):
        scheme_named("q7")
