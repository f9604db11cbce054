"""The networks, a file for each family, with the parameter names under which their weights are published.

Each is a ``backbone.ImageBackbone``, or for text ``minilm.MiniLM``, and can be asked for what comes before its head.
"""
