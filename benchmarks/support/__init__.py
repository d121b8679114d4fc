"""What the benchmark scripts share. They run as `python benchmarks/NAME.py`, so that this is the package `support`."""
