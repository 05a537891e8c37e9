"""`make hard-days`: faults on top of one another against a real Envoy, the picker and eight simulated engines.

What happens when is drawn from a seed before anything starts (`schedule`) and acted out (`acts`, `hostile`) while honest clients (`clients`) ask through
the picker and through Envoy's own round robin by turns; engines keep a journal of all they were asked (`engines`), and `judge` holds each answer and the
picker itself to what must always be true. What the picker costs, and how well it decides, is measured elsewhere in `bench`.
"""
