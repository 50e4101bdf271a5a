"""What a run says before its first step: hardware, versions, attention, trained parameters, memory, and warnings."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.distributed.tensor import DTensor

from cache_store.errors import ModelError
from trainer.config import WARMUP_STEPS
from trainer.model.kernels import MATH, attention_kernels
from trainer.model.model_config import PRETRAINED
from trainer.run.memory import memory_bytes
from trainer.run.session import Session

KEPT_BYTES = {"none": 25.0, "selective": 12.0, "full": 2.0}
"""Values that a layer keeps per token for the backward pass, in model widths, by run.gradient_checkpointing: measured
with Gemma 3's proportions in bfloat16, in units of its two bytes; other models differ by a third."""

LIBRARIES = ("torch", "transformers", "encode-once")


def announce(session: Session, total_steps: int) -> None:
    """Print warnings and the table on rank 0.

    Raises ModelError if anything but the projectors would learn, ConfigError if the warm-up is too long for the run.
    """
    announce_other_vision_tower(session)
    announce_large_batch(session)
    announce_warmup(session, total_steps)
    refuse_other_trainable(session)
    if not session.world.is_main and not session.in_step:
        return
    text = torch.empty(1, longest_sequence(session) - session.projectors.num_tokens, device=session.world.device)
    kernels = attention_kernels(session.language, longest_sequence(session), session.model.blocks(text))
    facts = dict(startup_facts(session, kernels))
    width = max(map(len, facts))
    session.world.say("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))
    math_layers = [kind for kind, kernel in kernels.items() if kernel == MATH]
    if math_layers:
        session.world.warn(f"{' and '.join(math_layers)}: torch's math kernel holds all attention weights in memory")


def announce_other_vision_tower(session: Session) -> None:
    """Warn if a checkpoint's own projector reads hidden states that may come from another model's tower."""
    language = session.projector_config.language_model.name
    for tower in session.projector_config.towers:
        if tower.projector == PRETRAINED and tower.encoder_model != language:
            made_by = tower.encoder_model or "an unknown model"
            session.world.warn(
                f"model.towers.{tower.name}: the projector of {language} reads hidden states of its own vision tower "
                f"only, but the cache was made by {made_by}; check that the two towers have equal weights: from "
                "another tower's states the projector makes noise"
            )


def announce_large_batch(session: Session) -> None:
    batch_size = session.config.data.batch_size
    if len(session.split.train) < batch_size:
        session.world.say(f"data.batch_size {batch_size} is larger than the training set: every batch repeats samples")


def announce_warmup(session: Session, total_steps: int) -> None:
    """Print the warm-up if the default was shortened; ConfigError if optim.warmup_steps is too long for the run."""
    optim = session.config.optim
    optim.refuse_endless_warmup(total_steps)
    if optim.warmup_steps is None and (steps := optim.warmup(total_steps)) < WARMUP_STEPS:
        share = f"{steps:,} of {total_steps:,} steps, a tenth of the run" if steps else "none, in a run so short"
        session.world.say(f"warm-up: {share}; optim.warmup_steps sets another number")


def refuse_other_trainable(session: Session) -> None:
    learning = {id(each) for _, module in session.model.trained_modules() for each in module.parameters()}
    for module in (session.model, session.whole):
        for name, each in module.named_parameters():
            if each.requires_grad and id(each) not in learning:
                raise ModelError(f"{name} of the language model would be trained; only projectors learn here")


def startup_facts(session: Session, kernels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    run, world = session.config.run, session.world
    memory = memory_bytes(world.device)
    kind = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    threads = "" if world.device.type == "cuda" else f", {torch.get_num_threads()} threads"
    size = f" of {memory / 2**30:,.0f} GiB" if memory else ""
    yield "device", f"{world.size} x {kind}{size}{threads}; {run.precision}"
    if world.size > 1 or run.parallel != "ddp":
        yield "parallel", describe_parallel(session)
    yield "versions", ", ".join(f"{name} {found}" for name in LIBRARIES if (found := version_of(name)))
    implementation = session.language.config._attn_implementation
    shown = ", ".join(f"{kind}: {kernel}" for kind, kernel in kernels.items()) or "not known"
    asked = "" if run.attention == "auto" else f", run.attention: {run.attention}"
    yield "attention", f"{implementation}{asked}; {shown}; at {longest_sequence(session):,} tokens"
    yield "compile", f"{run.compile}; gradient checkpointing {run.gradient_checkpointing}"
    modules = session.model.trained_modules()
    named = [(f"{module}.{name}", each) for module, part in modules for name, each in part.named_parameters()]
    trained = [(name, each) for name, each in named if each.requires_grad]
    yield (
        "learns",
        f"{sum(each.numel() for _, each in trained):,} parameters: {', '.join(map(name_and_shape, trained))}",
    )
    if session.config.optim.offload:
        yield "optimizer", "AdamW's state in the host's memory"
    yield "memory", expected_memory(session)


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def name_and_shape(named: tuple[str, torch.Tensor]) -> str:
    return f"{named[0]} {'x'.join(map(str, named[1].shape))}"


def describe_parallel(session: Session) -> str:
    run = session.config.run
    if run.parallel == "ddp":
        return "ddp: each rank holds the language model"
    if not session.in_step:
        return "fsdp2: one rank, which holds the language model"
    return "fsdp2: each rank holds a part of each of the language model's weights, and gathers a layer as it runs"


def held_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of a weight that this rank holds."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.numel() * local.element_size()


def longest_sequence(session: Session) -> int:
    """Return the tokens of the longest training sample, world tokens included."""
    return session.projectors.num_tokens + int(session.text.lengths(session.split.train).max())


def expected_memory(session: Session) -> str:
    """Estimate the memory of a pass: weights, values that layers keep, logits, the projector with its optimizer."""
    config, language = session.config, session.language
    size = 2 if config.run.precision == "bf16" else 4
    samples = config.data.batch_size // (session.world.size * config.data.accumulate)
    weights = sum(map(held_bytes, language.parameters()))
    layers = getattr(language.config, "num_hidden_layers", 0)
    kept = (
        KEPT_BYTES[config.run.gradient_checkpointing]
        * language.width
        * size
        * samples
        * longest_sequence(session)
        * layers
    )
    labels = float(session.text.num_labels[session.split.train].mean()) * samples
    labels = min(labels, config.run.loss_chunk or labels)
    logits = 3 * 4 * labels * language.config.vocab_size
    modules = [part for _, part in session.model.trained_modules()]
    trained = sum(each.numel() for part in modules for each in part.parameters() if each.requires_grad)
    learned = (8 if config.optim.offload else 16) * trained
    parts = {"language model": weights, f"{samples} samples a pass": kept, "logits": logits, "projector": learned}
    shown = ", ".join(f"{name} {value / 2**30:.2g}" for name, value in parts.items())
    return f"{sum(parts.values()) / 2**30:.2g} GiB by calculation, with texts of the longest: {shown}"
