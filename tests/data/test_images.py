"""Image files in: sizes, values, and whatever else people call an image."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from moejax.config import VisionConfig
from moejax.data.images import MAX_PIXELS, load_patches, prepared, read_image, size_within
from moejax.data.media_tokens import IDS, image_text
from moejax.data.patches import (
    ImageError,
    PatchedImage,
    buffers,
    check_pads,
    feature_places,
    grouped_order,
    patched,
)

CFG = VisionConfig()


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def whole(image: PatchedImage) -> np.ndarray:
    """The (padded) picture [height, width, 3] put together from patches, slowly."""
    frames, rows, columns = image.grid
    p = image.pixels.shape[-1]
    out = np.zeros((rows * p, columns * p, 3), image.pixels.dtype)
    at = 0
    for row in range(0, rows, 2):
        for column in range(0, columns, 2):
            for r, c in ((0, 0), (0, 1), (1, 0), (1, 1)):
                y, x = (row + r) * p, (column + c) * p
                out[y : y + p, x : x + p] = image.pixels[at].transpose(1, 2, 0)
                at += 1
    assert at == len(image.pixels) and frames == 1
    return out


@pytest.mark.parametrize(
    "size, tokens", [((448, 448), 256), ((28, 28), 1), ((1, 1), 1), ((29, 28), 2), ((57, 30), 6)]
)
def test_tokens_of_an_image(size, tokens):
    image = prepared(noise(*size), CFG)
    assert image.num_tokens == tokens and image.num_patches == 4 * tokens


def test_an_image_is_padded_with_zeros_at_the_bottom_and_the_right():
    pixels = noise(30, 57)
    got = whole(prepared(pixels, CFG))
    assert got.shape == (56, 84, 3)
    np.testing.assert_array_equal(got[:30, :57], pixels)
    assert not got[30:].any() and not got[:, 57:].any()


@pytest.mark.parametrize(
    "size, patches, side, want",
    [
        ((500, 300), 65536, 512, (500, 300)),
        ((3640, 3640), 65536, 512, (3584, 3584)),
        ((20000, 14), 65536, 512, (7168, 5)),
        ((1, 14_336), 65536, 512, (1, 7168)),
        ((280, 280), 100, 512, (140, 140)),
        ((29, 29), 4, 512, (14, 14)),
        ((100, 100), 65536, 3, (28, 28)),
    ],
)
def test_sizes_within_the_limits(size, patches, side, want):
    assert size_within(*size, CFG.replace(max_patches=patches, max_side=side)) == want


def test_any_size_keeps_the_limits():
    rng, cfg = np.random.default_rng(0), CFG.replace(max_patches=64, max_side=12)
    for height, width in rng.integers(1, 3000, (300, 2)).tolist():
        new = size_within(height, width, cfg)
        rows, columns = (2 * -(-n // 28) for n in new)
        assert rows * columns <= 64 and max(rows, columns) <= 12
        assert 1 <= new[0] <= height and 1 <= new[1] <= width


def test_large_images_are_shrunk_by_cubic_interpolation():
    cfg, pixels = CFG.replace(max_patches=16), noise(112, 112)
    want = np.asarray(Image.fromarray(pixels).resize((56, 56), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(whole(prepared(pixels, cfg)), want)


PIXELS = noise(20, 30)
RGB = Image.fromarray(PIXELS)
GREY = Image.fromarray(PIXELS[..., 0])


def transparent() -> Image.Image:
    image = RGB.convert("RGBA")
    image.putalpha(Image.fromarray(np.where(PIXELS[..., 0] < 128, 0, 255).astype(np.uint8)))
    return image


def on_white(opaque: np.ndarray, pixels: np.ndarray = PIXELS) -> np.ndarray:
    return np.where(opaque[..., None], pixels, 255)


def palette(**options) -> tuple[bytes, np.ndarray]:
    image = RGB.quantize(16)
    return encoded(image, **options), np.asarray(image.convert("RGB"))


def kinds():
    opaque = PIXELS[..., 0] >= 128
    deep = (np.arange(600, dtype=np.uint16) * 109).reshape(20, 30)
    grey_alpha = Image.merge("LA", (GREY, transparent().getchannel("A")))
    plain, indexed = palette()
    clear, _ = palette(transparency=3)
    clear_at = np.asarray(RGB.quantize(16)) != 3
    turned = Image.Exif()
    turned[0x0112] = 6
    cmyk = RGB.convert("CMYK")
    repeat = lambda grey: np.repeat(grey[..., None], 3, -1)  # noqa: E731
    yield "rgb", encoded(RGB), PIXELS
    yield "grey", encoded(GREY), repeat(PIXELS[..., 0])
    yield "one bit", encoded(GREY.convert("1")), repeat(255 * np.asarray(GREY.convert("1")))
    yield "palette", plain, indexed
    yield "palette with a clear entry", clear, on_white(clear_at, indexed)
    yield "alpha", encoded(transparent()), on_white(opaque)
    yield "grey with alpha", encoded(grey_alpha), on_white(opaque, repeat(PIXELS[..., 0]))
    yield "16 bits", encoded(Image.fromarray(deep)), repeat(np.round(deep / 257))
    yield "CMYK", encoded(cmyk, "TIFF"), np.asarray(cmyk.convert("RGB"))
    yield "lying on its side", encoded(RGB, exif=turned), np.rot90(PIXELS, -1)
    yield "lossless webp", encoded(RGB, "WEBP", lossless=True), PIXELS


@pytest.mark.parametrize("name, data, want", [pytest.param(*k, id=k[0]) for k in kinds()])
def test_kinds_of_images_are_read_as_a_viewer_shows_them(name, data, want):
    got = read_image(data, name)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, want)


def test_a_cmyk_jpeg_shows_its_colours():
    flat = Image.new("RGB", (32, 32), (200, 60, 30)).convert("CMYK")
    got = read_image(encoded(flat, "JPEG", quality=95), "cmyk.jpg")
    assert np.abs(got.astype(int) - (200, 60, 30)).max() <= 4


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG that says it is so large, with any rows or none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def animated(kind: str) -> bytes:
    others = [Image.fromarray(noise(20, 30, seed)) for seed in (1, 2)]
    return encoded(RGB, kind, save_all=True, append_images=others)


JPEG = encoded(RGB, "JPEG")
REFUSED = {
    "nothing": (b"", "cannot be decoded"),
    "text": (b"not an image at all", "cannot be decoded"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "cannot be decoded"),
    "half a png": (encoded(RGB)[:600], "cannot be decoded"),
    "head only": (encoded(RGB)[:40], "cannot be decoded"),
    "no rows": (png(30, 20), "cannot be decoded"),
    "wide 0": (png(0, 20), "cannot be decoded|is empty"),
    "bomb": (png(50_000, 50_000), "cannot be decoded|too large"),
    "a little too large": (png(10_001, 10_000), "too large to decode"),
    "gif": (animated("GIF"), "holds 3 images"),
    "apng": (animated("PNG"), "holds 3 images"),
    "webp": (animated("WEBP"), "holds 3 images"),
    "pages": (animated("TIFF"), "holds 3 images"),
    "floats": (encoded(Image.fromarray(PIXELS[..., 0] / 3.0), "TIFF"), "floating-point"),
    "32 bits": (
        encoded(Image.fromarray(PIXELS[..., 0].astype(np.int32) << 20), "TIFF"),
        "whose range is not known",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(kind):
    data, why = REFUSED[kind]
    with pytest.raises(ImageError, match=rf"^data/x\.jsonl:7 cat\.png: .*({why})") as error:
        load_patches(data, "data/x.jsonl:7 cat.png", CFG)
    assert "\n" not in str(error.value)


def test_no_damage_raises_anything_else():
    """Bytes of files of six formats changed, cut and repeated at random."""
    rng = np.random.default_rng(0)
    files = [encoded(RGB, kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")]
    refused = 0
    for round in range(240):
        data = bytearray(files[round % 6])
        for _ in range(rng.integers(1, 12)):
            data[rng.integers(len(data))] = rng.integers(256)
        data = bytes(data[: rng.integers(1, len(data) + 1)]) if round % 3 == 0 else bytes(data)
        try:
            assert load_patches(data, "x", CFG).num_tokens >= 1
        except ImageError:
            refused += 1
    assert 60 <= refused < 240


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ImageError, match=r"^row 3: cannot be decoded \(FileNotFoundError"):
        load_patches(tmp_path / "gone.png", "row 3", CFG)


def test_files_of_the_largest_size_are_still_decoded():
    assert MAX_PIXELS == 10_000 * 10_000  # "a little too large" is one column more
    assert read_image(encoded(Image.new("1", (10_000, 1000))), "wide").shape == (1000, 10_000, 3)


def test_groups_and_plain_order_are_one_image():
    pixels = noise(56, 84)
    image = patched(pixels[None], 14)
    by_rows = pixels.reshape(4, 14, 6, 14, 3).transpose(0, 2, 4, 1, 3).reshape(24, 3, 14, 14)
    np.testing.assert_array_equal(image.pixels, by_rows[grouped_order((1, 4, 6))])


def test_images_fill_buffers_from_the_back():
    images = [patched(noise(4 * r, 4 * c, r)[None], 4) for r, c in ((4, 6), (2, 2), (6, 6), (2, 4))]
    out, starts = buffers(images, num_buffers=2, size=40, patch=4)
    ids = np.repeat([0, 1, 2, 3], [4, 24, 4, 8])
    np.testing.assert_array_equal(out.image_ids, [ids, np.repeat([0, 1], [4, 36])])
    assert starts == [1, 7, 11, 8]
    assert out.pixels.dtype == np.uint8 and out.frames is None
    for image, start in zip(images, starts, strict=True):
        span = slice(start * 4 % 40, start * 4 % 40 + image.num_patches)
        buffer = start * 4 // 40
        np.testing.assert_array_equal(out.pixels[buffer, span], image.pixels)
        row, column, rows, columns = out.places[buffer, span].T
        assert set(zip(rows, columns, strict=True)) == {image.grid[1:]}
        np.testing.assert_array_equal(row * columns + column, grouped_order(image.grid))


def test_frames_of_a_clip_share_their_tokens():
    still = patched(noise(8, 8)[None], 4)
    clip = patched(np.stack([noise(8, 16, seed) for seed in range(3)]), 4)
    assert clip.num_patches == 24 and clip.num_tokens == 2
    out, starts = buffers([still, clip], num_buffers=1, size=32, patch=4, clips=True)
    assert out.tokens.tolist() == [[-1, 1, 2, 3, 2, 3, 2, 3]] and starts == [1, 2]
    np.testing.assert_array_equal(out.frames[0], np.repeat([-1, -1, 0, 1, 2], [4, 4, 8, 8, 8]))
    with pytest.raises(ImageError, match="a clip of 3 frames"):
        buffers([clip], num_buffers=1, size=32, patch=4)


def test_images_that_do_not_fit_are_an_error():
    images = [patched(noise(16, 16)[None], 4)] * 3
    with pytest.raises(ImageError, match="image 3 of 3 has 16 patches, and 2 buffers of 28"):
        buffers(images, num_buffers=2, size=28, patch=4)


def test_pads_and_features_must_be_equal_in_number():
    images = [patched(noise(8, 16)[None], 4), patched(noise(8, 8)[None], 4)]
    tokens = np.array([5, 9, 9, 6, 9, 7])
    check_pads(tokens, 9, images, "a.jsonl:3")
    assert feature_places(tokens, 9, images, [4, 2]).tolist() == [-1, 4, 5, -1, 2, -1]
    with pytest.raises(
        ImageError, match=r"^a\.jsonl:3: 3 pad tokens \(id 9\) for 2 image features"
    ):
        check_pads(tokens, 9, images[:1], "a.jsonl:3")


def test_placeholders_of_the_families():
    pads = 2 * "<|media_pad|>"
    texts = [image_text(s, 2, width=56, height=28) for s in ("kimi_k3", "kimi_k25", "kimi_vl")]
    assert texts == [
        f"<|media_begin|>image 56x28<|media_content|>{pads}<|media_end|>",
        f"<|media_begin|>image<|media_content|>{pads}<|media_end|>\n",
        f"<|media_start|>image<|media_content|>{pads}<|media_end|>",
    ]
    assert sorted(IDS.values()) == [163602, 163603, 163604, 163605]
