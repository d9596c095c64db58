"""Benchmarks: each runs both sides in turn in one run, prints a table and takes `--json FILE`.  See README.md."""
