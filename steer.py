"""Search against best-of-n at equal rows, and formulas with and without lookahead: `bench.py search` and `formula`.

Search and best-of-n both pay in rows forwarded, the prompt's included. For each problem best-of-n draws n samples at
temperature 1 and keeps the best by the reward; then the search may spend just as many rows. A problem is solved by a
text that ends by itself and whose notes are all right (calculator.py), with at least one of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from calculator import calculator
from forest import forest
from formula import parse
from lookahead import generate
from mcts import search
from model import GPT
from sampling import Sampler
from tokenizer import Tokenizer
from train import problems
from trie import TokenTrie

MONEY = (
    "Question: Kim sells 4 cups for $3 each. How much money does Kim make?\n"
    "Answer: Kim makes 4 * $3 = $<<4*3=12>>12.\n#### 12\n\n"
)
PAGES = (
    "Question: Kim reads 4 pages a day. How many pages does Kim read in 3 days?\n"
    "Answer: Kim reads 4 * 3 = <<4*3=12>>12 pages.\n#### 12\n\n"
)
FORMULAS = {
    "M": "M",
    "prompted": f"M({MONEY!r})",
    "difference": f"M({MONEY!r}) - 0.5*M({PAGES!r})",
    "union": f"Union(M, M({MONEY!r}))",
    "gated": f"TopP(M, 0.9) - 0.3*M({PAGES!r})",
    "classifier": "M + 2*C({!r}, {!r})".format(*(text.partition("Answer:")[0] + "Answer:" for text in (MONEY, PAGES))),
}


def compete_search(
    model: GPT, count: int, ns: Sequence[int], *, seed: int = 4242, max_new_tokens: int = 128, late: bool = False,
    batch: int = 1, progress: Callable[[str], None] = print,
) -> list[dict]:  # fmt: skip
    """One row for each n and contender: problems solved, mean rows forwarded, seconds. `late`: also a search whose
    reward judges a note's numbers only when they are complete.

    The search runs once, with the budget of the largest n: it stops at the first text that is all right, and how it
    gets there does not depend on how much it might still spend. So it solved a problem within a smaller budget if it
    was done by then.
    """
    tokenizer = Tokenizer.for_model(model)
    judges = {"search": calculator} | ({"search, late reward": partial(calculator, early=False)} if late else {})
    solved = {(name, n): [] for name in ("best of n", *judges) for n in ns}  # (is it solved, rows)
    seconds = dict.fromkeys(solved, 0.0)
    for number, problem in enumerate(problems(count, seed=seed)):
        prompt = tokenizer.encode(problem)
        began = time.perf_counter()
        drawn = [Sampler(seed=seed).sample(i) for i in range(max(ns))]
        texts = forest(model, prompt, drawn, max_new_tokens, (tokenizer.eot,))
        spent = {n: sum(len(text) - 1 for text in texts[:n]) for n in ns}  # a last token's logits are not needed
        right = [text[-1] == tokenizer.eot and calculator(tokenizer.decode(text[:-1]), True) == 1 for text in texts]
        seconds["best of n", max(ns)] += time.perf_counter() - began
        for n in ns:
            solved["best of n", n].append((any(right[:n]), len(prompt) + spent[n]))
        for name, judge in judges.items():
            began = time.perf_counter()
            found = search(
                model, prompt, judge, max_nodes=max(spent.values()), max_new_tokens=max_new_tokens,
                stop_ids=(tokenizer.eot,), batch=batch,
            )  # fmt: skip
            seconds[name, max(ns)] += time.perf_counter() - began
            assert found.reward < 1 or calculator(found.text, True) == 1
            for n in ns:
                limit = len(prompt) + spent[n]
                solved[name, n].append((found.reward == 1 and found.rows <= limit, min(found.rows, limit)))
        sums = ", ".join(f"{name} {n}: {sum(s for s, _ in rows)}" for (name, n), rows in solved.items())
        progress(f"{number + 1} problems; solved {sums}")
    return [
        {"contender": name, "n": n, "solved": sum(s for s, _ in rows), "problems": len(rows),
         "rows": statistics.fmean(r for _, r in rows), "seconds": seconds[name, n] or ""}
        for (name, n), rows in solved.items()
    ]  # fmt: skip


def compete_formulas(
    model: GPT, count: int, *, seed: int = 4242, max_new_tokens: int = 96, progress: Callable[[str], None] = print
) -> list[dict]:
    """One row for each formula: tokens per second, plain and with lookahead (one trie for all problems, empty at
    first), tokens per step, and how many texts are the same."""
    tokenizer = Tokenizer.for_model(model)
    asked = [tokenizer.encode(problem) for problem in problems(count, seed=seed)]
    settings = {"max_new_tokens": max_new_tokens, "stop_ids": (tokenizer.eot,)}
    rows = []
    for name, text in FORMULAS.items():
        began = time.perf_counter()
        term = parse(text, model)
        made, trie = time.perf_counter() - began, TokenTrie(model.vocab_size)
        generate(term, asked[0], max_new_tokens=4)  # the first passes of a process are slow
        pairs = [(generate(term, ids, **settings), generate(term, ids, drafter=trie, **settings)) for ids in asked]
        tokens = [sum(len(each.tokens) for each in side) for side in zip(*pairs)]
        plain, fast = (sum(each.seconds for each in side) for side in zip(*pairs))
        steps = sum(len(each.steps) for _, each in pairs)
        rows.append({
            "formula": name, "terms": len({leaf.key for leaf in term.leaves}), "made_s": made,
            "plain_per_s": tokens[0] / plain, "lookahead_per_s": tokens[1] / fast, "ratio": plain / fast,
            "tokens_per_step": (tokens[1] - count) / max(steps, 1),
            "identical": sum(a.tokens == b.tokens for a, b in pairs), "problems": count,
        })  # fmt: skip
        progress(f"{name}: {rows[-1]['ratio']:.2f} times as fast with lookahead")
    return rows


def add_commands(commands: argparse._SubParsersAction) -> None:
    """The arguments of `bench.py search` and `bench.py formula`."""
    for name, text, count in (
        ("search", "tree search against best-of-n at equal rows", 60),
        ("formula", "formulas over models, plainly and with lookahead", 20),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument("--model", default="tiny", help="as for lookahead.py (default: tiny)")
        one.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
        one.add_argument("--device", default="cpu")
        one.add_argument("--problems", type=int, default=count, metavar="N", help=f"default: {count}")
        one.add_argument("--n", type=int, nargs="+", default=[8, 32], metavar="N", help="search: the n of best-of-n")
        one.add_argument("--late", action="store_true", help="search: also with a reward that judges complete numbers")
        one.add_argument("--seed", type=int, default=4242, help="other problems, other samples (default: 4242)")
