"""Hostile input: every decoder and every door is handed nonsense, damage and too much of everything.

`python -m tests.hostile --inputs 1000000 --seed 1` tries them in this process and at real daemons; `python -m
tests.hostile abuse` spends other people's resources. A crash is an exception that nobody expected, a status that blames
the master (UNKNOWN, INTERNAL), a daemon that dies or hangs, or something that is kept of what was rejected.
"""
