"""Every config in the repository is one that its program accepts (the training configs: tests/trainer/test_cli.py)."""

from pathlib import Path

import pytest

from cache_store.command_line import to_config
from precompute.cli import build_parsers
from precompute.config import BuildConfig

ROOT = Path(__file__).parent.parent
BUILDS = ["llava_cc3m.yaml", "demo.yaml"]


@pytest.mark.parametrize("name", BUILDS)
def test_a_build_config_parses(name):
    parser, commands = build_parsers()
    arguments = parser.parse_args(["build", "--config", str(ROOT / "configs" / name)])
    assert to_config(BuildConfig, commands["build"], arguments.build).image.range == "signed"


def test_no_config_is_forgotten():
    assert {path.name for path in (ROOT / "configs").glob("*.yaml")} == {
        name for build in BUILDS for name in (build, f"train_{build}")
    }
