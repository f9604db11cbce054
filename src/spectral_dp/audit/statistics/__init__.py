"""Statistics: confidence bounds and tests that the checks draw their conclusions with. They know of no target."""
