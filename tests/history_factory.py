"""Makes an archive's experiments as far as an index reads them: their markers and verdicts, nothing else.

nights = Nights(tmp_path)
nights.add("2026-11-24", "hybrid-cpu", "diverged", step=7, packages={"numpy": "2.5.0"})
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from detrun.records.archive import Archive
from detrun.records.layout import MARKER
from detrun.records.verdict import Figure, Finding, FirstDivergence, Surroundings, Verdict, Word

PACKAGES = {"torch": "2.13.0", "numpy": "2.4.6"}
EXIT_CODES = {"identical": 0, "diverged": 1, "not-verified": 3}


@dataclass
class Nights:
    """An archive with experiments that were made at 02:30 and later in their nights."""

    root: Path
    count: int = 0
    environment: dict[str, Any] = field(
        default_factory=lambda: {
            "recipe": "xxh3:aaaa",
            "commit": "1111111111111111111111111111111111111111",
            "dirty": False,
            "code": "xxh3:cccc",
            "python": "3.11.7",
            "packages": PACKAGES,
            "nodes": ["node1", "node2"],
        }
    )

    @property
    def archive(self) -> Archive:
        return Archive(self.root)

    def add(
        self,
        night: str,
        recipe: str,
        verdict: Word | None,
        *,
        kind: str = "pair",
        step: int | None = None,
        exit_code: int | None = None,
        what: str | None = None,
        pairs: tuple[int, int] | None = None,
        packages: dict[str, str] | None = None,
        culprit: dict[str, Any] | None = None,
        labels: dict[str, str] | None = None,
        at: datetime | None = None,
        report: bool = False,
        extra: dict[str, Any] | None = None,
        **environment: Any,
    ) -> str:
        """One experiment; returns its id. verdict None: it has none yet."""
        at = at or datetime.fromisoformat(f"{night}T02:30:00+00:00") + timedelta(minutes=self.count % 60)
        id = f"{recipe}-{kind}-{at.astimezone(timezone.utc):%Y%m%dT%H%M%S}-{self.count:04x}"
        self.count += 1
        folder = self.root / id
        folder.mkdir(parents=True)
        (folder / MARKER).touch()
        if report:
            (folder / "report.html").write_text("<!doctype html><title>report</title>", encoding="utf-8")
        if verdict is None:
            return id
        bad = verdict == "diverged"
        counted = pairs or (1, int(bad))
        changed = {**self.environment, "packages": {**PACKAGES, **(packages or {})}, **environment}
        Verdict(
            id=id,
            experiment=kind,
            recipe=recipe,
            verdict=verdict,
            exit_code=EXIT_CODES[verdict] if exit_code is None else exit_code,
            first_divergence=FirstDivergence(
                step=step or 1, boundary="end", stream="gradients", ranks=[1], arms=["a", "b"]
            )
            if bad
            else None,
            culprit=culprit,
            findings=[
                Finding(kind="divergence", severity="divergence", what=what or f"gradients differ at step {step or 1}")
            ]
            if bad
            else [],
            not_verified=[what or "metrics end at step 28 of 30"] if verdict == "not-verified" else [],
            figures={
                "pairs": Figure(value=counted[0], unit="pairs", n=counted[0]),
                "pairs_diverged": Figure(value=counted[1], unit="pairs", n=counted[0]),
            },
            created=at.isoformat(),
            labels={"night": night} if labels is None else labels,
            environment=Surroundings.model_validate(changed),
            **(extra or {}),
        ).write(folder / "verdict.json")
        return id


def seven_nights(root: Path) -> Nights:
    """The seven nights of three recipes: one breaks on the fourth by a changed package, one is flaky, one is never
    accepted by the scheduler."""
    nights = Nights(root)
    dates = [f"2026-11-{day}" for day in range(23, 30)]
    for number, night in enumerate(dates):
        broken = number >= 3
        changed = {"packages": {"numpy": "2.5.0"}} if broken else {}
        nights.add(night, "hybrid-cpu", "diverged" if broken else "identical", step=7, report=True, **changed)
        nights.add(night, "hybrid-cpu", "identical", kind="resume-check", report=True, **changed)
        if broken:
            origin = {"kind": "op", "name": "aten.index_put_"}
            nights.add(night, "hybrid-cpu", "diverged", kind="localize", step=7, culprit=origin, report=True, **changed)
        flaky: Word = "diverged" if number in (1, 4) else "identical"
        nights.add(night, "moe", flaky, step=12, report=True)
    return nights
