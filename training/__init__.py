"""Trains the two small models that ship with Coterie; not part of the package."""
