"""Starts the arms of an experiment: on Slurm, on this machine, or (in tests) on a scripted fake."""
