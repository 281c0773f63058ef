"""What may be skipped: destinations (devices) a token need not visit."""
