from pathlib import Path

from detrun.experiments.compare_live import LiveComparison
from detrun.records.layout import ExperimentFolder


def write(folder: ExperimentFolder, arm: str, text: str) -> None:
    path = folder.attempt(arm, 0).metrics(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def line(step: int, bits: str = "0x00") -> str:
    return f'{{"v":1,"step":{step},"metrics":{{"loss":"{bits}"}}}}\n'


def test_equal_steps_are_counted_as_they_come(tmp_path: Path) -> None:
    folder = ExperimentFolder(tmp_path)
    live = LiveComparison(folder, ["a", "b"], 1)
    live.look()
    assert live.agreed == 0
    write(folder, "a", line(1) + line(2) + line(3))
    live.look()
    assert live.agreed == 0
    write(folder, "b", line(1) + line(2) + line(3)[:20])
    live.look()
    assert live.agreed == 1
    write(folder, "b", line(3)[20:])
    live.look()
    assert live.agreed == 2
    live.look(ended=True)
    assert live.agreed == 3
    assert live.first_difference is None


def test_the_first_difference_is_named_and_stays(tmp_path: Path) -> None:
    folder = ExperimentFolder(tmp_path)
    live = LiveComparison(folder, ["a", "b"], 1)
    write(folder, "a", line(1) + line(2) + line(3))
    write(folder, "b", line(1) + line(2, "0x01") + line(3))
    live.look(ended=True)
    assert (live.agreed, live.first_difference) == (1, 2)
    live.look(ended=True)
    assert live.first_difference == 2


def test_a_supplement_that_one_arm_lacks_is_a_difference(tmp_path: Path) -> None:
    folder = ExperimentFolder(tmp_path)
    live = LiveComparison(folder, ["a", "b"], 1)
    write(folder, "a", line(1) + line(1, "0x02") + line(2))
    write(folder, "b", line(1) + line(2))
    live.look(ended=True)
    assert live.first_difference == 1
