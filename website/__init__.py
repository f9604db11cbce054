"""What builds the documentation: hooks of MkDocs, docstrings as Markdown, the reference of the command line."""
