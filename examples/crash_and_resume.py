"""Kill a training run again and again, let it finish, and compare it with a run that nobody touched: bit for bit.

    python examples/crash_and_resume.py [--steps 200] [--kills 6] [--seed 0] [--out out/crash_and_resume]

Both runs are `torch_train.py` in a process of its own. The kills are SIGKILL and hit three kinds of moments in turn:
while a checkpoint is in flight, at any moment of a step, and while a killed run is resuming. The last line says
"bit-identical"; else the leaves that differ are named and the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

import pccheck

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

ATTEMPT_TIMEOUT_S = 600.0  # no single process may take longer
FINISHED = "ran to its end"
BLUE, RED, GREY = "#1f5fa8", "#d1342b", "#b9bec6"


@dataclass(frozen=True)
class Kill:
    """Where to strike: `delay_s` after the first line of this kind, of step `step` or later."""

    moment: str
    line: str
    step: int
    delay_s: float


@dataclass
class Attempt:
    """One process, from its start to its end; times are seconds since the first attempt began."""

    moment: str
    began_s: float
    ended_s: float = 0.0
    first: int | None = None  # the first step that it was to do; None = killed before it could tell
    steps: list[tuple[float, int, float]] = field(default_factory=list)  # time, step, loss
    in_flight: list[int] = field(default_factory=list)
    durable_ms: list[float] = field(default_factory=list)
    last_line: str = ""
    verdict: str = "-"

    def read(self, line: str, now_s: float) -> tuple[str, int]:
        """Take one line of the process; gives its kind and step."""
        self.last_line = line.strip() or self.last_line
        match line.split():
            case ["step", step, "loss", loss]:
                self.steps.append((now_s, int(step), float(loss)))
                return "step", int(step)
            case ["saving", "step", step]:
                self.in_flight.append(int(step))
                return "saving", int(step)
            case ["durable", "step", step, "after", milliseconds, "ms"]:
                self.in_flight.remove(int(step))
                self.durable_ms.append(float(milliseconds))
            case ["resumed", "after", "step", step]:
                self.first = int(step) + 1
            case ["starting", "anew:", *_]:
                self.first = 0
            case ["opening", *_]:
                return "opening", 0
        return "", -1


def attempt(arguments: argparse.Namespace, folder: Path, kill: Kill | None, zero: float) -> Attempt:
    """Run the training once, until it ends or is killed."""
    script = Path(__file__).with_name("torch_train.py")
    command = [sys.executable, "-u", str(script), "--out", str(folder), "--steps", str(arguments.steps)]
    command += ["--save-every", str(arguments.save_every), "--snapshot", arguments.snapshot]
    this = Attempt(kill.moment if kill else FINISHED, time.monotonic() - zero)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        guard = threading.Timer(ATTEMPT_TIMEOUT_S, process.kill)
        strike = threading.Timer(kill.delay_s if kill else 0.0, process.kill)
        guard.start()
        assert process.stdout is not None
        for line in process.stdout:
            kind, step = this.read(line, time.monotonic() - zero)
            if kill and kind == kill.line and step >= kill.step and not strike.is_alive():
                strike.start()
                kill = None
        guard.cancel()
    this.ended_s = time.monotonic() - zero
    killed = strike.ident is not None and process.returncode < 0
    if process.returncode != 0 and not killed:
        raise SystemExit(f"the training ended with status {process.returncode}: {this.last_line}")
    if not killed:
        this.moment = FINISHED
    return this


def plan_kills(arguments: argparse.Namespace, step_s: float, durable_s: float) -> list[Kill]:
    """Choose random moments, spread over the run, of three kinds in turn."""
    dice, kills = random.Random(arguments.seed), []
    share = arguments.steps / (arguments.kills + 1)
    for i in range(arguments.kills):
        step = int(share * (i + dice.random()))
        if i % 3 == 0:
            kills.append(Kill("during a save", "saving", step, dice.uniform(0, 0.7 * durable_s)))
        elif i % 3 == 1:
            kills.append(Kill("within a step", "step", step, dice.uniform(0, step_s)))
        else:
            kills.append(Kill("while resuming", "opening", 0, dice.uniform(0, durable_s)))
    return kills


def inspect(folder: Path) -> tuple[int, str]:
    """Ask `pccheck inspect --verify` what the kill left behind: its exit status and what it printed."""
    command = [str(Path(sys.executable).with_name("pccheck")), "inspect", str(folder), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ATTEMPT_TIMEOUT_S)
    return done.returncode, (done.stdout + done.stderr).rstrip()


def print_table(attempts: list[Attempt]) -> None:
    print("\nkill  moment                  at     in flight      reached     resumed after   lost steps   inspect")
    for i, (this, lost) in enumerate(zip(attempts[:-1], lost_steps(attempts), strict=True)):
        later = next(a.first for a in attempts[i + 1 :] if a.first is not None)
        reached = f"step {this.steps[-1][1]}" if this.steps else "-"
        resumed = f"step {later - 1}" if later else "-  (anew)"
        flying = "step " + ", ".join(map(str, this.in_flight)) if this.in_flight else "-"
        print(
            f"{i + 1:4}  {this.moment:20} {this.ended_s:5.1f} s   {flying:12}   {reached:9}   {resumed:13} "
            f"{len(lost):10}     {this.verdict}"
        )


def lost_steps(attempts: list[Attempt]) -> list[list[tuple[float, int, float]]]:
    """Give, for each kill, the steps that had been done and had to be done again."""
    firsts = [a.first for a in attempts]
    resumes = [next(f for f in firsts[i + 1 :] if f is not None) for i in range(len(attempts) - 1)]
    return [[s for s in a.steps if s[1] >= again] for a, again in zip(attempts, resumes, strict=False)]


def draw(path: Path, alone: Attempt, attempts: list[Attempt]) -> None:
    """Draw both loss curves over each other, the kills and what they cost, and the way that the run took in time."""
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(11, 8.5), height_ratios=[3, 2], layout="constrained")
    draw_loss(top, alone, attempts)
    draw_progress(bottom, attempts)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_loss(axes: Axes, alone: Attempt, attempts: list[Attempt]) -> None:
    _, steps, losses = zip(*alone.steps, strict=True)
    axes.plot(steps, losses, color=GREY, linewidth=6, solid_capstyle="round", label="never killed")
    kept = {step: loss for this in attempts for _, step, loss in this.steps}
    axes.plot(list(kept), list(kept.values()), color=BLUE, linewidth=1.4, zorder=3, label="killed and resumed")
    seen = sum(1 for this in attempts[:-1] if this.steps)
    lost_label = "lost steps, done again"
    kill_label = f"SIGKILL ({seen}; {len(attempts) - 1 - seen} more hit a run that was resuming)"
    for number, (this, lost) in enumerate(zip(attempts[:-1], lost_steps(attempts), strict=True), start=1):
        if lost:
            _, steps, losses = zip(*lost, strict=True)
            axes.axvspan(steps[0] - 0.5, steps[-1] + 0.5, color=RED, alpha=0.1, linewidth=0)
            axes.plot(steps, losses, color=RED, linewidth=4, alpha=0.6, solid_capstyle="round", label=lost_label)
            lost_label = "_"  # a legend names each thing once
        if this.steps:
            _, step, loss = this.steps[-1]
            axes.axvline(step, color=RED, linewidth=0.8, alpha=0.5)
            axes.plot(step, loss, "X", color=RED, markersize=11, markeredgecolor="white", zorder=5, label=kill_label)
            axes.annotate(
                str(number), (step, 1), (0, 3), ("data", "axes fraction"), "offset points", color=RED, ha="center"
            )
            kill_label = "_"
    axes.set(xlabel="training step", ylabel="training loss (nats per byte)", xlim=(-2, max(kept) + 2))
    axes.set_title("Loss: the killed run lies on the one that was never killed", loc="left", fontweight="bold", pad=18)
    axes.legend(frameon=False)


def draw_progress(axes: Axes, attempts: list[Attempt]) -> None:
    stood = 0  # the step at which the latest process began or ended
    for number, this in enumerate(attempts, start=1):
        ready_s = this.steps[0][0] if this.steps else this.ended_s
        axes.axvspan(this.began_s, ready_s, color=GREY, alpha=0.25, linewidth=0)
        if this.steps:
            times, steps, _ = zip(*this.steps, strict=True)
            axes.plot(times, steps, color=BLUE, linewidth=2)
            stood = steps[-1]
        elif this.first is not None:
            stood = max(0, this.first - 1)
        if number < len(attempts):
            axes.plot(this.ended_s, stood, "X", color=RED, markersize=10, markeredgecolor="white", zorder=5)
            where = {"xytext": (0, 9), "textcoords": "offset points", "ha": "left", "rotation": 45, "fontsize": 9}
            axes.annotate(f"{number}  {this.moment}", (this.ended_s, stood), color=RED, zorder=6, **where)
    axes.set(
        xlabel="seconds since the first start; grey: starting Python and PyTorch, restoring", ylabel="training step"
    )
    axes.margins(y=0.25)  # room for what is written beside the kills
    axes.set_title("Progress: a kill costs the steps since the last durable checkpoint", loc="left", fontweight="bold")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Give every leaf of a state as (path, something that is equal only for equal bits)."""
    if isinstance(value, dict):
        yield path, (type(value), list(value))
        for key, child in value.items():
            yield from leaves(child, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield path, (type(value), len(value))
        for i, child in enumerate(value):
            yield from leaves(child, f"{path}[{i}]")
    elif isinstance(value, torch.Tensor):
        yield path, (value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        yield path, (value.dtype, value.shape, value.tobytes())
    else:
        yield path, (type(value), value.hex() if isinstance(value, float) else value)


def differences(one: object, other: object) -> list[str]:
    """Give the path of every leaf, and of every container, that is not the same in both."""
    left, right = dict(leaves(one, "state")), dict(leaves(other, "state"))
    return sorted(path for path in left.keys() | right.keys() if left.get(path) != right.get(path))


def final_state(folder: Path) -> dict[str, Any]:
    with pccheck.Checkpointer(folder) as ck:
        restored = ck.restore()
    assert restored is not None
    return {"step": restored.step, **restored.state}


def main(arguments: argparse.Namespace) -> int:
    untouched, killed = arguments.out / "never_killed", arguments.out / "killed"
    for folder in (untouched, killed):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier call

    print(f"a run of {arguments.steps} steps that nobody touches ...", flush=True)
    alone = attempt(arguments, untouched, None, time.monotonic())
    print(f"  {alone.ended_s:.1f} s. {alone.last_line}", flush=True)
    times = [t for t, _, _ in alone.steps]
    step_s = (times[-1] - times[0]) / max(1, len(times) - 1)

    print(f"the same run, killed {arguments.kills} times ...", flush=True)
    zero, attempts, report, status = time.monotonic(), list[Attempt](), "", 0
    for kill in plan_kills(arguments, step_s, statistics.median(alone.durable_ms) / 1e3):
        attempts.append(attempt(arguments, killed, kill, zero))
        if attempts[-1].moment == FINISHED:  # too short a run for so many kills
            break
        status, report = inspect(killed)
        committed = any(a.durable_ms for a in attempts)
        attempts[-1].verdict = "sound" if status == 0 else "DAMAGED" if committed else "nothing yet"
        print(f"  killed {attempts[-1].moment}, {attempts[-1].ended_s:.1f} s", flush=True)
    if not attempts or attempts[-1].moment != FINISHED:
        attempts.append(attempt(arguments, killed, None, zero))
    print(f"  done, {attempts[-1].ended_s:.1f} s", flush=True)

    print_table(attempts)
    print(f"\nafter the last kill, `pccheck inspect --verify` (exit status {status}):\n{report}\n")
    picture = arguments.out / "crash_and_resume.png"
    draw(picture, alone, attempts)
    print(f"picture: {picture}")

    one, other = final_state(untouched), final_state(killed)
    print("leaves compared:", ", ".join(f"{part} {len(dict(leaves(one[part])))}" for part in one))
    different = differences(one, other)
    if any(a.verdict == "DAMAGED" for a in attempts):
        print("a kill left damage behind, see the table")
        return 1
    if different:
        print(f"{len(different)} leaves differ:", *different, sep="\n  ")
        return 1
    print("bit-identical")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments of the kills")
    parser.add_argument("--snapshot", choices=["lazy", "copy"], default="lazy")
    parser.add_argument("--out", type=Path, default=Path("out/crash_and_resume"))
    raise SystemExit(main(parser.parse_args()))
