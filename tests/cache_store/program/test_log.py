"""Messages on standard error: plain, or with time and level in the chosen format."""

import json
import logging
import os
import re
import warnings
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from cache_store.cli import main
from cache_store.errors import CacheError
from cache_store.log import VARIABLE, log_info, log_warning
from cache_store.program.progress_bar import ProgressBar
from cache_store.program.running import run_program
from tests.make_cache import make_cache
from tests.named import assert_names

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


pytestmark = pytest.mark.usefixtures("logging_as_before")


def test_the_format_may_be_typed_anywhere_or_stand_in_the_environment(tmp_path, capsys, monkeypatch):
    def info_line(*words: str) -> str:
        assert main([*words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    info = ("info", str(tmp_path))
    for words in ((*info, "--log-format=text"), ("--log-format", "text", *info)):
        assert re.fullmatch(f"{TIME} error   cache-store: {tmp_path} .*", info_line(*words))
    for words in (["--log-format"], ["--log-format", "yaml"]):
        assert_names(info_line(*info, *words), "--log-format ENCODE_ONCE_LOG_FORMAT plain")
    assert info_line(*info).startswith(f"cache-store: error: {tmp_path} ")
    monkeypatch.setenv(VARIABLE, "json")
    record = json.loads(info_line(*info))
    assert record.pop("message").startswith(f"{tmp_path} ")
    written = datetime.fromisoformat(record.pop("time"))
    assert timedelta() <= datetime.now(UTC) - written < timedelta(minutes=5)
    host = os.uname().nodename
    assert record == {"level": "error", "program": "cache-store", "host": host, "cache": str(tmp_path)}


def test_progress_warnings_and_what_other_libraries_log_are_records_too(capsys):
    def run(argv):
        assert argv == ["rest"]
        log_info("so far", answer=42)
        log_warning("look")
        with ProgressBar("verify", 3, "shard", delay_s=0.0) as bar:
            bar.update(3)
        logging.getLogger("obstore").warning("slow")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        raise CacheError("two\nlines")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run_program("trainer", run, ["rest", "--log-format", "json"]) == 1
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {record["program"] for record in records} == {"trainer"}
    levels = {record["message"].partition("[")[0]: record["level"] for record in records}
    assert levels.items() >= {"so far": "info", "look": "warning", "slow": "warning", "two\nlines": "error"}.items()
    assert records[0]["answer"] == 42
    progress = [each["progress"] for each in records if "progress" in each][-1]
    assert progress.items() >= {"done": 3, "total": 3, "unit": "shard", "seconds_left": 0.0}.items()
    assert progress["per_s"] > 0
    assert any("DeprecationWarning: old" in record["message"] for record in records)


def test_findings_and_the_result_of_a_verification_are_records(tmp_path, capsys):
    cache = make_cache(tmp_path / "cache", np.ones((6, 2, 3, 4), np.float32), samples_per_shard=2)
    (cache / "samples/000001.parquet").unlink()
    assert main(["verify", str(cache), "--log-format", "json"]) == 1
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (finding,) = (record for record in records if "finding" in record)
    assert (finding["level"], finding["cache"], finding["finding"]["shard"]) == ("warning", str(cache), 1)
    assert records[-1]["verify"].items() >= {"sound": False, "findings": 1, "covered": 3}.items()


def test_quiet_leaves_warnings_and_errors_and_the_result(tmp_path, capsys, monkeypatch):
    def run(argv):
        assert argv == ["rest"]
        log_info("so far")
        log_warning("look")
        with ProgressBar("verify", 3, "shard", delay_s=0.0) as bar:
            bar.update(3)
        print("done")
        return 0

    for words, environment in ((["rest", "--quiet"], ""), (["rest"], "1")):
        monkeypatch.setenv("ENCODE_ONCE_QUIET", environment)
        assert run_program("trainer", run, words) == 0
        assert capsys.readouterr() == ("done\n", "trainer: warning: look\n")
