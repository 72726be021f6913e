"""How plans reach a rank and records leave it: agreement between ranks, iterators, store and planners."""
