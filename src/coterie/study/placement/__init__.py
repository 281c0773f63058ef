"""Studies of placements on recorded routing: CAP's figures on traces that you have."""
