"""What the picker costs: `make bench`, or `python -m bench`. Figures go to `out/bench.json`."""
