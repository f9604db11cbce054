"""Helpers under the same import paths as in Opacus, so that only the package name of a script changes."""
