"""Wrong usage of `precompute`: a table of what is typed, and what the one line of error must name; nothing is made."""

import gzip
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from precompute.cli import main
from tests.precompute.conftest import Project, run_build, write_source
from tests.precompute.encoders.test_vaes import IMAGE_VAES
from tests.precompute.encoders.text_models import save_text_encoder
from tests.precompute.encoders.towers import CLIP_PROCESSOR, save_model

AUTOENCODERS = ["AutoencoderKLAllegro", *(each.class_name for each in IMAGE_VAES)]
UNLOADED = (*AUTOENCODERS, "ViTMAEModel")
"""Classes of models that are refused by their config alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, vae_path: Path) -> Path:
    """A folder with a cache, its source, and models by the names of their classes."""
    folder = tmp_path_factory.mktemp("refusals")
    run_build(folder, write_source(folder / "source"), vae_path)
    (folder / "a.tar.gz").write_bytes(gzip.compress(b""))
    for kind in UNLOADED:
        (folder / kind).mkdir()
        scales = [0.5] * (kind == "AutoencoderKLWan")
        key = {"_class_name": kind, "attn_scales": scales} if kind in AUTOENCODERS else {"architectures": [kind]}
        (folder / kind / "config.json").write_text(json.dumps(key))
    for kind in ("CLIPVisionModel", "Gemma3ForConditionalGeneration"):
        save_model(kind, folder / kind)
    CLIP_PROCESSOR.save_pretrained(folder / "CLIPVisionModel")
    for kind in ("CLIPTextModel", "T5EncoderModel"):
        save_text_encoder(kind, folder / kind)
    return folder


@pytest.fixture
def project(folder: Path, vae_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Project:
    monkeypatch.chdir(folder)
    return Project(folder, vae_path, capsys)


IMAGE = "--image.height 32 --image.width 32"
CLIP = f"build {IMAGE} --image.range clip --encoder.model CLIPVisionModel"
GEMMA = f"build {IMAGE} --encoder.model Gemma3ForConditionalGeneration"
TEXT = "build --source.text caption --encoder.max_tokens 16 --encoder.model"
T5 = f"{TEXT} T5EncoderModel"
OWN_TEXTS = "'{a: {model: x/y, max_tokens: 7}}'"
CLIPS = f"build {IMAGE} --clip.frames 5 --clip.fps 12"
FOLDER = "build --source.kind folder --source.images null"
OTHER_CACHE = "build --source.kind cache --source.images null --source.path"
BUCKETS = "build --image.buckets.preset ours --image.buckets.resolution 256"
WEBDATASET = "build --store.format webdataset"

REFUSED: list[tuple[Any, ...]] = [
    (2, "build --image.height 33", "image.height", "8", "33x40"),
    (2, f"build {IMAGE} --image.range clip --encoder.model CLIPVisionModel --store.dtype uint8", "token", "float16"),
    (2, "build --store.dtype uint8 --store.format webdataset", "uint8", "zarr"),
    (2, "build --image.from_model true", "image.from_model", "height"),
    (2, "build --image.height 65536 --image.width 65536", "22 samples"),
    (2, f"{WEBDATASET} --store.codec zstd", "store.format webdataset"),
    (2, "build --source.caption 2", "source.caption", "encoder.max_tokens"),
    (2, f"{T5} --source.keep_tags 1", "source.keep_tags", "source.shuffle_tags"),
    (2, "build --source.fields.captions [a]", "source.fields.captions", "llava"),
    (2, "build --source.path source", "source is not a file", "kind folder"),
    (2, f"{FOLDER} --source.images source", "source.images is for kind llava or table", "the image tree"),
    (1, "build --source.images a.tar.gz", "source.images: a.tar.gz", "gzip", "unpack it"),
    (2, "build --source.images nowhere", "source.images", "nowhere does not exist"),
    (2, f"{OTHER_CACHE} source", "source holds no cache"),
    (2, f"{OTHER_CACHE} cache --cache cache", "is the cache itself"),
    (2, "build --encoder.max_tokens 100000", "encoder.max_tokens", "65,536"),
    (2, "build --cache ftp://b/c", "ftp://b/c"),
    (2, "build --cache source", "chat.json"),
    (2, "build --extend --rank 1 --world-size 2", "--extend", "precompute plan", "rank 1 of 2"),
    (2, "build --run.engine ray --rank 0 --world-size 2", "run.engine ray", "rank 0 of 2"),
    (2, "build --rank 0 --world-size 2", "precompute plan --config", "/new.yaml"),
    (2, "seal", "precompute plan --config", "/new.yaml"),
    (2, "build --encoder.model a/b/c", "encoder.model a/b/c"),
    (2, "build --encoder.model source", "encoder.model source", "vae/config.json"),
    (2, "build --encoder.compile true --encoder.fold false", "encoder.compile", "encoder.fold"),
    *((2, f"build --encoder.device {each}", "encoder.device", each) for each in ("cuda:99", "cpu:1")),
    *((1, f"build --encoder.model {each}", each) for each in ("AutoencoderKLAllegro", "ViTMAEModel")),
    (2, "build --encoder.pool 1 --encoder.model AutoencoderKLWan", "encoder.pool", "AutoencoderKLWan"),
    (2, f"build {IMAGE} --encoder.fold false --encoder.model AutoencoderKLWan", "encoder.fold", "attn_scales"),
    (2, "build --encoder.posterior moments --encoder.model AutoencoderTiny", "encoder.posterior", "AutoencoderTiny"),
    (1, f"{CLIP} --encoder.layer 4", "encoder.layer", "0 to 3", "-1 to -4"),
    (2, f"{CLIP} --image.range signed", "image.range", "clip", "image.from_model"),
    (2, f"{GEMMA} --encoder.pool 3", "encoder.pool", "4", "3"),
    (2, f"{GEMMA} --image.height 36", "image.height", "32", "36x32"),
    (2, "build --encoder.max_tokens 16 --encoder.model T5EncoderModel", "encoder.max_tokens", "source.text"),
    (2, "build --source.text caption --encoder.model T5EncoderModel", "source.text", "encoder.max_tokens"),
    (2, f"{TEXT} CLIPVisionModel", "CLIPVisionModel", "encoder.max_tokens"),
    (2, f"{TEXT} source", "text_encoder/config.json"),
    (2, f"{T5} --encoder.fold false", "encoder.fold", "encoder.max_tokens"),
    (2, f"{T5} --encoder.template 'no place'", "encoder.template", "{}"),
    (2, f"{TEXT} CLIPTextModel --encoder.max_tokens 78", "encoder.max_tokens", "77"),
    (2, f"{TEXT} CLIPTextModel --encoder.drop 5", "encoder.drop", "encoder.template", "2"),
    (2, f"{BUCKETS} --image.height 64", "image.height and image.buckets contradict each other"),
    (2, f"{BUCKETS} --image.buckets.step 12", "image.buckets.step 12", "encoder", "multiples of 8"),
    (2, "build --clip.frames 6 --clip.fps 12", "clip.frames", "4k", "5", "9"),
    (2, "build --clip.fps 12", "clip.fps", "clip.frames"),
    (2, f"{CLIPS} --image.decode reduced", "image.decode", "clips"),
    (2, f"{CLIPS} --encoder.model AutoencoderTiny", "AutoencoderTiny", "clip"),
    (2, "texts --of FLUX.1-dve --model x/y", "FLUX.1-dve", "did you mean FLUX.1-dev?", "HunyuanVideo"),
    (2, "texts --of SDXL", "model", "SDXL"),
    (2, "texts --of SDXL --model T5EncoderModel", "SDXL's clip", "T5EncoderModel"),
    (2, f"texts --of SDXL --model x/y --texts {OWN_TEXTS}", "of", "texts"),
    (2, "texts --texts '{a: {model: x/y}}'", "texts.a.max_tokens"),
    (2, "texts --texts '{../a: {model: x/y, max_tokens: 7}}'", "../a"),
    (2, "repair --shards [3]", "3"),
    (2, "repair --report /nowhere.json", "/nowhere.json"),
    (2, "gallery -o page.html --model=x", "--model", "--device", "--decode"),
]
"""Exit code, a command line, and the words that its error must have."""

OTHER_FIELDS = {
    "samples_per_shard": "--store.samples_per_shard 4",
    "store_format": "--store.format webdataset",
    "array.dtype": "--store.dtype float32",
    "array.image.resample": "--image.resample lanczos",
    "array.image.range": "--image.range theworld",
    "array.image.decode": "--image.decode reduced",
    "array.image.flip": "--image.flip true",
    "array.encoder.path": "--encoder.fold false",
    "array.encoder.posterior": "--encoder.posterior moments",
    "array.encoder.compute_dtype": "--encoder.compute_dtype bfloat16",
}


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[1])
def test_a_refusal_is_one_line_that_names_what_is_wrong_and_makes_nothing(project, row):
    code, line, *named = row
    command, *options = shlex.split(line)
    image = {"image": {}} if "source.text" in line or "buckets" in line else {}
    place = ["--config", project.config("new", **image)] if command in ("build", "seal", "estimate") else ["cache"]
    place = ["--source", "cache", "--cache", "text"] if command == "texts" else place
    files = {*project.folder.iterdir()}
    with project.untouched():
        said = project.run(main, command, *place, *options, code=code)
    (error,) = [line for line in said.splitlines() if line.startswith("precompute: error: ")]
    assert [each for each in named if each not in error] == [], error
    assert {*project.folder.iterdir()} == files


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_every_field_of_the_recipe_is_refused_by_name(project, field):
    with project.untouched():
        said = project.do(f"build {OTHER_FIELDS[field]}", code=1)
    assert re.search(rf"^  {re.escape(field)}  ", said, re.MULTILINE)
