import json

import pytest

from benchmarks import loader


# webdataset leaves its tars open for the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_every_rival_and_our_reader_deliver_whole_batches_and_one_json_record(capsys, tmp_path):
    options = ["--samples", "96", "--batch-size", "32", "--repeats", "1", "--folder", str(tmp_path)]
    assert loader.main(options) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["samples_per_s"]) == {*loader.RIVALS, *loader.OURS}
    assert all(figures["median"] > 0 for figures in record["samples_per_s"].values())
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"
