"""The one sentence that answers, for whatever experiment it is."""

from __future__ import annotations

from detrun.records.jobs import ExperimentFile
from detrun.records.verdict import Verdict
from detrun.report import resume_words, words


def sentence(verdict: Verdict, experiment: ExperimentFile) -> str:
    """The answer without its leading word (IDENTICAL, DIVERGED, NOT VERIFIED)."""
    if verdict.experiment == resume_words.EXPERIMENT:
        return resume_words.sentence(verdict, experiment)
    return words.sentence(verdict, experiment)
