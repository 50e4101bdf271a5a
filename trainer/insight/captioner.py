"""Captions of the same few held-out samples at every evaluation, and their pictures.

Decoding is greedy, so no random number is drawn, and transformers' model is left as it was: a run gives the same bits
with and without captions.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from cache_store import JoinedCache
from cache_store.errors import ModelError
from cache_store.gallery.pictures import preview
from trainer.generate.generate_config import GenerateConfig
from trainer.generate.generator import Generator, answers, cached_subjects, turn_end
from trainer.run.figures import Answered, Captioner, Subject
from trainer.run.session import Session

CAPTION_TOKENS = 64
"""Most tokens of a caption; prompt and caption have at most data.max_text_tokens, so that the model has positions."""


def make_captioner(session: Session) -> Captioner | None:
    """Return what captions the first held-out samples; None, on all ranks, if there are none to caption.

    Rank 0 captions alone, unless it cannot run the language model without the others.
    """
    run, chat = session.config.run, session.chat
    numbers = session.split.validation[: run.sample_captions]
    if not len(numbers):
        return None
    if not (session.world.is_main or session.in_step):
        return lambda _: []
    subjects = [*cached_subjects(session.cache, numbers, session.loader.stream.source)]
    longest = max(len(chat.prompt_tokens(subject.messages)) for subject in subjects)
    limit = max(1, min(CAPTION_TOKENS, session.config.data.max_text_tokens - longest))
    end = turn_end(chat, session.whole, chat.end_of_turn())
    generator = Generator(session.model, session.whole, chat, end, GenerateConfig(rows="0", max_tokens=limit))

    def caption(stopped: Callable[[], bool]) -> list[Answered]:
        compiled = run.compile != "none"  # each new length would be compiled anew
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                answered = answers(generator, subjects, run.eval_batch_size, stopped)
                return [replace(each, preview=picture(session.cache, each.subject)) for each in answered]
        except ModelError as error:  # a model that can be trained but not generate
            session.world.say(f"no captions: {error}")
            return []

    return caption


def picture(cache: JoinedCache, subject: Subject) -> np.ndarray | None:
    """Return a picture, uint8 [H, W, 3], from the first tower whose cache has a map to RGB, if any."""
    for name, each in cache.caches.items():
        if (to_rgb := each.seal.array.preview) is not None:
            return preview(subject.samples[name].float().numpy(), to_rgb)
    return None
