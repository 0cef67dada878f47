"""All tests, in the order of the rooms. `pytest` runs the fast ones, `pytest -m slow` the rest.

Every fast path has a slow twin here: a forward over a tree against a forward per path, a cache against a plain list, a
trie against counting all n-grams, lookahead against plain decoding. Toy models have random weights from a fixed integer
hash, so they are the same on every machine. No network, no data outside the repository.

`python test_all.py golden` writes assets/golden_* anew; it needs transformers.
"""

import copy
import fcntl
import functools
import http.server
import itertools
import json
import math
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
import safetensors.numpy
import torch
from matplotlib.colors import to_hex
from matplotlib.text import Text
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import beam
import beamviz
import bench
import cli
import cost
import lookahead
import options
import packing
import page
import pictures
import plots
import speed
import steer
import trie as trie_module
import viz
import weights
from arithmetic import Classifier, Intersection, Prompted, Sum, Term, TopK, TopP, Union
from blend import CELLS, Calibration
from budget import MOST, SIZES, Auto, CostCurve, calibrate, curve_of
from calculator import calculator
from classical import accept, acceptance, rates, speculative_sample
from counts import WIDE, Counts, Node, Writer
from drafters import Combined, Jacobi, ModelDrafter, PromptLookup
from exact import Exact
from forest import forest
from formula import BagOfTokens, TextScore, parse
from lookahead import NearTie, decode, first_difference, generate, generate_many, near_tie
from mcts import reward_named, search
from model import GPT, GPTConfig, KVCache, Linear
from picture import settings as picture_settings
from replay import Row
from sampling import Greedy, Sampler, gumbel, hash_uniform, mix64
from steer import compete_search
from tokenizer import ASSET, EOT_TEXT, Tokenizer
from train import batches, evaluate, learning_rate, orthogonal, pad, problems
from tree import DraftTree
from trie import MODES, TokenTrie

ROOT = Path(__file__).resolve().parent
GOLDEN = ROOT / "assets" / "golden_logits.safetensors"
BAKER = "Question: A baker makes 12 trays of 8 rolls and sells each roll for 2 dollars. How much does he earn?\nAnswer:"


@pytest.fixture(autouse=True)
def threads(request):
    """One thread in fast tests: toys gain nothing from two, and threads that wait for each other make the tests of a
    busy machine several times slower. Slow tests have torch's own choice."""
    usual = torch.get_num_threads()
    torch.set_num_threads(usual if request.node.get_closest_marker("slow") else 1)
    yield
    torch.set_num_threads(usual)


# --- helpers --------------------------------------------------------------------------------------------------------


def toy(
    n_layer: int = 2,
    n_head: int = 3,
    n_embd: int = 24,
    vocab_size: int = 29,
    n_ctx: int = 64,
    scale: float = 0.3,
    dtype: torch.dtype = torch.float64,
) -> GPT:
    """A GPT whose weights are a hash of tensor number and index: the same everywhere, and large enough to matter."""
    model = GPT(GPTConfig(n_layer, n_head, n_embd, vocab_size, n_ctx))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        noise = (hash_uniform(20_000 + number, 0, parameter.numel()) - 0.5).view(parameter.shape)
        centre = 1.0 if name.split(".")[-2].startswith("ln_") and name.endswith("weight") else 0.0
        parameter.data = centre + 2 * scale * noise
    return model.to(dtype).requires_grad_(False)


def random_tree(rng: random.Random, n: int, vocab_size: int) -> DraftTree:
    tokens, parents, taken = [], [], set()
    while len(tokens) < n:
        parent, token = rng.randrange(-1, len(tokens)), rng.randrange(vocab_size)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tokens, parents)


class RandomDrafter:
    """Drafts junk."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.rng, self.ids = random.Random(seed), vocab_size
        self.opened = self.closed = 0

    def open(self, prompt_ids):
        self.opened += 1
        return self

    def draft(self, budget, picker=None):
        return random_tree(self.rng, self.rng.randint(0, budget), self.ids)

    def observe(self, tokens, draft=None, picks=None):
        pass

    def close(self):
        self.closed += 1


class OracleDrafter(RandomDrafter):
    """Drafts the true continuation, `depth` tokens of it, amid junk."""

    def __init__(self, seed: int, vocab_size: int, truth: list[int], depth: int) -> None:
        super().__init__(seed, vocab_size)
        self.truth, self.depth = truth, depth

    def open(self, prompt_ids):
        self.done = 0
        return super().open(prompt_ids)

    def draft(self, budget, picker=None):
        path = self.truth[self.done : self.done + self.depth]
        tokens, parents, node = [], [], -1
        for token in path:
            for wrong in {self.rng.randrange(self.ids), self.rng.randrange(self.ids)} - {token}:
                tokens.append(wrong)
                parents.append(node)
            tokens.append(token)
            parents.append(node)
            node = len(tokens) - 1
        return DraftTree(tokens, parents)

    def observe(self, tokens, draft=None, picks=None):
        self.done += len(tokens)


@functools.cache
def bundled(name: str, dtype: torch.dtype = torch.float32, pack: bool | None = None) -> GPT:
    return GPT.load(name, dtype=dtype, pack=pack)


def assert_same_or_near_tie(
    exact: GPT, prompt: list[int], a: list[int], b: list[int], picker: Any = None, dtype: torch.dtype = torch.float32
) -> bool:
    """True if equal; False if rounding in `dtype` explains the difference (`exact` is float64); fails otherwise."""
    if a == b:
        return True
    tie = near_tie(exact, prompt, a, b, picker)
    assert tie.within_rounding(dtype), f"texts part at new token {tie.position}, gap {tie.gap}"
    return False


def chi_square_p(counts: list[int], expected: list[float]) -> float:
    """The p-value of Pearson's test; cells expecting fewer than 5 are pooled."""
    pooled_counts, pooled_expected, rest = [], [], [0.0, 0.0]
    for count, mean in zip(counts, expected):
        if mean < 5:
            rest[0] += count
            rest[1] += mean
        else:
            pooled_counts.append(count)
            pooled_expected.append(mean)
    if rest[1] > 0:
        pooled_counts.append(rest[0])
        pooled_expected.append(rest[1])
    statistic = sum((c - e) ** 2 / e for c, e in zip(pooled_counts, pooled_expected))
    half = torch.tensor([(len(pooled_counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


# A correct sampler fails a chi-square test with this probability; there are about a dozen such tests, their seeds are
# fixed, so a failure means a change of the code and not bad luck.
FALSE_ALARM = 1e-4


# --- model.py: one forward ------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """One way in which the same forward is computed."""

    dtype: torch.dtype
    pack: bool

    def toy(self, *shape: int, **settings: Any) -> GPT:
        model = toy(*shape, **settings, dtype=self.dtype)
        if self.pack and not model.pack():
            pytest.skip("this machine has no packed operation")
        return model

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether rounding explains the difference."""
        return bool((a - b).abs().max() <= 500 * torch.finfo(self.dtype).eps * b.abs().max())


KINDS = [Kind(torch.float64, False), Kind(torch.float32, False), Kind(torch.float32, True)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=["float64", "float32", "packed"])


@every_kind
@pytest.mark.parametrize("shape", [(2, 3, 24, 29, 64), (1, 1, 8, 5, 32), (3, 4, 32, 101, 48)])
def test_tree_attention_equals_recomputing_every_path(shape, kind):
    model = kind.toy(*shape)
    rng = random.Random(sum(shape))
    for _ in range(40):
        prefix = [rng.randrange(model.vocab_size) for _ in range(rng.randint(1, 12))]
        tree = random_tree(rng, rng.randint(0, 18), model.vocab_size)
        cache = model.new_cache(40)
        model(prefix[:-1], cache=cache) if len(prefix) > 1 else None
        base = cache.length
        mask = torch.ones(1 + len(tree), base + 1 + len(tree), dtype=torch.bool)
        mask[:, base:] = tree.mask()
        tokens = [prefix[-1], *tree.tokens]
        logits = model(tokens, [base, *(base + d for d in tree.depths)], mask, cache)
        assert cache.length == base + 1 + len(tree)
        for node in range(-1, len(tree)):
            path = [tree.tokens[i] for i in tree.path(node)]
            assert kind.same(logits[node + 1], model(prefix + path)[-1])


@every_kind
def test_a_forest_is_a_batch(kind):
    """Several sequences in one list that do not see each other."""
    model, rng = kind.toy(), random.Random(1)
    sequences = [[rng.randrange(29) for _ in range(rng.randint(1, 9))] for _ in range(4)]
    tokens = list(itertools.chain(*sequences))
    owner = torch.tensor([i for i, s in enumerate(sequences) for _ in s])
    mask = (owner[:, None] == owner) & torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    logits = model(tokens, [p for s in sequences for p in range(len(s))], mask, model.new_cache())
    start = 0
    for sequence in sequences:
        assert kind.same(logits[start : start + len(sequence)], model(sequence))
        start += len(sequence)


@every_kind
def test_any_chunking_of_a_sequence_gives_the_same_logits_and_rows_select(kind):
    model, rng = kind.toy(), random.Random(2)
    for _ in range(20):
        tokens = [rng.randrange(29) for _ in range(40)]
        whole, cache, at = model(tokens), model.new_cache(), 0
        while at < len(tokens):
            q = rng.randint(1, len(tokens) - at)
            rows = sorted(rng.sample(range(q), rng.randint(1, q)))
            logits = model(tokens[at : at + q], cache=cache, rows=rows)
            assert logits.shape == (len(rows), 29)
            assert kind.same(logits, whole[[at + row for row in rows]])
            at += q


@every_kind
def test_batched_training_forward_equals_single_sequences(kind):
    model = kind.toy()
    tokens = torch.arange(60).view(4, 15) % 29
    batch = model(tokens)
    assert batch.shape == (4, 15, 29)
    for row in range(4):
        assert kind.same(batch[row], model(tokens[row]))
    assert model(tokens.view(2, 2, 15), rows=[14]).shape == (2, 2, 1, 29)


def test_forward_refuses_what_does_not_fit():
    model = toy(n_ctx=16)
    cache = model.new_cache(4)
    model([1, 2, 3], cache=cache)
    for message, arguments in {
        "at least one token": ([], None, None, None),
        "no room": ([1, 2], None, None, cache),
        "context of 16": ([1] * 17, None, None, None),
        "positions must lie": ([1], [16], None, None),
        "token ids must lie": ([1, 29], None, None, None),
        "2 tokens, but positions": ([1, 2], [0], None, None),
        "mask has shape": ([1, 2], None, torch.ones(2, 3, dtype=torch.bool), None),
        "one flat list": (torch.ones(1, 1, dtype=torch.long), None, None, cache),
        "positions of shape": ([1], [[3]], None, cache),
        "rows must lie": ([1], None, None, cache, [1]),
    }.items():
        with pytest.raises(ValueError, match=message):
            model(*arguments)
    assert cache.length == 3  # a refused forward leaves the cache alone


def test_config_refuses_nonsense():
    with pytest.raises(ValueError, match="n_layer"):
        GPTConfig(0, 1, 8, 5, 8)
    with pytest.raises(ValueError, match="evenly"):
        GPTConfig(1, 3, 8, 5, 8)


# --- model.py: the cache against a plain list -----------------------------------------------------------------------


def cache_contents(cache: KVCache) -> list[float]:
    """One number a slot, the same in every layer, head and dimension, doubled in v."""
    k, v = cache.k[:, :, : cache.length], cache.v[:, :, : cache.length]
    numbers = k[0, 0, :, 0]
    assert torch.equal(k, numbers.view(1, 1, -1, 1).expand_as(k)) and torch.equal(v, 2 * k)
    return numbers.tolist()


def test_cache_operations_against_a_list():
    config = GPTConfig(2, 2, 8, 5, 8)
    for seed in range(150):
        rng, counter = random.Random(seed), itertools.count(1)
        pairs = [(KVCache(config, 20), [])]
        for _ in range(40):
            cache, model = pairs[rng.randrange(len(pairs))]
            action = rng.choice(["append", "append", "keep", "keep", "truncate", "fork", "to"])
            if action == "append" and len(model) < 20:
                q = rng.randint(1, 20 - len(model))
                values = [float(next(counter)) for _ in range(q)]
                for layer in range(2):
                    k = torch.tensor(values).view(1, q, 1).expand(2, q, 4)
                    assert cache.append(layer, torch.stack([k, 2 * k])).shape == (2, 2, len(model) + q, 4)
                cache.advance(q)
                model += values
            elif action == "keep" and model:
                start = rng.randint(0, len(model))
                slots = [rng.randrange(len(model)) for _ in range(rng.randint(0, 20 - start))]
                cache.keep(start, slots)
                model[:] = model[:start] + [model[slot] for slot in slots]
            elif action == "truncate":
                length = rng.randint(0, len(model))
                cache.truncate(length)
                del model[length:]
            elif action == "fork" and len(pairs) < 4:
                pairs.append((cache.fork(), list(model)))
            elif action == "to":
                assert cache.to("cpu") is cache
            for cache, model in pairs:  # all of them: writing to one never shows in another
                assert cache.length == len(model)
                assert cache_contents(cache) == model
                assert cache.nbytes == 2 * 2 * 2 * 20 * 4 * 4
                assert cache.live_nbytes == cache.nbytes * len(model) // 20


def test_cache_refuses_what_is_not_there():
    cache = KVCache(GPTConfig(1, 1, 4, 5, 8), 6)
    cache.advance(4)
    for wrong in (
        lambda: cache.truncate(5),
        lambda: cache.truncate(-1),
        lambda: cache.truncate(1.5),
        lambda: cache.keep(1.5, []),
        lambda: cache.keep(0, [4]),
        lambda: cache.keep(5, []),
        lambda: cache.keep(3, [0, 0, 0, 0]),
        lambda: cache.keep(0, [-1]),
        lambda: KVCache(GPTConfig(1, 1, 4, 5, 8), 0),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert cache.length == 4


@every_kind
def test_after_keep_the_model_goes_on_as_if_the_rest_had_never_been(kind):
    model, rng = kind.toy(), random.Random(5)
    for _ in range(30):
        prefix = [rng.randrange(29) for _ in range(6)]
        tree = random_tree(rng, 12, 29)
        cache = model.new_cache(32)
        model(prefix, cache=cache)
        mask = torch.ones(12, 18, dtype=torch.bool)
        mask[:, 6:] = tree.mask()[1:, 1:]
        model(tree.tokens, [5 + depth for depth in tree.depths], mask, cache)
        path = tree.path(rng.randrange(12))
        cache.keep(6, [6 + node for node in path])
        text = prefix + [tree.tokens[node] for node in path]
        assert kind.same(model([7], cache=cache)[0], model([*text, 7])[-1])


# --- model.py: packed weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_compute_the_same(dtype):
    """Against float64, with errors that rounding explains; and they are dropped when the weights change their type."""
    rng = random.Random(4)
    for shape in [(2, 3, 48, 97, 64), (1, 4, 64, 503, 64)]:
        model = toy(*shape, scale=0.1).to(dtype)
        exact = copy.deepcopy(model).double()
        plain = model([1, 2, 3])
        if not model.pack():
            pytest.skip("this machine has no packed operation")
        assert model.packed is not None and all(block.mlp.c_fc.packed is not None for block in model.h)
        for q in (1, 2, 7, 8, 9, 33, 64):
            tokens = [rng.randrange(model.vocab_size) for _ in range(q)]
            expected = exact(tokens)
            error = (model(tokens).double() - expected).abs().max() / expected.abs().max()
            assert error < 32 * torch.finfo(dtype).eps
        tokens = [rng.randrange(model.vocab_size) for _ in range(41)]
        cache = model.new_cache()
        model(tokens[:-1], cache=cache)
        error = (model(tokens[-1:], cache=cache)[0].double() - exact(tokens)[-1]).abs().max()  # one row behind a past
        assert error < 32 * torch.finfo(dtype).eps * exact(tokens)[-1].abs().max()
        twin = copy.deepcopy(model)
        assert twin.packed is None and torch.equal(twin([1, 2, 3]), plain) and model.packed is not None
        tokens = torch.arange(30).view(2, 15)
        assert model(tokens).shape == (2, 15, model.vocab_size)  # batches, too
        assert (model([1, 2, 3]) - plain).abs().max() <= 32 * torch.finfo(dtype).eps * plain.abs().max()
        assert model.double().packed is None and all(block.attn.c_attn.packed is None for block in model.h)
        assert (model([1, 2, 3]) - exact([1, 2, 3])).abs().max() < 1e-9


def test_packing_falls_back_by_itself(monkeypatch, tmp_path):
    toy(scale=0.1).save(tmp_path)
    for dtype, device in ((torch.float64, "cpu"), (torch.float16, "cpu")):
        assert GPT.load(tmp_path, device, dtype, pack=True).packed is None
    before = GPT.load(tmp_path, pack=False)
    assert before.packed is None
    monkeypatch.setattr(packing, "apply_packed", lambda *a: (_ for _ in ()).throw(NotImplementedError))
    after = GPT.load(tmp_path, pack=True)
    assert after.packed is None and torch.equal(before([1, 2, 3]), after([1, 2, 3]))
    monkeypatch.undo()
    monkeypatch.setattr(weights, "free_memory", lambda: 4 * before.nbytes)
    assert GPT.load(tmp_path).packed is None  # memory is scarce


# --- exact.py: the same bits however tokens are grouped ---------------------------------------------------------------


EXACT_KINDS = [*KINDS, Kind(torch.bfloat16, False), Kind(torch.bfloat16, True)]
every_exact_kind = pytest.mark.parametrize(
    "kind", EXACT_KINDS, ids=["float64", "float32", "float32 packed", "bfloat16", "bfloat16 packed"]
)


def exact_mode(model: GPT, rows: int = 16) -> Exact:
    """Skips where this machine's products depend on a row's place; elsewhere exact mode must be possible."""
    generator = torch.Generator().manual_seed(1)
    products = [module for module in model.modules() if isinstance(module, Linear)]
    for product in [*products, model.wte]:
        n_in = product.weight.shape[0 if product in products else 1]
        x = torch.randn(1, n_in, generator=generator).to(model.dtype).repeat(rows, 1)
        if product in products:
            y = product(x)
        elif model.packed is not None:
            y = packing.apply_packed(x, model.packed, None)
        else:
            y = torch.nn.functional.linear(x, model.wte.weight)
        if not torch.equal(y, y[:1].expand_as(y)):
            pytest.skip(f"on this machine a row's place among {rows} matters")
    return Exact(model, rows)


class OneByOne:
    """The slow twin: logits behind a path, its tokens sent one at a time. What was computed is kept, path by path."""

    def __init__(self, model: Any) -> None:
        self.model, self.known = model, {(): (None, model.new_cache())}

    def __call__(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self.known:
            self(path[:-1])
            cache = self.known[path[:-1]][1].fork()
            self.known[path] = self.model(path[-1:], cache=cache)[0], cache
        return self.known[path][0]


def wild_growth(model: Any, rng: random.Random, passes: int, longest: int, capacity: int):
    """Yields (path, logits) for every row of passes that grow trees in a cache, forked and shuffled in between."""
    cache, slots = model.new_cache(capacity), []  # a slot's path, and the slots of its ancestors (None: some are gone)
    for _ in range(passes):
        new, parents = rng.randint(1, min(longest, capacity - len(slots))), []
        trunk = rng.random() < 0.5  # a line, else a bush
        for i in range(len(slots), len(slots) + new):
            ripe = [j for j, (path, line) in enumerate(slots) if line is not None and len(path) < model.n_ctx]
            parent = i - 1 if trunk and i - 1 in ripe else rng.choice([None, *ripe[-12:], *ripe])
            path, line = ((), ()) if parent is None else slots[parent]
            parents.append(parent)
            slots.append(((*path, rng.randrange(model.vocab_size)), (*line, i)))
        mask = torch.zeros(new, len(slots), dtype=torch.bool)
        for row, (_, line) in enumerate(slots[-new:]):
            mask[row, list(line)] = True
        tokens, positions = [path[-1] for path, _ in slots[-new:]], [len(path) - 1 for path, _ in slots[-new:]]
        rows = rng.choices(range(new), k=rng.randint(1, new)) if rng.random() < 0.3 else None
        logits = model(tokens, positions, mask, cache, rows)
        assert logits.shape == (new if rows is None else len(rows), model.vocab_size)
        for row, got in zip(range(new) if rows is None else rows, logits):
            yield slots[row - new][0], got
        if len(slots) > capacity // 2 or rng.random() < 0.2:
            start = rng.randint(0, len(slots) // 3)
            kept = rng.sample(range(start, len(slots)), rng.randint(0, min(len(slots) - start, capacity // 3)))
            old = cache
            cache = cache.fork()
            cache.keep(start, kept)
            old.truncate(0)
            place = {slot: slot for slot in range(start)} | {slot: start + i for i, slot in enumerate(kept)}
            slots = [
                (path, tuple(place[j] for j in line) if line is not None and all(j in place for j in line) else None)
                for path, line in (slots[slot] for slot in place)
            ]
        elif rng.random() < 0.2:
            length = rng.randint(0, len(slots))
            cache.truncate(length)
            del slots[length:]


@every_exact_kind
def test_exact_logits_do_not_depend_on_how_tokens_are_grouped(kind):
    """Trees and lines, slots in any order, forks; every row bit for bit the same as alone, and right."""
    for seed, rows, shape in ((1, 16, (2, 3, 24, 32, 32)), (2, 8, (1, 1, 8, 16, 20)), (3, 1, (1, 1, 6, 11, 24))):
        model = kind.toy(*shape)
        exact, rng, reference = exact_mode(model, rows), random.Random(seed), copy.deepcopy(model).double()
        alone, seen = OneByOne(exact), 0
        for path, logits in wild_growth(exact, rng, 12, 24, 70):
            assert torch.equal(logits, alone(path))
            seen += 1
            if kind.dtype == torch.float64:
                assert (logits - model(path)[-1]).abs().max() < 1e-9
            elif seen % 5 == 0:
                expected = reference(path)[-1]
                error = (logits.double() - expected).abs().max()
                assert error < 32 * torch.finfo(kind.dtype).eps * expected.abs().max()
        assert seen > 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", [False, True])
def test_exact_logits_of_a_bundled_model(dtype, pack):
    model = bundled("nano", dtype, pack)
    exact = exact_mode(model)
    alone = OneByOne(exact)
    assert all(torch.equal(logits, alone(path)) for path, logits in wild_growth(exact, random.Random(4), 6, 40, 120))
    # The test can fail: the ordinary forward does not pass it.
    alone = OneByOne(model)
    assert any(torch.any(got != alone(path)) for path, got in wild_growth(model, random.Random(4), 3, 40, 120))


def test_exact_lookahead_is_plain_decoding_without_exception():
    for kind in EXACT_KINDS[1:]:
        exact = exact_mode(kind.toy(vocab_size=32, n_ctx=48), rows=8)
        for seed in range(2):
            rng = random.Random(seed)
            prompt = [rng.randrange(32) for _ in range(rng.randint(1, 20))]
            picker = rng.choice([Greedy(), Sampler(1.0, seed=seed)])
            plain = generate(exact, prompt, picker=picker, max_new_tokens=30)
            trie = TokenTrie(32, max_depth=5)
            trie.insert(plain.tokens[: rng.randint(0, 40)])
            for drafter in (RandomDrafter(seed, 32), OracleDrafter(seed, 32, plain.tokens, rng.randint(1, 9)), trie):
                budget = rng.choice([1, 4, 30, "auto"])
                fast = generate(exact, prompt, drafter=drafter, budget=budget, picker=picker, max_new_tokens=30)
                assert fast.tokens == plain.tokens
                assert max(len(step.draft) for step in fast.steps) <= 7  # the root is the eighth row


def exact_on_prompts(name: str, dtype: torch.dtype, prompts: int, tokens: int, picker: Any = None) -> float:
    """Lookahead against plain decoding, both exact; returns lookahead's tokens per step."""
    exact, tokenizer = exact_mode(bundled(name, dtype)), Tokenizer.for_model(bundled(name, dtype))
    trie, steps = TokenTrie(4096), 0
    for text in problems(prompts, seed=7):
        settings = {"picker": picker, "max_new_tokens": tokens}  # no stop: end-of-text is a token too
        prompt = tokenizer.encode(text)
        plain = generate(exact, prompt, **settings)
        fast = generate(exact, prompt, drafter=trie, budget=15, **settings)
        assert fast.tokens == plain.tokens and len(plain.tokens) == tokens
        steps += len(fast.steps)
    return prompts * (tokens - 1) / steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_lookahead_on_a_bundled_model(dtype):
    assert exact_on_prompts("nano", dtype, 3, 48) > 1.1
    exact_on_prompts("nano", dtype, 1, 32, Sampler(1.0, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype, prompts", [(torch.float32, 200), (torch.bfloat16, 200)])
def test_exact_lookahead_on_tiny(dtype, prompts):
    assert exact_on_prompts("tiny", dtype, prompts, 128) > 1.5


def test_exact_mode_refuses_a_machine_where_a_rows_place_matters(monkeypatch):
    product = Linear.forward

    def uneven(self, x):  # the last row is off by the last bit, now and then
        y = product(self, x)
        y[-1] = torch.nextafter(y[-1], torch.where(torch.arange(y.shape[-1]) % 7 == 0, torch.inf, y[-1]))
        return y

    for dtype in (torch.float32, torch.float64):
        model = toy(dtype=dtype)
        monkeypatch.setattr(Linear, "forward", uneven)
        with pytest.raises(ValueError, match="place among 16 rows"):
            Exact(model)
        Exact(model, 1)  # one row has one place
        monkeypatch.undo()


def test_exact_mode_refuses_what_it_cannot_do():
    model = toy(n_ctx=16)
    for rows in (0, -3, 1.5):
        with pytest.raises(ValueError, match="1 or more"):
            Exact(model, rows)
    exact = exact_mode(model, 4)
    assert (exact.n_ctx, exact.vocab_size, exact.device, exact.dtype) == (16, 29, model.device, model.dtype)
    cache, filled = exact.new_cache(12), model.new_cache()
    exact([1, 2, 3], cache=cache)
    model([1], cache=filled)
    line = torch.ones(2, 5, dtype=torch.bool).tril(3)
    sibling, blind, ahead = line.clone(), line.clone(), torch.ones(2, 5, dtype=torch.bool)
    blind[1, 4] = False
    for message, *arguments in (
        ("flat list", []),
        ("flat list", [[1, 2]]),
        ("in exact mode", [1], None, None, filled),
        ("in exact mode", [1], None, None, model.new_cache()),
        ("2 tokens, but 1 positions", [1, 2], [3], None, cache),
        ("rows must lie", [1, 2], None, None, cache, [2]),
        ("mask has shape", [1, 2], None, line[:, :4], cache),
        ("smaller positions", [1, 2], [3, 3], sibling, cache),
        ("smaller positions", [1, 2], [3, 4], blind, cache),
        ("smaller positions", [1, 2], [3, 4], ahead, cache),
        ("token ids must lie", [1, 2, 3, 4, 29], None, None, cache),  # in the second pass
        ("positions must lie", [1, 2, 3, 4, 5], [3, 4, 5, 6, 16], None, cache),
        ("no room", [1] * 10, None, None, cache),
    ):
        with pytest.raises(ValueError, match=message):
            exact(*arguments)
        assert (cache.length, cache.positions) == (3, [0, 1, 2])
    assert exact([4, 5], cache=cache, rows=[]).shape == (0, 29) and cache.length == 5


# --- weights.py: files as they are ----------------------------------------------------------------------------------

SHAPES = {
    "odd": (2, 3, 48, 97, 64),
    "single": (1, 1, 64, 1001, 64),
    "heads": (3, 4, 32, 259, 128),
    "wide": (2, 5, 320, 503, 96),
}


def golden_tokens(name: str) -> list[int]:
    _, _, _, vocab_size, n_ctx = SHAPES[name]
    return [int(u * vocab_size) for u in hash_uniform(7, 7, n_ctx)]


@pytest.mark.parametrize("name", SHAPES)
def test_golden_logits(name, tmp_path):
    """What transformers' GPT2LMHeadModel computed in float64 for the toy model of this shape; see make_golden."""
    golden = load_file(GOLDEN)[name]
    toy(*SHAPES[name], scale=0.1).save(tmp_path)
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        logits = GPT.load(tmp_path, dtype=dtype)(golden_tokens(name))
        assert logits.dtype == dtype
        assert golden.abs().max() > 1  # nothing trivial is compared
        assert (logits.double()[-golden.shape[0] :] - golden).abs().max() < bound


def transformers_logits(folder: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    transformers = pytest.importorskip("transformers", reason="compares with transformers where it is installed")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", [*SHAPES, "tiny", "nano"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_same_logits_as_transformers_on_the_same_file(name, dtype, tmp_path):
    folder = tmp_path
    if name in SHAPES:
        toy(*SHAPES[name], scale=0.1).save(folder)
        tokens = golden_tokens(name)
    else:
        folder, tokens = ROOT / "models" / name, Tokenizer(4096).encode(BAKER)
    theirs = transformers_logits(folder, tokens, dtype)
    ours = GPT.load(folder, dtype=dtype)(tokens)
    assert (ours - theirs).abs().max() < (1e-9 if dtype == torch.float64 else 1e-4)


def published(model: GPT) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_files_as_they_exist_in_the_wild(tmp_path):
    model = toy(2, 2, 128, 97, 32, scale=0.1, dtype=torch.float32)
    expected = model([1, 2, 3])
    plain = published(model)
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32) for i in range(2)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    prefixed = {f"transformer.{name}": tensor for name, tensor in plain.items()}
    variants = {
        "hub": plain | masks,
        "transformers": prefixed | {f"transformer.{k}": v for k, v in masks.items()},
        "with head": prefixed | {"lm_head.weight": plain["wte.weight"].clone()},
    }
    for name, tensors in variants.items():
        file = tmp_path / f"{name}.safetensors"
        save_file(tensors, file)  # a bare file: 128 wide, so 2 heads of 64
        assert torch.equal(GPT.load(file, pack=False)([1, 2, 3]), expected)
    for dtype, bound in ((torch.float16, 0.02), (torch.bfloat16, 0.2)):
        file = tmp_path / f"{dtype}.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in plain.items()}, file)
        loaded = GPT.load(file)
        assert loaded.dtype == torch.float32 and not any(p.requires_grad for p in loaded.parameters())
        assert 0 < (loaded([1, 2, 3]) - expected).abs().max() < bound
    odd = toy(1, 3, 48, 97, 32)  # heads of 16: only metadata or a config.json can tell
    odd.save(tmp_path / "odd")
    assert GPT.load(tmp_path / "odd" / "model.safetensors").config == odd.config
    save_file(published(odd), tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match="number of heads"):
        GPT.load(tmp_path / "odd.safetensors")


def test_one_error_names_all_tensors_that_are_wrong(tmp_path):
    tensors = published(toy())
    del tensors["h.1.mlp.c_fc.bias"], tensors["ln_f.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors["h.0.attn.c_proj.weight"] = torch.zeros(24, 25)
    toy().save(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        GPT.load(tmp_path)
    for part in ("missing h.1.mlp.c_fc.bias", "missing ln_f.weight", "unexpected extra", "(24, 25), expected (24, 24)"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_and_foreign_files_get_one_clear_line(tmp_path):
    toy().save(tmp_path / "good")
    data = (tmp_path / "good" / "model.safetensors").read_bytes()
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    for name, damaged in {"short": data[:-100], "header": data[:50], "empty": b"", "text": b"hello, world" * 9}.items():
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a whole safetensors file") as error:
            GPT.load(file)
        assert "\n" not in str(error.value)
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    save_file({"wte.weight": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "int8.safetensors")
    untied = published(toy(1, 1, 64, 9, 8)) | {"lm_head.weight": torch.ones(9, 64, dtype=torch.float64)}
    save_file(untied, tmp_path / "untied.safetensors")
    for name, message in {"other": "is not GPT-2", "int8": "int8", "untied": "head of its own"}.items():
        with pytest.raises(ValueError, match=message):
            GPT.load(tmp_path / f"{name}.safetensors")
    for change, message in (
        ({"activation_function": "relu"}, "activation_function"),
        ({"model_type": "llama"}, "model_type"),
        ({"n_layer": None}, "n_layer"),
        ({"n_head": 5}, "evenly"),
        ({"n_layer": 10**9}, "does not fit"),
        ({"n_positions": 10**30}, "does not fit"),
        ({"vocab_size": 2**62}, "does not fit"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon"),
        ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "not valid JSON"),
        ("{", "not valid JSON"),
    ):
        text = change if isinstance(change, str) else json.dumps(config | change)
        (tmp_path / "good" / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            GPT.load(tmp_path / "good")
    # A stale n_ctx beside n_positions: the latter counts, as for transformers.
    (tmp_path / "good" / "config.json").write_text(json.dumps(config | {"n_ctx": 7}))
    assert GPT.load(tmp_path / "good").n_ctx == toy().n_ctx
    for dtype, value in ((torch.float32, math.nan), (torch.float16, 1e6)):  # the second is finite in float32 only
        tensors = published(toy(dtype=torch.float32))
        tensors["wpe.weight"][20, 3] = value
        save_file(tensors, tmp_path / "good" / "model.safetensors")
        with pytest.raises(ValueError, match=r"not finite in torch.*wpe.weight"):
            GPT.load(tmp_path / "good", dtype=dtype)
    (tmp_path / "good" / "config.json").unlink()
    (tmp_path / "bad").mkdir()
    for path, message in (("good", "config.json"), ("bad", "model.safetensors"), ("nowhere", "tiny, nano")):
        with pytest.raises(FileNotFoundError, match=message):
            GPT.load(tmp_path / path)


def test_save_replaces_a_folder_that_is_in_use(tmp_path):
    toy(scale=0.1).save(tmp_path)
    first = GPT.load(tmp_path, dtype=torch.float64)  # mapped from the file that is replaced next
    before = first([1, 2, 3])
    toy(scale=0.2).save(tmp_path)
    assert torch.equal(first([1, 2, 3]), before)
    assert not torch.equal(GPT.load(tmp_path, dtype=torch.float64)([1, 2, 3]), before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hugging Face Hub on loopback, with empty caches; yields (its files, requests seen)."""
    files: dict[str, bytes] = {}
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            body = files.get(self.path)
            self.send_response(200 if body is not None else 404)
            if body is not None:
                promised = len(body) * (2 if self.path in cut else 1)
                self.send_header("Content-Length", str(promised))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args):
            pass

    cut: set[str] = set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    model = toy(dtype=torch.float32)
    model.save(tmp_path / "served")
    for file in ("config.json", "model.safetensors"):
        files[f"/openai-community/gpt2/resolve/main/{file}"] = (tmp_path / "served" / file).read_bytes()
    yield files, seen, cut, model
    server.shutdown()
    server.server_close()


def test_download_once_then_from_the_cache(hub, tmp_path, capsys):
    _, seen, _, model = hub
    for _ in range(2):
        assert torch.allclose(GPT.load("gpt2")([1, 2]), model([1, 2]), atol=1e-6)
    assert len(seen) == 2  # one request a file, none the second time
    assert "100" in capsys.readouterr().err  # a progress bar was shown
    assert [p.name for p in (tmp_path / "cache" / "lookahead").iterdir()] == ["gpt2"]  # nothing half-written is left


def test_broken_downloads_leave_nothing_behind(hub, tmp_path):
    files, _, cut, _ = hub
    path = "/openai-community/gpt2/resolve/main/model.safetensors"
    whole = files[path]
    cut.add(path)  # the connection breaks half-way
    with pytest.raises(FileNotFoundError, match=r"cannot download gpt2.*tiny, nano"):
        files[path] = whole[: len(whole) // 2]
        GPT.load("gpt2")
    cut.clear()
    del files[path]
    with pytest.raises(FileNotFoundError, match=r"Not Found.*tiny, nano"):
        GPT.load("gpt2")
    assert list((tmp_path / "cache" / "lookahead").iterdir()) == []
    files[path] = whole
    assert GPT.load("gpt2").vocab_size == 29


def test_offline_is_said_in_one_line(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(FileNotFoundError, match=r"cannot download distilgpt2.*tiny, nano") as error:
        GPT.load("distilgpt2")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        GPT.load("gpt2")


@pytest.mark.parametrize("layout", ["HF_HOME", "HF_HUB_CACHE", "default"])
@pytest.mark.parametrize("repository", ["models--gpt2", "models--openai-community--gpt2"])
def test_an_existing_hugging_face_cache_is_used(hub, tmp_path, monkeypatch, layout, repository):
    _, seen, _, model = hub
    cache = {"HF_HOME": "home/hub", "HF_HUB_CACHE": "hub", "default": "cache/huggingface/hub"}[layout]
    if layout != "default":
        monkeypatch.setenv(layout, str(tmp_path / cache.split("/")[0]))
    base = tmp_path / cache / repository
    model.save(base / "snapshots" / "abc123")
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc123")
    assert torch.allclose(GPT.load("gpt2")([1, 2]), model([1, 2]), atol=1e-6)
    assert seen == []


# --- tokenizer.py ---------------------------------------------------------------------------------------------------

TEXTS = [
    "Hello, world",
    "It's 48/2 = <<48/2=24>>24 clips.\n#### 24",
    "naïve café, 東京, 😀😀",
    "   tabs\t\tand\n\n\nlines  ",
    "",
    "Привет",
    "e\u0301 \u200d 👩‍👩‍👧",
    "\x00\x07",
]


@pytest.mark.parametrize("vocab_size", [257, 300, 4096, 50257, 50304])
def test_tokenizer_round_trips(vocab_size):
    tokenizer = Tokenizer(vocab_size)
    for text in [*TEXTS, EOT_TEXT]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.eot for token in ids)  # end-of-text in the text is ordinary text
    assert tokenizer.encode(f"a{EOT_TEXT}b", special=True).count(tokenizer.eot) == 1
    assert tokenizer.eot == min(vocab_size, 50257) - 1


def test_gpt2_ids_are_the_published_ones():
    """Ids that are common knowledge about GPT-2's vocabulary, and a bundled vocabulary with the same ids."""
    tokenizer = Tokenizer()
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode(EOT_TEXT, special=True) == [50256]
    small = Tokenizer(4096)
    assert all(small.token_bytes(i) == tokenizer.token_bytes(i) for i in range(4095))


def test_stream_never_splits_and_never_loses_a_character():
    rng = random.Random(0)
    for vocab_size in (257, 4096, 50257):
        tokenizer = Tokenizer(vocab_size)
        for case in range(200):
            if case % 2:  # whole text
                ids = tokenizer.encode("".join(rng.choice(TEXTS) for _ in range(3)))
            else:  # any tokens at all, so broken characters too
                ids = [rng.randrange(vocab_size - 1) for _ in range(rng.randint(0, 30))]
            stream, pieces, at = tokenizer.stream(), [], 0
            while at < len(ids):
                q = rng.randint(1, 4)
                pieces.append(stream.push(ids[at : at + q]))
                at += q
                if case % 2:
                    assert "\ufffd" not in pieces[-1]
            pieces.append(stream.close())
            assert "".join(pieces) == tokenizer.decode(ids)


def test_tokenizer_refuses(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="cannot spell"):
        Tokenizer(256)
    for token in (-1, 4096):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            Tokenizer(4096).decode([token])
    assert Tokenizer(50304).decode([50300]) == ""
    import tokenizer as module

    changed = tmp_path / "changed"
    changed.write_bytes(ASSET.read_bytes()[:-9])
    for file, error in ((changed, ValueError), (tmp_path / "missing", FileNotFoundError)):
        monkeypatch.setattr(module, "ASSET", file)
        module._gpt2_ranks.cache_clear()
        with pytest.raises(error, match="restore it"):
            Tokenizer(4096)
    monkeypatch.undo()
    module._gpt2_ranks.cache_clear()


# --- sampling.py ----------------------------------------------------------------------------------------------------


def test_noise_is_splitmix64_in_tensor_form():
    """The twin: Python's own integers, one number at a time."""
    for seed, position in ((0, 0), (1, 5), (-3, 100), (2**70 + 1, 7)):
        start = mix64(mix64(seed + 0x9E3779B97F4A7C15) + (position + 1) * 0x9E3779B97F4A7C15)
        twin = [((mix64(start + (i + 1) * 0x9E3779B97F4A7C15) >> 12) + 0.5) / 2**52 for i in range(50)]
        assert hash_uniform(seed, position, 50).tolist() == twin
    # SplitMix64's first outputs for state 0, as published with the generator.
    assert [mix64((i + 1) * 0x9E3779B97F4A7C15) for i in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_noise_is_uniform_and_independent_between_seeds_and_positions():
    n = 40_000
    vectors = {(seed, position): hash_uniform(seed, position, n) for seed in range(6) for position in range(6)}
    for u in vectors.values():
        assert chi_square_p(torch.histc(u, 50, 0, 1).tolist(), [n / 50] * 50) > FALSE_ALARM
    # Correlations of all 630 pairs, in units of their standard deviation: above 4.9 with probability 6e-4 altogether.
    matrix = torch.corrcoef(torch.stack(list(vectors.values()))) * math.sqrt(n)
    assert matrix.fill_diagonal_(0).abs().max() < 4.9
    assert gumbel(1, 4, 30).ne(gumbel(0, 5, 30)).all()  # not a function of seed + position


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8},
    ],
)
def test_sampler_draws_from_its_distribution(settings):
    logits = 3 * (hash_uniform(1, 2, 12) - 0.5).float()
    p = Sampler(**settings).process(logits, (4, 7)).double().softmax(-1)
    n, one = 3000, Sampler(seed=11, **settings)
    for name, pick in {
        "seeds": lambda i: Sampler(seed=i, **settings).pick(logits, 3, (4, 7)),
        "positions": lambda i: one.pick(logits, i, (4, 7)),
    }.items():
        counts = Counter(pick(i) for i in range(n))
        assert all(p[token] > 0 for token in counts), name
        kept = [token for token in range(12) if p[token] > 0]
        assert chi_square_p([counts[t] for t in kept], [n * float(p[t]) for t in kept]) > FALSE_ALARM, name


def test_processing_by_hand():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, -torch.inf])
    assert Sampler(0.5).process(logits, ()).tolist() == [2.0, 6.0, 4.0, 4.0, -math.inf]
    kept = Sampler(top_k=2).process(logits, ())  # the second and third are equal: both stay, as in generate
    assert kept.isfinite().tolist() == [False, True, True, True, False]
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for top_p, size in ((0.4, 1), (0.5, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.96, 4), (1e-9, 1)):
        assert int(Sampler(top_p=top_p).process(p.log(), ()).isfinite().sum()) == size, top_p
    for min_p, size in ((0.0, 4), (0.09, 4), (0.11, 3), (0.29, 3), (0.31, 2), (0.61, 1), (1.0, 1)):
        assert int(Sampler(min_p=min_p).process(p.log(), ()).isfinite().sum()) == size, min_p
    scores = torch.tensor([2.0, -2.0, 1.0, -1.0])
    assert Greedy(2.0).process(scores, [1, 0, 1]).tolist() == [1.0, -4.0, 1.0, -1.0]  # seen twice, punished once
    assert scores.tolist() == [2.0, -2.0, 1.0, -1.0]  # whoever gave them keeps them
    ban = [lambda logits, context: logits.index_fill(0, torch.tensor(context[-1:]), -math.inf)]
    assert [Greedy(processors=ban).pick(scores, 0, [token]) for token in (0, 1)] == [2, 0]
    with pytest.raises(ValueError, match="a processor made"):
        Greedy(processors=[lambda logits, context: logits[:2]]).pick(scores, 0, [0])
    assert Greedy().pick(logits, 0, ()) == 1
    assert Sampler(top_k=1, seed=5).pick(logits, 0, ()) == 1


def test_processing_equals_transformers():
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    for case in range(60):
        logits = 4 * torch.randn(50, generator=generator)
        rng = random.Random(case)
        t, k, p = rng.uniform(0.3, 2), rng.randint(1, 60), rng.uniform(0.05, 0.999)
        min_p, penalty = rng.uniform(0.001, 0.3), rng.uniform(0.5, 2)
        context = [rng.randrange(50) for _ in range(rng.randint(1, 60))]
        theirs = logits[None]
        for processor in (
            transformers.RepetitionPenaltyLogitsProcessor(penalty),
            lambda ids, scores: scores * 1.5,  # generate puts a user's own here
            transformers.TemperatureLogitsWarper(t),
            transformers.TopKLogitsWarper(k),
            transformers.TopPLogitsWarper(p),
            transformers.MinPLogitsWarper(min_p),
        ):
            theirs = processor(torch.tensor([context]), theirs)
        sampler = Sampler(t, k, p, 0, min_p, penalty, [lambda scores, context: scores * 1.5])
        assert torch.equal(sampler.process(logits, context), theirs[0])


def test_samples_share_one_prefill_and_are_independent():
    model = toy(n_ctx=48)
    seen, forward = [], model.forward
    model.forward = lambda tokens, *args, **settings: seen.append(len(tokens)) or forward(tokens, *args, **settings)
    prompt, settings = [3, 1, 4, 1, 5, 9, 2, 6], {"max_new_tokens": 12, "picker": Sampler(1.0, seed=8)}
    for drafter in (None, TokenTrie(29)):
        seen.clear()
        many = generate_many(model, prompt, 5, drafter=drafter, budget=6, **settings)
        assert seen.count(7) >= 1 and max(seen) == 7  # all but the last token are read once, for all
        assert sum(seen) - 7 == sum(1 + sum(1 + len(step.draft) for step in g.steps) for g in many)
        assert many[0].tokens == generate(model, prompt, **settings).tokens
        assert len({tuple(g.tokens) for g in many}) == 5
        for number, generation in enumerate(many):
            picker = settings["picker"].sample(number)
            assert generation.tokens == generate(model, prompt, **settings | {"picker": picker}).tokens
    assert len({Sampler(seed=seed).sample(number).seed for seed in range(50) for number in range(50)}) == 2500
    assert len(generate_many(model, [3], 2, **settings)) == 2
    # The first token of many samples is distributed as the model says.
    p = model(prompt)[-1].softmax(-1)
    firsts = Counter(g.tokens[0] for g in generate_many(model, prompt, 3000, **settings | {"max_new_tokens": 1}))
    assert chi_square_p([firsts[t] for t in range(29)], [3000 * float(x) for x in p]) > FALSE_ALARM
    for number, picker, message in ((0, Sampler(), "1 or more"), (2, Greedy(), "one answer only")):
        with pytest.raises(ValueError, match=message):
            generate_many(model, prompt, number, picker=picker)


def test_sampler_refuses():
    for settings in (
        {"temperature": 0},
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": math.inf},
        {"seed": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": math.nan},
    ):
        with pytest.raises(ValueError):
            Sampler(**settings)


# --- counts.py ------------------------------------------------------------------------------------------------------


def ngrams(text: list[int], depth: int, starts: range) -> Counter:
    return Counter(tuple(text[i : i + n]) for i in starts for n in range(1, depth + 1) if i + n <= len(text))


def paths(root: Node, closed: bool = True) -> dict[tuple, Node]:
    """All nodes by path; checks on the way what must hold of every trie (`closed`: that begins at every position)."""
    found, stack = {}, [((), root)]
    while stack:
        path, node = stack.pop()
        for token, child in node.items():
            assert child.count >= 1 and (node is root or (child.count <= node.count and child.seen <= node.seen))
            found[(*path, token)] = child
            stack.append(((*path, token), child))
        assert node.total == sum(child.count for child in node.values())
        by_count = sorted(node, key=lambda token: (-node[token].count, token))
        top = by_count[:WIDE]
        assert node.top == ((top, [node[token].count for token in top]) if len(node) > WIDE else None)
    for path, node in found.items():  # a path with a shorter past is no rarer
        assert not closed or len(path) == 1 or found[path[1:]].count >= node.count
    return found


def counted(root: Node, closed: bool = True) -> Counter:
    return Counter({path: node.count for path, node in paths(root, closed).items()})


def test_counts_and_times_equal_brute_force():
    for seed in range(30):
        rng = random.Random(seed)
        vocab, depth = rng.choice([3, 5, 40]), rng.randint(2, 6)
        counts, expected, written = Counts(depth, 10**6), Counter(), []
        for _ in range(rng.randint(1, 5)):
            text = [int(vocab * rng.random() ** 2) for _ in range(rng.randint(0, 60))]
            writer = Writer(counts)
            for token in text:
                writer.write(token)
            expected += ngrams(text, depth, range(len(text)))
            written += [*text, None]
        found = paths(counts.root)
        assert {path: node.count for path, node in found.items()} == expected
        assert counts.n_nodes == len(expected) and counts.clock == sum(token is not None for token in written)
        time, last = 0, {}
        for i, token in enumerate(written):
            time += token is not None
            for n in range(1, depth + 1):
                if i + 1 >= n and None not in written[i + 1 - n : i + 1]:
                    last[tuple(written[i + 1 - n : i + 1])] = time - n + 1
        assert {path: node.seen for path, node in found.items()} == last
        assert counts.find([]) is counts.root and counts.find([vocab + 1, 0]).count == 0
        assert counts.nbytes > 50 * counts.n_nodes


def test_when_half_full_long_paths_are_admitted_at_the_second_sight():
    for seed in range(30):
        rng = random.Random(seed)
        depth, vocab = rng.randint(3, 5), rng.choice([4, 9])
        counts, expected = Counts(depth, 10**6), Counter()
        for _ in range(rng.randint(1, 5)):
            writer, text, known = Writer(counts), [], []
            for _ in range(rng.randint(1, 50)):
                text.append(rng.randrange(vocab))
                counts.max_nodes = rng.choice([10**6, 2 * counts.n_nodes + 1, 2 * counts.n_nodes - 1])
                half_full = 2 * counts.n_nodes > counts.max_nodes
                counts.max_nodes = max(counts.max_nodes, counts.n_nodes + depth) if half_full else 10**6
                half_full = 2 * counts.n_nodes > counts.max_nodes
                writer.write(text[-1])
                grown = []
                for start in [len(text) - 1, *known]:  # where the open paths began, shortest first
                    path = tuple(text[start:])
                    free = len(path) <= (Counts.FREE if half_full else depth)
                    if free or path in expected or expected[path[:-1]] >= 2:
                        expected[path] += 1
                        grown += [start] if len(path) < depth else []
                known = grown
        assert counted(counts.root) == expected and counts.n_nodes == len(expected)


def test_what_is_worth_least_is_forgotten():
    for seed in range(30):
        rng = random.Random(seed)
        counts = Counts(rng.randint(2, 5), 10**6)
        counts.DOUBLING, counts.LENGTH = rng.choice([(300_000, 100_000), (50, 20), (3, 2)])
        for _ in range(rng.randint(1, 6)):
            writer = Writer(counts)
            for _ in range(rng.randint(1, 60)):
                writer.write(int(30 * rng.random() ** 2))
        before = {path: (node.count, node.seen) for path, node in paths(counts.root).items()}
        worth = {p: seen + counts.DOUBLING * math.log2(c) - counts.LENGTH * len(p) for p, (c, seen) in before.items()}
        while counts.n_nodes > 1 and (counts.round or counts.n_nodes == len(before)):  # until the first round is over
            counts.max_nodes = counts.n_nodes + counts.max_depth - 1  # one too many
            counts.forget()
            assert counts.n_nodes + counts.max_depth <= counts.max_nodes
            after = paths(counts.root, closed=False)
            assert counts.n_nodes == len(after) == len(before) - counts.forgotten
            assert {path: (node.count, node.seen) for path, node in after.items()}.items() <= before.items()
            for path, its_worth in worth.items():
                assert (path in after) == (path[0] in counts.round or its_worth > counts.bar)
        below = sum(its_worth <= counts.bar for its_worth in worth.values()) / len(worth)
        assert below >= counts.DROPPED and (below <= counts.DROPPED + 0.1 or len(worth) < 100)


def test_the_bound_holds_at_every_moment():
    for seed in range(12):
        rng = random.Random(seed)
        depth = rng.randint(2, 5)
        bound = rng.choice([8 * depth, 100, 400])
        counts, texts, written = Counts(depth, bound), [[], [], []], Counter()
        writers = [Writer(counts) for _ in range(3)]
        for step in range(1500):
            i = rng.randrange(3)
            texts[i].append(rng.randrange(12) if rng.random() < 0.7 else step % 7)
            writers[i].write(texts[i][-1])
            written.update(tuple(texts[i][-n:]) for n in range(1, min(depth, len(texts[i])) + 1))
            assert counts.n_nodes <= bound
            if step % 100 == 0:
                found = counted(counts.root, closed=False)
                assert len(found) == counts.n_nodes and found <= written
                i = rng.randrange(3)
                texts[i], writers[i] = [], Writer(counts)
        assert counts.forgotten > bound


def test_packed_counts_come_back_exactly():
    for seed in range(20):
        rng = random.Random(seed)
        counts = Counts(4, 10**6)
        for _ in range(seed % 5):
            writer = Writer(counts)
            for _ in range(rng.randint(20, 80)):
                writer.write(int(70_000 * rng.random() ** 9))
        arrays = counts.pack()
        again = Counts(4, 10**6)
        again.unpack(arrays, counts.clock, counts.bar)
        old, new = paths(counts.root), paths(again.root)
        assert list(old) == list(new) and again.n_nodes == counts.n_nodes and again.clock == counts.clock
        assert all((old[p].count, old[p].seen) == (new[p].count, new[p].seen) for p in old)
    assert sum(array.nbytes for array in arrays.values()) < 12 * counts.n_nodes  # bytes a node
    for name, change in (
        ("children", lambda a: a[:-1]),
        ("children", lambda a: np.concatenate([a[1:], a[:1]])),
        ("counts", lambda a: a + np.arange(len(a), dtype=a.dtype)),
        ("counts", lambda a: a * 0),
        ("tokens", lambda a: a * 0),
        ("tokens", lambda a: a.astype(float)),
        ("counts", lambda a: a.astype(np.int64)),
        ("round", lambda a: np.array([70_001], dtype=np.uint32)),
        ("ages", lambda a: a[None]),
        ("ages", lambda a: np.where(np.arange(len(a)) < 5, a.max() + 1, a)),  # parents older than children
    ):
        with pytest.raises(ValueError):
            Counts(4, 10**6).unpack(arrays | {name: change(arrays[name])}, counts.clock, counts.bar)
    for bounds in ((3, 10**6), (4, 10)):
        with pytest.raises(ValueError):
            Counts(*bounds).unpack(arrays, counts.clock, counts.bar)


# --- tree.py --------------------------------------------------------------------------------------------------------


def test_draft_tree_by_hand():
    tree = DraftTree([5, 6, 7, 8], [-1, -1, 0, 2], probs=[0.6, 0.3, 0.5, 0.1])
    assert tree.depths == [1, 1, 2, 3]
    assert tree.children[-1] == {5: 0, 6: 1} and tree.children[0] == {7: 2} and tree.children[3] == {}
    assert tree.path(3) == [0, 2, 3] and tree.path(-1) == []
    assert tree.mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    drawing = tree.render(lambda ids: "abcdefghi"[ids[0]], accepted=[0])
    assert drawing.splitlines() == [
        "(root)",
        "|-- 'f'  0.60 *",
        "|   `-- 'h'  0.50",
        "|       `-- 'i'  0.10",
        "`-- 'g'  0.30",
    ]
    chain = DraftTree([7] * 3000, range(-1, 2999))
    assert chain.render(str).count("[7]") == 3000  # no recursion
    trimmed = tree.trim(2)
    assert (trimmed.tokens, trimmed.parents, trimmed.probs) == ([5, 6, 7], [-1, -1, 0], [0.6, 0.3, 0.5])
    assert tree.trim(3) is tree and tree.trim(3, 2).tokens == [5, 6] and len(DraftTree([], []).trim(0)) == 0
    assert tree.walk([5, 7, 8, 1]) == [0, 2, 3] and tree.walk([6, 7]) == [1] and tree.walk([]) == tree.walk([9]) == []
    for tokens, parents, probs in (
        ([1], [0], None),
        ([1, 1], [-1, -1], None),
        ([1], [-2], None),
        ([1], [], None),
        ([1], [-1], []),
    ):
        with pytest.raises(ValueError):
            DraftTree(tokens, parents, probs)


def test_tree_mask_against_paths():
    rng = random.Random(3)
    for n in range(25):
        tree = random_tree(rng, n, 6)
        mask = tree.mask()
        for node in range(-1, n):
            assert {j - 1 for j in mask[node + 1].nonzero().flatten().tolist()} == {-1, *tree.path(node)}


# --- trie.py: best-first --------------------------------------------------------------------------------------------


def levels_of(text: list[int], outputs: Counter, own: Counter, depth: int) -> list[tuple[Counter, int]]:
    """By brute force: (what followed, level) of every suffix that was continued, longest and own first."""
    levels = []
    for length in range(depth - 1, 0, -1):
        suffix = tuple(text[-length:])
        for counts, source in ((own, 1), (outputs, 0)):
            followed = Counter({p[-1]: c for p, c in counts.items() if len(p) == length + 1 and p[:-1] == suffix})
            if len(suffix) == length and followed:
                levels.append((followed, 2 * (length - 1) + source))
    return levels


def weight_index(followed: Counter, level: int) -> int:
    total, distinct = sum(followed.values()), len(followed)
    return CELLS * level + 5 * min(int(math.log2(total)) + 1, 8) + min(int(math.log2(distinct)) + 1, 4)


def next_probabilities(levels: list, weights: list[float], p: float, enough: float) -> dict[int, float]:
    """P of each next token times p, by the formula, from the longest suffix down until less than `enough` is left."""
    shares, left = Counter(), p
    for followed, level in levels:
        weight = weights[weight_index(followed, level)]
        total = sum(followed.values())
        known = sorted(followed, key=lambda t: (-followed[t], t))[: WIDE if len(followed) > WIDE else None]
        for token in known:
            shares[token] += left * weight * followed[token] / total
        left *= 1 - weight
        if left < enough:
            break
    return shares


def best_sum(children: dict[tuple, list[tuple]], p: dict[tuple, float], n: int) -> float:
    """The largest sum of probabilities over all trees of at most n nodes, by trying every way to share n out."""

    @functools.cache
    def below(path: tuple, n: int) -> float:  # of all forests of at most n nodes below `path`
        best = [0.0] * (n + 1)  # best[m]: with m nodes, among the children so far
        for child in children[path]:
            one = [0.0, *(p[child] + below(child, m - 1) for m in range(1, n + 1))]
            best = [max(best[m - k] + one[k] for k in range(m + 1)) for m in range(n + 1)]
        return best[n]

    return below((), n)


def random_trie(rng: random.Random, vocab: int, depth: int, **settings) -> tuple:
    """A trained trie with an open session; also all that was inserted, the session's text, and where outputs begin."""
    trie = TokenTrie(vocab, max_depth=depth, **settings)
    inserted = [[int(vocab * rng.random() ** 2) for _ in range(rng.randint(0, 25))] for _ in range(rng.randint(0, 5))]
    for text in inserted:
        trie.insert(text)
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(0, 12))]
    session, said = trie.open(prompt), []
    for _ in range(rng.randint(0, 6)):
        tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 3))]
        session.observe(tokens, session.draft(rng.randint(0, 6)))
        said += tokens
    return trie, session, inserted, prompt, said


@pytest.mark.parametrize("picker", [None, Sampler(1.0, seed=6)], ids=["blind", "foresight"])
def test_best_first_is_the_best_of_all_trees(picker):
    """Against exhaustive search, with probabilities by brute force from counted n-grams (and the known noise)."""
    for seed in range(60):
        rng = random.Random(seed)
        vocab, depth, budget = rng.choice([(3, 3, 4), (2, 4, 5), (40, 2, 3), (3, 2, 1)])
        trie, session, inserted, prompt, said = random_trie(rng, vocab, depth)
        outputs = sum((ngrams(t, depth, range(len(t))) for t in [*inserted, said]), Counter())
        own = ngrams(prompt + said, depth, range(len(prompt + said)))
        assert counted(trie.outputs.root) == outputs and counted(session.own.root) == own
        p, children, level = {(): 1.0}, {}, [()]
        for _ in range(budget):
            for path in level:
                levels = levels_of([*prompt, *said, *path], outputs, own, depth)
                if picker is None or p[path] < 0.1:  # unlikely nodes are not looked at so closely
                    shares = next_probabilities(levels, trie.blend.weights, p[path], session.ENOUGH / budget)
                else:
                    enough = session.ENOUGH / budget / p[path]
                    q = next_probabilities(levels, trie.blend.weights, 1.0, enough)
                    noise = gumbel(6, len(prompt) + len(said) + len(path), vocab).tolist()
                    wins = {token: share * math.exp(noise[token]) for token, share in q.items()}
                    total = sum(wins.values()) + math.exp(0.577) * (1 - sum(q.values()))
                    shares = {t: p[path] * (0.7 * share + 0.3 * wins[t] / total) for t, share in q.items()}
                children[path] = [(*path, token) for token in shares]
                p |= {(*path, token): share for token, share in shares.items()}
            level = [child for path in level for child in children[path]]
        children |= {path: [] for path in level}
        tree = session.draft(budget, picker)
        taken = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
        assert len(tree) <= budget and len(set(taken)) == len(tree)
        assert all(math.isclose(estimate, p[path]) for estimate, path in zip(session._estimates, taken))
        assert math.isclose(sum(p[path] for path in taken), best_sum(children, p, budget), abs_tol=1e-12)
        assert session._estimates == sorted(session._estimates, reverse=True)
        again = session.draft(budget, picker)
        assert (again.tokens, again.parents, again.probs) == (tree.tokens, tree.parents, tree.probs)


def test_every_token_trains_the_blend():
    """Against the recursion written down from the shortest suffix up."""
    for seed in range(25):
        rng = random.Random(seed)
        trie, session, inserted, prompt, said = random_trie(rng, 4, 4)
        outputs = sum((ngrams(t, 4, range(len(t))) for t in [*inserted, said]), Counter())
        text = prompt + said
        levels = levels_of(text, outputs, ngrams(text, 4, range(len(text))), 4)[::-1]
        expected, p, token = list(trie.blend.weights), 1e-5, rng.randrange(4)
        for followed, level in levels:
            i = weight_index(followed, level)
            weight, seen = expected[i], followed[token] / sum(followed.values())
            p = weight * seen + (1 - weight) * p
            rate = max(1 / (trie.blend.trained[i] + 1 + 10), 0.004)
            expected[i] += rate * (weight * seen / p - weight)
        session.observe([token])
        assert trie.blend.weights == pytest.approx(expected, rel=1e-9)
        assert all(0 <= weight <= 1 for weight in trie.blend.weights)


def test_the_walk_through_in_the_commentary():
    words = ["the", "dog", "sees", "cat", "a", "bird", "sleeps", "sings", "."]
    trie = TokenTrie(len(words), max_depth=3)
    for text in (
        "the dog sees the cat",
        "the dog sees a bird",
        "a cat sees the bird",
        "the cat sleeps",
        "a dog sleeps",
    ):
        assert text in trie_module.__doc__
        trie.insert([words.index(word) for word in text.split()])
    session = trie.open([words.index(word) for word in ["a", "dog", "sings", ".", "a", "dog"]])
    followed = [{words[token]: child.count for token, child in node.items()} for node in session.state]
    assert followed == [{"sees": 2, "sleeps": 1}, {"sings": 1}, {"sleeps": 1}, {"sings": 1}]
    shares = {words[t]: p for t, p in session._expand(session.state, 1.0, 0.0).items()}
    third, rest = 1 / 3, 2 / 3
    assert shares["sings"] == pytest.approx(third + third * rest**2)
    assert shares["sleeps"] == pytest.approx(third * rest + third * rest**3 * third)
    assert shares["sees"] == pytest.approx(third * rest**3 * rest)
    after = session._expand(session._after(session.state, words.index("sings")), 1.0, 0.0)
    assert list(after) == [words.index(".")]
    tree = session.draft(3)
    assert ([words[t] for t in tree.tokens], tree.parents) == (["sings", ".", "sleeps"], [-1, 0, -1])
    deeper = session._estimates[1] * sum(
        session._expand(session._after(session._after(session.state, 7), 8), 1.0, 0.0).values()
    )
    for number in (*shares.values(), 1 - sum(shares.values()), *after.values(), session._estimates[1], deeper):
        assert f"{number:.3f}" in trie_module.__doc__, number
    assert "0.42, 0.23 and 0.22" in trie_module.__doc__
    assert [f"{p:.2f}" for p in tree.probs] == ["0.42", "0.23", "0.22"]


def test_calibration_finds_the_true_rate_and_keeps_the_order():
    """Nodes of estimate p are accepted with probability p * ratio; 20 seeds, three standard errors at each knot."""
    for seed, ratio in itertools.product(range(5), (0.5, 0.8, 1.0, 1.2)):
        rng, calibration = random.Random(seed), Calibration()
        for _ in range(4000):
            estimates = [rng.choice(calibration.KNOTS[1:-3]) for _ in range(10)]
            calibration.learn(estimates, [i for i, p in enumerate(estimates) if rng.random() < p * ratio])
        calibration.refresh()
        for p, known in zip(calibration.KNOTS[1:-3], calibration.estimated):
            assert abs(calibration(p) / p - ratio) < 3.5 / math.sqrt(known / 2) + 0.02
        grid = [calibration(i / 999) for i in range(1000)]
        assert grid == sorted(grid) and grid[0] == 0 and grid[-1] <= 1


def test_probabilities_never_grow_along_a_path():
    for seed in range(40):
        _, session, *_ = random_trie(random.Random(seed), 6, 4)
        tree = session.draft(20)
        assert all(0 <= p <= 1 for p in tree.probs) and tree.probs == sorted(tree.probs, reverse=True)
        assert all(parent < 0 or p <= tree.probs[parent] for p, parent in zip(tree.probs, tree.parents))


def test_anything_may_happen_in_any_order(tmp_path):
    """Random inserts, queries side by side, drafts, observations, forgetting, saving and loading, in every mode."""
    for seed in range(24):
        rng = random.Random(seed)
        mode, vocab = MODES[seed % 4], rng.choice([4, 50])
        trie = TokenTrie(vocab, max_nodes=rng.choice([64, 300, 10_000]), mode=mode)
        sessions: list = []
        for _ in range(120):
            action = rng.choice(["insert", "open", "draft", "draft", "observe", "observe", "close", "load"])
            text = [rng.randrange(vocab) for _ in range(rng.randint(0, 12))]
            if action == "insert":
                trie.insert(text)
            elif action == "open" and len(sessions) < 3:
                sessions.append((trie.open(text), text))
            elif action == "close" and sessions:
                sessions.pop(rng.randrange(len(sessions)))[0].close()
            elif action == "load" and not sessions:
                trie.save(tmp_path / "trie")
                again = TokenTrie.load(tmp_path / "trie", vocab)
                a, b = trie.open(text), again.open(text)
                for _ in range(10):
                    x, y = a.draft(9), b.draft(9)
                    assert (x.tokens, x.parents, x.probs) == (y.tokens, y.parents, y.probs)
                    tokens = [*x.tokens[: rng.randint(0, 1)], rng.randrange(vocab)]
                    a.observe(tokens, x)
                    b.observe(tokens, y)
                a.close(), b.close()
                assert counted(trie.outputs.root, False) == counted(again.outputs.root, False)
                assert [p.name for p in tmp_path.iterdir()] == ["trie"]
                trie = again
            elif sessions:
                session, text = rng.choice(sessions)
                tree = session.draft(rng.randint(0, 20))
                if action == "observe":
                    tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 4))]
                    session.observe(tokens, tree)
                    text += tokens
                if mode == "best-first":  # the state that moved along is the one that looking up would give
                    kept = list(session._current())
                    session._look_up()
                    assert all(x is y for x, y in zip(kept, session.state))
                    known = counted(session.own.root).keys() | counted(trie.outputs.root, False).keys()
                    assert all((token,) in known for token in tree.tokens)
            assert trie.n_nodes == len(paths(trie.outputs.root, closed=False)) <= trie.max_nodes
        for session, _ in sessions:
            session.close()


def test_two_queries_do_not_see_each_others_prompts():
    for mode in MODES:
        trie = TokenTrie(10, mode=mode)
        a, b = trie.open([1, 2, 3, 1, 2]), trie.open([4, 5, 4])
        assert a.draft(4).tokens[0] == 3 and b.draft(4).tokens[0] == 5
        b.observe([1, 2])
        assert 3 not in b.draft(9).tokens  # that "3" follows "1 2" is a's secret
        b.observe([7, 1, 2])
        assert 7 in a.draft(9).tokens or mode == "single"  # outputs are shared
        a.close()
        assert 3 not in a.draft(9).tokens and trie.count([3]) == 0
        assert counted(trie.outputs.root) == ngrams([1, 2, 7, 1, 2], trie.max_depth, range(5))
        b.close()


def test_what_a_query_said_is_remembered_and_helps():
    """The same text a second time: nearly everything is guessed."""
    rng = random.Random(1)
    text = [rng.randrange(500) for _ in range(80)]
    trie, steps = TokenTrie(500), []
    for _ in range(2):
        session, done, count = trie.open([500 - 1]), 1, 0
        session.observe(text[:1])
        while done < len(text):
            tree = session.draft(8)
            accepted = len(tree.walk(text[done:]))
            session.observe(text[done : done + accepted + 1], tree)
            done, count = done + accepted + 1, count + 1
        session.close()
        steps.append(count)
    assert steps[0] == 79 and steps[1] < 20


def test_trie_files_are_refused_in_one_line(tmp_path):
    trie = TokenTrie(50)
    trie.insert([1, 2, 3, 2, 3, 49])
    good = tmp_path / "good"
    trie.save(good)
    assert TokenTrie.load(good).count([2, 3]) == 2 and TokenTrie.load(good, 50).vocab_size == 50
    data = good.read_bytes()
    (tmp_path / "short").write_bytes(data[:-9])
    (tmp_path / "text").write_text("no trie at all")
    save_file({"a": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "foreign")
    (tmp_path / "later").write_bytes(data.replace(b'"version":"3"', b'"version":"9"'))
    (tmp_path / "mode").write_bytes(data.replace(b"best-first", b"best-worst"))
    rng = random.Random(1)
    for _ in range(200):  # a flipped bit is noticed wherever it is, unless it changes nothing (spaces in the header)
        at = rng.randrange(len(data))
        (tmp_path / "bit").write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        try:
            again = TokenTrie.load(tmp_path / "bit")
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            assert counted(again.outputs.root) == counted(trie.outputs.root) and vars(again.blend) == vars(trie.blend)
    for change in ({"trie": "null"}, {"trie": "[" * 99}, {"crc32": "0"}, {"trie": '{"clock": 1, "max_depth": 1}'}):
        with safe_open(good, framework="numpy") as file:
            header, arrays = file.metadata() | change, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if "crc32" not in change:
            header["crc32"] = TokenTrie._checksum(arrays, header["trie"])
        safetensors.numpy.save_file(arrays, tmp_path / "forged", header)
        with pytest.raises(ValueError, match="damaged"):
            TokenTrie.load(tmp_path / "forged")
    loose = TokenTrie()
    loose.insert([7, 60])
    loose.save(tmp_path / "loose")
    for name, message in {
        "short": "not a whole trie file",
        "text": "not a whole trie file",
        "foreign": "something else than a trie",
        "later": "version 9",
        "mode": "damaged",
        "good": "vocabulary of 50 tokens, the model has 40",
        "loose": "vocabulary of 61 tokens, the model has 40",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            TokenTrie.load(tmp_path / name, 40)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="no trie file"):
        TokenTrie.load(tmp_path / "nothing")
    assert TokenTrie.load(tmp_path / "loose", 100).vocab_size == 100


def test_trie_refuses():
    for settings in (
        {"mode": "best"},
        {"max_depth": 1},
        {"max_depth": 4.5},
        {"max_depth": 65},
        {"max_nodes": 10},
        {"max_nodes": math.inf},
    ):
        with pytest.raises(ValueError):
            TokenTrie(5, **settings)
    trie = TokenTrie(5)
    for tokens in ([1, 2, 5], [1, -1]):
        with pytest.raises(ValueError, match="outside the trie's vocabulary"):
            trie.insert(tokens)
    for tokens in ([1.0], "12", [None], [math.inf]):
        with pytest.raises(ValueError, match="whole numbers"):
            trie.insert(tokens)
    for vocab_size in ("5", 0, -1, 2.5, 2**40):
        with pytest.raises(ValueError, match="vocab_size"):
            TokenTrie(vocab_size)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        trie.save("no/such/folder/trie")
    assert trie.n_nodes == 0 and trie.count([1]) == 0  # nothing half-inserted


# --- paper.py: the paper's own modes ---------------------------------------------------------------------------------


def test_counts_are_kept_apart_by_where_they_begin():
    for seed in range(40):
        rng = random.Random(seed)
        depth = rng.randint(2, 6)
        trie = TokenTrie(5, max_depth=depth, mode="single")
        outputs = Counter()
        for _ in range(rng.randint(0, 4)):
            text = [rng.randrange(5) for _ in range(rng.randint(0, 15))]
            trie.insert(text)
            outputs += ngrams(text, depth, range(len(text)))
        prompt, said = [rng.randrange(5) for _ in range(rng.randint(1, 15))], []
        session = trie.open(prompt)
        for _ in range(6):
            tokens = [rng.randrange(5) for _ in range(rng.randint(1, 4))]
            session.observe(tokens)
            said += tokens
            # n-grams that begin in the prompt are the query's own, those that begin in the output everybody's
            assert counted(session.own.root, closed=False) == ngrams(prompt + said, depth, range(len(prompt)))
            total = outputs + ngrams(said, depth, range(len(said)))
            assert counted(trie.outputs.root) == total and trie.n_nodes == len(total)
            assert all(trie.count(path) == count for path, count in total.items())
        session.close()
        assert counted(trie.outputs.root) == total and trie.count(prompt[:depth]) == total[tuple(prompt[:depth])]


@pytest.mark.parametrize("mode", MODES[1:])
def test_drafts_are_continuations_that_were_seen(mode):
    for seed in range(60):
        rng = random.Random(seed)
        trie = TokenTrie(4, max_depth=6, mode=mode)
        seen = set()
        for _ in range(3):
            text = [rng.randrange(4) for _ in range(20)]
            trie.insert(text)
            seen |= set(ngrams(text, 6, range(20)))
        text = [rng.randrange(4) for _ in range(8)]
        session = trie.open(text)
        for _ in range(5):
            tokens = [rng.randrange(4) for _ in range(2)]
            session.observe(tokens)
            text += tokens
            seen |= set(ngrams(text, 6, range(len(text))))
            for budget in (0, 1, 4, 17):
                tree = session.draft(budget)
                assert len(tree) <= budget
                again = session.draft(budget)
                assert (tree.tokens, tree.parents) == (again.tokens, again.parents)  # deterministic
                suffixes = [tuple(text[len(text) - n :]) for n in range(1, 4)]
                for node in range(len(tree)):
                    path = tuple(tree.tokens[i] for i in tree.path(node))
                    assert any((*suffix, *path) in seen for suffix in suffixes)


def brute_force_hierarchical(counts: Counter, text: list[int], budget: int, max_match: int) -> set:
    """Longest suffix first, below it the most frequent paths; ties by when they could first be reached."""
    taken: list[tuple] = []
    for n in range(max_match, 0, -1):
        suffix = tuple(text[len(text) - n :]) if n <= len(text) else None
        if suffix is None or not counts[suffix]:
            continue
        below = {path[n:]: c for path, c in counts.items() if path[:n] == suffix and len(path) > n}
        open_paths = [()]
        frontier: list[tuple] = []
        order = itertools.count()
        while len(taken) < budget:
            for path in open_paths:
                children = [p for p in below if len(p) == len(path) + 1 and p[:-1] == path]
                for child in sorted(children, key=lambda p: (-below[p], p[-1]))[:budget]:
                    frontier.append((-below[child], next(order), child))
            if not frontier:
                break
            best = min(frontier)
            frontier.remove(best)
            if best[2] not in taken:
                taken.append(best[2])
            open_paths = [best[2]]
    return set(taken)


def test_hierarchical_takes_the_most_frequent_nodes_longest_suffix_first():
    for seed in range(40):
        rng = random.Random(seed)
        trie, counts = TokenTrie(4, max_depth=5, mode="hierarchical"), Counter()
        for _ in range(3):
            text = [rng.choice([0, 0, 1, 1, 2, 3]) for _ in range(25)]
            trie.insert(text)
            counts += ngrams(text, 5, range(25))
        said = text[:3]
        session = trie.open([])
        session.observe(said)
        counts += ngrams(said, 5, range(3))
        for budget in (1, 3, 8, 30):
            tree = session.draft(budget)
            paths = {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))}
            assert paths == brute_force_hierarchical(counts, said, budget, 3)


def test_the_other_modes_by_hand():
    def draft(mode: str, budget: int) -> tuple:
        trie = TokenTrie(9, max_depth=4, mode=mode)
        for text in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 6, 7], [2, 8]):
            trie.insert(text)
        session = trie.open([1])
        session.observe([2])
        tree = session.draft(budget)
        return tree.tokens, tree.parents

    # After "1 2": 3 (three times) and then 5 (twice) or 4; or 6 7. After "2" alone also 8.
    assert draft("single", 9) == ([3, 5], [-1, 0])
    assert draft("single", 1) == ([3], [-1])
    assert draft("parallel", 9) == ([3, 5, 6, 7, 8], [-1, 0, -1, 2, -1])
    assert draft("parallel", 3) == ([3, 5, 6], [-1, 0, -1])
    assert draft("hierarchical", 9)[0][:4] == [3, 5, 6, 4]
    for mode in MODES:
        assert draft(mode, 0) == ([], [])


# --- drafters.py ----------------------------------------------------------------------------------------------------


def other_drafters(model: Any, small: Any) -> dict[str, Any]:
    """Every drafter of drafters.py, fresh; the target model as its own draft model, too."""
    return {
        "prompt-lookup": PromptLookup(),
        "jacobi": Jacobi(3),
        "tree": ModelDrafter(small, breadth=3, passes=4, least=0.0),
        "chain": ModelDrafter(small, chain=True),
        "itself": ModelDrafter(model),
        "combined": Combined([TokenTrie(29), ModelDrafter(small), PromptLookup(), Jacobi(), RandomDrafter(0, 29)]),
    }


@pytest.mark.parametrize(
    "picker",
    [Greedy(), Sampler(0.7, top_k=9, seed=4), Sampler(0.5, seed=5, min_p=0.02, repetition_penalty=1.2)],
    ids=["greedy", "sampled", "contextual"],
)
def test_every_drafter_gives_the_plain_text(picker):
    """In float64 not one token may differ; two queries at a time, one after the other, with stops and full contexts."""
    model, small = toy(n_ctx=48), toy(1, 1, 8, n_ctx=40)
    drafters, accepted = other_drafters(model, small), Counter()
    for seed in range(10):
        rng = random.Random(seed)
        prompt = [rng.randrange(29) for _ in range(rng.randint(1, 20))]
        settings = {
            "picker": picker,
            "max_new_tokens": rng.randint(1, 60),
            "stop_ids": rng.sample(range(29), rng.choice([0, 0, 1])),
        }
        plain = generate(model, prompt, **settings)
        for name, drafter in drafters.items():
            budget = rng.choice([1, 2, 7, 24]) if seed % 4 else "auto"
            waiting = drafter.open(prompt[::-1])
            fast = generate(model, prompt, drafter=drafter, budget=budget, **settings)
            waiting.close()
            assert (fast.tokens, fast.finish_reason) == (plain.tokens, plain.finish_reason), (name, seed)
            assert all(len(step.draft) <= (MOST if budget == "auto" else budget) for step in fast.steps)
            accepted[name] += sum(len(step.accepted) for step in fast.steps)
    assert all(accepted[name] > 3 for name in drafters), accepted


def test_a_tree_of_paths_shares_beginnings():
    tree = DraftTree.of([[5, 6, 7], [5, 6, 8], [5], [9, 6]], 10)
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8, 9, 6], [-1, 0, 1, 1, -1, 4])
    assert DraftTree.of([[5, 6, 7], [5, 6, 8]], 3).tokens == [5, 6, 7]


def test_prompt_lookup_against_a_search():
    """The draft is what the definition says, read off the whole text; the rates are counts."""
    for seed in range(60):
        rng, drafter = random.Random(seed), PromptLookup(1 + seed % 8)
        text = [rng.randrange(3 + seed % 4) for _ in range(rng.randint(1, 30))]
        session, seen = drafter.open(text), [[k, k + 1.0] for k in range(drafter.longest + 1)]
        for _ in range(8):
            budget, end = rng.randint(1, 12), len(text)
            starts = [
                max((i for i in range(k, end) if text[i - k : i] == text[end - k :]), default=0) for k in (3, 2, 1)
            ]
            start = next((i for i in starts if i), None)
            tree, copied = session.draft(budget), list(text)
            emitted = [rng.randrange(3) for _ in range(rng.randint(1, 4))]
            if start is None:
                assert not len(tree)
            else:
                for i in range(budget):
                    copied.append(copied[start + i])
                assert tree.tokens == copied[end:] and tree.parents == list(range(-1, budget - 1))
                length = next(k for k in range(99) if k >= start or text[start - 1 - k] != text[end - 1 - k])
                p = 1.0
                for i, found in enumerate(tree.probs):
                    right, tried = seen[min(min(length, drafter.longest) + i, drafter.longest)]
                    p *= right / tried
                    assert math.isclose(found, p)
                for i, (copy_, token) in enumerate(zip(tree.tokens, emitted)):
                    rate = seen[min(min(length, drafter.longest) + i, drafter.longest)]
                    rate[1] += 1
                    if copy_ != token:
                        break
                    rate[0] += 1
            session.observe(emitted, tree)
            text += emitted
            assert drafter.rates == seen


@pytest.mark.parametrize("picker", [Greedy(), Sampler(seed=1)], ids=["greedy", "sampled"])
def test_jacobi_pools_only_what_the_model_said(picker):
    """Every n-gram that a guess completed ends with the model's pick behind the path it was guessed on, recomputed from
    scratch; the columns move along with the text; and an undisturbed line becomes the true text, a place a round."""
    model, rng = toy(n_ctx=200), random.Random(3)
    for n in (2, 3, 4, 5):
        text = [rng.randrange(29) for _ in range(6)]
        session = Jacobi(n).open(text)
        session.observe([3], DraftTree([], []))
        text.append(3)
        for _ in range(6):
            tree = session.draft(40)
            paths, old = session._guesses(), [list(level) for level in session.levels]
            nodes = {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))}
            assert len(paths) == max(1, 20 // (n - 1)) and all(tuple(path) in nodes for path in paths)

            def pick(path: list[int]) -> int:
                context = text + path  # noqa: B023
                return picker.pick(model(context)[-1], len(context), context)

            truth = [pick([tree.tokens[i] for i in tree.path(node)]) for node in range(-1, len(tree))]
            emitted = [truth[0]]
            while (node := tree.walk(emitted)) and len(node) == len(emitted):
                emitted.append(truth[node[-1] + 1])
            new = [pick(path) for path in paths]
            session.observe(emitted, tree, truth)
            assert session.levels == [level[len(emitted) - 1 :] for level in [*old[1:], new]]
            for path, token in zip(paths, new):
                ngram = [*path, token][-n:]
                assert tuple(ngram[1:]) in session.pool[ngram[0]] or len(session.pool[ngram[0]]) == 16
            text += emitted
            for start in range(len(text) - n + 1):
                known = session.pool[text[start]]
                assert tuple(text[start + 1 : start + n]) in known or len(known) == 16
        assert all(len(known) == len(set(known)) <= 16 for known in session.pool.values())


def test_jacobi_needs_no_luck():
    """With a pool that never helps, the line of guesses is right at its first place after each round; so greedy text is
    found by guessing alone wherever a model repeats itself: more than one token a step."""
    model = toy(scale=0.6)
    emitted = steps = 0
    for seed in range(8):
        rng = random.Random(seed)
        result = generate(model, [rng.randrange(29) for _ in range(4)], drafter=Jacobi(3), budget=24, max_new_tokens=50)
        emitted, steps = emitted + len(result.tokens) - 1, steps + len(result.steps)
    assert emitted / steps > 1.3


def slow_tree(model: Any, text: list[int], budget: int, picker: Any, trust: float) -> tuple[dict, float]:
    """By exhaustive search, from scratch: the probability of every path of at most 3 tokens, and the sum of the best
    `budget`."""
    p = {(): 1.0}
    for path in itertools.chain.from_iterable(itertools.product(range(4), repeat=depth) for depth in range(3)):
        context = [*text, *path]
        q = picker.process(model(context)[-1], context).softmax(-1)
        if (noise := picker.noise(len(context), 4)) is not None:
            wins = q * noise.exp()
            q = (1 - trust) * q + trust * wins / wins.sum()
        p |= {(*path, token): p[path] * float(q[token]) for token in range(4)}
    return p, sum(sorted(p.values(), reverse=True)[1 : budget + 1])


@pytest.mark.parametrize("picker", [None, Sampler(0.7, seed=2, top_k=3)], ids=["greedy", "sampled"])
def test_a_draft_model_finds_the_best_tree(picker):
    """Against exhaustive search over a vocabulary of four, while its cache is rolled back again and again."""
    small, rng = toy(2, 2, 16, 4, 40, scale=0.5), random.Random(5)
    for _ in range(12):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 8))]
        drafter = ModelDrafter(small, breadth=1, passes=30, least=0.0)
        session = drafter.open(text)
        while len(text) < 30:
            budget = rng.randint(1, 5)
            trust, tree = drafter.trust, session.draft(budget, picker)
            assert tree.tokens == session.draft(budget, picker).tokens  # asking twice changes nothing
            taken = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
            p, best = slow_tree(small, text, budget, picker or Greedy(), trust)
            if max(tree.depths) <= 3:
                assert all(math.isclose(e, p[path], rel_tol=1e-5) for e, path in zip(session._estimates, taken))
                assert sum(session._estimates) >= best - 1e-6 and len(tree) == min(budget, len(tree))
            emitted = [rng.choice([rng.randrange(4), *tree.tokens[:1]])]
            for _ in range(rng.randint(0, 3)):  # along the tree, or not
                walked = tree.walk(emitted)
                below = list(tree.children[walked[-1]]) if len(walked) == len(emitted) else []
                emitted.append(rng.choice([rng.randrange(4), *below]))
            session.observe(emitted, tree)
            text += emitted
            assert session.known <= len(text) and session.cache.length >= session.known
        session.close()


def test_a_draft_model_that_is_the_target_is_always_right():
    model, rng = toy(n_ctx=64), random.Random(1)
    for picker, sure in ((Greedy(), True), (Sampler(0.8, seed=3), False)):
        drafter = ModelDrafter(model, chain=True, passes=5, least=0.0)
        for _ in range(4):
            prompt = [rng.randrange(29) for _ in range(5)]
            result = generate(model, prompt, drafter=drafter, picker=picker, budget=5, max_new_tokens=49)
            if sure:
                assert [len(step.tokens) for step in result.steps] == [6] * 8
        assert sure or (drafter.trust > 0.9 and result.tokens_per_step > 5)  # trusting its q was soon found to be right


def test_combined_takes_the_best_of_all_trees():
    class Says:
        def __init__(self, tree: DraftTree) -> None:
            self.tree, self.heard = tree, []

        def open(self, prompt_ids):
            return self

        def draft(self, budget, picker=None):
            return self.tree.trim(99, budget)

        def observe(self, tokens, draft=None, picks=None):
            self.heard.append((tokens, draft, picks))

        def close(self):
            self.heard.append("closed")

    one = Says(DraftTree([1, 2, 3], [-1, 0, -1], [0.6, 0.3, 0.2]))
    two = Says(DraftTree([3, 4, 2], [-1, 0, -1], [0.5, 0.4, 0.1]))
    third = Says(DraftTree([1, 7], [-1, 0]))  # has no estimates: 0.5, 0.25
    third.wants_picks = True
    session = Combined([one, two, third]).open([0])
    tree = session.draft(5)
    paths = {tuple(tree.tokens[i] for i in tree.path(node)): p for node, p in enumerate(tree.probs)}
    assert paths == {(1,): 0.6, (3,): 0.5, (3, 4): 0.4, (1, 2): 0.3, (1, 7): 0.25} and session.wants_picks
    session.observe([3, 9], tree, [0] * 6)
    session.close()
    assert one.heard == [([3, 9], one.tree, None), "closed"] and third.heard == [([3, 9], tree, [0] * 6), "closed"]
    assert session.seen[0b001] == [2, 2.3] and session.seen[0b010] == [2, 2.4] and session.seen[0b011] == [3, 2.5]
    assert session.seen[0b101] == [2, 2.6] and session.seen[0b100] == [2, 2.25]
    tree = session.draft(2)
    assert tree.tokens == [1, 3]
    assert all(math.isclose(*pair) for pair in zip(tree.probs, (0.6 * 2 / 2.6, 0.5 * 2 / 2.4)))


def test_drafters_refuse():
    for make, message in (
        (lambda: PromptLookup(0), "longest must be a whole number"),
        (lambda: Jacobi(1), "ngram must be 2 or more"),
        (lambda: Jacobi(3, 0), "keep 1 or more"),
        (lambda: ModelDrafter(toy(), breadth=0), "breadth and passes must be 1 or more"),
        (lambda: Combined([]), "combine one or more drafters"),
        (lambda: Combined([TokenTrie(29), ModelDrafter(toy(vocab_size=30))]), "all for one vocabulary"),
        (lambda: decode(toy(), [1], drafter=ModelDrafter(toy(vocab_size=30))), "vocabulary of 30, the model has 29"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


# --- budget.py ------------------------------------------------------------------------------------------------------


def test_cost_curve_interpolates_and_forgets_outliers():
    curve = CostCurve()
    assert curve(1) == curve(50) == 0
    for rows, seconds in ((1, 9.0), (1, 1.0), (17, 9.0), (17, 3.0), (9, 9.0), (9, 1.5), (33, 9.0)):
        curve.learn(rows, seconds)  # the first pass of a width does not count
    assert [curve(n) for n in (1, 9, 17)] == [1.0, 1.5, 3.0] and curve(5) == pytest.approx(1.25)
    assert curve(13) == pytest.approx(2.25) and curve(66) == pytest.approx(3.0 * 98 / 49)
    curve.learn(9, 100.0)
    assert curve(9) == pytest.approx(1.5 * 1.2 * 1.06)  # as if it had taken three times as long
    for _ in range(100):
        curve.learn(9, 2.0)
    assert curve(9) == pytest.approx(2.0, rel=1e-3)
    assert 1.1 < curve(1) < 2.0 / 1.5  # everything became slower, as far as can be told from one width


def test_auto_takes_the_number_of_nodes_with_the_largest_gain():
    """Against trying every n, on random cost curves, rates and trees."""
    for seed in range(200):
        rng = random.Random(seed)
        curve = CostCurve()
        for rows in (*range(1, 70), *range(1, 70)):
            curve.learn(rows, 1.0 + 0.5 * (rows // rng.choice([8, 16])) * rng.random() + 0.002 * rows)
        auto = Auto(curve)
        for _ in range(rng.randint(0, 5)):
            empty = DraftTree([], [])
            auto.learn(empty, [], 1, (0.0, curve(1), 0.1))
        auto.expected, auto.accepted = 10.0, 10.0 * rng.uniform(0.5, 1.5)
        probs = sorted((rng.random() ** rng.choice([2, 6]) for _ in range(rng.randint(1, 40))), reverse=True)
        draft = DraftTree(range(len(probs)), [-1] * len(probs), probs)
        rate = auto.tokens / auto.seconds if auto.seconds else 1 / curve(1)
        honest = auto.accepted / auto.expected
        sizes = [n for n in (0, *SIZES, len(probs)) if n <= len(probs)]
        gains = {n: 1 + honest * sum(probs[:n]) - rate * curve(n + 1) for n in sizes}
        assert gains[len(auto.cut(draft))] == pytest.approx(max(gains.values()))


def test_auto_rests_when_nothing_pays_and_wakes_when_it_does():
    curve = CostCurve()
    for rows in (*range(1, 70), *range(1, 70)):
        curve.learn(rows, 0.01 + 0.001 * rows)
    auto, asked = Auto(curve), 0
    for _ in range(300):
        nodes = auto.ask()
        asked += nodes > 0
        draft = auto.cut(DraftTree(range(nodes), [-1] * nodes, [0.001] * nodes))
        assert not draft
        auto.learn(draft, [], 1, (0.0, curve(1), 0.0))
    assert asked < 20  # 1 + 2 + 4 ... + 32 + 32 ... steps of rest between them
    for _ in range(40):
        nodes = auto.ask()
        draft = auto.cut(DraftTree(range(nodes), range(-1, nodes - 1), [0.99**n for n in range(1, nodes + 1)]))
        auto.learn(draft, range(len(draft)), len(draft) + 1, (0.0, curve(len(draft) + 1), 0.0))
    assert len(draft) > 8


def test_calibration_leaves_no_trace():
    model = toy(n_ctx=64)
    cache = model.new_cache(120)
    model([1, 2, 3, 4], cache=cache)
    curve = curve_of(model)
    calibrate(model, cache, curve)
    assert cache.length == 4 and curve is curve_of(model) and curve.rows == [1, 5, 9, 13, 17, 25, 33, 49, 65]
    short = CostCurve()
    calibrate(model, cache, short, 0)  # no time to spend: just what a single row costs
    assert short.rows == [1] and cache.length == 4
    assert (model([5], cache=cache)[0] - model([1, 2, 3, 4, 5])[-1]).abs().max() < 1e-9
    assert curve_of(model.float()) is not curve


# --- lookahead.py: identical ----------------------------------------------------------------------------------------


def no_pair_twice(logits: torch.Tensor, context: list[int]) -> torch.Tensor:
    """A processor that forbids what would repeat a pair of tokens: it depends on the whole text before."""
    pairs = {b for a, b in itertools.pairwise(context) if a == context[-1]}
    return logits.index_fill(0, torch.tensor(sorted(pairs), dtype=torch.long), -20.0)


@every_kind
@pytest.mark.parametrize(
    "picker",
    [
        Greedy(),
        Sampler(1.0, seed=3),
        Sampler(0.8, top_k=9, top_p=0.9, seed=4),
        Sampler(0.9, seed=5, min_p=0.02, repetition_penalty=1.4, processors=[no_pair_twice]),
    ],
    ids=["greedy", "sampled", "filtered", "contextual"],
)
def test_any_draft_gives_the_plain_text(picker, kind):
    """Junk drafts, oracle drafts, the trie; lengths, stops, contexts. In float64 not one token may differ."""
    model = kind.toy(n_ctx=48)
    exact, ties = copy.deepcopy(model).double(), 0
    for seed in range(14 if kind.dtype == torch.float64 else 8):
        rng = random.Random(seed)
        prompt = [rng.randrange(29) for _ in range(rng.randint(1, 20))]
        settings = {
            "picker": picker,
            "max_new_tokens": rng.randint(1, 60),
            "stop_ids": rng.sample(range(29), rng.choice([0, 1, 1, 3])),
        }
        plain = generate(model, prompt, **settings)
        trie = TokenTrie(29, max_depth=5, mode=rng.choice(MODES))
        trie.insert(plain.tokens[: rng.randint(0, 40)])
        for drafter in (RandomDrafter(seed, 29), OracleDrafter(seed, 29, plain.tokens, rng.randint(1, 9)), trie):
            budget = rng.choice([1, 2, 7, 30, "auto"])
            fast = generate(model, prompt, drafter=drafter, budget=budget, **settings)
            if kind.dtype == torch.float64:
                assert (fast.tokens, fast.finish_reason) == (plain.tokens, plain.finish_reason)
            ties += not assert_same_or_near_tie(exact, prompt, fast.tokens, plain.tokens, picker, kind.dtype)
            for step in fast.steps:
                assert len(step.draft) <= (MOST if budget == "auto" else budget)
                assert len(step.tokens) == len(step.accepted) + 1
                assert [step.draft.tokens[node] for node in step.accepted] == step.tokens[:-1]
        expected = {"stop": plain.tokens[-1] in settings["stop_ids"]}
        expected["length"] = len(plain.tokens) == settings["max_new_tokens"]
        expected["context"] = len(prompt) + len(plain.tokens) == 48
        assert expected[plain.finish_reason]
    assert ties <= 1


def test_an_oracle_saves_steps():
    model, prompt = toy(), [3, 1, 4]
    plain = generate(model, prompt, max_new_tokens=41)
    assert len(plain.steps) == 40 and plain.tokens_per_step == 1 and plain.prefill.tokens == plain.tokens[:1]
    oracle = generate(model, prompt, max_new_tokens=41, drafter=OracleDrafter(0, 29, plain.tokens, 4), budget=99)
    assert len(oracle.steps) == 8 and oracle.tokens_per_step == 5
    assert [step.position for step in oracle.steps] == [4 + 5 * i for i in range(8)]
    assert math.isnan(generate(model, prompt, max_new_tokens=1).tokens_per_step)


def test_plain_decoding_is_what_recomputing_says():
    model = toy()
    for picker in (Greedy(), Sampler(1.0, seed=8)):
        text = [5, 6]
        for _ in range(30):
            text.append(picker.pick(model(text)[-1], len(text), text))
        assert generate(model, [5, 6], picker=picker, max_new_tokens=30).tokens == text[2:]


def test_a_cache_of_the_prompt_can_be_handed_in():
    model, prompt = toy(), [3, 1, 4, 1, 5]
    plain = generate(model, prompt, max_new_tokens=20)
    for known in range(5):
        cache = model.new_cache(40)
        model(prompt[:known], cache=cache) if known else None
        result = generate(model, prompt, max_new_tokens=20, cache=cache, drafter=RandomDrafter(1, 29), budget=30)
        assert result.tokens == plain.tokens  # the capacity of 40 trims the drafts, and no more
        assert cache.length == 24  # everything but the last token


def test_ends_of_the_road():
    model = toy(n_ctx=16)
    assert generate(model, [1] * 16).finish_reason == "context" and generate(model, [1] * 16).tokens == []
    assert generate(model, [1], max_new_tokens=0).finish_reason == "length"
    full = generate(model, [1] * 15)
    assert len(full.tokens) == 1 and full.finish_reason == "context"
    exact = generate(model, [1] * 10, max_new_tokens=6)
    assert len(exact.tokens) == 6 and exact.finish_reason == "length"


def test_sessions_are_closed_whatever_happens():
    model, drafter = toy(), RandomDrafter(0, 29)
    steps = decode(model, [1, 2], drafter=drafter, budget=8)
    next(steps)
    steps.close()  # the reader walks away
    generate(model, [1, 2], drafter=drafter, budget=8, max_new_tokens=3)
    drafter.ids = 1000
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generate(model, [1, 2], drafter=drafter, budget=8, max_new_tokens=30)
    assert drafter.opened == drafter.closed == 3


def test_a_session_that_wants_picks_gets_one_for_every_node():
    model, seen = toy(), []

    class Curious(RandomDrafter):
        wants_picks = True

        def observe(self, tokens, draft=None, picks=None):
            seen.append((tokens, draft, picks))

    picker = Sampler(seed=2)
    generate(model, [1, 2], drafter=Curious(3, 29), picker=picker, budget=8, max_new_tokens=12)
    text = [1, 2]
    for tokens, draft, picks in seen:
        if picks is not None:
            for node in range(-1, len(draft)):
                context = text + [draft.tokens[i] for i in draft.path(node)]
                assert picks[node + 1] == picker.pick(model(context)[-1], len(context), context)
        text += tokens
    assert sum(picks is not None for _, _, picks in seen) == len(seen) - 1 > 3


def test_decode_refuses_at_the_call():
    model = toy(n_ctx=16)
    cache = model.new_cache()
    model([1, 2], cache=cache)
    for message, prompt, settings in (
        ("empty", [], {}),
        ("context holds 16", [1] * 17, {}),
        ("outside the model's vocabulary", [1, 29], {}),
        ("outside the model's vocabulary", [-1], {}),
        ("budget", [1], {"budget": "lots"}),
        ("budget", [1], {"budget": -1}),
        ("0 to 4096", [1], {"budget": 10**30}),
        ("whole numbers", [1.5], {}),
        ("whole numbers", [1], {"stop_ids": "x"}),
        ("vocabulary of 5, the model has 29", [1], {"drafter": TokenTrie(5)}),
        ("max_new_tokens", [1], {"max_new_tokens": -1}),
        ("nothing is left to read", [1, 2], {"cache": cache}),
        ("whole number", [1], {"max_new_tokens": 2.5}),
        ("may need 15", [1, 2, 3], {"cache": model.new_cache(14)}),
    ):
        with pytest.raises(ValueError, match=message):
            decode(model, prompt, **settings)


def identical_on_prompts(
    name: str, prompts: int, tokens: int, budgets: tuple, pickers: list, pack: bool | None = None
) -> int:
    """Lookahead against plain decoding for all modes; returns how many runs met a (proven) near-tie."""
    model, tokenizer = bundled(name, pack=pack), Tokenizer.for_model(bundled(name))
    exact, ties = bundled(name, torch.float64), 0
    for picker in pickers:
        tries = {(mode, budget): TokenTrie(4096, mode=mode) for mode in MODES for budget in budgets}
        drafted = Counter()
        for text in problems(prompts, seed=7):
            prompt = tokenizer.encode(text)
            plain = generate(model, prompt, picker=picker, max_new_tokens=tokens)  # no stop: end-of-text is a token too
            assert len(plain.tokens) == tokens
            for (mode, budget), trie in tries.items():
                fast = generate(model, prompt, picker=picker, max_new_tokens=tokens, drafter=trie, budget=budget)
                ties += not assert_same_or_near_tie(exact, prompt, fast.tokens, plain.tokens, picker)
                drafted[mode] += sum(len(step.accepted) for step in fast.steps)
        assert all(drafted[mode] > prompts for mode in MODES)  # drafts were made and accepted in every mode
    return ties


def test_greedy_lookahead_is_identical_on_a_bundled_model():
    ties = identical_on_prompts("nano", 8, 64, (4, 16), [Greedy()])
    assert ties <= 2  # of 64 runs; more would mean that rounding is not what it was


def test_the_same_without_packed_weights():
    assert identical_on_prompts("nano", 4, 48, ("auto",), [Greedy(), Sampler(1.0, seed=1)], pack=False) <= 2


def test_sampled_lookahead_is_identical_on_a_bundled_model():
    assert identical_on_prompts("nano", 6, 48, ("auto",), [Sampler(0.8, top_k=40, top_p=0.95, seed=2)]) <= 2


@pytest.mark.slow
def test_lookahead_is_identical_on_nano():
    assert identical_on_prompts("nano", 30, 96, (4, 16), [Greedy(), Sampler(0.8, top_k=40, seed=2)]) <= 16


@pytest.mark.slow
def test_lookahead_is_identical_on_tiny():
    ties = identical_on_prompts(
        "tiny", 20, 96, (4, "auto", 40), [Greedy(), Sampler(1.0, seed=5), Sampler(0.7, top_p=0.9, seed=6)]
    )
    assert ties <= 9  # of 720 runs


@pytest.mark.slow
def test_foresight_pays_when_sampling():
    """A trie of tiny's own samples drafts better when it may look at the noise; the texts are the same."""
    model, tokenizer = bundled("tiny"), Tokenizer(4096)
    prompts, steps = [tokenizer.encode(text) for text in problems(340, seed=4)], Counter()
    settings = {"stop_ids": (tokenizer.eot,), "budget": 32}
    tries = {"foresight": TokenTrie(4096), "blind": TokenTrie(None)}
    helper = TokenTrie(4096)  # makes the warm texts faster, and is not asked any more
    for i, prompt in enumerate(prompts[40:]):
        text = generate(model, prompt, picker=Sampler(seed=1000 + i), drafter=helper, **settings).tokens
        for trie in tries.values():
            trie.insert(text)
    emitted = ties = 0
    for i, prompt in enumerate(prompts[:40]):
        results = {
            name: generate(model, prompt, picker=Sampler(seed=i), drafter=trie, **settings)
            for name, trie in tries.items()
        }
        texts = [result.tokens for result in results.values()]
        ties += not assert_same_or_near_tie(bundled("tiny", torch.float64), prompt, *texts, Sampler(seed=i))
        emitted += len(texts[0]) - 1
        for name, result in results.items():
            steps[name] += len(result.steps)
    print({name: f"{emitted / count:.3f} tokens per step" for name, count in steps.items()})
    assert ties <= 1 and steps["blind"] / steps["foresight"] >= 1.015  # measured: 1.03


@pytest.mark.slow
def test_two_tokens_per_step_after_two_hundred_responses_of_its_own():
    model, tokenizer = bundled("tiny"), Tokenizer(4096)
    trie = TokenTrie(4096)
    prompts = problems(220, seed=3)
    for text in prompts[20:]:
        trie.insert(generate(model, tokenizer.encode(text), stop_ids=(tokenizer.eot,)).tokens)
    emitted = steps = 0
    for text in prompts[:20]:
        result = generate(model, tokenizer.encode(text), drafter=trie, stop_ids=(tokenizer.eot,))
        emitted, steps = emitted + len(result.tokens) - 1, steps + len(result.steps)
    print(f"{emitted / steps:.3f} tokens per step")
    assert emitted / steps >= 2.0


# --- lookahead.py: the right distribution ---------------------------------------------------------------------------


FILTERS = ({"temperature": 0.6, "top_p": 0.9}, {"top_k": 2, "repetition_penalty": 1.3}, {"min_p": 0.2})
SLOWLY = [*((name, {}) for name in ("none", "lookup", "jacobi", "tree", "chain", "all")),
          *((name, settings) for name in ("none", "trie", "all") for settings in FILTERS)]  # fmt: skip


@pytest.mark.parametrize(
    "drafting, settings",
    [("trie", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY)],
    ids=str,
)
def test_joint_distribution_of_three_tokens_equals_enumeration(drafting, settings):
    """All 27 outputs of a toy model over three tokens, 2,000 seeds; with drafts right and wrong."""
    model, small, prompt, n = toy(1, 1, 8, 3, 16, scale=0.5), toy(1, 2, 6, 3, 16, scale=0.9), [0, 2, 0], 2000
    exact, process = {}, Sampler(**settings).process
    for text in itertools.product(range(3), repeat=3):
        p = 1.0
        for i in range(3):
            context = [*prompt, *text[:i]]
            p *= float(process(model(context)[-1], context).softmax(-1)[text[i]])
        exact[text] = p
    assert abs(sum(exact.values()) - 1) < 1e-12
    drafter = {
        "none": lambda: None,
        "trie": lambda: TokenTrie(3, max_depth=4),
        "lookup": PromptLookup,
        "jacobi": lambda: Jacobi(2),
        "tree": lambda: ModelDrafter(small, breadth=2, passes=2),
        "chain": lambda: ModelDrafter(small, chain=True),
        "all": lambda: Combined([TokenTrie(3, max_depth=4), PromptLookup(), ModelDrafter(small)]),
    }[drafting]()
    counts, accepted = Counter(), 0
    for seed in range(n):
        picker = Sampler(seed=seed, **settings)
        result = generate(model, prompt, picker=picker, max_new_tokens=3, drafter=drafter, budget=4)
        counts[tuple(result.tokens)] += 1
        accepted += sum(len(step.accepted) for step in result.steps)
    assert accepted == 0 if drafter is None else accepted > n / 20
    assert sum(counts[text] for text, p in exact.items() if p > 0) == n  # nothing that is ruled out
    possible = [text for text, p in exact.items() if p > 0]
    assert chi_square_p([counts[t] for t in possible], [n * exact[t] for t in possible]) > FALSE_ALARM


def test_wrong_samplers_are_noticed():
    """The test above can fail: the same statistics refuse noise that is the same at every position."""
    model, prompt, n = toy(1, 1, 8, 3, 16, scale=0.5), [0, 2], 1500

    class Biased(Sampler):
        def noise(self, position, vocab_size, device="cpu"):
            return gumbel(self.seed, 0, vocab_size)

    counts = Counter(tuple(generate(model, prompt, picker=Biased(seed=s), max_new_tokens=3).tokens) for s in range(n))
    exact = [
        math.prod(float(model([*prompt, *t[:i]])[-1].softmax(-1)[t[i]]) for i in range(3))
        for t in itertools.product(range(3), repeat=3)
    ]
    assert chi_square_p([counts[t] for t in itertools.product(range(3), repeat=3)], [n * p for p in exact]) < 1e-12


# --- lookahead.py: near-ties ----------------------------------------------------------------------------------------


def test_near_tie_measures_the_gap():
    class Fixed:
        def __init__(self, logits):
            self.logits = torch.tensor(logits, dtype=torch.float64)

        def __call__(self, tokens, rows):
            return self.logits[None]

    assert first_difference([1, 2], [1, 2]) is None and first_difference([1, 2], [1]) == 1
    assert near_tie(Fixed([1.0, 2.0]), [0], [1], [1]) is None
    tie = near_tie(Fixed([1.0, 1.25, 0.0]), [0], [5, 1], [5, 0])
    assert tie.position == 1 and tie.gap == pytest.approx(0.25) and tie.scale == 1.25
    assert NearTie(0, 1e-6, 1.0).within_rounding(torch.float32) and not NearTie(0, 1e-5, 1.0).within_rounding(
        torch.float32
    )
    assert near_tie(Fixed([1.0, 2.0]), [0], [1], [1, 0]) == NearTie(1, math.inf, 0)
    # Two tokens compete for the last place of top-k: rounding pushes one out, whatever the noise says. Raising the
    # other would have to outweigh the noise; lowering the rival tells how close it was.
    logits, picker = torch.tensor([5.0, 3.0, 3.0, 0.0], dtype=torch.float64), Sampler(top_k=2, seed=4)
    picks = [picker.pick(logits - 1e-7 * torch.eye(4, dtype=torch.float64)[i], 1, [0]) for i in (2, 1)]
    assert picks[0] != picks[1]
    tie = near_tie(Fixed((logits - 1e-7 * torch.eye(4)[2]).tolist()), [0], picks[:1], picks[1:], picker)
    assert tie.within_rounding(torch.float32)
    # With top-k 2, token 0 is cut off; it takes a lift above token 2's logit, and above the sampled winner's sum.
    picker = Sampler(top_k=2, seed=1)
    assert near_tie(Fixed([1.0, 1.25, 1.5]), [0], [0], [2], picker).gap == pytest.approx(0.25)


# --- classical.py ---------------------------------------------------------------------------------------------------


def outcomes(rule: Any, p_of: dict, q_of: dict, length: int, vocab: int) -> Counter:
    """Exactly: the distribution of the next length + 1 tokens, if a round of `rule` is followed by plain sampling.

    All drafts are enumerated with their probability under q. Whether a token is accepted is decided by numbers that the
    rule gets: 0 accepts what can be accepted, almost 1 rejects what can be rejected.
    """
    joint: Counter = Counter()

    def plainly(text: tuple, weight: float) -> None:
        if len(text) == length + 1:
            joint[text] += weight
            return
        for token in range(vocab):
            plainly((*text, token), weight * float(p_of[text][token]))

    for drafted in itertools.product(range(vocab), repeat=length):
        p = torch.stack([p_of[drafted[:i]] for i in range(length + 1)])
        q = torch.stack([q_of[drafted[:i]] for i in range(length)])
        weight = math.prod(float(q[i, token]) for i, token in enumerate(drafted))
        for stands in range(length + 1):  # the first so many are accepted, the next one is not
            chance = weight
            for i, token in enumerate(drafted[: stands + 1]):
                ratio = min(1.0, float(p[i, token] / q[i, token]))
                chance *= ratio if i < stands else 1 - ratio
            if chance > 0:
                accepted, after = rule(p, q, drafted, [0.0] * stands + [1 - 1e-12] * (length - stands))
                assert accepted == stands
                for token in range(vocab):
                    plainly((*drafted[:accepted], token), chance * float(after[token]))
    return joint


def random_distributions(rng: random.Random, length: int, vocab: int) -> dict[tuple, torch.Tensor]:
    """For every text of at most `length` tokens what follows it; some of it never."""
    made = {}
    for n in range(length + 1):
        for text in itertools.product(range(vocab), repeat=n):
            weights = torch.tensor([max(rng.random() - 0.2, 0.0) for _ in range(vocab)], dtype=torch.float64)
            weights[rng.randrange(vocab)] += 0.1
            made[text] = weights / weights.sum()
    return made


def test_the_classical_rule_keeps_the_distribution_exactly():
    for seed in range(30):
        rng = random.Random(seed)
        length, vocab = rng.choice([(1, 2), (1, 5), (2, 3), (3, 2)])
        p_of, q_of = random_distributions(rng, length, vocab), random_distributions(rng, length, vocab)
        joint = outcomes(accept, p_of, q_of, length, vocab)
        for text in itertools.product(range(vocab), repeat=length + 1):
            true = math.prod(float(p_of[text[:i]][token]) for i, token in enumerate(text))
            assert abs(joint[text] - true) < 1e-11
        assert abs(sum(joint.values()) - 1) < 1e-11


def test_a_wrong_rule_is_noticed():
    """To draw the replacement from p itself, as one might think, is wrong, and the enumeration says so."""

    def wrong(p, q, drafted, uniforms):
        accepted, _ = accept(p, q, drafted, uniforms)
        return accepted, p[accepted]

    rng = random.Random(1)
    p_of, q_of = random_distributions(rng, 1, 3), random_distributions(rng, 1, 3)
    joint = outcomes(wrong, p_of, q_of, 1, 3)
    first = [sum(joint[token, other] for other in range(3)) for token in range(3)]
    assert max(abs(a - float(b)) for a, b in zip(first, p_of[()])) > 0.01


def test_the_example_of_the_classical_rule():
    p, q = torch.tensor([[0.5, 0.3, 0.2]] * 2).double(), torch.tensor([[0.2, 0.7, 0.1]]).double()
    accepted, after = accept(p, q, [1], [0.999])
    assert accepted == 0 and torch.allclose(after, torch.tensor([0.75, 0, 0.25]).double())
    found = rates(p[:1], q)
    assert math.isclose(found.classical, 0.6, rel_tol=1e-6) and math.isclose(found.bound, 0.6 / 1.4, rel_tol=1e-6)
    assert math.isclose(found.keyed, 1 / (1 + 3.5 + 0.5) + 1 / (5 / 3 + 1 + 2 / 3) + 1 / (2.5 + 7 + 1), rel_tol=1e-6)


def test_rates_against_all_pairs_and_against_noise():
    """The sorted sums against the formula's double sum; that against 20,000 draws of noise; and the known bounds."""
    rng = random.Random(2)
    for _ in range(40):
        vocab = rng.randint(2, 12)
        p, q = (random_distributions(rng, 0, vocab)[()] for _ in range(2))
        if rng.random() < 0.3:
            q = p.clone()  # equal ratios everywhere
        found = rates(p[None], q[None])
        keyed = 0.0
        for t in range(vocab):
            if p[t] > 0 and q[t] > 0:
                keyed += 1 / sum(max(float(p[s] / p[t]), float(q[s] / q[t])) for s in range(vocab))
        assert math.isclose(float(found.keyed), keyed, rel_tol=1e-9)
        assert math.isclose(float(found.classical), float(torch.minimum(p, q).sum()), abs_tol=1e-12)
        assert float(found.bound) - 1e-12 <= keyed <= float(found.classical) + 1e-12
    n = 20_000
    noise = torch.stack([gumbel(3, position, vocab) for position in range(n)])
    both = int(((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).sum())
    assert chi_square_p([both, n - both], [n * keyed, n * (1 - keyed)]) > FALSE_ALARM or keyed > 1 - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 2}], ids=["plain", "filtered"])
def test_speculative_sampling_against_enumeration(settings):
    """All 27 texts of three tokens, 1,500 seeds, chains of 1 to 3; the acceptance against 1 - TV."""
    model, small, prompt, n = toy(1, 1, 8, 3, 16, scale=0.5), toy(1, 2, 6, 3, 16, scale=0.9), [0, 2], 1500
    picker, exact = Sampler(**settings), {}
    for text in itertools.product(range(3), repeat=3):
        contexts = [[*prompt, *text[:i]] for i in range(3)]
        exact[text] = math.prod(float(picker.process(model(c)[-1], c).softmax(-1)[t]) for c, t in zip(contexts, text))
    counts = Counter()
    for seed in range(n):
        result = speculative_sample(
            model, small, prompt, picker=picker, budget=1 + seed % 3, max_new_tokens=3, seed=seed
        )
        counts[tuple(result.tokens)] += 1
    possible = [text for text, p in exact.items() if p > 0]
    assert sum(counts[text] for text in possible) == n
    assert chi_square_p([counts[t] for t in possible], [n * exact[t] for t in possible]) > FALSE_ALARM


def test_speculative_sampling_keeps_its_caches_in_step():
    """If both models are one, all is accepted; stops and full contexts end it."""
    model = toy(n_ctx=40)
    result = speculative_sample(model, model, [1, 2], budget=3, max_new_tokens=33)
    assert [len(step.tokens) for step in result.steps] == [4] * 8 and result.finish_reason == "length"
    assert speculative_sample(model, toy(1, 1, 8, n_ctx=40), [1] * 30, max_new_tokens=50).finish_reason == "context"
    stopped = speculative_sample(model, model, [1, 2], stop_ids=[result.tokens[9]], max_new_tokens=33, budget=3)
    assert stopped.tokens == result.tokens[: 1 + result.tokens.index(result.tokens[9])]
    assert stopped.finish_reason == "stop"
    for arguments, message in (
        ({"prompt_ids": []}, "cannot be done"),
        ({"prompt_ids": [1], "budget": 0}, "cannot be done"),
        ({"prompt_ids": [1] * 40}, "cannot be done"),
        ({"prompt_ids": [1], "draft_model": toy(vocab_size=30)}, "has 30 tokens, the target 29"),
    ):
        with pytest.raises(ValueError, match=message):
            speculative_sample(model, **{"draft_model": model} | arguments)


class Rereading:
    """A model whose cache is a list of tokens, all read again for every forward."""

    class Cache(list):
        length = property(len)

        def truncate(self, length: int) -> None:
            del self[length:]

    def __init__(self, model: GPT) -> None:
        self.model, self.n_ctx, self.vocab_size = model, model.n_ctx, model.vocab_size

    def new_cache(self) -> "Rereading.Cache":
        return self.Cache()

    def __call__(self, tokens, cache, rows):
        cache += tokens
        return self.model(list(cache), rows=[len(cache) - len(tokens) + row for row in rows])


def test_speculative_sampling_against_rereading_everything():
    """Token for token, with filters that depend on the context, stops and full contexts; drafts right and wrong."""
    model, small, accepted = toy(n_ctx=40), toy(n_ctx=36, scale=0.2), Counter()  # cousins
    for seed in range(30):
        rng = random.Random(seed)
        settings = {
            "picker": Sampler(0.4, top_k=3, repetition_penalty=1.2) if seed % 2 else Sampler(0.5),
            "budget": rng.randint(1, 5),
            "max_new_tokens": rng.randint(1, 45),
            "stop_ids": rng.sample(range(29), seed % 3),
            "seed": seed,
        }
        prompt = [rng.randrange(29) for _ in range(rng.randint(1, 9))]
        fast = speculative_sample(model, small, prompt, **settings)
        slow = speculative_sample(Rereading(model), Rereading(small), prompt, **settings)
        assert (fast.tokens, fast.finish_reason) == (slow.tokens, slow.finish_reason)
        for step in fast.steps:
            accepted[len(step.accepted)] += 1
            assert step.draft.tokens[: len(step.accepted)] == step.tokens[:-1]
    assert all(accepted[n] > 3 for n in range(4)), accepted


@pytest.mark.slow
def test_measured_acceptance_is_what_the_distributions_say():
    model, small = bundled("tiny"), bundled("nano")
    tokenizer, texts = Tokenizer(4096), []
    for i, text in enumerate(problems(6, seed=5)):
        prompt = tokenizer.encode(text)
        texts.append((prompt, generate(model, prompt, picker=Sampler(seed=i), max_new_tokens=40).tokens))
    found = acceptance(model, small, texts, Sampler(seed=99))
    n = found["tokens"]
    assert n == 240 and found["bound"] < found["keyed, exact"] < found["1 - TV"]
    for measured, expected in (("classical", "1 - TV"), ("keyed", "keyed, exact")):
        p = found[expected]  # 4.5 standard deviations: false alarm 7e-6
        assert abs(found[measured] - p) < 4.5 * math.sqrt(p * (1 - p) / n)


# --- beam.py --------------------------------------------------------------------------------------------------------

GOLDEN_BEAMS = ROOT / "assets" / "golden_beams.json"


def beam_cases(count: int, seed: int, small: bool = False) -> list[tuple[GPT, list[int], dict[str, Any]]]:
    """Toy models, prompts and settings of all kinds, named as transformers' generate names them."""
    rng, cases = random.Random(seed), []
    models = [toy(vocab_size=size, scale=scale) for size, scale in ((29, 0.3), (29, 0.6), (17, 0.5), (60, 0.2))]
    kinds = list(itertools.product((False, True, "never"), (-1.0, 0.0, 0.5, 1.0, 2.0)))
    for number in range(count):
        model, (early_stopping, length_penalty) = rng.choice(models), kinds[number % len(kinds)]
        settings = {
            "num_beams": rng.choice((2, 3, 4) if small else (2, 3, 4, 8)),
            "max_new_tokens": rng.choice((1, 3, 6, 9) if small else (1, 2, 5, 12, 25)),
            "length_penalty": length_penalty, "early_stopping": early_stopping,
        }  # fmt: skip
        settings["num_return_sequences"] = rng.randint(1, settings["num_beams"])
        settings["stop_ids"] = rng.sample(range(model.vocab_size), rng.choice((0, 1, 2, 4)))
        cases.append((model, [rng.randrange(model.vocab_size) for _ in range(rng.randint(1, 9))], settings))
    return cases


def transformers_beams(model: GPT, prompt: list[int], folder: Path, settings: dict[str, Any]) -> list[beam.Hypothesis]:
    transformers = pytest.importorskip("transformers", reason="compares with transformers where it is installed")
    transformers.logging.set_verbosity_error()
    model.save(folder)
    peer = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=model.dtype).eval()
    stops = settings["stop_ids"]
    asked = {key: value for key, value in settings.items() if key != "stop_ids"}
    with torch.no_grad():
        tokens = torch.tensor([prompt])
        output = peer.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, eos_token_id=stops or None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, **asked,
        )  # fmt: skip
    found = []
    for sequence, score in zip(output.sequences.tolist(), output.sequences_scores.tolist()):
        new = sequence[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(new) if token in stops), len(new))  # padding follows
        found.append(beam.Hypothesis(new[:end], score))
    return found


def assert_same_hypotheses(mine: list[beam.Hypothesis], others: list[Any], bound: float) -> None:
    assert [h.tokens for h in mine] == [list(tokens) for tokens, _ in others]
    assert all(abs(h.score - score) < bound * max(1, abs(score)) for h, (_, score) in zip(mine, others))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_beams_are_those_stored_from_transformers(part):
    """Sequences and scores that transformers gave (make_golden)."""
    stored = json.loads(GOLDEN_BEAMS.read_text())
    cases = beam_cases(len(stored), seed=6)
    assert len(stored) == 60 and sum(len(hypotheses) for hypotheses in stored) > 100
    for (model, prompt, settings), hypotheses in list(zip(cases, stored))[part::4]:
        assert_same_hypotheses(beam.beam_search(model, prompt, **settings), hypotheses, 1e-4)


@pytest.mark.slow
def test_beams_are_those_of_transformers(tmp_path):
    for number, (model, prompt, settings) in enumerate(beam_cases(150, seed=61)):
        theirs = transformers_beams(model, prompt, tmp_path, settings)
        strategy = ("tree", "lookahead", "swap")[number % 3]
        assert_same_hypotheses(beam.beam_search(model, prompt, strategy=strategy, **settings), theirs, 1e-4)


def all_ways(model: GPT, prompt: list[int], **settings: Any) -> dict[str, list[beam.Hypothesis]]:
    """What each strategy, in each of its forms, gives."""
    trie = TokenTrie(model.vocab_size)
    ways: dict[str, dict[str, Any]] = {
        "recompute": {}, "swap": {}, "offload": {"strategy": "swap", "offload": True}, "tree": {}, "lookahead": {},
    }  # fmt: skip
    for budget in (0, 1, 5, 40):
        ways[f"lookahead {budget}"] = {"strategy": "lookahead", "drafter": trie, "budget": budget}
    return {name: beam.beam_search(model, prompt, **{"strategy": name} | way, **settings) for name, way in ways.items()}


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_all_strategies_give_the_same_hypotheses(dtype, bound):
    """In float32 only where no choice is closer than rounding, which these cases were seen to satisfy."""
    for model, prompt, settings in beam_cases(4 if dtype == torch.float32 else 6, seed=62, small=True):
        settings["num_return_sequences"] = settings["num_beams"]
        ways = all_ways(copy.deepcopy(model).to(dtype), prompt, **settings)
        for name, hypotheses in ways.items():
            assert hypotheses, name
            assert_same_hypotheses(hypotheses, ways["recompute"], bound)


@pytest.mark.slow
def test_all_strategies_give_the_same_hypotheses_often():
    for model, prompt, settings in beam_cases(150, seed=63):
        settings["num_return_sequences"] = settings["num_beams"]
        ways = all_ways(model, prompt, **settings)
        for hypotheses in ways.values():
            assert_same_hypotheses(hypotheses, ways["recompute"], 1e-9)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 2.0])
@pytest.mark.parametrize("stop_ids", [(), (1,), (0, 2)])
def test_enough_beams_are_an_exhaustive_search(length_penalty, stop_ids):
    """With vocab_size ** length beams nothing is ever dropped: all texts there are, in the order of their scores."""
    vocab_size, length = 3, 3
    model = toy(vocab_size=vocab_size, scale=0.7)
    prompt, texts = [2, 0, 1], []
    for full in itertools.product(range(vocab_size), repeat=length):
        cut = next((i + 1 for i, token in enumerate(full) if token in stop_ids), length)
        texts.append(full[:cut])
    expected = []
    for text in dict.fromkeys(texts):
        log_probs = model([*prompt, *text]).log_softmax(-1)[len(prompt) - 1 : -1]
        total = sum(float(row[token]) for row, token in zip(log_probs, text))
        expected.append((list(text), total / len(text) ** length_penalty))
    expected.sort(key=lambda pair: -pair[1])
    for early_stopping, strategy in zip((False, True, "never", False), beam.STRATEGIES):
        found = beam.beam_search(
            model, prompt, num_beams=vocab_size**length, num_return_sequences=vocab_size**length, max_new_tokens=length,
            stop_ids=stop_ids, length_penalty=length_penalty, early_stopping=early_stopping, strategy=strategy,
        )  # fmt: skip
        assert_same_hypotheses(found, expected, 1e-9)


def test_one_beam_without_stops_is_greedy():
    prompt = Tokenizer(4096).encode(BAKER)
    (found,) = beam.beam_search(bundled("tiny"), prompt, num_beams=1, max_new_tokens=20, strategy="lookahead")
    assert found.tokens == generate(bundled("tiny"), prompt, max_new_tokens=20).tokens


def test_beams_of_an_exact_model_are_the_same_to_the_last_bit():
    model = Exact(bundled("nano", torch.bfloat16))
    settings = {"num_beams": 3, "max_new_tokens": 12, "stop_ids": (4095,), "num_return_sequences": 3}
    ways = all_ways(model, Tokenizer(4096).encode(BAKER), **settings)
    assert all(hypotheses == ways["recompute"] for hypotheses in ways.values())


class Elsewhere:
    """A model on a device of its own: it counts the bytes of caches there and in all, and checks that the cache that it
    is given is there. Caches that nobody holds any more are not counted."""

    class Cache(KVCache):
        here = True  # on the device

        def to(self, device):
            self.here = str(device) != "cpu"
            self.owner.count()
            return self

        def fork(self):
            other = super().fork()
            self.owner.caches.add(other)
            self.owner.count()
            return other

        __hash__ = object.__hash__

    def __init__(self, model: GPT) -> None:
        self.model, self.vocab_size, self.n_ctx, self.dtype = model, model.vocab_size, model.n_ctx, model.dtype
        self.device = torch.device("meta")
        self.caches, self.most, self.most_here = weakref.WeakSet(), 0, 0

    def count(self) -> None:
        self.most = max(self.most, sum(cache.nbytes for cache in self.caches))
        self.most_here = max(self.most_here, sum(cache.nbytes for cache in self.caches if cache.here))

    def new_cache(self, capacity=None):
        cache = self.Cache(self.model.config, capacity, "cpu", self.dtype)
        cache.owner = self
        self.caches.add(cache)
        self.count()
        return cache

    def __call__(self, tokens, positions=None, mask=None, cache=None, rows=None):
        assert cache is None or cache.here
        return self.model(tokens, positions, mask, cache, rows)


@pytest.mark.parametrize("num_beams", [2, 8])
def test_offloading_needs_the_device_for_two_caches_at_most(num_beams):
    model = Elsewhere(toy())
    settings = {"num_beams": num_beams, "max_new_tokens": 20, "stop_ids": (3,), "early_stopping": "never"}
    for offload in (True, False):
        model.most = model.most_here = 0
        *_, last = beam.beam_steps(model, [1, 2, 3], strategy="swap", offload=offload, **settings)
        ledger, size = last.ledger, model.new_cache(3 + 20 - 1).nbytes
        assert ledger.peak == model.most == num_beams * size and ledger.held == ledger.near == 0
        assert model.most_here <= 2 * size if offload else model.most_here == num_beams * size
        assert ledger.peak_near == (size if offload else num_beams * size)
        assert ledger.sent == (2 * ledger.forwards * size if offload else 0) + (size if offload else 0)
        assert not model.caches
        assert beam.beam_search(model, [1, 2, 3], **settings) == beam.beam_search(toy(), [1, 2, 3], **settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloading_from_a_gpu():
    model = bundled("tiny").to("cuda")
    prompt = Tokenizer(4096).encode(BAKER)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    *_, last = beam.beam_steps(model, prompt, num_beams=16, strategy="swap", offload=True)
    size = last.ledger.peak // 16
    assert torch.cuda.max_memory_allocated() - before < 2 * size + 2**25


def test_every_move_of_a_swap_is_counted():
    model = toy()
    for prompt in ([1, 2, 3], [4], [9, 9, 9, 9]):
        expected = Counter()
        steps = beam.beam_steps(model, prompt, num_beams=4, max_new_tokens=15, stop_ids=(5, 6), strategy="swap")
        beams, moves, before = [beam.Beam((), 0.0, 0)], [], 0
        for step in steps:
            parents = [each.parent for each in beams]
            if beams[0].tokens:  # these caches were needed for the step just made
                expected["took"] += len(set(parents))
                expected["forked"] += len(parents) - len(set(parents))
                expected["freed"] += before - len(set(parents))
            expected["forwards"] += len(beams)
            before, beams, ledger = len(beams), step.beams, step.ledger
            moves += ledger.moves
        expected["freed"] += before
        found = {"took": ledger.takeovers, "forked": ledger.forks, "forwards": ledger.forwards, "freed": ledger.frees}
        assert found == dict(expected) and ledger.held == 0 and ledger.forks > 3
        assert sum(" forks " in move for move in moves) == ledger.forks
        assert sum("takes over" in move for move in moves) == ledger.takeovers


def test_a_tree_holds_every_token_once_and_nothing_dead():
    for model, prompt, settings in beam_cases(8, seed=64):
        del settings["num_return_sequences"]
        search = beam.Search(settings["num_beams"], settings["max_new_tokens"], 1.0, False, settings["stop_ids"])
        source = beam.Tree(model, prompt, search, beam.Ledger())
        while not search.done:
            beams = search.beams
            search.step(source.after(beams))
            texts = {each.tokens[:end] for each in beams for end in range(1, len(each.tokens) + 1)}
            assert source.cache.length == len(prompt) + len(texts)
            assert source.ledger.peak == source.cache.nbytes or source.ledger.frees


def test_no_cache_is_left_after_hundreds_of_searches():
    model = Elsewhere(toy(1, 1, 4, vocab_size=11))
    rng = random.Random(65)
    for number in range(200):
        strategy = list(beam.STRATEGIES)[number % 4]
        steps = beam.beam_steps(model, [rng.randrange(11)], num_beams=3, max_new_tokens=6, strategy=strategy)
        step = next(steps)
        for _ in range(rng.choice((0, 2, 99))):  # some are left half-way
            step = next(steps, step)
        steps.close()
        assert step.ledger.held == step.ledger.near == 0 and not model.caches


class Junk:
    """Guesses nonsense: most of it, with great confidence."""

    def __init__(self, vocab_size):
        self.vocab_size, self.rng, self.closed = vocab_size, random.Random(66), 0

    def open(self, prompt_ids):
        return self

    def guess(self, recent):
        tokens = self.rng.sample(range(self.vocab_size), self.rng.randint(0, 6))
        return {token: self.rng.random() / 6 for token in tokens}

    def observe(self, tokens, draft=None, picks=None):
        self.told = list(tokens)

    def close(self):
        self.closed += 1


def test_guesses_decide_nothing():
    for number, (model, prompt, settings) in enumerate(beam_cases(9, seed=67, small=True)):
        junk, budget = Junk(model.vocab_size), number % 7
        del settings["num_return_sequences"]
        steps = list(beam.beam_steps(model, prompt, strategy="lookahead", drafter=junk, budget=budget, **settings))
        truth = list(beam.beam_steps(model, prompt, strategy="recompute", **settings))
        assert len(steps) == len(truth) and junk.closed == 1 and junk.told == steps[-1].hypotheses[0].tokens
        for step, true in zip(steps, truth):
            assert [each.tokens for each in step.beams] == [each.tokens for each in true.beams]
        assert_same_hypotheses(steps[-1].hypotheses, truth[-1].hypotheses, 1e-9)


def warmed_trie() -> TokenTrie:
    tokenizer, trie = Tokenizer(4096), TokenTrie(4096)
    for line in (ROOT / "assets" / "responses.jsonl").read_text(encoding="utf-8").splitlines():
        trie.insert([*tokenizer.encode(json.loads(line)["response"]), tokenizer.eot])
    return trie


def forwards_per_position(count: int, budget: int, **settings: Any) -> float:
    tokenizer, trie, forwards, positions = Tokenizer(4096), warmed_trie(), 0, 0
    for text in problems(count, seed=77):
        prompt, rows = tokenizer.encode(text), 0
        for step in beam.beam_steps(
            bundled("tiny"), prompt, stop_ids=(4095,), strategy="lookahead", drafter=trie, budget=budget, **settings
        ):
            positions += 1
            fresh, rows = step.ledger.rows - rows, step.ledger.rows
            reread = any("a cache of" in move for move in step.ledger.moves)
            assert reread or fresh <= settings["num_beams"] * (1 + budget)
        forwards += step.ledger.forwards
    return forwards / positions


def test_lookahead_needs_few_forwards_for_beams():
    assert forwards_per_position(2, 4, num_beams=4, max_new_tokens=40) < 0.58


@pytest.mark.slow
@pytest.mark.parametrize("budget, most", [(4, 0.5), (32, 0.35)])
def test_lookahead_needs_few_forwards_for_beams_on_many_problems(budget, most):
    assert forwards_per_position(40 if budget < 32 else 20, budget, num_beams=4) < most


def test_a_full_cache_is_read_again_into_a_larger_one():
    model, prompt = toy(), [1, 2]
    settings = {"num_beams": 12, "max_new_tokens": 40, "early_stopping": "never", "num_return_sequences": 12}
    steps = list(beam.beam_steps(model, prompt, **{k: v for k, v in settings.items() if "return" not in k}))
    search = beam.Search(12, 40, 1.0, "never", ())
    source = beam.Tree(model, prompt, search, beam.Ledger())
    source.capacity = 3
    while not search.done:
        search.step(source.after(search.beams))
    assert source.ledger.frees > 5 and source.ledger.peak < 3 * source.ledger.peak_used
    assert_same_hypotheses(search.hypotheses, steps[-1].hypotheses, 1e-9)


def test_continuations_of_probability_zero_do_not_exist():
    class Bigram:
        """0 is followed by 1 or 2, both by 3, and 3 by nothing at all."""

        vocab_size, n_ctx, device, dtype = 4, 16, torch.device("cpu"), torch.float64

        def __call__(self, tokens, positions=None, mask=None, cache=None, rows=None):
            after = {0: {1: 0.75, 2: 0.25}, 1: {3: 1.0}, 2: {3: 1.0}, 3: {}}[tokens[-1]]
            return torch.tensor([[after.get(token, 0.0) for token in range(4)]], dtype=torch.float64).log()

    found = beam.beam_search(Bigram(), [0], num_beams=3, max_new_tokens=2, strategy="recompute", length_penalty=0.0,
                             num_return_sequences=3)  # fmt: skip
    assert_same_hypotheses(found, [([1, 3], math.log(0.75)), ([2, 3], math.log(0.25))], 1e-12)
    assert beam.beam_search(Bigram(), [0], num_beams=3, max_new_tokens=9, strategy="recompute") == []


def test_where_no_token_may_be_written():
    model = toy(n_ctx=8)
    for prompt, most in (([1, 2], 0), ([1] * 8, 5)):
        for strategy in beam.STRATEGIES:
            assert beam.beam_search(model, prompt, num_beams=2, max_new_tokens=most, strategy=strategy) == [([], 0.0)]
    for strategy in beam.STRATEGIES:  # the context ends it, as max_new_tokens would
        found = beam.beam_search(model, [1] * 5, num_beams=2, max_new_tokens=50, strategy=strategy)
        assert found[0].tokens == beam.beam_search(model, [1] * 5, num_beams=2, max_new_tokens=3)[0].tokens


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2.0}, "num_beams"),
        ({"num_return_sequences": 3}, "num_return_sequences"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"early_stopping": "ever"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"strategy": "trie"}, "strategy"),
        ({"offload": True}, "offload"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"strategy": "lookahead", "budget": -1}, "budget"),
        ({"strategy": "lookahead", "drafter": RandomDrafter(0, 29)}, "TokenTrie"),
        ({"strategy": "lookahead", "drafter": TokenTrie(30)}, "vocabulary"),
        ({"stop_ids": ("a",)}, "token ids"),
    ],
)
def test_bad_beam_search_is_refused_at_the_call(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        beam.beam_search(toy(), [1, 2], **{"num_beams": 2} | settings)
    assert "\n" not in str(caught.value)
    if "num_return_sequences" not in settings:
        with pytest.raises(ValueError, match=message):
            beam.beam_steps(toy(), [1, 2], **{"num_beams": 2} | settings)  # not only at the first step


def test_guess_reads_a_trie_without_changing_it():
    trie = TokenTrie(10)
    trie.insert([1, 2, 3, 1, 2, 4])
    session = trie.open([5, 1, 2])
    clock = trie.outputs.clock
    assert session.guess((1, 2)) == session._expand(session.state, 1.0, session.ENOUGH / 32)
    assert set(session.guess((1, 2))) == {3, 4} and session.guess((9,)) == {} and trie.outputs.clock == clock


# --- arithmetic.py ----------------------------------------------------------------------------------------------------


def first_letters(ids: list[int], candidates: list[int]) -> torch.Tensor:
    """A classifier's score that depends on the order of the whole text."""
    texts = [ids, *([*ids, token] for token in candidates)]
    return torch.tensor([-(0.3 * sum((i + 1) * t for i, t in enumerate(text)) % 2.0) for text in texts]).double()


def toy_terms() -> list[Prompted]:
    """Two models of different shape, with prompts of different length, one of them twice."""
    one, two = toy(), toy(1, 2, 8, 29, 48, scale=0.6)
    return [Prompted(one), Prompted(one, [3, 1, 4]), Prompted(two, [2]), Prompted(two, [7, 7, 7, 7, 7])]


def toy_formulas() -> dict[str, Term]:
    a, b, c, d = toy_terms()
    return {
        "one term": b,
        "sum": a - 0.5 * b + 0.7 * (c - 0.2 * d),
        "union": a - 0.4 * Union(b, c) + 0.5 * d,
        "intersection": Intersection(a + b, c, 0.5 * d),
        "gates": TopP(a, 0.8) - 0.5 * TopK(b, 5) + 0.3 * c,
        "classifier": TopK(a, 9) + 0.5 * b + 2.0 * Classifier(first_letters, 6),
        "against a classifier": Union(a + Classifier(first_letters, 29), c) - 0.3 * d - Classifier(first_letters, 3),
    }


def from_scratch(term: Term, ids: list[int]) -> torch.Tensor:
    """(vocab_size,) probabilities after `ids`, by the definitions, token by token: no cache, no log, nothing shared."""
    if isinstance(term, Prompted):
        return term.model([*term.prompt, *ids])[-1].softmax(-1)
    if isinstance(term, TopP):
        probs, kept, weight = from_scratch(term.term, ids), [], 0.0
        for token in sorted(range(29), key=lambda token: -probs[token]):
            if weight < term.k:
                kept.append(token)
                weight += float(probs[token])
        shut = torch.ones(29, dtype=torch.bool).index_fill(0, torch.tensor(kept), False)
        return probs.masked_fill(shut, 0.0) / probs[kept].sum()
    if isinstance(term, TopK):
        probs = from_scratch(term.term, ids)
        probs = torch.where(probs >= sorted(probs.tolist())[-term.k], probs, 0.0)
        return probs / probs.sum()
    if isinstance(term, Union):
        chosen = min if isinstance(term, Intersection) else max
        rows = [from_scratch(each, ids).tolist() for each in term.terms]
        probs = torch.tensor([chosen(column) for column in zip(*rows)], dtype=torch.float64)
        return probs / probs.sum()
    assert isinstance(term, Sum)
    product = torch.ones(29, dtype=torch.float64)
    for each, weight in term.terms.items():
        if not isinstance(each, Classifier):
            probs = from_scratch(each, ids)
            if weight < 0:  # what the gate shuts out counts like the least that it lets in
                probs = torch.where(probs > 0, probs, probs[probs > 0].min())
            product *= probs ** (weight / term.weight)
    for each, weight in term.terms.items():
        if isinstance(each, Classifier):
            plain = product / product.sum()
            for token in range(29):
                looked = plain[token] > 0 and token in plain.topk(each.top).indices.tolist()
                factor = each.score(ids, [token])[1 if looked else 0]
                product[token] *= math.exp(weight / term.weight * float(factor))
    return product / product.sum()


@pytest.mark.parametrize("name", toy_formulas())
def test_a_formula_over_a_tree_equals_every_path_from_scratch(name):
    formula, rng = toy_formulas()[name], random.Random(4)
    assert formula.n_ctx == min(leaf.model.n_ctx - len(leaf.prompt) for leaf in formula.leaves)
    for _ in range(4):
        prefix = [rng.randrange(29) for _ in range(rng.randint(1, 9))]
        tree = random_tree(rng, rng.randint(0, 12), 29)
        cache = formula.new_cache(40)
        if len(prefix) > 1:
            formula(prefix[:-1], cache=cache)
        base = cache.length
        assert base == len(prefix) - 1
        mask = torch.ones(1 + len(tree), base + 1 + len(tree), dtype=torch.bool)
        mask[:, base:] = tree.mask()
        rows = rng.sample(range(-1, len(tree)), rng.randint(1, len(tree) + 1))
        positions = [base, *(base + depth for depth in tree.depths)]
        logs = formula([prefix[-1], *tree.tokens], positions, mask, cache, [row + 1 for row in rows])
        for log, node in zip(logs, rows):
            expected = from_scratch(formula, prefix + [tree.tokens[i] for i in tree.path(node)])
            assert torch.allclose(log.exp(), expected, atol=1e-9) and not log.isnan().any()
        node = rng.randrange(-1, len(tree))  # and on the path that was accepted, behind a fork that goes its own way
        other = cache.fork()
        other.truncate(base)
        other.to("cpu")
        cache.keep(base, [base, *(base + 1 + i for i in tree.path(node))])
        text = prefix + [tree.tokens[i] for i in tree.path(node)]
        assert cache.length == len(text) and other.length == base
        for known, kept in ((text, cache), (prefix[:-1], other)):
            assert torch.allclose(formula([5], cache=kept)[0].exp(), from_scratch(formula, [*known, 5]), atol=1e-9)


def test_a_classifier_reads_a_text_in_the_order_of_positions():
    """Slots are only places: a list, and a cache after `keep`, may hold the tokens in any order."""
    formula, rng = toy_formulas()["classifier"], random.Random(2)
    for _ in range(5):
        text, order = [rng.randrange(29) for _ in range(6)], rng.sample(range(6), 6)
        cache = formula.new_cache(8)
        mask = torch.tensor([[other <= position for other in order] for position in order])
        logs = formula([text[position] for position in order], order, mask, cache)
        for log, position in zip(logs, order):
            assert torch.allclose(log.exp(), from_scratch(formula, text[: position + 1]), atol=1e-9)
        cache.keep(0, rng.sample(range(6), 6))
        assert torch.allclose(formula([5], cache=cache)[0].exp(), from_scratch(formula, [*text, 5]), atol=1e-9)


def test_one_term_is_its_model_and_equal_terms_cancel():
    model, ids = toy(), [3, 1, 4, 1, 5]
    bare, said = Prompted(model), Prompted(model, [9, 8])
    assert torch.allclose(bare(ids), model(ids).log_softmax(-1), atol=1e-12)
    assert torch.allclose(said(ids), model([9, 8, *ids])[2:].log_softmax(-1), atol=1e-12)
    assert torch.allclose((2 * bare - Prompted(model))(ids), bare(ids), atol=1e-12)  # two objects, one model and prompt
    assert torch.allclose((0.25 * bare)(ids), bare(ids), atol=1e-12)
    assert list((2 * bare - model + 0 * said).terms.values()) == [1.0]  # no rows are spent on said
    assert torch.allclose(Union(bare, bare)(ids), bare(ids)) and torch.allclose(
        Intersection(bare, bare)(ids), bare(ids)
    )
    assert torch.allclose((bare - 0.9 * Intersection(said, bare))(ids).exp().sum(-1), torch.ones(5).double())
    twice = (bare + said + Union(bare, said)).new_cache(7)
    assert len(twice.parts) == 2 and twice.capacity == 7 and twice.nbytes == 2 * model.new_cache(8).nbytes


def test_prompts_may_be_texts_and_halves_stay_finite():
    model, tokenizer = bundled("nano"), Tokenizer(4096)
    ids = tokenizer.encode(BAKER)
    assert torch.equal(Prompted(model, "Be brief. ")(ids), Prompted(model, tokenizer.encode("Be brief. "))(ids))
    half, full = toy(dtype=torch.bfloat16), toy(dtype=torch.float32)
    logs = (Prompted(half, [1, 2]) - 0.5 * TopK(half, 3))([3, 4])
    assert logs.dtype == torch.bfloat16 and logs.isfinite().all()
    assert (Prompted(half) + full).dtype == torch.float32


def test_the_formula_is_the_nearest_distribution():
    """No other distribution has a smaller weighted sum of divergences (the paper's definition of a formula)."""
    a, b, c, _ = toy_terms()
    qs = [term([4, 2])[-1] for term in (a, b, c)]
    weights = [1.0, -0.4, 0.8]
    best = (weights[0] * a + weights[1] * b + weights[2] * c)([4, 2])[-1]

    def cost(log_p: torch.Tensor) -> float:
        return float(sum(w * (log_p.exp() * (log_p - q)).sum() for w, q in zip(weights, qs)))

    for seed in range(50):
        for size in (0.01, 1.0):
            step = size * torch.randn(29, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            assert cost((best + step).log_softmax(-1)) > cost(best)


def test_gates_forbid_only_where_they_should():
    a, b, _, _ = toy_terms()
    ids = [4, 2, 8]
    top = a(ids).topk(3).indices
    for formula in (TopK(a, 3), TopK(a, 3) + 2 * b, TopK(a, 3) - 0.5 * TopK(b, 2), 2 * TopK(a, 3) - TopK(a, 3)):
        logs = formula(ids)
        assert not logs.isnan().any() and (logs < torch.inf).all()
        assert torch.equal(logs.isfinite(), torch.zeros(3, 29).scatter(1, top, 1.0).bool())
    assert (b - 0.5 * TopK(a, 3))(ids).isfinite().all()  # a negative term forbids nothing
    worst = a(ids).argmin(-1)
    gained = (b - 0.5 * TopK(a, 3))(ids) - 2 * b(ids)  # and rewards nobody for being shut out of it
    assert (gained[range(3), worst] - gained[range(3), top[:, 2]]).abs().max() < 1e-9
    shut = 1e3 * torch.eye(29).double()  # two models that are sure of different tokens: nothing passes both gates

    class Sure(GPT):
        token = 0

        def forward(self, tokens, positions=None, mask=None, cache=None, rows=None):
            return shut[self.token].expand_as(super().forward(tokens, positions, mask, cache, rows))

    one, two = Sure(toy().config).double(), Sure(toy().config).double()
    two.token = 5
    logs = (TopK(one, 1) + TopK(two, 1))(ids)
    assert logs.isfinite().all() and torch.allclose(logs.exp().sum(-1), torch.ones(3).double())
    assert torch.equal((TopK(one, 1) - 0.5 * TopK(one, 1))(ids).isfinite().sum(-1), torch.ones(3).long())
    assert (Prompted(TopK(a, 3)) + b)(ids).isfinite().sum(-1).tolist() == [3] * 3  # a formula is a model, gates and all


@pytest.mark.parametrize("name", toy_formulas())
def test_decoding_a_formula_is_what_recomputing_says_whatever_is_drafted(name):
    formula, text = toy_formulas()[name], [5, 6, 7]
    picker = Greedy() if name in ("sum", "classifier") else Sampler(0.9, top_p=0.95, seed=6)
    for _ in range(16):
        text.append(picker.pick(from_scratch(formula, text).log(), len(text), text))
    plain = generate(formula, text[:3], picker=picker, max_new_tokens=16)
    assert plain.tokens == text[3:]
    trie = TokenTrie(29, max_depth=5)
    trie.insert(text[3:])
    for drafter in (RandomDrafter(1, 29), OracleDrafter(2, 29, plain.tokens, 3), trie):
        fast = generate(formula, text[:3], picker=picker, max_new_tokens=16, drafter=drafter, budget=9)
        assert fast.tokens == plain.tokens
    drawn = [Sampler(seed=8).sample(i) for i in range(3)]
    side_by_side = forest(formula, text[:3], drawn, 9, stop_ids=[4])
    assert side_by_side == [generate(formula, text[:3], picker=p, max_new_tokens=9, stop_ids=[4]).tokens for p in drawn]
    if name == "sum":
        full = generate(formula, text[:3], max_new_tokens=99)
        assert full.finish_reason == "context" and len(full.tokens) + 3 == formula.n_ctx == 43


def test_formulas_refuse_what_means_nothing():
    a, b, c, _ = toy_terms()
    other = toy(vocab_size=31)
    for message, wrong in {
        "add up to 0:": lambda: (a - b).new_cache(),
        "add up to -0.5": lambda: (0.5 * a - b)([1]),
        r"add up to 0: .*classifier": lambda: generate(Sum([(1.0, Classifier(first_letters))]), [1]),
        "vocab_size 29 and 31": lambda: a + other,
        "29 and 31": lambda: Union(a, other),
        "not numbers": lambda: a + 3,
        "by a number": lambda: a * b,
        "made of models, not of str": lambda: a + "b",
        "not by nan": lambda: math.nan * a,
        "two terms or more": lambda: Union(a),
        "must be above 0": lambda: TopK(a - 2 * b, 3),
        "1 or more, not 0": lambda: TopK(a, 0),
        "at most 1, not 1.5": lambda: TopP(a, 1.5),
        "whole number of candidates": lambda: Classifier(first_letters, 0),
        "context is 64": lambda: Prompted(toy(), [1] * 64),
        "not one of this formula": lambda: (a + b)([1], cache=a.new_cache()),
        "no room": lambda: a([1, 2, 3], cache=a.new_cache(2)),
        "formula's context": lambda: c([1], [c.n_ctx]),
        "mask has shape": lambda: a([1, 2], None, torch.ones(2, 3, dtype=torch.bool)),
        "one flat list": lambda: a(torch.ones(1, 2, dtype=torch.long)),
        "1 \\+ n log-probabilities": lambda: (a + Classifier(lambda ids, new: torch.ones(len(new))))([1]),
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            wrong()
        assert "\n" not in str(error.value)


def test_a_refused_forward_leaves_all_parts_of_the_cache_alone():
    a, b, c, _ = toy_terms()
    calls = itertools.count()

    def score(ids, new):
        if next(calls) == 2:
            raise ValueError("no more")
        return first_letters(ids, new)

    formula = a + b + c + Classifier(score, 3)
    cache = formula.new_cache(9)
    formula([1, 2], cache=cache)
    before = {key: part.length for key, part in cache.parts.items()}
    for wrong, message in (([3], "no more"), ([29], "token ids")):
        with pytest.raises(ValueError, match=message):
            formula(wrong, cache=cache)
        assert {key: part.length for key, part in cache.parts.items()} == before and cache.length == 2
    assert torch.allclose(formula([3], cache=cache)[0].exp(), from_scratch(formula, [1, 2, 3]), atol=1e-9)
    for wrong in (lambda: cache.truncate(4), lambda: cache.keep(0, [5]), lambda: cache.keep(4, [0])):
        with pytest.raises(ValueError, match="3 slots"):
            wrong()


# --- formula.py -------------------------------------------------------------------------------------------------------


def test_formulas_as_text_are_the_formulas():
    model, tokenizer = bundled("nano"), Tokenizer(4096)
    ids, one, two = tokenizer.encode("Question: 3 + 4"), Prompted(model, "a\nb"), Prompted(model, "c")
    for text, term in {
        "M": Prompted(model),
        "M('a\\nb') - 0.5*M(\"c\")": one - 0.5 * two,
        "(M('c') + M()) / 4 + -(1/3) * M('a\\nb') * 0.5": 0.25 * (two + model) - (1 / 6) * one,
        "Union(M('c'), Intersection(M, M('a\\nb'))) - 0.5 * TopK(M, 4)":
        Union(two, Intersection(model, one)) - 0.5 * TopK(model, 4),
        "TopP(2*M, .9)": TopP(model, 0.9),
    }.items():  # fmt: skip
        assert torch.allclose(parse(text, model)(ids), term(ids), atol=1e-5)


@pytest.mark.parametrize(
    "text, message",
    {
        "": "cannot be read",
        "M('a'": "cannot be read",
        "M('a') - M('b')": "add up to 0",
        "3": "holds no model",
        "'M'": "holds no model",
        "M + 1": "between terms",
        "M * M": "\\* stands between",
        "M / 0": "not 0",
        "M / M": "not 0",
        "2 ** 9 * M": "not understood",
        "N('a')": "not understood",
        "M(3)": "prompts in quotes",
        "M('a', 'b')": "not understood",
        "M(prompt='a')": "not understood",
        "TopK(M, M)": "whole number",
        "TopP(M, 2)": "at most 1",
        "C('a')": "not understood",
        "C('', 'b') + M": "neither empty",
        "__import__('os').system('true')": "not understood",
        "M.model": "not understood",
        "[M for M in (1,)]": "not understood",
        "1e999 * M": "by a number",
        "(" * 5000 + "M": "cannot be read",
        "-" * 50000 + "M": "cannot be read",
        "M\0": "cannot be read",
    }.items(),
)
def test_other_text_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(text, bundled("nano"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_bag_of_tokens_learns_and_steers():
    rng = random.Random(3)
    yes = [[rng.choice([1, 2, 3, 4]) for _ in range(9)] for _ in range(40)]
    no = [[rng.choice([3, 4, 5, 6]) for _ in range(9)] for _ in range(40)]
    bag = BagOfTokens.fit(yes, no, 29)
    assert bag.weights[1] > 1 and bag.weights[5] < -1 and abs(bag.weights[3]) < 0.7 and bag.weights[28] == 0
    scores = bag([3, 1, 3], [1, 2, 5, 28])
    for score, extra in zip(scores, ([], [1], [2], [5], [28])):
        odds = bag.bias + sum(float(bag.weights[t]) for t in {3, 1, *extra})
        assert abs(float(score) + math.log1p(math.exp(-odds))) < 1e-12
    model = Prompted(toy())
    drawn = [Sampler(seed=1).sample(i) for i in range(20)]

    def ones(formula: Term) -> int:
        return sum(token in (1, 2) for text in forest(formula, [9], drawn, 12) for token in text)

    assert ones(model + 3 * Classifier(bag)) > ones(model) > ones(model - 3 * Classifier(bag))
    with pytest.raises(ValueError, match="give both"):
        BagOfTokens.fit([], no, 29)
    judged = TextScore(lambda text: -float(text.count("apple")), Tokenizer(4096))
    apple = Tokenizer(4096).encode(" apple")
    assert judged(apple, [10, 11]).tolist() == [-1.0, -1.0, -1.0]


def test_a_classifier_of_the_shipped_answers_brings_money_into_a_question_about_pages():
    records = [json.loads(line) for line in (ROOT / "assets" / "responses.jsonl").read_text().splitlines()]
    tokenizer, sides = Tokenizer(4096), ([], [])
    for record in records:
        sides["$" not in record["prompt"]].append(tokenizer.encode(record["response"]))
    money, model = Classifier(BagOfTokens.fit(*sides, 4096)), Prompted(bundled("tiny"))
    prompt = tokenizer.encode("Question: Mona reads 24 pages a day. How many pages does Mona read in 3 weeks?\nAnswer:")
    drawn = [Sampler(seed=3).sample(i) for i in range(8)]
    dollars = [
        sum(tokenizer.decode(text).count("$") for text in forest(formula, prompt, drawn, 40))
        for formula in (model, model + 6 * money, model - 6 * money)
    ]
    assert dollars[1] >= 6 and dollars[0] <= 1 and dollars[2] <= 1


def test_a_classifier_between_two_prompts_tells_them_apart():
    model, tokenizer = bundled("nano"), Tokenizer(4096)
    prompts = [tokenizer.encode(text) for text in (
        "Question: Ada reads 6 pages a day. How many pages does Ada read in 4 weeks?\nAnswer:",
        "Question: A shop sells hats for $6 each. How much money does it make with 4?\nAnswer:")]  # fmt: skip
    bag = BagOfTokens.between(model, *prompts, count=12, length=24)
    fresh = [forest(model, prompt, [Sampler(seed=99).sample(i) for i in range(8)], 24) for prompt in prompts]
    right = [float(bag(text, [])[0]) > math.log(0.5) for text in fresh[0]]
    right += [float(bag(text, [])[0]) < math.log(0.5) for text in fresh[1]]
    assert sum(right) >= 12


# --- calculator.py ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, going_on, finished",
    [
        ("", 1, 0),
        ("no notes", 1, 0),
        ("a <<48/2=24>>24 apples.", 1, 1),
        ("a <<48/2=24>>24. <<24+1=25>>25", 1, 1),
        ("a <<48/2=24>>24. <<24+1=26>>26", 0, 0.5),
        ("a <<48/2=24>>25", 0, 0),
        ("a <<48/2=24>> apples", 0, 0),
        ("a <<48/2=24>>", 1, 0),
        ("a <<48/2=24>>2", 1, 0),
        ("a <<48/2=24>>240", 0, 0),
        ("a <<48/2=24>", 1, 0),
        ("a <<48/2=24> 24", 0, 0),
        ("a <<48/2=2", 1, 0),
        ("a <<48/2=25", 0, 0),
        ("a <<48/2=-", 0, 0),
        ("a <<48/", 1, 0),
        ("a <<48 apples", 0, 0),
        ("a <<3-5=-2>>-2", 1, 1),
        ("a <<10/4=2.5>>2.50", 1, 1),
        ("a <<10/3=3.33>>3.33", 1, 1),
        ("a <<10/3=3.34>>3.34", 0, 0),
        ("a <<10/3=3>>3", 0, 0),
        ("a <<20/3=7", 1, 0),  # may become 7.0, rounded
        ("a <<.5*2=1>>1", 1, 1),
        ("a <<1/4=.25>>.25", 1, 1),
        ("a <<2*600=1,200>>1200", 1, 1),
        ("a <<(2+3)*-4=-20>>-20", 1, 1),
        ("a <<1/0=1>>1", 0, 0),
        ("a <<2**9=512>>512", 0, 0),
        ("a <<007+1=8>>8", 0, 0),
        ("a <<" + "1+" * 60 + "1=61>>61", 0, 0),
        ("a <<" + "(" * 79, 1, 0),
        ("a <<" + "(" * 60 + "=", 0, 0),
    ],
)
def test_calculator(text, going_on, finished):
    assert (calculator(text, False), calculator(text, True)) == (going_on, finished)


def test_a_calculator_never_takes_back_and_sees_early_what_it_sees_late():
    rng = random.Random(6)
    for _ in range(100):
        sums = [(rng.randint(1, 99), rng.choice("+-*/"), rng.randint(1, 9)) for _ in range(rng.randint(1, 3))]
        text = ""
        for a, sign, b in sums:
            value = {"+": a + b, "-": a - b, "*": a * b, "/": round(a / b, 2)}[sign]
            value = f"{value:g}" if rng.random() < 0.9 else f"{value + 1:g}"
            text += f"so {a} {sign} {b} = <<{a}{sign}{b}={value}>>{value} things. "
        right = calculator(text, True) == 1
        early = [calculator(text[:i], False) for i in range(len(text) + 1)]
        late = [calculator(text[:i], False, early=False) for i in range(len(text) + 1)]
        assert early == sorted(early, reverse=True) and late == sorted(late, reverse=True)  # once lost, always lost
        assert early[-1] == late[-1] == right and sum(early) <= sum(late)
        if not right:
            assert text[: early.index(0)].count(">>") <= text[: late.index(0)].count(">>")
            assert sum(early) < sum(late)


def test_beams_and_draft_models_run_on_formulas():
    """Four strategies, one answer, on a formula as on GPT; and a cheap term drafts for the whole, in two ways."""
    model, small = toy(n_ctx=60), toy(1, 1, 8, n_ctx=60)
    formula = Prompted(model, [3, 1, 4]) + 0.5 * Prompted(small, [1]) - 0.25 * TopK(small, 9)
    rng = random.Random(0)
    for picker in (Greedy(), Sampler(0.6, seed=1)):
        prompt = [rng.randrange(29) for _ in range(6)]
        settings = {"picker": picker, "max_new_tokens": 30}
        plain = generate(formula, prompt, **settings)
        for drafter in (ModelDrafter(Prompted(model, [3, 1, 4])), ModelDrafter(formula, chain=True), Jacobi()):
            fast = generate(formula, prompt, drafter=drafter, budget=12, **settings)
            assert fast.tokens == plain.tokens and len(fast.steps) < len(plain.steps)
    for early_stopping, stops in ((False, [7]), (True, [7, 8]), ("never", [])):
        prompt = [rng.randrange(29) for _ in range(4)]
        arguments = {"num_beams": 3, "max_new_tokens": 9, "early_stopping": early_stopping, "stop_ids": stops}
        found = {
            strategy: beam.beam_search(formula, prompt, strategy=strategy, num_return_sequences=3, **arguments)
            for strategy in ("recompute", "swap", "tree", "lookahead")
        }
        for hypotheses in found.values():
            assert [h.tokens for h in hypotheses] == [h.tokens for h in found["recompute"]]
            assert all(abs(a.score - b.score) < 1e-9 for a, b in zip(hypotheses, found["recompute"]))


def test_no_beginning_of_a_right_text_is_refused():
    """The calculator's early verdict never contradicts its final one: what is right at the end was never lost."""
    rng, right = random.Random(0), 0
    for _ in range(3000):
        a, b = rng.choice([0, 1, 3, 12, 48, 600, 1200]), rng.choice([1, 2, 3, 4, 7, 1000])
        sum_, value = rng.choice(
            [(f"{a}*{b}", a * b), (f"{a:,}-{b}", a - b), (f"+{a}/{b}", a / b), (f"-{a}+{b}", b - a)]
        )
        forms = [f"{value:g}", f"{value:,.0f}", f"{value:.2f}", f"{value:.1f}", f"0{value:g}", f"{value:g}".lstrip("0")]
        shown, said = rng.choice([*forms, "-0"]), rng.choice([*forms, "-0"])
        text = f"She has {sum_} = <<{sum_}={shown}>>{said}{rng.choice(['', '.', ' eggs', ',', '%'])}"
        if calculator(text, True) == 1:
            right += 1
            assert all(calculator(text[:end], False) == 1 for end in range(len(text) + 1)), text
    assert right > 300
    assert calculator("<<1,200*2=2400>>2400", True) == calculator("<<+3*4=12>>12", True) == 1
    assert calculator("<<48/2=024>>24", True) == calculator("<<1-1=-0>>0", True) == 0


# --- mcts.py ----------------------------------------------------------------------------------------------------------


class Counted:
    """A model that counts what it forwards: the rows of each pass."""

    def __init__(self, model: Any) -> None:
        self.model, self.passes = model, []
        self.n_ctx, self.vocab_size, self.new_cache = model.n_ctx, model.vocab_size, model.new_cache

    def __call__(self, tokens, positions=None, mask=None, cache=None, rows=None):
        self.passes.append(len(tokens))
        return self.model(tokens, positions, mask, cache, rows)


def spaced(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def table_reward(seed: int, lost: float = 0.0):
    """A random reward for each finished text, 0.5 for others; the share `lost` of the unfinished ones is lost."""

    def reward(text: str, finished: bool) -> float:
        rng = random.Random(f"{seed} {text}")
        return rng.uniform(0.05, 0.95) if finished else 0.5 * (rng.random() >= lost)

    return reward


def small_tree(reward: Any, depth: int = 3, **settings: Any):
    model = Counted(toy(2, 2, 8, 5, 16))
    settings = {"max_nodes": 400, "playout": "none", "least": 0.0, "goal": None, "decode": spaced} | settings
    return model, search(model, [1, 2], reward, max_new_tokens=depth, **settings)


@functools.cache
def text_probabilities() -> dict[tuple[int, ...], float]:
    """Of each text of three tokens behind the small tree's prompt."""
    probabilities = {}
    for text in itertools.product(range(5), repeat=3):
        logs = toy(2, 2, 8, 5, 16)([1, 2, *text]).log_softmax(-1)
        probabilities[text] = math.exp(sum(float(logs[1 + i, token]) for i, token in enumerate(text)))
    return probabilities


def leaves_of(node: Any) -> list:
    return [node] if node.finished else [leaf for child in node.children or () for leaf in leaves_of(child)]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("playout", ["none", "greedy", "sample"])
def test_a_small_tree_read_in_full_against_brute_force(playout, batch):
    for seed in range(2):
        reward = table_reward(seed)
        model, found = small_tree(reward, playout=playout, batch=batch, exploration=30.0)
        tree, rewards = found.tree, {text: reward(spaced(text), True) for text in text_probabilities()}
        exact = sum(p * rewards[text] for text, p in text_probabilities().items())
        assert len(tree.nodes) == 5 + 25 and found.rows == 32 == sum(model.passes)
        assert all(rows <= batch for rows in model.passes[1:])
        low, high = tree.expected()
        assert abs(low - exact) < 1e-6 and abs(high - exact) < 1e-6
        assert tuple(found.tokens) == max(rewards, key=rewards.get) and found.finished
        assert found.reward == rewards[tuple(found.tokens)]
        for node in [tree.root, *tree.nodes]:  # every simulation went on or ended here, and brought what it brought
            ended = 0 if node is tree.root or playout != "none" else 1
            assert node.visits == ended + sum(child.visits for child in node.children)
            assert abs(node.total - 0.5 * ended - sum(child.total for child in node.children)) < 1e-9
        for leaf in leaves_of(tree.root):
            assert leaf.reward == reward(spaced([node.token for node in leaf.path()]), True)
            assert not leaf.visits or abs(leaf.value - leaf.reward) < 1e-9


def test_priors_come_through_one_cache_as_from_scratch():
    model, found = small_tree(table_reward(1), batch=7, width=3, exploration=30.0, max_nodes=10)
    assert len(found.tree.nodes) == 10 and not any(len(node.children) > 3 for node in found.tree.nodes)
    for node in [found.tree.root, *found.tree.nodes]:
        probs = model.model([1, 2, *(each.token for each in node.path())])[-1].softmax(-1)
        assert [child.token for child in node.children] == probs.topk(3).indices.tolist()
        assert all(abs(child.prior - float(probs[child.token])) < 1e-6 for child in node.children)
    half_way = small_tree(lambda text, finished: 1.0, depth=9, playout="greedy", max_nodes=4)[1]
    assert not half_way.finished and half_way.reward == 0 and len(half_way.tokens) > 0
    low, high = found.tree.expected()
    everything = small_tree(table_reward(1), exploration=30.0)[1].tree.expected()
    assert low <= everything[0] + 1e-9 and everything[1] <= high + 1e-9 and low < high


def test_visits_concentrate_on_the_best_leaf():
    for seed in range(6):
        _, found = small_tree(table_reward(seed), depth=2, exploration=1.0)
        leaves = leaves_of(found.tree.root)
        best = max(leaves, key=lambda leaf: leaf.reward)
        assert len(leaves) >= 23 and best is max(leaves, key=lambda leaf: leaf.visits)
        assert best.visits > 0.5 * found.simulations and found.simulations == 8 * 400


@pytest.mark.parametrize("batch", [1, 4])
def test_no_row_is_spent_on_what_is_lost(batch):
    for seed in range(12):
        reward = table_reward(seed, lost=0.5)
        model, found = small_tree(reward, batch=batch, exploration=30.0, playout="greedy")
        alive = [
            text
            for text in itertools.product(range(5), repeat=3)
            if all(reward(spaced(text[:i]), False) for i in (1, 2))
        ]
        for node in found.tree.nodes:
            assert all(reward(spaced([n.token for n in each.path()]), False) for each in node.path())
        assert sum(model.passes) == found.rows == 2 + len({text[:i] for text in alive for i in (1, 2)} | {
            text[:1] for text in itertools.product(range(5), repeat=3) if reward(spaced(text[:1]), False)})  # fmt: skip
        if alive:
            assert found.reward == max(reward(spaced(text), True) for text in alive)
        else:
            assert not found.finished
    hopeless = small_tree(lambda text, finished: 0.5 * (not finished), exploration=30.0)[1].tree
    assert hopeless.root.lost and all(leaf.visits == 1 for leaf in leaves_of(hopeless.root))  # known after one visit
    top = small_tree(None, max_nodes=1)[1].tree.root.children[0]  # what remains may weigh too little to go on
    for least, rows in ((1.0 - top.prior - 1e-3, 3), (1.0 - top.prior + 1e-3, 2)):
        strict = small_tree(lambda text, _: float(text != str(top.token)), max_nodes=1, least=least)[1]
        assert strict.rows == rows and strict.tree.root.lost == (rows == 2)
    nothing = small_tree(lambda text, finished: 0.0)[1]
    assert nothing.rows == 2 and nothing.tokens == [] and nothing.reward == 0 and nothing.tree.root.lost


def test_a_search_is_deterministic_stops_at_its_goal_and_counts_stops():
    runs = [small_tree(table_reward(3), depth=8, playout="sample", max_nodes=60, seed=seed)[1] for seed in (1, 1, 2)]
    assert [r.tokens for r in runs[:2]] == [runs[0].tokens] * 2 and runs[0].rows == runs[1].rows
    way = [[node.token for node in run.tree.nodes] for run in runs]
    assert way[0] == way[1] != way[2]
    first = small_tree(lambda text, finished: 1.0, depth=6, playout="greedy", goal=1.0)[1]
    assert first.rows == 2 + 5 and first.simulations == 1  # the last token is judged, not forwarded
    greedy = generate(toy(2, 2, 8, 5, 16), [1, 2], max_new_tokens=6).tokens
    assert first.tokens == greedy
    stopped = small_tree(lambda text, finished: 1.0, depth=6, playout="greedy", goal=1.0, stop_ids=[0, 1, 2, 3])[1]
    assert stopped.tokens[-1] in (0, 1, 2, 3) and stopped.text == spaced(stopped.tokens[:-1])
    cut = small_tree(lambda text, finished: 1.0, depth=2, stop_ids=[99])[1]  # nothing ever stops
    assert cut.reward == 0 and not any(leaf.reward for leaf in leaves_of(cut.tree.root))


def test_likelihood_alone_finds_the_most_likely_text():
    _, found = small_tree(None, exploration=30.0)
    assert tuple(found.tokens) == max(text_probabilities(), key=text_probabilities().get)


def test_a_formula_is_searched_like_any_model():
    formula, lost = toy_formulas()["classifier"], table_reward(5, lost=0.3)
    found = search(formula, [4, 2], lost, max_new_tokens=4, max_nodes=40, batch=3, goal=None, decode=spaced)
    for node in found.tree.nodes[::7]:
        probs = from_scratch(formula, [4, 2, *(each.token for each in node.path())])
        assert all(abs(child.prior - float(probs[child.token])) < 1e-6 for child in node.children)


def test_search_refuses_nonsense(capsys):
    for message, settings in {
        "max_nodes": {"max_nodes": 0},
        "batch": {"batch": 1.5},
        "width": {"width": True},
        "exploration": {"exploration": -1.0},
        "likelihood": {"likelihood": 2},
        "one of greedy": {"playout": "random"},
    }.items():
        with pytest.raises(ValueError, match=message):
            small_tree(table_reward(1), **settings)
    for wrong in (2.0, math.nan, -0.1):
        with pytest.raises(ValueError, match="from 0 to 1"):
            small_tree(lambda text, finished, wrong=wrong: wrong)
    for prompt in ([], [1] * 16):
        with pytest.raises(ValueError, match="needs a prompt"):
            search(toy(n_ctx=16), prompt, None, decode=spaced)
    for name in ("calculator:nothing", "no_such_module:f", "math:isnan", "math", "math:", ":", "os:sep"):
        with pytest.raises(ValueError, match="cannot be used") as error:
            reward_named(name)
        assert "\n" not in str(error.value)
    assert reward_named("calculator") is calculator and reward_named(None) is None


def test_search_finds_right_notes():
    model, tokenizer = bundled("tiny"), Tokenizer(4096)
    for problem in problems(2, seed=5):
        found = search(model, tokenizer.encode(problem), calculator, stop_ids=(tokenizer.eot,), max_nodes=700)
        assert found.reward == 1 and found.tokens[-1] == tokenizer.eot
        assert "<<" in found.text and calculator(found.text, True) == 1
        assert tokenizer.decode(found.tokens[:-1]) == found.text


@pytest.mark.slow
def test_search_beats_best_of_n_at_equal_rows():
    rows = compete_search(bundled("tiny"), 20, [8, 32], seed=31, progress=lambda text: None)
    solved = {(row["contender"], row["n"]): row["solved"] for row in rows}
    assert solved["search", 8] >= solved["best of n", 8] + 4 and solved["search", 32] >= solved["best of n", 32]
    assert solved["search", 8] >= 19


# --- train.py -------------------------------------------------------------------------------------------------------


def test_problems_are_different_and_reproducible():
    made = problems(400, seed=1)
    assert len(set(made)) == 400 and made == problems(400, seed=1) and made != problems(400, seed=2)
    assert all(text.startswith("Question: ") and text.endswith("?\nAnswer:") and "{" not in text for text in made)


def test_training_pieces():
    documents = [[i % 50, *range(i % 37 + 2)] for i in range(300)]
    epoch = batches(documents, 256, seed=1)
    assert sorted(t for group in epoch for d in group for t in d) == sorted(t for d in documents for t in d)
    assert all(len(group) == 1 or len(group) * max(map(len, group)) <= 256 for group in epoch)
    assert epoch == batches(documents, 256, seed=1) != batches(documents, 256, seed=2)
    tokens, targets = pad([[1, 2, 3], [4, 5]])
    assert tokens.tolist() == [[1, 2], [4, 5]] and targets.tolist() == [[2, 3], [5, -100]]
    singular = torch.linalg.svdvals(orthogonal(torch.randn(20, 50, generator=torch.Generator().manual_seed(1))))
    assert singular.min() > 0.5 and singular.max() < 1.5
    factors = [learning_rate(step, 100) for step in range(100)]
    assert max(factors) == 1 and factors[0] < 0.1 and factors[-1] < 0.05 and factors[45] == 1


def test_evaluation_against_one_document_at_a_time():
    model = toy(vocab_size=50, n_ctx=64)
    documents = [[1, 2, 9, 8, 3, 4], [5, 9, 8, 6], [7, 7, 7, 9, 8, 1, 2, 3]]
    total, count = 0.0, 0
    for document in documents:
        logs = model(document[:-1]).log_softmax(-1)
        total -= sum(float(logs[i, token]) for i, token in enumerate(document[1:]))
        count += len(document) - 1
    result = evaluate(model, documents, answer=[9, 8])
    assert abs(result["all"] - total / count) < 1e-9
    questions, answers = sum(d.index(8) for d in documents), sum(len(d) - 1 - d.index(8) for d in documents)
    assert abs((result["question"] * questions + result["answer"] * answers) / count - result["all"]) < 1e-9


# --- the command line -----------------------------------------------------------------------------------------------


def run_cli(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "lookahead.py", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        encoding="utf-8",
    )


def test_main_job_in_a_process_of_its_own():
    done = run_cli("--prompt", BAKER, "--max-new-tokens", "40")
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer(4096)
    expected = generate(bundled("tiny"), tokenizer.encode(BAKER), max_new_tokens=40, stop_ids=(tokenizer.eot,)).tokens
    assert done.stdout.startswith(tokenizer.decode(t for t in expected if t != tokenizer.eot) + "\n\n")
    lines = done.stdout.rstrip().splitlines()
    assert "forward passes" in lines[-2] and "tokens per step" in lines[-2] and "tokens/s" in lines[-1]
    assert "\033" not in done.stdout  # a pipe gets no colours


def test_compare_json(capsys):
    assert cli.main(["--compare", "--json", "--prompt", BAKER]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is True and report["near_tie"] is None
    assert report["tokens"] == report["plain"]["tokens"] and report["plain"]["tokens_per_step"] == 1
    assert set(report) - set(report["plain"]) == {"plain", "ratio", "identical", "near_tie"}
    for run in (report, report["plain"]):
        assert run["finish_reason"] in ("stop", "length") and run["seconds"] > 0
        assert run["tokens_per_second"] == pytest.approx(len(run["tokens"]) / run["seconds"])
        assert run["tokens_per_step"] == pytest.approx((len(run["tokens"]) - 1) / run["steps"])
    tokenizer = Tokenizer(4096)
    assert report["text"] == tokenizer.decode(t for t in report["tokens"] if t != tokenizer.eot)


@pytest.mark.parametrize("mode", MODES)
def test_options_reach_the_decoder(mode, capsys, tmp_path):
    """The command line against the Python API, with everything set."""
    warm = tmp_path / "warm.jsonl"
    warm.write_text("".join(json.dumps({"prompt": "x", "response": r}) + "\n" for r in (" She sold 4 * 3 =", " 12")))
    argv = ["--model", "nano", "--prompt", BAKER, "--max-new-tokens", "30", "--temperature", "0.9", "--top-k", "50"]
    argv += ["--top-p", "0.9", "--seed", "5", "--budget", "7", "--mode", mode, "--warmup", str(warm), "--json"]
    assert cli.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    tokenizer, trie = Tokenizer(4096), TokenTrie(4096, mode=mode)
    for response in (" She sold 4 * 3 =", " 12"):
        trie.insert([*tokenizer.encode(response), tokenizer.eot])
    expected = generate(
        bundled("nano"),
        tokenizer.encode(BAKER),
        drafter=trie,
        picker=Sampler(0.9, 50, 0.9, 5),
        budget=7,
        max_new_tokens=30,
        stop_ids=(tokenizer.eot,),
    )
    assert report["tokens"] == expected.tokens and report["steps"] == len(expected.steps)


def test_every_drafter_on_the_command_line(capsys):
    """All write the plain text; the steps are those of the drafter asked for; samples are those of the Python API."""
    argv = ["--model", "nano", "--prompt", BAKER, "--max-new-tokens", "24", "--json", "--budget", "8"]
    argv += ["--temperature", "0.8", "--min-p", "0.05", "--repetition-penalty", "1.05", "--num-return-sequences", "2"]
    tokenizer, model, small = Tokenizer(4096), bundled("nano"), ["--draft-model", "nano"]
    drafters = {
        "none": (None, []),
        "trie": (TokenTrie(4096), []),
        "prompt-lookup": (PromptLookup(), []),
        "jacobi": (Jacobi(), []),
        "model": (ModelDrafter(model), small),
        "combined": (Combined([TokenTrie(4096), PromptLookup(), ModelDrafter(model)]), small),
    }
    assert set(drafters) == set(options.DRAFTERS)
    settings = {"max_new_tokens": 24, "stop_ids": (tokenizer.eot,), "budget": 8}
    picker = Sampler(0.8, min_p=0.05, repetition_penalty=1.05)
    for name, (drafter, more) in drafters.items():
        assert cli.main([*argv, "--drafter", name, *more]) == 0
        found = json.loads(capsys.readouterr().out)["sequences"]
        expected = generate_many(model, tokenizer.encode(BAKER), 2, picker=picker, drafter=drafter, **settings)
        assert [(one["tokens"], one["steps"]) for one in found] == [(g.tokens, len(g.steps)) for g in expected], name
    assert found[0]["tokens_per_step"] > 2  # nano drafts for itself
    assert cli.main(["--model", "nano", "--prompt", BAKER, "--drafter", "jacobi", "--max-new-tokens", "4"]) == 0
    assert "fixed number of tokens" in capsys.readouterr().err


def test_prompt_files_and_standard_input(capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(BAKER + "\n", encoding="utf-8")
    argv = ["--model", "nano", "--max-new-tokens", "9", "--json"]
    texts = []
    for how in (["--prompt", BAKER], ["--prompt-file", str(file)]):
        assert cli.main(argv + how) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    done = run_cli(*argv, "--prompt", "-", stdin=BAKER + "\n")
    texts.append(json.loads(done.stdout)["tokens"])
    assert texts[0] == texts[1] == texts[2]


def test_warmup_reads_text_too(tmp_path):
    file = tmp_path / "warm.txt"
    file.write_text("One answer,\nof two lines.\n\n\nAnother.\n")
    assert [r.strip() for r in cli.read_responses(str(file))] == ["One answer,\nof two lines.", "Another."]
    file.write_bytes(b'\xef\xbb\xbf{"response": "x"}\n')  # some editors put a mark first
    assert list(cli.read_responses(str(file))) == ["x"]


@pytest.mark.skipif(os.name != "posix", reason="closes streams in a POSIX shell")
@pytest.mark.parametrize("how", ["--prompt - <&-", "--prompt a >&-"])
def test_closed_streams_are_said_in_one_line(how):
    command = f'"{sys.executable}" "{ROOT / "lookahead.py"}" --model nano --max-new-tokens 2 {how}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, stdin=subprocess.PIPE)
    assert done.returncode == 2 and "closed" in done.stderr and "Traceback" not in done.stderr


def test_bad_input_is_one_line_and_code_2(capsys, tmp_path):
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    (tmp_path / "bad.jsonl").write_text('{"response": "x"}\n{"respons": "y"}\n')
    (tmp_path / "empty").write_text("")
    (tmp_path / "blank").write_text("a" + " " * 10**6 + "b")
    (tmp_path / "array.json").write_text('[{"response": "x"}]')
    (tmp_path / "deep.jsonl").write_text('{"response": "x"}\n' * 2 + '{"response": ' + "[" * 100_000)
    cases = {
        "empty": ["--prompt", ""],
        "context holds": ["--prompt", "word " * 600],
        "either --prompt or": ["--prompt", "a", "--prompt-file", "b"],
        "cannot read": ["--prompt-file", str(tmp_path / "nothing")],
        "not UTF-8": ["--prompt-file", str(tmp_path / "latin1")],
        "prompt is empty": ["--prompt-file", str(tmp_path / "empty")],
        "record 2": ["--prompt", "a", "--warmup", str(tmp_path / "bad.jsonl")],
        "no model 'gpt5'": ["--prompt", "a", "--model", "gpt5"],
        "temperature": ["--prompt", "a", "--temperature", "-1"],
        "top_p": ["--prompt", "a", "--top-p", "0"],
        "top_k": ["--prompt", "a", "--top-k", "-3"],
        "budget": ["--prompt", "a", "--budget", "-2"],
        "invalid budget": ["--prompt", "a", "--budget", "many"],
        "invalid choice": ["--prompt", "a", "--mode", "fast"],
        "max_new_tokens": ["--prompt", "a", "--max-new-tokens", "-5"],
        "--threads": ["--prompt", "a", "--threads", "0"],
        "1024": ["--prompt", "a", "--threads", "100000"],
        "'perhaps'": ["--prompt", "a", "--pack", "perhaps"],
        "0 to 4096": ["--prompt", "a", "--budget", "1000000000"],
        "100,000 white-space": ["--prompt-file", str(tmp_path / "blank")],
        "JSON array": ["--prompt", "a", "--warmup", str(tmp_path / "array.json")],
        "record 3": ["--prompt", "a", "--warmup", str(tmp_path / "deep.jsonl")],
        "read once": ["--prompt", "-", "--warmup", "-"],
        "drafts nothing": ["--prompt", "a", "--no-lookahead", "--warmup", "x"],
        "--drafter none drafts nothing": ["--prompt", "a", "--drafter", "none", "--trace"],
        "has no trie: leave out --save-trie": ["--prompt", "a", "--drafter", "jacobi", "--save-trie", "x"],
        "needs --draft-model": ["--prompt", "a", "--model", "nano", "--drafter", "model"],
        "is for --drafter model or combined": ["--prompt", "a", "--draft-model", "nano"],
        "no model 'gpt6'": ["--prompt", "a", "--drafter", "model", "--draft-model", "gpt6"],
        "leave out --drafter jacobi": ["--prompt", "a", "--drafter", "jacobi", "--no-lookahead"],
        "num_beams must be 1 to 1024": ["--prompt", "a", "--num-beams", "1" + "0" * 20],
        "for beam search": ["--prompt", "a", "--length-penalty", "0"],
        "leave out --seed": ["--prompt", "a", "--search", "mcts", "--seed", "3"],
        "add --search mcts": ["--prompt", "a", "--max-nodes", "3"],
        "max_nodes must be": ["--prompt", "a", "--search", "mcts", "--max-nodes", "1" + "0" * 20],
        "up to a million": ["--prompt", "a", "--formula", "1e308*M"],
        "too large": ["--prompt", "a", "--formula", "100000*(1000*M)"],
        "cannot be used (TypeError": ["--prompt", "a", "--search", "mcts", "--reward", "operator:floordiv"],
        "leave out --trace": ["--prompt", "a", "--json", "--trace"],
        "leave out --prompt": ["--prompt", "a", "--interactive"],
        "no trie file": ["--prompt", "a", "--load-trie", str(tmp_path / "none")],
        "not a whole trie": ["--prompt", "a", "--load-trie", str(tmp_path / "latin1")],
        "no such folder": ["--prompt", "a", "--save-trie", str(tmp_path / "none" / "trie")],
        "it is a folder": ["--prompt", "a", "--save-trie", str(tmp_path)],
        "meta": ["--prompt", "a", "--device", "meta"],
        "which folder": ["--prompt", "a", "--model", "~no-such-user/x"],
        "--device": ["--prompt", "a", "--device", "toaster"],
        "leave out": ["--prompt", "a", "--compare", "--no-lookahead"],
        "unrecognized": ["--promt", "a"],
    }
    for message, argv in cases.items():
        try:
            code = cli.main(argv)
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert code == 2 and out == "", argv
        assert len(lines) == 1 and message in lines[0] and lines[0].startswith("lookahead: "), (argv, err)


def test_a_trie_is_saved_and_loaded(capsys, tmp_path):
    """The second process knows what the first one said: fewer steps, the same text."""
    file, argv = tmp_path / "trie", ["--model", "nano", "--prompt", BAKER, "--max-new-tokens", "60", "--json"]
    reports = []
    for more in (["--save-trie", str(file)], ["--load-trie", str(file)]):
        assert cli.main(argv + more) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["tokens"] == reports[1]["tokens"] and reports[1]["steps"] < reports[0]["steps"]
    assert [p.name for p in tmp_path.iterdir()] == ["trie"]
    assert TokenTrie.load(file).count(reports[0]["tokens"][-5:]) >= 1
    before = file.read_bytes()
    assert cli.main(["--model", "nano", "--prompt", "word " * 600, "--save-trie", str(file)]) == 2
    assert file.read_bytes() == before  # a run that failed before its first token leaves the file alone


def test_a_conversation_speeds_up(tmp_path):
    """--interactive in a process of its own: the same question twice, then one that is too long, then the end."""
    file, question = tmp_path / "trie", "How many eggs are in 5 boxes of 12?"
    lines = f"{question}\n{question}\n{'word ' * 600}\nQuestion: {question}\n\nnever read\n"
    done = run_cli("--interactive", "--max-new-tokens", "50", "--save-trie", str(file), stdin=lines)
    assert done.returncode == 0 and "the context holds 512" in done.stderr and "Traceback" not in done.stderr
    answers = done.stdout.rstrip("\n").split("\n\n")
    sums = [answer.splitlines()[-1] for answer in answers]
    texts = [answer.rsplit("\n", 1)[0] for answer in answers]
    assert len(answers) == 3 and len(set(texts)) == 1  # losslessness: all three answers are the same
    assert all(" per step" in line and "nodes in the trie]" in line for line in sums)
    speeds = [float(line.split(" per step")[0].split()[-1]) for line in sums]
    assert speeds[1] > speeds[0]
    assert TokenTrie.load(file).n_nodes > 0


def test_trace_shows_every_tree(capsys):
    argv = ["--model", "nano", "--prompt", BAKER, "--max-new-tokens", "30", "--budget", "7"]
    assert cli.main([*argv, "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tokenizer = Tokenizer(4096)
    result = generate(bundled("nano"), tokenizer.encode(BAKER), drafter=TokenTrie(4096), max_new_tokens=30,
                      stop_ids=(tokenizer.eot,), budget=7)  # fmt: skip
    heads = [line for line in lines if " nodes accepted, emitted " in line]
    assert len(heads) == len(result.steps) + 1 and heads[0].startswith("prefill: 0 of 0")
    assert sum(line.endswith(" *") for line in lines) == sum(len(step.accepted) for step in result.steps)
    assert sum("-- '" in line or '-- "' in line for line in lines) == sum(len(step.draft) for step in result.steps)
    number, step = next((i, step) for i, step in enumerate(result.steps, 1) if step.draft)
    drawn = step.draft.render(tokenizer.decode, step.accepted).splitlines()
    assert lines[lines.index(heads[number]) + 1 :][: len(drawn)] == drawn


def test_a_proven_near_tie_and_a_real_difference(capsys, monkeypatch):
    """--compare must notice when the lookahead run emits another token; here the loop itself is made to."""
    real = cli.decode
    calls = []

    def cheating(*arguments, **settings):
        calls.append(settings)
        for step in real(*arguments, **settings):
            if settings.get("drafter") is not None and step.position > 40 and len(step.tokens) == 1:
                step.tokens = [(step.tokens[0] + 1) % 4096]
            yield step

    monkeypatch.setattr(cli, "decode", cheating)
    assert cli.main(["--compare", "--json", "--prompt", BAKER, "--max-new-tokens", "20"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["identical"] is False and report["near_tie"] is None and "differ" in err
    assert len(calls) == 3  # a warm-up, lookahead, plain
    monkeypatch.setitem(lookahead.ROUNDING, torch.float32, 1e9)  # as if that were within rounding
    assert cli.main(["--compare", "--json", "--prompt", BAKER, "--max-new-tokens", "20"]) == 0
    tie = json.loads(capsys.readouterr().out)["near_tie"]
    assert tie["gap"] > 0 and tie["position"] == first_difference(report["tokens"], report["plain"]["tokens"])


def test_help_and_example_prompt(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and max(map(len, text.splitlines())) <= 100
    assert "word problems and nothing else" in text and "--model gpt2" in text
    assert cli.main(["--model", "nano", "--max-new-tokens", "3"]) == 0
    assert "no --prompt given" in capsys.readouterr().err


@pytest.mark.parametrize("no_color", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_colours_only_on_a_terminal(no_color):
    """A pseudo-terminal shows accepted drafts in green, unless NO_COLOR is set."""
    pty = pytest.importorskip("pty")
    warm, most = ROOT / "assets" / "responses.jsonl", ["--max-new-tokens", "20", "--budget", "8"]
    main, terminal = pty.openpty()
    environment = os.environ | {"NO_COLOR": no_color, "TERM": "xterm"}
    argv = [sys.executable, ROOT / "lookahead.py", "--model", "nano", *most, "--warmup", warm]
    process = subprocess.Popen(argv, stdout=terminal, stderr=subprocess.DEVNULL, env=environment)
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(main, 4096):
            output += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(main)
    assert process.wait() == 0
    assert (b"\033[32m" in output) == (no_color == "")


@pytest.mark.parametrize("strategy", beam.STRATEGIES)
def test_beam_search_on_the_command_line(strategy, capsys, tmp_path):
    """Against the Python API, with everything set; and in words, with a trace."""
    argv = [
        "--model",
        "nano",
        "--prompt",
        BAKER,
        "--max-new-tokens",
        "8",
        "--num-beams",
        "3",
        "--length-penalty",
        "0.5",
    ]
    argv += ["--early-stopping", "never", "--num-return-sequences", "2", "--beam-strategy", strategy]
    argv += ["--offload"] if strategy == "swap" else []
    assert cli.main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    prompt = Tokenizer(4096).encode(BAKER)
    settings = {"num_beams": 3, "max_new_tokens": 8, "stop_ids": (4095,)}
    expected = beam.beam_search(
        bundled("nano"), prompt, length_penalty=0.5, early_stopping="never", num_return_sequences=2, **settings
    )
    assert_same_hypotheses(expected, [(h["tokens"], h["score"]) for h in report["sequences"]], 1e-4)
    assert report["strategy"] == strategy and report["steps"] == 8
    assert (report["peak"] > 0) == (strategy != "recompute")
    assert cli.main([*argv, "--trace"]) == 0
    out = capsys.readouterr().out
    assert "step 8:" in out and "--- 2 (score" in out and "<- beam 2, total" in out
    assert ("takes over" in out and "to the CPU" in out) == (strategy == "swap")
    assert ("slots given back" in out) == (strategy in ("tree", "lookahead"))


def test_beam_options_that_do_not_go_together(capsys, tmp_path):
    for argv, message in (
        (["--beam-strategy", "tree"], "--num-beams"),
        (["--offload"], "--num-beams"),
        (["--num-beams", "0"], "num_beams"),
        (["--num-beams", "2", "--temperature", "1"], "--temperature"),
        (["--num-beams", "2", "--compare"], "--compare"),
        (["--num-beams", "2", "--num-return-sequences", "3"], "--num-return-sequences"),
        (["--num-beams", "2", "--no-lookahead", "--beam-strategy", "lookahead"], "--no-lookahead"),
        (["--num-beams", "2", "--beam-strategy", "swap", "--save-trie", str(tmp_path / "t")], "--save-trie"),
        (["--num-beams", "2", "--offload"], "offload"),
        (["--num-beams", "2", "--drafter", "jacobi"], "--drafter"),
        (["--num-beams", "2", "--trace", "--json"], "--trace"),
    ):
        assert cli.main(["--model", "nano", "--prompt", "Question:", "--max-new-tokens", "2", *argv]) == 2, argv
        out, err = capsys.readouterr()
        assert out == "" and message in err and len(err.splitlines()) == 1 and err.startswith("lookahead: ")


def test_a_formula_on_the_command_line(capsys):
    arguments = ["--prompt", BAKER, "--max-new-tokens", "24", "--model", "nano", "--json"]
    assert cli.main([*arguments, "--formula", "M('Be brief.\\n') - 0.5*M", "--compare"]) == 0
    report = json.loads(capsys.readouterr().out)
    term, tokenizer = Prompted(bundled("nano"), "Be brief.\n") - 0.5 * Prompted(bundled("nano")), Tokenizer(4096)
    expected = generate(term, tokenizer.encode(BAKER), max_new_tokens=24, stop_ids=(tokenizer.eot,)).tokens
    assert report["tokens"] == expected and report["identical"] is True
    assert cli.main([*arguments[:-1], "--formula", "2*M - M"]) == 0
    assert "MB of weights" in capsys.readouterr().out
    for text, message in (("M - M", "add up to 0"), ("M + open('x')", "not understood"), ("", "cannot be read")):
        assert cli.main([*arguments, "--formula", text]) == 2
        error = capsys.readouterr().err
        assert error.startswith("lookahead: ") and error.count("\n") == 1 and message in error


def test_a_search_on_the_command_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wishes_of_mine.py").write_text("def short(text, finished):\n    return 1 / (1 + len(text))\n")
    arguments = ["--search", "mcts", "--prompt", BAKER]
    assert cli.main([*arguments, "--reward", "calculator", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["reward"] == 1 and report["finished"] and calculator(report["text"], True) == 1
    assert report["rows"] <= 512 + len(Tokenizer(4096).encode(BAKER))
    nano = [*arguments, "--model", "nano", "--max-nodes", "40", "--max-new-tokens", "9"]
    assert cli.main([*nano, "--reward", "wishes_of_mine:short"]) == 0
    assert "rows forwarded" in capsys.readouterr().out
    assert cli.main([*nano, "--formula", "2*M - M"]) == 0
    for wrong, message in (
        (["--reward", "os:sep"], "--reward 'os:sep' cannot be used"),
        (["--max-nodes", "0"], "max_nodes"),
        (["--compare"], "leave out --compare"),
        (["--temperature", "1"], "leave out --temperature"),
        (["--num-return-sequences", "2"], "leave out --num-return-sequences"),
    ):
        assert cli.main([*arguments, *wrong]) == 2
        error = capsys.readouterr().err
        assert error.startswith("lookahead: ") and error.count("\n") == 1 and message in error
    assert cli.main(["--reward", "calculator"]) == 2
    assert "--search mcts" in capsys.readouterr().err


# --- bench.py -------------------------------------------------------------------------------------------------------


def made_up_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Questions and answers that repeat each other a little."""
    rng, pairs = random.Random(seed), []
    for question in problems(count, seed):
        a, b = rng.randint(2, 40), rng.randint(2, 9)
        pairs.append((question, f" First we take {a} * {b} = <<{a}*{b}={a * b}>>{a * b}.\nSo the answer is {a * b}."))
    return pairs


def test_replay_counts_what_a_decoder_would(tmp_path, capsys):
    """A replay's tokens per step are those of the real loop on a model that says exactly the responses."""
    pairs = made_up_pairs(12, seed=3)
    file = tmp_path / "responses.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))

    class Parrot:
        """A model whose most probable token is the next one of the response."""

        vocab_size, n_ctx, device, dtype = 50257, 10**6, torch.device("cpu"), torch.float32

        def __init__(self, text):
            self.text = text

        def new_cache(self, capacity=None):
            return KVCache(GPTConfig(1, 1, 1, 5, 5), capacity)

        def __call__(self, tokens, positions=None, mask=None, cache=None, rows=None):
            positions = range(cache.length, cache.length + len(tokens)) if positions is None else positions
            cache.advance(len(tokens))
            next_tokens = [self.text[min(p + 1, len(self.text) - 1)] for p in positions]
            logits = torch.zeros(len(tokens), 50257)
            logits[range(len(tokens)), next_tokens] = 1.0
            return logits if rows is None else logits[rows]

    known = bench.read_pairs(str(file))
    for mode in MODES:
        row = bench.replay(known, 6, 6, 9, mode)
        trie, steps, tokens = TokenTrie(mode=mode), 0, 0
        for _, response in known[:6]:
            trie.insert(response)
        drafted, lengths = 0, Counter()
        for prompt, response in known[6:]:
            result = generate(Parrot(prompt + response), prompt, drafter=trie, budget=9, stop_ids=[50256])
            assert result.tokens == response
            steps, tokens = steps + len(result.steps), tokens + len(result.tokens) - 1
            drafted += sum(len(step.draft) for step in result.steps)
            lengths.update(len(step.tokens) - 1 for step in result.steps)
        assert row.tokens_per_step == tokens / steps and row.nodes == trie.n_nodes and row.bytes == trie.nbytes
        assert row.nodes_per_step == drafted / steps and Counter(dict(enumerate(row.lengths))) == lengths

    argv = ["replay", "--responses", str(file), "--warm", "6", "--replay", "6", "--budget", "4", "9"]
    assert bench.main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["mode"], row["budget"]) for row in rows] == [(mode, b) for mode in MODES for b in (4, 9)]
    wanted = {"mode", "budget", "nodes_per_step", "tokens_per_step", "retrieve_us", "insert_us", "nodes", "bytes"}
    assert all(wanted <= set(row) for row in rows) and rows[1]["tokens_per_step"] > 1
    assert bench.main([*argv, "--out", str(tmp_path / "out"), "--mode", "best-first"]) == 0
    out = capsys.readouterr().out
    assert "tokens/step" in out and "best-first" in out
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert written >= {"replay.csv", "replay_tokens_per_step.png", "replay_accepted_lengths.png"}


def test_growth_and_cost_measure_what_they_say(tmp_path, capsys):
    argv = ["growth", "--tokens", "500", "2000", "--max-nodes", "3000", "--mode", "best-first"]
    assert bench.main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["tokens"] for row in rows] == [500, 2000] and rows[0]["nodes"] < rows[1]["nodes"] <= 3000
    assert all(row["insert_us"] > 0 and row["retrieve_us"] > 0 for row in rows)
    assert bench.main([*argv, "--out", str(tmp_path)]) == 0
    argv = ["cost", "--model", "nano", "--rows", "1", "5", "--prefix", "8", "100", "--repeat", "2"]
    assert bench.main([*argv, "--out", str(tmp_path)]) == 0
    assert "read_bound_ms" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {
        "growth.csv", "growth.png", "cost.csv", "cost.png", "cost_by_prefix.png"
    }  # fmt: skip
    assert len((tmp_path / "cost.csv").read_text().splitlines()) == 5
    assert bench.main(["cost", "--model", "nano", "--rows", "99999999"]) == 2
    assert "--rows must be" in capsys.readouterr().err
    model = bundled("nano", pack=False)
    assert (cost.with_plain_linear(model)([1, 2, 3]) - model([1, 2, 3])).abs().max() < 1e-4


@pytest.mark.parametrize("what", [[], pytest.param(["--random"], marks=pytest.mark.slow)], ids=["own", "random"])
def test_speed_races_fairly(what, tmp_path, capsys, monkeypatch):
    """Everybody writes the same number of tokens, and no contender's trie remembers the pass before."""
    passes = []

    class Watched(TokenTrie):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            passes.append(self)

    monkeypatch.setattr(speed, "TokenTrie", Watched)
    monkeypatch.setattr(bench, "starting", lambda *a: "not measured here")
    argv = ["speed", "--model", "nano", "--problems", "3", "--warm", "5", "--max-new-tokens", "20", "--repeat", "2"]
    assert bench.main([*argv, *what, "--budget", "auto", "4", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["decoder"]: row for row in result["rows"]}
    assert list(rows)[:4] == ["plain", "lookahead auto", "lookahead 4", "lookahead 8"]
    assert rows["plain"]["tokens_per_step"] == 1 and rows["plain"]["times_plain"] == 1
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert any("best fixed" in line for line in result["remarks"]) and any(
        "ceiling" in line for line in result["remarks"]
    )
    assert len(passes) == 6 and [trie.n_nodes for trie in passes[:3]] == [trie.n_nodes for trie in passes[3:]]
    assert bench.main([*argv, *what, "--budget", "4", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"speed.csv", "speed.png"}


@pytest.mark.slow
def test_drafters_and_parting_are_measured(tmp_path, capsys):
    argv = ["drafters", "--model", "nano", "--problems", "2", "--warm", "3", "--max-new-tokens", "16", "--repeat", "1"]
    assert bench.main([*argv, "--temperature", "1", "--budget", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["drafter"]: row for row in result["rows"]}
    assert len(rows) == 10 and rows["plain"]["tokens_per_step"] == 1 and len(result["remarks"]) == 3
    # nano drafts for itself: whoever sees the noise is nearly always right
    assert rows["draft model, tree"]["tokens_per_step"] > rows["draft model, tree, noise unseen"]["tokens_per_step"] > 2
    assert all(row["draft_ms"] > 0 and row["nodes_per_step"] <= 8 for name, row in rows.items() if name != "plain")
    assert bench.main([*argv, "--out", str(tmp_path), "--draft-model", "none"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"drafters.csv", "drafters.png"}
    capsys.readouterr()
    argv = ["parting", "--model", "nano", "--problems", "6", "--max-new-tokens", "32", "--dtype", "bfloat16", "--json"]
    assert bench.main(argv) == 0
    rows = {row["mode"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["exact"]["parted"] == 0 and rows["ordinary"]["tokens"] > 100
    assert all(row.get("largest_unit", 0) <= lookahead.ROUNDING[torch.bfloat16] for row in rows.values())


def test_bench_of_beams(tmp_path, capsys):
    argv = ["beam", "--model", "nano", "--problems", "1", "--warm", "5", "--max-new-tokens", "8", "--repeat", "1"]
    argv += ["--num-beams", "3", "--strategy", "recompute", "swap offload", "tree", "lookahead 4"]
    assert bench.main([*argv, "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows)[:4] == ["recompute", "swap offload", "tree", "lookahead 4"]
    assert all(row["steps_per_s"] > 0 and row["same"] == 1 for row in rows.values())
    assert rows["tree"]["forwards"] == 1 > rows["lookahead 4"]["forwards"] and rows["swap offload"]["moved_mb"] > 0
    assert rows["tree"]["used_mb"] < rows["swap offload"]["used_mb"] == 3 * rows["swap offload"]["device_mb"]
    assert bench.main([*argv, "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"beam.csv", "beam.png"}


def test_bench_bad_input_is_one_line_and_code_2(tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "two.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 2)
    for argv, message in (
        (["--responses", str(tmp_path / "none")], "cannot read"),
        (["--responses", str(tmp_path / "bad.jsonl")], "line 1"),
        (["--responses", str(tmp_path / "two.jsonl"), "--warm", "5"], "do not fit"),
        (["--responses", str(tmp_path / "two.jsonl"), "--budget", "0"], "1 or more"),
    ):
        assert bench.main(["replay", *argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and message in err and err.startswith("bench: ")


@pytest.mark.parametrize("command", ["search", "formula"])
def test_bench_of_search_and_formulas(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(steer, "FORMULAS", {"M": "M", "union": "Union(M, M('Be brief. '))"})
    arguments = [command, "--model", "nano", "--n", "1", "3"]
    assert bench.main([*arguments, "--problems", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    if command == "search":
        assert [(row["contender"], row["n"]) for row in rows] == [
            (c, n) for c in ("best of n", "search") for n in (1, 3)
        ]
        solved = {(row["contender"], row["n"]): row for row in rows}
        for n in (1, 3):  # never more rows than best-of-n had
            assert solved["search", n]["rows"] <= solved["best of n", n]["rows"]
    else:
        assert [row["identical"] for row in rows] == [2, 2] and all(row["plain_per_s"] > 0 for row in rows)
    assert bench.main([*arguments, "--problems", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{command}.csv").read_text().count("\n") == 1 + len(rows)
    assert bench.main([command, "--problems", "0"]) == 2


# --- viz.py, treeviz.py, beamviz.py, picture.py -----------------------------------------------------------------------


class Records(NamedTuple):
    """What the pictures are drawn from: a warmed trie, decodes and a beam search of nano."""

    tokenizer: Tokenizer
    prompt: list[int]
    trie: TokenTrie
    plain: lookahead.Generation
    drafted: lookahead.Generation
    alone: lookahead.Generation  # a prefill, no more
    beams: list[beam.BeamStep]


@functools.cache
def records() -> Records:
    model = bundled("nano")
    tokenizer, trie = Tokenizer.for_model(model), TokenTrie(model.vocab_size)
    prompt = tokenizer.encode(BAKER)
    for line in (ROOT / "assets" / "responses.jsonl").read_text().splitlines()[:60]:
        trie.insert([*tokenizer.encode(json.loads(line)["response"]), tokenizer.eot])
    settings = {"max_new_tokens": 48, "stop_ids": [tokenizer.eot]}
    plain, drafted = generate(model, prompt, **settings), generate(model, prompt, drafter=trie, budget=12, **settings)
    beams = list(beam.beam_steps(model, prompt, num_beams=4, strategy="swap", **settings))
    return Records(tokenizer, prompt, trie, plain, drafted, generate(model, prompt, max_new_tokens=1), beams)


def cells(picture: viz.Picture, kind: str) -> list[Any]:
    """The rectangles of a kind, but for the one in the legend (which is drawn first)."""
    return [patch for patch in picture.figure.axes[0].patches if patch.get_gid() == kind][1:]


def awkward_tree() -> DraftTree:
    """64 nodes, with everything in them that is hard to write."""
    tree = random_tree(random.Random(5), 64, 300)
    return DraftTree(tree.tokens, tree.parents, [1 / (2 + i) for i in range(64)])


def awkward(ids: list[int]) -> str:
    signs = ["$x_1^2$", " $", "\n", "\\frac", "中文", "é", "\x00", "<&>", "\ufffd", "מה", "x" * 40, "", "\t ", "🙂"]
    return signs[ids[0] % len(signs)] if len(ids) == 1 else "".join(awkward([i]) for i in ids)


CHAIN = DraftTree(range(64), range(-1, 63))
COSTS = [{"rows": n, "ms": 1.0 + n / 10} for n in (1, 2, 4, 8)]
BOUNDS = {"f_linear_ms": 2.0, "read_bound_ms": 0.5, "compute_bound_ms": 0.25}
PICTURES = {
    "trie": lambda r, d: viz.draw_trie(r.trie, r.prompt + r.drafted.tokens[:9], r.tokenizer.decode, dark=d),
    "trie, wide": lambda r, d: viz.draw_trie(r.trie, r.drafted.tokens[:1], awkward, depth=5, width=9, dark=d),
    "trie, deep": lambda r, d: viz.draw_trie(r.trie, r.drafted.tokens[:1], lambda _: " breakfast", depth=60, dark=d),
    "trie, unknown": lambda r, d: viz.draw_trie(TokenTrie(), r.prompt, r.tokenizer.decode, dark=d),
    "draft": lambda r, d: viz.draw_draft(max(r.drafted.steps, key=lambda s: len(s.tokens)), r.tokenizer.decode, dark=d),
    "draft, prefill": lambda r, d: viz.draw_draft(r.drafted.prefill, r.tokenizer.decode, dark=d),
    "draft, plain": lambda r, d: viz.draw_draft(r.plain.steps[0], r.tokenizer.decode, dark=d),
    "draft, notes": lambda r, d: viz.draw_draft(DraftTree(range(40), range(-1, 39), [0.5] * 40), lambda _: "7", dark=d),
    "draft, chain": lambda r, d: viz.draw_draft(CHAIN, r.tokenizer.decode, dark=d),
    "draft, awkward": lambda r, d: viz.draw_draft(awkward_tree(), awkward, dark=d),
    "mask": lambda r, d: viz.draw_mask(r.drafted.steps[1].draft, awkward, prefix=r.prompt[-4:-1], dark=d),
    "mask, awkward": lambda r, d: viz.draw_mask(awkward_tree(), awkward, prefix=r.prompt, dark=d),
    "mask, chain": lambda r, d: viz.draw_mask(CHAIN, r.tokenizer.decode, dark=d),
    "mask, empty": lambda r, d: viz.draw_mask(DraftTree([], []), r.tokenizer.decode, dark=d),
    "slots": lambda r, d: viz.draw_slots(r.drafted, dark=d),
    "slots, plain": lambda r, d: viz.draw_slots(r.plain, dark=d),
    "slots, prefill": lambda r, d: viz.draw_slots(r.alone, dark=d),
    "slots, part": lambda r, d: viz.draw_slots(r.drafted.steps[2:5], dark=d),
    "slots, none": lambda r, d: viz.draw_slots([], dark=d),
    "text": lambda r, d: viz.draw_text(r.drafted, r.tokenizer.decode, dark=d),
    "text, awkward": lambda r, d: viz.draw_text(r.plain, awkward, dark=d),
    "text, prefill": lambda r, d: viz.draw_text(r.alone, r.tokenizer.decode, dark=d),
    "pace": lambda r, d: viz.draw_pace({"plain": r.plain, "$lookahead$\n": r.drafted, "one": r.alone}, dark=d),
    "pace, names": lambda r, d: viz.draw_pace({"_" + 9 * "long name ": r.plain, "b" * 99: r.drafted}, dark=d),
    "pace, none": lambda r, d: viz.draw_pace({}, dark=d),
    "cost": lambda r, d: viz.draw_cost(COSTS, dark=d),
    "cost, bounds": lambda r, d: viz.draw_cost([row | BOUNDS | {"prefix": 9} for row in COSTS], dark=d),
    "beams": lambda r, d: viz.draw_beams(r.beams, r.tokenizer.decode, dark=d),
    "beams, end": lambda r, d: viz.draw_beams(r.beams[-6:], awkward, dark=d),
    "beams, none": lambda r, d: viz.draw_beams([], r.tokenizer.decode, dark=d),
    "swap": lambda r, d: viz.draw_beam_slots(r.beams, len(r.prompt), dark=d),
    "swap, part": lambda r, d: viz.draw_beam_slots(r.beams[3:9], len(r.prompt), dark=d),
    "tree": lambda r, d: viz.draw_beam_slots(r.beams, len(r.prompt), strategy="tree", dark=d),
    "tree, part": lambda r, d: viz.draw_beam_slots(r.beams[3:9], len(r.prompt), strategy="tree", dark=d),
    "tree, none": lambda r, d: viz.draw_beam_slots([], len(r.prompt), strategy="tree", dark=d),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_whole_and_legible(name, tmp_path):
    """Of every picture: all text inside its edges and of 9 points or more; as SVG well-formed, its text as text."""
    picture = PICTURES[name](records(), False)
    assert str(picture) == repr(picture) == picture.text and (picture.text or "none" in name)
    width, height = picture.figure.get_size_inches()
    assert 5 < width <= 12 and 1 < height < 16
    svg = picture.save(tmp_path / "a.SVG").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    assert "<text" in svg and [file.name for file in tmp_path.iterdir()] == ["a.SVG"]
    with picture_settings(picture.theme):
        picture.figure.draw_without_rendering()
        edges, axes = picture.figure.bbox, picture.figure.axes
        ticks = {tick for a in axes for tick in a.get_xticklabels(which="both") + a.get_yticklabels(which="both")}
        for text in picture.figure.findobj(Text):
            if text.get_text() and text.get_visible() and text not in ticks:  # some of those lie beyond the axis
                assert text.get_fontsize() >= 9
                box = text.get_window_extent()
                assert edges.x0 - 1 <= box.x0 and box.x1 <= edges.x1 + 1, text.get_text()
                assert edges.y0 - 1 <= box.y0 and box.y1 <= edges.y1 + 1, text.get_text()


@pytest.mark.parametrize("name", ["trie", "slots", "pace", "cost", "beams"])
def test_pictures_are_the_same_again_and_dark_if_wanted(name, tmp_path):
    light, again, dark = (PICTURES[name](records(), dark) for dark in (False, False, True))
    files = [picture.save(tmp_path / f"{i}.svg").read_bytes() for i, picture in enumerate((light, again, dark))]
    assert files[0] == files[1] != files[2] and b"date" not in files[0]
    assert dark.save(tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert str(light) == str(dark)
    for picture, theme in ((light, viz.theme_of(False)), (dark, viz.theme_of(True))):
        assert to_hex(picture.figure.get_facecolor(), keep_alpha=True) == theme.paper + "ff"  # opaque


def test_a_picture_is_saved_whole_or_not_at_all(tmp_path):
    picture = PICTURES["slots, prefill"](records(), False)
    for name in ("a.pdf", "a", "a.svg.gz"):
        with pytest.raises(ValueError, match=r"\.svg or \.png"):
            picture.save(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        picture.save(tmp_path / "none" / "a.png")
    (tmp_path / "a.svg").write_text("old")
    picture.save(tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text() and len(list(tmp_path.iterdir())) == 1
    assert picture.save(tmp_path / "b.PNG").read_bytes() == picture._repr_png_()


@pytest.mark.slow
def test_pictures_leave_matplotlib_as_it_was():
    code = """if True:
        import matplotlib, sys
        matplotlib.rcParams.update({"font.size": 40, "svg.fonttype": "path", "lines.linewidth": 9})
        def now():  # (to ask for the backend chooses one)
            return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
        before = now()
        import viz
        from tree import DraftTree
        picture = viz.draw_draft(DraftTree([1, 2], [-1, 0]), str)
        assert len(picture._repr_png_()) > 1000 and "pyplot" not in " ".join(sys.modules)
        assert now() == before
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_labels_show_what_is_in_a_token():
    for text, shown in (
        (" 12", "␣12"), ("\n\n", "\\n\\n"), ("$a_1$", "$a_1$"), ("中", "\\u4e2d"), ("\x07é", "\\x07é"),
        ("🙂", "\\U0001f642"),
        ("", "(none)"), ("a" * 13, "a" * 11 + "…"), ("\u200b", "\\u200b"), ("\ufffd", "\ufffd"),
    ):  # fmt: skip
        assert viz.label(text) == shown
    # in the file the signs stand as they are: no formula was made of them
    tree = DraftTree([1, 2], [-1, -1])
    picture = viz.draw_draft(tree, lambda ids: "$x^2$" if ids == [1] else " <b>")
    words = [text.get_text() for text in picture.figure.findobj(Text)]
    assert "$x^2$" in words and "␣<b>" in words and not any(t.get_parse_math() for t in picture.figure.axes[0].texts)


def test_a_character_of_several_tokens_stands_once():
    tokenizer = Tokenizer(4096)
    tokens = tokenizer.encode("é 中🙂x")
    assert "".join(viz._pieces(tokens, tokenizer.decode)) == "é 中🙂x" and len(tokens) > 6
    assert viz._pieces(tokens[:-2], tokenizer.decode)[-1] == "\ufffd"  # cut in the middle of the last character


def test_colours_can_be_told_apart():
    """Fills that mean different things, and the first lines, differ for people without red or without green cones
    (Vienot, Brettel, Mollon 1999) by at least 10 in CIELAB, and text on every fill has a contrast of 4.5 (WCAG)."""
    protan = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
    deutan = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

    def linear(colour: str) -> np.ndarray:
        rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)

    def lab(rgb: np.ndarray) -> np.ndarray:
        f = np.cbrt(np.maximum(xyz @ rgb / (xyz @ np.ones(3)), 0.008856))
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    for theme in (viz.theme_of(False), viz.theme_of(True)):
        fills = (theme.past, theme.root, theme.kept, theme.turns[1])
        for group in (fills, theme.turns, theme.series[:4]):
            for a, b in itertools.combinations(group, 2):
                for eye in (np.eye(3), protan, deutan):
                    assert np.linalg.norm(lab(eye @ linear(a)) - lab(eye @ linear(b))) > 10, (a, b)
        for fill in (theme.paper, *fills, *theme.turns):
            light, dim = sorted(((xyz @ linear(c))[1] + 0.05 for c in (fill, theme.ink)), reverse=True)
            assert light / dim > 4.5, fill


def test_draw_trie_counts_what_followed():
    r = records()
    for length in (1, 5, 9, 20):
        context = r.prompt + r.drafted.tokens[:length]
        longest = next(n for n in range(4, 0, -1) if r.trie.outputs.find(context[-n:]))
        followers = r.trie.outputs.find(context[-longest:])
        lines = str(viz.draw_trie(r.trie, context, r.tokenizer.decode, depth=1, width=3)).splitlines()
        assert lines[0].endswith(f"followed {followers.total} times") and lines[0].count("'") >= 2 * longest
        best = sorted(followers.items(), key=lambda item: (-item[1].count, item[0]))[:3]
        wanted = [f"-- {r.tokenizer.decode([token])!r} {node.count}" for token, node in best]
        assert [line[1:] for line in lines[1 : 1 + len(best)]] == wanted
        assert ("... and" in str(lines)) == (len(followers) > 3)
    small = TokenTrie(max_depth=3)
    small.insert([1, 2, 3, 4])
    told = str(viz.draw_trie(small, [1, 2], str, depth=3))
    assert told.splitlines()[1:3] == ["`-- '[3]' 1", "    `-- '[4]' 1 ~"] and "~ counted behind a shorter" in told
    for wrong in ({"depth": 0}, {"width": 0}):
        with pytest.raises(ValueError, match="1 or more"):
            viz.draw_trie(small, [1], str, **wrong)


def boxes_of(picture: viz.Picture, kind: str) -> int:
    return sum(patch.get_gid() == kind for patch in picture.figure.axes[0].patches) - 1  # one is in the legend


def test_draw_draft_shows_the_accepted_path():
    r = records()
    for step in r.drafted.steps:
        picture = viz.draw_draft(step, r.tokenizer.decode)
        assert boxes_of(picture, "kept") == len(step.accepted)
        assert boxes_of(picture, "rejected") == len(step.draft) - len(step.accepted)
        assert step.draft.render(r.tokenizer.decode, step.accepted) in str(picture)
        assert f"{len(step.accepted)} of {len(step.draft)} drafted node" in str(picture) or not step.draft
        assert all(repr(r.tokenizer.decode([token])) in str(picture) for token in step.tokens)
        assert boxes_of(viz.draw_draft(step.draft, r.tokenizer.decode), "plain") == len(step.draft)
    # too many for the sheet: what is left out is counted
    for tree, decode_one in ((awkward_tree(), awkward), (CHAIN, str)):
        picture = viz.draw_draft(tree, decode_one)
        words = " ".join(text.get_text() for text in picture.figure.axes[0].texts)
        assert f"... and {64 - boxes_of(picture, 'plain')} more nodes" in words
        hidden = [int(word) for word in words.split() if word[0] == "+" and word[1:].isdigit()]
        assert sum(hidden) == 64 - boxes_of(picture, "plain")
    deep = lookahead.Step(9, CHAIN, list(range(64)), [*range(64), 5], lookahead.Seconds(0, 0, 0))
    assert boxes_of(viz.draw_draft(deep, str), "kept") > 5


def test_draw_mask_is_the_mask():
    rng = random.Random(3)
    for n in (0, 1, 5, 12, 24):
        tree = random_tree(rng, n, 20)
        picture = viz.draw_mask(tree, str, prefix=[7, 8])
        assert len(cells(picture, "kept")) == int(tree.mask().sum())
        assert len(cells(picture, "past")) == 2 * (n + 1)
        rows = [line.split("| ")[1].split() for line in str(picture).splitlines()[1:]]
        assert [[sign == "x" for sign in row] for row in rows] == tree.mask().tolist()
        # and each where it belongs: row and column from the place of the drawn cell
        every = cells(picture, "kept") + cells(picture, "empty")
        side, left, top = every[0].get_width(), min(c.get_x() for c in every), min(c.get_y() for c in every)
        seen = {(round((c.get_y() - top) / side), round((c.get_x() - left) / side)) for c in cells(picture, "kept")}
        assert seen == {tuple(pair) for pair in tree.mask().nonzero().tolist()}


@pytest.mark.parametrize("seed", range(6))
def test_draw_slots_tells_what_the_cache_did(seed, monkeypatch):
    """Against a cache that writes down what is done to it."""
    rng, model = random.Random(seed), toy()
    prompt = [rng.randrange(29) for _ in range(rng.randint(1, 12))]
    truth = generate(model, prompt, max_new_tokens=30).tokens
    drafter = OracleDrafter(seed, 29, truth, rng.randint(1, 4)) if seed % 3 else RandomDrafter(seed, 29)
    calls, keep = [], KVCache.keep

    def watched(self, start, slots):
        calls.append((self.length, start, [int(slot) for slot in slots]))
        keep(self, start, slots)
        calls[-1] += (self.length,)

    monkeypatch.setattr(KVCache, "keep", watched)
    generation = generate(model, prompt, drafter=drafter, budget=rng.randint(1, 9), max_new_tokens=rng.randint(2, 30))
    assert len(calls) == len(generation.steps)
    lines = str(viz.draw_slots(generation)).splitlines()
    assert lines[0] == f"prefill: {len(prompt)} slot{'s' * (len(prompt) > 1)} committed"
    for step, (before, start, slots, after), line in zip(generation.steps, calls, lines[1:]):
        base, kinds, moves = viz.slots_of(step)
        assert (base, base + len(kinds)) == (start, before)  # what was committed, and what the pass wrote
        assert [base] + [source for source, _ in moves] == slots
        assert [target for _, target in moves] == list(range(start + 1, start + len(slots)))
        assert {base + i for i, kind in enumerate(kinds) if kind == "kept"} == set(slots) - {base}
        assert f"from slot {start}: " in line and f"{after} slots committed" in line
        assert f"kept {len(slots) - 1}, freed {before - start - len(slots)}," in line
    # the drawing: so many cells of each kind, the kept ones in their columns, a line for each that moves
    for first in range(0, len(generation.steps), 5):
        part, done = generation.steps[first : first + 5], calls[first : first + 5]
        picture = viz.draw_slots(part)
        assert len(cells(picture, "kept")) == sum(len(step.accepted) for step in part)
        assert len(cells(picture, "root")) == len(part)
        freed = sum(len(step.draft) - len(step.accepted) for step in part)
        assert len(cells(picture, "freed")) == freed
        moved = sum(a != b for step in part for a, b in viz.slots_of(step)[2])
        assert len(picture.figure.axes[0].lines) == moved
        roots = {round(cell.get_y(), 3): cell for cell in cells(picture, "root")}
        for y, (_, start, slots, _) in zip(sorted(roots), done):
            columns = {
                round((cell.get_x() - roots[y].get_x()) / cell.get_width())
                for cell in cells(picture, "kept")
                if round(cell.get_y(), 3) == y
            }
            assert columns == {slot - start for slot in slots[1:]}


def test_draw_slots_of_a_long_decode_says_what_is_left_out():
    model = toy(n_ctx=256)
    generation = generate(model, [1, 2, 3], max_new_tokens=200)
    picture = viz.draw_slots(generation)
    drawn = len(cells(picture, "root"))
    words = [text.get_text() for text in picture.figure.axes[0].texts]
    assert drawn < len(generation.steps) == 199 and f"... and {199 - drawn} more passes." in words
    assert len(str(picture).splitlines()) == 201
    # more slots than columns, the accepted one out of sight: the pass is drawn, and what is missing is said
    far = lookahead.Step(4, DraftTree(range(300), [-1] * 300), [250], [250, 5], lookahead.Seconds(0, 0, 0))
    picture = viz.draw_slots([generation.prefill, far])
    assert len(cells(picture, "root")) == 1
    assert "; 1 of those moved to the left." in " ".join(text.get_text() for text in picture.figure.axes[0].texts)
    full = generate(toy(n_ctx=8), [1] * 8, max_new_tokens=3)  # no room for a token: no pass
    assert full.tokens == [] and "0 passes" in str(viz.draw_slots(full)) and str(viz.draw_text(full, str))


def test_draw_text_and_pace_tell_the_records():
    r = records()
    picture = viz.draw_text(r.drafted, r.tokenizer.decode)
    lines = str(picture).splitlines()
    assert f"{r.drafted.tokens_per_step:.2f} tokens per step" in lines[0] and len(lines) == len(r.drafted.steps) + 3
    for number, (step, line) in enumerate(zip(r.drafted.steps, lines[2:]), 1):
        assert line.startswith(f"{number}: ") and line.count("'* ") + line.endswith("*") == len(step.accepted)
    assert len(picture.figure.axes[0].lines) == sum(len(step.accepted) for step in r.drafted.steps)
    patches = picture.figure.axes[0].patches
    assert [int(p.get_gid()[-1]) for p in patches] == [
        n % 4 for n, step in enumerate([r.drafted.prefill, *r.drafted.steps]) for _ in step.tokens
    ]
    table = str(viz.draw_pace({"plain": r.plain, "drafted": r.drafted, "one": r.alone})).splitlines()
    assert [line.split()[1:4] for line in table[1:]] == [
        [str(len(g.tokens)), str(len(g.steps)), f"{g.tokens_per_step:.2f}" if g.steps else "-"]
        for g in (r.plain, r.drafted, r.alone)
    ]
    axes = viz.draw_pace({"drafted": r.drafted}).figure.axes
    times = list(itertools.accumulate(sum(step.seconds) for step in [r.drafted.prefill, *r.drafted.steps]))
    assert axes[1].lines[0].get_xdata() == pytest.approx(times)
    assert list(axes[0].lines[0].get_ydata())[-1] == len(r.drafted.tokens)


def test_draw_beams_knows_heirs_and_dead_ends():
    r = records()
    lines, final = str(viz.draw_beams(r.beams, r.tokenizer.decode)).splitlines(), r.beams[-1]
    best = max(final.hypotheses, key=lambda h: h.score)
    texts = [b.tokens for b in final.beams] + [tuple(h.tokens) for h in final.hypotheses]
    wanted = []
    for step in r.beams:
        for b in step.beams:
            n = len(b.tokens)
            lives = any(text[:n] == b.tokens for text in texts)
            wanted.append(
                "on the way to the best" if tuple(best.tokens[:n]) == b.tokens else "lives on" if lives else "dead end"
            )
    assert [line.split("  ")[-1] for line in lines if " from " in line] == wanted and "dead end" in wanted
    assert lines[-1].endswith(f"score {best.score:.2f}") and f"score {best.score:.2f} (best)" in "\n".join(lines)
    picture = viz.draw_beams(r.beams[:4], r.tokenizer.decode)
    assert boxes_of(picture, "kept") + boxes_of(picture, "plain") + boxes_of(picture, "rejected") == sum(
        len(step.beams) for step in r.beams[:4]
    )


@pytest.mark.parametrize("seed", range(8))
def test_draw_beam_slots_agrees_with_the_ledger(seed, monkeypatch):
    """What is drawn of the beams alone is what the two strategies really did, move by move."""
    rng, model = random.Random(seed), toy()
    prompt = [rng.randrange(29) for _ in range(rng.randint(1, 9))]
    settings = {"num_beams": rng.randint(1, 5), "max_new_tokens": rng.randint(1, 9), "stop_ids": [3, 11][: seed % 3]}
    steps, moves = [], []
    for step in beam.beam_steps(model, prompt, strategy="swap", **settings):
        steps.append(step)
        moves.append([move for move in step.ledger.moves if "forward" not in move and "a cache of" not in move])
    forwards, freed = beamviz.lanes(steps)
    owner = {}
    for forward, gone, told in zip(forwards, freed, moves):
        mine = [f"cache {owner[lane]} freed" for lane in gone]
        for cache in forward[:] if owner else []:
            verb = "takes over" if cache.how == "takes over" else "forks"
            mine.append(f"beam {cache.beam} {verb} the cache of {owner[cache.source]}")
        assert [move.split(":")[0] for move in told] == mine
        owner = {cache.lane: cache.beam for cache in forward}
        assert sorted(owner.values()) == list(range(len(forward))) and max(owner) < settings["num_beams"]
    ledger, bytes_of_slot = steps[-1].ledger, model.new_cache(1).nbytes
    hows = Counter(cache.how for forward in forwards for cache in forward)
    assert (hows["takes over"], hows["forks"]) == (ledger.takeovers, ledger.forks)
    assert sum(map(len, freed)) + len(forwards[-1]) == ledger.frees
    last = str(viz.draw_beam_slots(steps, len(prompt))).splitlines()[-1]
    assert f"{ledger.takeovers} taken over, {ledger.forks} forked" in last
    assert f" {ledger.peak_used // bytes_of_slot} slots in use" in last

    kept, keep = [], KVCache.keep

    def watched(self, start, slots):
        kept.append([int(slot) for slot in slots])
        keep(self, start, slots)

    monkeypatch.setattr(KVCache, "keep", watched)
    steps, rows, closed = [], [], []
    for step in beam.beam_steps(model, prompt, strategy="tree", **settings):
        steps.append(step)
        rows.append(int(step.ledger.moves[-1].split()[2]))
        closed.append(kept.pop() if kept else None)
    shared = beamviz.shared_slots(steps)
    assert rows[0] == len(prompt) and shared[0] == []
    for before, now, new, slots in zip(shared, shared[1:], rows[1:], closed[1:]):
        stays = [i for i, (node, _) in enumerate(before) if node in dict(now)]
        assert slots == ([len(prompt) + i for i in stays] if len(stays) < len(before) else None)
        assert [node for node, _ in now] == [before[i][0] for i in stays] + [node for node, _ in now[len(stays) :]]
        assert len(now) - len(stays) == new
    text = str(viz.draw_beam_slots(steps, len(prompt), strategy="tree"))
    most = max(map(len, shared))
    assert (len(prompt) + most) * bytes_of_slot == steps[-1].ledger.peak_used
    assert f"at most {len(prompt)} + {most} slots; " in text
    assert f" a cache for each beam would hold {ledger.peak_used // bytes_of_slot} " in text
    picture = viz.draw_beam_slots(steps, len(prompt), strategy="tree")
    if most <= 40:
        assert sum(len(cells(picture, kind)) for kind in ("turn0", "kept", "end")) == sum(map(len, shared))
    with pytest.raises(ValueError, match="strategy"):
        viz.draw_beam_slots(steps, len(prompt), strategy="lookahead")


def test_draw_beam_slots_without_a_pass_and_of_a_part():
    nothing = list(beam.beam_steps(toy(), [1, 2], num_beams=2, max_new_tokens=0))
    assert viz.draw_beams(nothing, str) and viz.draw_beam_slots(nothing, 2) and beamviz.lanes(nothing) == ([], [])
    steps = list(beam.beam_steps(toy(), [1, 2], num_beams=3, max_new_tokens=9))
    whole, part = beamviz.shared_slots(steps), beamviz.shared_slots(steps[3:])
    assert [sorted(forward) for forward in part] == [sorted(forward) for forward in whole[4:]]
    assert [len(forward) for forward in beamviz.lanes(steps[3:])[0]] == [len(f) for f in beamviz.lanes(steps)[0][4:]]


# --- plots.py ---------------------------------------------------------------------------------------------------------


def test_plots_of_all_measurements(tmp_path):
    rows = {
        "cost": [{"prefix": p, "rows": n, "ms": n + p / 9} | BOUNDS for p in (8, 64) for n in (1, 4)],
        "growth": [{"tokens": n, "retrieve_us": 100.0 + n, "insert_us": 9.0} for n in (1000, 10000)],
        "speed": [{"decoder": name, "tokens_per_s": 50.5} for name in ("plain", "lookahead auto", "transformers $")],
        "drafters": [{"drafter": name, "tokens_per_step": 1.5, "tokens_per_s": 99.0} for name in ("plain", "trie")],
        "beam": [
            {"strategy": name, "num_beams": n, "steps_per_s": 9.0, "used_mb": 0.5}
            for n in (2, 4) for name in ("swap", "tree")
        ],
        "replay": [
            Row(mode, budget, budget - 1.0, 2.5, 1.0, 1.0, 1.0, 9, 99, 1.0, [3, 2, 1], [(300, 30.0, 33)] * 3)
            for mode in MODES for budget in (4, 9)
        ],
        "search": [],
    }  # fmt: skip
    assert set(plots.FILES) == set(rows) - {"search"}
    for name, mine in rows.items():
        files = plots.write(name, mine, tmp_path, f"{name} of $5_each$ and more", dark=True, suffix=".svg")
        assert [file.name for file in files] == [f"{stem}.svg" for stem in plots.FILES.get(name, {})]
        for stem, draw in plots.FILES.get(name, {}).items():
            picture = draw(mine, "A long title, which tells machine and settings, has two lines or three. " * 3)
            assert picture.figure._suptitle.get_window_extent().x1 < picture.figure.bbox.x1
            assert len(str(picture).splitlines()) >= 2, stem
            assert all(text.get_fontsize() >= 9 for text in picture.figure.findobj(Text) if text.get_text())
    assert plots.draw_cost_by_prefix(rows["cost"][:2]) is None
    assert plots.draw_replay_honesty([Row("single", 4, 3.0, 2.0, 1.0, 1.0, 1.0, 9, 99)]) is None
    assert "50.5" in str(plots.draw_speed(rows["speed"])) and viz.draw_cost is plots.draw_cost


# --- pictures.py: the README's pictures -------------------------------------------------------------------------------


def test_pictures_of_the_readme(tmp_path, monkeypatch):
    """Both are whole XML without a script, and show the text that was written and the step that was taken."""
    r = records()
    tokenizer, prompt, ahead, plain = r.tokenizer, r.prompt, r.drafted, r.plain
    whole = pictures.recording(plain, ahead, tokenizer)
    step = max(ahead.steps, key=lambda step: len(step.accepted))
    before = [*prompt, *ahead.tokens][: step.position]
    for text in (whole, pictures.idea(step, before, tokenizer.decode)):
        root = ElementTree.fromstring(text)
        assert "script" not in text and root.find("{http://www.w3.org/2000/svg}title").text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    words = "".join("".join(text.itertext()) for text in ElementTree.fromstring(whole).iter()
                    if text.get("class") in ("", "kept") and text.tag.endswith("text"))  # fmt: skip
    written = tokenizer.decode([t for t in plain.tokens if t != tokenizer.eot]).replace("\n", "")
    assert words.replace("\n", "") == 2 * written
    for name in ("recording.svg", "idea.svg"):
        ElementTree.parse(ROOT / "assets" / name)


# --- page.py: the step-through page -----------------------------------------------------------------------------------


def recorded(steps: list[Any], tokenizer: Tokenizer, prompt: list[int]) -> dict[str, Any]:
    recorder = page.Recorder(tokenizer, prompt)
    for step in steps:
        recorder.add(step)
    return recorder.record


@pytest.mark.parametrize("picker", [Greedy(), Sampler(1.2, seed=3)], ids=["greedy", "sampled"])
def test_record_of_a_decode_is_what_happened(picker):
    """Steps, slots and text against the decode; probabilities against a softmax in float64."""
    r = records()
    tokenizer, trie, prompt = r.tokenizer, r.trie, r.prompt
    model = bundled("tiny")
    steps = list(decode(model, prompt, drafter=copy.deepcopy(trie), picker=picker, budget=9, max_new_tokens=40))
    record = recorded(steps, tokenizer, prompt)
    assert [token for step in record["steps"] for token in step["tokens"]] == [t for s in steps for t in s.tokens]
    length = 0
    for step, told in zip(steps, record["steps"]):
        assert told["accepted"] == step.accepted and told["draft"]["parents"] == step.draft.parents
        assert told["base"] == length
        length += len(told["kept"])
        assert told["kept"][1 if not step.prefill else len(prompt) :] == [told["base"] + 1 + n for n in step.accepted]
        p = step.logits.double().softmax(-1)
        assert len(told["top"]) == len(p)
        for row, said in zip(p, told["top"]):
            assert [token for token, _ in said[:5]] == row.topk(5).indices.tolist()
            assert all(abs(q - float(row[token])) <= 0.005 * float(row[token]) + 1e-12 for token, q in said)
    assert length == len(prompt) + sum(len(s.tokens) for s in steps) - 1
    text = record["prompt"]["text"] + "".join(piece for step in record["steps"] for piece in step["pieces"])
    emitted = [token for step in steps for token in step.tokens if token != tokenizer.eot]
    assert text + record["tail"] == tokenizer.decode([*prompt, *emitted])


NASTY = (
    'Question: </script><script>document.title="caught"</script><!-- {{text}} {{record}} \u2028 & "x" '
    "<img src=x onerror=document.title='caught'> \u4e2d \U0001f600?\nAnswer:"
)


def test_page_is_one_file_that_text_cannot_break(tmp_path):
    """Its record reads back as it was, whatever the text; no address of the network stands in it; it is small."""
    tokenizer = records().tokenizer
    model, prompt = bundled("tiny"), tokenizer.encode(NASTY)
    steps = list(decode(model, prompt, drafter=TokenTrie(model.vocab_size), budget=8, max_new_tokens=20))
    text = page.write(tmp_path / "a.html", steps, tokenizer, prompt, about="</title><b>").read_text(encoding="utf-8")
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.S)[1]
    assert json.loads(found) == recorded(steps, tokenizer, prompt) | {"about": "</title><b>"}
    assert "<img" not in text and "</title><b>" not in text and text.count("</script>") == 2
    template = page.TEMPLATE.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?!["']?data:)|url\(|@import|https?://""", template)
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_page_of_200_tokens_stays_small(tmp_path):
    """Under 3 MB with the largest drafts that the budget makes."""
    r = records()
    tokenizer, trie, prompt = r.tokenizer, r.trie, r.prompt
    steps = decode(bundled("tiny"), prompt, drafter=copy.deepcopy(trie), budget=MOST, max_new_tokens=200)
    size = page.write(tmp_path / "a.html", steps, tokenizer, prompt).stat().st_size
    assert 50_000 < size < 3_000_000


def test_wrong_uses_of_the_page_are_told(tmp_path, capsys):
    r = records()
    tokenizer, prompt, ahead = r.tokenizer, r.prompt, r.drafted
    with pytest.raises(ValueError, match="give all steps of one decode"):
        recorded(list(ahead.steps), tokenizer, prompt)
    with pytest.raises(ValueError, match="no step to show"):
        page.write(tmp_path / "a.html", [], tokenizer, prompt)
    for where, why in ((tmp_path / "no" / "a.html", "no such folder"), (tmp_path, "it is a folder"),
                       ("-", "give its name"), ("", "without a name")):  # fmt: skip
        assert cli.main(["--prompt", BAKER, "--html", str(where)]) == 2
        assert why in capsys.readouterr().err
    for option in (["--interactive"], ["--num-beams", "2"], ["--search", "mcts"],
                   ["--num-return-sequences", "2", "--temperature", "1"]):  # fmt: skip
        prompt = [] if option == ["--interactive"] else ["--prompt", BAKER]
        assert cli.main([*prompt, "--html", str(tmp_path / "a.html"), *option]) == 2
        assert "--html" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert cli.main(["--prompt", BAKER, "--html", str(tmp_path / "a.html"), "--max-new-tokens", "9", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["text"] in json_of(tmp_path / "a.html")["told"]


def json_of(path: Path) -> dict[str, Any]:
    found = re.search(r'type="application/json"[^>]*>(.*?)</script>', path.read_text(encoding="utf-8"), re.S)[1]
    record = json.loads(found)
    return record | {"told": "".join(piece for step in record["steps"] for piece in step["pieces"])}


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """Headless Chromium, spoken to in its DevTools protocol: JSON messages, each ended by NUL, through two pipes."""

    FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe")  # fmt: skip
    KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        there, self.out = os.pipe()
        self.inward, here = os.pipe()
        # The browser reads from descriptor 3 and writes to 4: a small Python puts the pipes there and becomes it. They
        # may be 3 and 4 themselves, in the wrong order, so both go out of the way first.
        far = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (there, here)]
        begin = f"import os, sys; os.dup2({far[0]}, 3); os.dup2({far[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", begin, CHROMIUM, *self.FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=far, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for end in (there, here, *far):
            os.close(end)
        self.number, self.waiting, self.events, self.session = 0, b"", [], None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self.waiting:
            assert select.select([self.inward], [], [], 60)[0], "the browser does not answer"
            self.waiting += os.read(self.inward, 1 << 20)
        one, self.waiting = self.waiting.split(b"\0", 1)
        return json.loads(one)

    def ask(self, script: str) -> Any:
        answer = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, address: str) -> None:
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=address)
        for _ in range(400):  # the page adds the step to its address
            if self.ask("document.readyState + location.href").startswith("complete" + address):
                return
            time.sleep(0.05)
        raise AssertionError(f"{address} does not open")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=self.KEYS[key])

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.out)
        os.close(self.inward)


@pytest.fixture
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    folder = tmp_path_factory.mktemp("browser")
    browser = Browser(folder)
    yield browser
    browser.close()
    trouble = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    assert not [event for event in browser.events if event.get("method") in trouble]
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "data:", "about:")) for url in asked)


@pytest.mark.slow
def test_page_steps_forward_and_back_in_a_browser(browser, tmp_path):
    """Real keys; after each the page must show the record's step: text, accepted tokens, tree, mask, slots."""
    r = records()
    tokenizer, trie, prompt = r.tokenizer, r.trie, r.prompt
    steps = list(decode(bundled("tiny"), prompt, drafter=copy.deepcopy(trie), budget=12, max_new_tokens=40))
    path = page.write(tmp_path / "trace.html", steps, tokenizer, prompt)
    record = json_of(path)["steps"]
    browser.open(f"file://{path}")
    last = len(steps) - 1

    def check(number: int) -> None:
        told = record[number]
        text = json_of(path)["prompt"]["text"] + "".join(p for step in record[: number + 1] for p in step["pieces"])
        assert browser.ask("document.querySelector('#where').textContent").startswith(
            "Prefill" if number == 0 else f"Step {number} of {last}"
        )
        assert browser.ask("document.querySelector('#text').textContent").rstrip("\n") == text.rstrip("\n")
        lit = browser.ask("[...document.querySelectorAll('#text .kept')].map(e => e.textContent).join('')")
        assert lit == "".join(told["pieces"][: len(told["accepted"])])
        nodes = browser.ask("document.querySelectorAll('#tree .node').length")
        assert nodes >= 1 + len(told["draft"]["tokens"])
        rows = browser.ask("document.querySelectorAll('#mask tbody tr').length")
        if not told["prefill"]:
            assert rows == 1 + len(told["draft"]["tokens"])
            assert browser.ask("document.querySelectorAll('#mask tbody tr:last-child td').length") >= rows
        said = browser.ask("document.querySelector('#said').textContent")
        if told["draft"]["tokens"]:
            assert f"{len(told['accepted']) or 'none'} of {len(told['draft']['tokens'])} drafted" in said
        assert browser.ask("location.hash") in ("", f"#step={number}")

    check(0)
    for number in range(1, last + 1):
        browser.press("ArrowRight")
        check(number)
    browser.press("ArrowRight")
    check(last)  # nothing behind the end
    browser.press("ArrowLeft")
    check(last - 1)
    browser.press("Home")
    check(0)
    browser.press("End")
    check(last)
    browser.ask(
        "(() => { const s = document.querySelector('#slider'); s.value = 3; s.dispatchEvent(new Event('input')) })()"
    )
    check(3)
    browser.open(f"file://{path}#step=5")
    check(5)


@pytest.mark.slow
def test_page_is_for_phones_and_for_screen_readers(browser, tmp_path):
    """At 360 pixels nothing sticks out sideways, with drafts of 64 nodes too; every control has a name; what a step did
    is announced; hostile text runs nothing."""
    r = records()
    tokenizer, trie, prompt = r.tokenizer, r.trie, r.prompt
    steps = decode(bundled("tiny"), prompt, drafter=copy.deepcopy(trie), budget=64, max_new_tokens=30)
    path = page.write(tmp_path / "trace.html", steps, tokenizer, prompt)
    for width, scheme in ((360, "light"), (360, "dark"), (1280, "dark")):
        browser("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser("Emulation.setDeviceMetricsOverride", width=width, height=740, deviceScaleFactor=1, mobile=width < 600)
        browser.open(f"file://{path}#step=2")
        assert browser.ask("document.scrollingElement.scrollWidth") <= width
        assert browser.ask("innerWidth") == width
    nodes = browser("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    controls = [name for role, name in named if role in ("button", "slider")]
    assert len(controls) == 6 and all(controls)
    assert {"main", "navigation", "heading", "status", "table"} <= {role for role, _ in named}
    assert browser.ask("document.querySelector('#said').getAttribute('aria-live')") == "polite"
    assert browser.ask("document.documentElement.lang") == "en" and browser.ask("document.title")

    nasty = tokenizer.encode(NASTY)
    path = page.write(tmp_path / "nasty.html", decode(bundled("tiny"), nasty, max_new_tokens=12), tokenizer, nasty)
    browser.open(f"file://{path}#step=2")
    assert browser.ask("document.title") != "caught" and browser.ask("document.images.length") == 0
    assert browser.ask("document.querySelector('#text').textContent").startswith(NASTY)


# --- the repository -------------------------------------------------------------------------------------------------


def test_examples_of_the_readme_run(tmp_path, capsys, monkeypatch):
    """Each block of Python in it, in a namespace of its own; the wrapped network writes the same with lookahead."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    told = capsys.readouterr().out
    assert "boxes" in told or "eggs" in told
    assert re.search(r"^True \d\.\d\d tokens per step\nHypothesis", told, re.M)


def python_files() -> list[str]:
    """The repository's Python files: those that git knows, so that a reader's own may lie beside them; else all."""
    command = ["git", "ls-files", "*.py"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout if shutil.which("git") else ""
    return known.split() or [path.name for path in ROOT.glob("*.py")]


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"(?m)^#+ (.+)$", text)}
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert len(links) > 30
    for link in links:
        file, _, anchor = link.partition("#")
        assert (ROOT / file).exists() and (file or anchor in headings), link
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (ROOT / name).exists(), name
    table = dict(re.findall(r"(?m)^\| `(\w+\.py)` \| (\d+) \|", text))
    for name in python_files():  # every file has its line in the table of files
        assert f"`{name}`" in text, f"{name} is missing in the README's table of files"
    for name, lines in table.items():  # whoever edits a file to learn from it may make it longer
        found = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert abs(int(lines) - found) <= 20, f"the README says that {name} has {lines} lines, it has {found}"


def test_bundled_models_are_what_the_card_says():
    size = 0
    for name in weights.BUNDLED:
        folder = ROOT / "models" / name
        assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors"}
        size += sum(p.stat().st_size for p in folder.iterdir())
        model = bundled(name)
        assert model.vocab_size == 4096 and model.n_ctx == 512
        count = f"{sum(p.numel() for p in model.parameters()):,}"
        assert count in (ROOT / "models" / "README.md").read_text(encoding="utf-8"), f"{name} has {count} parameters"
    assert size <= 32 * 2**20


def test_shipped_responses_are_the_models_own():
    """assets/responses.jsonl holds what tiny answers to generated problems; three are written again here."""
    records = [json.loads(line) for line in (ROOT / "assets" / "responses.jsonl").read_text().splitlines()]
    assert len(records) == len({record["prompt"] for record in records}) == 200
    model, tokenizer = bundled("tiny"), Tokenizer(4096)
    for record in records[::67]:
        prompt = tokenizer.encode(record["prompt"])
        again = generate(model, prompt, stop_ids=(tokenizer.eot,), max_new_tokens=200).tokens
        stored = [*tokenizer.encode(record["response"]), tokenizer.eot]
        text = tokenizer.decode(t for t in again if t != tokenizer.eot)
        assert text == record["response"] or near_tie(bundled("tiny", torch.float64), prompt, again, stored).gap < 1e-4


# --- the notebooks --------------------------------------------------------------------------------------------------

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXERCISES = ROOT / "notebooks" / "08_your_turn.ipynb"


def cells_of(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def printed(cells: list[dict]) -> str:
    """All that the cells wrote, but for images: streams, values and the text twins of pictures."""
    found = []
    for cell in cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            texts = [output.get("text", ""), *(data[kind] for kind in data if kind != "image/png")]
            found += ["".join(text) for text in texts if not isinstance(text, dict)]
    return "".join(found)


def run_notebook(path: Path, replaced: dict[int, str] | None = None) -> list[dict]:
    """Executes a notebook top to bottom in a kernel of its own, some cells' sources replaced; raises on any error."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, 4)
    for number, source in (replaced or {}).items():
        notebook.cells[number]["source"] = source
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    return [dict(cell) for cell in notebook.cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path):
    run_notebook(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_as_it_ran(path):
    """With outputs, without errors, run once from top to bottom; no paths of the machine that it ran on; not large."""
    cells = [cell for cell in cells_of(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds and "error" not in kinds and printed(cells).strip()
    text = "\n".join(cell["source"] for cell in cells_of(path)) + printed(cells)
    for place in (
        r"/(?:home|root|tmp|work|Users|usr|opt|private)/\w",
        r"\b[A-Z]:\\\w",
        "site-packages",
        r"ipykernel_\d",
    ):
        found = re.search(place, text)
        assert not found, f"a path of some machine: {text[max(found.start() - 40, 0) : found.end() + 40]!r}"
    assert path.stat().st_size < 1.5e6


def test_notebooks_begin_alike():
    """All have the same setup cell, so each can be opened alone."""
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{n:02}" for n in range(1, len(NOTEBOOKS) + 1)]
    first = {next(c["source"] for c in cells_of(path) if c["cell_type"] == "code") for path in NOTEBOOKS}
    assert len(first) == 1 and "sys.path.insert(0, os.getcwd())" in first.pop()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_its_parts(path):
    cells = cells_of(path)
    text = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    assert cells[0]["source"].startswith(f"# {path.name[:2]} ") and cells[1]["cell_type"] == "code"
    assert "At its end you can" in cells[0]["source"]
    assert "\n## Questions to think about" in text and text.count("<details>") == text.count("</details>") > 0
    headings = re.findall(r"(?m)^## (\d+)\. \S", text)
    assert headings == [str(n) for n in range(1, len(headings) + 1)] and len(headings) >= 5
    following = [other for other in NOTEBOOKS if other.name > path.name][:1]
    links = re.findall(r"(?m)^Next: \[.+\]\((.+)\)\s*$", text)
    assert links == [other.name for other in following]
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link and not link.startswith(("#", "attachment:")):
            assert (path.parent / link.partition("#")[0]).exists(), f"{link} leads nowhere"


def test_what_is_said_about_notebooks_leads_somewhere():
    """Wherever it says "notebook 03, section 2", there is such a section."""
    sections = {
        path.name[:2]: set(re.findall(r"(?m)^## (\d+)\.", "\n".join(cell["source"] for cell in cells_of(path))))
        for path in NOTEBOOKS
    }
    texts = {path.name: path.read_text(encoding="utf-8") for path in map(ROOT.joinpath, [*python_files(), "README.md"])}
    texts.pop("test_all.py")
    texts |= {path.name: "\n".join(cell["source"] for cell in cells_of(path)) for path in NOTEBOOKS}
    said = r"[Nn]otebook\s+(\d\d)(?:\]\([^)]*\))?\)?(?:,\s+sections?\s+(\d+)(?:\s+(?:and|to)\s+(\d+))?)?"
    for name, text in texts.items():
        for number, *named in re.findall(said, re.sub(r"\n\s*#?\s*", " ", text)):
            assert number in sections, f"{name} names notebook {number}"
            missing = set(filter(None, named)) - sections[number]
            assert not missing, f"{name} names section {missing} of notebook {number}"


def exercises() -> dict[int, tuple[int, str]]:
    """For each exercise of notebook 08 the number of its stub's cell, and its solution."""
    found, stub = {}, (0, 0)
    for number, cell in enumerate(cells_of(EXERCISES)):
        if cell["cell_type"] == "code" and (first := re.match(r"# Exercise (\d+)\n", cell["source"])):
            stub = int(first[1]), number
        for code, exercise in re.findall(r"~~~python\n(# Exercise (\d+)\n.*?)\n~~~\n", cell["source"], re.S):
            assert stub[0] == int(exercise) and stub[0] not in found, "a solution stands behind its own exercise"
            found[stub[0]] = stub[1], code
    assert sorted(found) == list(range(1, 9))
    return found


def verdicts(text: str) -> dict[int, str]:
    return {int(number): said for number, said in re.findall(r"(?m)^Exercise (\d+): (.*)$", text)}


@pytest.mark.slow
def test_every_solution_of_the_exercises_is_right():
    cells = run_notebook(EXERCISES, dict(exercises().values()))
    assert verdicts(printed(cells)) == dict.fromkeys(range(1, 9), "right")


def test_exercises_are_stored_unsolved():
    cells = cells_of(EXERCISES)
    assert verdicts(printed(cells)) == dict.fromkeys(range(1, 9), "not solved yet")
    for number, (cell, solution) in exercises().items():
        assert cells[cell]["source"] != solution.strip() and "return ..." in cells[cell]["source"], number


# For each exercise plausible solutions that are wrong: what is replaced in the right one, by what, and a part of what
# must be said about it.
WRONG: dict[int, list[tuple[str, str, str]]] = {
    1: [
        ("mask[node + 1] = mask[parent + 1]", "mask[node + 1, [0, parent + 1]] = True", "row 3 should be"),
        ("mask[node + 1] = mask[parent + 1]", "mask[node + 1, : node + 1] = True", "row 4 should be"),
        ("mask[0, 0] = True", "pass", "row 0 should be [1]"),
        ("return mask", "return mask[1:, 1:]", "the shape should be (1, 1)"),
        ("return mask", "return mask.T", "row 0 should be"),
        ("return mask", "return mask.float()", "torch.bool"),
    ],
    2: [
        ("return accepted, tokens", "return accepted, tokens[:-1]", "it should be"),
        ("picks[node + 1]", "picks[node]", "it should be"),
        (".get(picks[node + 1])", ".get(picks[node])", "it should be"),
        ("accepted.append(child)", "accepted.append(draft.tokens[child])", "it should be"),
        ("draft.children[node].get(picks[node + 1])", "next(iter(draft.children[node].values()), None)",
         "it should be"),
        ("accepted.append(child)", "accepted.append(child)\n        return accepted, tokens", "it should be"),
    ],
    3: [
        ("(logits / temperature + noise)", "(logits + noise)", "it should be token"),
        ("(logits / temperature + noise)", "((logits + noise) / temperature)", "it should be token"),
        ("seed, position, len", "seed + position, 0, len", "it should be token"),
        ("-torch.log(-torch.log(hash_uniform(seed, position, len(logits))))",
         "-torch.log(hash_uniform(seed, position, len(logits)))", "it should be token"),
        ("+ noise", "- noise", "it should be token"),
        ("(logits / temperature + noise).argmax()",
         "torch.multinomial((logits / temperature).softmax(-1), 1)", "it should be token"),
    ],
    4: [
        ("self.text += tokens", "pass", "tokens per step"),
        ("for size in (2, 1):", "for size in ():", "tokens per step"),
        ("copied = self.text[end : end + budget]", "copied = self.text[-1:] * budget", "tokens per step"),
        ("end + budget]", "end + budget + 1]", "drafts more"),
        ("return MySession(prompt_ids)",
         "self.all = getattr(self, 'all', []); s = MySession([]); s.text = self.all; self.all += prompt_ids; return s",
         "see each other"),
        ("return DraftTree([], [])", "return []", ""),
    ],
    5: [
        ("rate * seconds(n + 1)", "rate * seconds(max(n, 1))", "it should be"),
        ("1 + sum(probs[:n]) - rate * seconds(n + 1)", "(1 + sum(probs[:n])) / seconds(n + 1)", "it should be"),
        ("1 + sum(probs[:n]) - rate * seconds(n + 1)", "sum(probs[:n])", "it should be"),
        ("max(sizes,", "max(sizes[1:],", "it should be"),
        ("sum(probs[:n])", "n * probs[0]", "it should be"),
        ("sum(probs[:n])", "(probs[n - 1] if n else 0)", "it should be"),
    ],
    6: [
        ("(p - q).clamp(min=0)", "p", "distributed as"),
        ("(p - q).clamp(min=0)", "(p - q).abs()", "distributed as"),
        ("(p - q).clamp(min=0)", "(q - p).clamp(min=0)", "distributed as"),
        ("min(1.0, float(p[token] / q[token]))", "float(p[token] / q[token])", "stands is"),
        ("min(1.0, float(p[token] / q[token]))", "float(p[token] >= q[token])", "distributed as"),
        ("min(1.0, float(p[token] / q[token]))", "float(torch.minimum(p, q)[token])", "more tokens could stand"),
        ("return stands, more / more.sum() if more.sum() > 0 else p", "return 0.0, p", "more tokens could stand"),
        ("more / more.sum() if more.sum() > 0 else p", "more", "no distribution"),
    ],
    7: [
        ("heirs.add(parent)", "pass", "should be"),
        ("(child, parent)", "(parent, child)", "should be"),
        ("if old not in heirs", "if old in heirs", "freed caches should be"),
        ("[old for old in range(count) if old not in heirs]", "[]", "freed caches should be"),
        ("range(count)", "range(len(parents))", "freed caches should be"),
        ("enumerate(parents)", "reversed([*enumerate(parents)])", "should be"),
        ("if parent in heirs", "if parent != child", "should be"),
    ],
    8: [
        ("cache.text(mask[row])", "[token for _, token in sorted(cache.slots[: past + row + 1])]", "a tree"),
        ("cache.text(mask[row])", "[t for (_, t), seen in zip(cache.slots, mask[row]) if seen][-1:]",
         "logits of the text"),
        ("wanted = range(q) if rows is None else [int(row) for row in rows]", "wanted = range(q)", "one row"),
        ("past, q = cache.length, len(tokens)", "past, q = 0, len(tokens)", "plain decoding writes"),
        (".tril(past)", "", "logits of the text"),
        ("[(int(position), int(token)) for position, token in zip(positions, tokens)]",
         "[(past + i, int(token)) for i, token in enumerate(tokens)]", ""),
        ("return SlotText(self.n_ctx if capacity is None else capacity)",
         "return self.__dict__.setdefault('c', SlotText(40))", ""),
    ],
}  # fmt: skip


@pytest.mark.slow
def test_wrong_solutions_of_the_exercises_are_told_so(capsys):
    """The notebook's code cells run here, unsolved, then solutions with a mistake take the place of stubs."""
    space: dict[str, Any] = {}
    grad = torch.is_grad_enabled()
    try:
        for cell in [cell for cell in cells_of(EXERCISES) if cell["cell_type"] == "code"][1:]:
            exec(cell["source"], space)
        assert verdicts(capsys.readouterr().out) == dict.fromkeys(range(1, 9), "not solved yet")
        for number, (_, solution) in exercises().items():
            for old, new, message in [("", "", None), *WRONG[number]]:
                assert old in solution, f"exercise {number}: the solution has no {old!r}"
                exec(solution.replace(old, new) if old else solution, space)
                space["check"](number, space[f"mistake_{number}"])
                said = verdicts(capsys.readouterr().out)[number]
                if message is None:
                    assert said == "right"
                else:
                    assert said.startswith("wrong: ") and message in said, f"exercise {number} with {new!r}: {said}"
    finally:
        torch.set_grad_enabled(grad)


# --- golden files ----------------------------------------------------------------------------------------------------


def make_golden() -> None:
    """Stores the last four rows of transformers' logits for each toy shape, and its beams; run as `python test_all.py
    golden`."""
    import tempfile

    rows = {}
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            toy(*SHAPES[name], scale=0.1).save(folder)
            rows[name] = transformers_logits(Path(folder), golden_tokens(name), torch.float64)[-4:].contiguous()
    save_file(rows, GOLDEN)
    with tempfile.TemporaryDirectory() as folder:
        cases = [transformers_beams(*case[:2], Path(folder), case[2]) for case in beam_cases(60, seed=6)]
    lines = ",\n".join(json.dumps([[h.tokens, round(h.score, 6)] for h in hypotheses]) for hypotheses in cases)
    GOLDEN_BEAMS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__" and sys.argv[1:] == ["golden"]:
    make_golden()
