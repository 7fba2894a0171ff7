"""A small, real hybrid language model and its training program, with faults that can be planted in it.

Run as `python -m detrun.workloads.hybrid`, alone or under torchrun. State-space, attention and
mixture-of-experts blocks, a multi-token-prediction head, real text, real checkpoints: everything a large
pretraining run has that can break determinism, small enough that thirty steps take a few seconds on two CPU
cores.
"""
