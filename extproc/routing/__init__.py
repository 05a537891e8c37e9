"""From request, endpoint snapshots and prefix match to a `Decision`: filters, scorers, pickers, strategies, scheduler.

Not here: how snapshots and matches are made (`pool`, `prefix`), and what a decision changes (`router`). Everything here is
a pure function of its arguments, but for a round-robin position and a cached hash ring.
"""
