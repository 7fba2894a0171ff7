"""Why runs differ: a catalog of root causes as data, what is known of operations, and what fits the facts at hand."""
