"""What came of the demo: read back from what the programs left on disk, and shown in tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from cache_store import open_cache
from cache_store.cache.files import read_samples
from cache_store.cache.metadata import read_commit
from cache_store.format.tables import REJECTED
from demo.measure import WordAccuracy

STAND_INS = """\
The weights of this demo are small stand-ins: the VAE's are random, and the language model has read nothing but a few
thousand captions. What it shows is that the whole way works. Two lines of YAML load the real ones:

  configs/llava_cc3m.yaml         encoder.model: nvidia/Cosmos-Predict2-2B-Video2World
  configs/train_llava_cc3m.yaml   model.language_model: google/gemma-3-4b-it"""


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    planned: int
    cached: int
    images_per_s: float
    """Of one worker, over its shards: records do not say which of them were built at once."""
    bytes_on_disk: int
    rejects: Mapping[str, str]
    """Sample id to reason."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    cache: CacheFacts
    own_loss: float
    shuffled_loss: float
    words: Mapping[str, WordAccuracy]
    """By kind: colour, shape."""
    seconds: Mapping[str, float]
    """By step."""


def read_cache_facts(root: Path) -> CacheFacts:
    cache = open_cache(root)
    shards = range(cache.spec.num_shards)
    records = [record for shard in shards if (record := read_commit(root, shard))]
    rejects: dict[str, str] = {}
    for shard in shards:
        table = read_samples(root, shard, ["id", "status", "reason"])
        rejected = table.filter(pc.field("status") == REJECTED)
        rejects |= dict(zip(rejected["id"].to_pylist(), rejected["reason"].to_pylist(), strict=True))
    return CacheFacts(
        planned=cache.seal.planned,
        cached=cache.seal.cached,
        images_per_s=cache.seal.planned / sum(record.run.seconds for record in records),
        bytes_on_disk=sum(file.stat().st_size for file in root.rglob("*") if file.is_file()),
        rejects=rejects,
    )


def show(outcome: Outcome, console: Console) -> None:
    console.rule("What came of it")
    for table in (facts_table(outcome), rejects_table(outcome.cache), words_table(outcome.words)):
        console.print(table)
        console.print()
    console.print(f"{verdict(outcome.words['colour'])}\n\n{STAND_INS}")


def facts_table(outcome: Outcome) -> Table:
    cache = outcome.cache
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("images", f"{cache.planned:,} planned = {cache.cached:,} cached + {len(cache.rejects):,} rejected")
    table.add_row("encoding", f"{cache.images_per_s:,.0f} images/s a worker, decoding and writing included")
    table.add_row("cache size", f"{cache.bytes_on_disk / 1e6:.1f} MB")
    table.add_row("loss, own latents", f"{outcome.own_loss:.3f} per label token, held-out scenes")
    table.add_row("loss, shuffled latents", f"{outcome.shuffled_loss:.3f}")
    steps = ", ".join(f"{title} {seconds:.0f} s" for title, seconds in outcome.seconds.items())
    table.add_row("time", f"{sum(outcome.seconds.values()):.0f} s: {steps}")
    return table


def rejects_table(cache: CacheFacts) -> Table:
    table = Table("rejected", "reason", box=None)
    for sample_id, reason in cache.rejects.items():
        table.add_row(sample_id, reason)
    return table


def words_table(words: Mapping[str, WordAccuracy]) -> Table:
    table = Table("held-out words", "own latents", "blind (another scene's)", "pure chance", box=None)
    for kind, accuracy in words.items():
        shares = (accuracy.own, accuracy.blind, 1 / accuracy.choices)
        table.add_row(f"{accuracy.words:,} {kind} words", *(f"{share:.1%}" for share in shares))
    return table


def verdict(colour: WordAccuracy) -> str:
    """In words, whether the projector learned; three standard errors of a share make the difference clear."""
    error = (colour.blind * (1 - colour.blind) / colour.words) ** 0.5
    if colour.own > colour.blind + 3 * error:
        return f"The projector learned: {colour.own:.0%} of colour words right, {colour.blind:.0%} without the image."
    return f"The projector has not learned colours: {colour.own:.0%} right, {colour.blind:.0%} without the image."
