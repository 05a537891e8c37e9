"""A vLLM replica as a model, that model behind HTTP, and what drives and measures a fleet of them.

`engine`, `kv_blocks`, `presets` and `tokens` are pure: no clock, no I/O, no global random, so the same engine also runs under a virtual
clock. `engine_loop`, `endpoints` and `model_server` put it behind vLLM's HTTP API (`extproc model-server`). Routing is not done here.
"""
