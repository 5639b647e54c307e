"""Benchmarks of the claims in docs/performance.md: python -m benchmarks --help."""
