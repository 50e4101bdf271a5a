"""Images for a tower are prepared as its own processor does, pixel by pixel."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BitImageProcessorPil, SiglipImageProcessorPil, ViTImageProcessorPil

from cache_store.errors import ConfigError
from precompute.config import BuildConfig
from precompute.encoders.encoder import PIXEL_RANGES, still_in_range
from precompute.encoders.encoder_config import EncoderConfig
from precompute.encoders.preprocessing import recipe_of_model
from precompute.images.buckets import place
from precompute.images.config import ImageConfig
from precompute.images.fit import fit_image, unreduced
from precompute.sources.config import SourceConfig
from tests.precompute.encoders.loading import changed_config
from tests.precompute.encoders.towers import CLIP_PROCESSOR, SIDE, save_model

PROCESSORS = [
    CLIP_PROCESSOR,
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}),
    BitImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": SIDE, "width": SIDE}),
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}),
]


@pytest.fixture
def clip(tmp_path):
    CLIP_PROCESSOR.save_pretrained(tmp_path)
    return save_model("CLIPVisionModel", tmp_path)


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("size", [(61, 47), (300, 201)])
def test_images_are_prepared_as_the_models_processor_does(processor, size, clip):
    processor.save_pretrained(clip)
    source = SourceConfig(kind="folder", path=str(clip))
    encoder = EncoderConfig(model=str(clip), device="cpu")
    image = BuildConfig(cache="c", source=source, encoder=encoder, image=ImageConfig(from_model=True)).prepared().image
    assert not image.from_model
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8))
    fitted = fit_image(unreduced(noise), image.recipe, place(image.rule, noise.size))
    ours = still_in_range(torch.tensor(np.array([[fitted]])), PIXEL_RANGES[image.range], torch.device("cpu"))
    theirs = torch.from_numpy(processor(noise, return_tensors="np")["pixel_values"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # a level is 0.004 or more


@pytest.mark.parametrize("changes", [{"image_processor_type": "DINOv3ViTImageProcessor"}, {"image_mean": [0.1] * 3}])
def test_a_processor_that_cannot_be_followed_is_refused_by_the_field_to_leave_out(changes, clip):
    changed_config("preprocessor_config.json", **changes)(clip)
    with pytest.raises(ConfigError, match="image.from_model"):
        recipe_of_model(str(clip))
