"""The table of identities, at toy size: those of its ways that no other test starts for real."""

import json

import pytest

from benchmarks import identities
from tests.object_stores.server import environment, running_server


@pytest.fixture
def url(tmp_path_factory, monkeypatch):
    with running_server("ministack", tmp_path_factory.mktemp("ministack")) as server:
        for name, value in environment(server.endpoint).items():
            monkeypatch.setenv(name, value)
        yield f"s3://{server.new_bucket()}"


def test_torchrun_and_ray_in_a_store_are_killed_and_end_alike(capsys, tmp_path, url):
    for extra in ("ray", "obstore"):
        pytest.importorskip(extra, reason="needs the extras ray and object-stores")
    toy = ["--count=4", "--batch-size=2", "--height=16", "--width=24", f"--folder={tmp_path}", f"--url={url}"]
    assert identities.main([*toy, "--ways", "torchrun", "store-ray"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["skipped"] == {}
    assert [each["equal_files"] for each in record["ways"].values()] == ["all", "all"]
    assert list(tmp_path.iterdir()) == [], "what was written for the run is removed"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ways", "store-one-process"], "nothing to compare: store-one-process: no --url names an object store"),
        (["--kills=-1"], "argument --kills: must be a whole number of at least 1, got -1"),
    ],
)
def test_what_compares_nothing_is_refused(capsys, options, said):
    assert identities.main(options) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks.identities: error: {said}\n")


def test_a_wrong_option_names_the_command_as_it_is_typed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/clone/benchmarks/identities.py"])
    assert identities.main(["--nope"]) == 2
    assert capsys.readouterr().err.endswith(
        "\nbenchmarks.identities: run `python -m benchmarks.identities --help` for usage\n"
    )
