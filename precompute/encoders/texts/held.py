"""Where checkpoints of some class keep a text encoder; nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from precompute.encoders.config import Padding

WITHIN_MULTIMODAL = {"model.language_model.": "", "language_model.model.": ""}
"""Names of a decoder's weights in a multimodal model begin so, by the version of transformers that saved it."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Where checkpoints of a class keep the text encoder."""

    runs: str
    """The class of transformers that is run."""
    names: Mapping[str, str | None]
    """How names of its weights begin in the checkpoint, the first that fits, and in the class that is run; None where
    they are another part's.
    """
    padding: Padding
    """As the pipelines of diffusers that use it treat padding."""
    config_keys: tuple[str, ...] = ()
    """Config values that its output depends on; all that its config says where there are none."""

    def name_within(self, name: str) -> str | None:
        """The name in the encoder of a weight of the checkpoint; None for one that is not the encoder's."""
        found = next((each for each in self.names.items() if name.startswith(each[0])), None)
        if found is None or found[1] is None:
            return None
        return found[1] + name.removeprefix(found[0])
