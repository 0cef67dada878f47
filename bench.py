"""Measurements, each with what it is to be compared with, from one run.

    python bench.py replay --responses FILE [--warm N] [--replay M] [--budget 10 38 64] [--mode ...] [--json]

`replay` needs no model. It takes responses that some model gave, {"prompt", "response"} a line, and pretends to be that
model: the first N responses go into a fresh trie, the next M are "generated" again, with the draft's walk along the
known response in place of verification. So it measures drafting alone: tokens per step, and what it costs, for each
mode and budget. Every figure of it is a replay, not a generation.
"""

import argparse
import csv
import json
import math
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenizer import Tokenizer
from trie import MODES, TokenTrie

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


def run_replay(args: argparse.Namespace) -> int:
    pairs = read_pairs(args.responses)
    if not pairs:
        raise ValueError(f"{args.responses} holds no responses")
    warm = min(660, len(pairs) // 2) if args.warm is None else args.warm
    count = min(200, len(pairs) - warm) if args.replay is None else args.replay
    if warm < 0 or count < 1 or warm + count > len(pairs):
        raise ValueError(
            f"--warm {warm} and --replay {count} do not fit the {len(pairs)} responses of {args.responses}"
        )
    if any(budget < 1 for budget in args.budget):
        raise ValueError("--budget must be 1 or more")
    settings = {} if args.max_nodes is None else {"max_nodes": args.max_nodes}
    for mode in args.mode:
        TokenTrie(mode=mode, **settings)  # refuses impossible bounds before anything is measured
    rows = []
    for mode in args.mode:
        for budget in args.budget:
            rows.append(replay(pairs, warm, count, budget, mode, **settings))
            if not args.json:
                print(f"{mode}, budget {budget}: {rows[-1].tokens_per_step:.3f} tokens per step", file=sys.stderr)
    if args.json:
        hidden = ("lengths", "bins")
        print(
            json.dumps({"rows": [{k: v for k, v in asdict(row).items() if k not in hidden and v == v} for row in rows]})
        )
        return 0
    print(f"\nReplay of {count} responses of {Path(args.responses).name} after {warm} to warm the trie:\n")
    print_table(rows)
    if args.out:
        import viz

        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        write_csv(rows, out / "replay.csv")
        pictures = viz.draw_replay(rows, BINS, out, f"replay of {count} responses after {warm}")
        print("\nWritten: " + ", ".join(str(path) for path in (out / "replay.csv", *pictures)))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure drafting and decoding.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "replay", help="tokens per step of a trie on responses that a model gave, without a model"
    )
    one.add_argument("--responses", required=True, metavar="FILE", help='JSONL of {"prompt", "response"}')
    one.add_argument("--warm", type=int, metavar="N", help="responses inserted first (default: 660, or half)")
    one.add_argument("--replay", type=int, metavar="M", help="responses drafted along (default: 200, or the rest)")
    one.add_argument("--budget", type=int, nargs="+", default=[10, 38, 64], metavar="B", help="default: 10 38 64")
    one.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    one.add_argument("--max-nodes", type=int, metavar="N", help="the trie's bound (default: TokenTrie's)")
    one.add_argument(
        "--out", default="bench", metavar="DIR", help="plots and raw numbers; '' for none (default: bench)"
    )
    one.add_argument("--json", action="store_true", help="print one JSON object and nothing else; draw nothing")
    args = parser.parse_args(argv)
    try:
        return run_replay(args)
    except BrokenPipeError:  # `| head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
