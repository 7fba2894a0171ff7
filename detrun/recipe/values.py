"""The small values a recipe's sections are made of: text, names, lists of arguments, options, a time limit.

A value not as wanted raises the error that `refuse` makes; `problems.py` adds which key it was and where.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Strict, WithJsonSchema
from pydantic_core import PydanticCustomError

# JSON Schema of text that may also be written as a plain number or true: a variable's `1` is the text "1".
TEXT_SCHEMA = {"type": ["string", "number", "boolean"]}
# JSON Schema of an option's value: true, false and null have a meaning of their own, a list is joined by commas.
OPTION_SCHEMA = {"type": ["string", "number", "boolean", "null", "array"]}

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ENV_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
TIME_PATTERN = r"^([0-9]+|([0-9]+-)?[0-9]{1,2}:[0-5]?[0-9]:[0-5]?[0-9])$"

# Set by detrun for every rank; a recipe that sets them too would have the recorder write to the wrong place.
_OWN_NAMES = (
    *("ATTEMPT_DIR", "ARM", "ATTEMPT", "SEED", "STEPS", "STEPS_DONE", "MICROBATCHES_DONE", "STATE_EVERY", "STATE_AT"),
    *("DETERMINISM", "LOG_DIR", "INTERRUPT", "SABOTAGE"),
)
OWN_ENV = frozenset(f"DETRUN_{name}" for name in _OWN_NAMES)
# sbatch options that have a key of their own, and options without which detrun could not follow its jobs.
OPTION_KEYS = {
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "time": "slurm.time",
    "gpus-per-node": "slurm.gpus_per_node",
    "constraint": "slurm.constraint",
    "nodes": "launch.nodes",
    "ntasks-per-node": "launch.ranks_per_node",
}
OWN_OPTIONS = frozenset(
    {
        "job-name",
        "output",
        "error",
        "array",
        "wrap",
        "parsable",
        "wait",
        "requeue",
        "dependency",
        "hold",
        "signal",
        "kill-on-invalid-dep",
        "no-requeue",
        "test-only",
        "chdir",
    }
)


def refuse(what: str, hint: str = "") -> PydanticCustomError:
    """The error of a value not as wanted: `what` without the key's name, `hint` what to write instead."""
    return PydanticCustomError("recipe", "{what}", {"what": what, "hint": hint})


def found(value: object) -> str:
    """A value in words, for a message: its kind and the value itself, cut to a line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else value[:57] + "..."
        return f"text {shown!r}"
    return "a mapping" if isinstance(value, dict) else "a list"


def as_text(value: object) -> object:
    """A number or a bool as text; anything else is left to the type check."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return value


def one_line(value: str) -> str:
    if any(character in value for character in "\0\n\r"):
        raise refuse(f"found {found(value)}, wanted one line of text")
    return value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise refuse("holds a NUL byte, which no argument and no environment variable can carry")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise refuse("holds half a character (\\ud800 to \\udfff), which no file can carry", hint="write it as UTF-8.")
    return value


def as_words(value: object) -> object:
    """A list of arguments; one text in its place is refused with the list it most likely stands for."""
    if not isinstance(value, str):
        return value
    try:
        words = shlex.split(value)
    except ValueError:
        words = value.split()
    listed = ", ".join(_flow(word) for word in words)
    raise refuse(f"found {found(value)}, wanted a list of texts", hint=f"write a list: [{listed}]")


def _flow(word: str) -> str:
    """A word as it can stand in a YAML flow list."""
    if re.fullmatch(r"[A-Za-z0-9_./=+-]+", word) and not re.fullmatch(r"[-.]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _program_first(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or not value[0].strip():
        raise refuse("is empty, wanted a list whose first text is the program", hint="for example [python, train.py]")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(NAME_PATTERN[1:-1], value):
        fixed = plain_name(value)
        raise refuse(
            f"found {found(value)}, wanted letters, digits, dots, _ and -, beginning with a letter or "
            f"digit, 64 at most",
            hint=f"for example {fixed}",
        )
    return value


def plain_name(value: str) -> str:
    """The nearest text that may be a recipe's name; `recipe` if nothing of it is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value).lstrip("._-")[:64].rstrip("-") or "recipe"


def _metric(value: str) -> str:
    if not value.strip() or value != value.strip():
        raise refuse(f"found {found(value)}, wanted the name of a metric")
    return one_line(value)


def _unique(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if value.count(name) > 1:
            raise refuse(f"{name} is listed twice")
    return value


def _arm(value: str) -> str:
    if not re.fullmatch(r"[a-z]{1,2}", value):
        raise refuse(
            f"{value!r} is not an arm",
            hint="arms are called a, b, c, …: a is the reference, b the first repeat.",
        )
    return value


def _env_name(value: str) -> str:
    if not re.fullmatch(ENV_PATTERN[1:-1], value):
        raise refuse(f"{value!r} is not the name of an environment variable", hint="letters, digits and _ only.")
    if value in OWN_ENV:
        raise refuse(f"{value} is set by detrun itself", hint="leave it out.")
    return value


def _option_name(value: str) -> str:
    if not re.fullmatch(r"-{0,2}[A-Za-z][A-Za-z0-9_-]*", value):
        raise refuse(
            f"{value!r} is not the name of an option",
            hint="a long option without its dashes, such as mem-per-cpu.",
        )
    return value.lstrip("-").replace("_", "-")


def _sbatch_option(value: str) -> str:
    name = _option_name(value)
    if len(name) == 1:
        raise refuse(f"{value!r} is a short option", hint="write the long one, such as mem in place of m.")
    if name in OPTION_KEYS:
        raise refuse(f"{name} has a key of its own", hint=f"write {OPTION_KEYS[name]}.")
    if name in OWN_OPTIONS:
        raise refuse(f"{name} is set by detrun itself", hint="leave it out.")
    return name


def _option_value(value: object) -> object:
    if isinstance(value, list | tuple) and all(isinstance(part, str | int | float) for part in value):
        return ",".join(str(as_text(part)) for part in value)
    return value if isinstance(value, bool) else as_text(value)


def _gpus(value: object) -> object:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"([A-Za-z][\w.-]*:)?[0-9]+", value):
        return value
    raise refuse(
        f"found {found(value)}, wanted a whole number of at least 0, or type:number",
        hint="for example 8, or h100:8",
    )


def _time(value: object) -> object:
    text = as_text(value) if type(value) is int else value
    if not isinstance(text, str) or not re.fullmatch(TIME_PATTERN, text):
        hint = 'for example "00:20:00", "1-12:00:00", or 20 (minutes)'
        if isinstance(text, str) and re.fullmatch(r"[0-9]+:[0-9]{2}", text):
            hint = f'"{text}:00" if hours and minutes are meant, "00:{text}" if minutes and seconds are'
        raise refuse(f"found {found(value)}, wanted HH:MM:SS, D-HH:MM:SS, or minutes", hint=hint)
    if seconds_of(text) == 0:
        raise refuse(f"found {found(value)}, which is no time at all", hint="a job with a limit of 0 waits for ever.")
    return text


def seconds_of(time: str) -> int:
    """A time limit in seconds: HH:MM:SS, D-HH:MM:SS, or minutes (no unit)."""
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def one_or_many(value: Any) -> Any:
    """One mapping as a list of one; null as none."""
    if value is None:
        return ()
    return [value] if isinstance(value, dict) else value


Text = Annotated[str, Strict(), BeforeValidator(as_text), AfterValidator(_no_nul), WithJsonSchema(TEXT_SCHEMA)]
RecipeName = Annotated[
    str,
    Strict(),
    BeforeValidator(as_text),
    AfterValidator(_name),
    WithJsonSchema({"type": "string", "pattern": NAME_PATTERN}),
]
MetricName = Annotated[str, Strict(), AfterValidator(_metric), WithJsonSchema({"type": "string"})]
ArmName = Annotated[str, Strict(), AfterValidator(_arm), WithJsonSchema({"type": "string", "pattern": "^[a-z]{1,2}$"})]
EnvName = Annotated[
    str, Strict(), AfterValidator(_env_name), WithJsonSchema({"type": "string", "pattern": ENV_PATTERN})
]
Args = Annotated[tuple[Text, ...], BeforeValidator(as_words)]
Command = Annotated[
    tuple[Text, ...],
    BeforeValidator(as_words),
    AfterValidator(_program_first),
    WithJsonSchema({"type": "array", "items": TEXT_SCHEMA, "minItems": 1}),
]
Names = Annotated[tuple[MetricName, ...], BeforeValidator(as_words), AfterValidator(_unique)]
Line = Annotated[str, Strict(), AfterValidator(_no_nul), WithJsonSchema({"type": "string"})]
Lines = tuple[Line, ...]
SbatchOption = Annotated[str, Strict(), AfterValidator(_sbatch_option), WithJsonSchema({"type": "string"})]
OptionName = Annotated[str, Strict(), AfterValidator(_option_name), WithJsonSchema({"type": "string"})]
OptionText = Annotated[str, Strict(), AfterValidator(one_line)]
OptionValue = Annotated[
    OptionText | Annotated[bool, Strict()] | None,
    BeforeValidator(_option_value),
    WithJsonSchema(OPTION_SCHEMA),
]
Gpus = Annotated[
    int | str,
    BeforeValidator(_gpus),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]
TimeLimit = Annotated[
    str,
    BeforeValidator(_time),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": TIME_PATTERN}, {"type": "integer", "minimum": 1}]}),
]
