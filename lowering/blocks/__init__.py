"""Model blocks: each emits logical forward ops, with no parallelism in sight."""
