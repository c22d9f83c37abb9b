"""stepgraph.lowering."""

if __name__ == "lowering":
    raise ImportError("import stepgraph.lowering instead: 'lowering' alone would be a second copy of every class")
