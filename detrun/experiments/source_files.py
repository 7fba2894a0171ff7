"""Which bytes of which files each attempt of an arm wrote of its metrics, and their streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from detrun.compare.completeness import Asked
from detrun.compare.sources import SourceAsked
from detrun.errors import RecordError
from detrun.launch.written import Written, digest_of, files_of
from detrun.records.jobs import ExperimentFile
from detrun.records.layout import AttemptFolder, ExperimentFolder
from detrun.records.sources import Part, SourceSpec, Stream, load_pattern, read_attempt
from detrun.records.sources.patterns import is_file


@dataclass(slots=True)
class AttemptStreams:
    """What one attempt wrote in one source: a stream a rank that has a file of its own, else one. rewritten: files that
    the attempt wrote anew, so that what it took over from the one before cannot be told apart."""

    asked: SourceAsked
    streams: dict[int, Stream] = field(default_factory=dict)
    rewritten: list[str] = field(default_factory=list)


def source_asked(place: ExperimentFolder, experiment: ExperimentFile, asked: Asked, spec: SourceSpec) -> SourceAsked:
    """What is asked of a source. Raises RecordError where its pattern cannot be read."""
    if spec.pattern is not None and is_file(spec.pattern):  # its copy, wherever the archive lies by now
        spec = replace(spec, pattern=str(place.patterns_dir / Path(spec.pattern).name))
    pattern = load_pattern(spec.pattern)
    rules = experiment.metric_rules
    wanted = [name for name in (*rules.required, *rules.optional) if name not in (*asked.ignore, *asked.absent)]
    return SourceAsked(spec, pattern, asked.steps, tuple(dict.fromkeys(wanted)), asked.required, asked.requirement)


def read_written(
    place: ExperimentFolder,
    experiment: ExperimentFile,
    asked: Asked,
    attempts: Sequence[AttemptFolder],
    index: int,
    source: int,
    begins: int,
) -> AttemptStreams:
    """What attempt `index` of an arm's `attempts` wrote in its source number `source`.

    begins: its first step. Raises RecordError where nobody noted what lay there when it began.
    """
    attempt = attempts[index]
    written = Written.read(attempt)
    following = Written.read(attempts[index + 1]) if index + 1 < len(attempts) else None
    if source >= len(written.sources):
        raise RecordError("does not tell the sources of its metrics", where=str(attempt.written))
    wants = source_asked(place, experiment, asked, written.sources[source])
    found = AttemptStreams(wants)
    parts: dict[int, list[tuple[Part, str]]] = {}
    for rank, path in files_of(wants.spec, attempt):
        name = str(path.relative_to(place.path)) if path.is_relative_to(place.path) else str(path)
        part = Part(path) if wants.spec.path is None else _part(path, written, following, found, name)
        if part is not None:
            parts.setdefault(rank, []).append((part, name))
    for rank, mine in parts.items():
        found.streams[rank] = read_attempt(wants.spec, wants.pattern, mine, wants.compared, begins)
    return found


def _part(path: Path, written: Written, following: Written | None, found: AttemptStreams, name: str) -> Part | None:
    """The part of a file that one attempt wrote; None where it wrote nothing there."""
    start, size = 0, path.stat().st_size
    if str(path) in written.there:
        start, digest = written.there[str(path)]
        if size < start or digest_of(path, start) != digest:
            start = 0
            found.rewritten.append(name)
    end = None
    if following is not None:
        if str(path) not in following.there:
            return None  # a later attempt's own
        end, digest = following.there[str(path)]
        if size < end or digest_of(path, end) != digest:
            found.rewritten.append(name)  # what this attempt wrote is gone
            return None
    if start == (size if end is None else end) and start:
        return None
    return Part(path, start, end)
