"""Benchmarks beside tests: `python -m tests.bench` prints what saving costs a training loop, here and with peers."""
