"""What doctor makes of what it measured: which answers are well, which are not, and what to do."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from detrun.experiments.doctor import DoctorOptions, Watched, here
from detrun.experiments.doctor.facts import check_facts
from detrun.experiments.doctor.nodes import check_machine, check_network, check_program, check_shared
from detrun.launch.cluster import JobStatus
from detrun.launch.probe_job import Ping, Probe
from detrun.launch.probe_signals import COMMANDS, Fact
from detrun.report.doctor_screen import Check
from tests.running import detrun, write_recipe


def node(**keys: Any) -> dict[str, Any]:
    """What a healthy node answers."""
    return {
        "boot": "one",
        "exclusive": list(range(20)),
        "rename": True,
        "resolve": {"n1": {"addresses": ["10.0.0.1"], "seconds": 0.001}},
        "tcp": {"listened": 4000},
        "command": {"python": "/usr/bin/python"},
        "files": {"train.py": True},
        "workdir": True,
        "shm": {"path": "/dev/shm", "total": 2e10, "free": 1e10},
        "tmp": {"path": "/tmp", "total": 2e10, "free": 1e10},
        "cores": {"affinity": 8, "slurm": 8, "cgroup": None},
        "gpus": {"driver": None, "names": [], "visible": None},
        "program": {
            "python": "3.12.1",
            "executable": "/venv/bin/python",
            "torch": {"version": "2.9.0+cu128", "seconds": 4.0, "cuda": "12.8", "devices": 0},
        },
        **keys,
    }


def two(**of_the_second: Any) -> dict[str, Any]:
    second = {"exclusive": [], "tcp": {"seconds": 0.001, "greeted": True, "port": 4000}, **of_the_second}
    return {"n1": node(), "n2": node(**second)}


def named(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


PROBE = Probe(commands=["python"], files=["train.py"], workdir="/shared/work")
PINGS = {"n1": [Ping(9.0, 9.0), Ping(0.02, 0.001), Ping(0.01, 0.0)], "n2": [Ping(9.0, 9.0), Ping(0.04, 0.01)]}


def test_two_healthy_nodes_pass_every_check() -> None:
    answers = two()
    checks = [
        *check_shared(PINGS, answers),
        *check_program(answers, PROBE, {"python": "3.12.1", "torch": "2.9.0"}),
        *check_network(answers),
        *check_machine(answers),
    ]
    assert [check for check in checks if check.status != "ok"] == []
    assert all(not check.remedy for check in checks)


def test_the_first_round_waits_for_the_step_and_does_not_count() -> None:
    checks = named(check_shared(PINGS, two()))
    assert "20 ms (n1), 40 ms (n2)" in checks["archive, seen from nodes"].measured
    assert checks["archive, seen from nodes"].figures["max_seconds"] == pytest.approx(0.04)


@pytest.mark.parametrize("pings", [{}, {"n1": PINGS["n1"], "n2": [Ping(1, 0)]}])
def test_an_archive_that_a_node_does_not_see_fails(pings: dict[str, list[Ping]]) -> None:
    check = check_shared(pings, two())[0]
    assert check.status == "fail" and "--archive DIR" in check.remedy


def test_a_file_that_two_nodes_could_create_fails() -> None:
    check = named(check_shared(PINGS, two(exclusive=[3])))["archive, claims and renames"]
    assert check.status == "fail" and "two nodes" in check.measured


def test_a_clock_that_is_off_by_more_than_the_measurement_is_told() -> None:
    off = {"n1": [Ping(1, 0), Ping(0.1, -31.0)]}
    assert named(check_shared(off, {"n1": node()}))["clocks"].status == "warn"
    unsure = {"n1": [Ping(1, 0), Ping(8.0, 3.0)]}  # ± 4 s
    assert named(check_shared(unsure, {"n1": node()}))["clocks"].status == "ok"


@pytest.mark.parametrize(
    ("program", "name", "status", "words"),
    [
        ({"error": "there is no python"}, "Python of the program", "fail", "there is no python"),
        ({"python": "3.9.2", "executable": "/p", "torch": {"error": "x"}}, "Python of the program", "fail", "3.9.2"),
        ({"python": "3.12.1", "executable": "/p", "torch": {"error": "no torch"}}, "torch", "fail", "no torch"),
        (None, "torch", "ok", "not looked for"),
    ],
)  # fmt: skip
def test_the_programs_python_and_torch(program: Any, name: str, status: str, words: str) -> None:
    check = named(check_program({"n1": node(program=program)}, PROBE, None))[name]
    assert (check.status, words in check.measured) == (status, True)
    assert bool(check.remedy) == (status != "ok")


def test_nodes_or_a_login_node_that_differ_are_told() -> None:
    other = node()["program"] | {"torch": {"version": "2.8.0", "seconds": 1.0, "cuda": None, "devices": 0}}
    assert named(check_program(two(program=other), PROBE, None))["torch"].status == "warn"
    login = named(check_program({"n1": node()}, PROBE, {"python": "3.11.0", "torch": "2.7.0"}))
    assert (
        login["Python of the program"].status == "warn"
        and "here it is 3.11.0" in login["Python of the program"].measured
    )
    assert login["torch"].status == "warn"


def test_what_is_not_on_a_node_fails() -> None:
    checks = named(check_program(two(command={"python": None}, files={"train.py": False}, workdir=False), PROBE, None))
    assert {name: check.status for name, check in checks.items()} == {
        "Python of the program": "ok",
        "torch": "ok",
        "launch.command": "fail",
        "the program's file": "fail",
        "launch.workdir": "fail",
    }
    assert "n2" in checks["launch.workdir"].measured


def test_names_that_do_not_resolve_or_lead_home_fail() -> None:
    lost = two(resolve={"n1": {"error": "Name or service not known", "seconds": 5.0}})
    assert named(check_network(lost))["node names"].status == "fail"
    home = two(boot="another", resolve={"n1": {"addresses": ["127.0.1.1"], "seconds": 0.0}})
    assert "lead to the node itself" in named(check_network(home))["node names"].measured
    one_host = two(resolve={"n1": {"addresses": ["127.0.0.1"], "seconds": 0.0}})  # a test cluster's nodes
    assert named(check_network(one_host))["node names"].status == "ok"


def test_a_firewall_between_nodes_fails() -> None:
    check = named(check_network(two(tcp={"error": "timed out", "port": 4000})))["node to node"]
    assert check.status == "fail" and "timed out" in check.measured


@pytest.mark.parametrize(
    ("keys", "asked", "name", "status"),
    [
        ({"shm": {"path": "/dev/shm", "total": 6.7e7, "free": 6.7e7}}, None, "/dev/shm", "warn"),
        ({"shm": {"error": "no such folder"}}, None, "/dev/shm", "warn"),
        ({"cores": {"affinity": 1, "slurm": 8, "cgroup": None}}, None, "cores", "warn"),
        ({"cores": {"affinity": 8, "slurm": 8, "cgroup": 2.0}}, None, "cores", "warn"),
        ({}, "4", "GPUs", "fail"),
        ({"gpus": {"error": "nvidia-smi: No devices were found"}}, "4", "GPUs", "fail"),
        ({"gpus": {"driver": "570.1", "names": ["H200"], "visible": "0"}}, "1", "GPUs", "fail"),
    ],
)
def test_the_machine(keys: dict[str, Any], asked: str | None, name: str, status: str) -> None:
    assert named(check_machine({"n1": node(**keys)}, asked))[name].status == status


def test_gpus_that_torch_sees_are_named_with_their_driver() -> None:
    program = node()["program"] | {"torch": {"version": "2.9.0", "seconds": 1.0, "cuda": "12.8", "devices": 2}}
    answers = {"n1": node(program=program, gpus={"driver": "570.1", "names": ["H200", "H200"], "visible": None})}
    check = named(check_machine(answers, "2"))["GPUs"]
    assert (check.status, check.measured) == ("ok", "2 H200, driver 570.1, torch (CUDA 12.8) sees 2")


AS_TOLD = [
    Fact("scancel -s USR1 JOB", (), ("USR1",)),
    Fact("scancel -b -s USR2 JOB", ("USR2",), ()),
    Fact("scancel -s TERM JOB.STEP", (), ("TERM",)),
    Fact("scancel -s KILL JOB.STEP", (), ("KILL",), 0.2, "batch lives and saw 137"),
    Fact("scontrol requeue JOB", ("CONT", "TERM"), ("CONT", "TERM"), 30.2),
    Fact("requeue delay", (), (), 121.0, "StartTime=now started it after 1.1 s"),
    Fact("scancel JOB", ("CONT", "TERM"), ("CONT", "TERM"), 30.1),
]


def test_signals_as_they_are_told_of_are_well() -> None:
    checks = check_facts(AS_TOLD, {"KillWait": "30 sec"})
    assert [check.name for check in checks] == list(COMMANDS)
    assert {check.status for check in checks} == {"ok"}
    assert "killed 30.1 s after TERM (KillWait 30 s)" in checks[-1].measured
    assert "held for 121 s" in checks[5].measured


@pytest.mark.parametrize(
    ("fact", "status"),
    [
        (Fact("scancel -s USR1 JOB", ("USR1",), ("USR1",)), "warn"),
        (
            Fact("scancel -s KILL JOB.STEP", (), ("KILL",), extra="batch saw 137, but the next step did not start"),
            "warn",
        ),
        (Fact("scontrol requeue JOB", why="scontrol refused it", refused=True), "warn"),
        (Fact("requeue delay", seconds=121.0, why="it did not start again within 90 s (Priority)"), "unknown"),
        (Fact("scancel JOB", why="no step was there to be cancelled"), "unknown"),
    ],
)
def test_signals_that_go_elsewhere_have_a_remedy(fact: Fact, status: str) -> None:
    (check,) = check_facts([fact], {})
    assert check.status == status and check.remedy


SETTINGS = """\
Configuration data as of 2026-11-30T04:12:34
KillWait                = 30 sec
MinJobAge               = 300 sec
PreemptMode             = OFF
ProctrackType           = proctrack/cgroup
TaskPlugin              = task/cgroup,task/affinity
"""


def test_slurms_settings() -> None:
    settings = here.parse_settings(SETTINGS)
    assert settings["TaskPlugin"] == "task/cgroup,task/affinity"
    assert {check.status for check in here.check_settings(settings)} == {"ok"}
    odd = {**settings, "KillWait": "2 sec", "PreemptMode": "REQUEUE"}
    found = named(here.check_settings(odd))
    assert found["KillWait"].status == "warn" and found["preemption"].status == "warn"
    assert [check.status for check in here.check_settings({})] == ["unknown"]


def test_an_archive_that_sbatch_would_misread_fails(tmp_path: Path) -> None:
    root = tmp_path / "a%j"
    root.mkdir()
    assert here.check_archive(root, root, True)[0].status == "fail"
    assert list(root.iterdir()) == []


def test_a_hung_or_missing_command_is_an_answer() -> None:
    assert here.ask(["sleep", "60"], patience=0.2).code is None
    missing = here.ask(["no-such-command"])
    assert missing.code is None and "No such file" in missing.last


def test_the_file_of_notification_urls_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "urls"
    path.write_text("slack://token\n")
    path.chmod(0o644)
    check = here.check_notifications({"DETRUN_NOTIFY_FILE": str(path)})
    assert check is not None and check.status == "fail" and "chmod 600" in check.remedy
    assert "slack" not in str(check)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    check = here.check_notifications({"DETRUN_NOTIFY_FILE": str(path)})
    assert check is not None and check.status == "ok"
    assert here.check_notifications({}) is None


class _Ended:
    """A job that ended before its probe ran."""

    id = "7"

    def __init__(self, stage: str | None, log: str = "") -> None:
        self._stage, self._log = stage, log

    def stage(self) -> str | None:
        return self._stage

    def log(self) -> str:
        return self._log

    def status(self) -> JobStatus:
        return JobStatus("ended", "FAILED", exit="66:0")


@pytest.mark.parametrize(
    ("job", "words", "remedy"),
    [
        (_Ended(None), "did not find the archive on its node (it ended as FAILED 66:0)", "--archive DIR"),
        (_Ended("setup", "line 6: module: not found"), "slurm.setup failed: line 6: module: not found", "slurm.setup"),
        (_Ended("python", "exec: /x/python: not found"), "did not run on the node: exec: /x/python", "install detrun"),
    ],
)
def test_why_a_job_never_began(job: Any, words: str, remedy: str) -> None:
    check = Watched(job, DoctorOptions(), print).never_began()
    assert check.status == "fail" and words in check.measured and remedy in check.remedy


@pytest.mark.slow
def test_one_machine_is_looked_at_without_slurm(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    ran = detrun("doctor", str(recipe), "--json", cwd=tmp_path)
    document = json.loads(ran.out)
    status = {check["name"]: check["status"] for check in document["checks"]}
    assert ran.code == document["exit_code"] == 0, ran.explain()
    assert status["torch"] == status["launch.command"] == status["the program's file"] == "ok"
    assert document["schema_version"] == 1 and document["job"] is None
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


def test_a_recipe_that_pair_would_refuse_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, launch={"nodes": 2})
    ran = detrun("doctor", str(recipe), cwd=tmp_path)
    assert ran.code == 2 and "one machine is one node" in ran.err, ran.explain()
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


def test_a_slurm_recipe_without_slurm_is_not_ready(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, cluster="slurm")
    python = tmp_path / "bin"
    python.mkdir()
    ran = detrun("doctor", str(recipe), cwd=tmp_path, env={"PATH": str(python)})
    assert ran.code == 4, ran.explain()
    assert ran.out.startswith("NOT READY") and "missing: sbatch" in ran.out
    assert "remedy: put Slurm's bin folder on PATH" in ran.out
