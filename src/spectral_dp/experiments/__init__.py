"""Training runs, comparisons and the paper's tables: what the command line does, as a library."""
