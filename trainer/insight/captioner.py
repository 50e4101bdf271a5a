"""Captions of the same few held-out samples at every evaluation, and their pictures.

Decoding is greedy, so no random number is drawn, and transformers' model is left as it was: a run gives the same bits
with and without captions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from cache_store import JoinedCache
from cache_store.errors import ModelError
from cache_store.gallery.pictures import preview
from trainer.data.buckets import parts_alike
from trainer.data.prefetch import Samples
from trainer.data.stream import as_tensors
from trainer.generate.generate_config import GenerateConfig
from trainer.generate.generator import Generator, turn_end
from trainer.generate.rows import CachedSample, cached_samples
from trainer.run.figures import Caption
from trainer.run.session import Session

CAPTION_TOKENS = 64
"""Most tokens of a caption; prompt and caption have at most data.max_text_tokens, so that the model has positions."""


class HeldOutCaptions:
    """Captions the first few held-out samples."""

    def __init__(self, session: Session) -> None:
        self._session, self._is_possible = session, True
        numbers = session.split.validation[: session.config.run.sample_captions]
        samples = cached_samples(session.cache, numbers)
        parts = parts_alike(session.loader.stream.sizes.of(numbers), session.config.run.eval_batch_size)
        self._parts = [(samples[part], session.loader.stream.source.read(numbers[part])) for part in parts]
        longest = max(len(session.chat.prompt_tokens(sample.question)) for sample in samples)
        limit = max(1, min(CAPTION_TOKENS, session.config.data.max_text_tokens - longest))
        config = GenerateConfig(rows=",".join(str(sample.row) for sample in samples), max_tokens=limit)
        end = turn_end(session.chat, session.whole, session.chat.end_of_turn())
        self._generator = Generator(session.model, session.whole, session.chat, end, config)

    def __call__(self, stopped: Callable[[], bool]) -> list[Caption]:
        """Caption the samples; if the model cannot generate, say so once, and the run continues without captions."""
        captions: list[Caption] = []
        compiled = self._session.config.run.compile != "none"  # each new length would be compiled anew
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                for samples, stored in self._parts:
                    if self._is_possible and not stopped():
                        captions += self._caption(samples, stored, stopped)
        except ModelError as error:
            self._is_possible = False
            self._session.world.say(f"no captions: {error}")
        return captions

    def _caption(
        self, samples: Sequence[CachedSample], stored: Samples, stopped: Callable[[], bool]
    ) -> Iterator[Caption]:
        answers = self._generator(as_tensors(stored), [sample.question for sample in samples], stopped)
        for sample, answer, picture in zip(samples, answers, previews(self._session.cache, stored), strict=True):
            prompt = "\n".join(each["content"] for each in sample.question)
            yield Caption(
                row=sample.row, id=sample.id, prompt=prompt, text=answer.text, is_whole=answer.is_whole,
                reference=sample.reference, preview=picture,
            )  # fmt: skip


def previews(cache: JoinedCache, samples: Samples) -> Sequence[np.ndarray | None]:
    """Return a picture of each sample, uint8 [H, W, 3], from the first tower whose cache has a map to RGB, if any."""
    for name, each in cache.caches.items():
        if (to_rgb := each.seal.array.preview) is not None:
            return [preview(latent, to_rgb) for latent in samples[name].astype(np.float32)]
    return [None] * len(next(iter(samples.values())))
