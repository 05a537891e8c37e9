"""What the picker knows of each endpoint: scraped signals, its own requests in flight, passive health.

`Pool` joins them into immutable snapshots. How a page is fetched (`edge.scraping.scraper`), which prefixes an endpoint holds
(`prefix`) and what a snapshot is worth (`routing`) is not here.
"""
