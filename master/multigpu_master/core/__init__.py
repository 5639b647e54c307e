"""The scheduler: events in, commands out, the time passed in.

Nothing here does I/O, reads a clock, draws a random number or knows gRPC, so that a simulator can run the very same
code on a simulated clock, network and disk. `Core.handle(event, now)` is total: bad input yields a rejection, an
exception means a bug of ours.

    model.py      the nouns: Spec, Task, Lease, Worker, Outcome
    events.py     what happens to the core, and what it wants done
    lanes.py      which task is next: lanes of interchangeable tasks in order of priority and age
    fleet.py      the workers: windows, pace, who is eligible
    core/placement/ranking.py  which worker gets a task: rankings, pins
    timers.py     when something is due
    ledger.py     what there is, and the accounts of it
    admission.py  who is let in
    attempts.py   what becomes of a task whose lease ends otherwise than well
    dispatch.py   gives tasks to workers
    sessions.py   the workers' events
    operators.py  the operators' events
    scheduler.py  the Core itself, and the events of clients and of the journal
    explain.py    why a task is where it is
"""
