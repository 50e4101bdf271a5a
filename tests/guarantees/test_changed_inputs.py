"""Inputs that changed since the build: they are named and refused, or accepted with a flag."""

import pytest

from tests.precompute.acts import NOT_ENCODED, Act, image, other_image, source
from tests.precompute.conftest import Project, image_bytes, make_vae


def other_weights(project: Project) -> None:
    project.vae = make_vae(project.folder / "other-vae", seed=1)


def without_an_image(project: Project) -> None:
    project.unpack()
    image(project, 2).unlink()


NEW, HEIGHT, TALLER = "--cache NEW", "array.image.rule.sizes", "build --image.height 40"
SOME_ADDED = ["  samples     22            24\n  new sample                sample-022\n", "/cache.yaml --extend"]

REFUSED: dict[str, tuple[str, Act, list[str]]] = {
    "other weights": ("build", other_weights, ["array.encoder.weights_sha256", NEW]),
    "another size": (TALLER, source(), [HEIGHT, NEW]),
    "a list that has grown": ("build", source(range(24)), SOME_ADDED),
    "another image": ("build", other_image(6), [f"{NOT_ENCODED}sample-006", "image of sample-006", NEW]),
    "another image, extending": ("build --extend", other_image(9, range(24)), [f"{NOT_ENCODED}sample-009"]),
    "another image, repairing": ("repair --shards [1]", other_image(9), [f"{NOT_ENCODED}sample-009"]),
    "an image that is gone": ("build", without_an_image, [f"{NOT_ENCODED}sample-002"]),
    "a mended reject, repairing": (
        "repair --shards [0]",
        source(sample_004=image_bytes(4)),
        ["built again: sample-004", "--retry-rejected"],
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_other_inputs_are_refused_by_name(built, change):
    command, make, said = REFUSED[change]
    make(built)
    with built.untouched():
        message = built.do(command, code=1)
    assert all(each in message for each in said), message
    assert "weights" not in message or make is other_weights
    assert "rows" not in message
