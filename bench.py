"""Measurements, each with what it is to be compared with, from one run.

    python bench.py cost   [--model tiny] [--dtype float32] [--prefix 256 ...] [--rows 1 2 4 8 ...]
    python bench.py speed  [--model tiny] [--dtype float32] [--responses FILE] [--problems 60] [--budget auto 4 8 ...]
    python bench.py beam   [--model tiny] [--num-beams 4 8] [--problems 10] [--strategy swap tree "lookahead 4" ...]
    python bench.py replay --responses FILE [--warm N] [--replay M] [--budget 10 38 64] [--mode ...]
    python bench.py drafters [--model tiny] [--draft-model nano] [--temperature 1] [--budget 32]
    python bench.py acceptance [--model tiny] [--draft-model nano] [--temperature 1]
    python bench.py parting [--model tiny] [--dtype bfloat16] [--temperature 0]
    python bench.py growth [--tokens 10000 100000 ...] [--mode ...] [--max-nodes N]
    python bench.py search [--model tiny] [--problems 60] [--n 8 32] [--late]
    python bench.py formula [--model tiny] [--problems 20]

`cost` measures T(n), the time of a forward of n rows, against the same model with torch's F.linear and against two
bounds that are measured in the same run: the bytes of the weights over the fastest way found to read them, and the
operations over the best rate of matrix products found.

`speed` (speed.py) measures tokens per second, side by side: plain decoding, lookahead with several budgets, and
transformers' greedy decoding and prompt lookup where it is installed. --model 124m is GPT-2's shape with random
weights: there the forwards are real and a recorded response (--responses) decides what is picked.

`beam` (beambench.py) races the strategies of beam search, and transformers, and weighs their caches.

`replay` (replay.py) needs no model: responses that some model gave stand in for it. It measures drafting alone, tokens
per step and what they cost, for each mode and budget. `growth` measures what a trie costs as it grows.

`drafters` compares the sources of drafts, `parting` counts how often rounding shows in the text (compare.py).
`acceptance` measures how often a draft model's token stands, by the classical rule and by shared noise (classical.py).
`search` and `formula` (steer.py) compare tree search with best-of-n at equal rows, and decode formulas over models
plainly and with lookahead.

All print a table and write it to --out, most with pictures; or they print one JSON object (--json).
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
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import beambench
from classical import acceptance
from cli import check_device
from compare import compare_drafters, parting
from cost import bounds, bytes_read, forward_of, load_model, median_seconds, with_plain_linear
from lookahead import generate
from model import GPT
from options import Parser
from replay import growth, print_table, read_pairs, replay, write_csv
from sampling import Sampler
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
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        write_csv(rows, out / "replay.csv")
        pictures = draw(args, "replay", rows, f"replay of {count} responses after {warm}")
        print("\nWritten: " + ", ".join(str(path) for path in (out / "replay.csv", *pictures)))
    return 0


# --- cost -------------------------------------------------------------------------------------------------------------


def run_cost(args: argparse.Namespace) -> int:
    model = load_model(args.model, getattr(torch, args.dtype), check_device(args.device))
    for prefix in args.prefix:
        if prefix < 1 or prefix + 8 > model.n_ctx:
            raise ValueError(f"--prefix must be 1 to {model.n_ctx - 8} for {args.model}, not {prefix}")
    if not 1 <= min(args.rows) <= max(args.rows) <= 4096 or args.repeat < 1:
        raise ValueError("--rows must be 1 to 4096, --repeat 1 or more")
    reference = with_plain_linear(model)
    bandwidth, rate = bounds(model, args.repeat)
    operations = 2 * sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "wpe.weight")
    rows = []
    for prefix, n in itertools.product(sorted(set(args.prefix)), sorted(set(args.rows))):
        ours, plain = median_seconds([forward_of(m, n, prefix) for m in (model, reference)], args.repeat)
        read, compute = bytes_read(model) / bandwidth, n * operations / rate
        rows.append({"prefix": prefix, "rows": n, "ms": 1e3 * ours, "f_linear_ms": 1e3 * plain, "ratio": ours / plain,
                     "read_bound_ms": 1e3 * read, "compute_bound_ms": 1e3 * compute,
                     "of_bound": max(read, compute) / ours})  # fmt: skip
        progress(args, f"{n} rows behind {prefix} tokens: {1e3 * ours:.2f} ms")
    about = describe(args, model) | {"read_gb_per_s": bandwidth / 1e9, "gflop_per_s": rate / 1e9}
    heading = f"Forward passes of {args.model} ({machine(about)}):"
    return report(args, "cost", heading, rows, about)


# --- growth -----------------------------------------------------------------------------------------------------------


def run_growth(args: argparse.Namespace) -> int:
    if min(args.tokens) < 1 or args.budget < 1:
        raise ValueError("--tokens and --budget must be 1 or more")
    rows = growth(args.tokens, args.budget, args.mode, **bound_of(args))
    about = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "budget": args.budget}
    heading = f"A trie as it grows, {args.mode}, budget {args.budget}, random text ({about['machine']}):"
    return report(args, "growth", heading, rows, about)


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
    return report(args, "speed", heading, rows, about)


# --- drafters and rounding --------------------------------------------------------------------------------------------


def own_problems(args: argparse.Namespace, model: GPT) -> tuple[Tokenizer, list]:
    if args.problems < 1 or args.repeat < 1 or args.max_new_tokens < 2 or args.temperature < 0:
        raise ValueError("--problems and --repeat must be 1 or more, --max-new-tokens 2, --temperature 0")
    tokenizer = Tokenizer.for_model(model)
    return tokenizer, [(tokenizer.encode(text), []) for text in problems(args.problems, seed=77)]


def run_drafters(args: argparse.Namespace) -> int:
    model = load_model(args.model, getattr(torch, args.dtype), check_device(args.device))
    tokenizer, asked = own_problems(args, model)
    small = None if args.draft_model == "none" else GPT.load(args.draft_model, model.device, model.dtype)
    warm = [response for _, response in read_pairs(args.responses, model.vocab_size)][: args.warm]
    if args.temperature:  # a trie of greedy texts would say little about sampled ones
        settings = {"drafter": TokenTrie(model.vocab_size), "stop_ids": [tokenizer.eot]}
        warm = [
            generate(model, tokenizer.encode(text), picker=Sampler(args.temperature, seed=1000 + i), **settings).tokens
            for i, text in enumerate(problems(args.warm, seed=78))
        ]
    rows, remarks = compare_drafters(
        model, small, asked, warm, args.budget, temperature=args.temperature, stop=tokenizer.eot,
        max_new_tokens=args.max_new_tokens, repeat=args.repeat, progress=functools.partial(progress, args),
    )  # fmt: skip
    about = describe(args, model) | {"problems": len(asked), "warm": len(warm), "remarks": remarks}
    about |= {"draft_model": args.draft_model, "temperature": args.temperature, "budget": args.budget}
    kind = f"temperature {args.temperature:g}" if args.temperature else "greedy"
    heading = f"{args.model}, {len(asked)} problems, {kind}, budget {args.budget} ({machine(about)}):"
    return report(args, "drafters", heading, rows, about)


def run_acceptance(args: argparse.Namespace) -> int:
    model = load_model(args.model, getattr(torch, args.dtype), check_device(args.device))
    small = GPT.load(args.draft_model, model.device, model.dtype)
    if small.vocab_size != model.vocab_size:
        raise ValueError(f"--draft-model has {small.vocab_size} tokens, --model {model.vocab_size}: choose another")
    tokenizer, asked = own_problems(args, model)
    rows = []
    for temperature in [args.temperature] if args.temperature else (0.5, 0.7, 1.0, 1.3):
        trie, texts = TokenTrie(model.vocab_size), []
        for i, (prompt, _) in enumerate(asked):
            settings = {"max_new_tokens": args.max_new_tokens, "stop_ids": [tokenizer.eot]}
            response = generate(model, prompt, drafter=trie, picker=Sampler(temperature, seed=i), **settings).tokens
            texts.append((prompt, response))
        rows.append({"temperature": temperature} | acceptance(model, small, texts, Sampler(temperature, seed=9999)))
        progress(args, f"temperature {temperature:g}: done")
    about = describe(args, model) | {"problems": len(asked), "draft_model": args.draft_model}
    heading = f"One token drafted by {args.draft_model} for {args.model}: how often it stands ({machine(about)}):"
    return report(args, "acceptance", heading, rows, about)


def run_parting(args: argparse.Namespace) -> int:
    model = load_model(args.model, getattr(torch, args.dtype), check_device(args.device))
    tokenizer, asked = own_problems(args, model)
    reference = copy.deepcopy(model)
    reference.packed = None
    rows, remarks = parting(
        model, reference.double(), asked, budget=args.budget, temperature=args.temperature, stop=tokenizer.eot,
        max_new_tokens=args.max_new_tokens, progress=functools.partial(progress, args),
    )  # fmt: skip
    about = describe(args, model) | {"problems": len(asked), "remarks": remarks}
    heading = f"{args.model}, plain decoding against lookahead, {len(asked)} problems ({machine(about)}):"
    return report(args, "parting", heading, rows, about)


# --- beam -------------------------------------------------------------------------------------------------------------


def run_beam(args: argparse.Namespace) -> int:
    model = load_model(args.model, getattr(torch, args.dtype), check_device(args.device))
    tokenizer = Tokenizer.for_model(model)
    prompts = [tokenizer.encode(text) for text in problems(args.problems, seed=77)]
    warm = [response for _, response in read_pairs(args.responses, model.vocab_size)][: args.warm]
    stop_ids = [] if args.model == "124m" else [tokenizer.eot]  # random weights never come to an end
    if args.problems < 1 or args.repeat < 1 or args.max_new_tokens < 2:
        raise ValueError("--problems and --repeat must be 1 or more, --max-new-tokens 2 or more")
    rows: list[dict] = []
    for num_beams in args.num_beams:
        more, skipped = beambench.compete(
            model, prompts, warm, args.strategy, num_beams=num_beams, max_new_tokens=args.max_new_tokens,
            stop_ids=stop_ids, repeat=args.repeat, progress=functools.partial(progress, args),
        )  # fmt: skip
        rows += more
    about = describe(args, model) | {"problems": len(prompts), "warm": len(warm), "skipped": skipped}
    heading = f"Beam search, {args.model}, {len(prompts)} problems, trie warmed with {len(warm)} ({machine(about)}):"
    return report(args, "beam", heading, rows, about)


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
    return report(args, args.command, heading, rows, about)


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


def draw(args: argparse.Namespace, name: str, rows: list, title: str) -> list[Path]:
    from plots import write  # with matplotlib, so only when it is needed

    return write(name, rows, Path(args.out), title, dark=args.dark, suffix=".svg" if args.svg else ".png")


def report(args: argparse.Namespace, name: str, heading: str, rows: list[dict], about: dict) -> int:
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
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=heads)
            writer.writeheader()
            writer.writerows(rows)
        pictures = draw(args, name, rows, heading)
        print("\nWritten: " + ", ".join(str(path) for path in (out / f"{name}.csv", *pictures)))
    return 0


COMMANDS = {
    "replay": run_replay, "growth": run_growth, "cost": run_cost, "speed": run_speed, "drafters": run_drafters,
    "parting": run_parting, "acceptance": run_acceptance, "beam": run_beam,
    "search": run_steer, "formula": run_steer,
}  # fmt: skip


def nodes(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="bench.py", description="Measure drafting and decoding.", allow_abbrev=False)
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
        ("drafters", "every source of drafts on the same problems"),
        ("acceptance", "how often a drafted token stands: the classical rule, keyed noise, and the theory"),
        ("parting", "how often rounding makes lookahead's text another one, and how close a call it was"),
        ("beam", "beam search: its strategies, their caches, and transformers where it is installed"),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument("--model", default="tiny", help="as for lookahead.py, or 124m: GPT-2's shape, random weights")
        one.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"))
        one.add_argument("--device", default="cpu")
        times = {"cost": 7, "beam": 3}.get(name, 5)
        one.add_argument("--repeat", type=int, default=times, help=f"medians of so many (default: {times})")
        if name == "cost":
            one.add_argument("--prefix", type=int, nargs="+", default=[256], metavar="N", help="default: 256")
            one.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 48, 64], metavar="N")
        else:
            count = 10 if name == "beam" else 60
            one.add_argument("--problems", type=int, default=count, metavar="N", help=f"prompts (default: {count})")
            one.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
        if name in ("speed", "drafters", "beam"):
            file = "assets/responses.jsonl"
            one.add_argument("--responses", default=file, metavar="FILE", help=f"warm the trie (default: {file})")
            one.add_argument("--warm", type=int, default=200, metavar="N", help="responses inserted first")
        if name == "beam":
            one.add_argument("--num-beams", type=int, nargs="+", default=[4, 8], metavar="N", help="default: 4 8")
            one.add_argument("--strategy", nargs="+", default=beambench.USUAL,
                             metavar="S", help="also recompute, 'swap offload', 'lookahead 8' (nodes)")  # fmt: skip
        if name == "speed":
            one.add_argument("--random", action="store_true", help="decode random tokens: nothing can be guessed")
            one.add_argument("--budget", nargs="+", type=nodes, default=["auto", 4, 8, 12, 16, 24, 32], metavar="B")
        elif name == "acceptance":
            one.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: several (default)")
        elif name not in ("cost", "beam"):
            one.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
            one.add_argument("--budget", type=nodes, default=32 if name == "drafters" else 15, metavar="B")
        if name in ("drafters", "acceptance"):
            one.add_argument("--draft-model", default="nano", metavar="NAME", help="the smaller model (default: nano)")
    add_commands(commands)
    for name, one in commands.choices.items():
        if name in ("replay", "growth"):
            one.add_argument("--max-nodes", type=int, metavar="N", help="the trie's bound (default: TokenTrie's)")
        one.add_argument("--out", default="bench", metavar="DIR", help="plots, raw rows (default: bench; '': none)")
        one.add_argument("--dark", action="store_true", help="plots on a dark ground")
        one.add_argument("--svg", action="store_true", help="plots as .svg instead of .png")
        one.add_argument("--json", action="store_true", help="print one JSON object and nothing else; draw nothing")
    args = parser.parse_args(argv)
    try:
        if getattr(args, "warm", None) is not None and args.warm < 0:
            raise ValueError(f"--warm must be 0 or more, not {args.warm}")
        if args.out and not args.json:  # noticed before anything is measured
            Path(args.out).mkdir(parents=True, exist_ok=True)
        return COMMANDS[args.command](args)
    except BrokenPipeError:  # `| head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        print("bench: this does not fit the memory: try a smaller model or smaller numbers", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
