"""Fusion: rules as patterns, legality by the framework, kernels as groups over ops that stay in the graph."""
