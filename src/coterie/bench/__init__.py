"""Benchmarks that ship: what the package claims of speed, measured on the machine at hand."""
