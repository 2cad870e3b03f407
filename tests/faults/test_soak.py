"""Thousands of saves with delays at random points: nothing is lost, leaked or mixed up on the way."""

from __future__ import annotations

import gc
import random
import threading
import time
import tracemalloc

import pytest

import pccheck
from pccheck.audit import audit, exit_code
from pccheck.errors import StepNotFoundError
from tests.faults.helpers import (
    CHUNK,
    WAIT_S,
    make_state,
    open_files,
    pool_of,
    resident_bytes,
    slot_files,
    step_of,
    threads_of_pccheck,
)

MIB = 1 << 20
WARM_UP = 500


class Delays:
    """Sleeps a little at every 40th point of a commit, chosen by chance, so that commits overtake each other."""

    def __init__(self, seed: int) -> None:
        self._chance, self._lock = random.Random(seed), threading.Lock()

    def __call__(self, point: str) -> None:
        with self._lock:
            sleep_s = self._chance.uniform(0, 0.002) if self._chance.random() < 1 / 40 else 0.0
        if sleep_s:
            time.sleep(sleep_s)


class Soak:
    """One long run of saves and restores over one store."""

    def __init__(self, ck: pccheck.Checkpointer, directory, seed: int) -> None:
        self.ck, self.directory = ck, directory
        self.chance = random.Random(seed)
        self.durable = 0  # the newest counter whose `durable` resolved
        self.step = 0
        self.lock = threading.Lock()
        self.ended = 0

    def heard(self, save: pccheck.Save) -> None:
        with self.lock:
            self.ended += 1
            if save.durable.exception() is None:
                self.durable = max(self.durable, save.counter)

    def run(self, saves: int, *, look_every: int) -> None:
        for _ in range(saves):
            self.step += 1
            nbytes = CHUNK * self.chance.choice((1, 2, 3, 3, 3))
            save = self.ck.save(self.step, make_state(self.step, nbytes))
            save.durable.add_done_callback(lambda _, save=save: self.heard(save))
            if self.step % look_every == 0:
                self.look()
        self.ck.wait(WAIT_S)

    def look(self) -> None:
        """Restore as a reader beside the running saves, and sometimes as the writer; pin, unpin or delete."""
        with self.lock:
            promised = self.durable
        if self.chance.random() < 0.7:
            with pccheck.open(self.directory) as view:
                restored = view.restore()
        else:
            restored = self.ck.restore()
        assert restored is not None or not promised
        if restored is None:
            return
        assert restored.counter >= promised
        assert restored.skipped == ()
        assert step_of(restored.state) == restored.step
        what = self.chance.choice(("pin", "unpin", "nothing", "nothing"))
        try:
            if what == "pin":
                self.ck.pin(self.ck.latest())
            elif what == "unpin":
                self.ck.unpin(self.ck.steps()[0])
        except StepNotFoundError:
            pass  # it was superseded meanwhile, or is not pinned


def held() -> tuple[list[str], int]:
    """Give the files that stay open, but for slots, and how many threads pccheck has."""
    gc.collect()
    before, paths = None, open_files()
    while paths != before:  # the last saves are told of still, and written into the history
        time.sleep(0.05)
        before, paths = paths, open_files()
    return [path for path in paths if "/slot-" not in path], threads_of_pccheck()


def open_slots(directory) -> int:
    """Give how often slots are open: each once or twice, and a pinned one is replaced when it is next needed."""
    return sum(path.startswith(f"{directory}/slot-") for path in open_files())


@pytest.mark.parametrize(
    ("place", "pipeline", "keep", "saves"),
    [("memory", "auto", 1, 10_000), ("memory", "portable", 2, 2_000), ("disk", "auto", 2, 2_000)],
)
def test_nothing_is_lost_in_thousands_of_saves(fast_path, tmp_path, place, pipeline, keep, saves):
    directory = (fast_path if place == "memory" else tmp_path) / "s"
    outside = held()
    ck = pccheck.Checkpointer(
        directory, in_flight=4, keep=keep, chunk_bytes=CHUNK, buffer_bytes=8 * CHUNK, pipeline=pipeline,
        _at=Delays(1),
    )  # fmt: skip
    soak = Soak(ck, directory, seed=saves)
    soak.run(WARM_UP, look_every=50)
    before, resident = held(), resident_bytes()
    soak.run(saves - WARM_UP, look_every=100)
    stats = ck.stats()
    assert (stats.saves, stats.failed, stats.skipped, soak.ended) == (saves, 0, 0, saves)
    assert stats.committed + stats.superseded == saves
    assert stats.superseded > 0, "no save overtook another: the soak tested too little"
    assert pool_of(ck)[0] == pool_of(ck)[1]
    assert "0 of 4 in flight [], 0 capturing" in repr(ck)
    assert held() == before
    assert open_slots(directory) <= 2 * (4 + keep)
    assert resident_bytes() - resident < 16 * MIB
    assert soak.durable == saves
    assert ck.restore().counter == saves
    for step in pinned(directory):
        ck.unpin(step)
    ck.save(soak.step + 1, make_state(soak.step + 1)).durable.result(WAIT_S)
    assert len(slot_files(directory)) == 4 + keep
    assert len(ck.steps()) == keep
    ck.close()
    assert held() == outside
    assert open_slots(directory) == 0
    assert exit_code(audit(directory, verify=True)) == 0
    with pccheck.Checkpointer(directory, in_flight=4, keep=keep, chunk_bytes=CHUNK) as ck:
        assert step_of(ck.restore().state) == soak.step + 1
        assert len(slot_files(directory)) == 4 + keep


def pinned(directory) -> set[int]:
    return {int(file.name.split("-")[0]) for file in (directory / "kept").glob("*.pcc")}


def test_python_objects_of_ended_saves_are_let_go(fast_path):
    """What stays of a save when its caller has dropped it: nothing.

    What a save leaves behind shows in every block of saves; windows of figures that fill, and what happens to be in
    flight when a block ends, in some.
    """
    grown = []
    with pccheck.Checkpointer(fast_path / "s", in_flight=4, chunk_bytes=CHUNK) as ck:
        soak = Soak(ck, fast_path / "s", seed=1)
        soak.run(WARM_UP, look_every=100)
        tracemalloc.start()
        try:
            soak.run(200, look_every=50)
            while len(grown) < 4 and not any(bytes_grown < 50 * 1_000 for bytes_grown in grown):
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
                soak.run(1_000, look_every=50)
                gc.collect()
                grown.append(tracemalloc.get_traced_memory()[0] - before)
        finally:
            tracemalloc.stop()
    assert min(grown) < 50 * 1_000, f"{grown} bytes stayed of 1,000 saves each"


def test_opening_and_closing_leaves_nothing_behind(tmp_path):
    """One process opens, saves, restores and closes a store many times."""

    def once(step: int) -> None:
        heard = []
        with pccheck.Checkpointer(tmp_path, in_flight=3, chunk_bytes=CHUNK, observer=heard.append) as ck:
            restored = ck.restore()
            assert restored is None or step_of(restored.state) == step - 1
            ck.save(step, make_state(step))
        with pccheck.open(tmp_path) as view:
            assert view.latest() == step
        assert heard

    for step in range(5):
        once(step)
    before, resident = held(), resident_bytes()
    for step in range(5, 55):
        once(step)
    assert held() == before
    assert open_slots(tmp_path) == 0
    assert resident_bytes() - resident < 16 * MIB
