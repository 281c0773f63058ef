"""What a change of a model costs in quality: perplexity, distance from a reference, the standard tasks.

`quality.evaluate` is the one entry for texts, `tasks.run_tasks` the one for tasks; both take `change.Change`.
"""
