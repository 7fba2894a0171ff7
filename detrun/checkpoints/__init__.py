"""Checkpoint files of training programs, read without the program, without its model, and without running anything
that they hold."""
