"""All that is known of vLLM's inside: one module a minor version, so that what changes between them stays here."""
