"""Hostile input: every decoder gets random, damaged and oversize input.

`python -m tests.hostile --inputs 1000000 --seed 1` runs it in this process; `python -m tests.hostile
abuse` exhausts the resources of a real master. A crash is an unexpected exception, a status that blames the master
(UNKNOWN, INTERNAL), a daemon that dies or hangs, or state left behind by a rejected input.
"""
