"""Zips and tars that lie: none leads out of the archive, unpacks without a bound, or silently hides another file."""

import io
import os
import resource
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
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


def patch(path: Path, signature: bytes, offset: int, form: str, value: int, which: int = 0) -> None:
    """Overwrite a field of a zip's header."""
    data = bytearray(path.read_bytes())
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


def test_a_name_that_occurs_twice_is_rejected_and_the_others_are_read(make):
    images = make([("a.jpg", b"first"), ("b.jpg", b"bbb"), ("a.jpg", b"second")])
    assert images.listing().names == ["a.jpg", "b.jpg"]
    assert rejection(images, "a.jpg").startswith("ambiguous archive member: a.jpg occurs 2 times in images.")
    assert images.fingerprint("a.jpg") == MISSING
    assert images.read("b.jpg") == b"bbb"


def test_a_large_member_is_rejected_unread(tmp_path):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"pixels")])
    patch(path, CENTRAL, 24, "<I", MAX_FILE_BYTES + 1)
    assert rejection(ImageZip(path), "a.jpg").startswith("too large: a.jpg is 268,435,457 bytes")


def test_a_zip_bomb_stops_at_the_size_it_claims(tmp_path):
    """256 MiB of zeros in 260 KB, said to be 1,000 bytes."""
    path = make_zip(tmp_path / "images.zip", [("a.jpg", bytes(2**28))], zipfile.ZIP_DEFLATED)
    for signature, offset in ((LOCAL, 22), (CENTRAL, 24)):
        patch(path, signature, offset, "<I", 1_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "Bad CRC-32" in rejection(ImageZip(path), "a.jpg")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**26


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_without_a_bound_are_not_unpacked(tmp_path, compression):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", bytes(2**24))], compression)
    assert f"is compressed by method {compression}" in rejection(ImageZip(path), "a.jpg")


def test_members_that_share_their_bytes_are_rejected(tmp_path):
    """How a small zip unpacks to petabytes: every member is the same large one."""
    path = make_zip(tmp_path / "images.zip", [(f"{number}.jpg", bytes(1_000)) for number in range(4)])
    patch(path, CENTRAL, 42, "<I", 0, which=1)
    images = ImageZip(path)
    for name in ("0.jpg", "1.jpg"):
        assert "shares bytes with other members" in rejection(images, name)
    assert images.read("3.jpg") == bytes(1_000)


def test_a_member_beyond_the_archive_is_rejected(tmp_path):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"pixels"), ("b.jpg", b"pixels")])
    patch(path, CENTRAL, 42, "<I", 2**31, which=1)
    assert "outside the archive" in rejection(ImageZip(path), "b.jpg")


ZIP_LIES = {
    "another name in the local header": (LOCAL, 30, "<B", ord("x"), "differ"),
    "encrypted": (CENTRAL, 8, "<H", 1, "encrypted"),
    "patched": (CENTRAL, 8, "<H", 0x20, "patched"),
    "strongly encrypted": (CENTRAL, 8, "<H", 0x41, "encrypted|encryption"),
    "a method that nobody knows": (CENTRAL, 10, "<H", 77, "method 77"),
    "more bytes than there are": (CENTRAL, 20, "<I", 10**6, "outside the archive"),
    "a longer file": (CENTRAL, 24, "<I", 4_000, "claims 4,000"),
    "another checksum": (CENTRAL, 16, "<I", 7, "CRC-32"),
    "no local header": (LOCAL, 0, "<I", 0, "magic number"),
    "a link": (CENTRAL, 38, "<I", (stat.S_IFLNK | 0o777) << 16, "is a link"),
}


@pytest.mark.parametrize("lie", ZIP_LIES)
def test_a_member_that_lies_is_rejected_by_itself(tmp_path, lie):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"pixels" * 50), ("b.jpg", b"bbb")])
    signature, offset, form, value, message = ZIP_LIES[lie]
    patch(path, signature, offset, form, value)
    images = ImageZip(path)
    assert rejection(images, "a.jpg").startswith("damaged archive member: a.jpg: ")
    with pytest.raises(Rejected, match=message):
        images.read("a.jpg")
    assert images.read("b.jpg") == b"bbb"


def test_a_claim_of_more_than_four_gigabytes_is_rejected(tmp_path):
    """Sizes in the zip64 extra field, 2^40 bytes in a file of 200."""
    name, extra = b"a.jpg", struct.pack("<HHQQ", 1, 16, 2**40, 2**40)
    local = LOCAL + struct.pack("<5H3I2H", 45, 0, 0, 0, 33, 0, 2**32 - 1, 2**32 - 1, 5, len(extra)) + name + extra
    central = CENTRAL + struct.pack(
        "<6H3I5H2I", 45, 45, 0, 0, 0, 33, 0, 2**32 - 1, 2**32 - 1, 5, len(extra), 0, 0, 0, 0, 0
    )
    central += name + extra
    end = END + struct.pack("<4H2IH", 0, 0, 1, 1, len(central), len(local) + 6, 0)
    path = tmp_path / "images.zip"
    path.write_bytes(local + b"pixels" + central + end)
    assert rejection(ImageZip(path), "a.jpg").startswith("too large: a.jpg is 1,099,511,627,776 bytes")


ZIP_ENDS = {
    "cut short": lambda data: data[:-10],
    "without its table of contents": lambda data: data[: data.index(CENTRAL)],
    "with a table of 4 GB": lambda data: data[:-10] + b"\xff\xff\xff\xfe" + data[-6:],
    "with a table that is no table": lambda data: data.replace(CENTRAL, b"XXXX"),
    "of several parts": lambda data: (
        data[:-22] + (b"PK\6\7" + struct.pack("<IQI", 1, 0, 2) + data[-22:-2].replace(b"\1\0", b"\xff\xff") + b"\0\0")
    ),
    "of a version to come": lambda data: data.replace(CENTRAL + b"\x14\x03\x14", CENTRAL + b"\x14\x03\xff"),
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("end", ZIP_ENDS)
def test_a_zip_that_cannot_be_listed_is_refused_in_one_line(tmp_path, end):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"pixels")])
    path.write_bytes(ZIP_ENDS[end](path.read_bytes()))
    with pytest.raises(SourceError) as caught:
        open_image_store(path)
    assert str(caught.value).startswith(f"{path}")
    assert "\n" not in str(caught.value)


def test_a_zips_name_that_is_wrongly_marked_as_utf8_is_passed_over(tmp_path):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"a"), ("\u6f22.jpg", b"b"), ("d.jpg", b"d")])
    entry = CENTRAL + b"\x14\x03\x14\0"
    data = path.read_bytes().replace(entry + b"\0\x08", entry + b"\0\x88")  # and a mark that means nothing
    path.write_bytes(data.replace(b"a.jpg", b"\xff.jpg").replace(entry + b"\0\0", entry + b"\0\x08"))
    images = ImageZip(path)
    assert images.listing().names == ["d.jpg", "\u6f22.jpg"]
    assert images.listing().not_utf8 == [os.fsdecode(b"\xff.jpg")]
    assert (images.read("\u6f22.jpg"), images.read("d.jpg")) == (b"b", b"d")


def test_a_zip64_index_that_claims_exabytes_is_refused(tmp_path):
    path = tmp_path / "images.zip"
    end64 = b"PK\6\6" + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, 1, 1, 2**60, 0)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, 100, 1)
    end = END + struct.pack("<4H2IH", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    path.write_bytes(bytes(100) + end64 + locator + end)
    with pytest.raises(SourceError, match="not a zip that can be read"):
        open_image_store(path)
    with path.open("wb") as stream:  # sparse: as large as it claims
        size = MAX_INDEX_BYTES + 1
        stream.seek(size)
        stream.write(b"PK\6\6" + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, 1, 1, size, 0))
        stream.write(b"PK\6\7" + struct.pack("<IQI", 0, size, 1) + end)
    with pytest.raises(SourceError, match="its table of contents needs 1,073,741,825 bytes"):
        open_image_store(path)


def test_the_last_end_record_counts_as_in_any_reader_of_zips(tmp_path):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"pixels")])
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"hello"
    assert ImageZip(path).read("a.jpg") == b"pixels"
    with path.open("ab") as stream:
        stream.write(END + bytes(18))
    assert ImageZip(path).listing().names == []


TAR_MEMBERS = {
    "a symbolic link": ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "is a link"),
    "a hard link to a later member": ({"type": tarfile.LNKTYPE, "linkname": "b.jpg"}, "is a link"),
    "a hard link to itself": ({"type": tarfile.LNKTYPE, "linkname": "a.jpg"}, "is a link"),
    "a hard link out of the tar": ({"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}, "is a link"),
    "a hard link to nothing": ({"type": tarfile.LNKTYPE, "linkname": ""}, "is a link"),
    "a hard link to a link": ({"type": tarfile.LNKTYPE, "linkname": "hard.jpg"}, "is a link"),
    "a hard link to a symbolic link": ({"type": tarfile.LNKTYPE, "linkname": "soft.jpg"}, "is a link"),
    "a hard link to a name that comes twice": ({"type": tarfile.LNKTYPE, "linkname": "twice.jpg"}, "is a link"),
    "a device": ({"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}, "is not a file"),
    "a pipe": ({"type": tarfile.FIFOTYPE}, "is not a file"),
}


def link(name: str, kind: bytes, linked_to: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, linked_to
    return member


@pytest.mark.parametrize("kind", TAR_MEMBERS)
def test_members_of_a_tar_that_are_no_files_are_rejected(tmp_path, kind):
    fields, message = TAR_MEMBERS[kind]
    member = tarfile.TarInfo("a.jpg")
    for field, value in fields.items():
        setattr(member, field, value)
    path = tmp_path / "images.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("first.jpg", "twice.jpg", "twice.jpg"):
            archive.addfile(tarfile.TarInfo(name))
        for name, kind in (("hard.jpg", tarfile.LNKTYPE), ("soft.jpg", tarfile.SYMTYPE)):
            archive.addfile(link(name, kind, "first.jpg"))
        archive.addfile(member)
        archive.addfile(tarfile.TarInfo("b.jpg"))
    assert message in rejection(ImageTar(path), "a.jpg")
    assert ImageTar(path).read("b.jpg") == b""


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


def pax_header(records: bytes, kind: bytes = tarfile.XHDTYPE, size: int | None = None) -> bytes:
    header = tarfile.TarInfo("pax")
    header.type, header.size = kind, len(records) if size is None else size
    return header.tobuf(tarfile.GNU_FORMAT) + records + bytes(-len(records) % 512)


def ustar(name: str, data: bytes = b"", *, size: int | None = None) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = len(data) if size is None else size
    return header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def pax_record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n"
    length = len(body) + len(str(len(body) + 3))
    return f"{length}{body}".encode()


NOTHING = bytes(1_024)

TARS_REFUSED = {
    "empty": b"",
    "no tar": b"nothing at all" * 100,
    "cut in a header": ustar("a.jpg", b"pixels") + ustar("b.jpg")[:300],
    "cut in a file": ustar("a.jpg", bytes(5_000))[:1_024],
    "cut between members": ustar("a.jpg", b"pixels"),
    "damaged in the middle": ustar("a.jpg", b"pixels") + ustar("b.jpg").replace(b"b.jpg", b"x.jpg") + NOTHING,
    "a file of 2^60 bytes": ustar("a.jpg", b"pixels", size=2**60) + NOTHING,
    "a file of negative size": ustar("a.jpg", b"pixels")
    + pax_header(pax_record("size", "-1024"))
    + ustar("b.jpg")
    + NOTHING,
    "a header of negative size": ustar("a.jpg") + pax_header(b"", size=-512) + NOTHING,
    "a header of a gigabyte": pax_header(b"x" * 100, size=2**30) + NOTHING,
    "a header of a million digits": pax_header(b"1" * 10_000) + ustar("a.jpg") + NOTHING,
    "headers of headers": pax_header(pax_record("comment", "x")) * 3_000 + ustar("a.jpg") + NOTHING,
    "a header of nothing": pax_header(b"0 a=b\n") + ustar("a.jpg") + NOTHING,
    "headers for all that never end": b"".join(
        pax_header(b"".join(pax_record(f"key{number}.{more}", "x") for more in range(20)), tarfile.XGLTYPE)
        + ustar(f"{number}.jpg")
        for number in range(10)
    )
    + NOTHING,
    "a long name of a gigabyte": pax_header(b"x" * 100, tarfile.GNUTYPE_LONGNAME, size=2**30) + NOTHING,
    "sparse beyond its end": pax_header(
        pax_record("GNU.sparse.major", "1")
        + pax_record("GNU.sparse.minor", "0")
        + pax_record("GNU.sparse.realsize", "9")
    )
    + ustar("a.jpg"),
}


@pytest.mark.parametrize("lie", TARS_REFUSED)
def test_a_tar_that_cannot_be_followed_is_refused_in_one_line(tmp_path, lie):
    path = tmp_path / "images.tar"
    path.write_bytes(TARS_REFUSED[lie])
    with pytest.raises(SourceError) as caught:
        open_image_store(path)
    assert "images.tar" in str(caught.value)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(("mode", "name"), [("gz", "gzip"), ("bz2", "bzip2"), ("xz", "xz")])
def test_a_compressed_tar_is_refused_in_one_line(tmp_path, mode, name):
    path = tmp_path / f"images.tar.{mode}"
    with tarfile.open(path, f"w:{mode}") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(SourceError, match=rf"is compressed by {name}, so it cannot be read in place"):
        open_image_store(path)


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
    entries = [("top/a.jpg", b"pixels" * 20), ("top/b.jpg", bytes(600)), ("top/" + "long" * 30 + ".jpg", b"x")]
    whole = MAKERS[kind](tmp_path / f"whole.{kind}", entries).read_bytes()
    if kind == "zip":
        whole = make_zip(tmp_path / "whole.zip", entries, zipfile.ZIP_DEFLATED).read_bytes()
    rng, path = np.random.default_rng(1), tmp_path / f"images.{kind}"
    ends = {"refused": 0, "rejected": 0, "read": 0}
    for _ in range(FUZZED):
        path.write_bytes(damaged(whole, rng))
        images = opened(path)
        if isinstance(images, str):
            assert "\n" not in images
            ends["refused"] += 1
            continue
        for name in images.listing().names:
            data = read(images, name)
            ends["read" if data is not None else "rejected"] += 1
            assert kind == "tar" or data in [None, *(data for _, data in entries)]
    assert min(ends["refused"], ends["read"], ends["rejected"] if kind == "zip" else FUZZED) > FUZZED // 40, ends


def opened(path: Path) -> ImageStore | str:
    """The archive, or why it is refused."""
    try:
        store = open_image_store(path)
        store.listing()
    except SourceError as error:
        return str(error)
    return store


def read(images: ImageStore, name: str) -> bytes | None:
    try:
        return images.read(name)
    except Rejected:
        return None


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
