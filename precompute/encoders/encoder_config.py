"""The `encoder:` section of a build's config."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Self

from cache_store.errors import ConfigError
from cache_store.format.array import MAX_SIDE, PLAIN_TEMPLATE, EncoderIdentity

if TYPE_CHECKING:
    import torch  # it takes seconds to import, and `--help` needs none of it

Posterior = Literal["mean", "moments"]
ComputeDtype = Literal["float32", "bfloat16"]
"""No float16: SDXL's VAE and others overflow in it."""

Padding = Literal["seen", "masked", "zero", "seen-zero", "left"]
Clean = Literal["none", "prompt_clean", "lower"]

LARGEST_BATCH = 65_536
"""A larger number is a slip of the keyboard."""

TEXT_FIELDS = ("max_tokens", "output", "clean", "template", "drop", "padding")
FAMILY_FIELDS = ("posterior", "pool", "layer", "class_token", "fold", "compile", *TEXT_FIELDS)
"""Fields that only some families use."""

VISION_CONFIG = "vision_config"
"""The section of config.json for the vision tower of a model with several parts."""

STILL_FIELDS = ("fold", "compile")
"""Fields without effect on clips, which diffusers itself encodes."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Which frozen encoder turns images, or texts, into latents, and how it runs."""

    model: str
    """Hub id, or a folder written by `save_pretrained`, of one of the families listed below; a pipeline's subfolder
    `vae` or `text_encoder` is found automatically. Or an encoder of your own, as my_package.module:MyEncoder."""
    subfolder: str | None = None
    """A pipeline's subfolder with another name, such as text_encoder_2, whose tokenizer is in tokenizer_2."""
    posterior: Posterior = "mean"
    """For a VAE: `mean` keeps the posterior's mean; `moments` keeps mean and log-variance, twice the channels."""
    pool: int | Literal["auto"] = "auto"
    """For a vision tower: average squares of this many patches a side into one token each; 1 keeps every patch; auto
    does as the model does: Gemma 3 pools 64 x 64 patches to 16 x 16 tokens, SigLIP keeps all."""
    layer: int | list[int] | Literal["auto"] = "auto"
    """For a tower or text encoder: the hidden state to keep, as transformers counts them, from 0, or from -1 at the
    end; auto takes the model's own: for LLaVA the second to last, -2, for others the last, after any final norm. For
    Qwen3-VL: one of deepstack_visual_indexes keeps that level's tokens in place of its merger's. A text encoder takes
    several, such as [9, 18, 27], and joins their features."""
    class_token: bool = False
    """For a vision tower: keep its class token and registers before the patches."""
    max_tokens: int | None = None
    """Makes the model a text encoder, which reads the text that source.text names. The number of tokens of a sample,
    such as 77 for CLIP or 512 for T5: a longer text is cut, a shorter one padded."""
    output: Literal["tokens", "pooled"] = "tokens"
    """For a text encoder: tokens keeps a hidden state for each token; pooled keeps CLIP's one vector of the text."""
    clean: Clean | Literal["auto"] = "auto"
    """For a text encoder: how a caption is cleaned first. none: not at all. prompt_clean: as by diffusers' function of
    that name, which mends it with ftfy, resolves HTML entities, makes each run of white space one space, and strips it.
    lower: stripped, in lower case. auto: prompt_clean for UMT5, none for others."""
    template: str = PLAIN_TEMPLATE
    """For a text encoder: a text in which each caption replaces {}."""
    drop: int | Literal["instruction"] = 0
    """For a text encoder: tokens at the template's beginning that are encoded, then left out; 34 for Qwen-Image.
    instruction, as SANA does: all tokens before {} except the first and the last."""
    padding: Padding | Literal["auto"] = "auto"
    """For a text encoder: seen attends to padding and keeps its output; masked keeps its output and does not attend to
    it; zero does not attend to it and stores zeros; seen-zero attends to it and stores zeros; left is masked, with the
    padding before the text. auto: seen for T5 and CLIP, zero for UMT5, Qwen, Gemma and Llama, left for Mistral."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of weights and activations while encoding."""
    batch_size: int = 32
    """Images, or texts, per planned batch; part of the cache's identity, since batch composition can change bits. Clips
    are encoded one at a time."""
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`."""
    fold: bool = True
    """Fold the 3-D encoder of a VAE into a 2-D one, exact for still images; false keeps diffusers' own path, which
    clips always take."""
    compile: bool | Literal["auto"] = "auto"
    """Run the blocks of a VAE's folded encoder through torch.compile, which needs a C++ compiler on a CPU, Triton on a
    GPU; auto does so only on a GPU with Triton."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("encoder.model is empty; give a hub id or a folder")
        if not 1 <= self.batch_size <= LARGEST_BATCH:
            raise ConfigError(f"encoder.batch_size must be 1 to {LARGEST_BATCH:,}, got {self.batch_size:,}")
        if self.compile is True and not self.fold:
            raise ConfigError("encoder.compile needs encoder.fold: true; diffusers' own path is not compiled")
        if self.pool != "auto" and self.pool < 1:
            raise ConfigError(f"encoder.pool must be at least 1 or auto, got {self.pool}")
        for name, least in (("max_tokens", 1), ("drop", 0)):
            if isinstance(value := getattr(self, name), int) and not least <= value <= MAX_SIDE:
                raise ConfigError(f"encoder.{name} must be in [{least}, {MAX_SIDE:,}], got {value:,}")
        if self.template.count(PLAIN_TEMPLATE) != 1:
            raise ConfigError(f"encoder.template must have one {{}}, where the text goes, got {self.template!r}")

    @classmethod
    def from_identity(cls, identity: EncoderIdentity, takes: Collection[str], model: str, device: str) -> Self:
        """Make the config of a cache's encoder; `takes` are the fields for its class."""
        made: dict[str, Any] = {
            "posterior": "moments" if identity.posterior == "moments" else "mean",
            "pool": identity.pool,
            "layer": "auto" if identity.layer is None else identity.layer,
            "class_token": identity.class_token,
            "fold": identity.path == "folded",
            "compile": identity.compiled,
        }
        common: dict[str, Any] = {"compute_dtype": identity.compute_dtype, "batch_size": identity.batch_size}
        return cls(model=model, device=device, **common, **{name: made[name] for name in takes})

    @property
    def reads_text(self) -> bool:
        return self.max_tokens is not None

    def refuse_unused_fields(self, takes: Collection[str], class_name: str) -> None:
        """Raise ConfigError if a field is set that only other classes use."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in FAMILY_FIELDS and field.name not in takes and value != field.default:
                shown = str(value).lower()
                raise ConfigError(f"encoder.{field.name}: {shown} has no effect on {class_name}; leave it out")

    @property
    def compiles(self) -> bool:
        if self.compile == "auto":
            return self.fold and self.torch_device.type == "cuda" and find_spec("triton") is not None
        return self.compile

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.compute_dtype]

    @property
    def torch_device(self) -> "torch.device":
        """The device; ConfigError if this host does not have it."""
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind, _, index = self.device.partition(":")
        if kind == "cpu" and not index:
            return torch.device("cpu")
        if kind == "cuda" and (index or "0").isdecimal() and int(index or 0) < torch.cuda.device_count():
            return torch.device("cuda", int(index or 0))
        raise ConfigError(
            f"encoder.device is {self.device!r}, but this host has cpu and {torch.cuda.device_count()} GPUs;"
            " use auto, cpu, cuda or cuda:N"
        )
