"""The papers' studies on a model or a trace that the user has: tables, figures, JSON."""
