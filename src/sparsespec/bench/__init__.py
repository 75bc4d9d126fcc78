"""Benchmarks: what to run, how it is measured and how it is shown."""
