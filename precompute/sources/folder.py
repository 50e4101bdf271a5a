"""A tree of images in a folder, a zip or a tar; `name.txt` beside `name.jpg` is its caption."""

from collections import Counter
from pathlib import PurePosixPath

from cache_store.errors import SourceError
from precompute.images.decode import SUFFIXES
from precompute.images.rejected import Rejected
from precompute.sources.archives.image_store import ImageStore
from precompute.sources.archives.listing import Samples, counted_suffix
from precompute.sources.turns import Conversation, captioned

CAPTION = ".txt"


class FolderSource:
    """Samples are the images found; a sample's id is its name in the tree."""

    def __init__(self, images: ImageStore) -> None:
        self._images = images
        self.fingerprint, self.read = self._images.fingerprint, self._images.read

    def samples(self) -> Samples:
        listing = self._images.listing()
        images = [name for name in listing.names if is_image(name)]
        captions = {name for name in listing.names if name.endswith(CAPTION)}.intersection(map(caption_of, images))
        others = (name for name in listing.names if not is_image(name) and name not in captions)
        return Samples((self._sample(name, captions) for name in images), listing, Counter(map(counted_suffix, others)))

    def _sample(self, name: str, captions: set[str]) -> dict[str, object]:
        text = caption_of(name)
        conversations = self._conversations(text) if text in captions else []
        return {"id": name, "uri": name, "conversations": conversations, "fingerprint": self.fingerprint(name)}

    def _conversations(self, text: str) -> Conversation:
        try:
            return captioned(self.read(text).decode("utf-8-sig"))  # without the mark of some editors
        except (Rejected, UnicodeDecodeError) as error:
            raise SourceError(f"caption {text} cannot be read as UTF-8 text: {error}; mend or remove it") from None


def is_image(name: str) -> bool:
    """Whether the name has an image's suffix; the content decides how the file is read."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def caption_of(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(CAPTION))
