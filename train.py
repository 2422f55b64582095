"""
Train a looped transformer on state tracking or on text, and see what it learned.

    python train.py                                      blockwise on the products of S3, and a report
    python train.py --transition diagonal                the same with another transition
    python train.py --task text [--text FILE]            characters; without a file, tinyshakespeare
    python train.py --sample CHECKPOINT --prompt "ROMEO:"
    python train.py --resume CHECKPOINT                  go on exactly where a run stopped
    python train.py --compare --seeds 5                  every transition, one table
    python train.py --bench                              what a step costs, and where

Flags and optimisers come first, then train(), the loop; after it evaluation, checkpoints, sampling, comparison, benchmark.
"""
import argparse
import contextlib
import difflib
import io
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import Text, WordProblem
from looped import Config, LoopedTransformer, Transition


class Bad(Exception):
    """Something wrong that the user can mend: main() prints it in one line and exits with 2."""


def at_least(least):
    def convert(text):
        with contextlib.suppress(ValueError):
            if least <= type(least)(text) < math.inf:
                return type(least)(text)
        kind = "whole number" if isinstance(least, int) else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {kind} of at least {least}")
    return convert


def loop_range(text):
    low, dash, high = text.partition("-")
    if at_least(1)(low) > at_least(1)(high if dash else low):
        raise argparse.ArgumentTypeError(f"{text!r} runs downwards; write the smaller count first")
    return text


# flag: type or choices, default (or one for state and one for text), help
FLAGS = {
    "task": (("state", "text"), "state", "state tracking, or characters"),
    "transition": ((*Transition.KINDS, "untied"), "blockwise", "untied: a block of its own for each recurrent step"),
    "group": (str, "S3", "for state: Z#, S#, A# or a product such as A4xZ5"),
    "length": (at_least(1), (8, 64), "elements in a sequence, or characters of context"),
    "loops": (loop_range, ("8", "4"), "recurrent steps; LOW-HIGH draws a count for each batch"),
    "dim": (at_least(2), (64, 128), "width of the residual stream"),
    "heads": (at_least(1), 4, "attention heads"),
    "layers": (at_least(1), 1, "blocks inside one recurrent step"),
    "groups": (at_least(1), 8, "groups of planes"),
    "inject": (("every", "once"), ("once", "every"), "add the input at every recurrent step, or at the first"),
    "radius": (at_least(0.0), 0.447, "start of every radius"),
    "phases": (Transition.PHASES, "log", "start of the phases"),
    "freeze": (("nothing", "radii", "phases"), "nothing", "what of the transition stays at its start"),
    "init": (at_least(0.0), 0.0, "standard deviation of the blocks' matrices; 0: torch's own, 0.58 / sqrt(inputs)"),
    "optimizer": (("muon", "adamw"), "muon", "for the blocks' matrices; all else takes adamw"),
    "lr": (at_least(1e-8), 0.01, "highest learning rate"),
    "steps": (at_least(1), (1000, 2000), "training steps"),
    "batch": (at_least(1), (64, 12), "sequences in a batch"),
    "text": (str, "", "for text: a UTF-8 file; none: tinyshakespeare"),
    "seed": (at_least(0), 0, "for the weights and the batches"),
    # up to here what is learned depends on them, from here on it does not
    "every": (at_least(1), 500, "evaluate and save every that many steps"),
    "device": (str, "", "cpu, cuda, mps; none: the best there is"),
    "out": (str, "runs", "folder for checkpoints and summaries"),
    "compile": (None, False, "torch.compile the blocks"),
    "recompute": (None, False, "save memory: work out a step's activations again going backward"),
    "resume": (str, "", "go on with this checkpoint"),
    "sample": (str, "", "write text with this checkpoint"),
    "prompt": (str, "", "how that text begins"),
    "chars": (at_least(1), 500, "characters to write"),
    "temperature": (at_least(0.0), 0.8, "0 takes the likeliest character"),
    "top_k": (at_least(0), 0, "draw from the likeliest few only; 0: from all"),
    "compare": (None, False, "train every transition with several seeds, one table"),
    "seeds": (at_least(1), 5, "how many seeds --compare takes"),
    "bench": (None, False, "measure what a step costs"),
}
RUN = list(FLAGS)[:list(FLAGS).index("seed") + 1]


def default(name, task):
    value = FLAGS[name][1]
    return value[task == "text"] if isinstance(value, tuple) else value


def parse(argv):
    """argv -> options; those not given are filled in by the task. Raises Bad."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter)
    for name, (kind, value, text) in FLAGS.items():
        how = {"action": "store_true"} if kind is None else {"choices" if isinstance(kind, tuple) else "type": kind}
        shown = "%s; for text %s" % value if isinstance(value, tuple) else value
        p.add_argument("--" + name.replace("_", "-"), default=None, help=f"{text} [{shown}]" if shown else text, **how)

    def error(message):
        raise Bad(message)
    p.error = error
    o, unknown = p.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], ["--" + name for name in FLAGS], 1)
        raise Bad(f"{unknown[0]} is not a flag here" + (f"; did you mean {near[0]}?" if near else "; see --help"))
    o.task = o.task or "state"
    o.given = {name for name in FLAGS if getattr(o, name) is not None}
    vars(o).update({name: default(name, o.task) for name in FLAGS if name not in o.given})
    return o


def flags(o):
    return {name: getattr(o, name) for name in RUN}


def checkpoint_path(o):
    """Named by the task, the transition and every flag off its default: different runs have different names."""
    changed = [f"{name}{Path(getattr(o, name)).stem if name == 'text' else getattr(o, name)}" for name in RUN
               if name not in ("task", "transition", "seed") and getattr(o, name) != default(name, o.task)]
    return Path(o.out, "-".join([o.task, o.transition, *changed, f"seed{o.seed}"]) + ".pt")


class Muon(torch.optim.Optimizer):
    """Momentum, with the singular values of the update brought near 1 (Jordan et al. 2024). For matrices only.

    torch.optim.Muon works in bfloat16, which costs a processor without it more than the rest of the training step.
    """

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                x = p.grad.lerp(momentum, 0.95)
                tall = x.shape[0] > x.shape[1]
                x = x.T / (x.norm() + 1e-7) if tall else x / (x.norm() + 1e-7)
                for _ in range(3):  # Newton-Schulz; here three rounds train as well as the usual five
                    s = x @ x.T
                    x = torch.addmm(x, torch.addmm(s, s, s, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
                size = 0.2 * max(p.shape) ** 0.5  # makes the update as large as one of AdamW: one rate serves both
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(x.T if tall else x, alpha=-group["lr"] * size)


def make_optimizers(model, o):
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if p.requires_grad and not (p.ndim == 2 and "blocks" in name)]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    muon = o.optimizer == "muon"
    adamw = torch.optim.AdamW(groups[:1] if muon else groups, lr=o.lr, betas=(0.9, 0.98), fused=True)
    return [adamw, Muon(matrices, o.lr, weight_decay=0.1)] if muon else [adamw]


def learning_rate(o, step):
    """Up over 100 steps, then down to a tenth along a cosine."""
    warm = min(100, o.steps // 20 + 1)
    return o.lr * min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * max(0, step - warm) / max(1, o.steps - warm)))


def train(o, state=None):
    """Trains by the options, from the start or from a checkpoint's state; reports; returns the exit code."""
    device, cast = pick_device(o.device)
    task, model, optimizers, generator, draw = build(o, device, state)
    path, (low, high), stop, seen, began = checkpoint_path(o), loop_bounds(o), [], "", time.monotonic()
    first, seconds = (state["step"], state["seconds"]) if state else (0, 0.0)
    print(f"{o.transition} on {o.group if o.task == 'state' else 'text'}, length {o.length}, {o.loops} loops, injected "
          f"{o.inject}, seed {o.seed}: {sum(p.numel() for p in model.parameters()):,} parameters, {device}", flush=True)
    signal.signal(signal.SIGINT, lambda *_: stop.append(1) if not stop else sys.exit(130))
    bar = tqdm(range(first, o.steps), initial=first, total=o.steps, disable=None, dynamic_ncols=True, leave=False)
    for step in bar:
        lr = learning_rate(o, step)
        loops = int(torch.randint(low, high + 1, (), generator=generator))
        tokens, targets = draw()
        with cast():
            loss = F.cross_entropy(model(tokens, loops).flatten(0, 1), targets.flatten())
        look = device == "cpu" or step % 20 == 0  # a GPU has to be waited for
        ok = loss.isfinite() if look else True
        if ok:
            update(model, loss, optimizers, lr)
        keep = (step + 1) % o.every == 0 or step + 1 == o.steps or stop
        if not ok or keep and not all(p.isfinite().all() for p in model.parameters()):
            raise Bad(f"the loss is {loss.item()} at step {step} with learning rate {lr:.2g}; try a smaller --lr. "
                      + (f"{path} holds an earlier step" if path.exists() else "No checkpoint had been written"))

        if look:
            rate = (step + 1 - first) * tokens.numel() / (time.monotonic() - began)
            bar.set_postfix_str(f"loss {loss.item():.3f}, lr {lr:.1e}, {rate / 1000:.0f}k tok/s{seen}", refresh=False)
        if keep:
            spent = seconds + time.monotonic() - began
            save(path, o, task, step + 1, spent, model, optimizers, generator)
            if stop:
                bar.close()
                print(f"stopped after step {step + 1}; python train.py --resume {path} goes on")
                return 130
            metrics = evaluate(model, task, o, device, quick=True)
            seen = ", " + ", ".join(f"{name} {show(metrics[name])}" for name in list(metrics)[:2])
            if bar.disable:
                print(f"step {step + 1}: loss {loss.item():.3f}, lr {lr:.1e}{seen}", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report(o, task, model, path, device, seconds + time.monotonic() - began)
    return 0


def update(model, loss, optimizers, lr):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


# ---- From options to a model

def pick_device(name):
    """The device, and the context to run the model in: bfloat16 on a CUDA device that has it."""
    name = name or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.zeros(1, device=name)
    except Exception as e:
        raise Bad(f"--device {name} cannot be used here: {first_line(e)} --device cpu always can") from None
    half = name.startswith("cuda") and torch.cuda.is_bf16_supported()
    return name, lambda: torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()


def first_line(e):
    return (str(e) or type(e).__name__).splitlines()[0][:160]


def loop_bounds(o):
    low, _, high = o.loops.partition("-")
    return int(low), int(high or low)


def make_config(o, vocab_size):
    return Config(vocab_size, o.dim, o.heads, o.layers, loop_bounds(o)[1], o.transition, o.groups, o.inject, o.radius,
                  o.phases, o.length if o.task == "text" else 0)


def build(o, device, state=None):
    """Options, and maybe a checkpoint's state -> task, model, optimizers, generator, draw() -> tokens, targets."""
    try:
        task = WordProblem(o.group, o.length) if o.task == "state" else Text(o.text or None)
        if o.task == "text":
            task.batch("val", 1, o.length), task.batch("train", 1, o.length)  # complain now if the text is too short
        torch.manual_seed(o.seed)  # a transition draws nothing from it, so all kinds start from the same blocks
        model = LoopedTransformer(make_config(o, task.vocab_size))
    except ValueError as e:
        raise Bad(e) from None
    except OSError as e:
        raise Bad(f"cannot read {o.text}: {e.strerror}") from None
    if o.init:
        for p in model.blocks.parameters():
            p.data.normal_(std=o.init) if p.ndim == 2 else None
    model.recompute = o.recompute
    model.transition.nu.requires_grad_(o.freeze != "radii")
    model.transition.theta.requires_grad_(o.freeze != "phases")
    optimizers, generator = make_optimizers(model.to(device), o), torch.Generator().manual_seed(o.seed)
    if state:
        if state["digest"] != task.digest:
            raise Bad(f"{o.text or 'the text'} is not the text that {o.resume} was trained on; bring that one back")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"])
        torch.set_rng_state(state["rng"])

    def draw():
        return task.batch(o.batch, generator, device) if o.task == "state" else \
            task.batch("train", o.batch, o.length, generator, device)
    if o.compile:
        try:  # the blocks, not the loop: a new loop count then compiles nothing anew
            for block in model.blocks:
                block.forward = torch.compile(block.forward)
            model(torch.zeros(o.batch, o.length, dtype=torch.int64, device=device), 1).sum().backward()
        except Exception as e:  # no compiler, no Triton, a Python too new: whatever it is, training works without
            print(f"--compile does not work here ({first_line(e)}); going on without", file=sys.stderr)
            for block in model.blocks:
                vars(block).pop("forward", None)
        model.zero_grad()
    return task, model, optimizers, generator, draw


# ---- Evaluation and report

@torch.no_grad()
def evaluate(model, task, o, device, loops=None, quick=False):
    """State: what is right on sequences from a seed kept for this. Text: the loss over the validation tenth."""
    if o.task == "text":
        ids = task.splits["val"]
        starts = torch.arange(0, len(ids) - o.length, o.length)[::8 if quick else 1]
        windows = ids[starts[:, None] + torch.arange(o.length + 1)].long().to(device)
        losses = torch.cat([F.cross_entropy(model(w[:, :-1], loops).transpose(1, 2), w[:, 1:], reduction="none")
                            for w in windows.split(128)])
        return {"loss": losses.mean().item(), "last_quarter": losses[:, -(o.length + 3) // 4:].mean().item()}
    tokens, targets = task.batch(1024 if quick else 4096, torch.Generator().manual_seed(10 ** 9), device)
    right = torch.cat([model(x, loops).argmax(-1) for x in tokens.split(512)]) == targets
    right = right[:, 1:].cpu()  # BOS asks for nothing
    prefix = right[:, :-1].all(1)
    return {"sequence": right.all(1).float().mean().item(),
            "last_given_prefix": right[prefix, -1].float().mean().item() if prefix.any() else None,
            "token": right.float().mean().item(), "last": right[:, -1].float().mean().item(),
            "right_prefixes": int(prefix.sum()), "positions": right.float().mean(0).tolist()}


def show(x):
    return "-" if x is None else f"{x:.4f}"


def report(o, task, model, path, device, seconds):
    """Prints what was learned, in lines of at most 40 columns, and writes the summary beside the checkpoint."""
    trained = loop_bounds(o)[1]
    counts = {1, 2, 4, 8, 16, trained} | ({12, 32} if o.task == "state" else set())
    curve = {n: evaluate(model, task, o, device, n) for n in sorted(counts)}
    final, (first, second, *_) = curve[trained], curve[trained]
    for name, x in final.items():
        if name != "positions":
            print(f"{name.replace('_', ' '):26}{x if isinstance(x, int) else show(x):>8}")
    for i in range(0, len(final.get("positions", ())), 8):
        print(f"at {i + 1:3}: " + " ".join(f"{p:.2f}"[1:] if p < 0.995 else "1.0" for p in final["positions"][i:i + 8]))
    print(f"loops{first.replace('_', ' '):>12}{second.replace('_', ' '):>20}")
    for n, metrics in curve.items():
        print(f"{n:4}{'*' if n == trained else ' '}{show(metrics[first]):>12}{show(metrics[second]):>20}")
    print("* trained. With one injection more loops\ndo harm; with one at every step they can\nhelp: see README.md.")
    summary = {"run": flags(o), **final, "curve": curve, "parameters": sum(p.numel() for p in model.parameters()),
               "seconds": round(seconds), "device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}
    write(path.with_suffix(".json"), (json.dumps(summary) + "\n").encode())
    print(f"{seconds:.0f} s; summary in\n{path.with_suffix('.json')}\nnext: python " +
          (f"train.py --sample\n{path}" if o.task == "text" else f"looped.py\n{path}"))


# ---- Checkpoints

def write(path, data):
    """Beside the file, then moved over it: the file on disk is at every moment a whole one."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        partial.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise Bad(f"cannot write {path}: {e.strerror}; what was there is untouched, --out takes another folder") from None


def save(path, o, task, step, seconds, model, optimizers, generator):
    buffer = io.BytesIO()
    torch.save({"run": flags(o), "step": step, "seconds": seconds,
                "vocab_size": task.vocab_size, "chars": getattr(task, "chars", ""), "digest": task.digest,
                "model": model.state_dict(), "optimizers": [x.state_dict() for x in optimizers],
                "generator": generator.get_state(), "rng": torch.get_rng_state()}, buffer)
    write(path, buffer.getvalue())


def load(path):
    """A checkpoint's state, the options of its run, and its model. Runs nothing that is in the file. Raises Bad."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a file of another kind; the line below says it better
            state = torch.load(path, map_location="cpu", weights_only=True)
        run = argparse.Namespace(**{name: state["run"][name] for name in RUN})
        with torch.device("meta"):  # shapes alone; the weights are the file's
            model = LoopedTransformer(make_config(run, state["vocab_size"]))
        model.load_state_dict(dict(state["model"]), assign=True)  # a copy, as torch notes the assigning in it
    except OSError as e:
        raise Bad(f"cannot read {path}: {e.strerror}") from None
    except Exception as e:  # a broken or hostile file can raise anything
        raise Bad(f"{path} is not a whole checkpoint of this program ({type(e).__name__}: {first_line(e)})") from None
    return state, run, model


def resume(o):
    if extra := o.given - {"resume", "task", "device", "compile", "recompute", "every"}:
        raise Bad(f"--resume takes the run's flags from the checkpoint; leave out --{min(extra)}")
    state, run, _ = load(o.resume)
    vars(o).update(vars(run), out=Path(o.resume).parent)
    return train(o, state)


def start(o):
    path = checkpoint_path(o)
    if path.exists():
        state, run, _ = load(path)
        if vars(run) != flags(o):
            raise Bad(f"{path} holds a run with other flags; give another --out, or move it away")
        if state["step"] < o.steps:
            raise Bad(f"{path} holds this run at step {state['step']} of {o.steps}; --resume it, or move it away")
    return train(o)


def sample(o):
    state, run, model = load(o.sample)
    if not state["chars"]:
        raise Bad(f"{o.sample} is of a state-tracking run; --sample takes one of --task text")
    text = Text(chars=state["chars"])
    prompt = o.prompt or ("\n" if "\n" in text.chars else text.chars[0])
    try:
        tokens = text.encode(prompt)[None]
    except ValueError as e:
        raise Bad(f"--prompt: {e}") from None
    device, _ = pick_device(o.device)
    loops, generator = loop_bounds(o if "loops" in o.given else run)[1], torch.Generator(device).manual_seed(o.seed)
    print(prompt, end="", flush=True)
    for token in model.to(device).stream(tokens.to(device), o.chars, loops, o.temperature, o.top_k, generator):
        print(text.decode(token[0]), end="", flush=True)
    print()
    return 0


# ---- The comparison

def run_one(o):
    """In a process of its own: the summary of a run, which is trained if it is not there, or resumed if half done."""
    path = checkpoint_path(o)
    if not path.with_suffix(".json").exists():
        torch.set_num_threads(1)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            if train(o, load(path)[0] if path.exists() else None):
                raise KeyboardInterrupt
    return json.loads(path.with_suffix(".json").read_text())


def compare(o):
    """Every transition with every seed, side by side on the cores there are, and a table of each metric."""
    if extra := o.given & {"transition", "seed"}:
        raise Bad(f"--compare takes every transition and --seeds seeds; leave out --{min(extra)}")
    kinds, metrics = FLAGS["transition"][0], ("sequence", "last_given_prefix", "token")
    metrics = ("loss", "last_quarter") if o.task == "text" else metrics
    runs = [argparse.Namespace(**vars(o) | {"transition": kind, "seed": seed}) for seed in range(o.seeds) for kind in kinds]
    results = {name: {kind: {} for kind in kinds} for name in metrics}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count() if pick_device(o.device)[0] == "cpu" else 1) as pool:
        for run, summary in zip(runs, pool.imap(run_one, runs)):
            print(checkpoint_path(run).stem, *(f"{name} {show(summary[name])}" for name in metrics), flush=True)
            for name in metrics:
                if summary[name] is not None:
                    results[name][run.transition][run.seed] = summary[name]
    for name, values in results.items():
        print(f"\n{name:17} mean     std   95 % interval       n   minus diagonal, seed by seed")
        for kind in kinds:
            paired = [x - values["diagonal"][seed] for seed, x in values[kind].items() if seed in values["diagonal"]]
            print(f"{kind:12}", interval(values[kind].values()), "  ", interval(paired) if kind != "diagonal" else "")
    return 0


def interval(values):
    """Mean, standard deviation and 95 % interval of the mean, by Student's t, of as many runs."""
    values = list(values)
    if len(values) < 2:
        return f"{show(*values or [None]):>8}" + " " * 29 + f"{len(values):3}"
    t = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)[min(len(values), 10) - 2]
    mean, std = statistics.mean(values), statistics.stdev(values)
    half = t * std / len(values) ** 0.5
    return f"{mean:8.4f} {std:7.4f}  {mean - half:7.4f} .. {mean + half:7.4f} {len(values):3}"


# ---- The benchmark

def make_step(o):
    """Options -> a function that does one training step, always on the same batch."""
    device, cast = pick_device(o.device)
    _, model, optimizers, _, draw = build(o, device)
    tokens, targets = draw()

    def step(rows=None):
        with cast():
            loss = F.cross_entropy(model(tokens[:rows]).flatten(0, 1), targets[:rows].flatten())
        update(model, loss, optimizers, 1e-4)
    return step


def make_products(o):
    """A function that does only the matrix products of such a step, forward and backward, on random matrices."""
    device, cast = pick_device(o.device)
    T, size, d = o.length + (o.task == "state"), o.dim // o.heads, o.dim
    x = {n: torch.randn(o.batch * T, n, device=device) for n in (d, 3 * d, 4 * d)}
    q, p = (torch.randn(o.batch * o.heads, T, n, device=device) for n in (size, T))
    weights = [torch.randn(*shape, device=device) for shape in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))]

    def products():
        with torch.no_grad(), cast():
            for _ in range(loop_bounds(o)[1] * o.layers):
                for w in weights:
                    x[w.shape[1]] @ w.T, x[w.shape[0]] @ w, x[w.shape[0]].T @ x[w.shape[1]]
                for _ in range(3):
                    q @ q.mT, p @ q
    return products


def peak_memory(o):
    """MiB that a training step takes at its peak, beyond the model and its batch."""
    step = make_step(o)
    step(1)  # what is loaded once is not counted
    if pick_device(o.device)[0].startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    Path("/proc/self/clear_refs").write_text("5")  # Linux only: forget the peak so far
    status = lambda key: int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) / 2 ** 10
    before = status("VmRSS:")
    step()
    return status("VmHWM:") - before


def milliseconds(functions, device, repeats=20):
    """Median time of each, taken in turns, so that a machine that slows down slows them all."""
    times = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(t[1:]) for name, t in times.items()}  # the first is the warm-up


def bench(o):
    def changed(**changes):
        return argparse.Namespace(**vars(o) | changes)

    device, tokens = pick_device(o.device)[0], o.batch * (o.length + (o.task == "state"))
    print(f"A training step: {o.task}, batch {o.batch}, length {o.length}, dim {o.dim}, {o.loops} loops, {device}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n\n{'transition':16}      ms  tokens/s  of untied")
    steps = {kind: make_step(changed(transition=kind)) for kind in FLAGS["transition"][0]}
    times = milliseconds(steps | {"matrix products": make_products(o)}, device)
    for name, ms in times.items():
        print(f"{name:16}{ms:8.1f}{1000 * tokens / ms:10.0f}{ms / times['untied']:11.2f}")

    loops = {(n, again): changed(loops=str(n), recompute=again) for again in (False, True) for n in (2, 4, 8, 16, 32)}
    times = milliseconds({key: make_step(x) for key, x in loops.items()}, device, 5)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc then gives memory back, and a peak is what is in use
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        memory = dict(zip(loops, pool.map(peak_memory, loops.values())))
    print("\nloops       ms     MiB  recomputed: ms     MiB")
    for n in (2, 4, 8, 16, 32):
        print(f"{n:5}{times[n, False]:9.1f}{memory[n, False]:8.0f}{times[n, True]:16.1f}{memory[n, True]:8.0f}")

    sizes = {n: changed(length=n, batch=max(1, tokens // n)) for n in (16, 64, 256, 1024)}
    print("\npositions     ms   us/token   (about as many tokens in each)")
    for n, ms in milliseconds({n: make_step(x) for n, x in sizes.items()}, device, 5).items():
        print(f"{n:9}{ms:7.1f}{1000 * ms / n / sizes[n].batch:11.1f}")

    model = LoopedTransformer(make_config(changed(task="text", length=256), 65)).to(device)
    start = torch.zeros(1, 1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def uncached(text=start):
        for _ in range(256):
            text = torch.cat((text, model(text)[:, -1].argmax(-1, keepdim=True)), 1)
    for name, ms in milliseconds({"with": lambda: model.generate(start, 256), "without": uncached}, device, 3).items():
        print(f"{chr(10) * (name == 'with')}sampling {name} the cache: {256000 / ms:.0f} characters a second")
    return 0


def main(argv):
    sys.stdout.reconfigure(errors="replace")
    try:
        o = parse(argv)
        act = sample if o.sample else resume if o.resume else compare if o.compare else bench if o.bench else start
        return act(o)
    except Bad as e:
        print(f"train.py: {e}", file=sys.stderr)
    except RuntimeError as e:
        if "memory" not in str(e):
            raise
        print(f"train.py: out of memory; take a smaller --batch, --length or --dim ({first_line(e)})", file=sys.stderr)
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
