"""Block quantisation for ONNX Runtime's MatMulNBits: `weight = (code - zero_point) * scale`, a scale for each block of
consecutive columns of a row.

Arrays: a matrix is [rows, columns]; its codes are [rows, blocks, block * bits / 8] bytes (two 4-bit codes a byte, the
first in the low half), its scales [rows, blocks], its zero points [rows, ceil(blocks * bits / 8)] packed like codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.models.gguf_source import ByteArray, FloatArray, RawTensor

GGUF_BLOCK = 32  # columns a block in Q4_0, Q4_1 and Q8_0


@dataclass(frozen=True)
class Precision:
    """How a matrix is stored: bits a code (4 or 8), columns a block, and whether the zero point is the middle code."""

    bits: int
    block: int
    symmetric: bool

    @property
    def levels(self) -> int:
        """The highest code."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """The zero point of a symmetric matrix."""
        return int(2 ** (self.bits - 1))

    def fitted(self, columns: int) -> Precision:
        """The same with the largest block up to ours that divides the row, never under 16."""
        block = self.block
        while block > 16 and columns % block:
            block //= 2
        return Precision(self.bits, block, self.symmetric)

    def __str__(self) -> str:
        return f"{self.bits}-bit/{self.block}{'' if self.symmetric else ' with zero points'}"


@dataclass(frozen=True)
class QuantisedMatrix:
    """Codes, scales and packed zero points (None when symmetric) of one matrix; shapes as in the module's docstring."""

    precision: Precision
    columns: int
    codes: ByteArray
    scales: FloatArray
    zero_points: ByteArray | None

    @property
    def rows(self) -> int:
        return len(self.codes)

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What MatMulNBits takes of it: codes, scales and, where there are any, zeros."""
        zeros = {} if self.zero_points is None else {"zeros": self.zero_points}
        return {"codes": self.codes, "scales": self.scales, **zeros}

    def first(self, rows: int) -> QuantisedMatrix:
        """Its first rows; all where it has no more."""
        zeros = None if self.zero_points is None else self.zero_points[:rows]
        return QuantisedMatrix(self.precision, self.columns, self.codes[:rows], self.scales[:rows], zeros)


SPLIT_RANGE = (-136, 119)
"""Of 16 * coarse + fine, both from -8 to 7."""


@dataclass(frozen=True)
class SplitMatrix:
    """8 bits a weight as the sum of two 4-bit matrices: `coarse` alone is the weight to 4 bits, `fine` what it misses.

    A product that needs all bits of a few rows only reads half the bytes: `coarse` for all rows, `fine` for those.
    Both are symmetric and share their scales: `fine`'s are a sixteenth of `coarse`'s, and aren't stored.
    """

    coarse: QuantisedMatrix
    fine_codes: ByteArray

    @property
    def rows(self) -> int:
        return self.coarse.rows

    @property
    def fine(self) -> QuantisedMatrix:
        """What to add to `coarse`."""
        coarse = self.coarse
        scales = coarse.scales / np.float32(16)
        return QuantisedMatrix(coarse.precision, coarse.columns, self.fine_codes, scales, None)

    def first(self, rows: int) -> SplitMatrix:
        """Its first rows; all where it has no more."""
        return SplitMatrix(self.coarse.first(rows), self.fine_codes[:rows])


def split_quantise(weights: FloatArray, block: int) -> SplitMatrix:
    """Quantise [rows, columns] to 8 bits in two halves; the block must divide the columns.

    Of a block's two extremes the larger one lies on the side with the longer range: its scale has that sign.
    """
    rows, columns = weights.shape
    blocks = weights.reshape(rows, columns // block, block)
    low, high = -np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    longer, shorter = -SPLIT_RANGE[0], SPLIT_RANGE[1]
    scales = _positive(np.maximum(np.maximum(low, high) / longer, np.minimum(low, high) / shorter))
    scales = np.where(high > low, -scales, scales).astype(np.float32)
    values = np.clip(np.rint(blocks / scales[..., None]), *SPLIT_RANGE).astype(np.int16)
    coarse = (values + 8) >> 4
    fine = values - 16 * coarse
    codes, fine_codes = (pack_nibbles((half + 8).astype(np.uint8)) for half in (coarse, fine))
    return SplitMatrix(QuantisedMatrix(Precision(4, block, True), columns, codes, 16 * scales, None), fine_codes)


def stack_split(parts: list[SplitMatrix]) -> SplitMatrix:
    """Split matrices of one block and width above each other."""
    fine_codes = np.concatenate([part.fine_codes for part in parts])
    return SplitMatrix(stack([part.coarse for part in parts]), fine_codes)


def stack(parts: list[QuantisedMatrix]) -> QuantisedMatrix:
    """Matrices of one precision and width above each other."""
    first = parts[0]
    if any(part.precision != first.precision or part.columns != first.columns for part in parts):
        raise ValueError("only matrices of one precision and width can be stacked")
    zero_points = [part.zero_points for part in parts if part.zero_points is not None]
    return QuantisedMatrix(
        first.precision,
        first.columns,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(zero_points) if zero_points else None,
    )


def carries_over(kind: str, precision: Precision) -> bool:
    """Whether a GGUF block format maps onto this precision bit by bit."""
    exact = {"Q4_0": Precision(4, GGUF_BLOCK, True), "Q8_0": Precision(8, GGUF_BLOCK, True)}
    return exact.get(kind) == precision


def carry_over(raw: RawTensor) -> QuantisedMatrix:
    """A Q4_0 or Q8_0 tensor's own codes and scales, without loss."""
    blocks = np.ascontiguousarray(raw.data).reshape(raw.rows, raw.columns // GGUF_BLOCK, -1)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    if raw.kind == "Q8_0":
        return QuantisedMatrix(
            Precision(8, GGUF_BLOCK, True), raw.columns, blocks[..., 2:] ^ np.uint8(0x80), scales, None
        )
    nibbles = blocks[..., 2:]  # low halves are columns 0..15 of the block, high halves 16..31
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    return QuantisedMatrix(Precision(4, GGUF_BLOCK, True), raw.columns, pack_nibbles(codes), scales, None)


def quantise(weights: FloatArray, precision: Precision, importance: FloatArray | None = None) -> QuantisedMatrix:
    """Quantise [rows, columns]; the block must divide the columns.

    `importance` [columns] weighs the squared error of each column (its input's mean square); without it all count
    alike.
    """
    rows, columns = weights.shape
    blocks = weights.reshape(rows, columns // precision.block, precision.block)
    if precision.bits == 8:
        codes, scales, zeros = _round_to_nearest(blocks, precision)
    else:
        weigh = None if importance is None else importance.reshape(1, -1, precision.block)
        codes, scales, zeros = _search(blocks, precision, weigh)
    packed_zeros = None if precision.symmetric else _pack(zeros, precision.bits)
    return QuantisedMatrix(precision, columns, _pack(codes, precision.bits), scales, packed_zeros)


def dequantise(matrix: QuantisedMatrix) -> FloatArray:
    """Float32 [rows, columns]: what MatMulNBits multiplies with."""
    bits = matrix.precision.bits
    codes = _unpack(matrix.codes, bits).astype(np.float32)
    if matrix.zero_points is None:
        codes -= matrix.precision.middle
    else:
        codes -= _unpack(matrix.zero_points, bits)[:, : matrix.scales.shape[1], None]
    return (codes * matrix.scales[..., None]).reshape(matrix.rows, matrix.columns)


def pack_nibbles(codes: ByteArray) -> ByteArray:
    """Two 4-bit codes a byte along the last axis, the first in the low half; an odd end is filled with zero."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def _pack(codes: ByteArray, bits: int) -> ByteArray:
    return pack_nibbles(codes) if bits == 4 else codes


def _unpack(packed: ByteArray, bits: int) -> ByteArray:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _round_to_nearest(blocks: FloatArray, precision: Precision) -> tuple[ByteArray, FloatArray, ByteArray]:
    """Symmetric: the largest magnitude takes the last code. Asymmetric: the range from minimum to maximum fits."""
    if precision.symmetric:
        scales = _positive(np.abs(blocks).max(axis=-1) / (precision.middle - 1))
        zeros = np.full(scales.shape, precision.middle, dtype=np.float32)
    else:
        low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
        scales = _positive((high - low) / precision.levels)
        zeros = np.clip(np.rint(-low / scales), 0, precision.levels)
    codes = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, precision.levels)
    return codes.astype(np.uint8), scales, zeros.astype(np.uint8)


def _search(
    blocks: FloatArray, precision: Precision, weigh: FloatArray | None
) -> tuple[ByteArray, FloatArray, ByteArray]:
    """Try several scales a block, refit each by least squares, keep the one with the smallest squared error."""
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    if precision.symmetric:
        extreme = np.where(-low > high, low, high)  # the sign with the larger magnitude gets the longer half, code 0
        start = np.where(extreme == 0, 1e-10, -extreme / precision.middle)
    else:
        start = _positive((high - low) / precision.levels)
    best: tuple[ByteArray, FloatArray, npt.NDArray[np.float32]] | None = None
    best_error = np.full(start.shape, np.inf, dtype=np.float32)
    for shrink in (1.0, 0.95, 0.9, 0.85, 0.8, 0.74):
        scales = (start * np.float32(shrink)).astype(np.float32)
        zeros = _zero_points(low, high, scales, precision)
        steps = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, precision.levels) - zeros[..., None]
        scales = _refit(blocks, steps, scales, weigh)
        error = _squared_error(blocks, steps, scales, weigh)
        if best is None:
            best = ((steps + zeros[..., None]).astype(np.uint8), scales, zeros)
            best_error = error
            continue
        better = error < best_error
        codes, best_scales, best_zeros = best
        codes[better] = (steps[better] + zeros[better][..., None]).astype(np.uint8)
        best_scales[better], best_zeros[better], best_error[better] = scales[better], zeros[better], error[better]
    assert best is not None
    return best[0], best[1], best[2].astype(np.uint8)


def _zero_points(low: FloatArray, high: FloatArray, scales: FloatArray, precision: Precision) -> FloatArray:
    if precision.symmetric:
        return np.full(scales.shape, precision.middle, dtype=np.float32)
    centred = precision.levels / 2 - (low + high) / 2 / scales
    return np.clip(np.rint(centred), 0, precision.levels).astype(np.float32)


def _refit(blocks: FloatArray, steps: FloatArray, scales: FloatArray, weigh: FloatArray | None) -> FloatArray:
    """The scale that fits these steps best: sum(w * weight * step) / sum(w * step^2)."""
    weighed = steps if weigh is None else steps * weigh
    square = np.einsum("nkb,nkb->nk", weighed, steps)
    fitted = np.einsum("nkb,nkb->nk", weighed, blocks) / np.where(square == 0, 1, square)
    return np.where((square == 0) | (fitted == 0), scales, fitted).astype(np.float32)


def _squared_error(blocks: FloatArray, steps: FloatArray, scales: FloatArray, weigh: FloatArray | None) -> FloatArray:
    miss = blocks - steps * scales[..., None]
    error: FloatArray = np.einsum("nkb,nkb->nk", miss if weigh is None else miss * weigh, miss)
    return error


def _positive(scales: FloatArray) -> FloatArray:
    """Scales of all-zero blocks set to one, so that nothing divides by zero."""
    return np.where(scales > 0, scales, 1).astype(np.float32)
