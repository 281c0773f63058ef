"""What only a running model can tell: which neurons matter, and which expert of a pair."""
