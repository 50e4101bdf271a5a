"""Print an estimate: rates, hours, bytes, and the number of epochs after which the cache pays off."""

from collections.abc import Iterator
from math import ceil, inf

from cache_store.messages import align_rows, counted, shown_time
from precompute.estimate.costs import HOUR_S, Prices, Training, build_hours, cores_to_feed
from precompute.estimate.estimate import Estimate
from precompute.estimate.probe import Probe
from precompute.rerun.refusals import shown_bytes

WORKERS = (1, 4, 8, 64)


def estimate_lines(estimate: Estimate) -> Iterator[str]:
    probe, config = estimate.probe, estimate.config
    yield f"{counted(estimate.spec.rows, 'sample')}; {probe.images:,} drawn at random, probed for {probe.seconds:.0f} s"
    if probe.rejected:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(probe.rejected.items()))
        yield f"rejected among these: {reasons}"
    yield ""
    yield from rate_lines(estimate)
    yield ""
    yield from hour_lines(estimate)
    if estimate.prices:
        yield from price_lines(estimate, estimate.prices)
    yield ""
    yield from size_lines(estimate)
    yield ""
    yield from training_lines(estimate)
    if config.epochs is not None:
        yield from (verdict(estimate, training, config.epochs) for training in estimate.trainings)
    elif estimate.prices:
        yield "the saving in dollars depends on the number of epochs: give --epochs N"


def rate_lines(estimate: Estimate) -> Iterator[str]:
    probe, write_per_s = estimate.probe, estimate.size.write_per_s
    threads = counted(probe.decode_threads, "thread")
    bound = "the decoding" if probe.is_decode_bound else "the encoder"
    if write_per_s < probe.both_per_s:
        bound = "the writing"
    waits = f"; the encoder waits for {probe.made_of}s {probe.waiting_share:.0%} of the time"
    rows = [
        ("decode alone", rate(probe, probe.decode_per_s), threads),
        ("encode alone", rate(probe, probe.encode_per_s), probe.device),
        ("write alone", rate(probe, write_per_s), "without the disk"),
        (
            "a worker",
            rate(probe, estimate.at_most(probe.both_per_s)),
            f"bound by {bound}{', on cores that both share' if probe.shares_cores else waits}",
        ),
    ]
    yield from align_rows(rows)
    cores = ceil(cores_to_feed(probe.encode_per_s, probe.decode_per_s, probe.decode_threads))
    beside = ", plus the cores that it runs on" if probe.shares_cores else ""
    yield f"one encoder is kept busy by {counted(cores, 'decoding core')}{beside}"


def rate(probe: Probe, per_s: float) -> str:
    digits = 1 if per_s < 100 else 0
    return f"{per_s:,.{digits}f} {probe.made_of}s/s"


def hour_lines(estimate: Estimate) -> Iterator[str]:
    """Yield the hours by number of workers: as measured, and, if decoding is the limit, with enough cores."""
    probe = estimate.probe
    rows = [("workers", *map(str, WORKERS)), hour_row("time", estimate, estimate.at_most(probe.both_per_s))]
    note = f"if each has an encoder and {counted(probe.decode_threads, 'core')} to decode with, as here"
    if probe.is_decode_bound and not probe.shares_cores:
        rows.append(hour_row("fed", estimate, estimate.at_most(probe.encode_per_s)))
        note += "; fed: with enough cores to decode"
    yield from align_rows(rows)
    shards = counted(estimate.spec.num_shards, "shard")
    yield f"{note}; with {estimate.start_s:.0f} s to start, and {shards} to share"


def price_lines(estimate: Estimate, prices: Prices) -> Iterator[str]:
    """Yield the price of encoding with a worker that has its own GPU."""
    probe, at_most = estimate.probe, estimate.at_most
    dollars = dollars_a_million(at_most(probe.both_per_s), prices)
    line = f"a million {probe.made_of}s at ${prices.gpu_hour:g} a GPU-hour: {dollars}"
    if probe.is_decode_bound and not probe.shares_cores:
        line += f"; with enough cores to feed it {dollars_a_million(at_most(probe.encode_per_s), prices)}"
    yield line


def dollars_a_million(images_per_s: float, prices: Prices) -> str:
    return f"${build_hours(1_000_000, images_per_s) * prices.gpu_hour:,.2f}"


def hour_row(name: str, estimate: Estimate, images_per_s: float) -> tuple[str, ...]:
    spec = estimate.spec
    hours = (build_hours(spec.rows, images_per_s, workers, spec.num_shards) for workers in WORKERS)
    return (name, *(shown_time(estimate.start_s + HOUR_S * each) for each in hours))


def size_lines(estimate: Estimate) -> Iterator[str]:
    chosen = estimate.spec.array.codec
    rows = [("codec", "bytes a sample", "whole cache")]
    for codec, size in estimate.sizes.items():
        rows.append((codec + " (chosen)" * (codec == chosen), f"{size.sample_bytes:,.0f}", shown_bytes(size.total)))
    yield from align_rows(rows)
    if estimate.free is None:
        yield f"free at {estimate.config.cache}: unknown"
    else:
        fits = "" if estimate.fits else ": too little"
        yield f"free at {estimate.config.cache}: {shown_bytes(estimate.free)}{fits}"


def training_lines(estimate: Estimate) -> Iterator[str]:
    """Yield the step times with encoding and from the cache, and when the cache has paid off."""
    first, prices = estimate.trainings[0], estimate.prices
    gpus = f" on {first.gpus} GPUs" if first.gpus > 1 else ""
    yield f"training, batches of {first.batch_size:,}{gpus}: encoding adds {shown_s(first.encode_s)} to each step"
    headings = ["a step", "with encoding", "from the cache", "speed-up", "build paid after"]
    rows = [tuple(headings + ["and storage"] * (prices is not None))]
    for training in estimate.trainings:
        times = [training.step_s, training.live_step_s, training.cached_step_s]
        faster = f"{training.live_step_s / training.cached_step_s:,.2f}x"
        epochs = [training.break_even_epochs()]
        if prices:
            epochs.append(prices.break_even_epochs(training, estimate.size.total, estimate.config.months))
        rows.append((*map(shown_s, times), faster, *map(shown_epochs, epochs)))
    yield from align_rows(rows)
    yield (
        f"build: {shown_time(HOUR_S * first.build_gpu_hours)} on one worker; cached samples are read ahead at "
        f"{estimate.config.read_mb_per_s:g} MB/s; a training with encoding decodes ahead, as the probe did"
    )


def shown_s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"


def shown_epochs(epochs: float) -> str:
    return "never" if epochs == inf else in_epochs(f"{epochs:.1f}")


def in_epochs(number: str) -> str:
    return f"{number} epoch{'' if float(number) == 1 else 's'}"


def verdict(estimate: Estimate, training: Training, epochs: float) -> str:
    """Say whether caching pays off in `epochs` epochs, in dollars if prices are known."""
    hours, prices = training.saved_gpu_hours(epochs), estimate.prices
    what = f"{in_epochs(f'{epochs:g}')} at {shown_s(training.step_s)} a step"
    counted, gain = f"{shown_time(HOUR_S * abs(hours))} of a GPU {'saved' if hours > 0 else 'lost'}", hours
    if prices:
        stored = prices.storage(estimate.size.total, estimate.config.months)
        gain = prices.saved(hours, estimate.size.total, estimate.config.months)
        counted += f", ${stored:,.2f} of storage: ${abs(gain):,.2f} {'saved' if gain > 0 else 'lost'}"
    return f"{what}: caching {'pays' if gain > 0 else 'does not pay'}, {counted}"
