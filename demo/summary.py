"""Show the demo's results in tables, from the files that the programs left on disk."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from cache_store import Cache, open_cache
from cache_store.cache.metadata import read_commit, read_samples
from cache_store.format.tables import REJECTED
from demo.config import DemoConfig
from demo.measure import WordAccuracy
from trainer.run.folder import read_records

STAND_INS = """\
The weights of this demo are small stand-ins: the VAE's are random, and the language model has read nothing but a few
thousand captions. It shows that every step works. Two lines of YAML load the real weights:

  configs/llava_cc3m.yaml         encoder.model: nvidia/Cosmos-Predict2-2B-Video2World
  configs/train_llava_cc3m.yaml   model.language_model: google/gemma-3-4b-it"""


def show(console: Console, config: DemoConfig, words: Mapping[str, WordAccuracy], seconds: Mapping[str, float]) -> None:
    """Print tables of the cache, losses, accuracy by kind of word and seconds by step, and a verdict."""
    cache, run = open_cache(config.build_config().cache), config.train_config().run
    *_, validated = read_records(run.folder)
    console.rule("Results")
    for table in (facts_table(cache, validated, seconds), rejects_table(cache), words_table(words)):
        console.print(table)
        console.print()
    console.print(f"{verdict(words['colour'])}\n\n{STAND_INS}")


def facts_table(cache: Cache, validated: Mapping[str, float], seconds: Mapping[str, float]) -> Table:
    seal, root = cache.seal, Path(str(cache.store))
    records = filter(None, (read_commit(cache.store, shard) for shard in range(cache.spec.num_shards)))
    images_per_s = seal.spec.rows / sum(record.run.seconds for record in records)
    disk_bytes = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("images", f"{seal.spec.rows:,} planned = {seal.cached:,} cached + {seal.rejected:,} rejected")
    # The speed of one worker: records do not say which shards were built at the same time.
    table.add_row("encoding", f"{images_per_s:,.0f} images/s a worker, decoding and writing included")
    table.add_row("cache size", f"{disk_bytes / 1e6:.1f} MB")
    table.add_row(
        "loss, own latents",
        f"{validated['val_loss']:.3f} per label token, {validated['val_accuracy']:.1%} of them right, held-out scenes",
    )
    shuffled = f"{validated['val_loss_shuffled']:.3f}, {validated['val_accuracy_shuffled']:.1%} right"
    table.add_row("loss, shuffled latents", shuffled)
    steps = ", ".join(f"{title} {taken:.0f} s" for title, taken in seconds.items())
    table.add_row("time", f"{sum(seconds.values()):.0f} s: {steps}")
    return table


def rejects_table(cache: Cache) -> Table:
    table = Table("rejected", "reason", box=None)
    for shard in range(cache.spec.num_shards):
        rejected = read_samples(cache.store, shard, ["id", "status", "reason"]).filter(pc.field("status") == REJECTED)
        for sample in rejected.to_pylist():
            table.add_row(sample["id"], sample["reason"])
    return table


def words_table(words: Mapping[str, WordAccuracy]) -> Table:
    table = Table("held-out words", "own latents", "blind (another scene's)", "pure chance", box=None)
    for kind, accuracy in words.items():
        shares = (accuracy.own, accuracy.blind, 1 / accuracy.choices)
        table.add_row(f"{accuracy.words:,} {kind} words", *(f"{share:.1%}" for share in shares))
    return table


def verdict(colour: WordAccuracy) -> str:
    """Say whether the projector learned: its share must exceed the blind share by three standard errors."""
    error = (colour.blind * (1 - colour.blind) / colour.words) ** 0.5
    if colour.own > colour.blind + 3 * error:
        return f"The projector learned: {colour.own:.0%} of colour words right, {colour.blind:.0%} without the image."
    return f"The projector has not learned colours: {colour.own:.0%} right, {colour.blind:.0%} without the image."
