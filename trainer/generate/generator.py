"""Generate the language model's answers about images, which it reads through a trained projector.

transformers' own `generate` runs with its cache of keys and values. It refuses embeddings for some models, such as the
multimodal Gemma 3, so it is given as many tokens, in whose place the decoder's first run reads the embeddings that
training builds. Prompts of different lengths stand in one batch, padded on the left, where the attention mask hides the
padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from cache_store.errors import ConfigError, MissingPathError, ModelError, SourceError
from cache_store.messages import Difference, refuse
from trainer.generate.generate_config import GenerateConfig
from trainer.model.language_model import LanguageModel, Masks, image_masks
from trainer.model.load_language_model import load_with_whole, refuse_no_image_masks, refuse_no_language_model
from trainer.model.model import WorldModel
from trainer.model.pretrained import UNREADABLE_MODEL, first_line
from trainer.model.projector_file import ProjectorConfig, TrainedProjector
from trainer.run.inputs import PRECISIONS
from trainer.text.chat import ChatTokenizer, Message
from trainer.text.tokenizer import prompt_tokenizer

# Axes: N samples, T text tokens.


class StopAtWords(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """Stops an answer once it contains given words; transformers' `stop_strings` fails on word-level tokenizers."""

    def __init__(self, tokenizer: Any, words: str, begin: int) -> None:
        """Watch for `words`; `begin` is the number of tokens before the answer."""
        self._tokenizer, self._words, self._begin = tokenizer, words, begin

    def __call__(self, tokens_NT: Tensor, scores: Any, **_: Any) -> Tensor:
        held = [self._words in self._tokenizer.decode(said) for said in tokens_NT[:, self._begin :].tolist()]
        return torch.tensor(held, device=tokens_NT.device)


class StopWhenTold(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """Stops all answers once the function `told` returns True."""

    def __init__(self, told: Callable[[], bool]) -> None:
        self._told = told

    def __call__(self, said_NT: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(said_NT),), self._told(), device=said_NT.device)


# Axes: N samples, P projector tokens, T text tokens, D model width.


@dataclass(frozen=True)
class Answer:
    """The model's answer about one image."""

    text: str
    is_whole: bool
    """Whether the model ended its turn within the tokens allowed."""


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
        self._options = generation_options(config, end, chat.tokenizer.pad_token_id)

    def __call__(
        self,
        latents: Mapping[str, Tensor],
        prompts: Sequence[list[Message]],
        stopped: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """Answer each sample's messages, all in one batch; sampling draws from torch's global generator.

        `latents` are each tower's samples, by its name. `stopped` is called after every token; once it returns True,
        the answers end.
        """
        return [self._answer(each) for each in self.generate_tokens(latents, prompts, stopped)]

    def generate_tokens(
        self,
        latents: Mapping[str, Tensor],
        prompts: Sequence[list[Message]],
        stopped: Callable[[], bool] | None = None,
    ) -> list[list[int]]:
        """Generate tokens for each prompt. Tokens after the end of a turn are padding, or text to ignore."""
        language = self.model.language
        try:
            tokens = [self.chat.prompt_tokens(messages) for messages in prompts]
        except SourceError as error:
            raise SourceError(f"the prompt: {error}") from None
        refuse_unembedded_prompt(language, tokens)
        on_device = {name: each.to(language.device) for name, each in latents.items()}
        embeddings_NTD, mask_NT = self._prompt(on_device, tokens)
        length = embeddings_NTD.shape[1]
        refuse_long_prompt(language, length, self._config.max_tokens)
        stop: list[StoppingCriteria] = [StopWhenTold(stopped)] if stopped else []
        stop += [StopAtWords(self.chat.tokenizer, self._end.words, length)] if self._end.words else []
        prompt: dict[str, Any] = {"input_ids": None, "inputs_embeds": embeddings_NTD}
        if (masks := self._masks(on_device, tokens, mask_NT)) is not None:
            prompt["attention_mask"] = masks
        try:
            with only_our_options(self._whole), first_reading(language.decoder, prompt):
                tokens_NT = self._whole.generate(
                    torch.zeros_like(mask_NT),
                    attention_mask=mask_NT,
                    generation_config=self._options,
                    stopping_criteria=StoppingCriteriaList(stop),
                )
        except UNREADABLE_MODEL as error:
            name = type(self._whole).__name__
            raise ModelError(
                f"the language model, {name}, cannot generate from embeddings: {first_line(error)}"
            ) from None
        return tokens_NT[:, length:].tolist()  # type: ignore[no-any-return]

    @torch.no_grad()
    def _prompt(self, latents: Mapping[str, Tensor], tokens: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Embed [BOS], START, world tokens, END and each text: [N, P + T, D], with its mask [N, P + T]."""
        longest = max(map(len, tokens))
        device = self.model.language.device
        tokens_NT = torch.zeros(len(tokens), longest, dtype=torch.long, device=device)
        for row, each in enumerate(tokens):
            tokens_NT[row, : len(each)] = torch.from_numpy(each)
        embeddings_NTD = self.model.sequence(latents, tokens_NT)
        mask_NT = torch.ones(embeddings_NTD.shape[:2], dtype=torch.long, device=device)
        for row, each in enumerate(tokens):
            padding = longest - len(each)
            embeddings_NTD[row] = embeddings_NTD[row].roll(padding, 0)
            mask_NT[row, :padding] = 0
        return embeddings_NTD, mask_NT

    def _masks(self, latents: Mapping[str, Tensor], tokens: Sequence[np.ndarray], mask_NT: Tensor) -> Masks | None:
        """Make masks under which an image's tokens attend to each other; None if every tower is causal."""
        longest = torch.empty(len(tokens), max(map(len, tokens)), device=mask_NT.device)
        if (block_1T := self.model.blocks(longest, latents)) is None:
            return None
        is_padding_NT, language = mask_NT == 0, self.model.language
        rolled = [block_1T[0].roll(padding) for padding in is_padding_NT.sum(1).tolist()]
        return image_masks(language.config, torch.stack(rolled), language.dtype, is_padding_NT)

    def _answer(self, said: list[int]) -> Answer:
        """Cut one answer at the end of its turn."""
        length = next((place for place, token in enumerate(said) if token in self._end.tokens), None)
        text = self.chat.tokenizer.decode(said[:length], skip_special_tokens=not self._end.words)
        before, found, _ = text.partition(self._end.words) if self._end.words else (text, "", "")
        return Answer(before.strip(), length is not None or bool(found))


@contextmanager
def only_our_options(whole: Any) -> Iterator[None]:
    """Within the block, hide the model's own generation config, which may sample, penalise or forbid words."""
    own = whole.generation_config
    whole.generation_config = GenerationConfig()
    try:
        yield
    finally:
        whole.generation_config = own


@contextmanager
def first_reading(decoder: nn.Module, prompt: dict[str, Any]) -> Iterator[None]:
    """Within the block, give the decoder `prompt` at its first run; later tokens attend to all before them.

    Multimodal models around it would compute other embeddings, and not every one passes masks on unchanged.
    """
    remaining = [prompt]

    def put_prompt(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return ((), kwargs | remaining.pop()) if remaining else None

    hook = decoder.register_forward_pre_hook(put_prompt, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def generation_options(config: GenerateConfig, end: TurnEnd, pad: int | None) -> GenerationConfig:
    options: dict[str, Any] = {"max_new_tokens": config.max_tokens, "do_sample": config.temperature > 0}
    if config.temperature > 0:
        options |= {"temperature": config.temperature, "top_p": config.top_p, "top_k": 0}
    if end.tokens:
        options |= {"eos_token_id": list(end.tokens), "pad_token_id": end.tokens[0] if pad is None else pad}
    return GenerationConfig(**options)


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
    chat = prompt_tokenizer(name, text.chat_template)
    language, whole = load_with_whole(name, PRECISIONS[config.precision or trained.precision], device)
    refuse_other_model(projector.config, name, language)
    if projector.full:
        refuse_no_image_masks(language, name)
    model = WorldModel(language, projector.to(device), begins_with_bos=text.begins_with_bos)
    return Generator(model, whole, chat, turn_end(chat, whole, text.end_of_turn), config)


def refuse_other_model(config: ProjectorConfig, name: str, language: LanguageModel) -> None:
    """Raise StaleError if the projector was trained for another language model."""
    trained = config.language_model
    if (found := language.identity()) != trained.identity:
        differences = [Difference("language model", trained.identity, found)]
        if trained.width != language.width:
            differences.append(Difference("width", str(trained.width), str(language.width)))
        remedy = f"it was trained for {trained.name}; name that model, unchanged since then, with --language_model"
        refuse(f"the projector was not trained for {name}", differences, [remedy], held="in the projector")


def turn_end(chat: ChatTokenizer, whole: Any, end_of_turn: str) -> TurnEnd:
    """Find what ends a turn: the EOS of model and tokenizer, and the last label of training."""
    eos = whole.generation_config.eos_token_id
    tokens = {*(eos if isinstance(eos, list) else [eos]), chat.tokenizer.eos_token_id} - {None}
    spelled = chat.tokenizer(end_of_turn, add_special_tokens=False)["input_ids"]
    is_token = len(spelled) == 1 and spelled[0] in chat.special.texts
    return TurnEnd(tuple(sorted({*tokens, *spelled} if is_token else tokens)), "" if is_token else end_of_turn)


def refuse_unembedded_prompt(language: LanguageModel, tokens: Sequence[np.ndarray]) -> None:
    """Raise ModelError if the tokenizer gives a token that the model has no embedding for."""
    largest = max(int(each.max()) for each in tokens)
    if largest >= language.num_embeddings:
        raise ModelError(f"the tokenizer gives token {largest}, but the model embeds {language.num_embeddings} tokens")


def refuse_long_prompt(language: LanguageModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raise ConfigError if image, prompt and the longest answer together exceed the language model's positions."""
    known = language.max_tokens
    if known is not None and prompt_tokens + new_tokens > known:
        raise ConfigError(
            f"image and prompt have {prompt_tokens} tokens; with max_tokens {new_tokens} they are "
            f"{prompt_tokens + new_tokens}; the language model knows {known} positions: set --max_tokens lower"
        )
