"""Figures that the documentation quotes, measured: each module prints a line a person reads and writes JSON."""
