"""Facts that hold for every block codec, and for layouts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rllib_admm.consensus import SUPPORTED_BITS, Layout, decode, encode
from rllib_admm.consensus.quantization import BLOCK, block_bytes

DTYPES = (torch.float32, torch.float64)
SIZES = (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)

codecs = st.tuples(st.sampled_from(SUPPORTED_BITS), st.sampled_from(DTYPES))


@st.composite
def vectors(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Vectors of any size, mixed from ordinary, zero, huge, tiny and subnormal values."""
    size = draw(st.sampled_from(SIZES))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    info = torch.finfo(dtype)
    # One magnitude per element or per vector, from the smallest subnormal to the largest float.
    low, high = math.log2(info.tiny) - info.bits // 3, math.log2(info.max)
    exponent = draw(st.one_of(st.just(0.0), st.floats(low, high)))
    spread = draw(st.sampled_from((0.0, 3.0, 60.0)))
    powers = (exponent + spread * torch.randn(size, generator=g, dtype=torch.float64)).clamp_(
        low, high
    )
    x = torch.randn(size, generator=g, dtype=torch.float64) * torch.exp2(powers)
    x = x.clamp_(-info.max, info.max).to(dtype)
    special = (0.0, -0.0, info.max, -info.max, info.tiny, info.tiny / 4)
    for _ in range(draw(st.integers(0, 3))):
        if size:
            index = draw(st.integers(0, size - 1))
            x[index] = draw(st.sampled_from(special))
    if draw(st.booleans()):
        x[:BLOCK] = 0
    return x


def steps(x: Tensor, bits: int) -> Tensor:
    """The step of each element's block, shape (P,) float64, from the definition."""
    top = 2 ** (bits - 1) - 1
    blocks = x.double().abs().split(BLOCK)
    return torch.cat(
        [b.max().expand(len(b)) / top for b in blocks if len(b)] or [torch.zeros(0).double()]
    )


@given(st.data(), codecs)
@settings(max_examples=150, deadline=None)
def test_the_error_is_at_most_half_a_step_and_the_sign_is_kept(data, codec):
    bits, dtype = codec
    x = data.draw(vectors(dtype))
    y = decode(encode(x, bits))
    assert y.dtype == dtype and y.shape == x.shape
    assert torch.isfinite(y).all()
    assert not (torch.sign(x) * torch.sign(y) < 0).any()
    if bits == 32:
        assert torch.equal(x, y)
        return
    step = steps(x, bits)
    top, info = 2 ** (bits - 1) - 1, torch.finfo(dtype)
    # The division and the product round, each by a relative eps of at most `top` steps.
    slack = 1 + 4 * top * info.eps
    tiny = step < info.tiny * (1 + 1e-6)
    error = (x.double() - y.double()).abs()
    assert (error[~tiny] <= 0.5 * step[~tiny] * slack).all()
    assert (error[tiny] <= top * info.tiny * (1 + 1e-6)).all()


@given(st.data(), codecs)
@settings(max_examples=80, deadline=None)
def test_values_on_the_grid_stay_where_they_are(data, codec):
    bits, dtype = codec
    first = encode(data.draw(vectors(dtype)), bits)
    again = encode(decode(first), bits)
    # A decoded block's step can come out one rounding smaller, right where steps underflow.
    kept = again.scales >= torch.finfo(dtype).tiny
    assert np.array_equal(first.codes[kept], again.codes[kept])
    assert np.allclose(first.scales[kept], again.scales[kept], rtol=1e-6, atol=0)
    assert (first.scales[~kept] <= 2 * torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_every_integer_of_the_code_is_reached_exactly(bits, dtype):
    top = 2 ** (min(bits, 16) - 1) - 1
    x = torch.linspace(-top, top, min(2 * top + 1, BLOCK)).round().to(dtype) * 2.0**-9
    assert torch.equal(decode(encode(x, bits)), x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_the_wire_takes_bits_per_element_and_one_scale_per_started_block(bits, size):
    encoded = encode(torch.ones(size), bits)
    blocks = math.ceil(size / BLOCK)
    assert encoded.codes.shape == (blocks, block_bytes(bits, torch.float32))
    assert encoded.codes.nbytes == blocks * BLOCK * bits // 8
    assert encoded.scales.shape == (blocks,) and encoded.scales.dtype == np.float32
    # What pads the last block is not part of the vector, whatever it holds.
    encoded.codes.reshape(-1)[size * bits // 8 + 1 :] = 0x55
    assert torch.equal(decode(encoded), torch.ones(size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_the_largest_float_does_not_overflow(bits, dtype):
    top = torch.finfo(dtype).max
    y = decode(encode(torch.tensor([top, -top, 1.0], dtype=dtype), bits))
    assert torch.isfinite(y).all()
    assert y[0] >= top * (1 - 1e-5) and y[1] == -y[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_a_non_finite_value_can_not_pass_for_a_number(bits, bad):
    x = torch.ones(BLOCK + 5)
    x[3] = bad
    y = decode(encode(x, bits))
    assert not torch.isfinite(y[:BLOCK]).all()
    assert torch.equal(y[BLOCK:], x[BLOCK:])


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_encoding_neither_changes_nor_shares_its_argument(bits):
    x = torch.randn(2 * BLOCK, requires_grad=True)
    before = x.detach().clone()
    encoded = encode(x, bits)
    encoded.codes[:] = 0
    assert torch.equal(x.detach(), before)
    first = decode(encoded)
    first.add_(1.0)
    assert torch.equal(decode(encoded), torch.zeros(2 * BLOCK))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_a_strided_vector_is_encoded_as_it_reads(bits):
    x = torch.randn(600)[::2]
    assert torch.equal(decode(encode(x, bits)), decode(encode(x.contiguous(), bits)))


def test_other_widths_and_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"bits must be one of \(32, 16, 8, 4\), not 7"):
        encode(torch.ones(3), 7)
    with pytest.raises(ValueError, match=r"float32 or float64, not torch\.bfloat16"):
        encode(torch.ones(3, dtype=torch.bfloat16), 8)


def test_a_layout_puts_tensors_into_one_vector_and_back():
    tensors = {"w": torch.randn(2, 3), "scalar": torch.randn(()), "none": torch.randn(0, 4)}
    layout = Layout.of(tensors)
    assert (layout.size, layout.offsets) == (7, (0, 6, 7))
    flat = layout.flatten(tensors.values())
    assert torch.equal(flat, torch.cat([t.reshape(-1) for t in tensors.values()]))
    back = [torch.zeros_like(t) for t in tensors.values()]
    layout.write(flat, back)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors.values(), strict=True))


def test_a_layouts_hash_depends_on_names_order_shapes_and_dtype_and_nothing_else():
    a, b = torch.zeros(2, 3), torch.zeros(3)
    base = Layout.of({"a": a, "b": b})
    assert base.hash == Layout.of({"a": a + 1, "b": b - 1}).hash
    others = [
        Layout.of({"b": b, "a": a}),
        Layout.of({"a": a, "c": b}),
        Layout.of({"a": a.T, "b": b}),
        Layout.of({"a": a.double(), "b": b.double()}),
        Layout.of({"a": a}),
    ]
    assert len({base.hash, *(o.hash for o in others)}) == 6


def test_a_layout_broadcasts_nothing():
    layout = Layout.of({"a": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"shape \(1,\) lies where the layout has \(3,\)"):
        layout.flatten([torch.zeros(1)])
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        layout.write(torch.zeros(3), [torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="one dtype"):
        Layout.of({"a": torch.zeros(1), "b": torch.zeros(1).double()})
    with pytest.raises(ValueError, match="1 names have 0 shapes"):
        Layout(("a",), (), torch.float32)
