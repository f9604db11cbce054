"""Helpers under the import paths that Opacus has for them, so that a script changes by the package's name only."""
