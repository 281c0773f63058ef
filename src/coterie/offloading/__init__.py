"""Running a model whose experts do not fit: from an expert store on disk, within a byte budget.

The function is `coterie.offload`; the package has another name, since importing a module of that name would hide it.
"""
