"""Which endpoint holds which prompt prefix: prompt bytes to chained block hashes (`blocks`), and the index over them.

`tree` is the radix tree and its structural moves, `index` the policy: recency, capacity, speculation, correction.
`text` tells kinds of text, `tokens` estimates how many tokens a prompt has, `token_deltas` lets the engines' counters teach it;
`promises` judges whether what an engine lacked says anything of the rest of the index. Reading prompts out of bodies (`request`) and the endpoints' life (`router`) are not here.
"""
