"""Fusion rules that come with the package; each names where the kernel exists."""
