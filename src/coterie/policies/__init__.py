"""When weights move: which blocks of neurons stay in a small memory, what is fetched ahead, in which order (no I/O)."""
