"""Each problem of a run is reported once, when its figures show it."""

import math

from trainer.insight.health import PLATEAU_STEPS, WINDOW, Watch

WELL = {"samples_per_s": 20.0, "data_wait_share": 0.01, "peak_memory_bytes": 10}


def alerts(*steps: dict[str, float], memory: int | None = None) -> list[tuple[int, str]]:
    """Return the step and the first word of each alert."""
    watch = Watch(memory)
    return [(number, alert.split(" ")[0]) for number, step in enumerate(steps, 1) for alert in watch({**WELL, **step})]


def test_a_run_without_problems_has_no_alerts():
    steps = [{"loss": 5 * 0.99**step + 0.2 * (step % 3)} for step in range(2 * PLATEAU_STEPS // 2)]
    assert alerts(*steps) == []


def test_a_skipped_step_is_no_spike_and_hides_none():
    falling = [{"loss": 4 - step / 100, "grad_norm": 1.0} for step in range(WINDOW)]
    skipped = {"loss": math.nan, "grad_norm": math.inf}
    assert alerts(*falling, skipped, {"loss": 3.4, "grad_norm": 1.0}, {"loss": 9.0, "grad_norm": 1.0}) == [
        (WINDOW + 3, "loss")
    ]


def test_each_problem_is_reported_once_at_its_first_step():
    falling = [{"loss": 4 - step / 100} for step in range(WINDOW)]
    assert alerts(*falling[:11], {"loss": 9.0}) == [(12, "loss")]
    assert alerts(*[{"grad_norm": 1.0}] * 20, *[{"grad_norm": 1e6}] * 100) == [(21, "gradient")]
    assert alerts(*falling, {"loss": 9.0}, {"loss": 3.4}, {"loss": 9.0}) == [(WINDOW + 1, "loss")]
    assert alerts(*[{"loss": 2.0}] * (PLATEAU_STEPS + 9)) == [(PLATEAU_STEPS, "plateau:")]
    slow = [{**step, "samples_per_s": 10.0} for step in falling]
    assert alerts(*falling, *slow) == [(WINDOW + WINDOW // 2 + 1, "throughput")]
    assert alerts(*[{"data_wait_share": 0.06}] * (WINDOW + 9)) == [(WINDOW, "steps")]
    assert alerts({"peak_memory_bytes": 95}, {"peak_memory_bytes": 96}, {"peak_memory_bytes": 97}, memory=100) == [
        (2, "memory:")
    ]
