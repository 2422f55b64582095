"""
Train a looped transformer on state tracking or on text, and see what it learned.

    python train.py                                      blockwise on the products of S3, and a report
    python train.py --transition diagonal                the same with another transition
    python train.py --task text [--text FILE]            characters; without a file, tinyshakespeare
    python train.py --sample CHECKPOINT --prompt "ROMEO:"
    python train.py --resume CHECKPOINT                  go on exactly where a run stopped
    python train.py --compare --seeds 5                  every transition, one table
    python train.py --bench                              what a step costs, and where

In order: train(), which is the loop; optimisers, model, evaluation, checkpoints, comparison, benchmark, flags.
"""
import argparse
import contextlib
import difflib
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import Text, WordProblem
from looped import Config, LoopedTransformer, Transition


class UserError(Exception):
    """Something the user can mend: main() prints it in one line and exits with 2."""

    def __str__(self):  # one line whatever the user's words were, and nothing in it that a terminal obeys
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


def train(o, state=None):
    """Trains by the options, from the start or from a checkpoint's state; reports; returns the exit code."""
    device, autocast = pick_device(o.device)
    task, model, optimizers, generator, draw = build(o, device, autocast, state)
    path, stop = checkpoint_path(o), []
    low, high = loop_bounds(o)
    start, seconds = (state["step"], state["seconds"]) if state else (0, 0.0)
    print(f"{o.transition} on {o.group if o.task == 'state' else 'text'}, length {o.length}, {o.loops} loops, injected "
          f"{o.inject}, seed {o.seed}: {sum(p.numel() for p in model.parameters()):,} parameters, {device}", flush=True)
    began = time.monotonic()
    if not state:  # if it cannot be written, say so now
        save(path, o, task, start, seconds, model, optimizers, generator)
    interrupt = signal.signal(signal.SIGINT, lambda *_: stop.append(True))
    bar = tqdm(range(start, o.steps), initial=start, total=o.steps, disable=None, dynamic_ncols=True, leave=False,
               bar_format="{n_fmt}/{total_fmt}{postfix}, {remaining} left {bar}")
    for step in bar:
        lr = learning_rate(o, step)
        loops = int(torch.randint(low, high + 1, (), generator=generator))
        tokens, targets = draw()
        with autocast():
            loss = F.cross_entropy(model(tokens, loops).flatten(0, 1), targets.flatten())
        update(model, loss, optimizers, lr)

        save_now = (step + 1) % o.every == 0 or step + 1 == o.steps or bool(stop)
        look = save_now or device == "cpu" or step % 20 == 0  # a GPU has to be waited for
        if look and not loss.isfinite() or save_now and not all(p.isfinite().all() for p in model.parameters()):
            raise UserError(f"step {step} went wrong: loss {loss.item()}, learning rate {lr:.2g}; try a smaller --lr "
                            f"or --init. {path} holds an earlier step")
        if look:
            rate = (step + 1 - start) * tokens.numel() / (time.monotonic() - began)
            bar.set_postfix_str(f"loss {loss.item():.3f}, lr {lr:.1e}, {rate / 1000:.0f}k tok/s", refresh=False)
        if save_now:
            save(path, o, task, step + 1, seconds + time.monotonic() - began, model, optimizers, generator)
            if stop:
                bar.close()
                print(f"stopped after step {step + 1}; python train.py --resume={shlex.quote(str(path))} goes on")
                return 130
            metrics = evaluate(model, task, o, device, quick=True)
            bar.write(f"step {step + 1}: loss {loss.item():.3f}, lr {lr:.1e}, "
                      + ", ".join(f"{name} {show(metrics[name])}" for name in main_metrics(o)[:2]))
            sys.stdout.flush()
    signal.signal(signal.SIGINT, interrupt)
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


# ---- Optimisers

def learning_rate(o, step):
    """Up over 100 steps, or a twentieth of all if that is less; then down to a tenth along a cosine."""
    warm = min(100, o.steps // 20 + 1)
    if step < warm:
        return o.lr * (step + 1) / warm
    return o.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / (o.steps - warm)))


def make_optimizers(model, o):
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for name, p in model.named_parameters() if p.requires_grad and not (p.ndim == 2 and "blocks" in name)]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
    muon = o.optimizer == "muon"
    adamw = torch.optim.AdamW(groups[:1] if muon else groups, lr=o.lr, betas=(0.9, 0.98), fused=True)
    return [adamw, Muon(matrices, o.lr, weight_decay=0.1)] if muon else [adamw]


class Muon(torch.optim.Optimizer):
    """Momentum, with the singular values of the update brought near 1 (Jordan et al. 2024).

    For matrices with one and the same smaller side, here dim. torch.optim.Muon works in bfloat16, which costs a
    processor without it more than the rest of the training step.
    """

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        group, updates = self.param_groups[0], []
        params = [p for p in group["params"] if p.grad is not None]  # a short loop does not reach every untied block
        for p in params:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad, 0.05)
            x = p.grad.lerp(momentum, 0.95)
            updates.append((x if x.shape[0] <= x.shape[1] else x.T) / (x.norm() + 1e-7))

        # Newton-Schulz: x <- q(x x^T) x. Worked out on the squares x x^T, which are small, and applied to x once at the
        # end. Three rounds train as well here as the usual five.
        gram, factor = torch.stack([x @ x.T for x in updates]), None
        for more in 2, 1, 0:
            q = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            q.diagonal(dim1=1, dim2=2).add_(3.4445)
            factor = q if factor is None else q @ factor
            gram = q @ gram @ q if more else None

        for p, x, f in zip(params, updates, factor):
            x = f @ x if p.shape[0] <= p.shape[1] else (f @ x).T
            size = 0.2 * max(p.shape) ** 0.5  # makes the update as large as one of AdamW: one rate serves both
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(x, alpha=-group["lr"] * size)


# ---- From options to a model

def pick_device(name):
    """The device, and what gives the context to run the model in: bfloat16 on a CUDA device made for it."""
    name = name or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
            raise ValueError("there are cpu, cuda, cuda:# and mps")
        torch.zeros(1, device=name)
    except Exception as e:
        raise UserError(f"--device {name} cannot be used here ({first_line(e)}); --device cpu always can") from None
    if not name.startswith("cuda"):
        return name, contextlib.nullcontext
    torch.cuda.set_device(torch.device(name))
    return name, lambda: torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_bf16_supported(False))


def first_line(e):
    return (str(e) or type(e).__name__).splitlines()[0][:160]


def loop_bounds(o):
    low, _, high = o.loops.partition("-")
    return int(low), int(high or low)


def make_task(o):
    try:
        if o.task == "state":
            return WordProblem(o.group, o.length)
        task = Text(o.text or None)
        for split in task.splits:
            task.batch(split, 1, o.length)  # which complains, now, if the text is too short
        return task
    except ValueError as e:
        raise UserError(e) from None


def make_model(o, vocab_size):
    context = o.length if o.task == "text" else 0
    try:
        config = Config(vocab_size, o.dim, o.heads, o.layers, loop_bounds(o)[1], o.transition, o.groups, o.inject,
                        o.radius, o.phases, context)
    except ValueError as e:
        raise UserError(e) from None
    model = LoopedTransformer(config)
    model.transition.nu.requires_grad_(o.freeze != "radii")
    model.transition.theta.requires_grad_(o.freeze != "phases")
    return model


def build(o, device, autocast, state=None):
    """Options, and maybe a checkpoint's state -> task, model, optimizers, generator, draw() -> tokens, targets."""
    task = make_task(o)
    torch.manual_seed(o.seed)  # a transition draws nothing from it, so all kinds start from the same blocks
    model = make_model(o, task.vocab_size)
    for p in model.blocks.parameters():
        if o.init and p.ndim == 2:
            torch.nn.init.normal_(p, std=o.init)
    model.recompute = o.recompute
    optimizers, generator = make_optimizers(model.to(device), o), torch.Generator().manual_seed(o.seed)
    if state:
        if state["digest"] != task.digest:
            raise UserError(f"{o.text or 'the task'} is not what this checkpoint was trained on")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": saved})
        generator.set_state(state["generator"])
        torch.set_rng_state(state["rng"])
    if o.compile:
        compile_blocks(model, autocast, torch.zeros(o.batch, o.length + (o.task == "state"), dtype=int, device=device))

    def draw():
        if o.task == "state":
            return task.batch(o.batch, generator, device)
        return task.batch("train", o.batch, o.length, generator, device)
    return task, model, optimizers, generator, draw


def compile_blocks(model, autocast, tokens):
    """Compiles the blocks, not the loop, so that a new loop count compiles nothing. Where it fails, it is left out."""
    try:
        warnings.filterwarnings("ignore", ".*complex operators")  # compiled or not, the rotations come out the same
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
        with autocast():
            model(tokens, 2).sum().backward()
    except Exception as e:  # no compiler, no Triton, a Python too new: whatever it is, training works without
        print(f"--compile does not work here ({first_line(e)}); going on without", file=sys.stderr)
        for block in model.blocks:
            vars(block).pop("forward", None)
    model.zero_grad()


# ---- Evaluation and report

@torch.no_grad()
def evaluate(model, task, o, device, loops=None, quick=False):
    """State: what is right on sequences from a seed kept for this. Text: the loss over the validation tenth."""
    if o.task == "text":
        ids, quarter = task.splits["val"], max(1, o.length // 4)
        starts = torch.arange(0, len(ids) - o.length, o.length)[::8 if quick else 1]
        windows = ids[starts[:, None] + torch.arange(o.length + 1)].long().to(device)
        losses = torch.cat([F.cross_entropy(model(w[:, :-1], loops).transpose(1, 2), w[:, 1:], reduction="none")
                            for w in windows.split(128)])
        return {"loss": losses.mean().item(), "last_quarter": losses[:, -quarter:].mean().item()}
    tokens, targets = task.batch(1024 if quick else 4096, torch.Generator().manual_seed(10 ** 9), device)
    right = torch.cat([model(x, loops).argmax(-1) for x in tokens.split(512)]) == targets
    right = right[:, 1:].cpu()  # nothing is asked at the beginning token
    prefix = right[:, :-1].all(1)
    return {"sequence": right.all(1).float().mean().item(),
            "last_given_prefix": right[prefix, -1].float().mean().item() if prefix.any() else None,
            "token": right.float().mean().item(), "last": right[:, -1].float().mean().item(),
            "right_prefixes": int(prefix.sum()), "positions": right.float().mean(0).tolist()}


def main_metrics(o):
    return ("loss", "last_quarter") if o.task == "text" else ("sequence", "last_given_prefix", "token")


def show(x):
    return "-" if x is None else f"{x:.4f}"


def report(o, task, model, path, device, seconds):
    """Prints what was learned, 40 columns wide but for paths, and writes the summary beside the checkpoint."""
    trained = loop_bounds(o)[1]
    counts = {1, 2, 4, 8, 16, trained} | ({12, 32} if o.task == "state" else set())
    curve = {n: evaluate(model, task, o, device, n) for n in sorted(counts)}
    final = curve[trained]
    for name, x in final.items():
        if name != "positions":
            print(f"{name.replace('_', ' '):26}{x if isinstance(x, int) else show(x):>8}")
    for i in range(0, len(final.get("positions", [])), 8):
        print(f"% at {i + 1:3}" + "".join(f"{100 * p:4.0f}" for p in final["positions"][i:i + 8]))
    one, two = main_metrics(o)[:2]
    print(f"loops{one:>12}{two.replace('_', ' '):>20}")
    for n, metrics in curve.items():
        print(f"{n:4}{'*' if n == trained else ' '}{show(metrics[one]):>12}{show(metrics[two]):>20}")
    print("* as trained. More loops may help or do\nharm: see Depth in README.md.")
    summary = {"run": run_flags(o), **final, "curve": curve, "parameters": sum(p.numel() for p in model.parameters()),
               "digest": task.digest, "seconds": round(seconds), "device": device, "threads": torch.get_num_threads(),
               "torch": torch.__version__}
    write(summary_path(path), (json.dumps(summary) + "\n").encode())
    following = "train.py \\\n--sample=" if o.task == "text" else "looped.py \\\n"
    print(f"{seconds:.0f} s; summary in\n{summary_path(path)}\nnext: python {following}{shlex.quote(str(path))}")


# ---- Checkpoints

def checkpoint_path(o):
    """In --out, named by the task, the transition and every other flag of the run that is not at its default."""
    if o.mode == "resume":
        return Path(o.resume)
    name = f"{o.task}-{o.transition}"
    for flag, value in run_flags(o).items():
        if flag not in ("task", "transition", "seed") and value != default(flag, o.task):
            name += f"-{flag}{Path(value).stem if flag == 'text' else value}"
    return Path(o.out, f"{name}-seed{o.seed}.pt")


def summary_path(checkpoint):
    return checkpoint.with_name(checkpoint.name.removesuffix(".pt") + ".json")


def write(path, data):
    """Beside the file, then moved over it: at every moment the file on disk is a whole one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
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
        raise UserError(f"cannot write {path}: {e.strerror}; what was there is untouched") from None


def save(path, o, task, step, seconds, model, optimizers, generator):
    state = {"run": run_flags(o), "step": step, "seconds": seconds, "vocab_size": task.vocab_size,
             "chars": getattr(task, "chars", ""), "digest": task.digest, "model": model.state_dict(),
             "optimizers": [x.state_dict()["state"] for x in optimizers], "generator": generator.get_state(),
             "rng": torch.get_rng_state()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    write(path, content + hashlib.sha256(content).digest())  # torch.load does not mind what comes after the end


def load(path):
    """A checkpoint's state, the options of its run, and its model. Runs nothing that is in the file."""
    try:
        if not Path(path).is_file():
            raise FileNotFoundError("there is no such file")
        raw = Path(path).read_bytes()
        content, digest = raw[:-32], raw[-32:]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        run = argparse.Namespace(**{name: state["run"][name] for name in RUN})
        with torch.device("meta"):  # shapes alone; the weights are the file's
            model = make_model(run, state["vocab_size"])
        model.load_state_dict(dict(state["model"]), assign=True)  # a copy, as torch notes the assigning in it
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from None
    except Exception:  # a broken or hostile file can raise anything
        raise UserError(f"{path} is not a checkpoint of this program, or not whole, or was changed; "
                        "nothing in it was run") from None
    return state, run, model


def resume(o):
    state, run, _ = load(o.resume)
    vars(o).update(vars(run))
    return train(o, state)


def start(o):
    """Trains; or goes on, if the checkpoint of this very run is there; or says that it is there and whole."""
    path, state = checkpoint_path(o), None
    if path.exists():
        state, run, _ = load(path)
        if vars(run) != run_flags(o):
            raise UserError(f"{path} holds a run with other flags; give another --out, or move it away")
        print(f"{path} holds step {state['step']} of {o.steps} of this run; going on from there")
    return train(o, state)


def sample(o):
    state, run, model = load(o.sample)
    if not state["chars"]:
        raise UserError(f"{o.sample} is of a state-tracking run; --sample takes one of --task text")
    text = Text(chars=state["chars"])
    prompt = o.prompt or ("\n" if "\n" in text.chars else text.chars[0])
    try:
        tokens = text.encode(prompt)[None]
    except ValueError as e:
        raise UserError(f"--prompt: {e}") from None
    device, _ = pick_device(o.device)
    loops = loop_bounds(o if "loops" in o.given else run)[1]
    generator = torch.Generator(device).manual_seed(o.seed)

    def put(characters):  # control characters could be commands to a terminal
        print("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in characters), end="", flush=True)
    put(prompt)
    for token in model.to(device).stream(tokens.to(device), o.chars, loops, o.temperature, o.top_k, generator):
        put(text.decode(token[0]))
    put("\n")
    return 0


# ---- The comparison

def run_one(o, digest):
    """The metrics of a run, from its summary; if that is not there yet, its own command makes it, in a process."""
    path = summary_path(checkpoint_path(o))
    if not path.exists():
        flags = {name: getattr(o, name) for name in o.given - {"compare", "seeds"} | {"transition", "seed"}}
        command = [spelled(name) if value is True else f"{spelled(name)}={value}" for name, value in flags.items()]
        run = subprocess.run([sys.executable, __file__, *command], capture_output=True, text=True)
        if run.returncode == 2:
            raise UserError(run.stderr.splitlines()[-1].removeprefix("train.py: "))
        if run.returncode:
            if run.returncode < 0 or run.returncode == 130:
                raise UserError("a run was killed or stopped; the same command goes on")
            raise RuntimeError(run.stderr)
    try:
        summary = json.loads(path.read_text())
        metrics = {name: summary[name] for name in main_metrics(o)}
        if not all(x is None or type(x) is float and math.isfinite(x) for x in metrics.values()):
            raise ValueError
        if summary["run"] == run_flags(o) and summary["digest"] == digest:
            return metrics
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is broken; delete it, and the run is reported again") from None
    raise UserError(f"{path} is of a run with other flags or another text; give another --out, or move it away")


def compare(o):
    """Every transition with every seed, side by side on the cores there are, and a table of each metric."""
    kinds, results = RUN["transition"][0], {}
    runs = [argparse.Namespace(**vars(o) | {"transition": kind, "seed": seed})
            for seed in range(o.seeds) for kind in kinds]
    workers = os.cpu_count() if pick_device(o.device)[0] == "cpu" else 1
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count() // workers)  # torch in those processes asks for it
    digest = make_task(o).digest
    with ThreadPoolExecutor(workers) as pool:
        try:
            for run, metrics in zip(runs, pool.map(run_one, runs, [digest] * len(runs))):
                results[run.transition, run.seed] = metrics
                shown = (f"{name} {show(metrics[name])}" for name in main_metrics(o))
                print(checkpoint_path(run).stem, *shown, flush=True)
        except KeyboardInterrupt:  # the runs hear of it too, and save
            print("interrupted; the same command goes on")
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    for name in main_metrics(o):
        print(f"\n{name:17} mean     std   95 % interval       n   minus diagonal, seed by seed")
        for kind in kinds:
            values = {seed: results[kind, seed][name] for seed in range(o.seeds)}
            paired = [x - results["diagonal", seed][name] for seed, x in values.items()
                      if None not in (x, results["diagonal", seed][name])]
            print(f"{kind:12}", interval([x for x in values.values() if x is not None]), "  ",
                  interval(paired) if kind != "diagonal" else "")
    return 0


def interval(values):
    """Mean, standard deviation and 95 % interval of the mean by Student's t."""
    if len(values) < 2:
        return f"{show(values[0]) if values else '-':>8}" + " " * 29 + f"{len(values):3}"
    few = 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26
    t = few[len(values) - 2] if len(values) <= 10 else 1.96 + 2.6 / (len(values) - 1)  # true to .01
    mean, std = statistics.mean(values), statistics.stdev(values)
    half = t * std / len(values) ** 0.5
    return f"{mean:8.4f} {std:7.4f}  {mean - half:7.4f} .. {mean + half:7.4f} {len(values):3}"


# ---- The benchmark

def make_step(o):
    """Options -> a function that does one training step, always on the same batch."""
    device, autocast = pick_device(o.device)
    _, model, optimizers, _, draw = build(o, device, autocast)
    tokens, targets = draw()

    def step(rows=None):
        with autocast():
            loss = F.cross_entropy(model(tokens[:rows]).flatten(0, 1), targets[:rows].flatten())
        update(model, loss, optimizers, 1e-4)
    return step


def make_products(o):
    """A function that does only the matrix products of the blocks in such a step, forward and backward."""
    device, autocast = pick_device(o.device)
    T, size, d = o.length + (o.task == "state"), o.dim // o.heads, o.dim
    x = {n: torch.randn(o.batch * T, n, device=device) for n in (d, 3 * d, 4 * d)}
    q, p = (torch.randn(o.batch * o.heads, T, n, device=device) for n in (size, T))
    weights = [torch.randn(*shape, device=device) for shape in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))]

    @torch.no_grad()
    def products():
        with autocast():
            for _ in range(loop_bounds(o)[1] * o.layers):
                for w in weights:
                    inputs, outputs = x[w.shape[1]], x[w.shape[0]]
                    torch.mm(inputs, w.T)
                    torch.mm(outputs, w)
                    torch.mm(outputs.T, inputs)
                for _ in range(3):  # scores and mixtures of attention: once forward, twice backward
                    torch.bmm(q, q.mT)
                    torch.bmm(p, q)
    return products


def peak_memory(o):
    """MiB that a training step takes at its peak, beyond what is there before it. On a CPU only where /proc is."""
    step = make_step(o)
    step(1)  # what is loaded once is not counted
    if pick_device(o.device)[0].startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not forget.exists():
        return math.nan
    forget.write_text("5")  # the peak so far
    before = int(status.read_text().split("VmRSS:")[1].split()[0])
    step()
    return (int(status.read_text().split("VmHWM:")[1].split()[0]) - before) / 2 ** 10


def milliseconds(functions, device, repeats=20):
    """Median time of each, taken in turns, so that a machine that slows down slows them all."""
    times = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if device != "cpu":
                torch.cuda.synchronize() if device.startswith("cuda") else torch.mps.synchronize()
            times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(t[1:]) for name, t in times.items()}  # the first is the warm-up


def bench(o):
    def changed(**changes):
        return argparse.Namespace(**vars(o) | changes)

    device, positions = pick_device(o.device)[0], o.length + (o.task == "state")
    print(f"A training step: {o.task}, batch {o.batch}, length {o.length}, dim {o.dim}, {o.loops} loops, {device}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n\n"
          f"{'transition':16}      ms  tokens/s  of untied")
    steps = {kind: make_step(changed(transition=kind)) for kind in RUN["transition"][0]}
    times = milliseconds(steps | {"matrix products": make_products(o)}, device)
    for name, ms in times.items():
        print(f"{name:16}{ms:8.1f}{1000 * o.batch * positions / ms:10.0f}{ms / times['untied']:11.2f}")

    loops = {(n, again): changed(loops=str(n), recompute=again) for again in (False, True) for n in (2, 4, 8, 16, 32)}
    times = milliseconds({key: make_step(x) for key, x in loops.items()}, device, 5)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc then gives memory back, and a peak is what is in use
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        memory = dict(zip(loops, pool.map(peak_memory, loops.values())))
    print("\nloops       ms     MiB  recomputed: ms     MiB")
    for n in (2, 4, 8, 16, 32):
        print(f"{n:5}{times[n, False]:9.1f}{memory[n, False]:8.1f}{times[n, True]:16.1f}{memory[n, True]:8.1f}")

    print("\npositions     ms   us/token   (about as many tokens in each)")
    sizes = {n: changed(task="state", length=n - 1, batch=max(1, o.batch * positions // n))
             for n in (16, 64, 256, 1024)}
    for n, ms in milliseconds({n: make_step(x) for n, x in sizes.items()}, device, 5).items():
        print(f"{n:9}{ms:7.1f}{1000 * ms / n / sizes[n].batch:11.1f}")

    model = make_model(changed(task="text", length=256), 65).to(device)
    first = torch.zeros(1, 1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def uncached():
        text = first
        for _ in range(256):
            text = torch.cat((text, model(text)[:, -1].argmax(-1, keepdim=True)), 1)
    print("\nsampling 256 characters")
    for name, ms in milliseconds({"with": lambda: model.generate(first, 256), "without": uncached}, device, 3).items():
        print(f"{name:8} the cache: {256000 / ms:.0f} a second")
    return 0


# ---- Flags

def number(least, most):
    def convert(text):
        with contextlib.suppress(ValueError):
            if least <= type(least)(text) <= most:
                return type(least)(text)
        kind = "whole number" if isinstance(least, int) else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {kind} from {least} to {most}")
    return convert


def loop_range(text):
    low, dash, high = text.partition("-")
    with contextlib.suppress(argparse.ArgumentTypeError):
        if number(1, 10 ** 4)(low) <= number(1, 10 ** 4)(high if dash else low):
            return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a count up to 10000, as 8, or a range of them, as 2-8")


def path_name(text):
    if not text:
        raise argparse.ArgumentTypeError("'' is no path; name a file or folder")
    return text


# flag: type or choices, default (or a pair: for state, for text), help. These make the run, and its name.
RUN = {
    "task": (("state", "text"), "state", "state tracking, or characters"),
    "transition": ((*Transition.KINDS, "untied"), "blockwise", "untied: own blocks for each recurrent step"),
    "group": (str, "S3", "for state: Z#, S#, A# or a product such as A4xZ5"),
    "length": (number(1, 10 ** 6), (8, 64), "elements in a sequence, or characters of context"),
    "loops": (loop_range, ("8", "4"), "recurrent steps; LOW-HIGH draws a count for each batch"),
    "dim": (number(2, 10 ** 7), (64, 128), "width of the residual stream"),
    "heads": (number(1, 10 ** 4), 4, "attention heads"),
    "layers": (number(1, 100), 1, "blocks inside one recurrent step"),
    "groups": (number(1, 10 ** 5), 8, "groups of planes"),
    "inject": (("every", "once"), ("once", "every"), "add the input at every recurrent step, or at the first"),
    "radius": (number(0.001, 0.999), 0.447, "start of every radius"),
    "phases": (Transition.PHASES, "log", "start of the phases"),
    "freeze": (("nothing", "radii", "phases"), "nothing", "what of the transition stays at its start"),
    "init": (number(0.0, 100), (0.02, 0.0), "spread (std) of the block matrices; 0: torch's, 0.58 / sqrt(inputs)"),
    "optimizer": (("muon", "adamw"), ("adamw", "muon"), "for the blocks' matrices; all else takes adamw"),
    "lr": (number(1e-8, 1000), (0.003, 0.01), "highest learning rate"),
    "steps": (number(1, 10 ** 9), 2000, "training steps"),
    "batch": (number(1, 10 ** 6), (64, 12), "sequences in a batch"),
    "text": (path_name, "", "for text: a UTF-8 file; none: tinyshakespeare"),
    "seed": (number(0, 2 ** 63 - 1), 0, "for the weights and the batches"),
}
OTHER = {
    "every": (number(1, 10 ** 9), 500, "evaluate and save every that many steps"),
    "device": (str, "", "cpu, cuda, mps; none: the best there is"),
    "out": (path_name, "runs", "folder for checkpoints and summaries"),
    "compile": (None, False, "torch.compile the blocks"),
    "recompute": (None, False, "save memory: work out a step's activations again going backward"),
    "resume": (path_name, "", "go on with this checkpoint"),
    "sample": (path_name, "", "write text with this checkpoint"),
    "prompt": (str, "", "how that text begins"),
    "chars": (number(1, 10 ** 9), 500, "characters to write"),
    "temperature": (number(0.0, 1000), 0.8, "0 takes the likeliest character"),
    "top_k": (number(0, 10 ** 9), 0, "draw from the likeliest few only; 0: from all"),
    "compare": (None, False, "train every transition with several seeds, one table"),
    "seeds": (number(1, 1000), 5, "how many seeds --compare takes"),
    "bench": (None, False, "measure what a step costs"),
}
FLAGS = RUN | OTHER
TRAINING = {"every", "device", "compile", "recompute"}
USES = {  # what may be given beside each of the flags that say what to do, and beside none of them
    "resume": TRAINING,
    "sample": {"prompt", "chars", "temperature", "top_k", "loops", "seed", "device"},
    "compare": RUN.keys() - {"transition", "seed"} | TRAINING | {"out", "seeds"},
    "bench": RUN.keys() | {"device", "compile", "recompute"},
    "a run": RUN.keys() | TRAINING | {"out"},
}


def spelled(name):
    return "--" + name.replace("_", "-")


def default(name, task):
    value = FLAGS[name][1]
    return value[task == "text"] if isinstance(value, tuple) else value


def parse(argv):
    """argv -> options; those not given are filled in by the task. Raises UserError."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter)
    for name, (kind, value, text) in FLAGS.items():
        shown = f"{value[0]}; for text {value[1]}" if isinstance(value, tuple) else value
        text += f" [{shown}]" if shown else ""
        if kind is None:
            p.add_argument(spelled(name), action="store_true", default=None, help=text)
        elif isinstance(kind, tuple):
            p.add_argument(spelled(name), choices=kind, help=text)
        else:
            p.add_argument(spelled(name), type=kind, help=text)

    def error(message):
        raise UserError(message)
    p.error = error
    o, unknown = p.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], map(spelled, FLAGS), 1)
        raise UserError(f"{unknown[0]!r} is not a flag here; " + (f"did you mean {near[0]}?" if near else "see --help"))
    o.given = {name for name in FLAGS if getattr(o, name) is not None}
    if odd := [name for name in o.given if isinstance(getattr(o, name), list)]:  # what argparse makes of --flag=--
        raise UserError(f"{spelled(odd[0])}: '--' is not a value")
    o.task = o.task or "state"
    o.mode = next((mode for mode in USES if mode in o.given), "a run")
    useless = o.given - USES[o.mode] - {o.mode}
    if useless:
        beside = {"resume": "--resume, which takes the run's flags from the checkpoint",
                  "a run": f"--task {o.task} alone"}
        raise UserError(f"{spelled(min(useless))} has no use with {beside.get(o.mode, '--' + o.mode)}; leave it out")
    for name, task in ("text", "text"), ("group", "state"):
        if name in o.given and o.task != task:
            raise UserError(f"{spelled(name)} is for --task {task}; leave it out, or add that")
    for name in FLAGS.keys() - o.given:
        setattr(o, name, default(name, o.task))
    return o


def run_flags(o):
    return {name: getattr(o, name) for name in RUN}


def main(argv):
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))  # none, where it is closed
    sys.stdout.reconfigure(errors="replace")
    try:
        o = parse(argv)
        code = {"resume": resume, "sample": sample, "compare": compare, "bench": bench, "a run": start}[o.mode](o)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError) as e:
        message = f"cannot use {e.filename}: {e.strerror}" if getattr(e, "filename", None) else str(e)
        if not isinstance(e, UserError):  # perhaps nobody reads on, as in | head: then Python's last flush goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(e, BrokenPipeError):
            return 141
    except (RuntimeError, MemoryError) as e:
        if not re.search("allocate memory|out of memory|bad_alloc|overflow|^$", str(e)):
            raise
        message = "more memory than there is; take a smaller --dim, --batch, --length or --loops"
    print(f"train.py: {UserError(message)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    import train  # under its own name, so that processes and looped.py meet the same UserError
    sys.exit(train.main(sys.argv[1:]))
