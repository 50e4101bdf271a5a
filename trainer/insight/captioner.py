"""Captions of the same few held-out samples at every evaluation, and their pictures.

Decoding is greedy, so no random number is drawn, and transformers' model is left as it was: a run gives the same bits
with and without captions.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from cache_store.errors import ModelError
from cache_store.gallery.pictures import preview
from trainer.generate.generate_config import GenerateConfig
from trainer.generate.generator import Generator, answers, turn_end
from trainer.generate.subjects import cached_subjects
from trainer.run.figures import Answered, Subject
from trainer.run.session import Session

CAPTION_TOKENS = 64
"""Most tokens of a caption; prompt and caption have at most data.max_text_tokens, so that the model has positions."""


class HeldOutCaptions:
    """Captions the first few held-out samples."""

    def __init__(self, session: Session) -> None:
        self._session, self._is_possible = session, True
        numbers = session.split.validation[: session.config.run.sample_captions]
        self._subjects = [*cached_subjects(session.cache, numbers, session.loader.stream.source)]
        longest = max(len(session.chat.prompt_tokens(subject.messages)) for subject in self._subjects)
        limit = max(1, min(CAPTION_TOKENS, session.config.data.max_text_tokens - longest))
        config = GenerateConfig(rows="0", max_tokens=limit)
        end = turn_end(session.chat, session.whole, session.chat.end_of_turn())
        self._generator = Generator(session.model, session.whole, session.chat, end, config)

    def __call__(self, stopped: Callable[[], bool]) -> list[Answered]:
        """Caption the samples; if the model cannot generate, say so once, and the run continues without captions."""
        if not self._is_possible:
            return []
        run = self._session.config.run
        compiled = run.compile != "none"  # each new length would be compiled anew
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                answered = answers(self._generator, self._subjects, run.eval_batch_size, stopped)
                return [replace(caption, preview=self._preview(caption.subject)) for caption in answered]
        except ModelError as error:
            self._is_possible = False
            self._session.world.say(f"no captions: {error}")
            return []

    def _preview(self, subject: Subject) -> np.ndarray | None:
        """Return a picture, uint8 [H, W, 3], from the first tower whose cache has a map to RGB, if any."""
        for name, each in self._session.cache.caches.items():
            if (to_rgb := each.seal.array.preview) is not None:
                return preview(subject.samples[name].float().numpy(), to_rgb)
        return None
