"""The benchmark of identities at toy size, for the way that no other test starts for real."""

import json

import pytest

from benchmarks import identities
from tests.object_stores.server import environment, running_server

pytestmark = pytest.mark.slow


@pytest.fixture
def url(tmp_path_factory, monkeypatch):
    with running_server(tmp_path_factory.mktemp("ministack")) as server:
        for name, value in environment(server.endpoint).items():
            monkeypatch.setenv(name, value)
        yield f"s3://{server.new_bucket()}"


def test_torchrun_in_a_store_gives_the_same_after_a_kill(capsys, tmp_path, url, monkeypatch):
    pytest.importorskip("obstore", reason="needs the extra object-stores")
    monkeypatch.setitem(identities.WAYS, "store-torchrun", identities.WAYS["torchrun"])
    toy = ["--count=4", "--batch-size=2", "--height=16", "--width=24", f"--folder={tmp_path}", f"--url={url}"]
    assert identities.main([*toy, "--ways", "store-torchrun"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["skipped"] == {}
    assert [each["equal_files"] for each in record["ways"].values()] == ["all"]
    assert list(tmp_path.iterdir()) == []
