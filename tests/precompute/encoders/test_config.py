"""Fields of `encoder:` that cannot be, each refused in one line that names it."""

import json

import pytest

from cache_store.errors import ConfigError
from precompute.encoders.encoder_config import EncoderConfig
from tests.precompute.encoders.loading import load


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": ""}, "encoder.model is empty"),
        ({"batch_size": 0}, "encoder.batch_size must be 1 to 65,536, got 0"),
        ({"batch_size": 10**11}, "encoder.batch_size must be 1 to 65,536, got 100,000,000,000"),
        ({"compile": True, "fold": False}, "encoder.compile needs encoder.fold: true"),
        ({"max_tokens": 8, "template": "no place"}, "encoder.template must have one {}, where the text goes"),
        *(({"device": each}, f"encoder.device is '{each}', but") for each in ("gpu", "cuda:99", "cuda:x", "cpu:1")),
    ],
)
def test_a_config_that_cannot_run_names_its_key(config, message):
    with pytest.raises(ConfigError, match=message):
        _ = EncoderConfig(**{"model": "org/name", **config}).torch_device


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("AutoencoderKLWan", "pool", 1),
        ("AutoencoderKL", "fold", False),
        ("AutoencoderKL", "compile", True),
        ("AutoencoderTiny", "posterior", "moments"),
        ("SiglipModel", "posterior", "moments"),
        ("CLIPVisionModel", "posterior", "moments"),
        ("Gemma3ForConditionalGeneration", "fold", False),
        ("Gemma3ForConditionalGeneration", "compile", True),
    ],
)
def test_a_field_for_another_family_is_refused_unloaded(kind, option, value, tmp_path):
    key = {"_class_name": kind} if kind.startswith("Autoencoder") else {"architectures": [kind]}
    (tmp_path / "config.json").write_text(json.dumps(key))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **{option: value})
    assert str(caught.value) == f"encoder.{option}: {str(value).lower()} has no effect on {kind}; leave it out"
