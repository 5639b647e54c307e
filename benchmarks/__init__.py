"""What we claim about speed, reproducible: python -m benchmarks --help. Figures and ratios are in docs/performance.md."""
