"""`detrun localize`: from "diverged at step 412" to the operation that made the difference, and its bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from detrun.cli.common import (
    ArchiveOption,
    ArmOption,
    JsonOption,
    SetOption,
    StandaloneOption,
    archive_option,
    choose_cluster,
    cluster_of,
    list_on_page,
    open_archive,
    print_verdict,
    say,
    to_find,
)
from detrun.cli.windows import (
    BytesOption,
    RanksOption,
    ScopesOption,
    StepsOption,
    parse_bytes,
    parse_ranks,
    parse_steps,
)
from detrun.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from detrun.experiments.localize import LocalizeOptions
    from detrun.launch.cluster import Cluster
    from detrun.recipe import LoadedRecipe
    from detrun.records.archive import Archive
    from detrun.records.layout import ExperimentFolder
    from detrun.records.verdict import Verdict


def localize(
    target: Annotated[
        str,
        typer.Argument(
            help="A recipe, or the id of an experiment that diverged.", metavar="RECIPE_OR_ID", show_default="@latest"
        ),
    ] = "@latest",
    overrides: SetOption = None,
    arms: ArmOption = None,
    archive: ArchiveOption = None,
    steps: StepsOption = None,
    level: Annotated[
        int | None,
        typer.Option(
            "--level",
            min=2,
            max=4,
            help="Look at this level alone: 2 collectives, 3 modules, 4 operators.",
            show_default=False,
        ),
    ] = None,
    ranks: RanksOption = None,
    scopes: ScopesOption = None,
    byte_budget: BytesOption = "4GiB",
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, max=700, metavar="K", help="How often to try where the fault stays away.")
    ] = 3,
    no_bytes: Annotated[
        bool, typer.Option("--no-bytes", help="Name the operation; leave out the pass that keeps its tensors.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the first pass would submit; submit nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Submit even above limits.node_hours.")] = False,
    standalone: StandaloneOption = False,
    as_json: JsonOption = False,
) -> int:
    """Runs two arms again with tracing and names the first operation whose inputs agree and whose output does not.

    A recipe is run as a pair first. The id of a localization that was interrupted takes it up where it stopped.

    Exit code 0: nothing differs. 1: diverged, with the operation. 2: the recipe or the command line is wrong. 3: not
    verified. 4: a job could not be submitted, failed, stalled or was lost. 70: a bug of detrun. 130: interrupted, the
    jobs go on.
    """
    from detrun.experiments.localize import LocalizeOptions

    options = LocalizeOptions(
        steps=parse_steps(steps),
        level=level,
        ranks=parse_ranks(ranks),
        scopes=tuple(scopes) if scopes else None,
        byte_budget=parse_bytes(byte_budget),
        repeat=repeat,
        keep=not no_bytes,
        agreed=yes,
    )
    found, store = _target(target, archive, overrides or [], arms or [])
    if dry_run:
        _print_plan(found, store)
        return 0
    return follow_localize(found, store, _cluster(found), options, as_json=as_json, standalone=standalone)


def follow_localize(
    target: LoadedRecipe | ExperimentFolder,
    store: Archive,
    cluster: Cluster,
    options: LocalizeOptions,
    *,
    as_json: bool = False,
    standalone: bool = False,
) -> int:
    """Localizes, or takes up a localization that was interrupted, and says the last word. The exit code."""
    from detrun.experiments.localize import run_localize
    from detrun.records.layout import ExperimentFolder

    before = {folder.id for folder in store.list()}
    try:
        folder, verdict = run_localize(target, store, cluster, options, ["detrun", *sys.argv[1:]], say)
    except KeyboardInterrupt:
        begun = [folder for folder in store.list() if folder.id not in before]
        begun += [target] if isinstance(target, ExperimentFolder) else []
        if begun:
            say(f"Jobs go on. detrun localize {to_find(begun[0])} takes up here.")
        return ExitCode.INTERRUPTED
    return conclude_localize(folder, as_json, standalone, verdict)


def conclude_localize(folder: ExperimentFolder, as_json: bool, standalone: bool, verdict: Verdict | None = None) -> int:
    """Prints the verdict, that in the folder unless given, with its page made anew. The exit code.

    Raises NotVerifiedError where there is none yet. A page that cannot be written costs no verdict.
    """
    from detrun.errors import ArchiveError, NotVerifiedError, RecordError
    from detrun.experiments.write_verdict import write_page
    from detrun.records.jobs import ExperimentFile
    from detrun.records.verdict import Verdict

    if verdict is None and not folder.verdict_file.exists():
        raise NotVerifiedError(f"{folder.id} has no verdict yet", hint=f"detrun localize {to_find(folder)} takes it up")
    verdict = verdict or Verdict.read(folder.verdict_file)
    experiment = ExperimentFile.read(folder.experiment_file)
    if verdict.experiment != experiment.experiment:
        raise RecordError(f"is no verdict on a {experiment.experiment}", where=str(folder.verdict_file))
    page = f"page: {folder.report_file}"
    try:
        write_page(folder, experiment, verdict, standalone=standalone)
    except ArchiveError as error:
        page = f"warning: {error}"
    print_verdict(verdict, experiment, as_json, archive_option(folder))
    list_on_page(folder)
    say(page)
    return int(verdict.exit_code)


def _target(
    text: str, archive: Path | None, overrides: list[str], arms: list[str]
) -> tuple[LoadedRecipe | ExperimentFolder, Archive]:
    """What is to be localized: an existing file is a recipe, anything else an experiment."""
    if Path(text).is_file() or "/" in text or text.endswith((".yaml", ".yml")):
        from detrun.recipe import load_recipe

        loaded = load_recipe(Path(text), overrides, arms)
        return loaded, open_archive(archive, loaded.archive)
    if overrides or arms:
        raise UsageError(
            "--set and --arm go with a recipe: an experiment is run again as it was",
            hint="detrun localize RECIPE --set …",
        )
    store = open_archive(archive)
    return store.resolve(text), store


def _cluster(target: LoadedRecipe | ExperimentFolder) -> Cluster:
    from detrun.records.jobs import ExperimentFile
    from detrun.records.layout import ExperimentFolder

    if isinstance(target, ExperimentFolder):
        return cluster_of(ExperimentFile.read(target.experiment_file))
    return choose_cluster(target.recipe.cluster)


def _print_plan(target: LoadedRecipe | ExperimentFolder, store: Archive) -> None:
    from detrun.experiments.again import recipe_of
    from detrun.experiments.checks import PairOptions
    from detrun.experiments.dry_run import dry_run_pair
    from detrun.records.jobs import ExperimentFile
    from detrun.records.layout import ExperimentFolder

    if isinstance(target, ExperimentFolder):
        target = recipe_of(target, ExperimentFile.read(target.experiment_file))
    sys.stdout.write(dry_run_pair(target, store, PairOptions()))
    say("every later pass runs these arms again up to the last step of its window, with DETRUN_TRACE set")
