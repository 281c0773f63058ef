"""Many devices: experts spread over processes by a placement, tokens sent once to each device they visit."""
