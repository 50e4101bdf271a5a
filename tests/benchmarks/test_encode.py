import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

from benchmarks.encode import main

TOY = ["--height", "16", "--width", "24", "--batch-size", "2", "--repeats", "2", "--base-dim", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def printed() -> list[str]:
    out = StringIO()
    with redirect_stdout(out):
        assert main(TOY) == 0
    return out.getvalue().splitlines()


def test_the_last_line_is_a_record_with_its_conditions(printed):
    record = json.loads(printed[-1])
    assert {"command", "revision", "baseline"} <= record.keys()
    assert (record["benchmark"], record["versions"]["torch"]) == ("encode", torch.__version__)
    assert record["hardware"]["cpu"]
    assert record["hardware"]["cores"] >= 1
    assert record["settings"].items() >= {"base_dim": 8, "device": "cpu"}.items()


def test_both_paths_are_measured_in_both_dtypes(printed):
    record = json.loads(printed[-1])
    rivals = {f"{path} {dtype}" for path in ("diffusers", "folded") for dtype in ("float32", "bfloat16")}
    assert record["images_per_s"].keys() == record["peak_share"].keys() == rivals
    for speed in (*record["images_per_s"].values(), *record["speedup"].values()):
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    assert set(record["speedup"]) == {
        "folded float32 over diffusers float32",
        "folded bfloat16 over diffusers bfloat16",
        "folded bfloat16 over diffusers float32",
    }


def test_the_table_above_it_is_for_people(printed):
    assert any(line.startswith("folded bfloat16 ") and line.endswith("%") for line in printed)
    assert sum(" over " in line and "x  (" in line for line in printed[:-1]) == 3


def test_help_needs_no_torch_and_wrong_usage_is_one_line(capsys):
    code = "import sys; from benchmarks.encode import option_parser; option_parser().format_help();"
    command = [sys.executable, "-c", f"{code} sys.exit(bool({{'torch', 'diffusers'}} & {{*sys.modules}}))"]
    assert subprocess.run(command, check=False).returncode == 0
    assert main(["--height", "tall"]) == 2
    assert "argument --height: invalid int value: 'tall'" in capsys.readouterr().err
