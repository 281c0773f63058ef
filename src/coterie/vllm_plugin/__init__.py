"""Destination pruning and recording inside vLLM; inactive until `COTERIE_CONFIG` names a file.

Nothing here imports Transformers, whose version is vLLM's, nor Numba: vLLM 0.32 on CPUs looks into every object of
every module that is loaded when it starts, and fails at those of Numba's compiler (llvmlite).
"""
