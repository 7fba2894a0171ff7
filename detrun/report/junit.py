"""JUnit XML: a suite a recipe, a case a question. Nothing that was not proved is green, and nothing is skipped.

Diverged is a failure. Not verified, a failed job, a recipe that cannot be read, a check that was not run: an error.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

from detrun.records.files import printable
from detrun.records.nights import CHECKS, OPEN, Item, Night
from detrun.report.night_words import state_of

_NOT_XML = re.compile("[^\\t\\n\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def night_xml(night: Night) -> bytes:
    """All of a night. What is still to be done is an error as well, until it is."""
    import junitparser

    xml: Any = junitparser.JUnitXml(f"detrun nightly {night.night}")
    for path in dict.fromkeys(item.path for item in night.items):
        items = night.of([path])
        suite: Any = junitparser.TestSuite(_text(items[0].recipe))
        suite.timestamp = night.created
        suite.add_property("recipe", _text(path))
        suite.add_property("night", night.night)
        suite.add_property("state", state_of(items))
        for item in items:
            if item.kind in CHECKS:
                suite.add_testcase(_case(item, [each for each in items if each.kind == "localize"]))
        xml.add_testsuite(suite)
    xml.update_statistics()
    out = io.BytesIO()
    xml._elem.tail = "\n"
    xml.write(out)
    return out.getvalue()


def _case(item: Item, localized: Iterable[Item]) -> Any:
    import junitparser

    case: Any = junitparser.TestCase(item.kind, classname=_text(item.recipe), time=item.seconds or 0.0)
    lines = [item.what or "", f"experiment: {item.experiment}" if item.experiment else ""]
    if item.verdict == "diverged":
        head = item.what or "diverged"
        for each in localized:
            lines.append(f"localize: {each.what or each.state}")
            if each.experiment:
                lines.append(f"experiment: {each.experiment}")
            if each.of == item.experiment and each.verdict == "diverged":
                head = f"{head}; {each.what}"
        result: Any = junitparser.Failure(_text(head), "diverged")
    elif item.state in OPEN:
        result = junitparser.Error("this night has not come to it yet", "unfinished")
    elif item.verdict == "identical" and not item.exit_code:
        case.system_out = _text("\n".join(filter(None, lines)))
        return case
    else:
        kind = {2: "recipe", 3: "not-verified", 4: "infrastructure", 70: "bug"}.get(item.exit_code or 0, "error")
        result = junitparser.Error(_text(item.what or "no verdict"), kind)
    result.text = _text("\n".join(filter(None, lines)))
    case.result = [result]
    return case


def _text(text: str) -> str:
    """Foreign text as XML can hold it."""
    return _NOT_XML.sub("?", printable(text))
