"""How the signals of endpoints get here: when to fetch which page, fetching it, and reading it.

`engines`, `page`, `signals`, `selection` and `scrape_interval` do no I/O. What is believed of an endpoint lives in `extproc.pool`.
"""
