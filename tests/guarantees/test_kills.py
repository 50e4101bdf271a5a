"""A command killed at any step of writing leaves no half file; run again, it ends in the same bytes."""

import itertools
import signal

import pytest

from cache_store.cache.metadata import read_spec
from cache_store.format.layout import SEAL_FILE
from cache_store.verify.verify import verify
from precompute.cli import main
from tests.command_runs import BEFORE, COMMANDS, PLAIN, Run, sealed_files

pytestmark = pytest.mark.slow

KILLED = [("folder", "zarr", 5), ("bucket", "webdataset", 7)]
"""Place, form, and every how-many-th step is tried: `test_power_cuts.py` tries every step in a folder."""

BEFORE_THE_SPEC = {"build.json", "latents/16x16/zarr.json", "seal.json", "texts.json"}
"""Files that an extension replaces or deletes before the spec, with which it begins."""


@pytest.mark.parametrize(("caches", "form", "stride"), KILLED, indirect=["caches"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_build_resumes_to_identical_bytes(scenes, tmp_path, caches, dying, name, form, stride):
    """After a kill, no shard is damaged, or only by a repair or a withdrawal, which are then finished.

    Commands that begin a cache are killed again and again in the same cache. After the others, a build without their
    flags resumes their work, also an extension that is planned, or refuses.
    """
    run, kept = Run(scenes(form), tmp_path, name, caches.below("cache")), 0
    address, whole = run.place.address, run.whole.timeless()
    for step in itertools.count(1, stride):
        if name in BEFORE:
            run.start()
        code, said = dying(*run.line(), at=step).end()
        if code == 0:
            break
        assert code == -signal.SIGKILL, said
        run.assert_whole()
        now = run.place.timeless()
        if name not in ("repair", "withdraw") and "zarr.json" in now:
            findings = verify(address, "full").findings
            assert all(each.shard is None or "not committed" in each.problem for each in findings), findings
        if name not in BEFORE:
            continue
        before = run.before.timeless()
        if step % 2:
            refused = main(["build", "--config", f"{run.scene}/{PLAIN[name]}.yaml", "--cache", address])
            now = run.place.timeless()
            if refused and name == "repair":
                continue  # only a repair mends
            if refused:
                assert (name, read_spec(address).rows) == ("extend", 5), "refused, though it had begun"
                assert {name for name, data in before.items() if now.get(name) != data} <= BEFORE_THE_SPEC
            else:
                assert name == "repair" or not verify(address, "full").findings
                assert not [each for each in now if each.endswith(".partial")]
            kept += all(now.get(each) == data for each, data in sealed_files(before).items() if each != SEAL_FILE)
        run.finish()
    assert run.place.timeless() == whole
    assert step > 7, "two for each file that is written, one for each that is retracted"
    assert kept * stride >= 2 or name != "retry", "until a shard is put in place, the earlier one stands"
