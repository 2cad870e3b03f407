"""The verbs of the command line, one room each (floor 4: imports below; `cli` puts them together)."""
