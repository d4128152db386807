"""Codecs against numbers computed elsewhere, bit for bit, and against their own inverse."""

import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from moejax.checkpoint import CheckpointError
from moejax.checkpoint.hf_folder import HfFolder
from moejax.checkpoint.quant import (
    fp8_block_decode,
    fp8_block_encode,
    mxfp4_decode,
    mxfp4_encode,
    mxfp4_scales,
)

ORACLES = pathlib.Path(__file__).parents[1] / "fixtures" / "oracles"
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float32), BF16)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def k3():
    return HfFolder(ORACLES / "k3_mxfp4")


@pytest.fixture(scope="module")
def v32():
    return HfFolder(ORACLES / "deepseek_v32_fp8")


def packed_names(folder):
    return [n.removesuffix("_packed") for n in folder.keys() if n.endswith("weight_packed")]


def fp8_names(folder):
    return [name for name, (dtype, _) in folder.keys().items() if dtype == "F8_E4M3"]


def test_every_mxfp4_code_under_every_scale():
    oracle = np.load(ORACLES / "k3_mxfp4" / "codec.npz")
    low, scales = oracle["code"], oracle["scale_byte"]
    for high in range(16):
        packed = np.tile(low | np.uint8(high << 4), (255, 1))
        values = mxfp4_decode(packed, scales[:, None])
        finite = oracle["finite"].T.astype(bool)
        assert same_bits(values[:, ::2][finite], oracle["value"].T[finite])
        assert np.isinf(values[:, ::2][~finite]).all()
        assert same_bits(values[:, 1::2], np.tile(values[:, [2 * high]], (1, 16)))
        halves = mxfp4_decode(packed, scales[:, None], BF16)
        assert same_bits(halves[:, ::2][finite].view(np.uint16), oracle["bf16_bits"].T[finite])
    example = mxfp4_decode(oracle["example_packed"], oracle["example_scale"])
    assert same_bits(example, oracle["example_value"])
    assert np.isnan(mxfp4_decode(packed[:1], np.full((1, 1), 255, np.uint8))).all()


def test_mxfp4_weights_equal_another_decoder_and_pack_to_their_bytes(k3):
    want = load_file(ORACLES / "k3_mxfp4" / "dequantised_layer_2.safetensors")
    checked = set()
    for name in packed_names(k3):
        packed, scales = k3.read(name + "_packed"), k3.read(name + "_scale")
        values = mxfp4_decode(packed, scales)
        halves = mxfp4_decode(packed, scales, BF16)
        assert same_bits(halves.astype(np.float32), values)
        if name in want:
            assert same_bits(values, want[name])
            checked.add(name)
        for given_values in (values, halves):
            again, kept = mxfp4_encode(given_values, scales)
            assert same_bits(again, packed) and kept is scales
        rows = slice(3, 11)
        part = mxfp4_decode(k3.read(name + "_packed", rows), k3.read(name + "_scale", rows))
        assert same_bits(part, values[rows])
        # Chosen anew, scales may differ; the values may not.
        assert same_bits(mxfp4_decode(*mxfp4_encode(values)), values)
    assert checked == set(want) and len(want) > 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_rounds_to_the_nearest_code_and_ties_to_the_even_one(dtype):
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scale = 2.0**-9
    inside = np.linspace(-7.75, 7.75, 32 * 31 + 1)[:-1].reshape(31, 32).astype(dtype)
    ties = np.resize([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, -0.0], 32).astype(dtype)
    values = np.concatenate([inside, ties[None]]).astype(np.float32)
    values[:, 0] = 6  # fixes the scale of every block
    packed, scales = mxfp4_encode((values * scale).astype(dtype))
    assert (scales == 127 - 9).all()
    got = mxfp4_decode(packed, scales) / scale
    distance = np.abs(np.abs(values)[..., None] - grid)
    assert np.array_equal(np.abs(np.abs(values) - np.abs(got)), distance.min(-1))
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, 4.0, 0.0]
    assert np.array_equal(np.abs(got[-1, 1:10]), even[1:])
    assert np.array_equal(np.signbit(got), np.signbit(values))


def test_mxfp4_scales_at_the_ends_of_float32():
    tops = np.array([0, 2**-149, 2**-126, 0.5, 6, 7.99, 8, 3.4e38], np.float32)
    blocks = np.zeros((8, 32), np.float32)
    blocks[:, 5] = tops
    assert mxfp4_scales(blocks)[:, 0].tolist() == [127, 0, 0, 124, 127, 127, 128, 252]
    assert not mxfp4_decode(*mxfp4_encode(blocks[:2])).any()
    # Beyond 6 the code of 6 is the nearest that there is.
    assert mxfp4_decode(*mxfp4_encode(blocks[7:]))[0, 5] == 6 * 2.0**125


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 251), st.sampled_from(DTYPES))
def test_what_came_from_mxfp4_is_encoded_without_loss(seed, scale, dtype):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (3, 32), np.uint8)
    packed[0, :16] &= rng.integers(0, 256, dtype=np.uint8)  # few distinct codes, often all zero
    scales = rng.integers(scale, scale + 2, (3, 2)).astype(np.uint8)
    values = mxfp4_decode(packed, scales, dtype)
    assert same_bits(mxfp4_decode(*mxfp4_encode(values), dtype), values)


def test_every_fp8_code():
    oracle = np.load(ORACLES / "deepseek_v32_fp8" / "codec.npz")
    codes = oracle["code"].reshape(2, 128)
    values = fp8_block_decode(codes, np.ones((1, 1), np.float32)).reshape(-1)
    nan = oracle["is_nan"].astype(bool)
    assert np.array_equal(np.isnan(values), nan)
    assert same_bits(values[~nan], oracle["value_0_where_nan"][~nan])
    again, _ = fp8_block_encode(values[None], np.ones((1, 2), np.float32))
    assert np.array_equal(again.view(np.uint8)[0][~nan], oracle["code"][~nan])
    assert np.isnan(fp8_block_decode(codes, np.ones((1, 1), np.float32), dtype=BF16)).sum() == 2


def test_fp8_weights_equal_another_decoder_and_give_their_codes_back(v32):
    want = load_file(ORACLES / "deepseek_v32_fp8" / "dequantised_some.safetensors")
    checked = set()
    for name in fp8_names(v32):
        codes, scales = v32.read(name), v32.read(name + "_scale_inv")
        values = fp8_block_decode(codes, scales)
        if name in want:
            assert same_bits(values, want[name])
            checked.add(name)
        halves = fp8_block_decode(codes, scales, dtype=BF16)
        assert same_bits(halves, values.astype(BF16))
        for given_values in (values, halves):
            again, _ = fp8_block_encode(given_values, scales)
            assert same_bits(again, codes)
        rows = slice(codes.shape[0] // 2 - 5, codes.shape[0])
        part = fp8_block_decode(v32.read(name, rows), scales, first_row=rows.start)
        assert same_bits(part, values[rows])
    assert checked == set(want) and len(want) > 3


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (146, 160), (256, 136), (3, 300), (0, 5)])
def test_fp8_error_is_half_a_step_of_the_block(shape):
    rng = np.random.default_rng(1)
    values = rng.normal(size=shape).astype(np.float32)
    values[: shape[0] // 2] *= 1e-4
    codes, scales = fp8_block_encode(values)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    got = fp8_block_decode(codes, scales)
    # 3 bits after the point: 2^-4 relative, in the subnormals 2^-10 of the scale.
    step = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]
    assert (np.abs(got - values) <= np.maximum(np.abs(values) * 2**-4, step * 2**-10) * 1.001).all()
    zero, one = fp8_block_encode(np.zeros(shape, np.float32))
    assert (one == 1).all() and not fp8_block_decode(zero, one).any()


def test_shapes_that_do_not_fit_are_refused():
    u8, f32 = np.uint8, np.float32
    for call in (
        lambda: mxfp4_decode(np.zeros((2, 16), u8), np.zeros((2, 2), u8)),
        lambda: mxfp4_decode(np.zeros((2, 16), u8), np.zeros((3, 1), u8)),
        lambda: mxfp4_decode(np.zeros((2, 16), u8), np.zeros((2, 1), u8), np.float64),
        lambda: mxfp4_encode(np.zeros((2, 33), f32)),
        lambda: mxfp4_encode(np.zeros((2, 32), f32), np.zeros((2, 2), u8)),
        lambda: mxfp4_encode(np.full((1, 32), np.nan, f32)),
        lambda: mxfp4_encode(np.full((1, 32), np.inf, f32), np.zeros((1, 1), u8)),
        lambda: fp8_block_decode(np.zeros((2, 200), u8), np.ones((1, 1), f32)),
        lambda: fp8_block_decode(np.zeros((2, 100), u8), np.ones((1, 1), f32), first_row=127),
        lambda: fp8_block_encode(np.zeros(5, f32)),
    ):
        with pytest.raises(CheckpointError) as error:
            call()
        assert "\n" not in str(error.value)
