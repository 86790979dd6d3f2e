"""All-reduce over messages between ranks: who sends what to whom as plain values, and who does it.

`schedules` says it, `exchange` carries it out over MPI, `waiting` is how it waits, `arithmetic`
what it computes.
"""
