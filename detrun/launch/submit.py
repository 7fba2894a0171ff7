"""Hands one job to submitit, in a process of its own: `python -m detrun.launch.submit REQUEST`.

A process of its own has its own session, so that neither a Ctrl-C nor a closed terminal reaches a job on
this machine or falls between sbatch and the file that submitit moves after it; and it has an environment
of its own, without what an enclosing Slurm job or launcher left in ours.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from detrun.errors import SubmissionError
from detrun.launch.cluster import JobRequest, SubmittedJob
from detrun.launch.spec import JobSpec
from detrun.launch.submitted import read_submitted, write_submitted

# submitit's local executor ends a job after this many minutes; ours are ended by the watchdog.
YEARS = 5 * 365 * 24 * 60
REFUSED = 3
INTERRUPTED_PATIENCE = 60.0

_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT"}
_SCRUBBED_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SUBMITIT_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "TORCHELASTIC_",
    "DETRUN_",
)
_SCRUBBED = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what describes another job or another rank (a nightly runs inside one)."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name in _SCRUBBED or name.startswith(_SCRUBBED_PREFIXES))
    }


def submit(request: JobRequest, kind: str, environment: Mapping[str, str]) -> SubmittedJob:
    """Submits and returns the job; SubmissionError with the scheduler's own words where it refuses."""
    folder = request.spec.folder
    request.spec.write()
    path = folder / "request.json"
    rest = {key: value for key, value in asdict(request).items() if key != "spec"}
    path.write_text(json.dumps({"kind": kind, "spec": str(folder / "spec.json"), **rest}, indent=1) + "\n")
    log_path = folder / "submit.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "detrun.launch.submit", str(path)],
            env=clean_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # Left alone between sbatch and the note of its id, the job would be nobody's: it is a matter of moments.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=INTERRUPTED_PATIENCE)
        raise
    job = read_submitted(folder)
    if code == 0 and job is not None:
        return job
    said = [line for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if code == REFUSED:
        raise SubmissionError(f"the job of {request.spec.job} was refused: {' '.join(said[-3:])}")
    raise SubmissionError(f"could not submit {request.spec.job}", hint=f"see {log_path}")


def main(request_path: str) -> int:
    """Submits one request and notes the job's id in submitted.json beside it."""
    import submitit  # heavy, and only this process needs it
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from detrun.launch.driver import run_job

    request: dict[str, Any] = json.loads(Path(request_path).read_text(encoding="utf-8"))
    spec = JobSpec.read(Path(request["spec"]))
    try:
        if request["kind"] == "slurm":
            # Without `exec` the batch shell would stand between scancel and our driver, die of its signal and
            # leave the ranks behind.
            python = f"exec {shlex.quote(sys.executable)}"
            executor: submitit.Executor = submitit.SlurmExecutor(folder=spec.folder, python=python)
            executor.update_parameters(**slurm_parameters(spec, request))
        else:
            executor = submitit.LocalExecutor(folder=spec.folder)
            executor.update_parameters(timeout_min=YEARS, stderr_to_stdout=True)
        job = executor.submit(run_job, request["spec"])
    except (FailedJobError, FailedSubmissionError, RuntimeError) as error:
        print(str(error).removeprefix("sbatch: error: ").strip(), file=sys.stderr)
        return REFUSED
    write_submitted(spec.folder, SubmittedJob(spec.job, job.job_id, time.time(), _detail(request["kind"], job.job_id)))
    return 0


def _detail(kind: str, job_id: str) -> dict[str, str]:
    if kind == "slurm":
        return {}
    from detrun.records.processes import describe_process

    return describe_process(int(job_id))


def slurm_parameters(spec: JobSpec, request: Mapping[str, Any]) -> dict[str, Any]:
    """submitit's parameters for one job.

    With use_srun=False the callable runs in the batch step and starts the steps itself. None drops
    submitit's default wckey, which sites with their own would refuse.
    """
    first = spec.segments[0]
    options: dict[str, Any] = {
        # A requeued arm would start again in a folder that already holds records, unless that is what is asked for.
        "requeue" if request.get("requeue") else "no-requeue": True,
        # submitit always asks for a signal before the time limit, and USR2 would kill torchrun's agents;
        # this one reaches the batch shell alone and does nothing there.
        "signal": "B:CONT@60",
        "kill-on-invalid-dep": "yes",
    }
    if request["after"]:
        options["dependency"] = f"afterany:{request['after']}"
    if request["hold"]:
        options["hold"] = True
    options.update(request["options"])
    return {
        "job_name": spec.job,
        "time": request["minutes"],
        "nodes": first.nodes,
        "ntasks_per_node": first.ranks_per_node,
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
        # submitit's script goes on after a line that fails; an arm without its modules must not run.
        "setup": ["set -e", *request["setup"], "set +e"] if request["setup"] else None,
        "additional_parameters": {
            key: value for key, value in options.items() if value is not None and value is not False
        },
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
