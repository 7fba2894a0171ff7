"""`detrun schema`: the JSON Schema of a document, for editors and for whoever reads the documents elsewhere."""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import Annotated

import typer

from detrun.errors import ExitCode


class Kind(str, Enum):
    """The documents that have a published schema."""

    recipe = "recipe"
    verdict = "verdict"


def schema(kind: Annotated[Kind, typer.Argument(help="recipe or verdict.", metavar="DOCUMENT")]) -> int:
    """Prints the JSON Schema of a recipe or of a verdict.

    An editor that speaks YAML checks a recipe whose first line is

    \b
    # yaml-language-server: $schema=recipe.schema.json
    """
    if kind is Kind.recipe:
        from detrun.recipe import recipe_schema

        document = recipe_schema()
    else:
        from detrun.records.verdict import verdict_schema

        document = verdict_schema()
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return ExitCode.OK
