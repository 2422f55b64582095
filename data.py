"""
The two tasks: following a product in a finite group, and predicting the next character of a text.

Batches are drawn from a torch.Generator on the CPU, so one seed gives the same batches on every machine. Bad input
raises ValueError with one line that says what to do.
"""
import contextlib
import functools
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
    """State tracking: given g1 .. gT from a finite group, predict every prefix product g1, g1 g2, ..

    group:  Z# (cyclic, # elements), S# (all permutations of # points), A# (the even ones), or a product, as A4xZ5
    length: T
    table:  [a, b] is a then b: for permutations, point i goes to b[a[i]]. Element 0 is the identity, permutations are
            in lexicographic order, and (a, b) of a product is a |B| + b.

    A token of its own, numbered after the elements, begins every sequence; the target there is the empty product, 0.
    Without it, rotary positions being relative, a prefix of one token repeated looks the same at every length.
    """
    MAX_ORDER = 2520  # A7, whose table takes 51 MB

    def __init__(self, group="S3", length=8):
        if not re.fullmatch(r"[ZSA][0-9]{1,9}(_?x_?[ZSA][0-9]{1,9})*", group):
            raise ValueError(f"group is {group!r}; write Z#, S# or A#, as Z60, S3 or A5, or a product, as A4xZ5")
        if length < 1:
            raise ValueError(f"length is {length}; it must be at least 1")
        order, table = 1, np.zeros((1, 1), dtype=np.int64)
        for kind, n in re.findall("([ZSA])([0-9]+)", group):
            n = int(n)
            size = n if kind == "Z" else math.factorial(min(n, 20)) // (2 if kind == "A" and n > 1 else 1)
            if size < 2:
                raise ValueError(f"group {group}: {kind}{n} has no element beside the identity; take Z2, S2 or A3 up")
            order *= size
            if order > self.MAX_ORDER:
                raise ValueError(f"group {group} has over {self.MAX_ORDER} elements; the largest are S6, A7, Z2520")
            factor = multiplication_table(kind, n)
            table = (table[:, None, :, None] * size + factor[None, :, None, :]).reshape(order, order)
        self.table, self.order, self.vocab_size = torch.from_numpy(table), order, order + 1
        self.length, self.digest = length, group

    def batch(self, n, generator=None, device=None):
        """n sequences: tokens and targets, each (n, length + 1) int64, on the device."""
        elements = torch.randint(self.order, (n, self.length), generator=generator).to(device)
        self.table = self.table.to(elements.device)
        products = [torch.zeros_like(elements[:, 0])]
        for g in elements.unbind(1):
            products.append(self.table[products[-1], g])
        begin = torch.full_like(elements[:, :1], self.order)
        return torch.cat((begin, elements), 1), torch.stack(products, 1)


def multiplication_table(kind, n):
    """(order, order) int64; row a, column b: a then b."""
    if kind == "Z":
        return np.add.outer(np.arange(n), np.arange(n)) % n
    perms = np.array(list(itertools.permutations(range(n))))
    if kind == "A":
        perms = perms[np.linalg.det(np.eye(n)[perms]) > 0]  # the determinant of its matrix is a permutation's sign
    digits = n ** np.arange(n)[::-1]  # read as a number, a permutation keeps its place in the order
    return np.stack([np.searchsorted(perms @ digits, perms[:, a] @ digits) for a in perms])


class Text:
    """The characters of a UTF-8 file; the first nine tenths train, the rest validates, as in nanoGPT.

    path:  the file. None: tinyshakespeare, downloaded once and kept in ~/.cache/looped (or below XDG_CACHE_HOME); with
           no network, the manual that ships inside Python, on which losses are not comparable.
    chars: only encode and decode, with these characters, and read no file.
    """
    URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

    def __init__(self, path=None, chars=None):
        if chars is not None:
            self.chars = chars
            return
        if path and not Path(path).is_file():
            raise ValueError(f"there is no file {path}, seen from {Path.cwd()}")
        raw, name = (Path(path).read_bytes(), path) if path else (tinyshakespeare(self.URL, self.SHA256), "text")
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise ValueError(f"{name} is not UTF-8: byte {raw[e.start]:#04x} at offset {e.start}; "
                             "convert it, as with iconv -t utf-8") from None
        if not text:
            raise ValueError(f"{name} is empty; give a file with some text in it")
        if raw.startswith(b"\xef\xbb\xbf"):
            print(f"{name}: left out the byte-order mark", file=sys.stderr)
        if "\r\n" in text:
            text = text.replace("\r\n", "\n")
            print(f"{name}: read the line ends CR LF as LF", file=sys.stderr)
        points, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), return_inverse=True)
        self.chars, self.vocab_size = "".join(map(chr, points)), len(points)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        ids, cut = torch.from_numpy(ids.astype(np.int32)), int(0.9 * len(ids))
        self.splits = {"train": ids[:cut], "val": ids[cut:]}

    def encode(self, text):
        """str -> (len,) int64. Raises ValueError for a character that the text does not have."""
        if unknown := [c for c in text if c not in self.chars]:
            raise ValueError(f"character {unknown[0]!r} is not among the {len(self.chars)} of the text: {self.chars!r}")
        return torch.tensor([self.chars.index(c) for c in text], dtype=torch.int64)

    def decode(self, ids):
        """(len,) integers -> str."""
        return "".join(self.chars[i] for i in ids)

    def batch(self, split, n, context, generator=None, device=None):
        """n windows of "train" or "val": characters, and those that follow them; each (n, context) int64."""
        ids = self.splits[split]
        if len(ids) <= context:
            raise ValueError(f"the {split} part of the text has {len(ids)} characters and context {context} needs "
                             f"{context + 1}; take a longer text or a smaller --length")
        start = torch.randint(len(ids) - context, (n,), generator=generator)
        window = ids[start[:, None] + torch.arange(context + 1)].long().to(device)
        return window[:, :-1], window[:, 1:]


@functools.cache  # a benchmark asks for it again and again
def tinyshakespeare(url, sha256):
    intact = lambda raw: hashlib.sha256(raw).hexdigest() == sha256
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "looped", "tinyshakespeare.txt")
        if path.exists() and intact(raw := path.read_bytes()):
            return raw
        with urllib.request.urlopen(url, timeout=20) as reply:
            raw = reply.read()
        if not intact(raw):
            raise OSError("what came is not the file (its SHA-256 differs)")
        with contextlib.suppress(OSError):  # without it, or with half of it, it is fetched again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        return raw
    except (OSError, HTTPException, RuntimeError) as e:  # the last: nobody's home
        from pydoc_data.topics import topics
        print(f"no tinyshakespeare: {e or type(e).__name__}. Taking Python's own manual instead, on which losses are "
              "not comparable; --text FILE takes any text", file=sys.stderr)
        return "\n".join(topics.values()).encode()
