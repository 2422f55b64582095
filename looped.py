"""
Looped transformers with conformal transitions, in one file.

A looped transformer reuses one block for N recurrent steps, so that depth is spent at run time and not in
parameters. Between two steps a linear *transition* A acts on the residual stream:

    h = 0
    repeat N times:
        h = A h + e          # e: the embedded input, RMS-normalised; at every step, or only at the first
        h = block(h)         # the same weights every step
    logits = head(norm(h))

A *write* is a vector w that e or a block adds to h. If it is made at step s, it has become A^(t-s) w at step t. Whether
the block can still read it there, and can tell how old it is, depends on the geometry of A. A map is *conformal* if it
keeps all angles: a rotation times one scale. The rotations here turn fixed planes, each of two neighbouring
coordinates. Read in order: Config; Transition, the subject; Block, an ordinary transformer block; LoopedTransformer,
the loop above; then two ways to look at A, and pictures of it.

    B, T     sequences in a batch, positions in a sequence
    d        width of the residual stream (dim); plane j is the pair of coordinates (2j, 2j+1)
    G        number of groups; a group is a run of d/2/G neighbouring planes
    e, h     (B, T, d)  embedded input; residual stream
    N        recurrent steps (loops)
    A        (d, d)     transition, formed only to check: multiplying by its eigenvalues is enough
    r        in (0, 1)  radius: what a write keeps of its length in one step; how many there are, the kind says
    theta_j  (d/2,)     phase of plane j, in radians: how far a write turns in one step

Sources: the transitions follow a paper on blockwise conformal transitions of which only the abstract and three
captions were at hand (README.md says what is whose). r = exp(-exp(nu)): Linear Recurrent Unit, Orvieto et al. 2023.
The free diagonal and its start at r = 0.447: the looped model Parcae, Prairie et al. 2026. Rotary positions: RoFormer,
Su et al. 2021.
"""
import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint


@dataclass
class Config:
    """The shape of a model. Raises ValueError, in one line, for a bad value, even of a field this kind does not use."""
    vocab_size: int
    dim: int = 64                  # d
    heads: int = 4                 # attention heads, each of an even size, as rotary positions turn pairs
    layers: int = 1                # blocks inside one recurrent step
    loops: int = 8                 # N, unless a call gives another
    transition: str = "blockwise"  # one of Transition.KINDS; or "untied", the control without a loop: A = I and each of
                                   # the N steps has its own blocks (asked for more steps, it begins again at the first)
    groups: int = 8                # G
    inject: str = "every"          # add e at "every" step, or "once", at the first
    radius: float = 0.447          # where every radius starts
    phases: str = "log"            # where the phases start, one of Transition.PHASES
    context: int = 0               # attention window, in positions, the current one included; 0: no limit

    def __post_init__(self):
        for name in "vocab_size", "dim", "heads", "layers", "loops", "context":
            value, least = getattr(self, name), 0 if name == "context" else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim is {self.dim} and heads is {self.heads}; dim must be a multiple of 2 x heads")
        for name, known in ("inject", ("every", "once")), ("transition", (*Transition.KINDS, "untied")):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        self.make_transition()  # checks the rest

    def make_transition(self):
        kind = "identity" if self.transition == "untied" else self.transition
        return Transition(self.dim, kind, self.groups, self.radius, self.phases)


class Transition(nn.Module):
    """The linear map A that acts on the residual stream between two recurrent steps.

    Coordinates (2j, 2j+1) are read as one complex number, and A multiplies it by r exp(i theta): the plane turns by
    theta and keeps r of its length. Only the diagonal has two radii in a plane. The kinds differ in how many radii and
    phases there are:

        kind       radii  phases
        diagonal   d      none    every coordinate shrinks on its own; nothing turns
        conformal  1      d/2     all angles are kept
        blockwise  G      d/2     conformal within each group, and every group has its own timescale
        complex    d/2    d/2     angles are kept inside a plane only
        identity   none   none    A = I: nothing fades, nothing turns

    Parameters: nu, one for each radius r = exp(-exp(nu)), and theta, one for each phase. `groups` also sets how often
    the starting phases repeat, in all three kinds that turn: they start as one and the same map. Raises
    ValueError for arguments that fit no map.
    """
    KINDS = "diagonal", "conformal", "blockwise", "complex", "identity"
    PHASES = "log", "uniform", "zero", "signs"

    def __init__(self, dim, kind="blockwise", groups=8, radius=0.447, phases="log"):
        super().__init__()
        for name, value, known in ("transition", kind, self.KINDS), ("phases", phases, self.PHASES):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        if not isinstance(dim, int) or dim < 2 or dim % 2:
            raise ValueError(f"dim is {dim}; it must be even and at least 2")
        if not isinstance(groups, int) or groups < 1 or dim // 2 % groups:
            raise ValueError(f"groups is {groups}; it must divide dim / 2, which is {dim // 2}")
        if not 0.001 <= radius <= 0.999:
            raise ValueError(f"radius is {radius}; it must lie between 0.001 and 0.999")
        self.dim, self.kind, self.groups = dim, kind, groups

        # All radii start at one value, so that no kind wins by its radii. At Parcae's 0.447, the root of 1/5, a write
        # has faded to less than a tenth after three steps.
        count = {"diagonal": dim, "conformal": 1, "blockwise": groups, "complex": dim // 2, "identity": 0}[kind]
        self.nu = nn.Parameter(torch.full((count,), math.log(-math.log(radius))))

        # Phases log-spaced from half a turn per step to nearly none make a clock with fast and slow hands. Every
        # group is such a clock, with n hands: 4 of them at dim 64 and 8 groups.
        n = dim // 2 // groups
        start = {"log": torch.logspace(math.log10(math.pi), math.log10(0.03), n),
                 "uniform": torch.linspace(math.pi, math.pi / n, n),
                 "zero": torch.zeros(n),
                 "signs": math.pi * (1 - torch.arange(n) % 2)}[phases]  # frozen: planes 0, 2, .. negative
        self.theta = nn.Parameter(start.repeat(0 if kind in ("diagonal", "identity") else groups))

    def forward(self, h, steps=1):
        """A^steps h in closed form. h: (..., d) -> (..., d); steps: an integer >= 0."""
        if h.shape[-1:] != (self.dim,) or not h.is_floating_point() or steps < 0 or steps % 1:
            raise ValueError(f"h is {tuple(h.shape)} {h.dtype}, steps {steps}; h must be (..., {self.dim}) and "
                             "floating, steps 0, 1, 2, ..")
        return self.power(steps)(h)

    def power(self, steps=1):
        """The function h -> A^steps h, (..., d) -> (..., d), with the eigenvalues worked out once for all its calls."""
        if self.kind == "identity":
            return lambda h: h
        if self.kind == "diagonal":
            scale = self.radii() ** steps
            return lambda h: (h * scale).to(h.dtype)
        rate = self.rates()[:, None]
        turn = torch.exp(steps * torch.complex(-rate, self.theta.to(rate.dtype).view(len(rate), -1))).flatten()

        def act(h):
            planes = h.to(torch.promote_types(h.dtype, torch.float32)).unflatten(-1, (-1, 2)).contiguous()
            if planes.storage_offset() % 2:  # a piece of a larger tensor that torch cannot read as complex in place
                planes = planes.clone()
            return torch.view_as_real(torch.view_as_complex(planes) * turn).flatten(-2).to(h.dtype)
        return act

    def rates(self):
        """exp(nu) = -log r, for each radius: (d,), (1,), (G,), (d/2,) or (0,), as in the table."""
        # float32 rounds exp(-exp(-18)) to 1 and exp(-exp(5)) to 0, and half precision does so much sooner. A nu beyond
        # these bounds gets no gradient.
        return torch.exp(self.nu.to(torch.promote_types(self.nu.dtype, torch.float32)).clamp(-16, 4))

    def radii(self):
        """(d,) the radius at each coordinate, strictly inside (0, 1) for any nu; 1 for the identity."""
        if self.kind == "identity":
            return self.rates().new_ones(self.dim)
        return torch.exp(-self.rates()).repeat_interleave(self.dim // len(self.nu))

    def phases(self):
        """(d,) the phase of the plane that each coordinate lies in, in radians; 0 for the kinds without."""
        theta = self.theta.to(torch.promote_types(self.theta.dtype, torch.float32))
        return theta.repeat_interleave(2) if len(theta) else theta.new_zeros(self.dim)

    def eigenvalues(self):
        """(d,) complex: r exp(i theta) and r exp(-i theta) of each plane, next to each other; without phases just r."""
        sign = torch.tensor([1, -1], device=self.nu.device).repeat(self.dim // 2)
        return torch.polar(self.radii(), self.phases() * sign)

    def matrix(self):
        """(d, d) the dense A, for checking."""
        return self(torch.eye(self.dim).to(self.nu)).T


class Block(nn.Module):
    """A pre-norm transformer block: causal attention with rotary positions, then an MLP. (B, T, d) -> (B, T, d).

    rotary: (T, d/heads/2) complex, see there; mask: (T, T) bool, True where a position may look; cache: a Cache.
    """

    def __init__(self, dim, heads):
        super().__init__()
        if heads < 1 or dim % (2 * heads):
            raise ValueError(f"dim is {dim} and heads is {heads}; dim must be a multiple of 2 x heads")
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    @staticmethod
    def rotary(positions, size):
        """positions (T,) -> (T, size/2) complex: how far each pair of coordinates of a head turns there."""
        speed = 10000 ** (-torch.arange(0, size, 2, device=positions.device) / size)
        angle = torch.outer(positions, speed)
        return torch.polar(torch.ones_like(angle), angle)

    def forward(self, h, rotary=None, mask=None, cache=None):
        B, T, d = h.shape
        if rotary is None:  # it is the same at every step, so a loop makes it once and hands it in
            rotary = self.rotary(torch.arange(T, device=h.device), d // self.heads)
        qkv = self.qkv(self.norm1(h)).view(B, T, 3 * self.heads, d // self.heads).transpose(1, 2)
        qk, v = qkv.split((2 * self.heads, self.heads), 1)
        planes = qk.to(torch.promote_types(qk.dtype, torch.float32)).unflatten(-1, (-1, 2))
        q, k = torch.view_as_real(torch.view_as_complex(planes) * rotary).flatten(-2).to(v.dtype).chunk(2, 1)
        if cache is not None:
            k, v = cache(k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1)
        h = h + self.out(y.transpose(1, 2).reshape(B, T, d))
        return h + self.down(F.relu(self.up(self.norm2(h)), inplace=True))


class Cache:
    """Keys and values of one block at one recurrent step: those of the last `window` positions, in a ring.

    The first call may bring as many positions as fit, every later one brings one.
    """

    def __init__(self, window):
        self.window, self.seen, self.rings = window, 0, None

    def __call__(self, *new):
        """k, v (B, heads, T, size) of the next positions -> k, v of all that these look back on, in any order, as each
        key is already turned to its position."""
        T, at = new[0].shape[2], self.seen % self.window
        if self.rings is None:
            self.rings = [x.new_zeros(*x.shape[:2], self.window, x.shape[3]) for x in new]
        for ring, x in zip(self.rings, new):
            ring.narrow(2, at, T).copy_(x)
        self.seen += T
        return [ring.narrow(2, 0, min(self.seen, self.window)) for ring in self.rings]


class LoopedTransformer(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, vocab_size) float32, with any number of loops >= 1.

    caches: loops * layers of them, those of the first step first; then tokens are the positions that follow.
    """

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        nn.init.normal_(self.embed.weight, std=0.02)  # e is normalised: only how fast it changes follows
        stacks = c.loops if c.transition == "untied" else 1
        self.blocks = nn.ModuleList(Block(c.dim, c.heads) for _ in range(stacks * c.layers))
        self.transition = c.make_transition()
        self.norm, self.head = nn.LayerNorm(c.dim, bias=False), nn.Linear(c.dim, c.vocab_size, bias=False)
        self.recompute = False  # True, in training: keep h at log2(loops) steps, work out the rest again going backward

    def forward(self, tokens, loops=None, caches=None):
        c, T = self.config, tokens.shape[1]
        loops = c.loops if loops is None else loops
        if loops < 1:
            raise ValueError(f"loops is {loops}; it must be at least 1")
        start = caches[0].seen if caches else 0
        if start and T > 1:
            raise ValueError(f"{T} tokens after {start} in the caches; after the first call it takes one at a time")
        position = torch.arange(start, start + T, device=tokens.device)
        rotary, mask = Block.rotary(position, c.dim // c.heads), None
        if c.context and T > c.context:
            age = position[:, None] - position
            mask = (age >= 0) & (age < c.context)

        e = F.rms_norm(self.embed(tokens), (c.dim,))
        A = self.transition.power(1)

        def recurrent_step(h, step):
            if step > 0:  # the first step begins with A 0 + e
                h = A(h) + e if c.inject == "every" else A(h)
            for i in range(step * c.layers, (step + 1) * c.layers):  # the same blocks at every step, unless untied
                h = self.blocks[i % len(self.blocks)](h, rotary, mask, caches[i] if caches else None)
            return h

        if self.recompute and self.training:
            h = self.recomputed(recurrent_step, e, 0, loops)
        else:
            h = e
            for step in range(loops):
                h = recurrent_step(h, step)
        return self.head(self.norm(h)).float()

    def recomputed(self, recurrent_step, h, first, last):
        """Steps first .. last - 1. Of the earlier half only its first h is kept; it is done again going backward.

        In all, log2(N) h and the activations of one step are kept, and N/2 log2(N) steps done again.
        """
        if last - first == 1:
            return recurrent_step(h, first)
        middle = (first + last) // 2
        h = torch.utils.checkpoint.checkpoint(self.recomputed, recurrent_step, h, first, middle, use_reentrant=False)
        return self.recomputed(recurrent_step, h, middle, last)

    @torch.inference_mode()
    def stream(self, tokens, n, loops=None, temperature=1.0, top_k=None, generator=None):
        """Yields the next token (B, 1), n times. Temperature 0 takes the likeliest; top_k limits the draw to the k
        likeliest, and those as likely as the last of them; 0 or None: no limit.

        Past config.context, attention slides: each position looks back on that many, as in forward. A longer prompt is
        read one token at a time from there.
        """
        c, T = self.config, tokens.shape[1]
        loops = c.loops if loops is None else loops
        if T < 1 or n < 0 or not 0 <= temperature < math.inf or (top_k or 0) < 0:
            raise ValueError(f"{T} tokens, n {n}, temperature {temperature}, top_k {top_k}; take at least 1 token, and "
                             "finite n, temperature, top_k of at least 0")
        window = min(c.context or T + n, T + n)
        caches = [Cache(window) for _ in range(loops * c.layers)]
        logits = self(tokens[:, :window], loops, caches)
        for t in range(window, T):  # once the ring is full it takes one position at a time
            logits = self(tokens[:, t:t + 1], loops, caches)
        for i in range(n):
            token = self.draw(logits[:, -1], temperature, top_k, generator)
            yield token
            if i + 1 < n:
                logits = self(token, loops, caches)

    def draw(self, logits, temperature, top_k, generator):
        """(B, vocab_size) -> (B, 1)."""
        if temperature < 1e-6:
            return logits.argmax(-1, keepdim=True)
        if top_k:
            least = logits.topk(min(top_k, self.config.vocab_size)).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        noise = torch.empty_like(logits).exponential_(generator=generator).log()
        return (logits / temperature - noise).argmax(-1, keepdim=True)  # a draw from softmax: the Gumbel-max trick

    def generate(self, tokens, n, loops=None, temperature=1.0, top_k=None, generator=None):
        """(B, T) -> (B, T + n), T >= 1: the tokens and n more, drawn one after the other; see stream."""
        return torch.cat((tokens, *self.stream(tokens, n, loops, temperature, top_k, generator)), 1)


@torch.no_grad()
def writes(transition, write, steps):
    """(d,) -> (steps, d): the directions of w, A w, A^2 w, ...; made length 1 at each step, so that none vanishes."""
    if steps < 1 or not 0 < write.abs().max() < math.inf:
        raise ValueError(f"steps is {steps}, the write's largest part {write.abs().max()}; take finite ones above 0")
    A, h, directions = transition.power(1), write, []
    for _ in range(steps):
        h = h / h.abs().max()  # so that the squares in the norm do not underflow
        h = h / h.norm()
        directions.append(h)
        h = A(h)
    return torch.stack(directions)


def gram(transition, write, steps):
    """(d,) -> (steps, steps): the cosine of A^s write and A^t write."""
    w = writes(transition, write, steps)
    return w @ w.T


def drift(transition, u, v, steps):
    """(d,), (d,) -> (steps,): the angle between A^t u and A^t v in degrees, t = 0 .. steps - 1."""
    u, v = writes(transition, u, steps), writes(transition, v, steps)
    return torch.rad2deg(2 * torch.atan2((u - v).norm(dim=1), (u + v).norm(dim=1)))  # acos is not accurate near 0


# ---- Pictures. The method ends here; the rest draws it in a terminal, 80 columns wide.

def example(kind):
    """A transition with its radii spread out, as training may leave them, and evenly spaced phases, to be looked at."""
    t = Transition(72, kind, groups=3, phases="uniform")
    radii = torch.linspace(0.55, 0.92, len(t.nu)) if len(t.nu) > 1 else torch.tensor([0.85])
    order = torch.randperm(len(radii), generator=torch.Generator().manual_seed(1))
    t.nu.data = torch.log(-torch.log(radii if kind == "blockwise" else radii[order]))
    return t


def heat(cosines, colour):
    """(n, n) -> n strings, two columns an entry: blue to red, or @@ oo == --, blank at 0, ░░ ▒▒ ▓▓ ██."""
    ramp = [f"\033[48;5;{c}m  \033[0m" for c in (21, 33, 75, 153, 254, 223, 215, 202, 196)] if colour else \
        [2 * c for c in "@o=- ░▒▓█"]
    return ["".join(ramp[round(4 * c) + 4] for c in row) for row in cosines.clamp(-1, 1).tolist()]


def disc(eigenvalues):
    """(d,) complex -> 9 strings: the eigenvalues inside the unit circle, as 36 x 36 dots of braille."""
    z = torch.cat((eigenvalues, torch.polar(torch.ones(40), torch.arange(40) * math.pi / 20)))
    dots = torch.zeros(36, 36, dtype=torch.int64)
    dots[(17.5 - 17.5 * z.imag).round().long(), (17.5 + 17.5 * z.real).round().long()] = 1
    weight = torch.tensor([[1, 8], [2, 16], [4, 32], [64, 128]])  # how Unicode numbers the dots of a cell
    cells = (dots.view(9, 4, 18, 2).transpose(1, 2) * weight).sum((2, 3))
    return ["".join(chr(0x2800 + c) for c in row) for row in cells.tolist()]


def show(named, colour=False):
    """Prints the three figures for at most four (name, Transition) pairs."""
    print("DRIFT. The angle of two writes, 60 degrees at first, after 0, 8, 32, 128 steps\n"
          f"{'':10}{'within one plane':23}{'within one group':23}in the whole space")
    for name, t in named:
        random, row = torch.Generator().manual_seed(36), f"{name:9}"
        for size in 2, t.dim // t.groups, t.dim:
            u, v = torch.rand(2, t.dim, generator=random) * (torch.arange(t.dim) < size)
            u, v = F.normalize(u, dim=0), F.normalize(v - (u @ v) / (u @ u) * u, dim=0)
            angle = drift(t, u, u / 2 + v * 0.75 ** 0.5, 129)
            row += "".join(f"{a:4.0f}" for a in angle[[0, 8, 32, 128]]) + " "
            row += "".join("▁▂▃▄▅▆▇█"[min(7, int(a / 90 * 8))] for a in angle[:121:24])
        print(row)
    print("Bars: after 0, 24 .. 120 steps, full at 90 degrees. Kept where radii are shared.")

    write = torch.randn(named[0][1].dim, generator=random)
    for title, pictures, reading in (
            ("GRAM. The cosine of one write after s and after t steps, s and t = 0, 2, .., 16",
             [heat(gram(t, write, 17)[::2, ::2], colour) for _, t in named],
             "Full or red: the same direction still. Diagonal stripes: only the age counts."),
            ("SPECTRUM. The eigenvalues r exp(+-i theta) in the unit disk",
             [disc(t.eigenvalues().detach().cpu()) for _, t in named],
             "Real axis, right half: nothing turns. A circle within: one radius, many phases.")):
        print(f"\n{title}\n" + "  ".join(f"{name:18}" for name, _ in named).rstrip())
        print("\n".join(map("  ".join, zip(*pictures))) + f"\n{reading}")


def main(argv):
    """Draws an example of each kind but the identity; or a checkpoint's transition, at its start and as learned."""
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))
    sys.stdout.reconfigure(errors="replace")
    named = [(kind, example(kind)) for kind in Transition.KINDS[:4]]
    if len(argv) > 1:
        print(f"looped.py: {len(argv)} arguments; give one checkpoint, or none", file=sys.stderr)
        return 2
    if argv:
        import train
        try:
            _, _, model = train.load(argv[0])
        except train.UserError as e:
            print(f"looped.py: {e}", file=sys.stderr)
            return 2
        named = [("start", model.config.make_transition()), ("learned", model.transition)]
    try:
        show(named, sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
        sys.stdout.flush()
    except OSError:  # nobody reads on, as in | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
