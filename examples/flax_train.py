"""Train a small GPT in Flax, with checkpoints through Orbax's interface, several in flight. Kill it: it resumes.

    python examples/flax_train.py --steps 120 --save-every 5 --out out/flax     # train, or go on
    python examples/flax_train.py --kills 3                                     # show that kills do no harm

With `--kills` it trains twice, in processes of their own: once undisturbed, and once with so many SIGKILLs, while
checkpoints are in flight, within a step, and while a killed run resumes. After each kill every step that a manager of
a new process shows is read, and every byte of it verified. Both runs' final states are compared bit for bit: the last
line says "bit-identical"; else the leaves that differ are named and the exit status is 1. CPU only.
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pccheck_orbax
from flax import nnx
from jax import numpy as jnp

from pccheck import links

CONTEXT, BATCH, WIDTH, HEADS, LAYERS, DROPOUT = 32, 8, 64, 4, 2, 0.1
ATTEMPT_TIMEOUT_S = 300.0  # no single process may take longer

# -- what is trained --------------------------------------------------------------------------------------------------


class Block(nnx.Module):
    """One transformer layer: attention to what came before, then an MLP, with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (part.reshape(BATCH, CONTEXT, HEADS, -1) for part in jnp.split(self.qkv(self.norm1(x)), 3, -1))
        attention = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attention.reshape(x.shape)))
        return x + self.dropout(self.narrow(nnx.gelu(self.wide(self.norm2(x)))))


class GPT(nnx.Module):
    """A byte-level GPT of 120,000 parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token, self.place = nnx.Embed(256, WIDTH, rngs=rngs), nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(LAYERS))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.place.embedding[...]
        for block in self.blocks:
            x = block(x)
        return self.token.attend(self.norm(x))


def make(seed: int, steps: int) -> tuple[GPT, nnx.Optimizer[GPT]]:
    """Make a model and its optimizer; together they hold all that the next step depends on, but for the batch."""
    model = GPT(nnx.Rngs(seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=20, decay_steps=max(21, steps))
    return model, nnx.Optimizer(model, optax.adamw(schedule, b2=0.95), wrt=nnx.Param)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(form: nnx.GraphDef[Any], state: nnx.State[Any, Any], tokens: jax.Array) -> tuple[Any, jax.Array]:
    """Give the next state and the loss; the old state's memory is given away."""
    model, optimizer = nnx.merge(form, state)

    def loss_of(model: GPT) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer)), loss


class Batches:
    """Windows of the standard library's own sources, in an order that is drawn anew for each epoch.

    Where it stands is two numbers: after a restart the next batch is the one that came next.
    """

    def __init__(self, seed: int, limit: int = 1 << 17) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = np.frombuffer(b"".join(file.read_bytes() for file in files)[:limit], np.uint8)
        self.windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)[::CONTEXT]
        self.seed, self.epoch, self.position = seed, 0, 0

    def __next__(self) -> np.ndarray[Any, Any]:
        if self.position + BATCH > len(self.windows):
            self.epoch, self.position = self.epoch + 1, 0
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.windows))
        chosen = order[self.position : self.position + BATCH]
        self.position += BATCH
        return self.windows[chosen].astype(np.int32)


# -- training ---------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    model_of = functools.partial(make, arguments.seed, arguments.steps)
    form, abstract = nnx.split(nnx.eval_shape(model_of))
    batches, losses, first = Batches(arguments.seed), list[float](), 0
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=arguments.save_every)

    say(f"opening {arguments.out}")
    with pccheck_orbax.CheckpointManager(arguments.out.absolute(), options=options, in_flight=2) as manager:
        if (latest := manager.latest_step()) is not None:
            targets = {"state": ocp.args.StandardRestore(abstract), "loop": ocp.args.JsonRestore()}
            restored = manager.restore(latest, args=ocp.args.Composite(**targets))
            state, loop = restored.state, restored.loop
            batches.epoch, batches.position, losses = loop["epoch"], loop["position"], loop["losses"]
            first = latest + 1
            say(f"resumed after step {latest}")
        else:
            state = jax.jit(lambda: nnx.state(model_of()))()
            say("starting anew: no checkpoint yet")

        for step in range(first, arguments.steps):
            state, loss = train_step(form, state, next(batches))  # donates what the last save may still be reading
            losses.append(float(loss))
            say(f"step {step} loss {losses[-1]:.4f}")
            loop = {"epoch": batches.epoch, "position": batches.position, "losses": list(losses)}
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), loop=ocp.args.JsonSave(loop))
            if manager.save(step, args=args, force=step == arguments.steps - 1):
                say(f"saving step {step}")


def say(line: str) -> None:
    print(line, flush=True)


# -- the demonstration: a launcher that kills -------------------------------------------------------------------------


class Kill(NamedTuple):
    """Where to strike: `delay_s` after the first line that begins with `line`, of step `step` or later."""

    moment: str
    line: str
    step: int
    delay_s: float


def plan_kills(arguments: argparse.Namespace) -> list[Kill]:
    """Choose random moments, spread over the run, of three kinds in turn."""
    dice, kills = random.Random(arguments.seed), list[Kill]()
    share = arguments.steps / (arguments.kills + 1)
    for i in range(arguments.kills):
        step = int(share * (i + dice.random()))
        moments = [
            Kill("while a checkpoint is in flight", "saving", step, dice.uniform(0, 0.02)),
            Kill("within a step", "step", step, dice.uniform(0, 0.01)),
            Kill("while resuming", "opening", 0, dice.uniform(0, 0.5)),
        ]
        kills.append(moments[i % 3])
    return kills


def attempt(arguments: argparse.Namespace, folder: Path, kill: Kill | None = None) -> list[str]:
    """Run the training in a process of its own, until it ends or is killed; give its lines, "killed" as the last."""
    command = [sys.executable, __file__, "--out", folder, "--steps", arguments.steps]
    command += ["--save-every", arguments.save_every, "--seed", arguments.seed]
    lines = list[str]()
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        guard = threading.Timer(ATTEMPT_TIMEOUT_S, process.kill)
        strike = threading.Timer(kill.delay_s if kill else 0.0, process.kill)
        guard.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if kill and line.startswith(kill.line) and step_of(line) >= kill.step and strike.ident is None:
                strike.start()
        guard.cancel()
    if strike.ident is not None and process.returncode < 0:
        return [*lines, "killed"]
    if process.returncode != 0:
        raise SystemExit("\n".join([*lines[-30:], f"the training ended with status {process.returncode}"]))
    return lines


def step_of(line: str) -> int:
    return next((int(word) for word in line.split() if word.isdigit()), 0)


def shown_steps(folder: Path) -> list[int]:
    """Give the steps that a manager of Orbax's own shows, after every byte of each was verified."""
    with ocp.CheckpointManager(folder.absolute()) as manager:
        steps = list(manager.all_steps())
    for step in steps:
        final_state(folder, step)
    return steps


def final_state(folder: Path, step: int) -> dict[str, bytes | str]:
    """Give every leaf of a step, by path, as something that is equal only for equal bits."""
    state = links.load(folder / str(step) / "state").state
    found: dict[str, bytes | str] = {"loop": (folder / str(step) / "loop" / "metadata").read_text()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[f"state{jax.tree_util.keystr(path)}"] = f"{leaf.dtype}{leaf.shape}".encode() + np.asarray(leaf).tobytes()
    return found


def demonstrate(arguments: argparse.Namespace) -> int:
    """Train undisturbed, and with kills; compare."""
    untouched, killed = arguments.out / "never_killed", arguments.out / "killed"
    for folder in (untouched, killed):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier call

    say(f"a run of {arguments.steps} steps that nobody touches ...")
    say(f"  {attempt(arguments, untouched)[-1]}")
    say(f"the same run, killed {arguments.kills} times ...")
    for kill in plan_kills(arguments):
        lines = attempt(arguments, killed, kill)
        if lines[-1] != "killed":
            break  # too short a run for so many kills
        reached = next((line for line in reversed(lines) if line.startswith("step")), "before the first step")
        begun = next((line for line in lines if line.startswith(("resumed", "starting"))), "still opening")
        say(f"  {begun}; killed {kill.moment}, {reached}; shown and whole: {shown_steps(killed) or 'nothing yet'}")
    else:
        lines = attempt(arguments, killed)
        say(f"  {next(line for line in lines if line.startswith(('resumed', 'starting')))}; {lines[-1]}")

    last = arguments.steps - 1
    one, other = final_state(untouched, last), final_state(killed, last)
    different = sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))
    if different:
        print(f"{len(different)} of {len(one)} leaves differ:", *different, sep="\n  ")
        return 1
    say(f"{len(one)} leaves compared, after step {last}:")
    say("bit-identical")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="steps in all, those before a restart included")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("out/flax"), help="folder of the checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the moments of the kills")
    parser.add_argument("--kills", type=int, default=None, help="show what so many kills do, in place of training once")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if given.kills is None:
        train(given)
    else:
        raise SystemExit(demonstrate(given))
