#!/bin/sh
# detrun nightly as a Slurm job: for sbatch, for a line of scrontab, or for cron on a login node.
#
#   sbatch --partition=debug slurm/nightly.sh /abs/recipes --archive /abs/archive
#   30 2 * * * sbatch --quiet --partition=debug /abs/slurm/nightly.sh /abs/recipes --archive /abs/archive
#
# Everything after the script's name goes to `detrun nightly`. The job itself computes nothing: it submits the arms as
# jobs of their own, waits for them and judges. DETRUN_PYTHON names the Python that has detrun, DETRUN_NOTIFY_FILE the
# file with the addresses to notify (chmod 600). A second job of the same night follows the first, and takes over if
# that one dies.
#SBATCH --job-name=detrun-nightly
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=12:00:00
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@60

exec "${DETRUN_PYTHON:-python3}" -m detrun nightly "$@"
