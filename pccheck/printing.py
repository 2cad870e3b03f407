"""How `pccheck inspect` tells what an audit found, to people and to programs (floor 4: imports reports, rich)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pccheck import format
from pccheck.reading.listing import CheckFacts
from pccheck.reports import Damage, SlotReport, StoreReport, WorldReport, exit_code, world_reports
from pccheck.version import __version__

_STATE_STYLES = {"published": "bold green", "unreadable": "bold red", "filling": "yellow", "abandoned": "magenta"}
_STATE_STYLES |= {"linked": "bold green", "unfinished": "yellow"}
_STATE_STYLES |= {"complete": "bold green", "incomplete": "yellow", "damaged": "bold red"}  # of all ranks
_VERDICT_STYLES = {"ok": "green", "damaged": "bold red", "reused": "yellow", "-": "dim"}
_METADATA_CHARACTERS = 300
_LEAVES_SHOWN = 8
_RANKS_SHOWN = 8
_LEFT = ("file", "state", "verdict")
_UNBOUNDED = 10_000  # columns
_WIDE = 100  # columns from which on there is room for what one can do without


def plain(text: str) -> str:
    """Give text that cannot move the cursor or colour the terminal, whatever a file holds: such characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def print_whole(table: Table, console: Console) -> None:
    """Print a table with nothing of it cut: where the terminal is too narrow, that wraps it."""
    table.width = console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum
    console.print(table, crop=False, no_wrap=True, overflow="ignore")


# -- text --------------------------------------------------------------------------------------------------------------


def show(reports: list[StoreReport], console: Console, *, verify: bool, now_s: float) -> None:
    """Print a section for each store, and one line that sums up.

    Args:
        reports: what the audit found.
        console: where to print; its width decides on the lay-out.
        verify: whether payloads were read.
        now_s: Unix time that ages count from.
    """
    for report in reports:
        _show_store(report, console, now_s)
    valid, damaged = sum(r.valid for r in reports), sum(r.damaged for r in reports)
    empty = sum(not r.valid for r in reports if r.kind == "store" and not r.is_of_links)
    text = Text(f"{_count(valid, 'valid checkpoint')}, " + (f"{damaged} damaged" if damaged else "nothing damaged"))
    text.stylize("bold green" if exit_code(reports) == 0 else "bold red")
    worlds = world_reports(reports)
    whole = sum(not world.missing and not world.damaged for world in worlds)
    if empty and len(reports) > 1 and not whole:  # a job that went on with fewer ranks leaves empty stores
        text.append(f"; {_count(empty, 'store')} without a valid checkpoint", "bold red")
    if any(report.rank is not None for report in reports):
        _show_worlds(worlds, console)
        text.append(f"; {whole or 'no'} checkpoint{'s' * (whole != 1)} of all ranks", "" if whole else "bold red")
    if valid:
        text.append("  (every byte verified)" if verify else "  (payloads not read; --verify reads them)", "dim")
    console.print(text, soft_wrap=True)


def _show_worlds(worlds: list[WorldReport], console: Console) -> None:
    """Print which checkpoints the stores of all ranks hold together."""
    console.print(Text("all ranks", "bold"))
    console.print()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for name in ("step", "counter", "run", "ranks", "state", ""):
        table.add_column(name, justify="left" if name in ("state", "") else "right", overflow="fold")
    for world in worlds:
        table.add_row(
            str(world.step),
            str(world.counter),
            str(world.incarnation),
            str(world.world),
            Text(world.state, _STATE_STYLES.get(world.state, "")),
            "; ".join(
                f"{what} {', '.join(map(str, ranks[:_RANKS_SHOWN]))}{' and more' * (len(ranks) > _RANKS_SHOWN)}"
                for what, ranks in (("not in rank", world.missing), ("damaged in rank", world.damaged))
                if ranks
            ),
        )
    console.print(table if worlds else "  no checkpoints yet")
    console.print()


def _show_store(report: StoreReport, console: Console, now_s: float) -> None:
    console.print(Text(plain(report.path), "bold"), soft_wrap=True)
    if report.check is not None:
        for label, value, style in _header(report, report.check):
            console.print(Text.assemble((f"  {label:<10}", "dim"), (plain(value), style)), soft_wrap=True)
    console.print()
    if report.is_of_orbax:
        console.print("  these are steps of Orbax's own handlers, which pccheck does not verify", soft_wrap=True)
        console.print()
    if report.slots:
        console.print(_table(report.slots, now_s, wide=console.width >= _WIDE, fold=report.folders))
    else:
        console.print("  no slot files" + ("" if report.is_of_links else " yet"))
    console.print()
    shown = list({slot.identity: slot for slot in report.slots if slot.metadata}.values())
    for slot in shown:
        line = plain(json.dumps(slot.metadata, ensure_ascii=False))
        if len(line) > _METADATA_CHARACTERS:
            line = line[:_METADATA_CHARACTERS] + "…"
        console.print(Text.assemble((f"  step {slot.step}  ", "dim"), line), soft_wrap=True)
    if shown:
        console.print()
    damages = [(slot, damage) for slot in report.slots for damage in slot.damages]
    for slot, damage in damages:
        console.print(Text.assemble("  ", (plain(slot.name), "bold red"), ": ", _damage(damage)), soft_wrap=True)
    if damages:
        console.print()


def _header(report: StoreReport, check: CheckFacts) -> Iterable[tuple[str, str, str]]:
    if check.store_id is not None:
        yield "store", check.store_id.hex(), ""
    if check.problem is not None:
        yield "CHECK", check.problem, "bold red" if check.damaged else "yellow"
        return
    word = "names no checkpoint yet"
    if check.word != format.NO_WORD:
        word = f"names counter {format.word_counter(check.word)} in slot {format.word_slot(check.word)}"
        if report.published is None:
            word += ", which is not here; the next writer sets it right"
    if check.links:
        yield "kind", "a store of links: its checkpoints are in the folders that they were linked into", ""
        word = "names none"
    yield "CHECK", f"fine; CHECK_ADDR {word}", ""
    yield "runs", f"incarnation {check.incarnation}, last counter {check.last_counter}", ""
    if check.holder:
        yield "writer", check.holder, ""
    if check.abandoned.ranges:
        ranges = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in check.abandoned.ranges)
        yield "abandoned", f"counters {ranges}", "magenta"


def _table(slots: Iterable[SlotReport], now_s: float, *, wide: bool, fold: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0), show_edge=False)
    names = ["file", "step", "counter", "run", "state", "size", "age", "verdict"]
    if wide:
        names[7:7] = ["saved (UTC)", "leaves"]
    for name in names:
        side: Literal["left", "right"] = "left" if name in _LEFT else "right"
        whole = name != "file" or not fold  # long names of files in folders fold, so that nothing else does
        table.add_column(name, justify=side, no_wrap=whole, overflow="fold")
    for slot in slots:
        size = slot.file_bytes if slot.payload_bytes is None else slot.payload_bytes
        saved = (_iso(slot.time_ns) or "-")[:19].replace("T", " ")
        table.add_row(
            Text(plain(slot.name)),
            _number(slot.step),
            _number(slot.counter),
            _number(slot.incarnation),
            Text(slot.state, _STATE_STYLES.get(slot.state, "")),
            "-" if slot.state == "of Orbax" else _size(size),
            _age(slot.time_ns, now_s),
            *((saved, _number(slot.leaves)) if wide else ()),
            Text(slot.verdict, _VERDICT_STYLES[slot.verdict]),
        )
    return table


def _damage(damage: Damage) -> str:
    text = damage.reason
    if damage.length:
        text += f", bytes {damage.offset}..{damage.offset + damage.length}"
    if damage.leaves:
        more = len(damage.leaves) - _LEAVES_SHOWN
        text += f", in {', '.join(damage.leaves[:_LEAVES_SHOWN])}" + (f" and {more} more" if more > 0 else "")
    return plain(text)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _age(time_ns: int | None, now_s: float) -> str:
    if time_ns is None:
        return "-"
    seconds = now_s - time_ns / 1e9
    if seconds < 0:
        return "future" if seconds < -1 else "0 s"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(reports: list[StoreReport], *, verify: bool) -> dict[str, Any]:
    """Give the same facts under the names that docs/cli.md lists; they are stable."""
    return {
        "pccheck": __version__,
        "format": format.VERSION,
        "verified": verify,
        "exit_code": exit_code(reports),
        "stores": [_store_json(report) for report in reports],
        "all_ranks": [_world_json(world) for world in world_reports(reports)],
    }


def _store_json(report: StoreReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "kind": report.kind,
        "valid": report.valid,
        "damaged": report.damaged,
        "check": None if report.check is None else _check_json(report.check),
        "slots": [_slot_json(slot) for slot in report.slots],
    }


def _world_json(world: WorldReport) -> dict[str, Any]:
    return {
        "step": world.step,
        "counter": world.counter,
        "incarnation": world.incarnation,
        "world": world.world,
        "state": world.state,
        "missing": list(world.missing),
        "damaged": list(world.damaged),
        "abandoned": world.abandoned,
    }


def _check_json(check: CheckFacts) -> dict[str, Any]:
    return {
        "state": "damaged" if check.damaged else "missing" if check.problem else "fine",
        "problem": check.problem,
        "store_id": None if check.store_id is None else check.store_id.hex(),
        "check_addr": _word_json(check.word),
        "peer_addr": _word_json(check.peer_word),
        "incarnation": check.incarnation,
        "last_counter": check.last_counter,
        "abandoned": [list(bounds) for bounds in check.abandoned.ranges],
        "holder": check.holder,
        "links": check.links,
    }


def _word_json(word: int) -> dict[str, int] | None:
    if word == format.NO_WORD:
        return None
    return {"counter": format.word_counter(word), "slot": format.word_slot(word)}


def _slot_json(slot: SlotReport) -> dict[str, Any]:
    return {
        "file": slot.name,
        "state": slot.state,
        "verdict": slot.verdict,
        "verified": slot.verified,
        "step": slot.step,
        "counter": slot.counter,
        "incarnation": slot.incarnation,
        "base": slot.base,
        "rank": slot.rank,
        "world": slot.world,
        "file_bytes": slot.file_bytes,
        "payload_bytes": slot.payload_bytes,
        "leaves": slot.leaves,
        "time": _iso(slot.time_ns),
        "metadata": slot.metadata,
        "damages": [
            {"reason": d.reason, "offset": d.offset, "length": d.length, "leaves": list(d.leaves)} for d in slot.damages
        ],
    }


def _iso(time_ns: int | None) -> str | None:
    if time_ns is None:
        return None
    try:
        return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None  # a year that no calendar has
