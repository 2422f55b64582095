"""
The two tasks: following a product in a finite group, and predicting the next character of a text.

Both draw their batches from a torch.Generator on the CPU, so that one seed gives the same batches on every machine.
Bad input raises ValueError with one line that says what to do.
"""
import hashlib
import itertools
import math
import os
import re
import sys
import urllib.request
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch


class WordProblem:
    """Given g1 .. gT from a finite group, predict every prefix product g1, g1 g2, ... : state tracking.

    group:  Z# (cyclic, # elements), S# (all permutations of # points), A# (the even ones), or a direct product of
            such, as A4xZ5
    length: T

    Elements are numbered from the identity, 0; permutations in lexicographic order; (a, b) of a product as a |B| + b.
    table[a, b] is a then b: for permutations, point i goes to b[a[i]].

    Token number `order` begins every sequence, and the target there is the empty product, 0. Without it, rotary
    positions being relative, a prefix that is one token repeated looks the same at every length.
    """
    MAX_ORDER = 2520  # A7, whose table takes 51 MB

    def __init__(self, group="S3", length=8):
        factors = re.findall(r"([ZSA])(\d{1,9})(?:_?x_?|$)", group)
        if not re.fullmatch(r"[ZSA]\d{1,9}(_?x_?[ZSA]\d{1,9})*", group):
            raise ValueError(f"group is {group!r}; write Z#, S# or A#, as Z60, S3 or A5, or a product, as A4xZ5")
        if length < 1:
            raise ValueError(f"length is {length}; it must be at least 1")
        order = 1
        for kind, n in factors:
            n = int(n)
            size = n if kind == "Z" else math.factorial(min(n, 20)) // (2 if kind == "A" and n > 1 else 1)
            if size < 2:
                raise ValueError(f"group {group}: {kind}{n} has one element or none, so there is nothing to track; "
                                 "the smallest are Z2, S2 and A3")
            order *= size
        if order > self.MAX_ORDER:
            raise ValueError(f"group {group} has more than {self.MAX_ORDER} elements; the largest are S6, A7, Z2520")

        table = np.zeros((1, 1), dtype=np.int64)
        for kind, n in factors:
            factor = multiplication_table(kind, int(n))
            table = table[:, None, :, None] * len(factor) + factor[None, :, None, :]
            table = table.reshape(2 * [table.shape[0] * table.shape[1]])
        self.table = torch.from_numpy(table)
        self.group, self.length, self.order, self.vocab_size = group, length, order, order + 1
        self.digest = group

    def batch(self, n, generator=None, device=None):
        """n sequences: tokens and targets, each (n, length + 1) int64, on the device."""
        elements = torch.randint(self.order, (n, self.length), generator=generator).to(device)
        table = self.table = self.table.to(elements.device)
        products = [torch.zeros_like(elements[:, 0])]
        for g in elements.unbind(1):
            products.append(table[products[-1], g])
        bos = torch.full_like(elements[:, :1], self.order)
        return torch.cat((bos, elements), 1), torch.stack(products, 1)


def multiplication_table(kind, n):
    """(order, order) int64, row a column b: a then b."""
    if kind == "Z":
        return np.add.outer(np.arange(n), np.arange(n)) % n
    perms = np.array(list(itertools.permutations(range(n))))
    if kind == "A":
        inversions = sum(perms[:, i] > perms[:, j] for i in range(n) for j in range(i + 1, n))
        perms = perms[inversions % 2 == 0]
    digits = n ** np.arange(n)[::-1]  # read as a number, a permutation has its place in the lexicographic order
    return np.stack([np.searchsorted(perms @ digits, perms[:, a] @ digits) for a in perms])


class Text:
    """Characters of a UTF-8 text file; the first nine tenths train, the rest validates, as in nanoGPT.

    path: the file. None: tinyshakespeare, downloaded once and kept in ~/.cache/looped (or below XDG_CACHE_HOME); with
    no network, the manual that ships inside Python, on which losses are not comparable.
    """
    URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

    def __init__(self, path=None):
        raw = self.tinyshakespeare() if path is None else Path(path).read_bytes()
        name = path or "the text"
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise ValueError(f"{name} is not UTF-8: byte {raw[e.start]:#04x} at offset {e.start}; "
                             "convert it, as with iconv -t utf-8") from None
        if raw.startswith(b"\xef\xbb\xbf"):
            print(f"{name}: left out the byte-order mark", file=sys.stderr)
        if "\r\n" in text:
            text = text.replace("\r\n", "\n")
            print(f"{name}: read the line ends CR LF as LF", file=sys.stderr)
        if not text:
            raise ValueError(f"{name} is empty; give a file with some text in it")
        points, ids = np.unique(code_points(text), return_inverse=True)
        self.chars = "".join(map(chr, points))
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        ids = torch.from_numpy(ids.astype(np.int32))
        cut = int(0.9 * len(ids))
        self.splits = {"train": ids[:cut], "val": ids[cut:]}
        self.vocab_size = len(points)

    def encode(self, text):
        """str -> (len,) int64. Raises ValueError for a character that the text does not have."""
        return encode(text, self.chars)

    def decode(self, ids):
        """(len,) integers -> str."""
        return decode(ids, self.chars)

    def batch(self, split, n, context, generator=None, device=None):
        """n windows drawn from "train" or "val": inputs and the characters that follow, each (n, context) int64."""
        ids = self.splits[split]
        if len(ids) <= context:
            raise ValueError(f"the {split} tenths of the text have {len(ids)} characters, context {context} needs "
                             f"{context + 1}; take a longer text or a shorter context")
        start = torch.randint(len(ids) - context, (n,), generator=generator)
        window = ids[start[:, None] + torch.arange(context + 1)].long().to(device)
        return window[:, :-1], window[:, 1:]

    def tinyshakespeare(self):
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "looped", "tinyshakespeare.txt")
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == self.SHA256:
            return path.read_bytes()
        try:
            with urllib.request.urlopen(self.URL, timeout=20) as reply:
                raw = reply.read()
            if hashlib.sha256(raw).hexdigest() != self.SHA256:
                raise OSError("what came is not the file (its SHA-256 differs)")
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")  # moved into place whole, or never seen
            partial.write_bytes(raw)
            partial.replace(path)
            return raw
        except (OSError, HTTPException) as e:
            from pydoc_data.topics import topics
            print(f"no tinyshakespeare: {e or type(e).__name__}. Taking Python's own manual instead, on which losses "
                  "are not comparable; --text FILE takes any text", file=sys.stderr)
            return "\n".join(topics.values()).encode()


def code_points(text):
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def encode(text, chars):
    """str -> (len,) int64, the places of its characters in the sorted string chars."""
    points, known = code_points(text), code_points(chars)
    ids = np.searchsorted(known, points).clip(max=len(known) - 1)
    if (known[ids] != points).any():
        odd = chr(points[known[ids] != points][0])
        raise ValueError(f"character {odd!r} is not among the {len(chars)} the model knows: {chars!r}")
    return torch.from_numpy(ids)


def decode(ids, chars):
    return "".join(chars[i] for i in ids)
