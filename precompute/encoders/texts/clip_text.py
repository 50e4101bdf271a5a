"""CLIP's text tower: its tokens, or the one vector that it makes of a text."""

from precompute.encoders.texts.held import Held
from precompute.encoders.texts.text_family import text_family

LAYERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
KEYS = (*LAYERS, "hidden_act", "layer_norm_eps", "max_position_embeddings", "vocab_size", "eos_token_id")

FAMILY = text_family(
    {
        "CLIPTextModel": Held(
            runs="CLIPTextModel", names={"text_model.": "", "": ""}, padding="seen", config_keys=KEYS
        ),
        "CLIPTextModelWithProjection": Held(
            runs="CLIPTextModelWithProjection",
            names={"": ""},
            padding="seen",
            config_keys=(*KEYS, "projection_dim"),
        ),
    }
)
