"""What checkpoints cost, run by run: the history beside a store's checkpoints, and the bill made of it.

`runs` and `account` are pure, `history` reads, `recorder` writes, `bills` sums up, `report` puts it together.
"""
