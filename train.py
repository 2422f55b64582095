"""
Train a looped transformer, on state tracking or on text, and see what it learned.

    python train.py                                   blockwise on the products of S3, and a report
    python train.py --transition diagonal             the same with another transition
    python train.py --task text --text FILE           characters (without --text: tinyshakespeare)
    python train.py --sample CHECKPOINT --prompt "ROMEO:"
    python train.py --resume CHECKPOINT               goes on exactly where a run stopped
    python train.py --compare --seeds 5               every transition, one table
    python train.py --bench                           what a step costs, and where

Read train() first: it is the whole training loop. Before it come the flags and the optimiser, after it evaluation and
report, checkpoints, sampling, the comparison, the benchmark.
"""
import argparse
import contextlib
import difflib
import io
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import Text, WordProblem, decode, encode
from looped import Config, LoopedTransformer, Transition

KINDS = (*Transition.KINDS, "untied")


class Bad(Exception):
    """Something the user can mend; main() prints it as one line."""


def whole(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def loop_range(text):
    low, _, high = text.partition("-")
    if whole(low) > whole(high or low):
        raise argparse.ArgumentTypeError(f"{text!r} runs downwards; write the smaller number first")
    return text


def positive(text):
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def temperature(text):
    return 0.0 if text in ("0", "0.0") else positive(text)


def seed(text):
    return 0 if text == "0" else whole(text)


# flag: type or choices, default (for the state task, for text), help. These make the run; its name tells those changed.
RUN = {
    "task": (("state", "text"), "state", "state tracking, or characters"),
    "transition": (KINDS, "blockwise", "what acts between two recurrent steps; untied: a block of its own per step"),
    "group": (str, "S3", "state: the group, Z#, S#, A# or a product such as A4xZ5"),
    "length": (whole, (8, 64), "elements in a sequence; for text the context, in characters"),
    "loops": (loop_range, ("8", "4"), "recurrent steps; LOW-HIGH draws a count per batch"),
    "dim": (whole, (64, 128), "width of the residual stream"),
    "heads": (whole, 4, "attention heads"),
    "layers": (whole, 1, "blocks inside one recurrent step"),
    "groups": (whole, 8, "groups of planes: radii of blockwise, and repeats of the starting phases"),
    "inject": (("every", "once"), ("once", "every"), "add the input at every recurrent step, or at the first only"),
    "radius": (positive, 0.447, "start of every radius"),
    "phases": (Transition.PHASES, "log", "start of the phases"),
    "freeze": (("nothing", "radii", "phases"), "nothing", "what of the transition is not trained"),
    "optimizer": (("adamw", "muon"), ("adamw", "muon"), "for the matrices; all else takes AdamW"),
    "lr": (positive, (0.003, 0.01), "highest learning rate"),
    "steps": (whole, 2000, "training steps"),
    "batch": (whole, (64, 12), "sequences in a batch"),
    "text": (str, "", "text: a UTF-8 file; none: tinyshakespeare"),
    "seed": (seed, 0, "of the weights and of the batches"),
}
# These do not change what is learned.
OTHER = {
    "every": (whole, 500, "evaluate and save every that many steps"),
    "device": (str, "", "cpu, cuda, mps; none: the best there is"),
    "out": (str, "runs", "folder for the checkpoint and the summary"),
    "compile": (None, False, "torch.compile the blocks"),
    "recompute": (None, False, "less memory: work the activations of a step out again going backward"),
    "resume": (str, "", "go on with this checkpoint"),
    "sample": (str, "", "write text with this checkpoint"),
    "prompt": (str, "", "what the text begins with"),
    "chars": (whole, 500, "how many characters to write"),
    "temperature": (temperature, 0.8, "0 takes the likeliest character"),
    "top-k": (whole, 0, "draw from the likeliest few only; 0: from all"),
    "compare": (None, False, "train every transition with several seeds and print one table"),
    "seeds": (whole, 5, "how many seeds --compare takes"),
    "bench": (None, False, "measure what a step costs"),
}


def parse(argv):
    """argv -> options, and the names of those given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, prog="train.py",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flags = RUN | OTHER
    for name, (kind, default, text) in flags.items():
        shown = "{}, with --task text {}".format(*default) if isinstance(default, tuple) else default
        how = {"action": "store_true"} if kind is None else {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        parser.add_argument(f"--{name}", default=None, help=f"{text} [{shown}]" if shown else text,
                            **how, **({} if kind is None or isinstance(kind, tuple) else {"metavar": "X"}))

    def error(message):
        raise Bad(message)
    parser.error = error
    o, rest = parser.parse_known_args(argv)
    if rest:
        near = difflib.get_close_matches(rest[0].split("=")[0], [f"--{name}" for name in flags], 1)
        raise Bad(f"{rest[0]} is no flag of this program" + (f"; did you mean {near[0]}?" if near else "; see --help"))
    given = {name for name in flags if getattr(o, name.replace("-", "_")) is not None}
    for name, (_, default, _) in flags.items():
        if name not in given:
            default = default[o.task == "text"] if isinstance(default, tuple) else default
            setattr(o, name.replace("-", "_"), default)
    return o, given


def run_name(o):
    """The kind of run and every flag that is not at its default, so that different runs have different names."""
    parts = [o.task, o.transition]
    for name, (_, default, _) in RUN.items():
        default = default[o.task == "text"] if isinstance(default, tuple) else default
        value = getattr(o, name)
        if name not in ("task", "transition", "seed") and value != default:
            parts.append(f"{name}{Path(value).stem if name == 'text' else value}")
    return "-".join([*parts, f"seed{o.seed}"])


class Muon(torch.optim.Optimizer):
    """Momentum, then every singular value of the update brought close to 1 (Jordan et al. 2024), for matrices.

    torch.optim.Muon does the same in bfloat16, which a processor without bfloat16 pays for with several times the
    whole training step; in float32 it is a tenth of one.
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
                x = x if x.shape[0] < x.shape[1] else x.T
                x = x / (x.norm() + 1e-7)
                for _ in range(3):  # Newton-Schulz; three rounds train as well as the usual five
                    s = x @ x.T
                    x = torch.addmm(x, torch.addmm(s, s, s, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
                x = x if p.shape[0] < p.shape[1] else x.T
                # 0.2 sqrt(longer side) gives the update the size of one of AdamW's, so both take one learning rate.
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(x, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def make_optimizers(model, o):
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and p is not model.embed.weight]
    rest = [p for p in trained if p.ndim < 2 or p is model.embed.weight]
    betas = (0.9, 0.98 if o.task == "state" else 0.99)
    adamw = [{"params": rest, "weight_decay": 0.0}]
    if o.optimizer == "adamw":
        adamw.append({"params": matrices, "weight_decay": 0.1})
    optimizers = [torch.optim.AdamW(adamw, lr=o.lr, betas=betas, fused=True)]
    return optimizers + [Muon(matrices, o.lr, 0.1)] * (o.optimizer == "muon")


def learning_rate(o, step):
    warm = min(100, o.steps // 20 + 1)
    if step < warm:
        return o.lr * (step + 1) / warm
    return o.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / (o.steps - warm)))  # down to a tenth


def train(o, state=None):
    """Trains by the options o, from the start or from the state of a checkpoint; then evaluates and reports."""
    device, cast = pick_device(o.device)
    task, model, optimizers, generator, draw = build(o, device, state)
    low, high = loop_bounds(o)
    path = Path(o.out, run_name(o) + ".pt")
    start, seconds, began = (state["step"], state["seconds"], time.monotonic()) if state else (0, 0.0, time.monotonic())
    print(f"{o.transition} on {o.group if o.task == 'state' else 'text'}, length {o.length}, {o.loops} loops, injected "
          f"{o.inject}, seed {o.seed}: {sum(p.numel() for p in model.parameters()):,} parameters, on {device}")
    stop, seen = [], ""
    signal.signal(signal.SIGINT, lambda *_: (stop.append(True), signal.signal(signal.SIGINT, signal.default_int_handler)))

    bar = tqdm(range(start, o.steps), initial=start, total=o.steps, disable=None, dynamic_ncols=True, leave=False)
    for step in bar:
        lr = learning_rate(o, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        loops = int(torch.randint(low, high + 1, (), generator=generator))
        tokens, targets = draw(generator)
        with cast():
            loss = F.cross_entropy(model(tokens, loops).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (device == "cpu" or step % 20 == 0) and not loss.isfinite():  # on a GPU, asking makes it wait
            raise Bad(f"the loss at step {step} is {loss.item()}, with learning rate {lr:.2g}; try a smaller --lr. "
                      + (f"{path} holds an earlier step" if path.exists() else "No checkpoint was written yet"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if device == "cpu" or step % 20 == 0:
            rate = (step + 1 - start) * tokens.numel() / (time.monotonic() - began)
            bar.set_postfix_str(f"loss {loss.item():.3f} lr {lr:.1e} {rate / 1000:.1f}k tok/s {seen}", refresh=False)
        if (step + 1) % o.every == 0 or step + 1 == o.steps or stop:
            now = seconds + time.monotonic() - began
            save(path, o, task, step + 1, now, model, optimizers, generator)
            if stop:
                bar.close()
                print(f"stopped after step {step + 1}; python train.py --resume {path} goes on")
                return 130
            seen = brief(evaluate(model, task, o, device, quick=True))
            if bar.disable:
                print(f"step {step + 1:6} loss {loss.item():.4f} lr {lr:.1e} {seen}", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report(o, task, model, path, device, seconds + time.monotonic() - began)
    return 0


def pick_device(name):
    """The device, and a function giving the context to run the model in: bfloat16 where a CUDA device has it."""
    name = name or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise Bad(f"--device {name} cannot be used here ({str(e).splitlines()[0]}); --device cpu always works") from None
    half = name.startswith("cuda") and torch.cuda.is_bf16_supported()
    return name, lambda: torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()


def loop_bounds(o):
    low, _, high = o.loops.partition("-")
    return int(low), int(high or low)


def make_config(o, vocab_size):
    return Config(vocab_size, o.dim, o.heads, o.layers, loop_bounds(o)[1], o.transition, o.groups, o.inject, o.radius,
                  o.phases, o.length if o.task == "text" else 0)


def build(o, device, state=None):
    """Options -> task, model, optimizers, generator of the batches, and draw(generator) -> tokens, targets."""
    try:
        task = WordProblem(o.group, o.length) if o.task == "state" else Text(o.text or None)
        if o.task == "text":
            task.batch("train", 1, o.length), task.batch("val", 1, o.length)  # which says so if the text is too short
        config = make_config(o, task.vocab_size)
    except ValueError as e:
        raise Bad(e) from None
    except OSError as e:
        raise Bad(f"cannot read {o.text}: {e.strerror}") from None
    torch.manual_seed(o.seed)  # no transition draws from it, so all kinds start from the same blocks
    model = LoopedTransformer(config)
    model.recompute = o.recompute
    model.transition.nu.requires_grad_(o.freeze != "radii")
    model.transition.theta.requires_grad_(o.freeze != "phases")
    model.to(device)
    optimizers, generator = make_optimizers(model, o), torch.Generator().manual_seed(o.seed)
    if state:
        if task.digest != state["digest"]:
            raise Bad(f"{o.text or 'the text'} is not the text that {o.resume} was trained on; give that one back")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"])
        torch.set_rng_state(state["rng"])

    def draw(generator):
        if o.task == "state":
            return task.batch(o.batch, generator, device)
        return task.batch("train", o.batch, o.length, generator, device)
    if o.compile:
        compile_blocks(model, draw(torch.Generator())[0])
    return task, model, optimizers, generator, draw


def compile_blocks(model, tokens):
    """Compiles each block, not the loop, so that a new loop count costs nothing; goes on without where that fails."""
    try:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
        model(tokens, 1).sum().backward()
    except Exception as e:  # no compiler, no Triton, a Python too new: whatever it is, training works without
        print(f"--compile does not work here ({str(e).splitlines()[0][:200]}); going on without", file=sys.stderr)
        for block in model.blocks:
            del block.forward
    model.zero_grad()


# ---- Evaluation and report

@torch.no_grad()
def evaluate(model, task, o, device, loops=None, quick=False):
    """What the model gets right on sequences from a seed kept for this, or its loss on the validation tenth."""
    if o.task == "state":
        tokens, targets = task.batch(1024 if quick else 4096, torch.Generator().manual_seed(10 ** 6), device)
        right = torch.cat([model(x, loops).argmax(-1) for x in tokens.split(512)]) == targets
        right = right[:, 1:].cpu()  # what follows the BOS token
        prefix = right[:, :-1].all(1)
        return {"token": right.float().mean().item(), "sequence": right.all(1).float().mean().item(),
                "last": right[:, -1].float().mean().item(), "right_prefixes": int(prefix.sum()),
                "last_given_prefix": right[prefix, -1].float().mean().item() if prefix.any() else None,
                "positions": right.float().mean(0).tolist()}
    ids = task.splits["val"]
    starts = torch.arange(0, len(ids) - o.length, o.length)[::8 if quick else 1]
    windows = ids[starts[:, None] + torch.arange(o.length + 1)].long()
    losses = torch.cat([F.cross_entropy(model(w[:, :-1], loops).transpose(1, 2), w[:, 1:], reduction="none")
                        for w in windows.to(device).split(128)])
    return {"loss": losses.mean().item(), "last_quarter": losses[:, -max(1, o.length // 4):].mean().item()}


def brief(metrics):
    if "loss" in metrics:
        return f"val {metrics['loss']:.4f}"
    return f"seq {metrics['sequence']:.3f} last|prefix {number(metrics['last_given_prefix'])}"


def number(x):
    return "-" if x is None else f"{x:.4f}"


def report(o, task, model, path, device, seconds):
    """Prints what was learned, in lines of at most 40 columns, and writes it to the summary beside the checkpoint."""
    trained = loop_bounds(o)[1]
    counts = sorted({1, 2, 4, 8, 16, trained} | ({12, 32} if o.task == "state" else set()))
    curve = {n: evaluate(model, task, o, device, n) for n in counts}
    final = curve[trained]
    print()
    if o.task == "state":
        print(f"token accuracy              {final['token']:.4f}\nsequence accuracy           {final['sequence']:.4f}\n"
              f"last token                  {final['last']:.4f}\n"
              f"last token | prefix right   {number(final['last_given_prefix'])}\n"
              f"  measured on {final['right_prefixes']} right prefixes\n\naccuracy by position")
        for i in range(0, o.length, 8):
            print(f"{i + 1:4}: " + " ".join(f"{p:.2f}"[-4:].lstrip("0") if p < 1 else "1.0" for p in final["positions"][i:i + 8]))
        print("\nloops  sequence  last | prefix right")
    else:
        print(f"validation loss             {final['loss']:.4f}\n"
              f"  last quarter of context   {final['last_quarter']:.4f}\n\nloops      loss  last quarter")
    for n, m in curve.items():
        a, b = (m["sequence"], m["last_given_prefix"]) if o.task == "state" else (m["loss"], m["last_quarter"])
        print(f"{n:5}    {number(a)}  {number(b):>8}{'   <- trained' if n == trained else ''}")
    print("injected once: falls beyond the count\ntrained" if o.inject == "once" else
          "injected at every step: loops beyond the\ncount trained can help", end="; README.md, Depth\n\n")
    summary = {"run": {name: getattr(o, name) for name in RUN}, "seconds": round(seconds, 1), "device": device,
               "torch": torch.__version__, "threads": torch.get_num_threads(), **final, "curve": curve,
               "parameters": sum(p.numel() for p in model.parameters())}
    write(path.with_suffix(".json"), (json.dumps(summary) + "\n").encode())
    print(f"{seconds:.0f} s of training; saved\n  {path}\n  {path.with_suffix('.json')}")
    print(f"python train.py --sample {path}\nwrites text with it" if o.task == "text" else
          f"python looped.py {path}\ndraws the transition it learned")


# ---- Checkpoints

def write(path, data):
    """Beside the file, then moved over it: at every moment the file on disk is a whole one, the old or the new."""
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
        raise Bad(f"cannot write {path} ({e.strerror}); what was there before is untouched") from None


def save(path, o, task, step, seconds, model, optimizers, generator):
    buffer = io.BytesIO()
    torch.save({"run": {name: getattr(o, name) for name in RUN}, "vocab_size": task.vocab_size, "step": step,
                "chars": getattr(task, "chars", ""), "digest": task.digest, "seconds": seconds,
                "model": model.state_dict(), "optimizers": [x.state_dict() for x in optimizers],
                "generator": generator.get_state(), "rng": torch.get_rng_state()}, buffer)
    write(path, buffer.getvalue())


def load(path):
    """A checkpoint's file -> its state, its options, and the model. Nothing in the file is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        o = argparse.Namespace(**{name: state["run"][name] for name in RUN})
        with torch.device("meta"):  # shapes without memory; the weights come from the file
            model = LoopedTransformer(make_config(o, state["vocab_size"]))
        model.load_state_dict(state["model"], assign=True)
    except OSError as e:
        raise Bad(f"cannot read {path}: {e.strerror}") from None
    except Exception as e:  # whatever is in a broken or hostile file, it is not ours
        raise Bad(f"{path} is no whole checkpoint of this program ({type(e).__name__}: {str(e).splitlines()[0][:80]})") from None
    return state, o, model


def resume(o, given):
    if extra := given - {"resume", "device", "compile", "recompute", "every"}:
        raise Bad(f"--resume takes its flags from the checkpoint; leave out --{sorted(extra)[0]}")
    state, run, _ = load(o.resume)
    vars(o).update(vars(run), out=str(Path(o.resume).parent))
    if state["step"] >= o.steps:
        raise Bad(f"{o.resume} is finished: it holds step {state['step']} of {o.steps}")
    return train(o, state)


def sample(o, given):
    state, run, model = load(o.sample)
    chars = state["chars"]
    if not chars:
        raise Bad(f"{o.sample} holds a state-tracking run; --sample takes one made with --task text")
    prompt = o.prompt or ("\n" if "\n" in chars else chars[0])
    try:
        tokens = encode(prompt, chars)[None]
    except ValueError as e:
        raise Bad(f"--prompt: {e}") from None
    loops = loop_bounds(o)[1] if "loops" in given else None
    device, _ = pick_device(o.device)
    print(prompt, end="", flush=True)
    generator = torch.Generator(device).manual_seed(o.seed)
    for token in model.to(device).stream(tokens.to(device), o.chars, loops, o.temperature, o.top_k, generator):
        print(chars[token], end="", flush=True)
    print()
    return 0


def main(argv):
    sys.stdout.reconfigure(errors="replace")
    try:
        o, given = parse(argv)
        if o.sample:
            return sample(o, given)
        if o.resume:
            return resume(o, given)
        path = Path(o.out, run_name(o) + ".pt")
        if path.exists():
            state, run, _ = load(path)
            if any(getattr(run, name) != getattr(o, name) for name in RUN):
                raise Bad(f"{path} holds another run; give another --out, or move it away")
            if state["step"] < o.steps:
                raise Bad(f"{path} holds this run at step {state['step']} of {o.steps}; --resume it, or move it away")
        return train(o)
    except Bad as e:
        print(f"train.py: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
