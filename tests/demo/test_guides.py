"""The commands of the guide to building, as typed, on the demo's inputs."""

import re
import shlex
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cache_store import open_cache, open_joined
from cache_store.cli import main as cache_store
from demo.config import DemoConfig
from demo.inputs import make_data, save_vae
from precompute.cli import main as precompute

GUIDE = Path(__file__).parents[2] / "docs/guide/building.md"
ELSEWHERE = ("s3://", "hf://")
"""Places that tests cannot reach."""
MORE = {"estimate": ["--seconds", "0.1"], "build": ["--run.max_reject_fraction", "0.1"]}
"""Options for few scenes, of which more are broken."""


def commands_of(page: str) -> list[list[str]]:
    """Return the commands of a page's blocks; in a block with prompts, other lines are output."""
    commands = list[list[str]]()
    for block in re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        commands += map(shlex.split, prompted or lines)
    return commands


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_in_a_child")
def test_the_commands_of_the_guide_to_building_run_in_their_order(tmp_path, monkeypatch, capsys):
    """The one without --extend is refused, as the page shows."""
    demo = DemoConfig(output=str(tmp_path / "demo-run"), scenes=200)
    save_vae(demo, make_data(demo))
    monkeypatch.chdir(tmp_path)
    refused, run = [], {"precompute": precompute, "cache-store": cache_store}
    for program, *words in commands_of(GUIDE.read_text()):
        if program == "printf":
            Path(words[-1]).write_text(words[0].replace("\\n", "\n"))
        elif program == "unzip":
            with zipfile.ZipFile(words[1]) as archive:
                archive.extractall("grow", [name for name in archive.namelist() if fnmatch(name, words[2])])
        elif not any(word.startswith(ELSEWHERE) for word in words):
            code = run[program]([*words, *MORE.get(words[0], [])])
            refused += [words] if code else []
            assert code in (0, 1), words
    assert len(refused) == 1
    assert "--extend" in capsys.readouterr().err
    assert len(open_cache("packed.cache")) == 200
    assert len(open_joined({"world": "scenes.cache", "small": "small.cache"})) == len(open_cache("scenes.cache"))
