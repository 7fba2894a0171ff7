"""A run held against an earlier night's: what may have changed is listed, what was asked must be the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detrun.errors import RecordError, UnknownExperimentError, UsageError
from detrun.experiments.against import check_baseline, hold_against, last_good
from detrun.experiments.judge import judge
from detrun.records.archive import Archive
from detrun.records.index import read_index
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import ExperimentFolder
from detrun.records.verdict import Verdict
from tests.history_factory import Nights
from tests.records_factory import Line, MadeExperiment, flip_metric, flip_state, make_experiment


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def pair(
    archive: Archive,
    day: int,
    *,
    packages: dict[str, str] | None = None,
    change: Callable[[Line], None] | None = None,
    spoil: Callable[[MadeExperiment], None] | None = None,
    **fields: Any,
) -> ExperimentFolder:
    """A night's pair, judged. change: of step 4, in both arms alike."""
    made = make_experiment(archive.root, id=f"hybrid-cpu-pair-202611{day:02}T023000-{day:04x}", **fields)
    made.edit_experiment(created=f"2026-11-{day:02}T02:30:00+00:00", labels={"night": f"2026-11-{day:02}"})
    for arm in "ab":
        for rank in range(made.file.ranks):
            if packages:
                made.edit_environment(arm, rank, lambda document: document["packages"].update(packages))
            if change:
                made.edit(arm, rank, 4, change)
    if spoil:
        spoil(made)
    judge(made.folder)
    return made.folder


def file_of(archive: Archive, verdict: Verdict) -> ExperimentFile:
    return ExperimentFile.read(archive.root / verdict.id / "experiment.json")


def test_a_silent_change_of_numbers_is_seen(archive: Archive) -> None:
    first = pair(archive, 24)
    second = pair(archive, 25, packages={"numpy": "2.5.0"}, change=flip_metric("grad_norm"))
    assert Verdict.read(second.verdict_file).verdict == "identical"  # it agrees with itself
    verdict = hold_against(archive, second)
    assert (verdict.verdict, verdict.exit_code, verdict.experiment) == ("diverged", 1, "against")
    assert verdict.first_divergence is not None
    assert (verdict.first_divergence.step, list(verdict.first_divergence.metrics)) == (4, ["grad_norm"])
    assert verdict.first_divergence.arms == ["a", "b"]
    changed = [(each.where["setting"], each.evidence["a"], each.evidence["b"]) for each in verdict.of_kind("changed")]
    assert changed == [("numpy", "2.4.6", "2.5.0")]
    assert verdict.environment is not None
    assert verdict.environment.packages == {"torch": "2.13.0", "numpy": "2.5.0"}  # tonight's
    folder = archive.resolve(verdict.id)
    assert json.loads(folder.verdict_file.read_text())["reference"] == {"experiment": first.id, "arm": "a"}
    assert folder.report_file.exists()
    assert file_of(archive, verdict).labels["night"] == "2026-11-25"
    entry = read_index(archive)[-1]
    assert (entry.experiment, entry.night, entry.baseline, entry.candidate) == (
        *("against", "2026-11-25", first.id),
        second.id,
    )


def test_a_change_that_touches_no_number_is_identical_and_told(archive: Archive) -> None:
    pair(archive, 24)
    second = pair(archive, 25, packages={"numpy": "2.5.0"}, nodes=("node8", "node9"))
    verdict = hold_against(archive, second)
    assert (verdict.verdict, verdict.exit_code) == ("identical", 0)
    assert [each.where["setting"] for each in verdict.of_kind("changed")] == ["numpy", "nodes"]
    assert "divergence_chance_bound" not in verdict.figures
    assert judge(archive.root / verdict.id).verdict == "identical"


def test_digests_are_held_against_each_other_too(archive: Archive) -> None:
    pair(archive, 24)
    verdict = hold_against(archive, pair(archive, 25, change=flip_state("optimizer")))
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.stream == "optimizer"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": 7}, "seed is not as it was for the baseline: 1234 then, 7 now"),
        ({"pinned": {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}}, "pinned PYTHONHASHSEED is not as it was"),
        ({"determinism": "none"}, "determinism is not as it was for the baseline: strict then, none now"),
        ({"recipe": {"slurm": {"setup": ["module load x"], "time": "9"}}}, "slurm.setup is not as it was"),
        ({"recipe": {"launch": {"args": ["--lr", "2"]}}}, "launch.args is not as it was"),
    ],
)
def test_other_settings_are_no_divergence(archive: Archive, change: dict[str, Any], reason: str) -> None:
    pair(archive, 24)

    def asked_otherwise(made: MadeExperiment) -> None:
        recipe = {**made.file.recipe, **change.get("recipe", {})}
        made.edit_experiment(**{**change, "recipe": recipe})

    verdict = hold_against(archive, pair(archive, 25, change=flip_metric("loss"), spoil=asked_otherwise))
    assert (verdict.verdict, verdict.exit_code, verdict.first_divergence) == ("not-verified", 3, None)
    assert any(text.startswith(reason) for text in verdict.not_verified)


def test_where_it_runs_is_no_setting(archive: Archive) -> None:
    def with_slurm(partition: str) -> Callable[[MadeExperiment], None]:
        slurm = {"partition": partition, "container": {"image": partition}, "setup": []}
        return lambda made: made.edit_experiment(recipe={**made.file.recipe, "slurm": slurm})

    pair(archive, 24, spoil=with_slurm("small"))
    verdict = hold_against(archive, pair(archive, 25, spoil=with_slurm("large")))
    assert verdict.verdict == "identical"
    assert [each.what for each in verdict.of_kind("changed")] == ["container: small then, large now"]


def test_a_variable_that_differs_forbids_identical(archive: Archive) -> None:
    pair(archive, 24)

    def tuned(made: MadeExperiment) -> None:
        for arm in "ab":
            for rank in range(2):
                made.edit_environment(arm, rank, lambda document: document["env"]["clear"].update(NCCL_ALGO="Ring"))

    verdict = hold_against(archive, pair(archive, 25, spoil=tuned))
    assert verdict.verdict == "not-verified"
    assert any("NCCL_ALGO differs" in text for text in verdict.not_verified)


def test_without_a_good_night_nothing_is_verified(archive: Archive) -> None:
    only = pair(archive, 24)
    verdict = hold_against(archive, only)
    assert (verdict.verdict, verdict.exit_code) == ("not-verified", 3)
    assert verdict.not_verified == ["there is no earlier night of hybrid-cpu that is known to be good"]
    assert judge(archive.root / verdict.id).not_verified == verdict.not_verified
    # That it could not be held against anything is no divergence: the next night has a baseline.
    assert hold_against(archive, pair(archive, 25)).verdict == "identical"


def test_missing_records_are_told_by_the_arm_that_lacks_them(archive: Archive) -> None:
    pair(archive, 24)
    verdict = hold_against(archive, pair(archive, 25, spoil=lambda made: made.drop("a", 1, 5, 6)))
    assert verdict.verdict == "not-verified"
    assert any("arm b, rank 1" in text for text in verdict.not_verified)
    assert not any("arm a, rank" in text for text in verdict.not_verified)


def test_last_good_is_never_from_a_night_that_diverged(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    good = nights.add("2026-11-24", "hybrid-cpu", "identical")
    nights.add("2026-11-25", "hybrid-cpu", "identical")
    nights.add("2026-11-25", "hybrid-cpu", "diverged", kind="resume-check")
    changed = nights.add("2026-11-26", "hybrid-cpu", "identical")
    about = {"reference": {"experiment": good, "arm": "a"}, "candidate": {"experiment": changed, "arm": "a"}}
    nights.add("2026-11-26", "hybrid-cpu", "diverged", kind="against", extra=about)
    nights.add("2026-11-26", "hybrid-cpu", "identical")  # the retry has the same new numbers
    nights.add("2026-11-26", "other", "identical")
    tonight = nights.add("2026-11-27", "hybrid-cpu", "identical")
    entries = read_index(nights.archive)
    assert [entry.id for entry in last_good(entries, tonight, "hybrid-cpu")] == [good]
    # Tonight's pair repeats itself, which says nothing of the change: only once it was held and found the same.
    assert [entry.id for entry in last_good(entries, None, "hybrid-cpu")] == [good]
    about = {"reference": {"experiment": changed, "arm": "a"}, "candidate": {"experiment": tonight, "arm": "a"}}
    nights.add("2026-11-27", "hybrid-cpu", "identical", kind="against", extra=about)
    entries = read_index(nights.archive)
    assert [entry.id for entry in last_good(entries, None, "hybrid-cpu")] == [tonight, good]
    assert last_good(entries, good, "hybrid-cpu") == []


def test_last_good_is_one_that_was_asked_in_the_same_way_if_there_is_one(archive: Archive) -> None:
    first = pair(archive, 24)
    pair(archive, 25, steps=5)
    verdict = hold_against(archive, pair(archive, 26))
    assert verdict.verdict == "identical"
    assert file_of(archive, verdict).reference.experiment == first.id  # type: ignore[union-attr]


def test_on_one_day_a_change_can_be_tried_again(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    first = nights.add("2026-11-24", "hybrid-cpu", "identical")
    second = nights.add("2026-11-24", "hybrid-cpu", "identical")
    about = {"reference": {"experiment": first, "arm": "a"}, "candidate": {"experiment": second, "arm": "a"}}
    nights.add("2026-11-24", "hybrid-cpu", "diverged", kind="against", extra=about)
    third = nights.add("2026-11-24", "hybrid-cpu", "identical")
    assert [entry.id for entry in last_good(read_index(nights.archive), third, "hybrid-cpu")] == [first]


def test_a_baseline_can_be_named(archive: Archive) -> None:
    first = pair(archive, 24, change=flip_metric("loss"))
    pair(archive, 25)
    third = pair(archive, 26)
    assert hold_against(archive, third).verdict == "identical"
    named = hold_against(archive, third, first.id)
    assert named.verdict == "diverged"
    for wrong, why in ((third.id, "against itself"), (named.id, "is a against")):
        with pytest.raises(UsageError, match=why):
            hold_against(archive, third, wrong)
    with pytest.raises(UnknownExperimentError):
        check_baseline(archive, "no-such-one")
    check_baseline(archive, first.id)
    check_baseline(archive, "last-good")
    (archive.root / "gone").mkdir()
    with pytest.raises(RecordError):
        hold_against(archive, ExperimentFolder(archive.root / "gone"))


def test_an_archive_that_was_moved_is_judged_as_before(archive: Archive, tmp_path: Path) -> None:
    pair(archive, 24)
    verdict = hold_against(archive, pair(archive, 25, change=flip_metric("loss")))
    shutil.move(archive.root, tmp_path / "moved")
    again = judge(tmp_path / "moved" / verdict.id)
    assert again.model_dump() == verdict.model_dump()


def test_a_baseline_that_was_exchanged_is_not_compared(archive: Archive) -> None:
    first = pair(archive, 24)
    verdict = hold_against(archive, pair(archive, 25))
    other = ExperimentFile.read(first.experiment_file).model_copy(update={"id": "another"})
    other.write(first.experiment_file)
    assert judge(archive.root / verdict.id, write=False).not_verified == [
        f"arm a is that of another, not of {first.id}"
    ]
    first.experiment_file.unlink()
    (text,) = judge(archive.root / verdict.id, write=False).not_verified
    assert "cannot be read: its experiment.json is missing" in text
