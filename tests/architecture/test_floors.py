"""Arrows point down only: every module has a floor, and imports go to the same floor or below."""

from __future__ import annotations

import re
import subprocess
import sys

FLOORS = {
    4: {"__main__", "cli", "printing", "audit", "reports", "judging", "linkaudit", "commands", "commands.inspect"}
    | {"bill.report", "bill.showing", "bill.metrics", "commands.report"}
    | {"commands.advise", "commands.advice_text", "plots", "plots.goodput"}
    | {"replay.live", "replay.trainer", "replay.contender", "replay.process", "replay.places", "replay.tuned"}
    | {"commands.live_text", "commands.replay", "commands.replay_text", "plots.replay", "plots.timeline"}
    | {"commands.probe"},
    3: {"control.controller", "control.council", "control.lastsave", "control.sensors"}
    | {"checkpointer", "recovery", "view", "links"}
    | {"probing", "probing.place", "probing.survey", "probing.timing", "probing.trials", "probing.readback"},
    2: {"arguments", "store.store", "store.opening", "store.slots", "store.check", "store.books", "store.history"}
    | {"ranks.coordination", "ranks.agreement", "ranks.channel", "ranks.shared_directory", "store.settling"}
    | {"store.neighbours", "store.locking", "store.releasing", "store.disowning", "saving.linkpath"}
    | {"reading.outline", "reading.world", "reading.loading", "reading.reads", "reading.gathering"}
    | {"reading.restored", "reading.committed", "reading.members", "reading.linked", "reading.linkplaces"}
    | {"saving.commit", "saving.save", "saving.flight", "saving.notifier", "saving.captures", "saving.ordering"}
    | {"saving.pipelines", "saving.shadow", "saving.snapshot", "saving.stats", "saving.watch", "saving.unreported"}
    | {"control.flights", "lifetime", "bill.history", "bill.recorder"}
    | {"reading.reader", "reading.chunks", "reading.listing", "reading.places", "reading.restoring", "reading.stored"}
    | {"pipeline.interface", "pipeline.choose", "pipeline.native", "pipeline.portable"}
    | {"pipeline.job", "pipeline.schedule", "pipeline.gather", "pipeline.fills", "pipeline.portable_fills"},
    1: {"storage.volume", "storage.directory", "storage.names", "storage.checkpage", "storage.medium"}
    | {"storage.media", "storage.memory", "storage.fileio", "storage.filesystem", "storage.forks", "storage.outside"}
    | {"storage.buffers", "storage.digest", "storage.whole", "saving.sizing", "saving.background", "_native"}
    | {"state.kinds", "state.numpy_leaves", "state.numpy_dtypes", "state.text_leaves", "state.leaftable"}
    | {"state.assigning", "holding", "deadlines", "holders", "replay.files", "control.notice"}
    | {"dlpack", "state.planner", "state.assembly", "state.describing", "state.owning", "state.filling", "state.shape"},
    0: {"errors", "options", "format", "events", "version", "leaves", "devices", "containers"}
    | {"state.manifest", "state.plan", "state.tree", "state.nodes", "state.paths", "state.forms", "state.structure"}
    | {"state.mismatch", "state.transfer", "state.apart", "state.entries", "state.wanting"}
    | {"state.boxes", "saving.choice", "state.shards", "state.dividing"}
    | {"state.fit", "store.ledger", "store.retention", "ranks.verdicts", "ranks.worlds", "ranks.telling"}
    | {"tuning", "tuning.bills", "tuning.checkfreq", "tuning.domain", "tuning.goodput", "tuning.intervals"}
    | {"tuning.optimum", "tuning.storage"}
    | {"tuning.advice", "tuning.basis", "tuning.comparing", "tuning.explaining", "tuning.helping", "tuning.planning"}
    | {"tuning.units", "tuning.wanted", "tuning.room", "tuning.limits"}
    | {"replay", "replay.trace", "replay.job", "replay.disk", "replay.simulation", "replay.policies"}
    | {"replay.comparing", "replay.policy", "replay.jobs", "replay.steptimes"}
    | {"replay.chronicle", "replay.schedule", "replay.timeline", "replay.told", "replay.training"}
    | {"tuning.law", "tuning.stalls", "tuning.tries", "tuning.windows", "control", "control.meter", "control.rescue"}
    | {"control.asked", "control.deciding", "control.excess"}
    | {"tuning.machine", "tuning.prediction"}
    # the folders: their docstrings say what is in them
    | {"pipeline", "ranks", "reading", "saving", "state", "storage", "store"}
    | {"bill", "bill.runs", "bill.durations", "bill.account", "bill.bills", "bill.deaths"},
}
FLOOR_OF = {f"pccheck.{room}": floor for floor, rooms in FLOORS.items() for room in rooms}
FACADE = "pccheck"  # the package itself hands out the public names of all floors; no room may import it
BESIDE = "pccheck.testing"  # may import every room but cli; no room may import it

FRAMEWORKS = ("torch", "jax", "jaxlib", "orbax", "flax", "tensorstore")
# Looking must not repair: what `inspect` reaches may not hold, even indirectly, the code that writes.
WRITERS = {f"pccheck.store.{room}" for room in ("store", "opening", "books", "check", "slots", "history", "settling")}
WRITERS |= {f"pccheck.store.{room}" for room in ("releasing", "neighbours", "locking", "disowning")}
WRITERS |= {"pccheck.saving.commit", "pccheck.saving.flight", "pccheck.checkpointer", "pccheck.recovery"}
LOOKING = ("commands.inspect", "commands.advise", "printing", "audit", "view", "judging", "linkaudit")
READ_ONLY = {f"pccheck.{room}": WRITERS for room in LOOKING}
READ_ONLY |= {f"pccheck.reading.{room}": WRITERS for room in ("listing", "reader", "places", "restoring", "stored")}
READ_ONLY |= {f"pccheck.reading.{room}": WRITERS for room in ("world", "loading", "committed", "gathering", "members")}
READ_ONLY |= {f"pccheck.reading.{room}": WRITERS for room in ("linked", "linkplaces")}
READ_ONLY |= {f"pccheck.{room}": WRITERS for room in ("bill.history", "bill.report", "bill.metrics", "commands.report")}
# Floor 0 is pure: no I/O, no threads, no clock.
IMPURE = {"os", "io", "pathlib", "time", "threading", "socket", "mmap", "subprocess", "concurrent", "queue", "tempfile"}


def graph(core):
    """Give {module: [(line, module of the house that it imports)]}."""
    names = frozenset({*FLOOR_OF, FACADE, BESIDE, *(m.name for m in core)})
    return {m.name: [(at, to) for at, to in m.imports(names) if to.split(".")[0] == "pccheck"] for m in core}


def test_every_room_has_a_floor(core):
    names = {m.name for m in core}
    homeless = sorted(n for n in names - set(FLOOR_OF) - {FACADE} if not (n + ".").startswith(BESIDE + "."))
    assert not homeless, f"modules on no floor: {homeless}; enter them in FLOORS of {__file__}"
    gone = sorted(set(FLOOR_OF) - names - {"pccheck._native"})
    assert not gone, f"FLOORS of {__file__} holds modules that are not there: {gone}"


def test_arrows_point_down(core):
    wrong = []
    paths = {m.name: m.path for m in core}
    for name, edges in graph(core).items():
        for line, to in edges:
            if name == FACADE:
                allowed = not to.startswith((BESIDE, "pccheck.cli"))
            elif name.startswith(BESIDE):
                allowed = to != "pccheck.cli"
            else:
                allowed = to in FLOOR_OF and FLOOR_OF[to] <= FLOOR_OF.get(name, -1)
            if not allowed:
                wrong.append(f"{paths[name]}:{line}: floor {FLOOR_OF.get(name)} imports {to}, {FLOOR_OF.get(to)}")
    assert not wrong, "arrows that point up or out of the house:\n" + "\n".join(wrong)


def reachable(edges, start):
    """Give everything that `start` imports, directly or not, with the way that leads there."""
    ways, open_ends = {start: [start]}, [start]
    while open_ends:
        here = open_ends.pop()
        for _, to in edges.get(here, []):
            if to not in ways:
                ways[to] = [*ways[here], to]
                open_ends.append(to)
    return ways


def test_no_room_imports_itself_by_a_detour(core):
    edges = graph(core)
    loops = [
        " -> ".join([name, *reachable(edges, to)[name]])
        for name in edges
        for _, to in edges[name]
        if name in reachable(edges, to)
    ]
    assert not loops, "circles of imports:\n" + "\n".join(sorted(loops))


def test_looking_cannot_repair(core):
    edges, wrong = graph(core), []
    for name, forbidden in READ_ONLY.items():
        ways = reachable(edges, name)
        wrong += [" -> ".join(ways[to]) for to in sorted(forbidden & ways.keys())]
    assert not wrong, "read-only rooms reach code that writes:\n" + "\n".join(wrong)


def test_floor_0_is_pure(core):
    wrong = [
        f"{m.path}:{line}: floor 0 imports {name}"
        for m in core
        if FLOOR_OF.get(m.name) == 0
        for line, name in m.imports(frozenset())
        if name.split(".")[0] in IMPURE
    ]
    assert not wrong, "no I/O, no threads, no clock on floor 0:\n" + "\n".join(wrong)


def test_the_first_docstring_line_names_the_floor(core):
    wrong = []
    for m in core:
        if m.name in FLOOR_OF and not m.is_package:
            said = re.search(r"floor (\d)", m.text.split("\n", 1)[0])
            if said is None or int(said[1]) != FLOOR_OF[m.name]:
                wrong.append(f"{m.path}:1 must say `(floor {FLOOR_OF[m.name]}: imports ...)`")
    assert not wrong, "\n".join(wrong)


def test_no_framework_is_named_by_an_import_of_the_core(core):
    wrong = [
        f"{m.path}:{line}: imports {name}"
        for m in core
        for line, name in m.imports(frozenset())
        if name.split(".")[0] in FRAMEWORKS
    ]
    assert not wrong, "frameworks belong into adapters/:\n" + "\n".join(wrong)


def test_import_pccheck_loads_no_framework():
    program = (
        "import sys, pkgutil, importlib, pccheck\n"
        "light = [m for m in ('typer', 'rich') if m in sys.modules]\n"
        "for m in pkgutil.walk_packages(pccheck.__path__, 'pccheck.'): importlib.import_module(m.name)\n"
        f"print(light + [m for m in {FRAMEWORKS!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"loaded: {done.stdout}"


def test_adapters_use_public_names_only(adapters):
    import pccheck

    rooms = ("leaves", "errors", "devices", "dlpack", "containers", "holding", "deadlines")
    public = {f"pccheck.{name}" for name in (*pccheck.__all__, *rooms)}
    siblings = {"pccheck_orbax": {"pccheck_jax"}}
    wrong = []
    for m in adapters:
        package = m.name.split(".")[0]
        for line, name in m.imports(frozenset(public)):
            top = name.split(".")[0]
            if top == "pccheck" and name not in {"pccheck", "pccheck.leaves", "pccheck.errors", *public}:
                wrong.append(f"{m.path}:{line}: {name} is not public")
            elif top == "pccheck" and name == "pccheck" and f"import {name}\n" not in m.text:
                wrong.append(f"{m.path}:{line}: takes a name out of pccheck that pccheck.__all__ lacks")
            elif top.startswith("pccheck_") and top != package and top not in siblings.get(package, set()):
                wrong.append(f"{m.path}:{line}: {package} may not import {top}")
        wrong += [
            f"{m.path}: uses {used}, which is not public"
            for used in sorted(set(re.findall(r"\bpccheck\.(?!json\b)[a-zA-Z_]\w*", m.text)) - public)  # a file's name
        ]
    assert not wrong, "adapters import public names only:\n" + "\n".join(wrong)


def test_the_floors_bite(parse):
    """Each kind of wrong arrow, in a small house, is seen."""
    low = parse("pccheck.format", "format.py", "def f():\n    from pccheck.store import store\n")
    high = parse("pccheck.store.store", "store/store.py", "from ..format import f\nfrom pccheck import __version__\n")
    assert graph([low, high]) == {
        "pccheck.format": [(2, "pccheck.store.store")],
        "pccheck.store.store": [(1, "pccheck.format")],
    }
    assert reachable(graph([low, high]), "pccheck.store.store").keys() == {"pccheck.store.store", "pccheck.format"}
    inner = parse(
        "pccheck.pipeline", "pipeline/__init__.py", "from . import native\nfrom ..store.store import x\n", True
    )
    assert graph([inner])["pccheck.pipeline"] == [(1, "pccheck.pipeline.native"), (2, "pccheck.store.store")]
