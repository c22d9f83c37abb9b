"""overlap: what of each collective is exposed, under a policy."""
