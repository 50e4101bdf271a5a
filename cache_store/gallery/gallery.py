"""Make a cache's gallery: draw rows, look them up, lay them out, write the page."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cache_store.cache.entry_points import ReadImage, find_source_images
from cache_store.cache.metadata import read_build, read_commit
from cache_store.cache.reader import Cache, open_cache
from cache_store.errors import CacheError, ConfigError, EncodeOnceError
from cache_store.format.schema import CommitRecord
from cache_store.gallery.command import GalleryConfig
from cache_store.gallery.exhibits import Decode, Exhibit, Showcase, choose_samples, draw_rejects, random_numbers
from cache_store.gallery.histograms import count_values
from cache_store.gallery.page import Gallery, PageContent, render
from cache_store.gallery.sheets import contact_sheet
from cache_store.program.output_file import refuse_inside, refuse_output, write_output
from cache_store.program.progress_bar import ProgressBar
from cache_store.storage.local import write_file
from cache_store.storage.store import Address, Store

SHOWN_COMMITS = 2_000
"""Most shards in the throughput plot; of more shards, evenly spaced ones are shown."""


def make_gallery(address: Address, config: GalleryConfig, decode: Decode | None = None) -> Gallery:
    """Write the page and the contact sheets of a sealed cache.

    The cost depends on the number of rows and the limits of the draw, not on the cache's size. `decode` adds decoded
    images, error maps and PSNR.
    """
    cache = open_cache(address)
    refuse_output("--output", config.page, cache.root)
    refuse_output("--sheets", config.sheet("rejected"), cache.root)
    refuse_among_images(config.sheet("rejected"), cache.store)
    content = collect(cache, config, decode)
    write_output(config.page, render(content).encode())
    return Gallery(page=config.page, sheets=tuple(write_sheets(content, config)), content=content)


def refuse_among_images(sheet: Path, store: Store) -> None:
    """Raise ConfigError if the next build of the cache would take a sheet for a new sample."""
    with suppress(CacheError):  # the page says that its source is unknown
        source = read_build(store).config.get("source")
        if isinstance(source, dict) and source.get("kind") == "folder":
            refuse_inside("--sheets", sheet, str(source.get("path")), "folder of images")


def collect(cache: Cache, config: GalleryConfig, decode: Decode | None) -> PageContent:
    """Collect everything the page shows."""
    drawn = choose_samples(cache, config.seed)
    numbers = numbers_to_show(cache, config)
    is_of_texts = cache.spec.array.text is not None
    read_image, source_problem = (None, None) if is_of_texts else source_reader(cache.store)
    showcase = Showcase(cache=cache, read_image=read_image, source_problem=source_problem, decode=decode)
    exhibits = showcase.cached(numbers)
    return PageContent(
        cache=cache,
        seed=config.seed,
        where=config.where,
        histograms=count_values(cache, drawn),
        shown=[exhibits[number] for number in numbers],
        rejected=showcase.rejected(draw_rejects(cache, config.rows, config.seed)),
        records=read_commits(cache),
        source_problem=source_problem,
    )


def numbers_to_show(cache: Cache, config: GalleryConfig) -> list[int]:
    if config.where is None:
        drawn: list[int] = random_numbers(cache, config.rows, config.seed).tolist()
        return drawn
    numbers: list[int] = cache.where(config.where)[: config.rows].tolist()
    if not numbers:
        raise ConfigError(f"--where: {config.where} is true for no cached sample; rejected rows are shown anyway")
    return numbers


def source_reader(store: Store) -> tuple[ReadImage | None, str | None]:
    """Return a reader of source images, or why there is none."""
    try:
        return find_source_images(store), None
    except EncodeOnceError as error:
        return None, str(error)


def read_commits(cache: Cache) -> list[CommitRecord]:
    """Read the records of all shards, or of `SHOWN_COMMITS` evenly spaced ones."""
    shards = cache.spec.num_shards
    shown = range(shards) if shards <= SHOWN_COMMITS else [i * shards // SHOWN_COMMITS for i in range(SHOWN_COMMITS)]
    records = list[CommitRecord | None]()
    with ProgressBar("records", len(shown), "shard") as bar:
        for shard in shown:
            records.append(read_commit(cache.store, shard))
            bar.update()
    return [record for record in records if record is not None]


def write_sheets(content: PageContent, config: GalleryConfig) -> list[Path]:
    """Write a sheet per kind of rows; delete an older sheet of a kind without rows."""
    kinds: dict[str, Sequence[Exhibit]] = {"random": (), "chosen": (), "rejected": content.rejected}
    kinds[content.kind] = content.shown
    if content.cache.spec.array.image is None:
        kinds = dict.fromkeys(kinds, ())  # a sheet of pictures has nothing to show of texts
    written = []
    for kind, exhibits in kinds.items():
        path = config.sheet(kind)
        if not exhibits:
            path.unlink(missing_ok=True)
            continue
        write_file(path, contact_sheet(f"{content.cache.name}: {kind} rows", exhibits))
        written.append(path)
    return written
