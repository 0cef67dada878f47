"""What the command line prints: text as it is accepted, draft trees, sums. `cli.py` decides what is run."""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import weights
from lookahead import Generation, NearTie, Step
from model import GPT
from tokenizer import Tokenizer


def note(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(f"note: {text}", file=sys.stderr)


def stream(
    steps: Iterator[Step],
    tokenizer: Tokenizer,
    args: argparse.Namespace | None,
    record: Callable[[Step], None] | None = None,
) -> tuple[Generation, float]:
    """Run a decode to its end, printing text as it comes if wanted; also the seconds until the first text. `record` is
    handed each step while it has its logits."""
    show = args is not None and not args.json
    colour = show and sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    text = tokenizer.stream()
    done: list[Step] = []
    began, paused, first = time.perf_counter(), 0.0, 0.0
    for step in steps:
        arrived = time.perf_counter()
        first = first or arrived - began
        if record is not None:
            record(step)
        step.logits = None
        done.append(step)
        if show and args.trace:
            print_trace(len(done) - 1, step, tokenizer)
        elif show:
            for i, token in enumerate(step.tokens):
                piece = text.push([token] if token != tokenizer.eot else [])
                drafted = i < len(step.accepted)
                sys.stdout.write(f"\033[32m{piece}\033[0m" if colour and drafted and piece else piece)
            sys.stdout.flush()
        paused += time.perf_counter() - arrived  # printing and recording are not decoding
    seconds = time.perf_counter() - began - paused
    if show and args.trace:
        print(tokenizer.decode(token for step in done for token in step.tokens if token != tokenizer.eot))
    elif show:
        print(text.close())
    return Generation.of(done, seconds), first


def print_trace(number: int, step: Step, tokenizer: Tokenizer) -> None:
    """One step: its draft tree with probabilities, the accepted nodes, what was emitted."""
    emitted = " ".join(repr(tokenizer.decode([token])) for token in step.tokens)
    name = "prefill" if step.prefill else f"step {number}"
    print(f"{name}: {len(step.accepted)} of {len(step.draft)} nodes accepted, emitted {emitted}")
    if step.draft:
        print(step.draft.render(tokenizer.decode, step.accepted))


def speed(generation: Generation) -> float:
    return len(generation.tokens) / generation.seconds


def finite(x: float) -> float | None:
    return x if math.isfinite(x) else None  # JSON has no nan


def as_json(generation: Generation, tokenizer: Tokenizer) -> dict[str, Any]:
    """`tokens` are the new ids, a stop token included; `steps` counts decode steps; `text` is without the stop."""
    shown = [token for token in generation.tokens if token != tokenizer.eot]
    return {
        "text": tokenizer.decode(shown),
        "tokens": generation.tokens,
        "steps": len(generation.steps),
        "tokens_per_step": finite(generation.tokens_per_step),
        "seconds": generation.seconds,
        "tokens_per_second": speed(generation),
        "finish_reason": generation.finish_reason,
    }


REASONS = {"stop": "end of text", "length": "--max-new-tokens reached", "context": "the model's context is full"}


def print_summary(generation: Generation, first_text: float, args: argparse.Namespace, model: GPT) -> None:
    steps = len(generation.steps)
    if steps:
        per_step = f"{generation.tokens_per_step:.2f} tokens per step"
        accepted = sum(len(step.accepted) for step in generation.steps)
        drafted = sum(len(step.draft) for step in generation.steps)
        per_step += f" ({accepted} of {drafted} drafted tokens accepted)" if not args.no_lookahead else ""
    else:
        per_step = "no decode step"
    print(f"\n{len(generation.tokens)} tokens, {steps + bool(generation.tokens)} forward passes, {per_step}")
    about = f"{args.model}, {args.device}, {args.dtype}" + (", exact" if args.exact else "")
    if args.device == "cpu":
        about += f", {torch.get_num_threads()} threads"
    about += f", {model.nbytes / 1e6:.0f} MB of weights" + (" + as much packed" if model.packed is not None else "")
    about += "; knows word problems only" if args.model in weights.BUNDLED else ""
    print(
        f"{speed(generation):.0f} tokens/s, {generation.seconds:.2f} s, first token after {first_text:.2f} s, "
        f"{REASONS[generation.finish_reason]} [{about}]"
    )


def print_comparison(plain: Generation, ratio: float, tie: NearTie | None, proven: bool) -> None:
    passes = len(plain.steps) + bool(plain.tokens)
    if tie is None:
        verdict = "identical, token for token"
    else:
        verdict = f"the same up to new token {tie.position}, then a "
        verdict += f"near-tie (gap {tie.gap:.1g}, within rounding)" if proven else f"DIFFERENCE (gap {tie.gap:.3g})"
    print(f"plain decoding: {len(plain.tokens)} tokens, {passes} forward passes, {speed(plain):.0f} tokens/s")
    print(f"lookahead is {ratio:.2f} times as fast; texts: {verdict}")
