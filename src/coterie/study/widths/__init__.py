"""Widths on one model: what the paper's tables and figures show, measured here. Source: CRISP §2, §5, A.1-A.5."""
