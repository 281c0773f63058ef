"""Machines you don't have: what a policy would do, counted on a recorded trace."""
