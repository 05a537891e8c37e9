"""The state of each endpoint: scraped signals, our own requests in flight, passive health.

`Pool` joins them into immutable snapshots. Scraping (`edge.scraping`), the prefixes an endpoint holds (`prefix`) and the
scoring of snapshots (`routing`) are not here.
"""
