"""Targets: what can be audited. A function, our training step, or that of Opacus, all behind one interface."""
