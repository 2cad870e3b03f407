"""Runs the command line as `python -m pccheck` (floor 4: imports cli)."""

from pccheck.cli import main

if __name__ == "__main__":
    main()
