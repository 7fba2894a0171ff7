"""What makes a training run repeatable at all: environment variables and torch's own switches."""
