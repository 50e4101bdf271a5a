"""The encoder that a frozen vision tower is: its last hidden state, a token for each patch or square of patches."""

# Axes: N images, Y X pixels, T tokens, F features, G squares of a side, P patches of a square's side.

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from cache_store.errors import ConfigError
from cache_store.format.schema import SampleLayout
from precompute.encoders.config import EncoderConfig
from precompute.encoders.encoder import PIXEL_RANGES, PixelRange
from precompute.encoders.family import refuse_other_side
from precompute.encoders.identity import native_identity

CPU_PIXELS = 2**19
"""Of the images that a CPU encodes at once: 10 of 224x224, 3 of 384x384, 1 of 896x896.

On two Zen 5 cores 10 of 224x224 at once take 7 to 17 % less CPU time with SigLIP base than one at a time, in float32
and in bfloat16; the tokens' bits are equal. More at once cost memory alone.
"""


@dataclass(frozen=True, kw_only=True)
class FrozenTower:
    """A vision tower on its device, in its compute dtype, and what a cache must know of it."""

    hidden: Callable[[Tensor], Tensor]
    """[N, 3, Y, X] to a hidden state, [N, T, F]: tokens before the patches, then rows of patches from the top."""
    class_name: str
    weights_sha256: str
    image_side: int
    """Pixels; its position embeddings are of this size alone."""
    patches: int
    """Of a side."""
    features: int
    pool: int
    """Patches of a side that its own model averages."""
    tokens_before: int = 0
    """A class token and registers, as far as it has them."""
    layer: int | None = None
    """The hidden state taken, as transformers counts them; None for the last one, behind any final norm."""


class TowerEncoder:
    """Maps uint8 RGB to tokens, on one device."""

    def __init__(self, tower: FrozenTower, config: EncoderConfig, pixel_range: PixelRange) -> None:
        if pixel_range == "theworld":
            raise ConfigError(f"image.range: {pixel_range} is for VAEs; a {tower.class_name} needs signed")
        self._pool = tower.pool if config.pool == "auto" else config.pool
        if self._pool < 1 or tower.patches % self._pool:
            raise ConfigError(
                f"encoder.pool must divide the tower's {tower.patches} patches of a side, got {self._pool}"
            )
        if config.class_token and not tower.tokens_before:
            raise ConfigError(f"encoder.class_token: a {tower.class_name} has none; leave it out")
        if config.class_token and self._pool > 1:
            raise ConfigError("encoder.class_token: pooled patches have none beside them; set encoder.pool: 1")
        self._dropped = 0 if config.class_token else tower.tokens_before
        self._to_range = PIXEL_RANGES[pixel_range]
        self.device = config.torch_device
        self.identity = native_identity(
            config,
            class_name=tower.class_name,
            weights_sha256=tower.weights_sha256,
            pool=self._pool,
            layer=tower.layer,
            class_token=config.class_token,
        )
        self._tower = tower
        self._dtype = config.torch_dtype

    def layout(self, height: int, width: int) -> SampleLayout:
        """[T, F], with statistics of each feature; ConfigError for a size that the tower has no positions for."""
        refuse_other_side(height, width, self._tower.image_side)
        kept = self._tower.tokens_before - self._dropped
        return SampleLayout(
            axes=("token", "feature"),
            shape=(kept + (self._tower.patches // self._pool) ** 2, self._tower.features),
            feature_axis="feature",
            has_preview=False,
        )

    @torch.inference_mode()
    def encode(self, image_NYX3: Tensor) -> Tensor:
        """Map uint8 RGB, on any device, to [N, T, F], float32, on the encoder's device.

        A CPU takes a few images of a batch at a time, cut by their size alone, so that the bits do not depend on what
        else the machine does.
        """
        pixels_N3YX = self._to_range(image_NYX3.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float())
        at_once = max(1, CPU_PIXELS // self._tower.image_side**2) if self.device.type == "cpu" else len(pixels_N3YX)
        chunks = torch.split(pixels_N3YX.to(self._dtype).contiguous(), at_once)
        return torch.cat([average_squares(self._kept(chunk), self._pool) for chunk in chunks])

    def _kept(self, image_N3YX: Tensor) -> Tensor:
        return self._tower.hidden(image_N3YX)[:, self._dropped :].float()


def average_squares(hidden_NTF: Tensor, side: int) -> Tensor:
    """Average `side` x `side` neighbours of a square grid of tokens, as Gemma 3's projector does before its norm."""
    if side == 1:
        return hidden_NTF
    number, tokens, features = hidden_NTF.shape
    across = isqrt(tokens) // side
    squares_NGPGPF = hidden_NTF.reshape(number, across, side, across, side, features)
    return squares_NGPGPF.mean((2, 4)).flatten(1, 2)
