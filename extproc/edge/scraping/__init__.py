"""Scraping: when to fetch which page of an endpoint, fetching it, and reading signals from it.

`planner` decides, `scraper` waits and fetches with `source` and `http_client`; `signals`, `page` and `engines` read a page,
`selection` and `scrape_interval` hold two of the planner's rules. Only `scraper`, `source`, `http_client` and
`cpu_share` touch the network or a clock. What is believed of an endpoint lives in `extproc.pool`.
"""
