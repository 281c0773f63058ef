"""Formats that traces come in: `base` is the contract, `registry` the names, and each other module one format."""
