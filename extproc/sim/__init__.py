"""A vLLM replica as a model, and that model behind vLLM's HTTP API: `extproc model-server`.

`engine`, `kv_blocks`, `presets` and `tokens` are pure: no clock, no I/O, no global random, so the same engine also runs under a virtual
clock. The other modules put it behind HTTP. Routing is not done here.
"""
