"""Whether an environment may be trained on: gold is 1, doing nothing is 0, and no way of tampering pays."""
