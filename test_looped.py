"""Properties, not snapshots: python -m pytest -q test_looped.py"""
import hashlib
import http.server
import inspect
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from sympy.combinatorics import AlternatingGroup, Permutation, SymmetricGroup

import data
import looped
import train
from data import Text, WordProblem
from looped import Block, Cache, Config, LoopedTransformer, Transition, drift, gram

HERE = Path(__file__).parent
KINDS = Transition.KINDS
TURNING = "conformal", "blockwise", "complex"
torch.set_num_threads(1)


def scattered(kind, dim=24, groups=3, seed=0):
    """A float64 transition with random parameters."""
    t = Transition(dim, kind, groups).double()
    g = torch.Generator().manual_seed(seed)
    t.nu.data = torch.randn(len(t.nu), generator=g, dtype=torch.float64) * 0.7 - 1
    t.theta.data = torch.randn(len(t.theta), generator=g, dtype=torch.float64) * 2
    return t


def vectors(n, dim=24, seed=1):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(transition="blockwise", **changes):
    torch.manual_seed(0)
    return LoopedTransformer(Config(**{"vocab_size": 11, "dim": 32, "heads": 4, "loops": 3, "groups": 4,
                                       "transition": transition, **changes}))


# ---- Transition

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", range(6))
def test_dense_matrix_agrees(kind, steps):
    t, h = scattered(kind), vectors(5)
    dense = torch.linalg.matrix_power(t.matrix(), steps)
    assert torch.allclose(t(h, steps=steps), h @ dense.T, atol=1e-12)
    again = h
    for _ in range(steps):
        again = t(again)
    assert torch.allclose(t(h, steps=steps), again, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_eigenvalues(kind):
    t = scattered(kind)
    ours, theirs = t.eigenvalues(), torch.linalg.eigvals(t.matrix())
    key = lambda z: (round(z.real, 9), round(z.imag, 9))
    for a, b in zip(sorted(ours.tolist(), key=key), sorted(theirs.tolist(), key=key)):
        assert abs(a - b) < 1e-9
    assert torch.allclose(ours[::2], ours[1::2].conj()) or kind == "diagonal"
    assert torch.allclose(ours.abs(), t.radii())
    assert ours.abs().max() < 1 or kind == "identity"
    assert (kind in TURNING) == bool(t.phases().any())


@pytest.mark.parametrize("kind", TURNING)
def test_phases_that_start_as_signs_make_a_real_map(kind):
    eigenvalues = Transition(64, kind, phases="signs").eigenvalues()
    assert eigenvalues.imag.abs().max() < 1e-6 and sorted(eigenvalues.real.sign().tolist()) == [-1] * 32 + [1] * 32


def test_nesting():
    h, conformal, complex_ = vectors(5), scattered("conformal"), scattered("complex")
    one, all_ = scattered("blockwise", groups=1, seed=5), scattered("blockwise", groups=12, seed=5)
    one.load_state_dict(conformal.state_dict())
    all_.load_state_dict(complex_.state_dict())
    assert torch.equal(one(h), conformal(h)) and torch.equal(all_(h), complex_(h))
    assert not torch.allclose(one(h), all_(h))


@pytest.mark.parametrize("kind,part,kept", [
    ("conformal", 24, True), ("blockwise", 8, True), ("blockwise", 24, False), ("complex", 2, True),
    ("complex", 8, False), ("diagonal", 2, False), ("diagonal", 24, False)])
def test_angles_are_kept_exactly_where_the_table_says(kind, part, kept):
    t, (u, v) = scattered(kind), vectors(2)
    u[part:], v[part:] = 0, 0
    angle = drift(t, u, v, 12)
    dense = t.matrix()
    for steps in range(12):
        a, b = (torch.linalg.matrix_power(dense, steps) @ w for w in (u, v))
        assert abs(math.degrees(math.acos(F.cosine_similarity(a, b, 0).clamp(-1, 1).item())) - angle[steps]) < 1e-5
    assert ((angle - angle[0]).abs().max() < 1e-8) == kept


@pytest.mark.parametrize("kind", KINDS)
def test_gram_against_the_dense_matrix(kind):
    t, w = scattered(kind), vectors(1)[0]
    rows = torch.stack([torch.linalg.matrix_power(t.matrix(), s) @ w for s in range(10)])
    rows = F.normalize(rows, dim=1, eps=0)
    assert torch.allclose(gram(t, w, 10), rows @ rows.T, atol=1e-9)


def test_gram_of_a_conformal_map_is_toeplitz_and_known():
    t, w = scattered("conformal"), vectors(1)[0]
    G = gram(t, w, 30)
    weight = (w ** 2).view(-1, 2).sum(1) / (w ** 2).sum()
    for age in range(30):
        expected = (weight * torch.cos(age * t.phases()[::2])).sum()
        assert (G.diagonal(age) - expected).abs().max() < 1e-6
    G = gram(scattered("blockwise"), w, 30)
    assert (G.diagonal(1) - G[0, 1]).abs().max() > 1e-2  # several radii: only its end is Toeplitz


def test_grams_tend_to_their_limits():
    w = vectors(1)[0]
    assert (gram(scattered("diagonal"), w, 3000)[-5:, -5:] - 1).abs().max() < 1e-6  # one direction is left
    t = scattered("blockwise")
    slowest = int(t.radii().argmax()) // 8  # blockwise: the slowest group alone, a conformal map
    planes = slice(8 * slowest, 8 * slowest + 8)
    weight = (w[planes] ** 2).view(-1, 2).sum(1) / (w[planes] ** 2).sum()
    ages = torch.arange(5)
    limit = (weight * torch.cos(ages[:, None] * t.phases()[planes][::2])).sum(1)
    assert (gram(t, w, 3000)[-5:, -5:] - limit[(ages[:, None] - ages).abs()]).abs().max() < 1e-6
    t = scattered("complex")  # complex: the slowest plane alone, a turning of it
    theta = t.phases()[t.radii().argmax()]
    assert (gram(t, w, 3000)[-5:, -5:] - torch.cos((ages[:, None] - ages) * theta)).abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("wild", [-1e4, 1e4, -40.0, 6.0])
def test_radii_stay_inside(kind, wild):
    for dtype in torch.float32, torch.bfloat16, torch.float16, torch.float64:
        t = Transition(16, kind, 4).to(dtype)
        t.nu.data.fill_(wild)
        t.theta.data.fill_(wild)
        h = torch.randn(2, 16, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = t(h)
            assert ((0 < t.radii()) & (t.radii() < 1)).all()
        out.float().sum().backward()
        assert out.isfinite().all() and out.dtype == dtype and h.grad.isfinite().all()
        assert t.nu.grad.isfinite().all() and (kind == "diagonal" or t.theta.grad.isfinite().all())


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("inject", ["every", "once"])
def test_gradients_reach_every_radius_and_phase(kind, inject):
    model = small(kind, inject=inject)
    model(torch.randint(11, (4, 7))).logsumexp(-1).sum().backward()
    assert (model.transition.nu.grad != 0).all()
    assert kind == "diagonal" or (model.transition.theta.grad != 0).all()


def test_all_kinds_start_alike():
    for kind in KINDS[:4]:
        t = Transition(64, kind, 8)
        assert torch.allclose(t.radii(), torch.tensor(0.447))
        assert kind == "diagonal" or torch.equal(t.theta, Transition(64, "blockwise", 8).theta)
    assert torch.allclose(t.theta[[0, 3]], torch.tensor([math.pi, 0.03]))
    blocks = [dict(small(kind).named_parameters()) for kind in (*KINDS, "untied")]
    for name in "embed.weight", "blocks.0.qkv.weight", "blocks.0.down.weight":
        assert all(torch.equal(b[name], blocks[0][name]) for b in blocks)


# ---- Block and loop

@pytest.mark.parametrize("kind", [*KINDS, "untied"])
@pytest.mark.parametrize("inject", ["every", "once"])
def test_loops_equal_handwritten_steps(kind, inject):
    model, tokens = small(kind, inject=inject, layers=2).double(), torch.randint(11, (2, 6))
    e = model.embed(tokens)
    e = e / e.pow(2).mean(-1, keepdim=True).add(torch.finfo(e.dtype).eps).sqrt()
    h = torch.zeros_like(e)
    for step in range(5):
        h = h @ model.transition.matrix().T
        if step == 0 or inject == "every":
            h = h + e
        for layer in range(2):
            h = model.blocks[(2 * step + layer) % len(model.blocks)](h)
        expected = F.linear(model.norm(h), model.head.weight).float()
        assert torch.allclose(model(tokens, loops=step + 1), expected, atol=1e-5)
    assert len(model.blocks) == (6 if kind == "untied" else 2)


@pytest.mark.parametrize("loops", [1, 2, 5])
@pytest.mark.parametrize("context", [0, 4])
def test_causality(loops, context):
    model, tokens = small(context=context), torch.randint(11, (1, 9))
    before = model(tokens, loops)
    for t in range(9):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % 11
        moved = (model(changed, loops) - before).abs().amax(-1)[0]
        assert (moved[:t] < 1e-6).all() and moved[t] > 1e-4
        reach = t + (context - 1) * loops if context else 8
        assert (moved[reach + 1:] < 1e-6).all()


def test_attention_knows_order_but_not_absolute_position():
    block, h = Block(32, 4).double(), torch.randn(1, 6, 32, dtype=torch.float64)
    far = Block.rotary(torch.arange(100, 106), 8)
    assert torch.allclose(block(h), block(h, far), atol=1e-5)
    assert not torch.allclose(block(h)[:, -1], block(h.roll(1, 1)[:, [1, 0, 2, 3, 4, 5]])[:, -1], atol=1e-3)


@pytest.mark.parametrize("kind", ["blockwise", "untied"])
@pytest.mark.parametrize("context", [0, 10])
@pytest.mark.parametrize("loops", [1, 3, 5])
def test_cache_equals_no_cache(kind, context, loops):
    model = small(kind, layers=2, context=context).double()
    for length in 5, 14:  # a prompt shorter, and one longer than the context
        tokens = model.generate(torch.randint(11, (2, length)), 20, loops=loops, temperature=0)
        full = model(tokens, loops)
        assert torch.equal(full[:, length - 1:-1].argmax(-1), tokens[:, length:])
        caches = [Cache(context or 40) for _ in range(2 * loops)]
        parts = [model(tokens[:, :5], loops, caches)] + [model(tokens[:, t:t + 1], loops, caches)
                                                         for t in range(5, length + 20)]
        assert (torch.cat(parts, 1) - full).abs().max() < 1e-6


def test_generate():
    model, start = small(), torch.zeros(2, 1, dtype=torch.int64)
    out = model.generate(start, 9, top_k=10 ** 6, generator=torch.Generator().manual_seed(1))
    assert out.shape == (2, 10) and torch.equal(out[:, :1], start)
    assert torch.equal(out, model.generate(start, 9, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(model.generate(start, 9, top_k=1), model.generate(start, 9, temperature=0))
    assert torch.equal(model.generate(start, 0), start)
    assert len(list(model.stream(start, 4))) == 4


def test_forward_contract():
    model, tokens = small(), torch.randint(11, (2, 5))
    for loops in 1, 2, 3, 40:
        out = model(tokens, loops)
        assert out.shape == (2, 5, 11) and out.dtype == torch.float32 and out.isfinite().all()
    assert torch.equal(model(tokens), model(tokens, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).dtype == torch.float32
    with pytest.raises(ValueError, match="loops is 0"):
        model(tokens, 0)
    caches = [Cache(9) for _ in range(3)]
    model(tokens, 3, caches)
    with pytest.raises(ValueError, match="one at a time"):
        model(tokens, 3, caches)


@pytest.mark.parametrize("loops,steps", [(1, 1), (2, 3), (3, 5), (8, 8 + 4 * 3), (16, 16 + 8 * 4)])
def test_recompute_changes_nothing_and_costs_n_log_n(loops, steps):
    model, tokens = small().double(), torch.randint(11, (2, 5))
    grads, calls = [], []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for model.recompute in False, True:
        model.zero_grad()
        calls.clear()
        model(tokens, loops).logsumexp(-1).sum().backward()
        assert len(calls) == (steps if model.recompute else loops)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*grads)


def test_recompute_keeps_the_activations_of_one_step():
    model, kept = small(), {}
    for model.recompute in False, True:
        for loops in 4, 32:
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(1) or x, lambda x: x):
                model(torch.zeros(2, 5, dtype=torch.int64), loops)
            kept[model.recompute, loops] = len(saved)
    assert kept[True, 32] - kept[True, 4] <= 3 * 2  # three more halvings, a few tensors each
    assert kept[True, 32] < kept[False, 4] < kept[False, 32] / 6


def test_transition_says_what_does_not_fit():
    t = Transition(16)
    h = torch.zeros(16)
    for h, steps in (torch.zeros(3, 2), 1), (h.long(), 1), (torch.tensor(1.0), 1), (h, -1), (h, 1.5):
        with pytest.raises(ValueError, match="steps 0, 1, 2"):
            t(h, steps=steps)
    with pytest.raises(ValueError, match="finite ones"):
        gram(t, torch.zeros(16), 3)


def test_block_and_model_say_what_does_not_fit():
    with pytest.raises(ValueError, match="heads is 2"):
        Block(6, 2)
    assert small()(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4, 11)
    with pytest.raises(ValueError, match="0 tokens"):
        small().generate(torch.zeros(1, 0, dtype=torch.int64), 3)
    for temperature in -1.0, math.nan, math.inf:
        with pytest.raises(ValueError, match="temperature"):
            small().generate(torch.zeros(1, 1, dtype=torch.int64), 3, temperature=temperature)


def test_transition_takes_any_piece_of_a_tensor():
    whole = torch.randn(3, 5, 49)
    for kind in KINDS:
        t = Transition(16, kind, 4)
        for h in whole[..., 1:17], whole[..., 1:33:2], whole.flatten()[1:17], whole.mT[:, :16, 3]:
            assert torch.allclose(t(h), h @ t.matrix().T, atol=1e-6)
        assert t.bfloat16().eigenvalues().shape == (16,)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_gram_of_tiny_and_huge_writes(scale):
    t = Transition(24, "blockwise", 3)
    t.nu.data.fill_(3.9)  # a radius of 1e-21
    w = vectors(1)[0].float()
    assert torch.allclose(gram(t, w * scale, 10), gram(t, w, 10), atol=1e-5) and gram(t, w, 10).isfinite().all()


@pytest.mark.parametrize("wrong", [
    {"dim": 0}, {"dim": "16"}, {"loops": 2.5}, {"dim": 30}, {"heads": 3}, {"heads": 0}, {"dim": 12}, {"groups": 5},
    {"groups": 0}, {"loops": 0}, {"layers": 0}, {"vocab_size": 0}, {"transition": "spiral"}, {"inject": "never"},
    {"radius": 1.0}, {"radius": 0.0}, {"phases": "none"}, {"context": -1}])
def test_config_validates_itself(wrong):
    with pytest.raises(ValueError) as e:
        Config(**{"vocab_size": 11, **wrong})
    message, (name, value) = str(e.value), *wrong.items()
    assert "\n" not in message and name in message and str(value) in message


@pytest.mark.parametrize("cls", [Transition, Block, Cache, LoopedTransformer])
def test_pasted_alone(cls):
    space = {"math": math, "torch": torch, "nn": nn, "F": F}
    exec(inspect.getsource(cls), space)
    pasted = space[cls.__name__]
    if cls is Transition:
        for kind in KINDS:
            t = pasted(24, kind, 3)
            assert torch.allclose(t(torch.ones(24), steps=2), t.matrix() @ t.matrix() @ torch.ones(24), atol=1e-6)
    elif cls is Block:
        assert pasted(32, 4)(torch.randn(2, 5, 32)).shape == (2, 5, 32)
    elif cls is Cache:
        k, v = pasted(8)(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        assert k.shape == (1, 2, 3, 4)
    else:
        for needed in Transition, Block, Cache:
            exec(inspect.getsource(needed), space)
        model = pasted(Config(11))
        assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 11)


# ---- Data

def sympy_elements(name):
    """(elements, product), elements in our order, by sympy alone."""
    kind, n = name[0], int(name[1:])
    if kind == "Z":
        turn = Permutation(list(range(1, n)) + [0])
        return [turn ** k for k in range(n)]
    group = SymmetricGroup(n) if kind == "S" else AlternatingGroup(n)
    return sorted(group.elements, key=lambda p: p.array_form + list(range(p.size, n)))


@pytest.mark.parametrize("name", ["Z7", "S3", "S4", "A4", "A5", "S5"])
def test_tables_against_sympy(name):
    elements = sympy_elements(name)
    place = {p: i for i, p in enumerate(elements)}
    expected = [[place[a * b] for b in elements] for a in elements]  # sympy's a * b applies a first
    assert WordProblem(name).table.tolist() == expected
    assert elements[0].is_Identity


def test_direct_product_against_sympy():
    a4, z5 = sympy_elements("A4"), sympy_elements("Z5")
    join = lambda a, b: Permutation([a(i) for i in range(4)] + [4 + b(i) for i in range(5)])
    elements = [join(a, b) for a in a4 for b in z5]
    place = {p: i for i, p in enumerate(elements)}
    expected = [[place[a * b] for b in elements] for a in elements]
    assert WordProblem("A4xZ5").table.tolist() == WordProblem("A4_x_Z5").table.tolist() == expected


def test_word_problem():
    task = WordProblem("S3", 6)
    tokens, targets = task.batch(500, torch.Generator().manual_seed(3))
    again = task.batch(500, torch.Generator().manual_seed(3))
    assert torch.equal(tokens, again[0]) and torch.equal(targets, again[1])
    assert not torch.equal(tokens, task.batch(500, torch.Generator().manual_seed(4))[0])
    assert tokens.shape == targets.shape == (500, 7) and tokens.dtype == targets.dtype == torch.int64
    assert (tokens[:, 0] == 6).all() and (targets[:, 0] == 0).all() and task.vocab_size == 7
    assert set(tokens[:, 1:].unique().tolist()) == set(range(6)) == set(targets[:, -1].unique().tolist())
    for row, target in zip(tokens[:50].tolist(), targets[:50].tolist()):
        state = 0
        for g, expected in zip(row[1:], target[1:]):
            state = int(task.table[state, g])
            assert state == expected
    assert task.table[1, 2] != task.table[2, 1]  # so the order of composition can be told
    perms = sorted(p.array_form for p in SymmetricGroup(3).elements)
    assert perms[task.table[1, 2]] == [perms[2][i] for i in perms[1]]


def test_text(tmp_path, capsys):
    file = tmp_path / "t.txt"
    file.write_bytes("\ufeffhállo wörld\r\n".encode() * 40)
    text = Text(file)
    assert "byte-order mark" in (err := capsys.readouterr().err) and "CR LF" in err
    assert "\r" not in text.chars and text.decode(text.encode("wörld\n")) == "wörld\n"
    ids = torch.cat([text.splits["train"], text.splits["val"]])
    assert text.decode(ids).startswith("hállo wörld\n\ufeffhállo")
    assert len(text.splits["train"]) == int(0.9 * len(ids))
    x, y = text.batch("train", 5, 8, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (5, 8) and torch.equal(x[:, 1:], y[:, :-1]) and text.decode(x[0]) in text.decode(ids)
    assert torch.equal(x, text.batch("train", 5, 8, torch.Generator().manual_seed(0))[0])
    with pytest.raises(ValueError, match="'Z'"):
        text.encode("hZ")
    with pytest.raises(ValueError, match="context 500"):
        text.batch("val", 5, 500)


class Server(http.server.BaseHTTPRequestHandler):
    body = b"all the world is a stage\n" * 50

    def do_GET(self):
        self.send_response(404 if self.path == "/404" else 200)
        self.send_header("Content-Length", str(len(self.body) + (1000 if self.path == "/truncated" else 0)))
        self.end_headers()
        self.wfile.write(b"something else" + self.body[14:] if self.path == "/wrong" else self.body)

    def log_message(self, *args):
        pass


def test_download(tmp_path, monkeypatch, capsys):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Text, "SHA256", hashlib.sha256(Server.body).hexdigest())
    for path, reason in {"wrong": "SHA-256", "truncated": "IncompleteRead", "404": "404"}.items():
        monkeypatch.setattr(Text, "URL", f"{address}/{path}")
        assert len(Text().splits["train"]) > 100_000  # Python's manual
        data.tinyshakespeare.cache_clear()
        assert reason in (err := capsys.readouterr().err) and "not comparable" in err and err.count("\n") == 1
        assert not list(tmp_path.rglob("*.*"))
    monkeypatch.setattr(Text, "URL", f"{address}/good")
    assert len(Text().splits["train"]) == int(0.9 * len(Server.body)) and capsys.readouterr().err == ""
    server.shutdown()
    server.server_close()
    data.tinyshakespeare.cache_clear()
    assert len(Text().splits["train"]) == int(0.9 * len(Server.body))  # from the file kept
    data.tinyshakespeare.cache_clear()
    next(tmp_path.rglob("*.txt")).write_bytes(b"half")
    assert len(Text().splits["train"]) > 100_000 and "refused" in capsys.readouterr().err.lower()
    data.tinyshakespeare.cache_clear()


# ---- Training

TINY = ["--dim=16", "--heads=2", "--groups=2", "--loops=2", "--length=3", "--batch=8"]


def run(*argv, capsys=None):
    return train.main([str(a) for a in argv])


@pytest.mark.parametrize("kind", [*KINDS, "untied"])
def test_it_learns(kind, tmp_path):
    assert run("--transition", kind, "--length=4", "--loops=4", "--dim=32", "--groups=4", "--steps=200",
               "--optimizer=muon", "--init=0", "--lr=0.01", "--out", tmp_path) == 0
    summary = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert summary["token"] > 0.6  # chance is 1/6, and 0.375 for a model that sees the first element alone
    assert summary["run"]["transition"] == kind and set(summary["curve"]) >= {"1", "4", "32"}


def test_optimizer_treats_each_parameter_once():
    model = small(transition="complex")
    for name in "muon", "adamw":
        o = train.parse(["--optimizer", name])
        held = [p for x in train.make_optimizers(model, o) for g in x.param_groups for p in g["params"]]
        assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_muon_orthogonalises(shape):
    p = nn.Parameter(torch.zeros(shape))
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    p.grad = u @ torch.diag(torch.logspace(0, -1, min(shape))) @ v
    train.Muon([p], lr=1.0, weight_decay=0.0).step()
    size = torch.linalg.svdvals(p.detach()) / (0.2 * max(shape) ** 0.5)
    before = torch.linalg.svdvals(p.grad)
    assert size.max() / size.min() < (before.max() / before.min()) / 3 and size.max() < 1.4
    assert (p * p.grad).sum() < 0  # downhill


def test_freeze(tmp_path):
    for part, frozen, free in ("radii", "nu", "theta"), ("phases", "theta", "nu"):
        assert run(*TINY, "--steps=5", f"--freeze={part}", "--out", tmp_path / part) == 0
        learned = train.load(next((tmp_path / part).glob("*.pt")))[2].transition
        start = Transition(16, "blockwise", 2)
        assert torch.equal(getattr(learned, frozen), getattr(start, frozen))
        assert not torch.equal(getattr(learned, free), getattr(start, free))


def spawn(*argv, **kw):
    return subprocess.Popen([sys.executable, HERE / "train.py", *map(str, argv)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **kw)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k != "seconds")
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    """Five processes killed with SIGKILL at random moments, three on one task and two on the other."""
    text = tmp_path / "t.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    dice, kills = random.Random(), 0
    for task, n in ("--task=state", 3), ("--task=text", 2):
        flags = [task, *TINY, "--loops=1-3", "--steps=300", "--every=20"] + ["--text", text] * (task == "--task=text")
        straight = spawn(*flags, "--out", tmp_path / "straight")
        go = flags + ["--out", tmp_path / "killed"]
        for _ in range(n):
            p = spawn(*go)
            assert "blockwise on" in p.stdout.readline()
            while not (files := list((tmp_path / "killed").glob(f"{task[7:]}*.pt"))):
                time.sleep(0.01)
            time.sleep(dice.random() * 0.3)
            p.send_signal(signal.SIGKILL)
            kills += p.wait() == -signal.SIGKILL
            go = ["--resume", files[0], "--every=20"]
        assert spawn(*go).wait() == 0 and straight.wait() == 0
        a, b = (torch.load(tmp_path / d / files[0].name, weights_only=True) for d in ("straight", "killed"))
        assert a["step"] == 300 and same(a, b)
    assert kills == 5


def test_interrupt_saves_and_says_how_to_go_on(tmp_path):
    p = spawn(*TINY, "--steps=100000", "--out", tmp_path)
    assert "blockwise on" in p.stdout.readline()
    time.sleep(0.3)
    p.send_signal(signal.SIGINT)
    out = p.communicate()[0]
    assert p.returncode == 130 and "\r" not in out
    step, file = re.search(r"stopped after step (\d+); python train.py --resume=(\S+) goes on", out).groups()
    assert torch.load(file, weights_only=True)["step"] == int(step)


def test_report_fits_40_columns_and_a_pipe_has_no_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*TINY, "--steps=3", "--length=20") == 0
    out, err = capsys.readouterr()
    report = out[out.index("sequence   "):]
    assert max(map(len, report[:report.index("summary")].splitlines())) <= 40 and err == "" and "\r" not in out


def test_a_loss_that_is_not_finite_stops_and_keeps_the_good_checkpoint(tmp_path, capsys):
    flags = [*TINY, "--steps=400", "--every=1", "--lr=1000", "--init=100", "--optimizer=adamw", "--out", tmp_path]
    assert run(*flags) == 2
    err = capsys.readouterr().err
    assert re.search(r"step \d+ .*loss .*learning rate", err) and err.count("\n") == 1
    assert ("holds an earlier step" in err) == bool(list(tmp_path.glob("*.pt")))
    for file in tmp_path.glob("*.pt"):
        assert all(p.isfinite().all() for p in train.load(file)[2].parameters())


def test_a_full_disk_leaves_the_checkpoint_whole(tmp_path, capsys, monkeypatch):
    file = tmp_path / "x.pt"
    train.write(file, b"whole")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(train.UserError, match="No space left"):
        train.write(file, b"half")
    assert file.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [file]


def test_compile_without_a_compiler_goes_on(tmp_path, capsys, monkeypatch):
    def broken(f):
        raise RuntimeError("no compiler here\nand more")
    monkeypatch.setattr(torch, "compile", broken)
    assert run(*TINY, "--steps=3", "--compile", "--out", tmp_path) == 0
    assert "no compiler here" in (err := capsys.readouterr().err) and err.count("\n") == 1


def seal(path):
    """Ends a file as a checkpoint ends."""
    path.write_bytes(path.read_bytes() + hashlib.sha256(path.read_bytes()).digest())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Good and bad files for the table below."""
    d = tmp_path_factory.mktemp("made")
    (d / "text.txt").write_text("abc def\n" * 100)
    (d / "short.txt").write_text("abc")
    (d / "empty.txt").write_text("")
    (d / "latin1.txt").write_bytes(b"caf\xe9 " * 100)
    assert run(*TINY, "--steps=2", "--out", d / "state") == 0
    assert run("--task=text", *TINY, "--steps=2", "--text", d / "text.txt", "--out", d / "text") == 0
    state, text = next((d / "state").glob("*.pt")), next((d / "text").glob("*.pt"))
    (d / "empty.pt").write_bytes(b"")
    (d / "truncated.pt").write_bytes(state.read_bytes()[:3000])
    (d / "picture.pt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    torch.save({"weights": torch.zeros(3)}, d / "other.pt")
    content = torch.load(state, weights_only=True)
    torch.save({key: content[key] for key in content if key != "digest"}, d / "lacking.pt")
    content["model"]["head.weight"] = torch.zeros(3, 3)
    torch.save(content, d / "shape.pt")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(d / "pwned"),)
    (d / "evil.pt").write_bytes(pickle.dumps(Evil(), 2))
    torch.save({"run": Evil()}, d / "evil2.pt")
    for name in "other", "shape", "evil", "evil2":  # what is refused is what they hold
        seal(d / f"{name}.pt")
    return {"dir": d, "state": state, "text": text}


BAD = [  # arguments, and what the one line must name
    ("--stepps=5", "--steps"), ("--frobnicate", "--frobnicate"), ("extra", "extra"), ("--steps", "--steps"),
    ("--steps=0", "'0'"), ("--steps=-3", "'-3'"), ("--steps=many", "'many'"), ("--steps=2.5", "'2.5'"),
    ("--batch=0", "'0'"), ("--length=0", "'0'"), ("--loops=0", "'0'"), ("--loops=8-2", "8-2"),
    ("--loops=2-", "'2-'"), ("--loops=a", "'a'"), ("--loops=-1", "'-1'"), ("--lr=0", "'0'"), ("--lr=nan", "'nan'"),
    ("--lr=inf", "'inf'"), ("--lr=fast", "'fast'"), ("--seed=-1", "'-1'"), ("--dim=0", "'0'"), ("--dim=63", "63"),
    ("--dim=66", "66"), ("--heads=3", "heads is 3"), ("--heads=64", "heads is 64"), ("--groups=5", "groups is 5"),
    ("--groups=0", "'0'"), ("--layers=0", "'0'"), ("--radius=0", "'0'"), ("--radius=1", "'1'"),
    ("--radius=x", "'x'"), ("--dim=2000000", "memory"), ("--batch=1000000000000000000", "1000000"),
    ("--batch=1000000 --length=1000000", "memory"), ("--every=0", "'0'"),
    ("--seed=99999999999999999999", "99999999999999999999"), ("--topk=3", "--top-k"),
    ("--transition=spiral", "'spiral'"), ("--inject=twice", "'twice'"), ("--phases=odd", "'odd'"),
    ("--task=images", "'images'"), ("--optimizer=sgd", "'sgd'"), ("--freeze=all", "'all'"), ("--group=S0", "S0"),
    ("--group=A2", "A2"), ("--group=Q8", "Q8"), ("--group=S12", "2520"), ("--group=Z1", "Z1"),
    ("--group=A4x", "'A4x'"), ("--group=", "''"), ("--group=S3xZ1", "Z1"), ("--group=Z99999999", "2520"),
    ("--group=S99999", "2520"), ("--group=s3", "'s3'"), ("--group=S3 x Z2", "'S3 x Z2'"), ("--device=gpu", "gpu"),
    ("--device=cuda:99", "cuda:99"), ("--device=meta", "meta"), ("--device=cpu:0", "cpu:0"),
    ("--task=text --text={dir}/missing.txt", "missing.txt"), ("--task=text --text={dir}", "{dir}"),
    ("--task=text --text={dir}/short.txt", "context 64"), ("--task=text --text={dir}/empty.txt", "empty"),
    ("--task=text --text={dir}/latin1.txt", "0xe9"), ("--task=text --text={dir}/text.txt --length=5000", "5000"),
    ("--resume={dir}/missing.pt", "missing.pt"), ("--resume={dir}", "{dir}"),
    ("--resume={dir}/empty.pt", "empty.pt"), ("--resume={dir}/truncated.pt", "truncated.pt"),
    ("--resume={dir}/picture.pt", "picture.pt"), ("--resume={dir}/other.pt", "other.pt"),
    ("--resume={dir}/lacking.pt", "lacking.pt"), ("--resume={dir}/shape.pt", "shape.pt"),
    ("--resume={dir}/evil.pt", "evil.pt"), ("--resume={dir}/evil2.pt", "evil2.pt"),
    ("--resume={state} --lr=1", "--lr"), ("--sample={state}", "--task text"),
    ("--sample={dir}/empty.pt", "empty.pt"), ("--sample={text} --prompt=Zebra", "'Z'"),
    ("--sample={text} --chars=0", "'0'"), ("--sample={text} --temperature=-1", "'-1'"),
    ("--sample={text} --top-k=-1", "'-1'"), ("--sample={text} --loops=0", "'0'"),
    ("--compare --transition=complex", "--transition"), ("--compare --seeds=99999999999", "99999999999"),
    ("--resume=", "--resume"), ("--out=", "--out"), ("--prompt=x", "--prompt"),
    ("--text={dir}/text.txt", "--task text"), ("--task=text --group=../../x", "--task state"),
    ("--loops=--", "--loops"), ("--prompt=-- --sample={text}", "--prompt"),
    ("--task=text --text=/dev/zero", "/dev/zero"), ("--resume=a\nb", "a\\nb"), ("--out=/proc/a\x1bb", "a\\x1bb"),
    ("--sample={text} --bench", "--bench"), ("--compare --top-k=3", "--top-k"),
    ("--loops=1000000-9223372036854775807", "10000"), ("--layers=1000000000", "100"), ("--init=1e18", "100"),
    ("--lr=1e30", "1000"), ("--resume=/dev/zero", "/dev/zero"), ("--out={dir}/text.txt", "text.txt"),
    ("--out=/proc/none", "/proc/none"), ("--out=" + "a" * 300, "too long"),
]


@pytest.mark.parametrize("line,named", BAD)
def test_bad_input_gets_one_line(line, named, made, capsys):
    argv = [a.format(**made) for a in ([line] if "S3 x" in line or "\n" in line else line.split())]
    if not any(a.startswith(("--out", "--resume", "--sample")) for a in argv):
        argv.append(f"--out={made['dir']}/never")
    argv += ["--steps=2"] * ("--out=" in line)
    assert train.main(argv) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and named.format(**made) in err and "Traceback" not in err, err
    assert not (made["dir"] / "pwned").exists() and (named == "memory" or not (made["dir"] / "never").exists())
    shutil.rmtree(made["dir"] / "never", ignore_errors=True)


def test_a_checkpoint_that_anything_changed_gets_one_line(made, tmp_path, capsys):
    whole, dice, x = made["state"].read_bytes(), random.Random(), tmp_path / "x.pt"
    for _ in range(40):
        raw, at = bytearray(whole), dice.randrange(len(whole))
        raw[at] ^= 1 << dice.randrange(8)
        x.write_bytes(raw)
        assert run("--resume", x) == 2 and (err := capsys.readouterr().err).count("\n") == 1 and "x.pt" in err, at
    content = torch.load(made["state"], weights_only=True)
    content["run"]["lr"] = 0.5
    torch.save(content, x)
    assert run("--resume", x) == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_checkpoint_of_any_name_keeps_its_summary_apart(made, tmp_path):
    for name in "ck.json", "ck.partial", "ck", "it's a ck.pt":
        file = tmp_path / name
        file.write_bytes(made["state"].read_bytes())
        assert run("--resume", file) == 0 and train.load(file)[0]["step"] == 2 and train.summary_path(file).exists()


def test_nobody_reads_on(tmp_path):
    training = f"train.py {' '.join(TINY)} --steps=3 --out {tmp_path}"
    for line in "looped.py | head -n 1", "looped.py >&-", f"{training} | head -n 1", f"{training}2 > /dev/full":
        err = subprocess.run(["bash", "-c", f"OMP_NUM_THREADS=1 {sys.executable} {HERE}/{line}"], capture_output=True,
                             text=True).stderr
        assert "Traceback" not in err and "ignored" not in err and err.count("\n") <= 1, err


def test_samples_cannot_command_a_terminal(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("a\x1b]0;owned\x07" * 100)
    assert run("--task=text", *TINY, "--steps=2", "--text", tmp_path / "t.txt", "--out", tmp_path) == 0
    assert run("--sample", next(tmp_path.glob("*.pt")), "--chars=200", "--prompt=\x1b") == 0
    assert "\x1b" not in (out := capsys.readouterr().out) and "\ufffd" in out


def test_no_cuda_is_said(made, capsys):
    if not torch.cuda.is_available():
        assert run("--device=cuda", "--out", made["dir"] / "never") == 2
        assert "--device cuda" in capsys.readouterr().err


def test_out_is_not_overwritten_by_another_run(tmp_path, capsys):
    assert run(*TINY, "--steps=9", "--out", tmp_path) == 0
    file = next(tmp_path.glob("*.pt"))
    whole = file.read_bytes()
    capsys.readouterr()
    assert run(*TINY, "--steps=9", "--out", tmp_path) == 0  # reports again, trains nothing
    assert "holds step 9 of 9" in capsys.readouterr().out and file.read_bytes() == whole
    content = torch.load(file, weights_only=True)
    content["run"]["lr"] = 0.5
    torch.save(content, file)
    seal(file)
    before = file.read_bytes()
    assert run(*TINY, "--steps=9", "--out", tmp_path) == 2
    assert "other flags" in capsys.readouterr().err and file.read_bytes() == before


def test_a_renamed_checkpoint_goes_on_under_its_new_name(tmp_path, capsys):
    assert run(*TINY, "--steps=9", "--out", tmp_path) == 0
    file, copy = next(tmp_path.glob("*.pt")), tmp_path / "copy.pt"
    copy.write_bytes(file.read_bytes())
    file.write_bytes(b"mine")
    assert run("--resume", copy) == 0 and file.read_bytes() == b"mine" and copy.with_suffix(".json").exists()


def test_last_quarter_is_a_quarter(made):
    state, o, model = train.load(made["text"])
    task = Text(o.text)
    o.length = 8
    metrics = train.evaluate(model, task, o, "cpu")
    ids = task.splits["val"].long()
    windows = torch.stack([ids[i:i + 9] for i in range(0, len(ids) - 8, 8)])
    losses = F.cross_entropy(model(windows[:, :-1]).transpose(1, 2), windows[:, 1:], reduction="none")
    assert math.isclose(metrics["loss"], losses.mean().item(), rel_tol=1e-5)
    assert math.isclose(metrics["last_quarter"], losses[:, 6:].mean().item(), rel_tol=1e-5)


def test_sampling(made, capsys):
    assert run("--sample", made["text"], "--prompt=abc", "--chars=20", "--temperature=0") == 0
    out = capsys.readouterr().out
    assert out.startswith("abc") and len(out) == 24
    assert run("--sample", made["text"], "--chars=5", "--loops=7", "--top-k=999") == 0
    assert capsys.readouterr().out.startswith("\n")


def test_an_interrupted_comparison_goes_on(tmp_path, capsys):
    flags = ["--compare", *TINY, "--steps=200", "--seeds=1", "--out", tmp_path]
    p = spawn(*flags, start_new_session=True)
    while len(list(tmp_path.glob("*.json"))) < 2:
        time.sleep(0.01)
    os.killpg(p.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    out = p.communicate()[0]
    assert p.returncode == 130 and "interrupted; the same command goes on" in out and "Traceback" not in out, out
    there = {f: f.stat().st_mtime_ns for f in tmp_path.glob("*.json")}
    assert len(there) < 6
    assert run(*flags) == 0 and len(list(tmp_path.glob("*.json"))) == 6 and not list(tmp_path.glob("*.partial"))
    assert all(f.stat().st_mtime_ns == time for f, time in there.items())
    out = capsys.readouterr().out
    assert all(kind in out for kind in (*KINDS, "untied")) and "sequence" in out
    one = train.parse([*TINY, "--steps=200", "--out", str(tmp_path)])
    file = train.summary_path(train.checkpoint_path(one))
    odd = [re.sub('"token": [^,]+', f'"token": {x}', file.read_text()) for x in ("Infinity", '"x"', "[]")]
    for text in "{", "[]", "{}", *odd:
        file.write_text(text)
        with pytest.raises(train.UserError, match="is broken"):
            train.run_one(one, "S3")


def test_interval():
    assert train.interval([1.0, 2.0, 3.0]).split() == ["2.0000", "1.0000", "-0.4826", "..", "4.4826", "3"]
    low, high = (float(x) for x in train.interval([*map(float, range(15))]).split()[2:5:2])
    assert abs((high - low) / 2 - 2.145 * 20 ** 0.5 / 15 ** 0.5) < 0.01  # the variance of 0 .. 14 is 20
    assert train.interval([]).split() == ["-", "0"] and train.interval([0.5]).split() == ["0.5000", "1"]


# ---- Pictures

@pytest.mark.parametrize("dim,groups", [(2, 1), (24, 3), (64, 8)])
def test_pictures_fit_80_columns(dim, groups, capsys):
    looped.show([(kind, Transition(dim, kind, groups)) for kind in KINDS[:4]])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out


def test_looped_draws_a_checkpoint(made, capsys):
    assert looped.main([str(made["state"])]) == 0
    out = capsys.readouterr().out
    assert "start" in out and "learned" in out
    assert looped.main([str(made["dir"] / "empty.pt")]) == 2 and capsys.readouterr().err.count("\n") == 1
