"""`extproc demo`: a chat workload through a real Envoy, round robin against the picker, and the figures of both.

`processes` is also used by the benchmark and the end-to-end tests. The model servers live in `extproc.sim`.
"""
