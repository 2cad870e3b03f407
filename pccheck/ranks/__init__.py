"""How the ranks of a job hear of each other, and what they agree on: places, words, verdicts, worlds."""
