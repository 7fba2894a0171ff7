"""`detrun fetch`: brings an experiment's verdict and report from the machine that it ran on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from detrun.cli.common import IdArgument
from detrun.cli.remote import Output, make_login
from detrun.cli.ssh_options import HostOption, PasswordOption, ProgramOption, SshOption


def fetch(
    experiment: IdArgument = "@latest",
    host: HostOption = None,
    ssh: SshOption = None,
    program: ProgramOption = None,
    ask_password: PasswordOption = False,
    archive: Annotated[
        str | None,
        typer.Option("--archive", help="The archive there.", metavar="DIR", show_default="as remembered"),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> int:
    """Brings verdict.json, experiment.json, report.html and junit.xml into `remote/HOST/ID` of the archive here.

    Without --host it is the machine that the experiment was started on from here.

    Exit code 0: they are here. 2: there is no such experiment. 4: the machine cannot be reached or refuses.
    """
    from detrun.experiments.remote import bring
    from detrun.experiments.remote.connection import Remote
    from detrun.experiments.remote.files import Landing, Place, find_place, place_of
    from detrun.records.archive import Archive

    here, screen = Archive.find(), Output()
    if host is None:
        place: Place | None = place_of(here, experiment)
        assert place is not None
        host, ssh, program = place.host, ssh or place.way, program or place.program
    else:
        place = None if experiment == "@latest" else find_place(here, experiment, host)
    id, there = (place.id, place.archive) if place else (experiment, "")
    login = make_login(host, ssh, program, ask_password)
    landing = Landing(here, str(login.address))
    wanted = {"ids": [id], "archive_option": archive or there or None}
    with Remote(login, screen) as remote:
        ids = bring(remote, wanted, landing, screen)
    for found in ids:
        screen.out(f"{landing.folder / found}\n")
    reports: list[Path] = [page for page in landing.pages if page.name == "report.html"]
    if open_page and reports:
        typer.launch(reports[-1].as_uri())
    return 0
