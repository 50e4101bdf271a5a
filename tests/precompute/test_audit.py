"""Latents against their images: by an audit, which finds what no checksum can, and in a gallery of decoded ones."""

import io
import json
import math
import re
import shlex
import shutil
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from safetensors.torch import load_file, save_file

from cache_store import __version__
from cache_store.cache.metadata import read_build, write_build
from cache_store.cache.reader import open_cache
from cache_store.errors import ModelError, StaleError
from cache_store.format.array import DTYPES
from cache_store.format.quantized import as_read
from cache_store.gallery.pictures import psnr
from cache_store.gallery.rows import Showcase
from cache_store.verify.verify import verify
from precompute.audit import difference_of, draw
from precompute.cli import main
from precompute.encode.tolerance import LIMITS, Difference
from precompute.gallery import DecodedGalleryConfig, open_decoder
from precompute.source_images import open_source_images
from tests.precompute.conftest import BROKEN, SAMPLES, Project, image_bytes, make_vae, sample_name

CACHED_SAMPLES = SAMPLES - len(BROKEN)


def audit(project: Project, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run an audit; return its report, empty if there is none, and its output."""
    path = project.folder / "audit.json"
    path.unlink(missing_ok=True)
    said = project.run(main, "audit", project.cache, "--report", path, *options, code=code)
    return json.loads(path.read_text()) if path.exists() else {}, said


def test_an_untouched_cache_audits_with_equal_bits(project):
    project.build(store__dtype="uint8")
    report, _ = audit(project)
    assert report.items() >= {"sound": True, "error": None, "version": __version__, "findings": []}.items()
    assert report["equal_bits"] == report["compared"] == CACHED_SAMPLES
    assert report["worst"] == 0.0


def test_a_wrong_latent_is_named_though_checksums_are_right(project, encoding):
    """Row 9 is in the middle of the fourth batch. It is named drawn or not."""
    offsets = chain([0, 0, 0, torch.tensor([0, 0.25, 0])[:, None, None, None]], repeat(0))
    encoding(lambda encode, image: encode(image) + next(offsets))
    project.build()
    assert not verify(project.cache, "full").findings
    report, said = audit(project, code=1)
    (finding,) = report["findings"]
    assert (finding["row"], finding["id"], finding["shard"]) == (9, sample_name(9), 1)
    assert "row 9, sample-009 (shard 1)" in said
    assert report["worst"] == pytest.approx(0.25, abs=1e-3)
    assert report["equal_bits"] == CACHED_SAMPLES - 1
    drawn = [row - sum(broken < row for broken in BROKEN) for row in (8, 10)]
    seed = next(seed for seed in range(1000) if draw(CACHED_SAMPLES, 1, seed)[0] in drawn)
    report, _ = audit(project, "--samples", "1", "--seed", str(seed), code=1)
    assert report["statement"].startswith("1 of the 3 samples compared differ"), "its neighbour was drawn"
    condition = "next: if the encoder and the sources are right, run: rm "
    remove = next(line for line in said.splitlines() if line.startswith(condition))
    for name in shlex.split(remove.removeprefix(condition)):
        Path(name).unlink()
    project.build()
    audit(project)


def test_another_encoder_or_an_unsealed_cache_is_refused(built):
    config = read_build(built.cache).config
    config["encoder"]["model"] = str(make_vae(built.folder / "vae", seed=1))
    write_build(built.cache, config)
    assert "encoder.weights_sha256" in audit(built, code=1)[1]
    built.lose("seal.json")
    assert str(built.cache) in audit(built, code=1)[1]


def test_a_seed_repeats_a_draw_of_whole_batches(built):
    first, said = audit(built, "--samples", "1", "--seed", "3")
    assert first["drawn"] == 1
    assert first["compared"] in (2, 3)
    assert "at most 95.00% of the 20" in said
    assert first["limits"] == str(LIMITS["float32", "cpu"])
    first, said = audit(built, "--samples", "2")
    assert f"seed        {first['seed']}" in said
    again, _ = audit(built, "--samples", "2", "--seed", str(first["seed"]))
    when = {"time": "", "seconds": 0}
    assert again | when == first | when


@pytest.mark.parametrize(("relative", "code"), [(3e-6, 0), (3e-4, 1)])
def test_an_encoder_may_round_differently_but_not_be_off(project, encoding, relative, code):
    """Other machines' float32 kernels differ by about 5e-6 of the root mean square."""
    project.build(store__dtype="float32")
    encoding(lambda encode, image: encode(image) * (1 + relative))
    report, _ = audit(project, code=code)
    assert report["equal_bits"] == 0
    assert len(report["findings"]) == (CACHED_SAMPLES if code else 0)


ROUNDING = [("float16", 2**-10, 1e6), ("bfloat16", 2**-7, 3.4e38), ("float32", 2**-23, math.inf)]


@pytest.mark.parametrize(("dtype", "step", "too_large"), ROUNDING)
def test_rounding_to_the_stored_dtype_is_no_difference(dtype, step, too_large):
    """A value that is not finite after rounding differs by infinity."""
    stored, infinite = np.ones((1, 1, 1), DTYPES[dtype]), (math.inf, math.inf)
    expected = {1 + step: (step, 0), 1 + 2 * step: (2 * step, step), too_large: infinite, math.nan: infinite}
    for value, (largest, beyond) in expected.items():
        rounded = as_read(np.full((1, 1, 1), value, np.float32), dtype)
        assert difference_of(stored, rounded, dtype, np.ones(1)) == (largest, Difference(beyond, beyond, beyond))


# `precompute gallery --decode`: latents decoded by the VAE, beside their source images.


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
