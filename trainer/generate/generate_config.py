"""The config of `trainer generate`, without torch, so that `--help` is quick."""

from dataclasses import dataclass

from cache_store.errors import ConfigError
from trainer.config import LEAST, MAX_BATCH_SIZE, MAX_SEED, MAX_TOKENS, refuse_outside


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The question to the language model, its images, and how it answers."""

    prompt: str | None = None
    """The user's words; null: each row's own first question, as in training."""
    rows: str | None = None
    """Rows of the cache, as its plan numbers them: 7,3."""
    ids: str | None = None
    """In place of rows: ids of samples, separated by commas."""
    image: str | None = None
    """In place of rows: an image file, or several separated by commas. They are prepared and encoded with the recipe
    and the encoder that the projector was trained with."""
    cache: str | None = None
    """A cache other than the run's; it must have the same image recipe and encoder."""
    caches: dict[str, str] | None = None
    """In place of `cache`, if the projector has several towers: {world: FOLDER, siglip: FOLDER}."""
    language_model: str | None = None
    """Where the language model is now, if not where training found it: a hub id or a folder."""
    encoder: str | None = None
    """Where the encoder is now, if not where the cache's build found it: a hub id or a folder. Only for --image."""
    encoders: dict[str, str] | None = None
    """In place of `encoder`, if the projector has several towers: {siglip: FOLDER}."""
    temperature: float = 0.0
    """0: always the likeliest token; above 0: tokens are sampled, from a flatter distribution the higher it is."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of sampling; the same seed, rows and batch size give the same words."""
    max_tokens: int = 128
    """Longest answer in tokens; an answer that ends its turn stops earlier."""
    batch_size: int = 8
    """Answers generated together."""
    report: str | None = None
    """Also write the answers to this JSON file."""

    def __post_init__(self) -> None:
        if [self.rows, self.ids, self.image].count(None) != 2:
            raise ConfigError("give exactly one of --rows 7,3, --ids ID,ID and --image FILE")
        if self.image is not None and self.prompt is None:
            raise ConfigError("--image needs a question: give one with --prompt")
        if self.image is not None and (self.cache or self.caches):
            raise ConfigError("--cache is for --rows and --ids; leave it out with --image")
        if self.image is None and (self.encoder or self.encoders):
            raise ConfigError("--encoder is for --image; rows are encoded already")
        for one, several in (("cache", "caches"), ("encoder", "encoders")):
            if getattr(self, one) is not None and getattr(self, several) is not None:
                raise ConfigError(f"--{one} is for one tower, --{several} for several: name one of the two")
        refuse_outside("", self, temperature=(0, 100), top_p=(LEAST, 1), seed=(0, MAX_SEED))
        refuse_outside("", self, max_tokens=(1, MAX_TOKENS), batch_size=(1, MAX_BATCH_SIZE))

    @property
    def user_turn(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt or ""}]
