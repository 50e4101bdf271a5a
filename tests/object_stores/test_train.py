"""A run from caches in an object store equals the run from folders, even after a kill."""

import signal

import numpy as np
import pytest

from cache_store.cli import main as cache_store
from tests.object_stores.server import environment
from tests.trainer.conftest import described_cache, save_language_model
from tests.trainer.runs import ForkedTrainer, assert_same_run, command, make_config
from trainer.cli import main
from trainer.run.folder import checkpoints_of

pytestmark = pytest.mark.slow


def test_a_killed_run_on_joined_urls_is_the_run_on_folders(bucket, proxy, tmp_path, capsys):
    model, folders, urls = save_language_model(tmp_path / "lm"), {}, {}
    for seed, tower in enumerate(("world", "second")):
        latents = np.random.default_rng(seed).standard_normal((40, 4, 2, 2), np.float32)
        path = described_cache(tmp_path / tower, 40, latents=latents, rejected=[3 + seed, 17])
        folders[tower], urls[tower] = str(path), f"{bucket}/{tower}"
        assert cache_store(["copy", str(path), urls[tower]]) == 0
    here = make_config(tmp_path, "here", cache=folders, language_model=model)
    there = make_config(tmp_path, "there", cache=urls, language_model=model, text_dir=None)
    options = [option for option in command(there, "") if option and not option.startswith("--data.text_dir")]
    killed = ForkedTrainer(["train", *options], environment(proxy.endpoint))
    killed.until(lambda: bool(checkpoints_of(there.run).steps()))
    killed.send_signal(signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    assert main(command(here)) == main(["train", *options]) == 0
    assert_same_run(here, there)
    assert [*(tmp_path / "there/text").iterdir()]
    assert main(["eval", *options]) == main(["generate", str(tmp_path / "there"), "--rows=1,5", "--max_tokens=4"]) == 0
    assert "row 5, sample-000005" in capsys.readouterr().out
