"""Weights at work: what runs inside a model's forward pass, in torch."""
