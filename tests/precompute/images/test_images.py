"""What every kind of image file becomes, pixel by pixel."""

import contextlib
import struct
import zlib
from itertools import product

import numpy as np
import pytest
from PIL import Image

from precompute.images.decode import (
    MID_GREY,
    RESAMPLING,
    SUFFIXES,
    SUFFIXES_OF,
    ImageConfig,
    decode_image,
    fit_image,
    to_pixels,
)
from precompute.images.rejected import Rejected
from tests.precompute.images.hostile_images import PNG_MAGIC, png, png_chunk, save, tiff_around

LIMIT = 10**6

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # as `silence_decoders` does in a build


def decode(data: bytes) -> np.ndarray:
    return to_pixels(decode_image(data, LIMIT))


def gradient(height: int = 16, width: int = 24) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([y * 255 // (height - 1), x * 255 // (width - 1), (x + y) % 256], axis=-1).astype(np.uint8)


def saved(pixels: np.ndarray, format_: str, **options: object) -> bytes:
    """Without loss where the format knows both ways."""
    return save(Image.fromarray(pixels), format_, **({"lossless": True} if format_ == "WEBP" else {}), **options)


def grey(levels: np.ndarray) -> np.ndarray:
    """A row, or rows, of levels as equal channels."""
    return np.repeat(np.atleast_2d(levels)[..., None], 3, axis=2)


def transparent_palette() -> bytes:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, *PALE])
    image.putpixel((1, 1), 1)
    return save(image, "PNG", transparency=0)


def sixteen_bits(format_: str, order: str) -> bytes:
    levels = np.arange(0, 65_536, 257, dtype=f"{order}u2")
    return save(Image.frombytes("I;16" if order == "<" else "I;16B", (16, 16), levels.tobytes()), format_)


def integer_tiff(levels: np.ndarray, bits: int, kind: int) -> bytes:
    tags = {258: (3, 1, bits), 278: (3, 1, 1), 339: (3, 1, kind)}
    return tiff_around(levels.astype(f"<i{bits // 8}").tobytes(), len(levels), 1, tags)


def white_zero_tiff(orientation: int, compression: int) -> bytes:
    levels = np.arange(0, 65_536, 257, dtype="<u2").tobytes()
    tags = {258: (3, 1, 16), 262: (3, 1, 0), 274: (3, 1, orientation), 278: (3, 1, 8)}
    return tiff_around(zlib.compress(levels) if compression == 8 else levels, 32, 8, tags, compression)


def rgb_of_16_bits(extra: bytes = b"") -> bytes:
    row = struct.pack(">6H", 0x4455, 0x6677, 0x8899, 0x4400, 0x6600, 0x8800)
    return png(2, 1, extra, colour=2, bits=16, data=zlib.compress(b"\0" + row))


def netpbm(kind: int, values: np.ndarray, maximum: int) -> bytes:
    """Plain and binary images of one another's pixels; `kind` is the digit of the magic."""
    height, width, *_ = values.shape
    head = b"P%d\n# made here\n%d %d\n" % (kind, width, height) + (b"" if kind in (1, 4) else b"%d\n" % maximum)
    if kind == 4:
        return head + np.packbits(values, axis=1).tobytes()
    if kind > 4:
        return head + values.astype(np.uint8 if maximum < 256 else ">u2").tobytes()
    return head + b"\n".join(b"%d # said\n" % value for value in values.ravel())


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

SIGNED, UNSIGNED = 2, 1

LEVELS = np.arange(256).reshape(16, 16)
LEVELS_OF_12_BITS = np.array([0, 0x12, 0x80, 0xFF])
TWELVE_BITS = {258: (3, 1, 12), 278: (3, 1, 1)}
NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
BITS = np.random.default_rng(0).integers(0, 2, (5, 11))
PIXELS = gradient()
PNG = saved(PIXELS, "PNG")
HEADER = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 1, 1, 0, 0, 0, 0))
PALE = [200, 100, 50]
TURNED_OFF = np.where(np.all(PIXELS[3, 5] == PIXELS, axis=-1, keepdims=True), 255, PIXELS)
HALF_RED = np.full((4, 4, 4), [255, 0, 0, 0], np.uint8)
HALF_RED[:2, :, 3] = 255
RED_ON_WHITE = np.where(HALF_RED[..., 3:], HALF_RED[..., :3], 255)
FRAMES = [Image.new("RGB", (8, 8), colour) for colour in ("white", "blue")]
WHITE = np.full((8, 8, 3), 255)
RGB_OF_16_BITS = np.array([[[0x44, 0x66, 0x88]] * 2])
WITHOUT_LOSS = ("PNG", "BMP", "TIFF", "WEBP", "JPEG2000", "PPM", "TGA")

BECOMES = {
    "GIF without loss": (saved(PIXELS // 255 * 255, "GIF"), PIXELS // 255 * 255),
    "grey": (saved(LEVELS.astype(np.uint8), "PNG"), grey(LEVELS)),
    "bilevel": (save(Image.fromarray(LEVELS >= 128), "PNG"), grey(255 * (LEVELS >= 128))),
    "a PNG of 16 bits a channel": (rgb_of_16_bits(), RGB_OF_16_BITS),
    "a TIFF of 12 bits": (tiff_around(b"\0\x01\x23\x80\x0f\xff", 4, 1, TWELVE_BITS), grey(LEVELS_OF_12_BITS)),
    "a TIFF that says it is unsigned": (integer_tiff(LEVELS[3] << 8, 16, UNSIGNED), grey(LEVELS[3])),
    "grey with alpha lies on white": (save(Image.new("LA", (8, 8), (0, 0)), "PNG"), WHITE),
    "a transparent entry of a palette": (transparent_palette(), np.where(LEVELS[:4, :4, None] == 17, PALE, 255)),
    "a transparent colour": (saved(PIXELS, "PNG", transparency=tuple(PIXELS[3, 5].tolist())), TURNED_OFF),
    "plain bits, one is black": (netpbm(1, BITS, 1), grey(255 - 255 * BITS)),
    "bits, one is black": (netpbm(4, BITS, 1), grey(255 - 255 * BITS)),
    "plain bits without blanks": (b"P1 11 5 " + b"".join(b"%d" % bit for bit in BITS.flat), grey(255 - 255 * BITS)),
    "a PNG before a header": (png(4, 1) + HEADER, WHITE[:1, :4]),
}
BECOMES |= {f"{each} without loss": (saved(PIXELS, each), PIXELS) for each in WITHOUT_LOSS}
BECOMES |= {f"PNG before {each[:9]!r}": (PNG + each, PIXELS) for each in (b"\0", b"\n", bytes(20), PNG)}
BECOMES |= {f"{each} with alpha": (saved(HALF_RED, each), RED_ON_WHITE) for each in ("PNG", "JPEG2000", "TGA", "WEBP")}
for each in ("GIF", "PNG", "WEBP", "TIFF", "AVIF"):
    BECOMES[f"the first frame of {each}"] = (save(FRAMES[0], each, save_all=True, append_images=FRAMES[1:]), WHITE)
for each, order in (("PNG", "<"), ("JPEG2000", "<"), ("PPM", "<"), ("TIFF", "<"), ("TIFF", ">")):
    BECOMES[f"{each} of 16 bits keeps 256 levels, {order}"] = (sixteen_bits(each, order), grey(LEVELS))
for turned, packed in product((1, 6), (1, 8)):
    no_negative = UPRIGHT[turned](grey(255 - LEVELS.reshape(8, 32)))
    BECOMES[f"a TIFF whose white is zero, {turned}, {packed}"] = (white_zero_tiff(turned, packed), no_negative)


@pytest.mark.parametrize("name", BECOMES)
def test_an_image_becomes_these_pixels(name):
    data, expected = BECOMES[name]
    np.testing.assert_array_equal(decode(data), expected)


LOSSY = {"JPEG", "MPO", "AVIF"}


@pytest.mark.parametrize("format_", ["JPEG", "MPO", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(10))
def test_every_exif_orientation_is_turned_upright(orientation, format_):
    """Numbers that EXIF does not have turn nothing. AVIF has boxes of its own for it, irot and imir."""
    stored = gradient() if format_ not in LOSSY else np.kron(gradient(2, 3), np.ones((16, 16, 1), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {
        "JPEG": {"quality": 95, "subsampling": 0},
        "MPO": {"quality": 95, "subsampling": 0, "save_all": True, "append_images": [Image.new("RGB", (8, 8))]},
        "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    }.get(format_, {})
    decoded = decode(saved(stored, format_, exif=exif, **options))
    expected = UPRIGHT.get(orientation, UPRIGHT[1])(stored)
    assert decoded.shape == expected.shape
    assert np.abs(decoded.astype(int) - expected).max() <= (4 if format_ in LOSSY else 0)


def test_colours_that_are_no_exact_ones():
    half_black = decode(save(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "PNG"))
    assert np.abs(half_black.astype(int) - 127).max() <= 1
    cyan_ink = decode(save(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=95))
    assert np.abs(cyan_ink.mean((0, 1)) - [0, 255, 255]).max() < 4


@pytest.mark.parametrize("maximum", [1, 15, 100, 255, 256, 4_095, 65_535])
@pytest.mark.parametrize(("plain", "channels"), [(2, 1), (3, 3)])
def test_netpbm_of_any_maximum_goes_from_black_to_white(maximum, plain, channels):
    values = np.linspace(0, maximum, 5 * 4 * channels).astype(int).reshape(5, 4, channels)
    decoded = decode(netpbm(plain, values, maximum))
    assert np.abs(decoded - values * 255 / maximum).max() < 1.01
    assert (decoded.min(), decoded.max()) == (0, 255)
    np.testing.assert_array_equal(decode(netpbm(plain + 3, values, maximum)), decoded)


def test_a_jpeg_with_an_index_of_pictures_is_its_first():
    """Phones and stereo cameras write such files under any JPEG's name."""
    image = Image.fromarray(np.kron(gradient(2, 3), np.ones((16, 16, 1), np.uint8)))
    many = save(image, "MPO", save_all=True, append_images=[Image.new("RGB", (32, 32))], quality=90)
    assert many[:3] == b"\xff\xd8\xff"
    for data in (many, many.replace(b"MPF\0II*\0", b"MPF\0II*\7", 1)):  # also with a damaged index
        np.testing.assert_array_equal(decode(data), decode(save(image, "JPEG", quality=90)))


def test_every_suffix_is_one_of_its_format():
    Image.init()
    formats = {Image.registered_extensions()[suffix] for suffix in SUFFIXES}
    assert formats == {*SUFFIXES_OF, "MPO"}  # which Pillow reads as JPEG


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("transparent", [0, 1])
def test_the_transparent_level_of_any_depth_lies_on_white(bits, transparent):
    """A row of every level, or of 256 of them; the transparent one counts by its lowest bits, as PNG has it."""
    levels = np.arange(0, 2**bits, max(1, 2**bits // 256))
    row = np.unpackbits(levels.astype(">u2").view(np.uint8).reshape(-1, 2), axis=1)[:, -bits:].ravel()
    data = zlib.compress(b"\0" + np.packbits(row).tobytes())
    transparency = png_chunk(b"tRNS", struct.pack(">H", levels[transparent]))
    expected = levels * 255 // (2**bits - 1) if bits < 16 else levels >> 8
    expected[transparent] = 255
    np.testing.assert_array_equal(
        decode(png(len(levels), 1, transparency, colour=0, bits=bits, data=data)), grey(expected)
    )


@pytest.mark.parametrize(("colour", "bits"), [(0, 1), (0, 2), (0, 4), (0, 8), (2, 8)])
def test_the_high_bits_of_a_transparent_level_do_not_count(bits, colour):
    """A row of black and white, of which black is transparent; 0xff00 and 0 are the same level."""
    channels = {0: 1, 2: 3}[colour]
    data = zlib.compress(b"\0" + np.packbits(np.repeat([0, 1, 0, 1], bits * channels)).tobytes())
    for level, left in ((0xFF00, 255), (2**16 - 2**bits, 255), (0xFFFF, 0), (2**bits - 1, 0)):
        transparency = png_chunk(b"tRNS", struct.pack(f">{channels}H", *[level] * channels))
        decoded = decode(png(4, 1, transparency, colour=colour, bits=bits, data=data))
        assert decoded[0, :, 0].tolist() == [left, 255, left, 255], hex(level)


def jpeg_2000_without_a_tile(no_jp2: bool) -> list[bytes]:
    data = saved(gradient(64, 64), "JPEG2000", tile_size=(32, 32), no_jp2=no_jp2)
    tile = data.rindex(b"\xff\x90\0\x0a")
    return [data[:tile], data[:tile] + b"\xff\xd9", data[:-2]]


def headless(first: bytes, colour: int, bits: int) -> bytes:
    """A PNG that begins with another chunk: nothing else tells the bits of a level."""
    sound = png(8, 1, png_chunk(b"tRNS", bytes(6)), colour=colour, bits=bits)
    return PNG_MAGIC + png_chunk(first, b"a\0" + bytes(20)) + sound[len(PNG_MAGIC) :]


def of_32_bits(value: int) -> bytes:
    return saved(np.array([[0, value]], np.int32), "TIFF")


REJECTED = {
    "cannot decode: cut short: its last chunk, IEND, is missing or not whole": [PNG[:-n] for n in range(1, 22)],
    "cannot decode: cut short": [*jpeg_2000_without_a_tile(False), *jpeg_2000_without_a_tile(True)],
    "cannot decode: IHDR is not the first of its chunks": [
        headless(first, *form) for first, form in product((b"tEXt", b"tRNS"), ((0, 1), (0, 8), (2, 8), (2, 16)))
    ],
    "IHDR is not the first of its chunks, or one of several": [png(4, 1, HEADER)],
    "unsupported pixels: a transparent colour of 16 bits": [  # of which Pillow keeps the high bytes alone
        rgb_of_16_bits(png_chunk(b"tRNS", struct.pack(">3H", 0x4455, 0x6677, 0x8899)))
    ],
    "signed or 32-bit integer pixels have no agreed range": [
        *(of_32_bits(value) for value in (-1, 255, 65_535, 65_536)),
        *(integer_tiff(LEVELS[3], *kind) for kind in ((16, SIGNED), (32, SIGNED), (32, UNSIGNED))),
    ],
    "unsupported pixels": [save(Image.new("F", (4, 4), 0.5), "TIFF")],
    "values above its maximum, 100": [netpbm(kind, np.full((2, 2), 101), 100) for kind in (2, 5)],
    "too large: 100000 x 100000 pixels": [png(100_000, 100_000, data=b"")],
    "cannot decode": [saved(NOISE, each)[: len(saved(NOISE, each)) // 2] for each in SUFFIXES_OF],
}


@pytest.mark.parametrize(("reason", "data"), [(reason, data) for reason in REJECTED for data in REJECTED[reason]])
def test_what_is_cut_or_ambiguous_is_rejected(reason, data):
    with pytest.raises(Rejected) as rejected:
        decode(data)
    assert reason in rejected.value.reason


def test_a_reason_holds_no_address():
    for data in (b"\x01\x02 no image", save(Image.fromarray(gradient()), "JPEG")[:300]):
        with pytest.raises(Rejected) as rejected:
            decode(data)
        assert "0x" not in rejected.value.reason


def test_an_image_of_just_so_many_pixels_is_decoded():
    assert decode_image(PNG, 16 * 24).size == (24, 16)
    with pytest.raises(Rejected, match="too large"):
        decode_image(PNG, 16 * 24 - 1)


@pytest.mark.parametrize("name", RESAMPLING)
def test_a_filter_is_pillows_of_that_name(name):
    image, recipe = Image.fromarray(gradient(50, 40)), ImageConfig(height=16, width=32, resample=name).recipe
    expected = image.resize((32, 16), Image.Resampling[name.upper()])
    np.testing.assert_array_equal(to_pixels(fit_image(image, recipe)), to_pixels(expected))


def test_squash_crop_and_pad_keep_whole_middle_and_aspect():
    pixels = np.zeros((32, 96, 3), np.uint8)
    pixels[:, :32], pixels[:, 32:64], pixels[:, 64:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)

    def fitted(fit: str) -> np.ndarray:
        recipe = ImageConfig(height=32, width=32, fit=fit, resample="box").recipe
        return to_pixels(fit_image(Image.fromarray(pixels), recipe))

    assert (fitted("crop") == (0, 255, 0)).all()
    assert fitted("squash")[16, [1, 30]].tolist() == [[255, 0, 0], [0, 0, 255]]
    assert fitted("pad")[[0, 16], [16, 1]].tolist() == [[MID_GREY] * 3, [255, 0, 0]]


@pytest.mark.parametrize("size", [(32, 96), (96, 32), (32, 33), (33, 32), (32, 97), (131, 64)])
def test_a_crop_is_the_middle_whichever_side_is_longer(size):
    """By symmetry, to rounding: upside down and mirrored, the image gives the crop upside down and mirrored."""
    image = Image.fromarray(gradient(*size))
    recipe = ImageConfig(height=32, width=32, fit="crop").recipe
    crop, turned = (to_pixels(fit_image(each, recipe)) for each in (image, image.transpose(Image.Transpose.ROTATE_180)))
    assert np.abs(crop.astype(int) - turned[::-1, ::-1]).max() <= 1


def test_damaged_metadata_never_stops_the_build():
    """Every byte of a JPEG's EXIF flipped in turn: pixels or a rejection, nothing else."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    data = save(Image.fromarray(gradient()), "JPEG", exif=exif)
    for position in range(data.index(b"Exif"), data.index(b"Exif") + 90):
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
