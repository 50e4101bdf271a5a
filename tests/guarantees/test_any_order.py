"""Commands on one cache in any order, each perhaps killed or ended by a power cut at any step; drawn by hypothesis."""

import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cache_store.cache.metadata import open_plan, read_samples, read_seal
from cache_store.errors import EncodeOnceError
from cache_store.format.layout import BUILD_FILE, SEAL_FILE
from cache_store.verify.verify import verify
from tests.command_runs import PROGRAMS, quick_parsing, values_of
from tests.places import Folder
from tests.posix_disk import Disk, disk_of, lay_out, recorded, tree_of, without_scratch
from tests.precompute.conftest import config_values, image_bytes, write_config, write_source

pytestmark = pytest.mark.slow

__all__ = ["quick_parsing"]  # a fixture

MOST_ROWS = 12
BROKEN = "sample_004"
"""The sample that is rejected until its image is mended."""

Cut = tuple[str, int, int] | None
"""How a command ends: killed or by a power cut, at which step, and what the power cut leaves; None at its end."""

cuts = st.none() | st.tuples(st.sampled_from(["kill", "power"]), st.integers(0, 10**6), st.integers(0, 10**6))


class AnyOrder(RuleBasedStateMachine):
    """A cache of shards of three rows, its source, and what they must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name)
        (self.folder / "disk").mkdir()
        self.cache, self.disk = self.folder / "disk" / "cache", Disk()
        small: dict[str, Any] = {"store__samples_per_shard": 3, "encoder__batch_size": 2, "image__height": 16}
        small |= {"image__width": 16, "run__max_reject_fraction": 0.5}
        model = Path("examples.own_encoder:PatchColours")
        self.config = self.folder / "cache.yaml"
        write_config(self.config, config_values(self.cache, self.folder / "source", model, **small))
        self.rows, self.mended = 5, {}
        self.planned = 5
        """Rows of the last build that ended."""
        self.values: dict[str, bytes] = {}
        """Every sample that was ever sealed."""
        self.write_source()

    def teardown(self) -> None:
        self.scratch.cleanup()

    def write_source(self) -> None:
        write_source(self.folder / "source", range(self.rows), **self.mended)

    @property
    def is_sealed(self) -> bool:
        return (self.cache / "seal.json").exists()

    def run(self, program: str, *arguments: object, cut: Cut = None) -> int | None:
        """Run a command; return its exit code, or None if it was cut."""
        with recorded(self.folder / "disk", self.disk) as moments:
            code = PROGRAMS[program]([str(each) for each in arguments])
        self.disk = moments[-1]
        if cut is None:
            return code
        how, at, which = cut
        self.disk = moments[at % len(moments)]
        if how == "power":
            left = [*self.disk.after_a_power_cut()]
            self.disk = disk_of(left[which % len(left)])
        lay_out(self.folder / "disk", self.disk.seen())
        return None

    def build(self, *flags: str, cut: Cut, may_refuse: bool) -> None:
        before = without_scratch(self.disk.seen())
        code = self.run("precompute", "build", "--config", self.config, *flags, cut=cut)
        if code == 0:
            self.planned = self.rows
            assert self.is_sealed
        elif code is not None:
            assert may_refuse
            assert without_scratch(self.disk.seen()) == before

    @rule(cut=cuts)
    def build_or_resume(self, cut: Cut) -> None:
        self.build(cut=cut, may_refuse=self.rows > self.planned)

    @rule(cut=cuts, more=st.integers(1, 3))
    def extend(self, cut: Cut, more: int) -> None:
        self.rows = min(self.rows + more, MOST_ROWS)
        self.write_source()
        self.build("--extend", cut=cut, may_refuse=False)

    @rule(cut=cuts)
    def retry_rejected(self, cut: Cut) -> None:
        self.mended = {BROKEN: image_bytes(4)}
        self.write_source()
        self.build("--retry-rejected", cut=cut, may_refuse=self.rows > self.planned)

    @precondition(lambda self: self.is_sealed and self.rows == self.planned)
    @rule(cut=cuts, which=st.integers(0, 100))
    def damage_and_repair(self, cut: Cut, which: int) -> None:
        """Flip a bit of any file, and run what `verify` names: the bytes are as before."""
        place = Folder(self.cache)
        before, names = without_scratch(place.timeless()), sorted(without_scratch(place.files()))
        damaged = names[which % len(names)]
        place.flip(damaged)
        self.disk = disk_of(tree_of(self.folder / "disk"))
        for end in (cut, None):
            self.check_values()
            for step in self.steps_to_repair():
                assert self.run("precompute", *step, cut=end) in (0, None)
        # After an image was mended, the source is listed anew; a plan that is written again from it has the image's new
        # fingerprint, and the seal the plan's sum.
        may_differ = {BUILD_FILE} if self.mended else set()
        may_differ |= {damaged, SEAL_FILE} if self.mended and damaged.startswith("plan/") else set()
        after = without_scratch(place.timeless())
        assert {name for name in before.keys() | after if before.get(name) != after.get(name)} <= may_differ

    def steps_to_repair(self) -> Iterator[list[str]]:
        """Yield the `precompute` commands that `verify` names."""
        report = self.folder / "report.json"
        PROGRAMS["cache-store"](["verify", str(self.cache), "--level", "full", "--report", str(report)])
        for step in json.loads(report.read_text())["next"]:
            if step.startswith("precompute "):
                yield shlex.split(step)[1:]
            elif not step.startswith("delete "):
                yield ["build", "--config", str(self.config)]

    @precondition(lambda self: self.is_sealed)
    @rule(cut=cuts, form=st.sampled_from(["zarr", "webdataset"]))
    def copy(self, cut: Cut, form: str) -> None:
        """Copy the cache; a copy that was stopped ends when it is run again."""
        before, copy = self.disk, self.folder / "disk" / "copy"
        for end in (cut, None):
            code = self.run("cache-store", "copy", self.cache, copy, "--format", form, cut=end)
            if code == 1:  # an extension was stopped
                assert verify(self.cache, "quick").findings
        if code == 0:
            assert values_of(copy) == values_of(self.cache)
            assert not verify(copy, "deep").findings
        self.disk = before
        lay_out(self.folder / "disk", self.disk.seen())

    @invariant()
    def is_whole_or_absent(self) -> None:
        """A sealed cache is sound, and has every planned sample or a reason."""
        if not self.is_sealed:
            return
        assert not [each for each in verify(self.cache, "deep").findings if each.kind != "stray"]
        self.check_values()
        seal = read_seal(self.cache)
        tables = [read_samples(self.cache, shard, ["status", "reason"]) for shard in range(seal.spec.num_shards)]
        status = Counter(each for table in tables for each in table["status"].to_pylist())
        assert (status["cached"], status["rejected"]) == (seal.cached, seal.rejected)
        plan = open_plan(self.cache, seal.spec)
        rows = sum(len(plan.part_rows(part, ["id"])) for part in range(plan.parts))
        assert seal.cached + seal.rejected == seal.spec.rows == rows
        assert sum(table["reason"].null_count for table in tables) == seal.cached

    def check_values(self) -> None:
        """Check that nothing that was sealed has changed; a damaged cache may refuse to be read."""
        try:
            values = values_of(self.cache)
        except EncodeOnceError:
            assert verify(self.cache, "full").findings
            return
        for name, value in values.items():
            assert self.values.setdefault(name, value) == value


BOUNDED = settings(deadline=None, database=None, phases=[Phase.generate], report_multiple_bugs=False)
"""Without shrinking, which takes minutes: the output names the commands as they are."""

TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(BOUNDED, derandomize=True, max_examples=10, stateful_step_count=8)

if __name__ == "__main__":  # python -m tests.guarantees.test_any_order EXAMPLES
    longer = settings(BOUNDED, max_examples=int(sys.argv[1]), stateful_step_count=20)
    run_state_machine_as_test(AnyOrder, settings=longer)
