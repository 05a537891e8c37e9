"""From request, endpoint snapshots and prefix match to a `Decision`: filters, scorers, pickers, strategies, scheduler.

How snapshots and matches come about is not here (`pool`, `prefix`), nor what follows from a decision (`router`, `edge`):
everything here is a pure function of its arguments, but for a round-robin position and a cached hash ring.
"""
