"""How fast a model runs from a store at a byte budget, against other ways and against bounds (CRISP §5)."""
