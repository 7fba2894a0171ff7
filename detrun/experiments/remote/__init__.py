"""A detrun command on another machine: connect, upload, start it detached, follow it, bring its verdict back."""

from __future__ import annotations

import codecs
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from detrun.errors import ClusterError, DetrunError, ExitCode, UsageError
from detrun.experiments.remote.connection import Conversation, Remote, Screen
from detrun.experiments.remote.files import Landing
from detrun.launch.preflight import human
from detrun.launch.ssh.client import CutError
from detrun.launch.ssh.far_files import ID
from detrun.launch.ssh.far_runs import new_run
from detrun.launch.ssh.tree import Tree
from detrun.launch.ssh.wire import CHUNK
from detrun.records.files import one_line, printable

_REMEMBERED = 16 * 1024


@dataclass(frozen=True)
class Job:
    """One command to run there. words: the whole of it; paths {index of a word: its path below the tree}.

    about: ids that it is given. stays: it goes on when we leave, since it has started something. nights: it makes some.
    """

    words: tuple[str, ...]
    tree: Tree | None = None
    at: str = "."
    paths: dict[int, str] = field(default_factory=dict)
    about: tuple[str, ...] = ()
    archive_option: str | None = None
    recipe_archive: str | None = None
    columns: int = 80
    stays: bool = False
    brings: bool = False
    nights: bool = False


def run_there(remote: Remote, job: Job, landing: Landing, screen: Screen) -> int:
    """Runs a command there from beginning to end; its exit code. What it made is brought back below `landing`.

    Raises ClusterError, with how to go on, where the connection is lost for good.
    """
    if job.tree is not None:
        upload(remote, job.tree, screen)
    run, watch = new_run(), _Watch(screen)
    request = {
        "run": run,
        "words": list(job.words),
        "paths": {str(index): path for index, path in job.paths.items()},
        "snapshot": job.tree.digest if job.tree else None,
        "at": job.at,
        "archive_option": job.archive_option,
        "recipe_archive": job.recipe_archive,
        "columns": job.columns,
    }
    options = remote.login.options

    def start() -> None:
        with remote.call("start", request) as talk:
            talk.read()

    def follow() -> int:
        with remote.call("follow", {"run": run, **watch.positions}) as talk:
            while True:
                message, data = talk.read()
                if "exit" in message:
                    talk.write({"forget": not job.brings})
                    return int(message["exit"])
                if message.get("lost"):
                    raise ClusterError(
                        f"the command on {remote.login.address} has ended without an exit code",
                        hint=f"was that machine restarted? {_how_to_go_on(options, job, watch.id)}",
                    )
                watch.take(message, data)

    try:
        remote.lasting(start)
        code = remote.lasting(follow)
    except KeyboardInterrupt:
        watch.finish()
        _leave(remote, job, run, screen, watch.id)
        return ExitCode.INTERRUPTED
    except CutError as error:
        if not remote.answered:
            raise  # nothing was begun; it says itself what is wrong
        raise ClusterError(
            f"the connection to {remote.login.address} is lost: {error.what}",
            hint=f"what was started there goes on. {_how_to_go_on(options, job, watch.id)}",
        ) from None
    watch.finish()
    if job.brings and code != ExitCode.USER:
        wanted = {"run": run, "ids": list(job.about), "nights": job.nights}
        try:
            if bring(remote, wanted, landing, screen) and job.stays:
                screen.say(f"it is on {remote.login.address}: give later commands as detrun {options} …")
        except DetrunError as error:
            screen.say(f"the verdict could not be brought back: {error}")
            if watch.id:
                screen.say(f"hint: detrun {options} fetch {watch.id}")
        with suppress(DetrunError), remote.call("forget", {"run": run}) as talk:  # else in its own time
            talk.read()
    return code


def _leave(remote: Remote, job: Job, run: str, screen: Screen, id: str | None) -> None:
    """After Ctrl-C: what has started something goes on; what only looks is ended there as well."""
    if job.stays:
        screen.say(f"It goes on there. {_how_to_go_on(remote.login.options, job, id)}")
        return
    remote.drop()  # in the middle of a message it is of no use any more
    with suppress(DetrunError), remote.call("end", {"run": run}) as talk:
        talk.read()


def _how_to_go_on(options: str, job: Job, id: str | None) -> str:
    archive = f" --archive {job.archive_option}" if job.archive_option else ""
    if job.nights:
        return "The same command again takes part in it."
    if not job.stays:
        return "Give the command again."
    if id is None:
        return f"detrun {options} list{archive} shows it once it has begun; detrun {options} attach ID takes it up."
    return f"detrun {options} attach {id}{archive} takes up here; detrun {options} cancel {id}{archive} stops it."


class _Watch:
    """What has been printed there and here, so that it goes on in the same place after a cut."""

    def __init__(self, screen: Screen) -> None:
        self.positions = {"err": 0, "out": 0}
        self.id: str | None = None
        self._to = {"err": screen.err, "out": screen.out}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self.positions}
        self._recent = ""

    def take(self, message: dict[str, Any], data: bytes) -> None:
        stream = message.get("stream")
        if stream not in self.positions or message.get("at") != self.positions[stream]:
            raise ClusterError("the other end's output does not follow on what came before")
        self.positions[stream] += len(data)
        self._show(stream, self._decoders[stream].decode(data))

    def finish(self) -> None:
        for stream, decoder in self._decoders.items():
            self._show(stream, decoder.decode(b"", final=True))

    def _show(self, stream: str, text: str) -> None:
        if not text:
            return
        self._to[stream](printable(text))
        if self.id is None:
            self._recent = (self._recent + text)[-_REMEMBERED:]
            found = ID.search(self._recent)
            self.id = found[0] if found else None


def upload(remote: Remote, tree: Tree, screen: Screen) -> None:
    """Makes the tree be there; only what is missing is sent. Raises ArchiveError where there is no room."""
    for reason in tree.left_out[:5]:
        screen.say(f"not uploaded: {one_line(reason)}")
    if len(tree.left_out) > 5:
        screen.say(f"not uploaded: {len(tree.left_out) - 5} more")
    request = {"digest": tree.digest, "items": tree.listed()}

    def send() -> None:
        with remote.call("receive", request) as talk:
            answer, _ = talk.read()
            missing = [index for index in answer.get("missing", ()) if type(index) is int]
            if any(not 0 <= index < len(tree.items) for index in missing):
                raise ClusterError("the other end asks for files that nobody has")
            if missing:
                size = human(sum(tree.items[index].size for index in missing))
                screen.say(f"uploading {len(missing)} of {len(tree.items)} files, {size}")
            for index in missing:
                _send_file(talk, tree, index)
            talk.read()

    try:
        remote.lasting(send)
    except CutError as error:
        if not remote.answered:
            raise  # nothing was begun; it says itself what is wrong
        raise ClusterError(
            f"the upload to {remote.login.address} was cut: {error.what}",
            hint=error.hint or "give the same command again; what has arrived is not sent again",
        ) from None


def _send_file(talk: Conversation, tree: Tree, index: int) -> None:
    item = tree.items[index]
    left = item.size
    try:
        with tree.source(item).open("rb") as file:
            while True:
                data = file.read(min(CHUNK, left))
                left -= len(data)
                last = left <= 0 or not data
                talk.write({"item": index, "last": last}, data)
                if last:
                    return
    except OSError as error:
        raise UsageError(f"cannot be read any more: {error.strerror}", where=str(tree.base / item.path)) from None


def bring(remote: Remote, wanted: dict[str, Any], landing: Landing, screen: Screen) -> list[str]:
    """Brings the files of experiments and nights here; the ids that were found. Says where the pages lie."""

    def take() -> dict[str, Any]:
        with remote.call("bring", wanted) as talk:
            while True:
                message, _ = talk.read()
                if message.get("done"):
                    return message
                landing.take(message, lambda: talk.read()[1])

    told = remote.lasting(take)
    ids = [id for id in told.get("ids", ()) if isinstance(id, str) and ID.fullmatch(id)]
    login = remote.login
    for id in ids:
        landing.remember(id, str(login.address), login.way, login.program, str(told.get("archive", "")))
    for page in landing.pages:
        screen.say(f"page here: {page}")
    return ids
