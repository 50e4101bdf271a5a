"""What is wrong with a run is said once, when its figures show it."""

from trainer.insight.health import PLATEAU_STEPS, WINDOW, Watch

WELL = {"samples_per_s": 20.0, "data_wait_share": 0.01, "peak_memory_bytes": 10}


def said(*steps: dict[str, float], memory: int | None = None) -> list[tuple[int, str]]:
    """Each alert's first word, and the step that it came at."""
    watch = Watch(memory)
    return [(number, alert.split(" ")[0]) for number, step in enumerate(steps, 1) for alert in watch({**WELL, **step})]


def test_a_run_that_is_well_is_left_alone():
    steps = [{"loss": 5 * 0.99**step + 0.2 * (step % 3)} for step in range(2 * PLATEAU_STEPS // 2)]
    assert said(*steps) == []


def test_each_trouble_is_said_once_when_it_comes():
    falling = [{"loss": 4 - step / 100} for step in range(WINDOW)]
    assert said(*falling, {"loss": 9.0}, {"loss": 3.4}, {"loss": 9.0}) == [(WINDOW + 1, "loss")]
    assert said(*[{"loss": 2.0}] * (PLATEAU_STEPS + 9)) == [(PLATEAU_STEPS, "plateau:")]
    slow = [{**step, "samples_per_s": 10.0} for step in falling]
    assert said(*falling, *slow) == [(WINDOW + WINDOW // 2 + 1, "throughput")]
    assert said(*[{"data_wait_share": 0.06}] * (WINDOW + 9)) == [(WINDOW, "steps")]
    assert said({"peak_memory_bytes": 95}, {"peak_memory_bytes": 96}, {"peak_memory_bytes": 97}, memory=100) == [
        (2, "memory:")
    ]
