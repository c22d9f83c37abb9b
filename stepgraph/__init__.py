"""stepgraph: one training step, operator by operator."""
