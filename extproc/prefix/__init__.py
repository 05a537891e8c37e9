"""Which endpoint holds which prompt prefix: prompt bytes to chained block hashes (`blocks`), and the index over them.

`tree` is the radix tree and its structural moves, `index` the policy: recency, capacity, speculation, correction.
`tokens` converts bytes to tokens. Reading prompts out of bodies (`request`) and the endpoints' life (`router`) are not here.
"""
