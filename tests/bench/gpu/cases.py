# SPDX-License-Identifier: Apache-2.0
"""The grid: every row of the benchmark as plain data."""

from __future__ import annotations

import dataclasses
import random
from typing import List, Tuple

TOKENS = 16384  # batch * seqlen of the grid
WIDTH = 2048  # heads * head_dim
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (512, 2048, 8192)


@dataclasses.dataclass(frozen=True)
class Case:
    section: str
    direction: str  # "forward", "backward" or "jvp"
    head_dim: int
    causal: bool
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads_q: int
    heads_k: int
    head_dim_v: int = 0  # 0 = head_dim
    option: str = ""  # one of OPTIONS: what general-score kernels are for
    deterministic: bool = False
    lengths: Tuple[int, ...] = ()  # packed sequences; batch is 1 then and seqlen_q the longest
    seed: int = 0  # of lengths that are random: the row is also compared with that of as many equal ones
    graph: bool = False  # replayed from a CUDA graph, so that host time does not count
    arch: int = 0  # 80, 86: with the kernels of A100, of devices with 99 KB of shared memory
    page: int = 0  # keys lie in pages of so many
    latent: bool = False  # values are the first columns of the keys
    listed: int = 0  # keys that each query lists, at random (kv_indices)

    @property
    def d_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def name(self) -> str:
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        words = [self.direction, dims, "causal" if self.causal else "full"]
        if self.lengths:
            words.append(f"packed{len(self.lengths)}x{'<=' if min(self.lengths) < self.seqlen_q else ''}{self.seqlen_q}")
            words += [f"seed{self.seed}"] if self.seed else []
        elif self.seqlen_q != self.seqlen_k:
            words.append(f"B{self.batch} S{self.seqlen_q}x{self.seqlen_k}")
        else:
            words.append(f"S{self.seqlen_q}")
        if self.heads_q != self.heads_k or self.section == "decode":
            words.append(f"H{self.heads_q}/{self.heads_k}")
        words += [word for word in ("latent" if self.latent else "", f"page{self.page}" if self.page else "",
                                    f"listed{self.listed}" if self.listed else "", self.option,
                                    "deterministic" if self.deterministic else "",
                                    f"sm{self.arch}" if self.arch and self.section != "sm80" else "") if word]
        return " ".join(words)

    @property
    def flops(self) -> float:
        """Products over visible pairs: half of them under a causal mask, more where there are more keys than queries; backward and jvp count five
        products for forward's two."""
        pairs = sum(n * n for n in self.lengths) or self.batch * self.seqlen_q * (self.listed or self.seqlen_k)
        if self.option in SPARSE:
            visible, blocks = visible_blocks(self.option, self.seqlen_k)
            pairs *= visible / blocks
        for option in self.option.removeprefix("score ").split(" + "):
            if option in MASKS:
                pairs = self.batch * MASKS[option] * self.seqlen_k**2
        if self.option == "score globals":
            pairs = self.batch * window_pairs(self.seqlen_k, GLOBAL_WINDOW, GLOBALS)
        if self.option == "score natten":
            pairs = self.batch * window_pairs(IMAGE, NEIGHBOURS) * window_pairs(self.seqlen_k // IMAGE, NEIGHBOURS)
        if self.option in WINDOWS:  # causal
            outside = max(self.seqlen_k - WINDOWS[self.option], 0)
            pairs -= self.batch * outside * outside
        visible = 1 - self.seqlen_q / self.seqlen_k / 2 if self.causal else 1.0
        forward = 2.0 * pairs * self.heads_q * (self.head_dim + self.d_v) * visible
        return forward * (1.0 if self.direction == "forward" else 2.5)

    @property
    def cache(self) -> str:
        """The format of quantised keys and values, one of QUANTISED, or "" for those of 16 bits."""
        return next((option for option in self.option.split(" + ") if option in QUANTISED), "")

    @property
    def pages(self) -> int:
        """Pages of a sequence."""
        return -(-self.seqlen_k // self.page)

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys and values, 16-bit or quantised: what decoding has to read, without descales."""
        columns = self.head_dim + (0 if self.latent else self.d_v)
        rows = self.seqlen_q * self.listed or self.seqlen_k
        return (1 if self.cache else 2) * self.batch * rows * self.heads_k * columns


DROPOUT, SOFTCAP = 0.1, 30.0  # their values where they are the option
OPTIONS = ("softcap", "alibi", "bias", "dropout", "block_mask")
FP8 = "fp8"  # an option of the section of that name: operands in e4m3, without descales
INVARIANT = "invariant"  # an option of the section decode: FA_FLAG_BATCH_INVARIANT
SAME_BITS = "same bits"  # the option of the section of that name: FA_FLAG_SAME_BITS
LENGTHS = "lengths"  # ... as many keys as without it, but their number is on the device alone
# ... of 8-bit KV caches, with descales per sequence and head or ("rows") per row and head
QUANTISED = ("e4m3", "e4m3 rows", "int8", "int8 rows")
# ... of the section sparse: this share of the blocks in each row of a block mask is visible, by the size of blocks
SPARSE = {"quarter128": (0.25, 128), "tenth128": (0.1, 128), "quarter64": (0.25, 64), "tenth64": (0.1, 64)}
WINDOWS = {"window": 1024, "window128": 128}  # keys before its own that a query sees
# ... of the section masks: masks as data, and the fraction of all pairs that they show. `same` in the table is the same pairs by cu_seqlens
# (documents), by lengths (left) or by the causal mask (bits, bytes).
DOCUMENTS = 64  # of equal lengths
PREFIX = 4  # prefix-LM: the first quarter of the keys is visible to all queries, the rest is causal
LEFT = 8  # left padding: sequence n of a batch begins at key n * seqlen / LEFT
MASKS = {"documents": 1 / DOCUMENTS, "prefix": 1 / PREFIX + (1 - 1 / PREFIX) ** 2 / 2, "left": 1 - 1.5 / LEFT, "bits": 0.5, "bytes": 0.5}
# ... of the section score: a score function compiled at run time (scores.py), and the built-in option that does the same, `same` in the table
SCORES = {"score softcap": "softcap", "score alibi": "alibi", "score bias": "bias", "score relative": None, "score gate": None,
          "score documents": "documents", "score t5": None, "score logn": None, "score prefix": "prefix",
          "score globals": None, "score natten": None}
LOGN = 1 / 9  # log-N scaling of a model that was trained with 512 keys: s log(keys) / log(512)
GLOBAL_WINDOW, GLOBALS = 1024, 64  # a window on both sides, and tokens that see all and are seen by all
IMAGE, NEIGHBOURS = 128, 6  # 2-D neighbourhood: rows of so many pixels; at most so many rows and columns away
# ... of the section mixtures: score terms together, and a bias of fp32
FP32_BIAS = "fp32 bias"
MIXTURES = (FP32_BIAS, "bias + dropout", "alibi + dropout", "bits + alibi")
MAX_LOGIT = "max_logit"  # an option of the section masks, too
SECTIONS = ("forward", "backward", "dims", "wide", "deterministic", "short", "general", "mixtures", "sparse", "masks", "score", "sm80", "decode",
            "listed", "varlen", "same bits", "fp8", "fp32", "jvp")
FP32 = "fp32"  # the section whose operands are fp32


def alibi_slopes(heads: int) -> List[float]:
    return [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]


def visible_blocks(option: str, seqlen: int) -> Tuple[int, int]:
    """Visible blocks of a row of such a mask, and all of them."""
    share, size = SPARSE[option]
    return round(share * (seqlen // size)), seqlen // size


def window_pairs(seqlen: int, reach: int, first: int = 0) -> int:
    """Pairs of as many queries and keys at most `reach` apart, or one of them among the `first`."""
    pairs = 0
    for i in range(seqlen):
        begin, end = max(i - reach, 0), min(i + reach + 1, seqlen)
        pairs += seqlen if i < first else end - begin + min(first, begin)
    return pairs


def square(section, direction, head_dim, causal, seqlen, heads=0, heads_k=0, **more) -> Case:
    heads = heads or WIDTH // head_dim
    return Case(section, direction, head_dim, causal, seqlen, seqlen, max(TOKENS // seqlen, 1), heads, heads_k or heads, **more)


def grid(section: str, direction: str, quick: bool) -> List[Case]:
    seqlens = QUICK_SEQLENS if quick else SEQLENS
    rows = [square(section, direction, d, causal, n) for d in (64, 128, 256) for causal in (False, True) for n in seqlens]
    rows.append(square(section, direction, 128, True, 8192, 32, 8))
    rows.append(square(section, direction, 128, False, 8192, 64, 8))
    return rows


# Prompts over a cache in pages, and parts of prompts, as served models have them: queries, keys, rows of a page.
SERVED_PROMPTS = [(q, k, page) for q, k in ((4096, 4096), (512, 16384)) for page in (16, 64)]


def dims(quick: bool) -> List[Case]:
    shapes = [(192, 128, 32, 32), (192, 0, 16, 16), (96, 0, 16, 16), (128, 0, 64, 8)]
    return [
        square("dims", direction, d, causal, n, heads, heads_k, head_dim_v=d_v)
        for direction in ("forward", "backward") for d, d_v, heads, heads_k in shapes for causal in (False, True)
        for n in ((2048,) if quick else (2048, 8192))
    ] + [
        Case("dims", "forward", d, True, q, k, 4, heads, 8, page=page, option=option)
        for option in ("", "e4m3", "e4m3 + softcap") for d, heads in ((64, 64), (128, 64), (256, 16)) for q, k, page in SERVED_PROMPTS
    ] + [
        Case("dims", "forward", 128, True, 4096, 4096, 2, 32, 8, page=16, option=f"{cache}{option}")
        for cache in ("", "e4m3 + ") for option in ("dropout", "bias", "bytes")
    ]


def wide(quick: bool) -> List[Case]:
    """head_dim above 256, its options, and how other devices run wide heads."""
    rows = [(320, True, 4096), (384, True, 4096), (512, True, 4096)] + ([] if quick else [(512, False, 8192)])
    square_rows = [
        Case("wide", direction, d, causal, n, n, 8192 // n, 8, 8)
        for direction in ("forward", "backward") for d, causal, n in rows
    ]
    shapes = [(512, 4096, 4096, 64)] if quick else [(d, *prompt) for d in (384, 512) for prompt in SERVED_PROMPTS]
    for direction in ("forward", "backward"):
        for option in ("bits",) if quick else (*OPTIONS, "bits"):
            square_rows.append(Case("wide", direction, 512, False, 4096, 4096, 2, 8, 8, option=option))
        for d, arch in ((512, 86),) if quick else ((256, 80), (256, 86), (320, 80), (320, 86), (512, 80), (512, 86)):
            square_rows.append(Case("wide", direction, d, True, 4096, 4096, 2, 8, 8, arch=arch))
    return square_rows + [Case("wide", "forward", d, True, q, k, 4, 16, 2, page=page) for d, q, k, page in shapes]


def deterministic(quick: bool) -> List[Case]:
    seqlens = (4096,) if quick else (1024, 4096, 8192, 16384)
    return [
        square("deterministic", "backward", d, causal, n, deterministic=True)
        for d in (64, 128, 256) for causal in (False, True) for n in seqlens
    ]


def short(quick: bool) -> List[Case]:
    seqlens = (128, 512) if quick else (128, 256, 512, 1024)
    return [
        square("short", "forward", d, causal, n, graph=True) for d in (64, 128) for causal in (False, True) for n in seqlens
    ]


def general(section: str, quick: bool, arch: int) -> List[Case]:
    seqlens = (1024, 2048, 8192) if arch and not quick else (2048,) if arch else (4096,)
    return [
        square(section, direction, d, causal, n, option=option, arch=arch)
        for direction in ("forward", "backward") for d in (64, 128, 256) for causal in (False, True) for n in seqlens
        for option in OPTIONS
    ]


def mixtures(quick: bool) -> List[Case]:
    return [
        square("mixtures", direction, d, causal and "bits" not in option, n, option=option)
        for direction in ("forward", "backward") for n in ((4096,) if quick else (2048, 4096))
        for d in (64, 128, 256)
        for causal in (False, True) for option in MIXTURES if not (causal and "bits" in option)
    ]


def sparse(quick: bool) -> List[Case]:
    rows = [
        square("sparse", direction, d, False, 16384, option=option)
        for direction in ("forward", "backward") for d in ((128,) if quick else (64, 128)) for option in SPARSE
    ]
    return rows + [
        square("sparse", direction, d, True, 16384, option=option) for direction in ("forward", "backward") for d in (64, 128) for option in WINDOWS
    ]


def masks(quick: bool) -> List[Case]:
    rows = []
    for direction in ("forward", "backward"):
        for d in (128,) if quick else (64, 128):
            rows.append(square("masks", direction, d, False, 32768, option="documents"))
            rows.append(square("masks", direction, d, False, 4096, option="left"))  # batch 4: starts 0 to 3 / LEFT
            rows += [square("masks", direction, d, False, 16384, option=option) for option in ("prefix", "bits", "bytes")]
    rows.append(Case("masks", "forward", 128, False, 1, 32768, 4, 32, 8, option="left", graph=True))
    return rows + [square("masks", "forward", d, causal, 4096, option=MAX_LOGIT) for d in (64, 128, 256) for causal in (False, True)]


def score(quick: bool) -> List[Case]:
    rows = []
    once = {"score documents": 32768, "score t5": 4096, "score logn": 4096,  # without a causal mask alone
            "score prefix": 16384, "score globals": 16384, "score natten": 16384}
    for direction in ("forward", "backward"):
        for d in (128,) if quick else (64, 128, 256):
            for option in SCORES if d <= 128 else ("score softcap", "score alibi", "score documents"):
                if option in once:
                    rows.append(square("score", direction, d, False, once[option], option=option))
                else:
                    rows += [square("score", direction, d, causal, 4096, option=option) for causal in (False, True)]
    return rows


def decode(quick: bool) -> List[Case]:
    shapes = [(1, 8192, 32, 8), (16, 8192, 32, 8), (128, 8192, 64, 8), (1, 131072, 32, 8), (64, 4096, 32, 32)]
    rows = [Case("decode", "forward", 128, False, 1, n, b, h, h_k, graph=True) for b, n, h, h_k in shapes]

    def paged(batch, seqlen, page=16, tokens=1, head_dim=128, heads=64, heads_k=8, option=""):
        return Case("decode", "forward", head_dim, True, tokens, seqlen, batch, heads, heads_k, option=option, graph=True, page=page)

    def latent(batch, heads, seqlen=8192, page=64, tokens=1, option=""):
        return Case("decode", "forward", 576, True, tokens, seqlen, batch, heads, 1, head_dim_v=512, option=option, graph=True,
                    page=page, latent=True)

    rows += [latent(64, heads) for heads in ((64,) if quick else (16, 64, 128))]
    rows += [paged(1, n) for n in ((8192,) if quick else (2048, 8192, 32768, 131072))] + [paged(32, 8192)]
    if quick:
        return rows
    rows += [paged(8, 8192), paged(128, 8192)] + [paged(32, 8192, page) for page in (0, 1, 64, 256)]
    rows += [paged(b, n, tokens=tokens) for b, n in ((1, 131072), (32, 8192)) for tokens in (2, 4, 8, 16)]
    rows += [paged(128, 8192, head_dim=256, heads=32, heads_k=2), paged(64, 8192, head_dim=64, heads=32)]
    rows += [paged(32, 8192, tokens=tokens, head_dim=256, heads=32, heads_k=2) for tokens in (4, 16)]
    rows += [paged(b, 8192, page, head_dim=512, heads=16, heads_k=2) for b, page in ((32, 16), (32, 0), (1, 16))]
    rows += [paged(b, 8192, page, tokens=4, head_dim=512, heads=16, heads_k=2) for b, page in ((32, 16), (32, 64), (32, 0), (1, 16))]
    rows += [paged(32, 8192, tokens=tokens, head_dim=512, heads=16, heads_k=2, option="e4m3") for tokens in (1, 4)]
    rows += [latent(64, 64, page=page) for page in (0, 1, 16)] + [latent(64, 16, tokens=2), latent(64, 64, tokens=2)]
    rows += [latent(128, 128, 4096), latent(64, 128, tokens=2), latent(32, 128, tokens=4)]
    rows += [latent(64, heads, option="e4m3") for heads in (16, 64, 128)] + [latent(1, 16, option="e4m3")]
    rows += [latent(1, heads, n) for heads in (16, 128) for n in (8192, 131072)] + [latent(64, 64, option=INVARIANT)]
    rows += [paged(b, n, option=INVARIANT) for b, n in ((1, 131072), (32, 8192))]
    rows += [paged(b, n, option=LENGTHS) for b, n in ((1, 2048), (1, 8192), (1, 131072), (32, 8192))]
    rows += [paged(32, 8192, option=option) for option in QUANTISED]
    rows += [paged(b, n, option="e4m3") for b, n in ((1, 2048), (1, 8192), (1, 131072), (128, 8192))]
    rows += [paged(b, 8192, tokens=tokens, option=cache + "tree") for cache in ("", "e4m3 + ") for b, tokens in ((32, 8), (32, 16), (32, 64), (1, 8))]
    rows += [paged(32, 8192, page, option="e4m3") for page in (0, 1, 256)]
    rows += [paged(32, 8192, tokens=tokens, option="e4m3") for tokens in (2, 4, 8, 16)]
    rows += [paged(128, 8192, head_dim=256, heads=32, heads_k=2, option="e4m3"),
             paged(64, 8192, head_dim=64, heads=32, option="e4m3")]
    # The kernels of devices with 99 KB of shared memory.
    other = [paged(32, 8192, tokens=tokens, option="e4m3") for tokens in (1, 4)]
    other += [paged(32, 8192, tokens=tokens, head_dim=256, heads=16, heads_k=8, option=option) for tokens, option in ((1, "e4m3"), (1, "int8"), (16, "e4m3"))]
    other += [paged(32, 8192, head_dim=512, heads=16, heads_k=2, option="e4m3")]
    return rows + [dataclasses.replace(case, arch=86) for case in other]


def listed(quick: bool) -> List[Case]:
    """Sparse attention by index over latent caches, decoding and prefill, and over keys and values of groups of heads."""

    def latent(batch, tokens, seqlen, heads, option=""):
        return Case("listed", "forward", 576, False, tokens, seqlen, batch, heads, 1, head_dim_v=512, option=option, graph=tokens < 16,
                    page=64, latent=True, listed=2048)

    rows = [latent(128, 1, 32768, heads) for heads in ((128,) if quick else (16, 64, 128))] + [latent(1, 4096, 8192, 128)]
    if quick:
        return rows
    rows += [latent(1, 4096, 131072, 128), latent(4, 1, 32768, 128), latent(64, 2, 32768, 128)]
    rows += [latent(128, 1, 32768, heads, "e4m3") for heads in (16, 64, 128)] + [latent(1, 4096, 8192, 128, "e4m3")]
    return rows + [Case("listed", "forward", 128, False, 1, 16384, 64, 32, 8, graph=True, page=16, listed=2048)]


def random_lengths(seed: int, count: int = 64, mean: int = 1024) -> Tuple[int, ...]:
    """From 1 to 2 mean - 1, each as likely as any other, then moved until they add up to count * mean."""
    source = random.Random(seed)
    lengths = [source.randint(1, 2 * mean - 1) for _ in range(count)]
    while (missing := count * mean - sum(lengths)) != 0:
        n = source.randrange(count)
        lengths[n] = min(max(lengths[n] + min(max(missing, -64), 64), 1), 2 * mean - 1)
    return tuple(lengths)


def varlen(quick: bool) -> List[Case]:
    lengths = tuple(64 * (1 + 37 * n % 31) for n in range(32))  # 64 to 1984 rows, no two neighbours alike
    dims = (128,) if quick else (64, 128)

    def packed(direction, d, causal, lengths, **more):
        return Case("varlen", direction, d, causal, max(lengths), max(lengths), 1, WIDTH // d, WIDTH // d, lengths=lengths, **more)

    rows = [packed(direction, d, True, lengths) for direction in ("forward", "backward") for d in dims]
    # As many tokens in sequences of one length and of random ones: the ratio of their TFLOP/s is what uneven lengths cost.
    for direction in ("forward", "backward"):
        for d in dims:
            for causal in (False, True):
                rows.append(packed(direction, d, causal, (1024,) * 64))
                rows += [packed(direction, d, causal, random_lengths(seed), seed=seed) for seed in ((1,) if quick else (1, 2, 3))]
    return rows


def same_bits(quick: bool) -> List[Case]:
    """FA_FLAG_SAME_BITS: prompts, parts of prompts over a paged cache, decoding; `x plain` is over the time without the flag. Backward; over the
    time with FA_FLAG_DETERMINISTIC."""

    def paged(batch, tokens, seqlen, head_dim=128, heads=64, heads_k=8, option=SAME_BITS):
        return Case(SAME_BITS, "forward", head_dim, True, tokens, seqlen, batch, heads, heads_k, option=option, graph=tokens <= 16, page=16)

    def latent(batch, heads, seqlen=8192, tokens=1, option=SAME_BITS):
        return Case(SAME_BITS, "forward", 576, True, tokens, seqlen, batch, heads, 1, head_dim_v=512, option=option, graph=True,
                    page=64, latent=True)

    seqlens = (1024, 4096, 16384) if quick else (1024, 2048, 4096, 8192, 16384)
    rows = [square(SAME_BITS, "forward", d, causal, n, option=SAME_BITS) for d in (128, 64) for causal in (True, False) for n in seqlens]
    rows += [square(SAME_BITS, "forward", 128, True, 8192, 32, 8, option=SAME_BITS)]
    rows += [Case(SAME_BITS, "forward", 128, True, 1024, 1024, 1, 16, 16, option=SAME_BITS, lengths=(1024,) * 64),
             Case(SAME_BITS, "forward", 128, True, 512, 16384, 4, 64, 8, option=SAME_BITS), paged(4, 512, 16384)]
    rows += [square(SAME_BITS, "forward", 256, causal, n, option=SAME_BITS) for causal, n in ((True, 1024), (True, 4096), (False, 4096), (True, 16384))]
    rows += [square(SAME_BITS, "forward", 192, causal, n, 16, head_dim_v=128, option=SAME_BITS) for causal, n in ((True, 1024), (True, 4096), (False, 4096))]
    rows += [paged(4, 512, 16384, 256, 16, 8), paged(32, 1, 8192, 256, 16, 8), paged(32, 4, 8192, 256, 16, 8)]
    rows += [paged(batch, tokens, seqlen, option="e4m3 + same bits") for batch, tokens, seqlen in ((4, 512, 16384), (32, 1, 8192), (32, 8, 8192))]
    if not quick:
        rows += [paged(batch, 1, seqlen, option="e4m3 + same bits") for batch, seqlen in ((1, 8192), (1, 131072), (8, 8192), (128, 1024))]
    rows += [paged(batch, 1, seqlen) for batch, seqlen in ((1, 2048), (1, 8192), (1, 131072), (8, 8192), (4, 32768), (128, 8192))]
    rows += [paged(32, tokens, 8192) for tokens in ((1,) if quick else (1, 2, 4, 8, 16))]
    rows += [latent(64, heads) for heads in ((64,) if quick else (16, 64, 128))]
    if not quick:
        rows += [latent(64, heads, tokens=tokens) for heads, tokens in ((16, 2), (16, 4), (64, 2), (64, 4))]
        rows += [latent(batch, heads, seqlen) for batch, heads, seqlen in ((64, 64, 7000), (32, 64, 32768), (8, 64, 8192), (1, 16, 131072))]
        rows += [latent(64, heads, option="e4m3 + same bits") for heads in (16, 64)]
    backward = [(d, causal, n) for d in (64, 128) for causal in (True, False) for n in ((4096,) if quick else (1024, 4096, 16384))]
    rows += [square(SAME_BITS, "backward", d, causal, n, option=SAME_BITS) for d, causal, n in backward + ([] if quick else [(256, True, 4096)])]
    # Kernels for sm_80, which split no keys.
    old = [square(SAME_BITS, "forward", d, True, 4096, option=SAME_BITS) for d in (64, 128, 256)] + [paged(32, 1, 8192), paged(4, 512, 16384)]
    return rows + [dataclasses.replace(case, arch=80) for case in old]


def fp8(quick: bool) -> List[Case]:
    seqlens = (8192,) if quick else (2048, 8192, 16384)
    rows = [square("fp8", "forward", 128, causal, n, option=FP8) for causal in (False, True) for n in seqlens]
    rows += [square("fp8", "forward", 128, True, 8192, 32, 8, option=FP8)]
    return rows + [square("fp8", "forward", d, causal, 8192, option=FP8) for d in (64, 256) for causal in (False, True)]


def jvp(quick: bool) -> List[Case]:
    """fa_forward_jvp with all three tangents, without the forward before it."""
    rows = [square("jvp", "jvp", d, causal, n) for d in (64, 128) for causal in (False, True) for n in ((8192,) if quick else (2048, 8192))]
    return rows + [square("jvp", "jvp", 128, True, 8192, 32, 8)]


def fp32(quick: bool) -> List[Case]:
    rows = [(64, 16, 16, True, 4096), (64, 16, 16, False, 8192), (128, 16, 16, True, 4096), (128, 16, 16, False, 4096)]
    rows += [] if quick else [(128, 16, 4, True, 8192)]
    both = ("forward", "backward")
    plain = [Case(FP32, direction, d, causal, n, n, 8192 // n, heads, heads_k) for direction in both for d, heads, heads_k, causal, n in rows]
    wide = [Case(FP32, direction, d, False, 4096, 4096, 2, 8, 8, option=option) for direction in both for d in (192, 256) for option in ("", "bias")]
    options = ("softcap", "alibi", "bias", "dropout", "bytes")
    return plain + wide + [Case(FP32, direction, d, False, 4096, 4096, 2, 1024 // d, 1024 // d, option=option)
                           for direction in both for d in (64, 128) for option in options]


def all_cases(sections, quick: bool, filters=()) -> List[Case]:
    """The rows of these sections whose name contains every filter."""
    makers = {
        "forward": lambda: grid("forward", "forward", quick),
        "backward": lambda: grid("backward", "backward", quick),
        "dims": lambda: dims(quick),
        "wide": lambda: wide(quick),
        "deterministic": lambda: deterministic(quick),
        "short": lambda: short(quick),
        "general": lambda: general("general", quick, 0),
        "mixtures": lambda: mixtures(quick),
        "sparse": lambda: sparse(quick),
        "masks": lambda: masks(quick),
        "score": lambda: score(quick),
        "sm80": lambda: general("sm80", quick, 80),
        "decode": lambda: decode(quick),
        "listed": lambda: listed(quick),
        "varlen": lambda: varlen(quick),
        "same bits": lambda: same_bits(quick),
        "fp8": lambda: fp8(quick),
        "jvp": lambda: jvp(quick),
        "fp32": lambda: fp32(quick),
    }
    rows = [case for section in sections for case in makers[section]()]
    return [case for case in rows if all(text in f"{case.section}: {case.name} " for text in filters)]
