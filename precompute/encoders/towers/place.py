"""Where a checkpoint of some class keeps a vision tower; nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VISION_CONFIG = "vision_config"
"""The key in config.json of whatever has a vision tower among other parts."""

WITHIN = ("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")
"""Names of a tower's weights in a multimodal language model begin so, by the version of transformers that saved it."""

SIDE = 224
"""transformers' default `image_size` of most towers, which config.json leaves out where it is that."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where checkpoints of a class keep the tower."""

    kinds: tuple[str, ...] = ()
    """Model types that the tower may be of, the first where its config names none; any where there are none."""
    prefixes: tuple[str, ...] | None = None
    """Prefixes of the names of its weights, longest first; None: as its class in transformers says."""
    is_part: bool = False
    """Whether the checkpoint has other parts, so that the tower's config is one of its sections."""

    def tower_values(self, config: Mapping[str, Any]) -> Any:
        """The tower's part of a config.json."""
        return config.get(VISION_CONFIG) if self.is_part else config
