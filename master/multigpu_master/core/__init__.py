"""The scheduler: events in, commands out, the time passed in.

Nothing here does I/O, reads a clock, draws a random number or knows gRPC, so that a simulator can run the very same code on
a simulated clock, network and disk. `Core.handle(event, now)` is total: bad input yields a rejection, an exception means a
bug of ours.

    model.py      the nouns: Spec, Task, Lease, Worker, Outcome
    events.py     what happens to the core, and what it wants done
    lanes.py      which task is next: lanes of interchangeable tasks in order of priority and age
    placement.py  which worker gets it: eligibility, rooms, rankings
    fleet.py      the workers: sessions, windows, pace
    scheduler.py  the Core itself
    explain.py    why a task is where it is
"""
