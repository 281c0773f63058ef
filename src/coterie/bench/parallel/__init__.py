"""Expert parallelism between real processes, each behind a rate limit of its own: CAP Figs. 11 to 14, Table II."""
