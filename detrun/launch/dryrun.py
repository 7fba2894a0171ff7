"""What would be submitted, without a cluster: the batch script as submitit really writes it.

submitit renders a script only on the way to sbatch. So the same submission is made in a temporary folder
with an `sbatch` first on PATH that accepts everything and runs nothing; what was written is read back.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from detrun.launch.cluster import JobRequest
from detrun.launch.submit import submit

STUB = "#!/bin/sh\necho 'Submitted batch job 1'\n"


def render_batch_script(request: JobRequest) -> str:
    """The batch script of a request, with the paths that the real one would have."""
    with tempfile.TemporaryDirectory(prefix="detrun-dry-run-") as name:
        folder = Path(name).resolve()
        stubs = folder / "bin"
        stubs.mkdir()
        for command in ("sbatch", "srun"):
            (stubs / command).write_text(STUB, encoding="utf-8")
            (stubs / command).chmod(0o755)
        spec = replace(request.spec, experiment=str(folder))
        path = os.pathsep.join([str(stubs), os.environ.get("PATH", os.defpath)])
        job = submit(replace(request, spec=spec), "slurm", {**os.environ, "PATH": path})
        script = (spec.folder / f"{job.id}_submission.sh").read_text(encoding="utf-8")
    return script.replace(str(folder), request.spec.experiment)
