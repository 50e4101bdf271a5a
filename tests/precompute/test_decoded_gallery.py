"""`precompute gallery --decode`: latents decoded by the VAE, beside their source images."""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from safetensors.torch import load_file, save_file

from cache_store.cache.metadata import write_build
from cache_store.cache.reader import open_cache
from cache_store.errors import EncodeOnceError, ModelError, StaleError
from cache_store.gallery.pictures import psnr
from cache_store.gallery.rows import Showcase
from precompute.cli import main
from precompute.gallery import DecodedGalleryConfig, open_decoder
from precompute.source_images import open_source_images
from tests.precompute.conftest import BROKEN, image_bytes, make_vae


def decoder(cache: Path, **options: Any) -> Any:
    return open_decoder(cache, DecodedGalleryConfig(decode=True, device="cpu", **options))


def test_decoded_rows_and_their_psnr_are_those_of_the_model(built_once, vae_path):
    """As diffusers' own `decode` of the whole model, to one level."""
    cache, numbers = open_cache(built_once), np.array([0, 7])
    vae = AutoencoderKLWan.from_pretrained(vae_path, subfolder="vae", torch_dtype=torch.float32)
    with torch.no_grad():
        latents_NCHW = torch.from_numpy(cache.read(numbers).astype(np.float32))
        image_N3YX = vae.decode(latents_NCHW.unsqueeze(2)).sample[:, :, 0].numpy()
    expected = ((image_N3YX.transpose(0, 2, 3, 1) + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
    showcase = Showcase(cache=cache, read_image=open_source_images(built_once), decode=decoder(built_once))
    for exhibit, decoded in zip(showcase.cached(numbers).values(), expected, strict=True):
        with Image.open(io.BytesIO(image_bytes(exhibit.row))) as image:
            source = np.asarray(image.convert("RGB").resize((40, 32), Image.Resampling.BILINEAR))
        assert np.abs(exhibit.decoded.astype(int) - decoded).max() <= 1
        assert exhibit.psnr == pytest.approx(psnr(source, decoded), abs=0.01)


def test_the_page_shows_decoded_images_and_the_mean(project):
    project.build()
    page = project.folder / "page.html"
    said = project.run(main, "gallery", project.cache, "-o", page, "--decode", "--device", "cpu", "--rows", 3)
    text = page.read_text()
    assert len(re.findall('alt="decoded image of row', text)) == 3
    shown = [float(value) for value in re.findall(r'class="strong">(\d+\.\d) dB', text)[:3]]
    mean = re.search(r"random rows, decoded: (\d+\.\d) dB", said)
    assert float(mean[1]) == pytest.approx(np.mean(shown), abs=0.11)
    assert f"Mean PSNR of the decoded images: <strong>{mean[1]} dB</strong>" in text
    assert len(BROKEN) == len(re.findall(r'class="card reject"', text))


def test_moments_decode_by_their_mean(built):
    built.build(name="moments", encoder__posterior="moments")
    moments, numbers = built.folder / "moments", np.arange(4)
    latents, doubled = open_cache(built.cache).read(numbers), open_cache(moments).read(numbers)
    assert doubled.shape[1] == 2 * latents.shape[1]
    np.testing.assert_array_equal(decoder(built.cache)(latents), decoder(moments)(doubled))


def test_a_finetuned_decoder_is_accepted_but_no_incomplete_or_other_one(built_once, vae_path, tmp_path):
    """Only the encode path must be the cache's, but no weight of the decoder may be random."""
    shutil.copytree(vae_path, tmp_path, dirs_exist_ok=True)
    weights_file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(weights_file)
    save_file(weights | {"post_quant_conv.bias": weights["post_quant_conv.bias"] + 1}, weights_file)
    decoder(built_once, model=str(tmp_path))
    del weights["decoder.conv_out.bias"]
    save_file(weights, weights_file)
    with pytest.raises(ModelError, match=r"decoder\.conv_out\.bias"):
        decoder(built_once, model=str(tmp_path))
    other = str(make_vae(tmp_path / "other", seed=1))
    with pytest.raises(StaleError, match="sha256"):
        decoder(built_once, model=other)


def recorded(images: object, **image: object) -> dict[str, object]:
    sections = {"source": {"kind": "folder", "path": str(images)}, "encoder": {"model": "org/name"}, "store": {}}
    return {**sections, "image": {"height": 8, "width": 8, **image}}


OTHER_VERSIONS = {
    r"/nowhere": recorded("/nowhere"),
    r"build\.json .*image: .*resample": recorded("/tmp", resample="nearest"),
}


@pytest.mark.parametrize("problem", OTHER_VERSIONS)
def test_a_source_that_cannot_be_opened_is_a_named_error(tmp_path, problem):
    write_build(tmp_path / "cache", OTHER_VERSIONS[problem])
    with pytest.raises(EncodeOnceError, match=problem):
        open_source_images(tmp_path / "cache")
