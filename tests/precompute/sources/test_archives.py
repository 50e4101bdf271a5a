"""Hostile folders, zips and tars: nothing leads out, unpacks without a bound, waits, or hides another file."""

import gzip
import io
import os
import resource
import stat
import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from cache_store.errors import SourceError
from precompute.images.rejected import Rejected
from precompute.sources.image_store import open_image_store
from precompute.sources.images import Images, ImageStore
from precompute.sources.listing import NOT_UTF8
from precompute.sources.place import MAX_FILE_BYTES, MISSING
from tests.precompute.images.hostile_images import mutated

Entry = tuple[str, bytes]

FILE, GNU = tarfile.REGTYPE, tarfile.GNU_FORMAT
NOTHING = bytes(1_024)
"""The end of a tar."""


def make_zip(path: Path, entries: list[Entry], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries:
            with pytest.warns(UserWarning, match="Duplicate") if name in archive.namelist() else nullcontext():
                archive.writestr(zipfile.ZipInfo(name), data, compression)
    return path


def member(
    name: str, data: bytes = b"", kind: bytes = FILE, *, size: int | None = None, linked_to: str = "", form: int = GNU
) -> bytes:
    """Make a tar's header, which may lie about the size, and the bytes after it."""
    header = tarfile.TarInfo(name)
    header.type, header.size, header.linkname = kind, len(data) if size is None else size, linked_to
    return header.tobuf(form) + data + bytes(-len(data) % 512)


def make_tar(path: Path, entries: list[Entry]) -> Path:
    path.write_bytes(b"".join(member(name, data) for name, data in entries) + NOTHING)
    return path


MAKERS = {"zip": make_zip, "tar": make_tar}


@pytest.fixture(params=MAKERS)
def make(request, tmp_path) -> Callable[[list[Entry]], ImageStore]:
    return lambda entries: open_image_store(MAKERS[request.param](tmp_path / f"images.{request.param}", entries))


def fetch(images: Images, name: str) -> bytes:
    """Read an image as a build does: where planning finds it."""
    return images.read(name, images.locate(name).place)


def rejection(store: ImageStore, name: str) -> str:
    with pytest.raises(Rejected) as caught:
        fetch(store, name)
    return caught.value.reason


def test_an_archive_of_either_kind_is_read_like_a_folder(make, tmp_path):
    """If the archive shrinks meanwhile, the build stops."""
    images = make([("top/b.jpg", b"bbb"), ("top/sub/a.jpg", bytes(100_000)), ("top/empty.jpg", b"")])
    assert [*images.listing().names] == ["top/b.jpg", "top/empty.jpg", "top/sub/a.jpg"]
    assert fetch(images, "b.jpg") == fetch(images, "top/b.jpg") == b"bbb"
    assert (fetch(images, "sub/a.jpg"), fetch(images, "empty.jpg")) == (bytes(100_000), b"")
    assert rejection(images, "c.jpg").startswith("missing: c.jpg is not in images.")
    assert images.locate("b.jpg") == images.locate("top/b.jpg")
    assert images.locate("c.jpg").fingerprint == MISSING != images.locate("b.jpg").fingerprint
    (path,) = tmp_path.iterdir()
    os.truncate(path, 2_000)
    with pytest.raises(SourceError, match="was changed while it was read"):
        fetch(images, "sub/a.jpg")


def test_a_members_name_is_only_a_name_and_never_two_files(make, tmp_path):
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    names = ["../secret.jpg", "/etc/passwd", "a/../../secret.jpg", "line\nbreak.jpg", "x" * 300]
    images = make([*((name, b"pixels") for name in names), ("twice.jpg", b"first"), ("twice.jpg", b"second")])
    assert [*images.listing().names] == sorted([*names, "twice.jpg"])
    assert {fetch(images, name) for name in names} == {b"pixels"}
    assert rejection(images, "twice.jpg").startswith(
        "ambiguous archive member: twice.jpg occurs more than once in images."
    )
    assert images.locate("twice.jpg").fingerprint == MISSING
    assert rejection(images, "/etc/hostname").startswith("missing: ")
    assert len([*tmp_path.iterdir()]) == 2


def patch(path: Path, offset: int, value: int) -> ImageStore:
    """Open a zip with an overwritten number in the first entry of its index."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.index(b"PK\1\2") + offset, value)
    path.write_bytes(data)
    return open_image_store(path)


def test_a_zip_bomb_stops_at_the_size_it_claims(tmp_path):
    """256 MiB of zeros in 260 KB, which claim to be 1,000 bytes."""
    path = make_zip(tmp_path / "images.zip", [("a.jpg", bytes(2**28))], zipfile.ZIP_DEFLATED)
    images = patch(path, 24, 1_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "Bad CRC-32" in rejection(images, "a.jpg")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**26


ZIP_LIES: dict[str, tuple[int, int, str]] = {
    "encrypted": (8, 1, "encrypted"),
    "a method without a bound, bzip2": (10, zipfile.ZIP_BZIP2, "is compressed by method 12"),
    "a longer file": (24, 4_000, "claims 4,000"),
    "a file of 256 MB": (24, MAX_FILE_BYTES + 1, "too large: a.jpg is 268,435,457 bytes"),
    "a link": (38, (stat.S_IFLNK | 0o777) << 16, "is a link"),
}


@pytest.mark.parametrize("lie", ZIP_LIES)
def test_a_member_that_lies_is_rejected_by_itself(tmp_path, lie):
    path = make_zip(tmp_path / "images.zip", [("a.jpg", b"pixels" * 50), ("b.jpg", b"bbb")])
    *change, reason = ZIP_LIES[lie]
    images = patch(path, *change)
    assert reason in rejection(images, "a.jpg")
    assert fetch(images, "b.jpg") == b"bbb"


NO_FILES = {
    tarfile.SYMTYPE: "is a link",
    tarfile.FIFOTYPE: "is not a file",
    tarfile.GNUTYPE_SPARSE: "is a sparse file",
}


def test_members_of_a_tar_that_are_no_files_are_rejected(tmp_path):
    hostile = [member(f"{number}.jpg", kind=kind, linked_to="/etc/passwd") for number, kind in enumerate(NO_FILES)]
    (tmp_path / "images.tar").write_bytes(b"".join([*hostile, member("b.jpg"), NOTHING]))
    images = open_image_store(tmp_path / "images.tar")
    for number, message in enumerate(NO_FILES.values()):
        assert message in rejection(images, f"{number}.jpg")
    assert fetch(images, "b.jpg") == b""


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_form_are_read_in_place(tmp_path, form):
    """Names that are not UTF-8 are skipped."""
    long, latin = "/".join(["folder" * (4 if form == tarfile.USTAR_FORMAT else 9)] * 5) + "/a.jpg", b"caf\xe9.jpg"
    entries = {f"./{long}": b"first", "./b.jpg": b"second" * 1_000, os.fsdecode(latin): b""}
    data = b"".join(member(name, data, form=form) for name, data in entries.items())
    (tmp_path / "images").write_bytes(member("pax", b"13 comment=x\n", tarfile.XGLTYPE) + data + NOTHING)
    images = open_image_store(tmp_path / "images")
    assert [*images.listing().names] == ["b.jpg", long]
    assert images.listing().skipped == {NOT_UTF8: 1}
    assert fetch(images, long) == b"first"
    assert fetch(images, "b.jpg") == b"second" * 1_000


A = member("a.jpg", b"pixels")
ZIP = make_zip(io.BytesIO(), [("a.jpg", b"pixels")]).getvalue()


ZIPS = {
    "with a table of 4 GB": ZIP[:-10] + b"\xff\xff\xff\xfe" + ZIP[-6:],
    "cut in a member": ZIP[:40],
}
TARS = {
    "cut in a file": member("a.jpg", bytes(5_000))[:1_024],
    "damaged in the middle": A + member("b.jpg").replace(b"b.jpg", b"x.jpg") + NOTHING,
    "a file of 2^60 bytes": member("a.jpg", b"pixels", size=2**60) + NOTHING,
    "a file of negative size": A + member("pax", b"14 size=-1024\n", tarfile.XHDTYPE) + member("b.jpg") + NOTHING,
    "a header of a gigabyte": member("pax", b"x" * 100, tarfile.XHDTYPE, size=2**30) + NOTHING,
}
REFUSED = [
    *(pytest.param("images.zip", data, "its index cannot be read", id=f"zip {lie}") for lie, data in ZIPS.items()),
    *(pytest.param("images.tar", data, "images.tar", id=f"tar {lie}") for lie, data in TARS.items()),
    ("a file", gzip.compress(A, mtime=0), "is packed by gzip"),
    ("a file", b"", "is empty"),
    ("a file", b"a list\n", "is neither a zip nor a tar"),
]


@pytest.mark.parametrize(("name", "data", "message"), REFUSED)
def test_an_archive_that_cannot_be_followed_is_refused(tmp_path, name, data, message):
    """The error is one line that names the archive."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=message) as caught:
        open_image_store(tmp_path / name).listing()
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_damaged_archives_give_files_rejections_or_a_refusal(tmp_path, kind):
    """If a zip's member is read at all, every byte is right."""
    sound = {"top/a.jpg": b"pixels" * 20, "top/b.jpg": bytes(600), "top/" + "long" * 30 + ".jpg": b"x"}
    rng, path, ends = np.random.default_rng(1), tmp_path / f"images.{kind}", Counter[str]()
    whole = MAKERS[kind](path, [*sound.items()]).read_bytes()
    for _ in range(2_000):
        path.write_bytes(mutated([whole], rng))
        try:
            images = open_image_store(path)
            for name in images.listing().names:
                with suppress(Rejected):
                    assert fetch(images, name) in sound.values() or kind == "tar"
                    ends["read"] += 1
        except SourceError:
            ends["refused"] += 1
    assert min(ends["read"], ends["refused"]) >= 50, ends


def test_only_files_are_read_from_a_folder_and_without_waiting(tmp_path):
    """Links are followed, since they are the owner's choice; circular links end."""
    images, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    for folder in (images, elsewhere, images / "folder.jpg"):
        folder.mkdir()
    (elsewhere / "a.jpg").write_bytes(b"pixels")
    (images / "line\nbreak.jpg").write_bytes(b"pixels")
    links = {"linked.jpg": "../elsewhere/a.jpg", "folder": "../elsewhere", "loop": ".", "zero.jpg": "/dev/zero"}
    for name, target in {**links, "nowhere.jpg": "nowhere", "itself.jpg": "itself.jpg"}.items():
        (images / name).symlink_to(target)
    os.mkfifo(images / "pipe.jpg")
    with (images / "huge.jpg").open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    store = open_image_store(images)
    assert {*store.listing().names} == {path.name for path in images.iterdir() if path.suffix} - {"folder.jpg"}
    for name in ("linked.jpg", "folder/a.jpg", "line\nbreak.jpg"):
        assert fetch(store, name) == b"pixels"
    for name in ("nowhere.jpg", "itself.jpg", "../elsewhere/a.jpg", str(elsewhere / "a.jpg"), "", "nul\0.jpg"):
        assert store.locate(name).fingerprint == MISSING
        assert rejection(store, name).startswith("missing: ")
    for name in ("pipe.jpg", "folder.jpg", "zero.jpg", "x" * 256, "a/" * 3_000 + "b.jpg"):
        assert rejection(store, name).startswith("missing: ")
    assert rejection(store, "huge.jpg").startswith("too large: ")


def test_a_worker_reads_no_index_unless_the_archive_was_written_again(make, tmp_path, monkeypatch):
    """A planned place is checked as it is read; where another member lies now, the archive is searched by name."""
    entries = [(f"{number}.jpg", bytes([number]) * 700) for number in range(3)]
    places = {name: (planned := make(entries)).locate(name).place for name, _ in entries}
    (path,) = tmp_path.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(type(planned), "_indexed", None)
        assert [open_image_store(path).read(name, places[name]) for name, _ in entries] == [data for _, data in entries]
    again = make(entries[:0:-1])
    assert [again.read(name, places[name]) for name, _ in entries[1:]] == [data for _, data in entries[1:]]
    with pytest.raises(Rejected, match=r"missing: 0.jpg is not in images"):
        again.read("0.jpg", places["0.jpg"])
