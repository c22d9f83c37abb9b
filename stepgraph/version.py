"""The version, as a constant: reading package metadata would cost 30 ms at every start."""

VERSION = "0.1.0"
