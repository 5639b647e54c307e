"""What we claim about speed, reproducible: python -m benchmarks --help. The figures are in docs/performance.md."""
