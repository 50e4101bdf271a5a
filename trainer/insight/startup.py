"""Announces a run before its first step: hardware, versions, attention, trained parameters, and warnings."""

from collections.abc import Iterator, Mapping

import torch

from trainer.config import WARMUP_STEPS
from trainer.model.kernels import MATH, attention_kernels
from trainer.model.model_config import PRETRAINED
from trainer.model.projector_file import library_versions
from trainer.run.memory import memory_bytes
from trainer.run.session import Session


def announce(session: Session, total_steps: int) -> None:
    """Print warnings and the table on rank 0. ConfigError if the warm-up is too long for the run."""
    session.config.optim.refuse_endless_warmup(total_steps)
    for line in remarks(session, total_steps):
        session.world.say(line)
    if not session.world.is_main and not session.in_step:
        return
    text = torch.empty(1, longest_sequence(session) - session.projectors.num_tokens, device=session.world.device)
    kernels = attention_kernels(session.language, longest_sequence(session), session.model.blocks(text))
    facts = dict(startup_facts(session, kernels))
    width = max(map(len, facts))
    session.world.say("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))
    if math_layers := [kind for kind, kernel in kernels.items() if kernel == MATH]:
        session.world.warn(f"{' and '.join(math_layers)}: torch's math kernel holds all attention weights in memory")


def remarks(session: Session, total_steps: int) -> Iterator[str]:
    """Warn of another model's vision tower; yield what is unusual about batch size and warm-up."""
    language, optim = session.projector_config.language_model.name, session.config.optim
    for tower in session.projector_config.towers:
        if tower.projector == PRETRAINED and tower.encoder_model != language:
            session.world.warn(
                f"model.towers.{tower.name}: the projector of {language} reads hidden states of its own vision tower "
                f"only, but the cache was made by {tower.encoder_model or 'an unknown model'}; check that the two "
                "towers have equal weights: from another tower's states the projector makes noise"
            )
    if len(session.split.train) < (batch_size := session.config.data.batch_size):
        yield f"data.batch_size {batch_size} is larger than the training set: every batch repeats samples"
    if optim.warmup_steps is None and (steps := optim.warmup(total_steps)) < WARMUP_STEPS:
        share = f"{steps:,} of {total_steps:,} steps, a tenth of the run" if steps else "none, in a run so short"
        yield f"warm-up: {share}; optim.warmup_steps sets another number"


def startup_facts(session: Session, kernels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    run, world = session.config.run, session.world
    memory = f"{memory_bytes(world.device) / 2**30:,.0f} GiB"
    yield "device", f"{world.size} x {device_name(world.device)}, {memory}; {run.precision}"
    yield "versions", ", ".join(" ".join(each) for each in library_versions().items())
    implementation = session.language.config._attn_implementation
    shown = ", ".join(f"{kind}: {kernel}" for kind, kernel in kernels.items()) or "not known"
    asked = "" if run.attention == "auto" else f", run.attention: {run.attention}"
    yield "attention", f"{implementation}{asked}; {shown}; at {longest_sequence(session):,} tokens"
    trained = {
        f"{module}.{name}": each
        for module, part in session.model.trained_modules()
        for name, each in part.named_parameters()
        if each.requires_grad
    }
    shapes = ", ".join(f"{name} {'x'.join(map(str, each.shape))}" for name, each in trained.items())
    yield "learns", f"{sum(each.numel() for each in trained.values()):,} parameters: {shapes}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def longest_sequence(session: Session) -> int:
    return session.projectors.num_tokens + int(session.text.lengths(session.split.train).max())
