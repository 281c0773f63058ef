"""The verbs, thin: each parses, calls the library, prints."""
