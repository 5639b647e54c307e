"""The scheduler: events in, commands out, the time passed in.

Nothing here does I/O, reads a clock, draws a random number or knows gRPC, so that a simulator can run the same code on
a simulated clock, network and disk. `Core.handle(event, now)` is total: bad input yields a rejection, an exception is a
bug of ours. Begin with scheduler.py: Core has the owners of state as attributes.
"""
