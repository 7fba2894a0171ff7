"""What doctor makes of the answers that came from the nodes. Pure: what probe.py saw in, checks out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from detrun.experiments.doctor.here import seconds
from detrun.launch.preflight import human
from detrun.launch.probe import EXCLUSIVE_TRIES
from detrun.launch.probe_job import Ping, Probe
from detrun.report.doctor_screen import Check

Answers = Mapping[str, Mapping[str, Any]]
SMALL = 1e9
CLOCK_LIMIT = 2.0
SLOW_FILE = 5.0
SLOW_NAME = 2.0
SLOW_TORCH = 60.0
NOT_SHARED = "the archive has to be on a file system that login and compute nodes share: --archive DIR names another"


def check_shared(pings: Mapping[str, Sequence[Ping]], answers: Answers) -> list[Check]:
    """The archive as nodes see it: how long a file takes there and back, and whether claims hold across nodes."""
    return [_latency(pings), _exclusive(answers), _clock(pings)]


def check_program(answers: Answers, probe: Probe, here: Mapping[str, Any] | None) -> list[Check]:
    """What the trainer will find. here: `program` as it is where doctor was called, None where that is another one."""
    checks = [_python(answers, here), _torch(answers, here)]
    if probe.commands:
        checks.append(_commands(answers))
    if probe.files:
        checks.append(_files(answers))
    if probe.workdir is not None:
        checks.append(_workdir(answers, probe.workdir))
    return checks


def check_machine(answers: Answers, gpus_asked: str | None = None) -> list[Check]:
    """Memory for loaders, scratch space, cores, GPUs."""
    return [_space(answers, "shm"), _space(answers, "tmp"), _cores(answers), _gpus(answers, gpus_asked)]


def check_network(answers: Answers) -> list[Check]:
    """Whether the nodes find and reach each other, as a rendezvous of several nodes has to."""
    if len(answers) < 2:
        return [_names(answers)]
    return [_names(answers), _reach(answers)]


def _latency(pings: Mapping[str, Sequence[Ping]]) -> Check:
    times = {name: sorted(ping.seconds for ping in seen[1:]) for name, seen in pings.items()}
    silent = [name for name, seen in times.items() if not seen]
    name = "archive, seen from nodes"
    if silent or not times:
        where = ", ".join(silent) or "no node"
        remedy = NOT_SHARED
        return Check(name, "fail", f"{where}: a file written here was not answered there within 60 s", remedy)
    middle = {node: seen[len(seen) // 2] for node, seen in times.items()}
    worst = max(seen[-1] for seen in times.values())
    number = min(len(seen) for seen in times.values())
    measured = (
        f"a file written here and its answer written there take {_each({k: seconds(v) for k, v in middle.items()})} "
        f"(median of {number}), {seconds(worst)} at most"
    )
    figures = {"median_seconds": max(middle.values()), "max_seconds": worst}
    if worst > SLOW_FILE:
        remedy = "progress and verdicts come that much later; a file system without attribute caching is quicker"
        return Check(name, "warn", measured, remedy, figures)
    return Check(name, "ok", measured, figures=figures)


def _exclusive(answers: Answers) -> Check:
    name = "archive, claims and renames"
    if (bad := _errors(answers, "exclusive")) or (bad := _errors(answers, "rename")):
        return Check(name, "fail", bad, "nodes have to be able to write in the archive: --archive DIR names another")
    won = [number for seen in answers.values() for number in seen.get("exclusive", [])]
    renamed = all(seen.get("rename") for seen in answers.values())
    if sorted(won) != list(range(EXCLUSIVE_TRIES)) or not renamed:
        what = "two nodes could create one file" if len(won) > len(set(won)) else "a file did not hold its content"
        remedy = "locks and records rest on O_EXCL and rename: an archive on another file system"
        return Check(name, "fail", what, remedy)
    nodes = "1 node" if len(answers) == 1 else f"{len(answers)} nodes at once"
    return Check(name, "ok", f"{EXCLUSIVE_TRIES} files claimed by {nodes}, each by exactly one; renaming holds")


def _clock(pings: Mapping[str, Sequence[Ping]]) -> Check:
    best = {name: min(seen[1:], key=lambda ping: ping.seconds) for name, seen in pings.items() if len(seen) > 1}
    if not best:
        return Check("clocks", "unknown", "no node answered", "see the archive's check")
    parts = {node: f"{ping.ahead:+.2g} ± {ping.seconds / 2:.1g} s" for node, ping in best.items()}
    worst = max(best.values(), key=lambda ping: abs(ping.ahead))
    measured = f"nodes are ahead of this machine by {_each(parts)}"
    figures = {"max_seconds": abs(worst.ahead)}
    if abs(worst.ahead) - worst.seconds / 2 > CLOCK_LIMIT:
        remedy = "times in records will contradict each other (no comparison uses them): have the site look after NTP"
        return Check("clocks", "warn", measured, remedy, figures)
    return Check("clocks", "ok", measured, figures=figures)


def _python(answers: Answers, here: Mapping[str, Any] | None) -> Check:
    name = "Python of the program"
    if bad := _errors(answers, "program"):
        remedy = "the environment has to be on a shared file system, or be brought by slurm.setup or slurm.container"
        return Check(name, "fail", bad, remedy)
    seen = {node: answer.get("program") for node, answer in answers.items()}
    if not any(seen.values()):
        return Check(name, "ok", "the command names none, so it was not looked for")
    texts = {node: f"{p['python']} at {p['executable']}" for node, p in seen.items() if p}
    measured = _each(texts)
    if len(set(texts.values())) > 1:
        return Check(name, "warn", measured, "nodes differ: arms on different nodes would differ in their environment")
    version = next(str(p["python"]) for p in seen.values() if p)
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (3, 10):
        return Check(name, "fail", measured, "the recorder needs Python 3.10 or newer in the program's environment")
    if here and here.get("python") not in (None, version):
        other = f"{measured}; here it is {here['python']}"
        return Check(name, "warn", other, "the same name leads to another Python on the nodes: give its full path")
    same = ", the same as here" if here and here.get("python") == version else ""
    return Check(name, "ok", f"{measured}{same}")


def _torch(answers: Answers, here: Mapping[str, Any] | None) -> Check:
    seen = {node: (answer.get("program") or {}).get("torch") for node, answer in answers.items()}
    known = {node: torch for node, torch in seen.items() if torch}
    if not known:
        any_program = any(answer.get("program") for answer in answers.values())
        if any_program:
            return Check("torch", "unknown", "the program's Python did not run", "see the line above")
        return Check("torch", "ok", "not looked for")
    if bad := {node: torch["error"] for node, torch in known.items() if "error" in torch}:
        remedy = "install torch in the environment of launch.command, or name that environment's python there"
        return Check("torch", "fail", f"import torch: {_each(bad)}", remedy)
    versions = {node: str(torch["version"]) for node, torch in known.items()}
    slowest = max(float(torch["seconds"]) for torch in known.values())
    measured = f"{_each(versions)}, imported in {seconds(slowest)} at most"
    figures = {"import_seconds": slowest}
    if len(set(versions.values())) > 1:
        return Check("torch", "warn", measured, "nodes differ: pinned placement or one shared environment", figures)
    login = here.get("torch") if here else None
    version = next(iter(versions.values()))
    if login and login.partition("+")[0] != version.partition("+")[0]:
        other = f"{measured}; here it is {login}"
        return Check("torch", "warn", other, "the same Python finds another torch on the nodes", figures)
    if slowest > SLOW_TORCH:
        remedy = "every attempt waits for that: a container image or an environment on faster storage"
        return Check("torch", "warn", measured, remedy, figures)
    return Check("torch", "ok", measured, figures=figures)


def _commands(answers: Answers) -> Check:
    name = "launch.command"
    if bad := _errors(answers, "command"):
        return Check(name, "unknown", bad, "call doctor again")
    missing = {
        node: ", ".join(word for word, place in (answer.get("command") or {}).items() if place is None)
        for node, answer in answers.items()
    }
    if lost := {node: words for node, words in missing.items() if words}:
        remedy = "put it on PATH there (slurm.setup, slurm.container), or give its full path on a shared file system"
        return Check(name, "fail", f"not found: {_each(lost)}", remedy)
    places = {node: ", ".join(str(place) for place in answer["command"].values()) for node, answer in answers.items()}
    return Check(name, "ok", f"{_each(places)}")


def _files(answers: Answers) -> Check:
    name = "the program's file"
    if bad := _errors(answers, "files"):
        return Check(name, "unknown", bad, "call doctor again")
    lost = {
        node: ", ".join(word for word, there in answer["files"].items() if not there)
        for node, answer in answers.items()
    }
    if lost := {node: words for node, words in lost.items() if words}:
        remedy = "launch.command is read from launch.workdir: correct the path, or put it on a shared file system"
        return Check(name, "fail", f"not found: {_each(lost)}", remedy)
    return Check(name, "ok", f"{', '.join(next(iter(answers.values()))['files'])} is there")


def _workdir(answers: Answers, workdir: str) -> Check:
    name = "launch.workdir"
    if bad := _errors(answers, "workdir"):
        return Check(name, "unknown", bad, "call doctor again")
    lost = [node for node, answer in answers.items() if not answer.get("workdir")]
    if lost:
        remedy = "it has to be on a shared file system (with a container: in slurm.container.mounts)"
        return Check(name, "fail", f"{workdir} is no folder on {', '.join(lost)}", remedy)
    return Check(name, "ok", f"{workdir} is there")


def _names(answers: Answers) -> Check:
    worst, slowest, loops = {}, 0.0, {}
    several = len({answer.get("boot") for answer in answers.values()}) > 1
    for node, answer in answers.items():
        resolved = answer.get("resolve") or {}
        if "error" in resolved:
            return Check("node names", "fail", f"{node}: {resolved['error']}", _NAMES)
        for other, told in resolved.items():
            slowest = max(slowest, float(told.get("seconds", 0)))
            if "error" in told:
                worst[f"{node} for {other}"] = told["error"]
            elif several and other != node and all(a.startswith(("127.", "::1")) for a in told["addresses"]):
                loops[node] = f"{other} is {', '.join(told['addresses'])}"
    figures = {"max_seconds": slowest}
    if worst:
        return Check("node names", "fail", f"do not resolve: {_each(worst)}", _NAMES, figures)
    if loops:
        return Check("node names", "fail", f"lead to the node itself: {_each(loops)}", _NAMES, figures)
    measured = f"each of {len(answers)} nodes resolves all names, in {seconds(slowest)} at most"
    if len(answers) == 1:
        measured = f"{next(iter(answers))} resolves its own name in {seconds(slowest)}"
    if slowest > SLOW_NAME:
        return Check(
            "node names", "warn", measured, "a rendezvous asks again and again: the site's DNS is slow", figures
        )
    return Check("node names", "ok", measured, figures=figures)


_NAMES = "a rendezvous waits for minutes on such a name: DNS, or /etc/hosts on every node"


def _reach(answers: Answers) -> Check:
    name = "node to node"
    tried = {node: answer.get("tcp") or {} for node, answer in answers.items()}
    first = next((node for node, told in tried.items() if "listened" in told), "the first node")
    bad = {node: told.get("error") or "another program answered" for node, told in tried.items()
           if "error" in told or told.get("greeted") is False}  # fmt: skip
    if bad:
        remedy = "ranks meet on a free port: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or a firewall between nodes"
        return Check(name, "fail", f"no connection to a free port of {first}: {_each(bad)}", remedy)
    times = [float(told["seconds"]) for told in tried.values() if "seconds" in told]
    if not times:
        return Check(name, "unknown", "only one node answered", "call doctor again")
    others = "the other node" if len(times) == 1 else f"{len(times)} other nodes"
    return Check(name, "ok", f"a free port of {first} is reached from {others} in {seconds(max(times))} at most")


_SPACES = {"shm": "/dev/shm", "tmp": "/tmp"}  # noqa: S108  where they are unless a node says otherwise


def _space(answers: Answers, key: str) -> Check:
    told = [answer.get(key) or {} for answer in answers.values()]
    path = next((str(each["path"]) for each in told if "path" in each), _SPACES[key])
    if bad := _errors(answers, key):
        return Check(path, "warn", bad, "what uses it (loaders with workers, compilers) will fail there")
    least = min(answers, key=lambda node: float(answers[node][key]["free"]))
    free, total = float(answers[least][key]["free"]), float(answers[least][key]["total"])
    measured = f"{human(free)} of {human(total)} free{f', least on {least}' if len(answers) > 1 else ''}"
    if free < SMALL:
        what = "loaders with workers hand batches over there" if key == "shm" else "compilers and caches write there"
        return Check(path, "warn", measured, f"{what}: have it enlarged or cleaned", {"free_bytes": free})
    return Check(path, "ok", measured, figures={"free_bytes": free})


def _cores(answers: Answers) -> Check:
    if bad := _errors(answers, "cores"):
        return Check("cores", "unknown", bad, "call doctor again")
    texts, short = {}, False
    for node, answer in answers.items():
        told = answer["cores"]
        parts = [f"{told['affinity']} by affinity"]
        if told["slurm"] is not None:
            parts.insert(0, f"{told['slurm']} by Slurm")
            short = short or told["affinity"] < told["slurm"]
        if told["cgroup"] is not None:
            parts.append(f"{told['cgroup']:.3g} by cgroup")
            short = short or told["cgroup"] < (told["slurm"] or told["affinity"])
        texts[node] = ", ".join(parts)
    if short:
        remedy = "threads will outnumber cores: set OMP_NUM_THREADS in launch.env to what the ranks really get"
        return Check("cores", "warn", _each(texts), remedy)
    return Check("cores", "ok", _each(texts))


def _gpus(answers: Answers, asked: str | None) -> Check:
    if bad := _errors(answers, "gpus"):
        return Check("GPUs", "fail" if asked else "warn", bad, "the driver does not answer: has the node lost a GPU?")
    texts = {}
    for node, answer in answers.items():
        told, torch = answer["gpus"], (answer.get("program") or {}).get("torch") or {}
        names = told["names"]
        devices = torch.get("devices", 0)
        if not names and not devices:
            texts[node] = "none"
            continue
        kinds = " + ".join(f"{names.count(kind)} {kind}" for kind in dict.fromkeys(names)) or f"{devices} devices"
        texts[node] = f"{kinds}, driver {told['driver']}, torch (CUDA {torch.get('cuda')}) sees {devices}"
    counts = [(answer.get("program") or {}).get("torch", {}).get("devices", 0) for answer in answers.values()]
    present = [len(answer["gpus"]["names"]) for answer in answers.values()]
    if asked and not any(present):
        return Check("GPUs", "fail", f"{asked} a node were asked for: {_each(texts)}", "slurm.gpus_per_node, partition")
    if asked and not all(counts):
        remedy = "torch without CUDA, or a driver that is too old for it"
        return Check("GPUs", "fail", _each(texts), remedy)
    if len(set(texts.values())) > 1:
        return Check("GPUs", "warn", _each(texts), "nodes differ, and so may results: slurm.constraint")
    return Check("GPUs", "ok", f"{_each(texts)}{'' if asked else ' (none asked for)'}")


def _errors(answers: Answers, key: str) -> str:
    """What nodes said in place of an answer; empty where each has one."""
    found = {}
    for node, answer in answers.items():
        told = answer.get(key, {"error": "no answer"}) if "error" not in answer else answer
        if isinstance(told, Mapping) and isinstance(told.get("error"), str):
            found[node] = told["error"]
    return _each(found) if found else ""


def _each(texts: Mapping[str, str]) -> str:
    """`what` where every node says the same, else `what (node1), other (node2)`."""
    groups: dict[str, list[str]] = {}
    for node, text in texts.items():
        groups.setdefault(text, []).append(node)
    if len(groups) == 1:
        return next(iter(groups))
    return ", ".join(f"{text} ({', '.join(nodes)})" for text, nodes in groups.items())
