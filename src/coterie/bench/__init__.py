"""Benchmarks that users run on their own machine, with bounds beside what was measured."""
