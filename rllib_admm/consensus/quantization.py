"""Block codecs: a vector as small integers with one scale per block.

Symmetric rounding to nearest with the block's largest magnitude as full scale
(as in block-wise 8-bit optimizers, Dettmers et al. 2022, with a linear code). Knows
vectors only: what is encoded (differences, not states) is the consensus' affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
"""Elements per block. Larger: less overhead (one scale per block), coarser values."""

SUPPORTED_BITS = (32, 16, 8, 4)


@dataclass(frozen=True)
class Encoded:
    """A vector of `count` numbers as `codes` and `scales`, a row per block.

    Attributes:
        codes: uint8, shape (blocks, bytes per block).
        scales: The vector's dtype, shape (blocks,). Ones for the 32-bit codec.
        count: P, the length of the vector (the last block is padded with zeros).
        bits: Bits per element; 32 means "uncompressed in the vector's own dtype".
        dtype: dtype of the decoded vector.
    """

    codes: np.ndarray
    scales: np.ndarray
    count: int
    bits: int
    dtype: torch.dtype


def block_bytes(bits: int, dtype: torch.dtype) -> int:
    """Returns the bytes that the codes of one block take."""
    return BLOCK * dtype.itemsize if bits == 32 else BLOCK * bits // 8


def encode(x: Tensor, bits: int) -> Encoded:
    """Encodes the vector `x`, shape (P,), with `bits` per element.

    The decoded value is within half a step of the value, a step being the block's
    largest magnitude over 2^(bits-1) - 1, and never has the opposite sign. A block whose
    step is below the smallest normal number of its dtype decodes to zeros. NaN or infinity
    in a block makes some of its decoded values non-finite, which receivers refuse.

    Args:
        x: float32 or float64 vector, finite.
        bits: 32 (uncompressed), 16, 8 or 4.

    Raises:
        ValueError: If `bits` or the dtype is not supported.
    """
    if bits not in SUPPORTED_BITS:
        raise ValueError(f"bits must be one of {SUPPORTED_BITS}, not {bits!r}.")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"A vector to encode must be float32 or float64, not {x.dtype}.")
    count = x.numel()
    blocks = -(-count // BLOCK)
    rows = torch.zeros(blocks * BLOCK, dtype=x.dtype)
    rows[:count] = x.detach()
    rows = rows.view(blocks, BLOCK)
    if bits == 32:
        return Encoded(
            rows.numpy().view(np.uint8), np.ones(blocks, rows.numpy().dtype), count, 32, x.dtype
        )
    top = 2 ** (bits - 1) - 1
    scales = rows.abs().amax(dim=1) / top
    # Next to the largest float the division may round up, and top * scale overflow.
    overflows = torch.isfinite(scales) & torch.isinf(scales * top)
    scales = torch.where(overflows, torch.nextafter(scales, torch.zeros_like(scales)), scales)
    # A subnormal scale has too few digits to keep the error within half a step: all codes of
    # such a block round to 0.
    tiny = scales < torch.finfo(x.dtype).tiny
    scales[tiny] = 0
    codes = (rows / torch.where(tiny, torch.ones_like(scales), scales)[:, None]).round_()
    codes.clamp_(-top, top)
    # What NaN becomes as an integer is undefined; its block's scale is NaN already.
    codes.nan_to_num_(nan=0.0)
    packed: np.ndarray
    if bits == 16:
        packed = codes.to(torch.int16).numpy().view(np.uint8)
    elif bits == 8:
        packed = codes.to(torch.int8).numpy().view(np.uint8)
    else:
        nibbles = codes.to(torch.int8).numpy().view(np.uint8) & 0xF
        packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return Encoded(packed, scales.numpy(), count, bits, x.dtype)


def decode(encoded: Encoded) -> Tensor:
    """Returns the vector, shape (P,), that `encoded` stands for (a new tensor)."""
    codes, bits = np.ascontiguousarray(encoded.codes), encoded.bits
    if bits == 32:
        values = codes.view(torch.empty(0, dtype=encoded.dtype).numpy().dtype)
        return torch.from_numpy(values.reshape(-1)[: encoded.count].copy())
    if bits == 16:
        integers = codes.view(np.int16)
    elif bits == 8:
        integers = codes.view(np.int8)
    else:
        integers = np.empty((codes.shape[0], BLOCK), np.int8)
        # Shifting up and arithmetically down again restores the nibble's sign.
        integers[:, 0::2] = (codes << 4).view(np.int8) >> 4
        integers[:, 1::2] = codes.view(np.int8) >> 4
    scales = torch.from_numpy(np.array(encoded.scales))
    values_ = torch.from_numpy(integers.copy()).to(encoded.dtype) * scales[:, None]
    return values_.reshape(-1)[: encoded.count].clone()
