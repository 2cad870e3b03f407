"""Measures what saving costs a training loop, here and with peers, and prints tables (bench: imports all its rooms).

Arrows: loop_tables, cost_tables, trainer_tables > scale, loops, measures, trainers, ranks > peers > contenders, raw >
states, trained; advice_tables > scale, loops; controller_tables > scale, states; jax_tables > scale, jax_measures >
jax_contenders, loops, measures > jax_states, contenders, states; beside them lab, disks, machine, tables.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from . import advice_tables, controller_tables, cost_tables, jax_tables, loop_tables, trainer_tables
from .disks import TOOL, SlowDisk
from .lab import Lab
from .machine import describe
from .scale import FULL, QUICK, Bench
from .tables import show, show_machine

ALL = {**loop_tables.TABLES, **trainer_tables.TABLES, **cost_tables.TABLES, **jax_tables.TABLES}
ALL |= advice_tables.TABLES
ALL |= controller_tables.TABLES


def main() -> int:
    """Measure what is asked for, print each table as soon as it is there, and write all as JSON if told to."""
    options = _parser().parse_args()
    console = Console(width=max(170, Console().width), highlight=False)
    work = Path(tempfile.mkdtemp(prefix="pccheck-bench-", dir=options.directory))
    scale = QUICK if options.quick else FULL
    bench = Bench(
        lab=Lab(60.0 if options.quick else 900.0),
        scale=replace(scale, rounds=options.rounds or scale.rounds),
        directory=work,
        match=options.match,
        slow_disk=SlowDisk(options.slow_disk, work / "slow-disk"),
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    facts = describe(work)
    show_machine(facts, console)
    tables = []
    try:
        for name in options.only or ALL:
            table = ALL[name](bench)
            tables.append(table)
            show(table, console)
            if options.json:
                found = {"machine": facts, "tables": [t.plain() for t in tables]}
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.partition(" (")[0] + ".")
    parser.add_argument("--quick", action="store_true", help="everything small and once: it works")
    parser.add_argument("--rounds", type=int, metavar="N", help="of the training loops; default: 3, quick: 1")
    parser.add_argument("--only", action="append", choices=list(ALL), help="this table; may be given several times")
    parser.add_argument(
        "--match",
        default="",
        metavar="REGEX",
        help="only the loops whose 'column: contender' matches, only the rows of trainers whose 'row, kind: contender' "
        "does, of ranks, snapshots, orbax-memory and orbax-restore whose row does; and what those are compared with",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    parser.add_argument(
        "--directory", type=Path, default=None, help="a folder on the disk to measure; default: for temporary files"
    )
    parser.add_argument(
        "--slow-disk", type=Path, default=TOOL, metavar="TOOL", help="makes a disk limited by the kernel: TOOL "
        "up|rate|down MOUNTPOINT [MiB/s] [GiB], exit status 3 = cannot",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
