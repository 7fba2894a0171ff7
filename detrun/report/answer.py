"""The one sentence that answers, for whatever experiment it is."""

from __future__ import annotations

from detrun.records.index import Entry
from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Verdict
from detrun.report import diagnose_screen, localize_words, resume_words, words

_HEADS = {"identical": "IDENTICAL", "diverged": "DIVERGED", "not-verified": "NOT VERIFIED"}


def head(verdict: Verdict) -> str:
    """The word, or words, that the answer begins with."""
    if verdict.experiment in localize_words.EXPERIMENTS:
        return localize_words.head(verdict)
    if verdict.experiment == diagnose_screen.EXPERIMENT:
        return diagnose_screen.head(verdict)
    return _HEADS[verdict.verdict]


def word(verdict: Verdict | Entry) -> str:
    """The verdict in a list of experiments. What traces or diagnoses answers another question: it is done, or not."""
    if verdict.verdict is None:
        return "no verdict yet" if verdict.state == "unfinished" else verdict.what
    if verdict.verdict != "not-verified":
        if verdict.experiment == localize_words.TRACE:
            return "traced"
        if verdict.experiment == diagnose_screen.EXPERIMENT:
            return "diagnosed"
    return verdict.verdict


def sentence(verdict: Verdict, experiment: ExperimentFile) -> str:
    """The answer without its head."""
    if verdict.experiment == resume_words.EXPERIMENT:
        return resume_words.sentence(verdict, experiment)
    if verdict.experiment in localize_words.EXPERIMENTS:
        return localize_words.sentence(verdict, experiment)
    if verdict.experiment == diagnose_screen.EXPERIMENT:
        return diagnose_screen.sentence(verdict, experiment)
    return words.sentence(verdict, experiment)
