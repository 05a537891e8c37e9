"""Which endpoint holds which prompt prefix: prompt bytes to chained block hashes (`blocks`), and the index over them.

`tree` is the radix tree and its structural moves, `index` the policy: recency, capacity, speculation, correction.
`text` classifies text, `tokens` estimates the number of tokens of a prompt, `token_deltas` learns it from the engines'
counters; `promises` decides when missing cache hits prove that entries are gone. Reading prompts out of bodies
(`request`) and the state of endpoints (`pool`) are not here.
"""
