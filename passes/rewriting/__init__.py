"""Rewrites that are handed to lowering: what computes the same in other ops."""
