"""Reading squeue and sacct. Pure: text in, job states out."""

from __future__ import annotations

import re

from detrun.launch.cluster import JobState, JobStatus

SQUEUE_FORMAT = "%i|%T|%N|%S|%r"
SACCT_FORMAT = "JobIDRaw,State,NodeList,ExitCode"

_PENDING = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
}
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
_NODE_PART = re.compile(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)(?:,|$)")


def state_of(word: str) -> JobState:
    """What a state word means for liveness. A word nobody has heard of counts as alive."""
    if word in _ENDED:
        return "ended"
    if word == "COMPLETING":
        return "completing"
    return "pending" if word in _PENDING else "running"


def parse_squeue(text: str) -> dict[str, JobStatus]:
    """squeue's lines (SQUEUE_FORMAT) by job id."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 4)
        if len(fields) != 5:
            continue
        job_id, word, nodes, start, reason = fields
        found[job_id] = JobStatus(
            state_of(word),
            word,
            "" if reason == "None" else reason,
            tuple(expand_nodes(nodes)),
            start if start not in {"N/A", "Unknown"} else "",
        )
    return found


def parse_sacct(text: str) -> dict[str, JobStatus]:
    """sacct's lines (SACCT_FORMAT, -P -X -D) by job id; of a requeued job's lines the last counts."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) < 4:
            continue
        job_id, words, nodes, exit_code = fields[:4]
        word = words.split()[0] if words else ""  # `CANCELLED by 1000`
        names = tuple(expand_nodes(nodes)) if nodes != "None assigned" else ()
        found[job_id] = JobStatus(state_of(word), word, "", names, "", exit_code)
    return found


def expand_nodes(text: str) -> list[str]:
    """`node[1-2,4],gpu07` as node1 node2 node4 gpu07; zeros in front of numbers are kept."""
    names: list[str] = []
    for match in _NODE_PART.finditer(text.strip()):
        head, ranges, rest = match[1], match[2], match[3]
        if ranges is None:
            names.append(head + rest)
            continue
        for part in ranges.split(","):
            low, _, high = part.partition("-")
            if high:
                names += [f"{head}{number:0{len(low)}d}{rest}" for number in range(int(low), int(high) + 1)]
            else:
                names.append(f"{head}{low}{rest}")
    return [name for name in names if name and name != "(null)"]
