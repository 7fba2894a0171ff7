"""A small real training program with faults planted below every hook: what tracing costs, and what it finds."""
