"""What every kind of image file becomes, pixel by pixel."""

import contextlib
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from precompute.images.decode import (
    FORMATS,
    MID_GREY,
    RESAMPLING,
    SUFFIXES,
    ImageConfig,
    decode_image,
    fit_image,
    to_pixels,
)
from precompute.images.rejected import Rejected
from tests.precompute.images.hostile_images import PNG_MAGIC, grey_tiff, png, png_chunk, save

LIMIT = 10**6

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # as `silence_decoders` does in a build


def decode(data: bytes) -> np.ndarray:
    return to_pixels(decode_image(data, LIMIT))


def gradient(height: int = 16, width: int = 24) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([y * 255 // (height - 1), x * 255 // (width - 1), (x + y) % 256], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("format_", ["PNG", "BMP", "TIFF", "GIF", "WEBP", "JPEG2000", "PPM", "TGA"])
def test_lossless_formats_give_their_pixels(format_):
    pixels = gradient() if format_ != "GIF" else gradient() // 255 * 255
    options = {"lossless": True} if format_ == "WEBP" else {}
    np.testing.assert_array_equal(decode(save(Image.fromarray(pixels), format_, **options)), pixels)


UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].swapaxes(0, 1),
    8: lambda stored: np.rot90(stored),
}
"""By EXIF's number, where its 0th row and column are: 5 has them left and top, 7 right and bottom, and so on."""


LOSSY = {"JPEG", "MPO", "AVIF"}


@pytest.mark.parametrize("format_", ["JPEG", "MPO", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(10))
def test_every_exif_orientation_is_turned_upright(orientation, format_):
    """Numbers that EXIF does not have turn nothing. AVIF has boxes of its own for it, irot and imir."""
    stored = gradient() if format_ not in LOSSY else np.kron(gradient(2, 3), np.ones((16, 16, 1), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {
        "WEBP": {"lossless": True},
        "JPEG": {"quality": 95, "subsampling": 0},
        "MPO": {"quality": 95, "subsampling": 0, "save_all": True, "append_images": [Image.new("RGB", (8, 8))]},
        "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    }.get(format_, {})
    decoded = decode(save(Image.fromarray(stored), format_, exif=exif, **options))
    expected = UPRIGHT.get(orientation, UPRIGHT[1])(stored)
    assert decoded.shape == expected.shape
    assert np.abs(decoded.astype(int) - expected).max() <= (4 if format_ in LOSSY else 0)


@pytest.mark.parametrize(
    ("format_", "order"), [("PNG", "<"), ("JPEG2000", "<"), ("PPM", "<"), ("TIFF", "<"), ("TIFF", ">")]
)
def test_sixteen_bit_grey_keeps_256_levels(format_, order):
    levels = np.arange(0, 65_536, 257, dtype=f"{order}u2").reshape(16, 16)
    image = Image.frombytes("I;16" if order == "<" else "I;16B", (16, 16), levels.tobytes())
    np.testing.assert_array_equal(decode(save(image, format_))[..., 0], np.arange(256).reshape(16, 16))


def netpbm(kind: int, values: np.ndarray, maximum: int) -> bytes:
    """Plain and binary images of one another's pixels; `kind` is the digit of the magic."""
    height, width, *_ = values.shape
    head = b"P%d\n# made here\n%d %d\n" % (kind, width, height) + (b"" if kind in (1, 4) else b"%d\n" % maximum)
    if kind == 4:
        return head + np.packbits(values, axis=1).tobytes()
    if kind > 4:
        return head + values.astype(np.uint8 if maximum < 256 else ">u2").tobytes()
    return head + b"\n".join(b"%d # said\n" % value for value in values.ravel())


@pytest.mark.parametrize("maximum", [1, 15, 100, 255, 256, 4_095, 65_535])
@pytest.mark.parametrize(("plain", "channels"), [(2, 1), (3, 3)])
def test_netpbm_of_any_maximum_goes_from_black_to_white(maximum, plain, channels):
    values = np.linspace(0, maximum, 5 * 4 * channels).astype(int).reshape(5, 4, channels)
    decoded = decode(netpbm(plain, values, maximum))
    assert np.abs(decoded - values * 255 / maximum).max() < 1.01
    assert decoded.min() == 0
    assert decoded.max() == 255
    np.testing.assert_array_equal(decode(netpbm(plain + 3, values, maximum)), decoded)


def test_a_bilevel_netpbm_has_black_ones_plain_or_binary():
    values = np.random.default_rng(0).integers(0, 2, (5, 11))
    for kind in (1, 4):
        np.testing.assert_array_equal(decode(netpbm(kind, values, 1))[..., 0], 255 - 255 * values)
    digits = b"P1 11 5 " + b"".join(b"%d" % value for value in values.ravel())
    np.testing.assert_array_equal(decode(digits)[..., 0], 255 - 255 * values)


def test_values_above_a_netpbms_maximum_are_rejected():
    for kind in (2, 5):
        with pytest.raises(Rejected, match="values above its maximum, 100"):
            decode(netpbm(kind, np.full((2, 2), 101), 100))


def test_a_jpeg_with_an_index_of_pictures_is_its_first():
    """Phones and stereo cameras write such files under any JPEG's name."""
    image = Image.fromarray(np.kron(gradient(2, 3), np.ones((16, 16, 1), np.uint8)))
    many = save(image, "MPO", save_all=True, append_images=[Image.new("RGB", (32, 32))], quality=90)
    assert many[:3] == b"\xff\xd8\xff"
    np.testing.assert_array_equal(decode(many), decode(save(image, "JPEG", quality=90)))
    damaged = many.replace(b"MPF\0II*\0", b"MPF\0II*\7", 1)
    np.testing.assert_array_equal(decode(damaged), decode(many))


def test_every_suffix_is_one_of_its_format():
    Image.init()
    formats = {Image.registered_extensions()[suffix] for suffix in SUFFIXES}
    assert formats == {*FORMATS, "MPO"}  # which Pillow reads as JPEG


@pytest.mark.parametrize("no_jp2", [False, True])
def test_a_jpeg_2000_that_lacks_tiles_is_rejected(no_jp2):
    data = save(Image.fromarray(gradient(64, 64)), "JPEG2000", tile_size=(32, 32), no_jp2=no_jp2)
    tile = data.rindex(b"\xff\x90\0\x0a")
    for cut in (data[:tile], data[:tile] + b"\xff\xd9"):
        with pytest.raises(Rejected, match="cannot decode: cut short"):
            decode(cut)
    with pytest.raises(Rejected, match="cannot decode: cut short"):
        decode(data[:-2])


def test_grey_and_bilevel_images_become_equal_channels():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = decode(save(Image.fromarray(grey), "PNG"))
    assert (pixels == grey[..., None]).all()
    bilevel = decode(save(Image.fromarray(grey).convert("1", dither=Image.Dither.NONE), "PNG"))
    assert set(np.unique(bilevel)) == {0, 255}


@pytest.mark.parametrize("format_", ["PNG", "JPEG2000", "TGA", "WEBP"])
def test_alpha_lies_on_white(format_):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[..., 0], pixels[:2, :, 3] = 255, 255
    decoded = decode(save(Image.fromarray(pixels), format_, **({"lossless": True} if format_ == "WEBP" else {})))
    assert (decoded[:2] == [255, 0, 0]).all()
    assert (decoded[2:] == 255).all()


def test_half_transparent_black_on_white_is_mid_grey():
    data = save(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "PNG")
    assert np.abs(decode(data).astype(int) - 127).max() <= 1


def test_a_palette_with_a_transparent_entry_lies_on_white():
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 1), 1)
    decoded = decode(save(image, "PNG", transparency=0))
    assert tuple(decoded[1, 1]) == (200, 100, 50)
    assert (decoded[0] == 255).all()


def test_grey_with_alpha_lies_on_white():
    assert (decode(save(Image.new("LA", (4, 4), (0, 0)), "PNG")) == 255).all()


def test_cmyk_jpeg_has_the_colours_of_its_ink():
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    assert np.abs(decode(save(cyan, "JPEG", quality=95)).mean((0, 1)) - [0, 255, 255]).max() < 4


@pytest.mark.parametrize("format_", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_an_animation_gives_its_first_frame(format_):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("white", "blue")]
    decoded = decode(save(frames[0], format_, save_all=True, append_images=frames[1:]))
    assert (decoded == 255).all()


@pytest.mark.parametrize("format_", FORMATS)
def test_truncated_files_fail_instead_of_ending_in_grey(format_):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    data = save(noise, format_)
    with pytest.raises(Rejected, match="cannot decode"):
        decode(data[: len(data) // 2])


@pytest.mark.parametrize("missing", range(1, 22))
def test_a_png_that_lacks_its_last_bytes_is_rejected(missing):
    """Its last chunk has 12 bytes, the data before it at least as many."""
    data = save(Image.fromarray(gradient()), "PNG")
    with pytest.raises(Rejected, match="cannot decode: cut short: its last chunk, IEND, is missing or not whole"):
        decode(data[:-missing])


def test_a_png_with_bytes_behind_its_end_is_the_same_image():
    data = save(Image.fromarray(gradient()), "PNG")
    for behind in (b"\0", b"\n", bytes(20), data):
        np.testing.assert_array_equal(decode(data + behind), gradient())


def test_a_reason_holds_no_address():
    for data in (b"\x01\x02 no image", save(Image.fromarray(gradient()), "JPEG")[:300]):
        with pytest.raises(Rejected) as rejected:
            decode(data)
        assert "0x" not in rejected.value.reason


def test_a_decompression_bomb_is_rejected_from_its_header():
    """A PNG that claims 100,000 x 100,000 pixels in 45 bytes."""
    with pytest.raises(Rejected, match="too large: 100000 x 100000 pixels"):
        decode_image(png(100_000, 100_000, data=b""), ImageConfig().max_pixels)


@pytest.mark.parametrize("value", [-1, 255, 65_535, 65_536])
def test_a_tiff_of_32_bit_integers_is_rejected_whatever_its_values(value):
    with pytest.raises(Rejected, match="signed or 32-bit integer pixels have no agreed range"):
        decode(save(Image.fromarray(np.array([[0, value]], np.int32)), "TIFF"))


SIGNED, UNSIGNED = 2, 1


@pytest.mark.parametrize(("bits", "kind"), [(16, SIGNED), (32, SIGNED), (32, UNSIGNED)])
def test_signed_and_32_bit_tiffs_are_rejected_unsigned_16_bits_read(bits, kind):
    levels = np.array([0, 100, 200, 255])
    with pytest.raises(Rejected, match="signed or 32-bit integer pixels have no agreed range"):
        decode(uncompressed_tiff(levels, bits, kind))
    np.testing.assert_array_equal(decode(uncompressed_tiff(levels << 8, 16, UNSIGNED))[0, :, 0], levels)


def uncompressed_tiff(levels: np.ndarray, bits: int, kind: int) -> bytes:
    stored = levels.astype(f"<i{bits // 8}").tobytes()
    tags = {258: (3, 1, bits), 278: (3, 1, 1), 279: (4, 1, len(stored)), 339: (3, 1, kind)}
    behind = len(grey_tiff(len(levels), 1, {**tags, 273: (4, 1, 0)}))
    return grey_tiff(len(levels), 1, {**tags, 273: (4, 1, behind)}) + stored


def test_floating_point_pixels_are_rejected():
    with pytest.raises(Rejected, match="unsupported pixels"):
        decode(save(Image.new("F", (4, 4), 0.5), "TIFF"))


@pytest.mark.parametrize("fit", ["squash", "crop", "pad"])
def test_every_fit_gives_the_size_asked_for(fit):
    recipe = ImageConfig(height=16, width=32, fit=fit).recipe
    assert fit_image(Image.fromarray(gradient(50, 40)), recipe).size == (32, 16)


@pytest.mark.parametrize("name", RESAMPLING)
def test_a_filter_is_pillows_of_that_name(name):
    image, recipe = Image.fromarray(gradient(50, 40)), ImageConfig(height=16, width=32, resample=name).recipe
    expected = image.resize((32, 16), Image.Resampling[name.upper()])
    np.testing.assert_array_equal(to_pixels(fit_image(image, recipe)), to_pixels(expected))


def test_an_image_of_just_so_many_pixels_is_decoded():
    data = save(Image.fromarray(gradient()), "PNG")
    assert decode_image(data, 16 * 24).size == (24, 16)
    with pytest.raises(Rejected, match="too large"):
        decode_image(data, 16 * 24 - 1)


def test_the_transparent_colour_of_an_rgb_png_lies_on_white():
    pixels = gradient()
    data = save(Image.fromarray(pixels), "PNG", transparency=tuple(pixels[3, 5].tolist()))
    pixels[3, 5] = 255
    np.testing.assert_array_equal(decode(data), pixels)


def test_squash_crop_and_pad_keep_whole_middle_and_aspect():
    pixels = np.zeros((32, 96, 3), np.uint8)
    pixels[:, :32], pixels[:, 32:64], pixels[:, 64:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    image = Image.fromarray(pixels)

    def fitted(fit: str) -> np.ndarray:
        recipe = ImageConfig(height=32, width=32, fit=fit, resample="box").recipe
        return to_pixels(fit_image(image, recipe))

    assert set(map(tuple, fitted("crop").reshape(-1, 3).tolist())) == {(0, 255, 0)}
    assert tuple(fitted("squash")[16, 1]) == (255, 0, 0)
    assert tuple(fitted("squash")[16, 30]) == (0, 0, 255)
    assert tuple(fitted("pad")[0, 16]) == (MID_GREY,) * 3
    assert tuple(fitted("pad")[16, 1]) == (255, 0, 0)


@pytest.mark.parametrize("size", [(32, 96), (96, 32), (32, 33), (33, 32), (32, 97), (131, 64)])
def test_a_crop_is_the_middle_whichever_side_is_longer(size):
    """By symmetry, to rounding: upside down and mirrored, the image gives the crop upside down and mirrored."""
    image = Image.fromarray(gradient(*size))
    recipe = ImageConfig(height=32, width=32, fit="crop").recipe
    crop, turned = (to_pixels(fit_image(each, recipe)) for each in (image, image.transpose(Image.Transpose.ROTATE_180)))
    assert np.abs(crop.astype(int) - turned[::-1, ::-1]).max() <= 1


def test_the_transparent_level_of_a_sixteen_bit_png_lies_on_white():
    levels = np.full((4, 4), 1_000, np.uint16)
    levels[0] = 40_000
    decoded = decode(save(Image.fromarray(levels), "PNG", transparency=1_000))
    assert (decoded[0] == 40_000 >> 8).all()
    assert (decoded[1:] == 255).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("transparent", [0, 1])
def test_the_transparent_level_of_any_depth_lies_on_white(bits, transparent):
    """A row of every level, or of 256 of them; the transparent one counts by its lowest bits, as PNG has it."""
    levels = np.arange(0, 2**bits, max(1, 2**bits // 256))
    row = np.unpackbits(levels.astype(">u2").view(np.uint8).reshape(-1, 2), axis=1)[:, -bits:].ravel()
    data = zlib.compress(b"\0" + np.packbits(row).tobytes())
    transparency = png_chunk(b"tRNS", struct.pack(">H", levels[transparent]))
    decoded = decode(png(len(levels), 1, transparency, colour=0, bits=bits, data=data))
    expected = levels * 255 // (2**bits - 1) if bits < 16 else levels >> 8
    expected[transparent] = 255
    np.testing.assert_array_equal(decoded, np.repeat(expected[None, :, None], 3, axis=2))


@pytest.mark.parametrize(("colour", "bits"), [(0, 1), (0, 2), (0, 4), (0, 8), (2, 8)])
def test_the_high_bits_of_a_transparent_level_do_not_count(bits, colour):
    """A row of black and white, of which black is transparent; 0xff00 and 0 are the same level."""
    channels = {0: 1, 2: 3}[colour]
    row = np.repeat([0, 1, 0, 1], bits * channels)
    data = zlib.compress(b"\0" + np.packbits(row).tobytes())
    for level, left in ((0xFF00, 255), (2**16 - 2**bits, 255), (0xFFFF, 0), (2**bits - 1, 0)):
        transparency = png_chunk(b"tRNS", struct.pack(f">{channels}H", *[level] * channels))
        decoded = decode(png(4, 1, transparency, colour=colour, bits=bits, data=data))
        assert decoded[0, :, 0].tolist() == [left, 255, left, 255], hex(level)


@pytest.mark.parametrize(("colour", "bits"), [(0, 1), (0, 8), (2, 8), (2, 16)])
@pytest.mark.parametrize("first", [b"tEXt", b"tRNS"])
def test_a_png_that_begins_with_no_header_is_rejected_by_name(first, colour, bits):
    """The specification has IHDR come first; nothing else tells the bits of a level."""
    sound = png(8, 1, png_chunk(b"tRNS", bytes(6)), colour=colour, bits=bits)
    assert decode(png(8, 1, colour=colour, bits=bits)).shape == (1, 8, 3)
    with pytest.raises(Rejected, match="cannot decode: IHDR is not the first of its chunks"):
        decode(PNG_MAGIC + png_chunk(first, b"a\0" + bytes(20)) + sound[len(PNG_MAGIC) :])


def test_a_png_of_two_headers_is_rejected_unless_behind_its_end():
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 1, 1, 0, 0, 0, 0))
    with pytest.raises(Rejected, match="IHDR is not the first of its chunks, or one of several"):
        decode(png(4, 1, header))
    np.testing.assert_array_equal(decode(png(4, 1) + header), decode(png(4, 1)))


def test_a_transparent_colour_of_sixteen_bits_is_rejected_by_name():
    """Pillow keeps the high bytes: whether a pixel has the transparent colour is no longer known."""
    data = zlib.compress(b"\0" + struct.pack(">6H", 0x4455, 0x6677, 0x8899, 0x4400, 0x6600, 0x8800))
    with pytest.raises(Rejected, match="unsupported pixels: a transparent colour of 16 bits"):
        decode(png(2, 1, png_chunk(b"tRNS", struct.pack(">3H", 0x4455, 0x6677, 0x8899)), colour=2, bits=16, data=data))
    np.testing.assert_array_equal(decode(png(2, 1, colour=2, bits=16, data=data)), [[[0x44, 0x66, 0x88]] * 2])


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("compression", [1, 8])
def test_a_sixteen_bit_tiff_of_white_zero_is_no_negative(compression, orientation):
    levels = np.arange(0, 65_536, 257, dtype="<u2").reshape(8, 32)
    stored = levels.tobytes() if compression == 1 else zlib.compress(levels.tobytes())
    tags = {258: (3, 1, 16), 262: (3, 1, 0), 274: (3, 1, orientation), 278: (3, 1, 8), 279: (4, 1, len(stored))}
    behind = len(grey_tiff(32, 8, {**tags, 273: (4, 1, 0)}))
    decoded = decode(grey_tiff(32, 8, {**tags, 273: (4, 1, behind)}, compression) + stored)
    np.testing.assert_array_equal(decoded[..., 0], UPRIGHT[orientation](255 - np.arange(256).reshape(8, 32)))


def test_a_twelve_bit_tiff_goes_from_black_to_white():
    levels = np.array([0, 0x123, 0x800, 0xFFF])
    stored = np.packbits((levels[:, None] >> np.arange(11, -1, -1) & 1).astype(np.uint8)).tobytes()
    tags = {258: (3, 1, 12), 278: (3, 1, 1), 279: (4, 1, len(stored))}
    behind = len(grey_tiff(4, 1, {**tags, 273: (4, 1, 0)}))
    decoded = decode(grey_tiff(4, 1, {**tags, 273: (4, 1, behind)}) + stored)
    np.testing.assert_array_equal(decoded[0, :, 0], levels >> 4)


def test_damaged_metadata_never_stops_the_build():
    """Every byte of a JPEG's EXIF flipped in turn: pixels or a rejection, nothing else."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    data = save(Image.fromarray(gradient()), "JPEG", exif=exif)
    start = data.index(b"Exif")
    for position in range(start, start + 90):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        with contextlib.suppress(Rejected):
            decode(bytes(damaged))


def ftyp(brand: bytes, *others: bytes) -> bytes:
    names = brand + bytes(4) + b"".join(others)
    return struct.pack(">I", len(names) + 8) + b"ftyp" + names + bytes(100)


NOT_IMAGES = {
    b"": "is empty",
    bytes(5_000): "holds only zero bytes",
    b"<?xml version='1.0'?>\n<!-- drawn -->\n<svg xmlns='http://www.w3.org/2000/svg'/>": "is SVG, a drawing",
    b"<svg width='3'></svg>": "is SVG, a drawing",
    b"\r\n<!DOCTYPE html>\n<html><body><svg ></svg></body></html>": "is text (HTML page), not an image",
    b"<html><head><title>404 Not Found</title></head></html>": "is text (HTML page), not an image",
    b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>": "is text (XML), not an image",
    b'{"error": "not found"}': "is text (JSON), not an image",
    b'[{"id": 1}]': "is text (JSON), not an image",
    b"404: Not Found": "is text, not an image",
    b"no image at all": "is text, not an image",
    "\ufeffschöne Grüße".encode(): "is text, not an image",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n": "is a Git LFS pointer",
    b"PK\x03\x04" + bytes(30): "is a zip archive",
    b"\x1f\x8b\x08" + bytes(30): "is compressed by gzip",
    b"%PDF-1.7\n": "is a PDF document",
    b"8BPS\0\1" + bytes(30): "is a Photoshop document",
    ftyp(b"heic", b"mif1", b"heic"): "is HEIC: convert it to PNG or JPEG, with pillow-heif for one",
    ftyp(b"mif1", b"mif1", b"heic"): "is HEIC: convert it to PNG or JPEG, with pillow-heif for one",
    ftyp(b"isom", b"iso2", b"mp41"): "is a video (MP4 or QuickTime)",
    ftyp(b"qt  "): "is a video (MP4 or QuickTime)",
    ftyp(b"avif", b"mif1"): "begins as an AVIF, but its header is damaged",
    b"RIFF\x10\0\0\0AVI " + bytes(20): "is a video (AVI)",
    b"\x1aE\xdf\xa3" + bytes(20): "is a video (Matroska or WebM)",
    save(Image.fromarray(gradient()), "ICO"): "is an icon (ICO)",
    b"\xff\x0a" + bytes(20): "is JPEG XL",
    b"\x89PNG\r\n\x1a\n": "",
    b"\xff\xd8\xff\xe0 cut": "OSError: Truncated File Read",
    b"\xff\xd8\xff\xfe\0\2": "begins as a JPEG, but its header is damaged or cut short",
    b"\x01\x02\x03\x04" * 30: "is in no image format that is read here",
}


@pytest.mark.parametrize("data", NOT_IMAGES, ids=lambda data: repr(data[:20]))
def test_a_file_that_is_no_image_is_named_for_what_it_is(data):
    with pytest.raises(Rejected) as rejected:
        decode(data)
    assert rejected.value.reason.startswith(f"cannot decode: {NOT_IMAGES[data]}")
    assert "\n" not in rejected.value.reason
