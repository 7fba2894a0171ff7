from detrun.launch.spec import WatchdogLimits
from detrun.launch.watchdog import Watchdog

LIMITS = WatchdogLimits(multiple=10, at_least=5, start=100)


def watched(steps: int = 50) -> Watchdog:
    return Watchdog(LIMITS, steps, started=0.0)


def test_steps_that_keep_coming_are_left_alone() -> None:
    dog = watched()
    assert all(dog.observe(float(step), {0: step, 1: step}) is None for step in range(50))


def test_the_first_step_has_its_own_patience() -> None:
    dog = watched()
    assert dog.observe(99.0, {0: 0, 1: 0}) is None
    # The first look at the ranks counts as a sign of life; from then on nothing comes.
    assert dog.observe(198.0, {0: 0, 1: 0}) is None
    assert dog.observe(200.0, {0: 0, 1: 0}) == "no step was recorded within 101 s"


def test_a_run_without_steps_for_many_times_its_step_time_has_stalled() -> None:
    dog = watched()
    for step in range(1, 11):
        assert dog.observe(2.0 * step, {0: step, 1: step}) is None
    assert dog.observe(39.0, {0: 10, 1: 10}) is None
    said = dog.observe(41.0, {0: 10, 1: 10})
    assert said == "no step for 21 s (a step took 2 s before)"


def test_fast_steps_do_not_make_the_watchdog_jumpy() -> None:
    dog = watched()
    for step in range(1, 11):
        dog.observe(0.01 * step, {0: step})
    assert dog.observe(4.9, {0: 10}) is None
    assert dog.observe(5.2, {0: 10}) is not None


def test_one_rank_moving_is_not_a_stall() -> None:
    dog = watched()
    dog.observe(1.0, {0: 1, 1: 1})
    dog.observe(2.0, {0: 2, 1: 1})
    assert dog.observe(6.5, {0: 3, 1: 1}) is None
    assert dog.observe(11.0, {0: 4, 1: 1}) is None


def test_the_way_out_after_the_last_step_has_the_patience_of_the_start() -> None:
    dog = watched(steps=3)
    for step in range(1, 4):
        dog.observe(float(step), {0: step})
    assert dog.observe(60.0, {0: 3}) is None
    assert dog.observe(104.0, {0: 3}) is not None
