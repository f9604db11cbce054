"""Checks: one module for each line of the report, from a target to findings."""
