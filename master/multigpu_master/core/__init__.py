"""The scheduler. Its caller passes in events and the time, and executes the commands that the scheduler returns.

Nothing here does I/O, reads a clock, draws a random number or knows gRPC, so that a simulator can run the same code on
a simulated clock, network and disk. `Core.handle(event, now)` is total: it answers a task that it can't accept with a
Rejection, and an exception is always a bug of the master. Begin with scheduler.py: Core.__init__ creates the parts.
"""
