"""What a trace says: load, co-activation, combinations."""
