"""One TOML file per target."""
