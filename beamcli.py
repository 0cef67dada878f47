"""Beam search on the command line: `python lookahead.py --num-beams 4 ...`; options, the trace, the result."""

import argparse
import itertools
import json
import time
from dataclasses import asdict
from typing import Any

from beam import STRATEGIES, BeamStep, beam_steps
from tokenizer import Tokenizer

EARLY = {"false": False, "true": True, "never": "never"}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("beam search")
    group.add_argument("--num-beams", type=int, default=1, metavar="N", help="keep the N best texts (default: 1, none)")
    group.add_argument("--beam-strategy", choices=STRATEGIES, help="how caches are kept (default: lookahead)")
    group.add_argument("--length-penalty", type=float, metavar="A", help="score: sum of log probs / length^A (1)")
    group.add_argument("--early-stopping", choices=EARLY, help="once there are N hypotheses (default: false)")
    group.add_argument("--offload", action="store_true", help="strategy swap: waiting caches in the CPU's memory")


def check(args: argparse.Namespace) -> None:
    """Refuse what does not go together. Raises ValueError."""
    if args.num_beams == 1:
        for name in ("beam_strategy", "length_penalty", "early_stopping", "offload"):
            if (value := getattr(args, name)) is not None and value is not False:  # 0.0 == False, but it was given
                raise ValueError(f"--{name.replace('_', '-')} is for beam search: give --num-beams, too")
        return
    for name, usual in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0),
                        ("compare", False), ("interactive", False), ("html", None)):  # fmt: skip
        if getattr(args, name) != usual:
            raise ValueError(f"beam search does not go with --{name.replace('_', '-')}: leave it out")
    if args.num_beams > 1 and not 1 <= args.num_return_sequences <= args.num_beams:
        raise ValueError(f"--num-return-sequences must be 1 to {args.num_beams}, the number of beams")
    if args.drafter not in ("trie", "none"):
        raise ValueError(f"beams are guessed with the trie: leave out --drafter {args.drafter}")
    args.beam_strategy = args.beam_strategy or ("tree" if args.no_lookahead else "lookahead")
    if args.beam_strategy == "lookahead" and args.no_lookahead:
        raise ValueError("--no-lookahead goes with the other beam strategies: recompute, swap, tree")
    if args.beam_strategy != "lookahead":
        for name in ("warmup", "load_trie", "save_trie", "mode"):
            if getattr(args, name):
                raise ValueError(f"strategy {args.beam_strategy} drafts nothing: leave out --{name.replace('_', '-')}")


def run(args: argparse.Namespace, model: Any, tokenizer: Tokenizer, drafter: Any, prompt_ids: list[int]) -> int:
    """One search. Returns the exit code."""
    began, steps = time.perf_counter(), 0
    for step in beam_steps(
        model, prompt_ids, num_beams=args.num_beams, max_new_tokens=args.max_new_tokens,
        length_penalty=1.0 if args.length_penalty is None else args.length_penalty,
        early_stopping=EARLY[args.early_stopping or "false"], stop_ids=(tokenizer.eot,), strategy=args.beam_strategy,
        offload=args.offload, drafter=drafter if args.beam_strategy == "lookahead" else None, budget=args.budget,
    ):  # fmt: skip
        steps += bool(step.ledger.forwards)
        if args.trace:
            print(drawn(steps, step, tokenizer))
    seconds, ledger = time.perf_counter() - began, step.ledger
    found = step.hypotheses[: args.num_return_sequences]
    texts = [tokenizer.decode(token for token in hypothesis.tokens if token != tokenizer.eot) for hypothesis in found]
    if args.json:
        sequences = [{"text": text, **hypothesis._asdict()} for text, hypothesis in zip(texts, found)]
        costs = {name: value for name, value in asdict(ledger).items() if name not in ("moves", "held", "near")}
        print(json.dumps({"strategy": args.beam_strategy, "steps": steps, "seconds": seconds, **costs,
                          "sequences": sequences}))  # fmt: skip
        return 0
    for number, (hypothesis, text) in enumerate(zip(found, texts), 1):
        print(f"--- {number} (score {hypothesis.score:.4f}, {len(hypothesis.tokens)} tokens)\n{text}")
    print(
        f"\n{args.num_beams} beams, strategy {args.beam_strategy}: {steps} steps, {ledger.forwards} forward passes of "
        f"{ledger.rows} rows, {steps / seconds:.0f} steps/s, {seconds:.2f} s\n"
        f"caches: {ledger.peak / 1e6:.1f} MB at most ({ledger.peak_near / 1e6:.1f} on the device), {ledger.takeovers} "
        f"taken over, {ledger.forks} forked, {ledger.frees} freed, {ledger.copied / 1e6:.1f} MB copied, "
        f"{ledger.sent / 1e6:.1f} MB sent"
    )
    return 0


def drawn(number: int, step: BeamStep, tokenizer: Tokenizer) -> str:
    """A step in words: what the caches did, then the beams as a tree behind what they all have in common."""
    lines = [f"step {number}: {len(step.beams)} beams, {len(step.hypotheses)} hypotheses"]
    moves = [f"  {move}" for move in step.ledger.moves]
    lines += moves or ["  no forward: what follows these beams was known"]
    if step.beams:
        size = common([beam.tokens for beam in step.beams]) if len(step.beams) > 1 else len(step.beams[0].tokens) - 1
        notes = [f"<- beam {i}, total {beam.total:.2f}, from {beam.parent}" for i, beam in enumerate(step.beams)]
        lines.append(f"  ...{tokenizer.decode(step.beams[0].tokens[:size])[-60:]!r}")
        lines += branches([(b.tokens[size:], note) for b, note in zip(step.beams, notes)], tokenizer, "  ")
    return "\n".join(lines)


def common(texts: list[tuple[int, ...]]) -> int:
    """How many tokens they begin with in common."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts)))


def branches(tails: list[tuple[tuple[int, ...], str]], tokenizer: Tokenizer, indent: str) -> list[str]:
    """Texts and what to say of each, as a tree: a line per stretch without a fork."""
    lines: list[str] = []
    firsts = list(dict.fromkeys(tail[0] for tail, _ in tails))
    for first in firsts:
        here = [(tail, note) for tail, note in tails if tail[0] == first]
        size, note = common([tail for tail, _ in here]), here[0][1] if len(here) == 1 else ""
        twig, below = ("`-- ", "    ") if first == firsts[-1] else ("|-- ", "|   ")
        lines.append(f"{indent}{twig}{tokenizer.decode(here[0][0][:size])!r} {note}".rstrip())
        if len(here) > 1:
            lines += branches([(tail[size:], note) for tail, note in here], tokenizer, indent + below)
    return lines
