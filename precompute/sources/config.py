"""The `source:` section of a build's config; it imports no library that opens a source."""

from dataclasses import asdict, dataclass, field
from typing import Literal

import msgspec

from cache_store.errors import ConfigError
from cache_store.format.array import MAX_COUNT, MAX_SIDE, TextRecipe

Kind = Literal["llava", "folder", "table", "webdataset", "parquet", "cache"]


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    images_are: str = ""
    """Where its images are, unless `source.images` says it."""
    add_texts: str
    """How to give a sample a text."""
    fields: frozenset[str] = frozenset()
    """The fields of FieldNames that it uses."""


SOURCES: dict[str, SourceKind] = {
    "llava": SourceKind(
        add_texts="Give each record an answer in its conversations",
        fields=frozenset({"extra"}),
    ),
    "table": SourceKind(
        add_texts="Name the column with source.fields.caption",
        fields=frozenset({"image", "id", "caption", "extra"}),
    ),
    "folder": SourceKind(
        images_are="source.path is the image tree",
        add_texts="Put each caption beside its image, as name.txt",
    ),
    "webdataset": SourceKind(
        images_are="the tars hold their images",
        add_texts="Put a .txt, or a .json with caption, beside each image",
        fields=frozenset({"image", "captions", "extra"}),
    ),
    "parquet": SourceKind(
        images_are="the rows hold their images",
        add_texts="Name the column with source.fields.caption, or source.fields.conversations",
        fields=frozenset({"image", "id", "caption", "captions", "conversations", "extra"}),
    ),
    "cache": SourceKind(
        images_are="the other cache remembers its images",
        add_texts="Give that cache's source the texts, and plan it again in a new cache",
        fields=frozenset({"image"}),
    ),
}


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Names of a sample's fields, if they are not the usual ones."""

    image: str | None = None
    """webdataset: the extension, if a sample has several images (jpg, seg.png). parquet: the column; default: image,
    img, or a format's name. table: the column of file names; default: these, file_name, path or image_path. cache:
    another column of the Parquet files that the cache was made from. For videos: video instead of image."""
    id: str | None = None
    """parquet, table: the column; default: id, key or __key__; without one, the id is file and row, or the file."""
    caption: str | None = None
    """parquet, table: the column; default: caption, text, txt, and prompt of a table; may be absent."""
    captions: list[str] | None = None
    """If a sample has several captions: parquet: columns, webdataset: keys of the .json, each a text or a list of
    texts. A sample without any of them uses its caption."""
    conversations: str | None = None
    """parquet: the column; default: conversations; a row that has them does not use its caption."""
    extra: list[str] | None = None
    """Fields that travel in the plan, for `cache.samples` and `cache.where`: parquet, table: columns. webdataset: keys
    of the .json. llava: keys of the record. Each has texts, whole numbers, numbers, true or false, or lists of texts.
    """

    def __post_init__(self) -> None:
        from cache_store.format.tables import extra_problem  # needs Arrow, as `--help` does not

        if problem := extra_problem(self.extra or []):
            raise ConfigError(f"source.fields.extra: {problem}")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The source of images, or with `clip` of videos, and their texts."""

    kind: Kind | Literal["auto"] = "auto"
    """llava: a chat.json of id, image and conversations, or JSON Lines of such records. folder: a tree of images, with
    captions in name.txt beside them. table: a CSV, or JSON Lines, of file names and captions. webdataset: img2dataset's
    tars, with a .txt or .json per image. parquet: rows of images and texts, as Hugging Face datasets writes. cache: the
    samples of another cache, in the same rows, so that both can be read together. auto: by the name of source.path; a
    folder, or JSON Lines, by what it holds."""
    path: str
    """llava, table: the list. folder: the folder, or a zip or an uncompressed tar of one. webdataset, parquet: a file,
    a folder of files, or a pattern: 'shards/{00000..00099}.tar', 'data/train-*.parquet'. cache: the other cache. URLs
    are read in place: s3://BUCKET/…, gs://…, az://…, hf://datasets/OWNER/NAME/…"""
    images: str | None = None
    """llava, table: a folder, or a zip or uncompressed tar that is read in place; or such a URL. Default: the list's
    folder."""

    text: Literal["caption"] | None = None
    """For a text encoder: which text of a sample it reads. caption: the caption, or the first answer of the
    conversation, empty or not; a sample without one is rejected."""
    caption: int = 1
    """For a text encoder: which of a sample's captions it reads, from 1; a sample with fewer begins again with its
    first. Caches of the first, the second, … are views of the texts."""
    shuffle_tags: int | None = None
    """For a text encoder: a seed by which the caption's tags, between commas, are put into another order for each
    sample; null: they stay. Caches of several seeds are views of the texts."""
    keep_tags: int = 0
    """With shuffle_tags: number of first tags that keep their places, such as a trigger word."""

    fields: FieldNames = field(default_factory=FieldNames)

    def __post_init__(self) -> None:
        if not 1 <= self.caption <= MAX_SIDE:
            raise ConfigError(f"source.caption must be in [1, {MAX_SIDE:,}], got {self.caption:,}")
        for name in ("shuffle_tags", "keep_tags"):
            if not 0 <= (value := getattr(self, name) or 0) <= MAX_COUNT:
                raise ConfigError(f"source.{name} must be in [0, {MAX_COUNT:,}], got {value:,}")
        if self.keep_tags and self.shuffle_tags is None:
            raise ConfigError("source.keep_tags has no effect without source.shuffle_tags; set both, or leave it out")
        if self.kind == "auto":
            return
        kind = SOURCES[self.kind]
        if kind.images_are and self.images is not None:
            kinds = " or ".join(name for name, each in SOURCES.items() if not each.images_are)
            raise ConfigError(f"source.images is for kind {kinds}; with kind {self.kind}, {kind.images_are}")
        if unused := {name for name, value in asdict(self.fields).items() if value} - kind.fields:
            raise ConfigError(f"source.fields.{min(unused)} has no effect for kind {self.kind}; leave it out")

    def recipe(self, recipe: TextRecipe) -> TextRecipe:
        """Return a text encoder's recipe for the text that is chosen here."""
        chosen = {"caption": self.caption, "shuffle_tags": self.shuffle_tags, "keep_tags": self.keep_tags}
        return msgspec.structs.replace(recipe, **chosen)
