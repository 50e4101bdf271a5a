"""T5's encoder, by itself or with its decoder, and UMT5's."""

from precompute.encoders.texts.held import Held
from precompute.encoders.texts.text_family import text_family

NAMES = {"shared.": "shared.", "encoder.": "encoder."}
KEYS = ("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size", "layer_norm_epsilon", "feed_forward_proj")
KEYS_T5 = (*KEYS, "relative_attention_num_buckets", "relative_attention_max_distance")

T5 = Held(runs="T5EncoderModel", names=NAMES, padding="seen", config_keys=KEYS_T5)
UMT5 = Held(runs="UMT5EncoderModel", names=NAMES, padding="zero", config_keys=KEYS_T5)

FAMILY = text_family(
    {
        "T5EncoderModel": T5,
        "T5ForConditionalGeneration": T5,
        "UMT5EncoderModel": UMT5,
        "UMT5ForConditionalGeneration": UMT5,
    }
)
