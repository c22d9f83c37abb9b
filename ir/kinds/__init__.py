"""The op table, one file per family of kinds."""
