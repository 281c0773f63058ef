"""Weights at rest: what checkpoint files hold."""
