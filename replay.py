"""Drafting measured alone, on recorded responses: no model runs. `python bench.py replay` is its command line.

Responses that some model gave, {"prompt", "response"} a line, stand in for the model: the first `warm` of them go into
a fresh trie, the next `count` are "generated" again, with the draft's walk along the known response in place of
verification. That gives tokens per step, and what drafting costs. Every figure of it is a replay, not a generation.
"""

import csv
import json
import math
import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenizer import Tokenizer
from trie import TokenTrie

BINS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)  # of estimated probability: under 0.01 to over 0.9


@dataclass
class Row:
    """One mode and budget over one replay.

    retrieve_us    mean microseconds to make a draft
    insert_us      mean microseconds per inserted token: warm responses, prompts (opening a session included), replayed
                   tokens with all that is learned from them
    observe_us     the same, over the replayed tokens alone
    nodes, bytes   of the shared trie, at the end
    """

    mode: str
    budget: int
    nodes_per_step: float
    tokens_per_step: float
    retrieve_us: float
    insert_us: float
    observe_us: float
    nodes: int
    bytes: int
    estimated: float = math.nan  # the probabilities that all trees carried, summed, over the number of accepted nodes
    lengths: list[int] = field(default_factory=list)  # lengths[n]: steps in which n drafted tokens were accepted
    bins: list[tuple[int, float, int]] = field(default_factory=list)  # per bin: nodes, sum of estimates, accepted


Pair = tuple[list[int], list[int]]  # prompt ids, response ids


def read_pairs(path: str, vocab_size: int = 50257) -> list[Pair]:
    """Prompts and responses as token ids, end-of-text after each response.

    Raises FileNotFoundError for a file that cannot be read, ValueError for one that holds something else.
    """
    tokenizer = Tokenizer(vocab_size)
    pairs = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise FileNotFoundError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line)
                prompt, response = record["prompt"], record["response"]
                if not isinstance(prompt, str) or not isinstance(response, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                wanted = '"prompt" and "response" texts'
                raise ValueError(f"{path}: line {number} is no JSON object with {wanted}") from None
            pairs.append((tokenizer.encode(prompt), [*tokenizer.encode(response), tokenizer.eot]))
    return pairs


def replay(pairs: Sequence[Pair], warm: int, count: int, budget: int, mode: str, **settings: int) -> Row:
    """Warm a fresh trie with the first `warm` responses, then draft along the next `count`."""
    clock = time.perf_counter
    trie = TokenTrie(mode=mode, **settings)
    spent = {"retrieve": 0.0, "insert": 0.0, "observe": 0.0}
    began = clock()
    for _, response in pairs[:warm]:
        trie.insert(response)
    spent["insert"] += clock() - began
    inserted = sum(len(response) for _, response in pairs[:warm])
    steps = emitted = drafted = observed = 0
    lengths: list[int] = []
    bins = [[0, 0.0, 0] for _ in BINS[1:]]
    for prompt, response in pairs[warm : warm + count]:
        began = clock()
        session = trie.open(prompt)
        opened = clock()
        session.observe(response[:1])  # what the prefill emits
        spent["insert"] += opened - began
        spent["observe"] += clock() - opened
        inserted, observed, done = inserted + len(prompt), observed + 1, 1
        while done < len(response):
            began = clock()
            tree = session.draft(budget)
            retrieved = clock()
            passed = tree.walk(response[done:])
            accepted = passed[: len(response) - done - 1]  # the last token is emitted, not accepted, drafted or not
            tokens = response[done : done + len(accepted) + 1]
            walked = clock()
            session.observe(tokens, tree)
            spent["observe"] += clock() - walked
            spent["retrieve"] += retrieved - began
            steps, drafted, emitted = steps + 1, drafted + len(tree), emitted + len(tokens)
            done, observed = done + len(tokens), observed + len(tokens)
            lengths += [0] * (len(accepted) + 1 - len(lengths))
            lengths[len(accepted)] += 1
            for node, p in enumerate(tree.probs or ()):
                entry = bins[bisect_left(BINS[1:-1], p)]
                entry[0] += 1
                entry[1] += p
                entry[2] += node in passed
        session.close()
    total = sum(accepted for _, _, accepted in bins)
    return Row(
        mode=mode,
        budget=budget,
        nodes_per_step=drafted / steps if steps else math.nan,
        tokens_per_step=emitted / steps if steps else math.nan,
        retrieve_us=1e6 * spent["retrieve"] / max(steps, 1),
        insert_us=1e6 * (spent["insert"] + spent["observe"]) / max(inserted + observed, 1),
        observe_us=1e6 * spent["observe"] / max(observed, 1),
        nodes=trie.n_nodes,
        bytes=trie.nbytes,
        estimated=sum(p for _, p, _ in bins) / total if total else math.nan,
        lengths=lengths,
        bins=[tuple(entry) for entry in bins],
    )


def growth(marks: Sequence[int], budget: int, mode: str, seed: int = 0, **settings: int) -> list[dict]:
    """What inserting and drafting cost as one trie grows: a row at each of `marks`, in tokens inserted.

    The text is random, sequences of 120 tokens of which few are frequent and most are rare: hardly any run of three
    comes back, so the trie grows as fast as it can. insert_us is a mean per token since the last mark, retrieve_us a
    mean over 400 drafts behind sequences of the same kind.
    """
    rng, clock = random.Random(seed), time.perf_counter
    trie, done, rows = TokenTrie(50257, mode=mode, **settings), 0, []

    def sequence() -> list[int]:
        return [int(50257 * rng.random() ** 4) for _ in range(120)]

    for mark in sorted(marks):
        spent, before = 0.0, done
        while done < mark:
            tokens = sequence()[: mark - done]
            began = clock()
            trie.insert(tokens)
            spent += clock() - began
            done += len(tokens)
        retrieving = 0.0
        for _ in range(400):
            session = trie.open(sequence())
            began = clock()
            session.draft(budget)
            retrieving += clock() - began
            session.close()
        row = {"mode": mode, "tokens": done, "nodes": trie.n_nodes, "mb": trie.nbytes / 1e6}
        rows.append(row | {"insert_us": 1e6 * spent / max(done - before, 1), "retrieve_us": 1e6 * retrieving / 400})
    return rows


def print_table(rows: Sequence[Row]) -> None:
    heads = ("mode", "budget", "nodes/step", "tokens/step", "retrieve us", "insert us", " nodes", "bytes/node",
             "estimated/accepted")  # fmt: skip
    print(f"{heads[0]:13}" + "  ".join(heads[1:]))
    for row in rows:
        ratio = "" if math.isnan(row.estimated) else f"{row.estimated:.3f}"
        cells = (f"{row.budget}", f"{row.nodes_per_step:.1f}", f"{row.tokens_per_step:.3f}", f"{row.retrieve_us:.0f}",
                 f"{row.insert_us:.1f}", f"{row.nodes}", f"{row.bytes / max(row.nodes, 1):.0f}", ratio)  # fmt: skip
        print(f"{row.mode:13}" + "  ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, heads[1:])))


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The raw numbers beside the plots; lists as Python writes them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
