"""Zips and tars that lie: none leads out of the archive, unpacks without a bound, or silently hides another file."""

import bz2
import gzip
import io
import lzma
import os
import re
import resource
import stat
import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected
from precompute.sources.archive import MAX_FILE_BYTES
from precompute.sources.image_store import MISSING, ImageFolder, ImageStore, open_image_store
from precompute.sources.image_tar import ImageTar
from precompute.sources.image_zip import MAX_INDEX_BYTES, ImageZip

Entry = tuple[str, bytes]

LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"


def make_zip(path: Path, entries: list[Entry], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries:
            with pytest.warns(UserWarning, match="Duplicate") if name in archive.namelist() else nullcontext():
                archive.writestr(zipfile.ZipInfo(name), data, compression)
    return path


def make_tar(path: Path, entries: list[Entry], format_: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format_) as archive:
        for name, data in entries:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


MAKERS = {"zip": make_zip, "tar": make_tar}


@pytest.fixture(params=MAKERS)
def make(request, tmp_path) -> Callable[[list[Entry]], ImageStore]:
    """An archive of either kind."""
    return lambda entries: open_image_store(MAKERS[request.param](tmp_path / f"images.{request.param}", entries))


def rejection(store: ImageStore, name: str) -> str:
    with pytest.raises(Rejected) as caught:
        store.read(name)
    return caught.value.reason


Patch = tuple[bytes, int, str, int]
"""A header's signature, a place behind it, and what is written there, by the form of `struct`."""


def patch(path: Path, *patches: Patch, which: int = 0) -> None:
    """Overwrite fields of a zip, in the n-th header of their kind."""
    data = bytearray(path.read_bytes())
    for signature, offset, form, value in patches:
        place = -1
        for _ in range(which + 1):
            place = data.index(signature, place + 1)
        struct.pack_into(form, data, place + offset, value)
    path.write_bytes(data)


def test_an_archive_of_either_kind_is_read_like_a_folder(make):
    images = make([("top/b.jpg", b"bbb"), ("top/sub/a.jpg", b"aa"), ("top/empty.jpg", b"")])
    assert images.listing().names == ["top/b.jpg", "top/empty.jpg", "top/sub/a.jpg"]
    assert images.read("b.jpg") == images.read("top/b.jpg") == b"bbb"
    assert images.read("sub/a.jpg") == b"aa"
    assert images.read("empty.jpg") == b""
    assert rejection(images, "c.jpg").startswith("missing: c.jpg is not in images.")
    assert images.fingerprint("c.jpg") == MISSING != images.fingerprint("b.jpg") == images.fingerprint("top/b.jpg")


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret.jpg", "a/../../secret.jpg", "line\nbreak.jpg", "x" * 300])
def test_a_members_name_is_only_a_name(make, tmp_path, name):
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    before = sorted(tmp_path.rglob("*"))
    images = make([(name, b"pixels")])
    assert images.read(name) == b"pixels"
    assert set(tmp_path.rglob("*")) - set(before) <= {tmp_path / "images.zip", tmp_path / "images.tar"}
    with pytest.raises(Rejected):
        images.read("/etc/hostname")


def test_a_name_that_occurs_twice_is_rejected_by_itself(make):
    images = make([("a.jpg", b"first"), ("b.jpg", b"bbb"), ("a.jpg", b"second")])
    assert images.listing().names == ["a.jpg", "b.jpg"]
    assert rejection(images, "a.jpg").startswith("ambiguous archive member: a.jpg occurs 2 times in images.")
    assert images.fingerprint("a.jpg") == MISSING
    assert images.read("b.jpg") == b"bbb"


def test_a_zip_bomb_stops_at_the_size_it_claims(tmp_path):
    """256 MiB of zeros in 260 KB, said to be 1,000 bytes."""
    path = make_zip(tmp_path / "images.zip", [("a.jpg", bytes(2**28))], zipfile.ZIP_DEFLATED)
    patch(path, (LOCAL, 22, "<I", 1_000), (CENTRAL, 24, "<I", 1_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "Bad CRC-32" in rejection(ImageZip(path), "a.jpg")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**26


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_without_a_bound_are_not_unpacked(tmp_path, compression):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", bytes(2**16))], compression)
    assert f"is compressed by method {compression}" in rejection(ImageZip(path), "a.jpg")


def test_members_that_share_their_bytes_are_rejected(tmp_path):
    """How a small zip unpacks to petabytes: every member is the same large one."""
    path = make_zip(tmp_path / "images.zip", [(f"{number}.jpg", bytes(1_000)) for number in range(4)])
    patch(path, (CENTRAL, 42, "<I", 0), which=1)
    images = ImageZip(path)
    for name in ("0.jpg", "1.jpg"):
        assert "shares bytes with other members" in rejection(images, name)
    assert images.read("3.jpg") == bytes(1_000)


DAMAGED = "damaged archive member: a.jpg: "

ZIP_LIES: dict[str, tuple[Patch, str]] = {
    "another name in the local header": ((LOCAL, 30, "<B", ord("x")), DAMAGED + ".*differ"),
    "encrypted": ((CENTRAL, 8, "<H", 1), DAMAGED + ".*encrypted"),
    "patched": ((CENTRAL, 8, "<H", 0x20), DAMAGED + ".*patched"),
    "strongly encrypted": ((CENTRAL, 8, "<H", 0x41), DAMAGED + ".*(encrypted|encryption)"),
    "a method that nobody knows": ((CENTRAL, 10, "<H", 77), DAMAGED + ".*method 77"),
    "more bytes than there are": ((CENTRAL, 20, "<I", 10**6), DAMAGED + ".*outside the archive"),
    "a place beyond the archive": ((CENTRAL, 42, "<I", 2**31), DAMAGED + ".*outside the archive"),
    "a longer file": ((CENTRAL, 24, "<I", 4_000), DAMAGED + ".*claims 4,000"),
    "a file of 256 MB": ((CENTRAL, 24, "<I", MAX_FILE_BYTES + 1), "too large: a.jpg is 268,435,457 bytes"),
    "another checksum": ((CENTRAL, 16, "<I", 7), DAMAGED + ".*CRC-32"),
    "no local header": ((LOCAL, 0, "<I", 0), DAMAGED + ".*magic number"),
    "a link": ((CENTRAL, 38, "<I", (stat.S_IFLNK | 0o777) << 16), DAMAGED + ".*is a link"),
}


@pytest.mark.parametrize("lie", ZIP_LIES)
def test_a_member_that_lies_is_rejected_by_itself(tmp_path, lie):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"pixels" * 50), ("b.jpg", b"bbb")])
    change, reason = ZIP_LIES[lie]
    patch(path, change)
    images = ImageZip(path)
    assert re.match(reason, rejection(images, "a.jpg"))
    assert images.read("b.jpg") == b"bbb"


def test_a_claim_of_more_than_four_gigabytes_is_rejected(tmp_path):
    """Sizes in the zip64 extra field, 2^40 bytes in a file of 200."""
    extra, unknown = struct.pack("<HHQQ", 1, 16, 2**40, 2**40), 2**32 - 1
    fields = (0, 0, 0, 33, 0, unknown, unknown, 5, len(extra))
    local = LOCAL + struct.pack("<5H3I2H", 45, *fields) + b"a.jpg" + extra
    central = CENTRAL + struct.pack("<6H3I5H2I", 45, 45, *fields, 0, 0, 0, 0, 0) + b"a.jpg" + extra
    end = END + struct.pack("<4H2IH", 0, 0, 1, 1, len(central), len(local) + 6, 0)
    path = tmp_path / "images.zip"
    path.write_bytes(local + b"pixels" + central + end)
    assert rejection(ImageZip(path), "a.jpg").startswith("too large: a.jpg is 1,099,511,627,776 bytes")


def test_a_zips_name_wrongly_marked_as_utf8_is_passed_over(tmp_path):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"a"), ("\u6f22.jpg", b"b"), ("d.jpg", b"d")])
    entry = CENTRAL + b"\x14\x03\x14\0"
    data = path.read_bytes().replace(entry + b"\0\x08", entry + b"\0\x88")  # and a mark that means nothing
    path.write_bytes(data.replace(b"a.jpg", b"\xff.jpg").replace(entry + b"\0\0", entry + b"\0\x08"))
    images = ImageZip(path)
    assert images.listing().names == ["d.jpg", "\u6f22.jpg"]
    assert images.listing().not_utf8 == [os.fsdecode(b"\xff.jpg")]
    assert (images.read("\u6f22.jpg"), images.read("d.jpg")) == (b"b", b"d")


def test_the_last_end_record_counts_as_in_any_reader_of_zips(tmp_path):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"pixels")])
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"hello"
    assert ImageZip(path).read("a.jpg") == b"pixels"
    with path.open("ab") as stream:
        stream.write(END + bytes(18))
    assert ImageZip(path).listing().names == []


def member(name: str, kind: bytes = tarfile.REGTYPE, linked_to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, linked_to
    return made


TAR_MEMBERS = {
    "a symbolic link": (tarfile.SYMTYPE, "/etc/passwd", "is a link"),
    "a hard link to a later member": (tarfile.LNKTYPE, "b.jpg", "is a link"),
    "a hard link to itself": (tarfile.LNKTYPE, "a.jpg", "is a link"),
    "a hard link out of the tar": (tarfile.LNKTYPE, "/etc/passwd", "is a link"),
    "a hard link to nothing": (tarfile.LNKTYPE, "", "is a link"),
    "a hard link to a link": (tarfile.LNKTYPE, "hard.jpg", "is a link"),
    "a hard link to a symbolic link": (tarfile.LNKTYPE, "soft.jpg", "is a link"),
    "a hard link to a name that comes twice": (tarfile.LNKTYPE, "twice.jpg", "is a link"),
    "a device": (tarfile.CHRTYPE, "", "is not a file"),
    "a pipe": (tarfile.FIFOTYPE, "", "is not a file"),
}


@pytest.mark.parametrize("what", TAR_MEMBERS)
def test_members_of_a_tar_that_are_no_files_are_rejected(tmp_path, what):
    kind, linked_to, message = TAR_MEMBERS[what]
    before = [*map(member, ("first.jpg", "twice.jpg", "twice.jpg"))]
    before += [member("hard.jpg", tarfile.LNKTYPE, "first.jpg"), member("soft.jpg", tarfile.SYMTYPE, "first.jpg")]
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        for each in (*before, member("a.jpg", kind, linked_to), member("b.jpg")):
            archive.addfile(each)
    images = ImageTar(tmp_path / "images.tar")
    assert message in rejection(images, "a.jpg")
    assert images.read("b.jpg") == b""


def test_a_hard_link_of_a_tar_is_the_file_it_names(tmp_path):
    """As tar writes the second name of one file."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"pixels")
    (tmp_path / "photos" / "b.jpg").hardlink_to(tmp_path / "photos" / "a.jpg")
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        for name in ("a.jpg", "b.jpg"):
            archive.add(tmp_path / "photos" / name, f"./photos/{name}")
        assert archive.getmember("./photos/b.jpg").islnk()
    images = ImageTar(tmp_path / "images.tar")
    assert images.read("b.jpg") == images.read("photos/a.jpg") == b"pixels"
    assert images.fingerprint("b.jpg") == images.fingerprint("a.jpg") != MISSING


def ustar(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, size: int | None = None) -> bytes:
    header = member(name, kind)
    header.size = len(data) if size is None else size
    return header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def pax_header(records: bytes, kind: bytes = tarfile.XHDTYPE, size: int | None = None) -> bytes:
    return ustar("pax", records, kind, size)


def pax_record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n"
    length = len(body) + len(str(len(body) + 3))
    return f"{length}{body}".encode()


NOTHING = bytes(1_024)

A = ustar("a.jpg", b"pixels")
END64 = b"PK\6\6" + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, 1, 1, 2**60, 0)
UNKNOWN_END = END + struct.pack("<4H2IH", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)


def sparse() -> bytes:
    fields = {"major": "1", "minor": "0", "realsize": "9"}
    return pax_header(b"".join(pax_record(f"GNU.sparse.{name}", value) for name, value in fields.items()))


def global_headers(number: int) -> bytes:
    records = b"".join(pax_record(f"key{number}.{more}", "x") for more in range(20))
    return pax_header(records, tarfile.XGLTYPE) + ustar(f"{number}.jpg")


PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}
ZIP = make_zip(io.BytesIO(), [("a.jpg", b"pixels")]).getvalue()
LOCATOR = b"PK\6\7" + struct.pack("<IQI", 1, 0, 2)

ZIPS = {
    "cut short": ZIP[:-10],
    "with a table of 4 GB": ZIP[:-10] + b"\xff\xff\xff\xfe" + ZIP[-6:],
    "whose table is none": ZIP.replace(CENTRAL, b"XXXX"),
    "of several parts": ZIP[:-22] + LOCATOR + ZIP[-22:-2].replace(b"\1\0", b"\xff\xff") + b"\0\0",
    "of a version to come": ZIP.replace(CENTRAL + b"\x14\x03\x14", CENTRAL + b"\x14\x03\xff"),
    "with a table of exabytes": bytes(100) + END64 + b"PK\6\7" + struct.pack("<IQI", 0, 100, 1) + UNKNOWN_END,
}
TARS = {
    "empty": b"",
    "no tar": b"nothing at all" * 100,
    "cut in a header": A + ustar("b.jpg")[:300],
    "cut in a file": ustar("a.jpg", bytes(5_000))[:1_024],
    "cut between members": A,
    "damaged in the middle": A + ustar("b.jpg").replace(b"b.jpg", b"x.jpg") + NOTHING,
    "a file of 2^60 bytes": ustar("a.jpg", b"pixels", size=2**60) + NOTHING,
    "a file of negative size": A + pax_header(pax_record("size", "-1024")) + ustar("b.jpg") + NOTHING,
    "a header of negative size": ustar("a.jpg") + pax_header(b"", size=-512) + NOTHING,
    "a header of a gigabyte": pax_header(b"x" * 100, size=2**30) + NOTHING,
    "a header of a million digits": pax_header(b"1" * 10_000) + A + NOTHING,
    "headers of headers": pax_header(pax_record("comment", "x")) * 3_000 + A + NOTHING,
    "a header of nothing": pax_header(b"0 a=b\n") + A + NOTHING,
    "headers for all that never end": b"".join(map(global_headers, range(10))) + NOTHING,
    "a long name of a gigabyte": pax_header(b"x" * 100, tarfile.GNUTYPE_LONGNAME, size=2**30) + NOTHING,
    "sparse beyond its end": sparse() + ustar("a.jpg"),
}
IN_PLACE = ", so it cannot be read in place; unpack it"
REFUSED = [
    *(pytest.param("images.zip", data, "is not a zip that can be read", id=f"zip {lie}") for lie, data in ZIPS.items()),
    *(pytest.param("images.tar", data, "images.tar", id=f"tar {lie}") for lie, data in TARS.items()),
    *(("a file", pack(A), f"is compressed by {name}{IN_PLACE}") for name, pack in PACKERS.items()),
    ("a file", b"", "is empty; expected a folder, a zip or a tar of images"),
    ("a file", b"a list\n", "is neither a zip nor a tar; expected a folder, a zip or a tar of images"),
    ("a file", b"Rar!\x1a\x07\x01\0", f"is a RAR archive{IN_PLACE}"),
    ("a file", b"7z\xbc\xaf\x27\x1c", f"is a 7z archive{IN_PLACE}"),
    ("a file", ZIP[:40], r"starts as a zip, but the index at its end is missing: .* zip -FF '.*a file' --out"),
]


@pytest.mark.parametrize(("name", "data", "message"), REFUSED)
def test_an_archive_that_cannot_be_followed_is_refused(tmp_path, name, data, message):
    """In one line that names it."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=message) as caught:
        open_image_store(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_zip64_index_of_a_gigabyte_is_refused_unread(tmp_path):
    with (tmp_path / "images.zip").open("wb") as stream:  # sparse: as large as it claims
        size = MAX_INDEX_BYTES + 1
        stream.seek(size)
        stream.write(b"PK\6\6" + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, 1, 1, size, 0))
        stream.write(b"PK\6\7" + struct.pack("<IQI", 0, size, 1) + UNKNOWN_END)
    with pytest.raises(SourceError, match="its table of contents needs 1,073,741,825 bytes"):
        open_image_store(tmp_path / "images.zip")


def test_sparse_members_are_rejected(tmp_path):
    path = tmp_path / "images.tar"
    records = pax_record("GNU.sparse.size", "4096") + pax_record("GNU.sparse.map", "0,4096")
    path.write_bytes(pax_header(records) + ustar("a.jpg", bytes(4_096)) + ustar("b.jpg", b"b") + NOTHING)
    assert "is a sparse file" in rejection(ImageTar(path), "a.jpg")
    assert ImageTar(path).read("b.jpg") == b"b"


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_kind_are_read_in_place(tmp_path, format_):
    long = "/".join(["folder" * 4] * 5 if format_ == tarfile.USTAR_FORMAT else ["folder" * 9] * 5) + "/a.jpg"
    path = make_tar(tmp_path / "images.tar", [(f"./{long}", b"first"), ("./b.jpg", b"second" * 1_000)], format_)
    images = open_image_store(path)
    assert isinstance(images, ImageTar)
    assert images.listing().names == ["b.jpg", long]
    assert (images.read(long), images.read("b.jpg")) == (b"first", b"second" * 1_000)


def test_a_tar_without_magic_is_known_by_its_name(tmp_path):
    header = bytearray(ustar("a.jpg", b"pixels") + NOTHING)
    header[257:265] = bytes(8)
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:512]))
    (tmp_path / "old.tar").write_bytes(header)
    assert open_image_store(tmp_path / "old.tar").read("a.jpg") == b"pixels"


def test_a_tar_that_shrinks_is_no_fault_of_its_images(tmp_path):
    path = make_tar(tmp_path / "images.tar", [("a.jpg", bytes(5_000))])
    images = ImageTar(path)
    os.truncate(path, 2_000)
    with pytest.raises(SourceError, match="was changed while it was read"):
        images.read("a.jpg")


FUZZED = 2_000


@pytest.mark.parametrize("kind", MAKERS)
def test_damaged_archives_give_files_rejections_or_a_refusal(tmp_path, kind):
    """Bytes changed, cut out and moved anywhere: of a member that is given, every byte is right in a zip."""
    sound = {"top/a.jpg": b"pixels" * 20, "top/b.jpg": bytes(600), "top/" + "long" * 30 + ".jpg": b"x"}
    options = [zipfile.ZIP_DEFLATED] if kind == "zip" else []
    whole = MAKERS[kind](tmp_path / "whole", [*sound.items()], *options).read_bytes()
    rng, path, counts = np.random.default_rng(1), tmp_path / f"images.{kind}", Counter[str]()
    for _ in range(FUZZED):
        path.write_bytes(damaged(whole, rng))
        counts.update(ends_of(path, [*sound.values()] if kind == "zip" else None))
    assert min(counts["refused"], counts["read"], counts["rejected"] if kind == "zip" else FUZZED) > FUZZED // 40
    assert counts.keys() <= {"refused", "rejected", "read"}


def ends_of(path: Path, sound: list[bytes] | None) -> Iterator[str]:
    """What becomes of an archive, or of each of its members."""
    try:
        images = open_image_store(path)
        names = images.listing().names
    except SourceError as error:
        yield "refused" if "\n" not in str(error) else "refused in several lines"
        return
    for name in names:
        try:
            data = images.read(name)
        except Rejected:
            yield "rejected"
        else:
            assert sound is None or data in sound
            yield "read"


def damaged(whole: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        place, length = int(rng.integers(max(len(data), 1))), int(rng.integers(1, 9))
        action = rng.integers(5)
        if action == 0 and data:
            data[place] ^= 1 << int(rng.integers(8))
        elif action == 1:
            data[place : place + length] = bytes([rng.choice([0, 0x7F, 0x80, 0xFF])]) * length
        elif action == 2 and rng.random() < 0.2:
            del data[place : place + length]
        elif action == 3 and rng.random() < 0.2:
            data = data[: place + 1]
        elif data[place : place + 1] not in (b"", b"\0", b"\xff"):
            data[place] = int(rng.integers(ord("0"), ord("8")))
    return bytes(data)


def test_links_in_an_image_folder_are_its_owners_and_loops_end(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jpg").write_bytes(b"pixels")
    images = tmp_path / "images"
    images.mkdir()
    (images / "linked.jpg").symlink_to("../elsewhere/a.jpg")
    (images / "folder").symlink_to("../elsewhere")
    (images / "loop").symlink_to(".")
    (images / "nowhere.jpg").symlink_to("nowhere")
    (images / "itself.jpg").symlink_to("itself.jpg")
    store = ImageFolder(images)
    assert store.listing().names == ["itself.jpg", "linked.jpg", "nowhere.jpg"]
    assert store.read("linked.jpg") == store.read("folder/a.jpg") == b"pixels"
    for name in ("nowhere.jpg", "itself.jpg"):
        assert store.fingerprint(name) == MISSING
        assert rejection(store, name).startswith("missing: ")


def test_odd_files_in_a_folder_are_rejected_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "line\nbreak.jpg").write_bytes(b"pixels")
    with (tmp_path / "huge.jpg").open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    store = ImageFolder(tmp_path)
    for name in ("pipe.jpg", "folder.jpg", "zero.jpg", "x" * 256, "a/" * 3_000 + "b.jpg", "nul\0.jpg", "\ud800.jpg"):
        assert rejection(store, name).startswith("missing: ")
    assert rejection(store, "huge.jpg").startswith("too large: ")
    assert store.read("line\nbreak.jpg") == b"pixels"
