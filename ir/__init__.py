"""stepgraph.ir."""

if __name__ == "ir":
    raise ImportError("import stepgraph.ir instead: 'ir' alone would be a second copy of every class")
