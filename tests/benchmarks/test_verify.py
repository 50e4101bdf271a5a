import json

from benchmarks import verify


def test_every_form_is_measured_against_hashes_of_its_files(capsys, tmp_path):
    options = ["--samples", "12", "--samples-per-shard", "4", "--quick-shards", "3", "--repeats", "1"]
    assert verify.main([*options, "--folder", str(tmp_path)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    forms = {f"{store_format} {codec}" for store_format, codec in verify.FORMS}
    ours = {f"{level}, {jobs} jobs" for level in verify.LEVELS for jobs in verify.JOBS}
    works = {f"{form}: {work}" for form in forms for work in {*ours, *verify.BASELINES}}
    assert set(record["gb_per_s"]) == works
    assert len(record["ratios"]) == len(forms) * len(ours) * len(verify.BASELINES)
    assert all(figures["median"] > 0 for figures in record["gb_per_s"].values())
    assert record["quick_s_per_1000_shards"]["median"] > 0
    assert table[-1].startswith("quick: ")
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"
