"""Generate the language model's answers about images, which it reads through a trained projector.

transformers' own `generate` runs with its cache of keys and values. It refuses embeddings for some models, such as the
multimodal Gemma 3, so it is given as many tokens, and the decoder's first run reads the embeddings that training builds
instead. Prompts in a batch are padded on the left, and the attention mask hides the padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteriaList

from cache_store import JoinedCache
from cache_store.errors import ConfigError, MissingPathError, ModelError, SourceError
from cache_store.messages import Difference, printable, refuse
from trainer.config import MAX_TOKENS
from trainer.data.buckets import parts_alike
from trainer.data.draws import as_tensors
from trainer.data.stream import LatentSource
from trainer.generate.generate_config import GenerateConfig
from trainer.model.language_model import image_masks
from trainer.model.load_language_model import (
    PRECISIONS,
    load_with_whole,
    refuse_no_image_masks,
    refuse_no_language_model,
)
from trainer.model.model import WorldModel
from trainer.model.pretrained import UNREADABLE_MODEL, first_line
from trainer.model.projector_file import TrainedProjector
from trainer.run.figures import Answered, Subject
from trainer.text.chat import ChatTokenizer, Message, to_messages
from trainer.text.tokenizer import load_tokenizer

# Axes: N samples, T text tokens.

Latents = Mapping[str, Tensor]
Prompts = Sequence[list[Message]]
Stopped = Callable[[], bool]


@dataclass(frozen=True)
class TurnEnd:
    """How the end of a turn is recognised."""

    tokens: tuple[int, ...]
    words: str
    """The text that ends a turn, if it is not a special token; empty otherwise."""


class Generator:
    """Answers questions about images, with a projector and the language model that it was trained for."""

    def __init__(
        self, model: WorldModel, whole: Any, chat: ChatTokenizer, end: TurnEnd, config: GenerateConfig
    ) -> None:
        """`whole` is transformers' model, of which `model.language` is a part."""
        self.model, self._whole, self.chat, self._end, self._config = model, whole, chat, end, config

    def __call__(self, latents: Latents, prompts: Prompts, stopped: Stopped | None = None) -> list[tuple[str, bool]]:
        """Answer each sample's messages, all in one batch, and say whether the model ended its turn.

        `latents` are samples by tower. Answers end once `stopped`, called after every token, returns True. Sampling
        draws from torch's global generator.
        """
        return [self._answer(each) for each in self.generate_tokens(latents, prompts, stopped)]

    def generate_tokens(self, latents: Latents, prompts: Prompts, stopped: Stopped | None = None) -> list[list[int]]:
        """Generate tokens for each prompt. Tokens after the end of a turn are padding, or text to ignore."""
        try:
            tokens = [self.chat.prompt_tokens(messages) for messages in prompts]
        except SourceError as error:
            raise SourceError(f"the prompt: {error}") from None
        length = self.model.projectors.count(latents) + max(map(len, tokens))
        self._refuse_unreadable(tokens, length)
        prompt, mask_NT = self._prompt(latents, tokens)
        words, decode = self._end.words, self.chat.tokenizer.decode

        def is_over(generated: Tensor, scores: Any, **_: Any) -> Tensor:
            is_stopped, said = stopped is not None and stopped(), generated[:, length:].tolist()
            over = [is_stopped or (words != "" and words in decode(each)) for each in said]
            return torch.tensor(over, device=generated.device)

        try:
            with reading(self._whole, self.model.language.decoder, prompt):
                tokens_NT = self._whole.generate(
                    torch.zeros_like(mask_NT),
                    attention_mask=mask_NT,
                    generation_config=generation_options(self._config, self._end, self.chat.tokenizer.pad_token_id),
                    stopping_criteria=StoppingCriteriaList([is_over]),  # `stop_strings` fails on word-level tokenizers
                )
        except UNREADABLE_MODEL as error:
            model = f"the language model, {type(self._whole).__name__}"
            raise ModelError(f"{model}, cannot generate from embeddings: {first_line(error)}") from None
        return tokens_NT[:, length:].tolist()  # type: ignore[no-any-return]

    @torch.no_grad()
    def _prompt(self, latents: Latents, tokens: Sequence[np.ndarray]) -> tuple[dict[str, Any], Tensor]:
        """Return the decoder's arguments, padded on the left, and the mask [N, P + T]: 0 at padding."""
        language, longest = self.model.language, max(map(len, tokens))
        on_device = {name: each.to(language.device) for name, each in latents.items()}
        padding = [longest - len(each) for each in tokens]
        padded = [np.pad(each, (0, count)) for each, count in zip(tokens, padding, strict=True)]
        tokens_NT = torch.from_numpy(np.stack(padded)).to(language.device, torch.long)
        embeddings = self.model.sequence(on_device, tokens_NT)
        embeddings_NTD = torch.stack([each.roll(count, 0) for each, count in zip(embeddings, padding, strict=True)])
        mask_NT = torch.ones(embeddings_NTD.shape[:2], dtype=torch.long, device=language.device)
        for row, count in enumerate(padding):
            mask_NT[row, :count] = 0
        prompt: dict[str, Any] = {"input_ids": None, "inputs_embeds": embeddings_NTD}
        if (block_1T := self.model.blocks(tokens_NT, on_device)) is not None:
            blocks_NT = torch.stack([block_1T[0].roll(count) for count in padding])
            prompt["attention_mask"] = image_masks(language.config, blocks_NT, language.dtype, mask_NT == 0)
        return prompt, mask_NT

    def _refuse_unreadable(self, tokens: Sequence[np.ndarray], length: int) -> None:
        language, most, largest = self.model.language, self._config.max_tokens, max(int(each.max()) for each in tokens)
        if largest >= (count := language.num_embeddings):
            raise ModelError(f"the tokenizer gives token {largest}, but the model embeds {count} tokens")
        if (positions := language.max_tokens) is not None and length + most > positions:
            raise ConfigError(
                f"image and prompt have {length} tokens; with max_tokens {most} they are {length + most}; the language "
                f"model knows {positions} positions: set --max_tokens lower"
            )

    def _answer(self, generated: list[int]) -> tuple[str, bool]:
        length = next((place for place, token in enumerate(generated) if token in self._end.tokens), None)
        text = self.chat.tokenizer.decode(generated[:length], skip_special_tokens=not self._end.words)
        before, found, _ = text.partition(self._end.words) if self._end.words else (text, "", "")
        return before.strip(), length is not None or bool(found)


def cached_subjects(cache: JoinedCache, numbers: np.ndarray, source: LatentSource) -> Iterator[Subject]:
    """Yield samples by their numbers, each with its own first question; `source` gives the latents."""
    columns = cache.samples(numbers, ["row", "id", "conversations"]).to_pydict().values()
    for number, row, name, conversation in zip(numbers, *columns, strict=True):
        samples = {tower: each[0] for tower, each in as_tensors(source.read(np.array([number]))).items()}
        messages = to_messages(conversation)
        spoken = next((turn for turn, each in enumerate(messages) if each["role"] == "assistant"), None)
        question = messages[:spoken] or [{"role": "user", "content": ""}]
        reference = None if spoken is None else messages[spoken]["content"]
        yield Subject(f"row {row}, {printable(name)}", {"row": row, "id": name}, question, reference, samples)


def answers(
    generator: Generator, subjects: Sequence[Subject], batch_size: int, stopped: Stopped | None = None
) -> Iterator[Answered]:
    shapes = [str([each.shape for each in subject.samples.values()]) for subject in subjects]
    for part in parts_alike(np.unique(shapes, return_inverse=True)[1], batch_size):
        asked = subjects[part]
        latents = {name: torch.stack([each.samples[name] for each in asked]) for name in asked[0].samples}
        found = generator(latents, [each.messages for each in asked], stopped)
        yield from (Answered(subject, *answer) for subject, answer in zip(asked, found, strict=True))


@contextmanager
def reading(whole: Any, decoder: nn.Module, prompt: dict[str, Any]) -> Iterator[None]:
    """Within the block, give the decoder `prompt` at its first run, and hide the model's own generation config.

    Multimodal models around it would compute other embeddings, and not every one passes masks on unchanged. Their
    configs may sample, penalise or forbid words.
    """
    remaining, own = [prompt], whole.generation_config

    def put_prompt(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return ((), kwargs | remaining.pop()) if remaining else None

    hook = decoder.register_forward_pre_hook(put_prompt, with_kwargs=True)
    whole.generation_config = GenerationConfig()
    try:
        yield
    finally:
        hook.remove()
        whole.generation_config = own


def generation_options(config: GenerateConfig, end: TurnEnd, pad: int | None) -> GenerationConfig:
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": 0} if config.temperature else {}
    ends = {"eos_token_id": [*end.tokens], "pad_token_id": end.tokens[0] if pad is None else pad} if end.tokens else {}
    return GenerationConfig(max_new_tokens=config.max_tokens, do_sample=bool(sampling), **sampling, **ends)


def find_language_model(projector: TrainedProjector, named: str | None) -> str:
    """Return `named`, else the hub id or folder of training; MissingPathError if that folder has moved."""
    name = projector.config.language_model.name
    if named is None and name.startswith(("/", ".")) and not Path(name).is_dir():
        raise MissingPathError(
            f"the projector was trained for the language model in {name}, which is no longer there; "
            "name its new place with --language_model"
        )
    return named or name


def open_generator(projector: TrainedProjector, name: str, config: GenerateConfig, device: torch.device) -> Generator:
    """Load the language model `name`; StaleError if the projector was trained for another one."""
    trained, text = projector.config.language_model, projector.config.text
    refuse_no_language_model(name)
    chat = ChatTokenizer(load_tokenizer(name), text.chat_template, MAX_TOKENS)
    language, whole = load_with_whole(name, PRECISIONS[trained.precision], device)
    if (found := language.identity()) != trained.identity:
        difference = Difference("language model", trained.identity, found)
        remedy = f"it was trained for {trained.name}; name that model, unchanged since then, with --language_model"
        refuse(f"the projector was not trained for {name}", [difference], [remedy], held="in the projector")
    if projector.full:
        refuse_no_image_masks(language, name)
    model = WorldModel(language, projector.to(device), begins_with_bos=text.begins_with_bos)
    return Generator(model, whole, chat, turn_end(chat, whole, text.end_of_turn), config)


def turn_end(chat: ChatTokenizer, whole: Any, end_of_turn: str) -> TurnEnd:
    eos = whole.generation_config.eos_token_id
    tokens = {*(eos if isinstance(eos, list) else [eos]), chat.tokenizer.eos_token_id} - {None}
    spelled = chat.tokenizer(end_of_turn, add_special_tokens=False)["input_ids"]
    is_token = len(spelled) == 1 and spelled[0] in chat.special.texts
    return TurnEnd(tuple(sorted({*tokens, *spelled} if is_token else tokens)), "" if is_token else end_of_turn)
