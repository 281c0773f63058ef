"""Small real inputs that ship with the package."""
