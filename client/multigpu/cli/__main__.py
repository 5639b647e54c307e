"""`python -m multigpu.cli` is mgpuctl."""

from multigpu.cli import main

main()
