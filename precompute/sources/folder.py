"""Any tree of images, in a folder, a zip or a tar; captions in `name.txt` beside `name.jpg` where there are any."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from cache_store.errors import SourceError
from precompute.images import SUFFIXES
from precompute.rejects import Rejected
from precompute.sources.image_store import ImageStore, open_image_store


class FolderSource:
    """Samples are the images found; a sample's id is its name in the tree."""

    def __init__(self, path: Path, images: Path | None) -> None:
        assert images is None, "SourceConfig refuses it"
        self._images: ImageStore = open_image_store(path)

    def samples(self) -> Iterator[dict[str, object]]:
        names = list(self._images.names())
        texts = {name for name in names if name.endswith(".txt")}
        for name in names:
            if PurePosixPath(name).suffix.lower() in SUFFIXES:
                yield {
                    "id": name,
                    "uri": name,
                    "conversations": self._conversations(str(PurePosixPath(name).with_suffix(".txt")), texts),
                    "fingerprint": self.fingerprint(name),
                }

    def fingerprint(self, uri: str) -> str:
        return self._images.fingerprint(uri)

    def read(self, uri: str) -> bytes:
        return self._images.read(uri)

    def _conversations(self, text: str, texts: set[str]) -> list[dict[str, str]]:
        if text not in texts:
            return []
        try:
            caption = self._images.read(text).decode("utf-8-sig").strip()  # without the mark of some editors
        except (Rejected, UnicodeDecodeError) as error:
            raise SourceError(f"caption {text} cannot be read as UTF-8 text: {error}") from None
        if not caption:
            return []
        return [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": caption}]
