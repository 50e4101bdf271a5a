"""What one run is asked, and the commands that messages name."""

import pytest

from precompute.rerun.request import BuildRequest


@pytest.mark.parametrize("typed", [["--cache", "r1"], ["--cache=r1"], ["--extend"], []])
def test_a_command_that_is_named_has_no_option_twice(typed):
    request = BuildRequest(command=("precompute", "plan", *typed, "--run.workers", "2"))
    kept = " --extend" if "--extend" in typed else ""
    assert request.with_options("--cache", "NEW") == f"precompute plan{kept} --run.workers 2 --cache NEW"
    assert request.with_options("--extend").count("--extend") == 1
