"""What serving engines read: each format written, read back by the engine's own rule, and checked."""
