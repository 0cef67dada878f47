"""Measurements, each with what it is to be compared with, from one run.

    python bench.py cost   [--model tiny] [--dtype float32] [--prefix 256 ...] [--rows 1 2 4 8 ...]
    python bench.py speed  [--model tiny] [--dtype float32] [--responses FILE] [--problems 60] [--budget auto 4 8 ...]
    python bench.py replay --responses FILE [--warm N] [--replay M] [--budget 10 38 64] [--mode ...]
    python bench.py growth [--tokens 10000 100000 ...] [--mode ...] [--max-nodes N]
    python bench.py search [--model tiny] [--problems 60] [--n 8 32] [--late]
    python bench.py formula [--model tiny] [--problems 20]

`cost` measures T(n), the time of a forward of n rows, against the same model with torch's F.linear and against two
bounds that are measured in the same run: the bytes of the weights over the fastest way found to read them, and the
operations over the best rate of matrix products found.

`speed` (speed.py) measures tokens per second, side by side: plain decoding, lookahead with several budgets, and
transformers' greedy decoding and prompt lookup where it is installed. --model 124m is GPT-2's shape with random
weights: there the forwards are real and a recorded response (--responses) decides what is picked.

`replay` (replay.py) needs no model: responses that some model gave stand in for it. It measures drafting alone, tokens
per step and what they cost, for each mode and budget. `growth` measures what a trie costs as it grows.

`search` and `formula` (steer.py) compare tree search with best-of-n at equal rows, and decode formulas over models
plainly and with lookahead.

All print a table and write it with pictures to --out; or they print one JSON object (--json).
"""

import argparse
import copy
import csv
import functools
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn import functional as F

from cli import check_device
from model import GPT, GPTConfig, Linear
from packing import apply_packed, packed
from replay import BINS, growth, print_table, read_pairs, replay, write_csv
from speed import compete, starting
from steer import add_commands, compete_formulas, compete_search
from tokenizer import Tokenizer
from train import problems
from trie import MODES, TokenTrie
from weights import BUNDLED


def bound_of(args: argparse.Namespace) -> dict[str, int]:
    return {} if args.max_nodes is None else {"max_nodes": args.max_nodes}


# --- replay -----------------------------------------------------------------------------------------------------------


def run_replay(args: argparse.Namespace) -> int:
    pairs = read_pairs(args.responses)
    if not pairs:
        raise ValueError(f"{args.responses} holds no responses")
    usual = 660 if len(pairs) >= 860 else len(pairs) // 2
    warm = usual if args.warm is None else args.warm
    count = min(200, len(pairs) - warm) if args.replay is None else args.replay
    if warm < 0 or count < 1 or warm + count > len(pairs):
        raise ValueError(
            f"--warm {warm} and --replay {count} do not fit the {len(pairs)} responses of {args.responses}"
        )
    if any(budget < 1 for budget in args.budget):
        raise ValueError("--budget must be 1 or more")
    settings = bound_of(args)
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


# --- cost -------------------------------------------------------------------------------------------------------------


def load_model(name: str, dtype: torch.dtype, device: torch.device, pack: bool | None = None) -> GPT:
    """A model by name; "124m" is GPT-2's smallest published shape with random weights."""
    if name != "124m":
        return GPT.load(name, device, dtype, pack)
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, n_ctx=1024))
    model = model.to(device, dtype).requires_grad_(False).eval()
    if pack is not False:
        model.pack()
    return model


def with_plain_linear(model: GPT) -> GPT:
    """The same model, its products computed by F.linear from (n_out, n_in) weights, as most libraries do."""
    other = copy.deepcopy(model)
    other.packed = None
    for module in other.modules():
        if isinstance(module, Linear):
            weight, bias = module.weight.T.contiguous(), module.bias
            module.forward = lambda x, weight=weight, bias=bias: F.linear(x, weight, bias)
    return other


def median_seconds(functions: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Medians, the functions taking turns; the first round is not counted."""
    times: list[list[float]] = [[] for _ in functions]
    for round_number in range(repeats + 1):
        for function, mine in zip(functions, times):
            began = time.perf_counter()
            function()
            if round_number:
                mine.append(time.perf_counter() - began)
    return [statistics.median(mine) for mine in times]


def forward_of(model: GPT, rows: int, prefix: int) -> Callable[[], object]:
    """A forward of `rows` rows as verification makes it, behind `prefix` tokens; repeatable."""
    cache = model.new_cache(prefix + rows)
    tokens = [i * 7919 % model.vocab_size for i in range(prefix + rows)]
    with torch.no_grad():
        model(tokens[:prefix], cache=cache)
    positions = [prefix + min(i, 7) for i in range(rows)]
    mask = torch.ones(rows, prefix + rows, dtype=torch.bool)
    mask[:, prefix:] = torch.eye(rows, dtype=torch.bool)
    mask[:, prefix] = True

    def run() -> None:
        with torch.no_grad():
            model(tokens[prefix:], positions, mask if rows > 1 else None, cache)[-1, 0].item()
        cache.truncate(prefix)

    return run


def bounds(model: GPT, repeats: int) -> tuple[float, float]:
    """(bytes per second, operations per second): the best that this machine shows for reading weights like the model's
    and for multiplying matrices, over a few ways of doing each."""
    dtype, device = model.dtype, model.device
    side = 4096
    count = max(model.nbytes // model.wte.weight.element_size() // side, 256)
    big = torch.ones(count, side, dtype=dtype, device=device)
    vector = torch.ones(side, dtype=dtype, device=device)
    readers = [lambda: big.sum().item(), lambda: big.max().item(), lambda: (big @ vector)[0].item()]
    copy_of = packed(big)
    if copy_of is not None:
        readers.append(lambda: apply_packed(vector[None], copy_of, None)[0, 0].item())
    fastest = min(median_seconds(readers, repeats))
    square = torch.ones(1024, 1024, dtype=dtype, device=device)
    products = [lambda: (square @ square)[0, 0].item(), lambda: F.linear(square, square)[0, 0].item()]
    return big.numel() * big.element_size() / fastest, 2 * 1024**3 / min(median_seconds(products, repeats))


def bytes_read(model: GPT) -> int:
    """What a forward pass has to read of the weights: all but the table of positions."""
    return model.nbytes - model.wpe.weight.numel() * model.wpe.weight.element_size()


def run_cost(args: argparse.Namespace) -> int:
    model = load_model(args.model, getattr(torch, args.dtype), check_device(args.device))
    for prefix in args.prefix:
        if prefix < 1 or prefix + 8 > model.n_ctx:
            raise ValueError(f"--prefix must be 1 to {model.n_ctx - 8} for {args.model}, not {prefix}")
    if min(args.rows) < 1 or args.repeat < 1:
        raise ValueError("--rows and --repeat must be 1 or more")
    reference = with_plain_linear(model)
    bandwidth, rate = bounds(model, args.repeat)
    operations = 2 * sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "wpe.weight")
    rows = []
    for prefix, n in itertools.product(args.prefix, args.rows):
        ours, plain = median_seconds([forward_of(m, n, prefix) for m in (model, reference)], args.repeat)
        read, compute = bytes_read(model) / bandwidth, n * operations / rate
        rows.append({"prefix": prefix, "rows": n, "ms": 1e3 * ours, "f_linear_ms": 1e3 * plain, "ratio": ours / plain,
                     "read_bound_ms": 1e3 * read, "compute_bound_ms": 1e3 * compute,
                     "of_bound": max(read, compute) / ours})  # fmt: skip
        progress(args, f"{n} rows behind {prefix} tokens: {1e3 * ours:.2f} ms")
    about = describe(args, model) | {"read_gb_per_s": bandwidth / 1e9, "gflop_per_s": rate / 1e9}
    heading = f"Forward passes of {args.model} ({machine(about)}):"
    return report(args, "cost", heading, rows, about, lambda viz, out: viz.draw_cost(rows, out, heading))


# --- growth -----------------------------------------------------------------------------------------------------------


def run_growth(args: argparse.Namespace) -> int:
    if min(args.tokens) < 1 or args.budget < 1:
        raise ValueError("--tokens and --budget must be 1 or more")
    rows = growth(args.tokens, args.budget, args.mode, **bound_of(args))
    about = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "budget": args.budget}
    heading = f"A trie as it grows, {args.mode}, budget {args.budget}, random text ({about['machine']}):"
    return report(args, "growth", heading, rows, about, lambda viz, out: viz.draw_growth(rows, out, heading))


# --- speed ------------------------------------------------------------------------------------------------------------


def run_speed(args: argparse.Namespace) -> int:
    model = load_model(args.model, getattr(torch, args.dtype), check_device(args.device))
    tokenizer = Tokenizer.for_model(model)
    pairs = read_pairs(args.responses, model.vocab_size)
    replayed = args.random or args.model == "124m"
    if args.random:
        rng, warm = random.Random(7), pairs[: args.warm]
        texts = [
            [rng.randrange(model.vocab_size) for _ in range(40 + args.max_new_tokens)] for _ in range(args.problems)
        ]
        asked = [(text[:40], text[40:]) for text in texts]
    elif replayed:
        warm = pairs[: max(len(pairs) - args.problems, 0)][: args.warm]
        asked = pairs[len(warm) :][: args.problems]
    else:
        warm = pairs[: args.warm]
        asked = [(tokenizer.encode(text), []) for text in problems(args.problems, seed=77)]
    if not asked or args.repeat < 1 or args.max_new_tokens < 2:
        raise ValueError(f"{args.responses} has no response left to ask for, or a number is too small")
    rows, remarks, skipped = compete(
        model, asked, warm, args.budget, replayed=replayed, stop=tokenizer.eot, max_new_tokens=args.max_new_tokens,
        repeat=args.repeat, progress=functools.partial(progress, args),
    )  # fmt: skip
    bandwidth, _ = bounds(model, args.repeat)
    bound = bytes_read(model) / bandwidth
    remarks.append(
        f"reading the weights once takes {1e3 * bound:.2f} ms at {bandwidth / 1e9:.1f} GB/s: "
        f"{rows[0]['decode_per_s'] * bound:.2f} of a plain step"
    )
    if args.model in BUNDLED and args.device == "cpu" and sys.platform != "win32":
        remarks.append(starting(args.model, args.dtype, args.repeat))
    about = describe(args, model) | {"problems": len(asked), "warm": len(warm), "remarks": remarks, "skipped": skipped}
    kind = "greedy decoding"
    if replayed:
        kind = f"{'random tokens' if args.random else 'recorded responses'}, real forwards"
    heading = f"{args.model}, {len(asked)} problems, {kind}, trie warmed with {len(warm)} ({machine(about)}):"
    return report(args, "speed", heading, rows, about, lambda viz, out: viz.draw_speed(rows, out, heading))


# --- search and formulas ----------------------------------------------------------------------------------------------


def run_steer(args: argparse.Namespace) -> int:
    if args.problems < 1 or min(args.n) < 1:
        raise ValueError("--problems and --n must be 1 or more")
    model = GPT.load(args.model, check_device(args.device), getattr(torch, args.dtype))
    told = functools.partial(progress, args)
    if args.command == "search":
        rows = compete_search(model, args.problems, args.n, seed=args.seed, late=args.late, progress=told)
    else:
        rows = compete_formulas(model, args.problems, seed=args.seed, progress=told)
    about = describe(args, model)
    heading = f"{args.command}, {args.model}, {args.problems} problems ({machine(about)}):"
    return report(args, args.command, heading, rows, about, lambda viz, out: [])


# --- the command line -------------------------------------------------------------------------------------------------


def progress(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(text, file=sys.stderr)


def describe(args: argparse.Namespace, model: GPT) -> dict:
    return {"model": args.model, "dtype": args.dtype, "device": args.device, "packed": model.packed is not None,
            "weights_mb": model.nbytes / 1e6, "threads": torch.get_num_threads(), "torch": torch.__version__,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}"}  # fmt: skip


def machine(about: dict) -> str:
    layout = "packed weights" if about["packed"] else "plain weights"
    return f"{about['dtype']}, {layout}, {about['threads']} threads, {about['machine']}, torch {about['torch']}"


def report(
    args: argparse.Namespace, name: str, heading: str, rows: list[dict], about: dict, draw: Callable[..., list[Path]]
) -> int:
    """JSON, or a table, raw rows and a picture."""
    if args.json:
        print(json.dumps(about | {"rows": rows}))
        return 0
    print(f"\n{heading}\n")
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[f"{v:.3g}" if isinstance(v, float) and v < 100 else f"{v:.0f}" if isinstance(v, float) else str(v)
              for v in (row.get(head, "") for head in heads)] for row in rows]  # fmt: skip
    widths = [max(len(head), *(len(row[i]) for row in cells)) for i, head in enumerate(heads)]
    for line in [heads, *cells]:
        first, *rest = (cell.ljust(width) if i == 0 else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(line, widths)))  # fmt: skip
        print("  ".join([first, *rest]))
    for title in ("remarks", "skipped"):
        for line in about.get(title, ()):
            print(f"\n{title}: {line}" if line == about[title][0] else f"         {line}")
    if args.out:
        import viz

        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=heads)
            writer.writeheader()
            writer.writerows(rows)
        pictures = draw(viz, out)
        print("\nWritten: " + ", ".join(str(path) for path in (out / f"{name}.csv", *pictures)))
    return 0


COMMANDS = {"replay": run_replay, "growth": run_growth, "cost": run_cost, "speed": run_speed}
COMMANDS |= {"search": run_steer, "formula": run_steer}


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
    one = commands.add_parser("growth", help="what inserting and drafting cost as a trie grows, on random text")
    marks = [10_000, 30_000, 100_000, 300_000, 1_000_000]
    one.add_argument("--tokens", type=int, nargs="+", default=marks, metavar="N", help="default: 10,000 to a million")
    one.add_argument("--budget", type=int, default=38, metavar="B", help="default: 38")
    one.add_argument("--mode", choices=MODES, default=MODES[0])
    for name, text in (
        ("cost", "the time of a forward pass by its number of rows, with bounds"),
        ("speed", "tokens per second: plain, lookahead, and transformers where it is installed"),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument("--model", default="tiny", help="as for lookahead.py, or 124m: GPT-2's shape, random weights")
        one.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
        one.add_argument("--device", default="cpu")
        one.add_argument("--repeat", type=int, default=7 if name == "cost" else 5, help="medians of so many")
        if name == "cost":
            one.add_argument("--prefix", type=int, nargs="+", default=[256], metavar="N", help="default: 256")
            one.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 48, 64], metavar="N")
        else:
            file = "assets/responses.jsonl"
            one.add_argument("--responses", default=file, metavar="FILE", help=f"warm the trie (default: {file})")
            one.add_argument("--warm", type=int, default=200, metavar="N", help="responses inserted first")
            one.add_argument("--problems", type=int, default=60, metavar="N", help="prompts decoded (default: 60)")
            one.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
            one.add_argument("--random", action="store_true", help="decode random tokens: nothing can be guessed")
            one.add_argument("--budget", nargs="+", type=lambda text: text if text == "auto" else int(text),
                             default=["auto", 4, 8, 12, 16, 24, 32], metavar="B")  # fmt: skip
    add_commands(commands)
    for name, one in commands.choices.items():
        if name in ("replay", "growth"):
            one.add_argument("--max-nodes", type=int, metavar="N", help="the trie's bound (default: TokenTrie's)")
        one.add_argument(
            "--out", default="bench", metavar="DIR", help="plots and raw numbers (default: bench; '': none)"
        )
        one.add_argument("--json", action="store_true", help="print one JSON object and nothing else; draw nothing")
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command](args)
    except BrokenPipeError:  # `| head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
