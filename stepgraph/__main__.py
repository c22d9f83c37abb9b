"""`python -m stepgraph`."""

from stepgraph.cli import main

if __name__ == "__main__":
    main()
