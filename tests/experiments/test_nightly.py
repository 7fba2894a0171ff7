"""A night's logic, with experiments that are made instead of run: what is run, what is not run again, what is said."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from detrun.errors import SkippedError, SubmissionError, UsageError
from detrun.experiments import nightly
from detrun.experiments.nightly import NightResult, checks, localize, run_nightly
from detrun.experiments.nightly.run import LockLost, NightlyOptions
from detrun.records.archive import Archive
from detrun.records.jobs import ExperimentFile, Reference
from detrun.records.layout import ExperimentFolder
from detrun.records.lock import Lock
from detrun.records.nights import Item, Night, night_file, nights_dir, read_night
from detrun.records.verdict import FirstDivergence, Verdict
from tests.records_factory import MadeExperiment, flip_metric, make_experiment
from tests.running import write_recipe

CHECKPOINT: dict[str, Any] = {
    "checkpoint": {
        "directory": "{out}/checkpoints",
        "pattern": "step-{step}",
        "save_every": 2,
        "save_args": ["--save-every", "{save_every}"],
        "resume_args": ["--resume", "{checkpoint}"],
    },
    "interrupt": {"kind": "kill", "at_step": 3},
}


class World:
    """An archive and recipes. ends: what comes of a start, by `recipe kind`; of any other, identical. starts: what was
    started, in turn. after_start: called once an experiment is there, before the night notes it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.archive = Archive(tmp_path / "archive")
        self.recipes = tmp_path / "recipes"
        self.recipes.mkdir()
        self.ends: dict[str, Any] = {}
        self.starts: list[str] = []
        self.said: list[str] = []
        self.after_start: Callable[[str], None] = lambda _: None
        monkeypatch.setattr(checks, "start_pair", self._start("pair"))
        monkeypatch.setattr(checks, "start_resume", self._start("resume-check"))
        monkeypatch.setattr(localize, "run_localize", self._localize)
        monkeypatch.setattr(checks, "never_submitted", lambda _: False)
        monkeypatch.setattr(checks, "no_job_written", lambda _: False)
        monkeypatch.setattr(nightly, "slurm_answers", lambda: False)

    def recipe(self, name: str, **keys: Any) -> Path:
        return write_recipe(self.recipes, name, **keys)

    def night(self, name: str | None = "n1", *given: Path, **options: Any) -> NightResult:
        more = {key: options.pop(key) for key in ("wait", "notifier", "look") if key in options}
        chosen = NightlyOptions(**options)
        paths = given or (self.recipes,)
        return run_nightly(
            paths, self.archive, chosen, ["detrun"], self.said.append, name=name, **{"look": 0.01, **more}
        )

    def _start(self, kind: str) -> Any:
        def start(loaded: Any, archive: Archive, _cluster: Any, options: Any, *_more: Any) -> ExperimentFolder:
            what = f"{loaded.recipe.name} {kind}"
            end = self.ends.get(what)
            if isinstance(end, Exception):
                raise end
            self.starts.append(what)
            made = make_experiment(archive.root, name=loaded.recipe.name, steps=3)
            made.edit_experiment(labels=dict(options.labels), recipe_path=str(loaded.path.absolute()))
            if end == "diverged":
                made.edit("b", 0, 2, flip_metric("loss"))
            if end == "cut":
                made.drop("b", 0, 3)
            if end == "lost":
                made.drop("b", 0, 3)
                made.edit_job("b", state="lost", reason="nobody knows")
            if kind == "resume-check":
                made.edit_experiment(experiment="pair")  # it is judged as one; its folder says what it is
                verdict = Verdict(
                    id=made.folder.id, experiment="pair", recipe=loaded.recipe.name, verdict="identical", exit_code=0
                )
                verdict.write(made.folder.verdict_file)
                made.edit_experiment(experiment="resume-check")
            self.after_start(what)
            return made.folder

        return start

    def _localize(self, target: ExperimentFolder, archive: Archive, *_more: Any) -> tuple[ExperimentFolder, Verdict]:
        asked = ExperimentFile.read(target.experiment_file)
        options = _more[1]
        if asked.experiment == "localize":  # one that was begun is taken up
            made = MadeExperiment(target, asked)
        else:
            self.starts.append(f"{asked.recipe_name} localize")
            made = make_experiment(archive.root, name=asked.recipe_name)
            reference = Reference(experiment=target.id, path=str(target.path), arm="a")
            made.edit_experiment(experiment="localize", labels=dict(options.labels), reference=reference.model_dump())
            self.after_start(f"{asked.recipe_name} localize")
        first = FirstDivergence(step=2, boundary="end", stream="loss", ranks=[0], arms=["a", "b"])
        culprit = {"kind": "op", "name": "aten.index_put_", "role": "origin"}
        verdict = Verdict(
            id=made.folder.id,
            experiment="localize",
            recipe=asked.recipe_name,
            verdict="diverged",
            exit_code=1,
            first_divergence=first,
            culprit=culprit,
        )
        return made.folder, verdict


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield World(tmp_path, monkeypatch)


def outcome(result: NightResult) -> dict[str, tuple[str, str | None, int | None]]:
    return {f"{item.recipe} {item.kind}": (item.state, item.verdict, item.exit_code) for item in result.items}


def test_a_recipe_is_asked_in_turn_and_what_diverged_is_localized(world: World) -> None:
    world.recipe("good", **CHECKPOINT)
    world.recipe("moe", **CHECKPOINT)
    world.recipe("plain")
    world.ends["moe pair"] = "diverged"
    result = world.night(localize_budget=100.0)
    assert world.starts == ["good pair", "good resume-check", "moe pair", "plain pair", "moe localize"]
    assert outcome(result) == {
        "good pair": ("done", "identical", 0),
        "good resume-check": ("done", "identical", 0),
        "moe pair": ("done", "diverged", 1),
        "moe resume-check": ("left-out", None, 3),
        "moe localize": ("done", "diverged", 1),
        "plain pair": ("done", "identical", 0),
    }
    assert result.exit_code == 1 and result.news
    assert result.summary.startswith("DIVERGED  night n1: 3 recipes: 1 diverged (moe: pair at step 2, ORIGIN")
    labels = ExperimentFile.read(world.archive.root / str(result.items[0].experiment) / "experiment.json").labels
    assert labels == {"night": "n1"}
    assert (world.archive.root / "history.html").exists() and (world.archive.root / "index.html").exists()


def test_a_finished_night_is_told_again_and_nothing_is_run(world: World) -> None:
    world.recipe("a")
    world.recipe("b")
    world.ends["b pair"] = "diverged"
    first = world.night()
    started = list(world.starts)
    again = world.night()
    assert world.starts == started
    assert (again.summary, again.exit_code) == (first.summary, first.exit_code)
    assert not (nights_dir(world.archive) / "lock").exists()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("diverged", 1),
        ("cut", 3),
        ("lost", 4),
        (SubmissionError("sbatch: invalid partition"), 4),
        (ZeroDivisionError(), 70),
    ],
)
def test_one_recipes_trouble_is_its_own(world: World, end: Any, code: int) -> None:
    world.recipe("a")
    world.recipe("b")
    world.recipe("c")
    world.ends["b pair"] = end
    result = world.night(localize_budget=0.0)
    assert outcome(result)["b pair"][2] == code and result.exit_code == code
    assert outcome(result)["c pair"] == ("done", "identical", 0)


def test_a_recipe_that_cannot_be_read_or_is_not_there(world: World) -> None:
    world.recipe("a")
    (world.recipes / "typo.yaml").write_text("launch: {comand: [x]}\n")
    result = world.night("n1", world.recipes, world.recipes / "gone.yaml")
    assert outcome(result)["typo pair"] == ("error", None, 2)
    assert outcome(result)["gone pair"] == ("error", None, 2)
    assert outcome(result)["a pair"] == ("done", "identical", 0)
    assert result.exit_code == 2
    xml = (nights_dir(world.archive) / "n1" / "junit.xml").read_text()
    assert 'errors="2"' in xml and 'failures="0"' in xml


def test_the_worst_is_a_divergence_then_what_hid_others(world: World) -> None:
    for name in "abc":
        world.recipe(name)
    world.ends.update({"a pair": "cut", "b pair": "lost", "c pair": "diverged"})
    assert world.night(localize_budget=0.0).exit_code == 1
    world.ends["c pair"] = None
    assert world.night("n2").exit_code == 4


def test_what_the_budget_does_not_hold_is_said(world: World) -> None:
    for name in "ab":
        world.recipe(name)
        world.ends[f"{name} pair"] = "diverged"
    # Two arms of half a minute on two nodes; a localization is reckoned as two passes of twice that.
    result = world.night(localize_budget=0.15)
    assert [start for start in world.starts if "localize" in start] == ["a localize"]
    left = next(item for item in result.items if item.kind == "localize" and item.state == "left-out")
    assert left.recipe == "b" and left.what is not None
    assert "would take about 0.13 node-hours" in left.what and f"detrun localize {left.of}" in left.what


def test_only_some_kinds(world: World) -> None:
    world.recipe("a", **CHECKPOINT)
    world.night("n1", only=("resume-check",))
    assert world.starts == ["a resume-check"]
    world.night("n1")
    assert world.starts == ["a resume-check", "a pair"]


def test_a_recipe_that_is_added_later_is_all_that_is_run(world: World) -> None:
    a, b = world.recipe("a"), world.recipe("b")
    world.night("n1", a)
    result = world.night("n1", b)
    assert world.starts == ["a pair", "b pair"]
    assert [item.recipe for item in result.items] == ["b"]
    assert [item.recipe for item in read_night(world.archive, "n1").items] == ["a", "b"]  # type: ignore[union-attr]


@pytest.mark.parametrize("when", ["a pair", "b pair"])
def test_killed_before_an_experiment_is_noted_it_is_found_by_its_label(world: World, when: str) -> None:
    world.recipe("a")
    world.recipe("b")

    def die(what: str) -> None:
        if what == when:
            raise KeyboardInterrupt

    world.after_start = die
    with pytest.raises(KeyboardInterrupt):
        world.night()
    world.after_start = lambda _: None
    result = world.night()
    assert sorted(world.starts) == ["a pair", "b pair"]
    assert result.exit_code == 0 and len(world.archive.list()) == 2


def test_killed_while_it_localizes_that_goes_on(world: World) -> None:
    world.recipe("a")
    world.ends["a pair"] = "diverged"

    def die(what: str) -> None:
        if what == "a localize":
            raise KeyboardInterrupt

    world.after_start = die
    with pytest.raises(KeyboardInterrupt):
        world.night(localize_budget=100.0)
    # Begun is begun: the budget is not asked again.
    result = world.night(localize_budget=0.0)
    assert world.starts == ["a pair", "a localize"]
    assert outcome(result)["a localize"] == ("done", "diverged", 1)


def test_killed_between_verdict_and_note_nothing_is_judged_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.recipe("a")
    world.night()
    night = read_night(world.archive, "n1")
    assert night is not None
    night.items[0].state, night.items[0].verdict, night.told, night.finished = "running", None, [], None
    night.write(night_file(world.archive, "n1"))
    monkeypatch.setattr(checks, "judge", lambda _: pytest.fail("judged again"))
    assert outcome(world.night())["a pair"] == ("done", "identical", 0)
    assert world.starts == ["a pair"]


def test_an_experiment_none_of_whose_jobs_went_in_is_begun_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.recipe("a")
    world.after_start = lambda _: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        world.night()
    world.after_start = lambda _: None
    seen: list[str] = []
    monkeypatch.setattr(checks, "no_job_written", lambda folder: not seen and not seen.append(folder.id))
    world.night()
    assert world.starts == ["a pair", "a pair"] and len(world.archive.list()) == 1


def test_a_holder_that_lost_its_night_starts_nothing_more(world: World) -> None:
    world.recipe("a")
    world.recipe("b")
    lock = nights_dir(world.archive) / "lock"
    world.after_start = lambda _: lock.write_text(json.dumps({"token": "another", "host": "node2"}))
    with pytest.raises(LockLost, match="taken over"):
        world.night()
    assert world.starts == ["a pair"]


def test_another_night_is_not_disturbed(world: World) -> None:
    world.recipe("a")
    with Lock(nights_dir(world.archive) / "lock", {"night": "other"}) as lock:
        assert lock.acquire() is None
        with pytest.raises(SkippedError, match="night other is being run by process"):
            world.night()
        assert lock.held()


def test_the_same_night_is_followed_and_taken_over(world: World) -> None:
    world.recipe("a")
    lock = Lock(nights_dir(world.archive) / "lock", {"night": "n1"})
    assert lock.acquire() is None
    with pytest.raises(SkippedError, match="being run already"):
        world.night(wait=False)
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    result = world.night()
    timer.join()
    assert result.exit_code == 0 and world.starts == ["a pair"]
    assert any("it is followed" in line for line in world.said)


def test_two_at_once_run_once_and_say_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        world.recipe(name)
    world.after_start = lambda _: time.sleep(0.1)
    results: list[NightResult] = []
    threads = [threading.Thread(target=lambda: results.append(world.night())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(world.starts) == ["a pair", "b pair", "c pair"]
    assert len({(result.summary, result.exit_code) for result in results}) == 1 and len(results) == 3


def test_an_unfinished_night_of_the_same_recipes_is_taken_up(world: World) -> None:
    path = world.recipe("a")

    def leave(name: str, hours: float, wanted: Path) -> None:
        created = datetime.now(timezone.utc) - timedelta(hours=hours)
        night = Night(night=name, created=created.isoformat(), wanted={str(wanted): ["pair", "resume-check"]})
        night.items = [Item(recipe="a", path=str(wanted), kind="pair")]
        night.write(night_file(world.archive, name))

    leave("young", 3, path)
    assert world.night(None).night.night == "young"
    leave("old", 21, path)
    leave("others", 1, world.recipes / "b.yaml")
    assert world.night(None).night.night == f"{datetime.now(timezone.utc).astimezone():%Y-%m-%d}"


def test_news_is_what_differs_from_the_night_before(world: World) -> None:
    world.recipe("a")
    world.recipe("b")
    assert world.night("n1").news
    assert not world.night("n2").news
    world.ends["b pair"] = "diverged"
    assert world.night("n3", localize_budget=0.0).news
    assert not world.night("n4", localize_budget=0.0).news
    assert not world.night("n4", localize_budget=0.0).news
    world.ends["b pair"] = None
    assert world.night("n5").news


class Told:
    """A notifier that notes."""

    def __init__(self) -> None:
        self.changes: list[list[str]] = []

    def tell(self, _record: Path, message: Any) -> list[str]:
        self.changes.append(message.changes)
        return ["notification 1 of 1 (json) was not sent: the service did not take it"]


def test_whom_it_concerns_is_told_once_a_night(world: World) -> None:
    world.recipe("a")
    told: Any = Told()
    world.night("n1", notifier=told)
    world.night("n1", notifier=told)
    world.ends["a pair"] = "diverged"
    result = world.night("n2", notifier=told, localize_budget=0.0)
    assert [len(changes) for changes in told.changes] == [0, 1]
    assert told.changes[1][0].startswith("a: diverged, was identical the night before: pair: at step 2")
    assert result.exit_code == 1 and any(line.startswith("warning: notification 1") for line in world.said)


def test_killed_before_telling_the_next_call_tells(world: World) -> None:
    world.recipe("a")

    class Dies:
        def tell(self, *_arguments: object) -> list[str]:
            raise KeyboardInterrupt

    dies: Any = Dies()
    with pytest.raises(KeyboardInterrupt):
        world.night("n1", notifier=dies)
    told: Any = Told()
    world.night("n1", notifier=told)
    assert len(told.changes) == 1 and world.starts == ["a pair"]


def test_a_folder_without_recipes_and_impossible_names(world: World) -> None:
    with pytest.raises(UsageError, match="holds no recipe"):
        world.night()
    world.recipe("a")
    with pytest.raises(UsageError, match="cannot be a night's name"):
        world.night("../x")
    with pytest.raises(UsageError):
        world.night("n1", against="no-such-experiment")


def test_a_night_is_held_against_the_last_good_one(world: World) -> None:
    world.recipe("a")
    first = world.night("n1", against="last-good")
    assert outcome(first)["a against"][:2] == ("done", "not-verified")  # nothing is known to be good yet
    second = world.night("n2", against="last-good")
    assert outcome(second)["a against"] == ("done", "identical", 0), second.items
    item = next(item for item in second.items if item.kind == "against")
    assert item.of == second.items[0].experiment


def test_an_experiment_is_what_its_own_recipe_alone_is_held_against(world: World) -> None:
    world.recipe("a")
    world.recipe("b")
    first = world.night("n1")
    result = world.night("n2", against=first.items[0].experiment)
    assert {name: end[:2] for name, end in outcome(result).items()} == {
        "a pair": ("done", "identical"),
        "a against": ("done", "identical"),
        "b pair": ("done", "identical"),
    }


def test_an_archive_that_cannot_be_written_is_no_traceback(world: World) -> None:
    world.recipe("a")
    shutil.rmtree(world.archive.root, ignore_errors=True)
    world.archive.root.parent.mkdir(exist_ok=True)
    world.archive.root.write_text("a file")
    from detrun.errors import ArchiveError

    with pytest.raises(ArchiveError):
        world.night()
