"""stepgraph.passes."""

if __name__ == "passes":
    raise ImportError("import stepgraph.passes instead: 'passes' alone would be a second copy of every class")
