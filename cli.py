"""The command line, `python lookahead.py --prompt "..."`: checks what was asked for and runs it. The arguments are in
options.py, what is printed is in screen.py."""

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import beamcli
import page
import weights
from drafters import Combined, Jacobi, ModelDrafter, PromptLookup
from exact import Exact
from lookahead import Drafter, decode, first_difference, generate_many, near_tie
from model import GPT
from options import DTYPES, PACK, make_parser
from sampling import Greedy, Picker, Sampler
from screen import as_json, finite, note, print_comparison, print_summary, speed, stream
from tokenizer import Tokenizer
from trie import MODES, TokenTrie

PROMPT = (
    "Question: A gardener plants 6 rows of 15 tulips and sells each tulip for 2 dollars. How much does she earn?\n"
    "Answer:"
)
PROMPT_OTHER = "The bakery on the corner opens before sunrise, and the first customers"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code. A user's mistake ends in one line on stderr and code 2."""
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            output.reconfigure(errors="replace")  # a terminal without "é" shows "?" instead of dying
    args = make_parser().parse_args(argv)
    try:
        if sys.stdout is None:
            raise OSError("standard output is closed: there is nowhere to write")
        return run(args)
    except torch.OutOfMemoryError:
        return no_memory(args)
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # how torch says that the CPU's memory is full
            raise
        return no_memory(args)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `| head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        print(f"lookahead: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nlookahead: interrupted", file=sys.stderr)
        return 130


def no_memory(args: argparse.Namespace) -> int:
    print(f"lookahead: {args.model} does not fit the memory of {args.device}: try a smaller model", file=sys.stderr)
    return 2


def run(args: argparse.Namespace) -> int:
    if args.drafter == "none":
        args.no_lookahead = True
    plain = "--no-lookahead" if args.drafter != "none" else "--drafter none"
    if args.compare and args.no_lookahead:
        raise ValueError(f"--compare already runs plain decoding beside lookahead: leave out {plain}")
    if args.no_lookahead and args.drafter not in ("trie", "none"):
        raise ValueError(f"--no-lookahead drafts nothing: leave out --drafter {args.drafter}")
    for name in ("warmup", "load_trie", "save_trie", "mode"):
        if args.drafter in ("prompt-lookup", "jacobi", "model") and getattr(args, name):
            raise ValueError(f"--drafter {args.drafter} has no trie: leave out --{name.replace('_', '-')}")
    if args.draft_model is None and args.drafter == "model":
        if args.model != "tiny":
            raise ValueError("--drafter model needs --draft-model: a smaller model with the same vocabulary")
        args.draft_model = "nano"
    if args.draft_model is not None and args.drafter not in ("model", "combined"):
        raise ValueError("--draft-model is for --drafter model or combined")
    for name in ("warmup", "load_trie", "save_trie", "trace", "mode", "draft_model"):
        if args.no_lookahead and getattr(args, name):
            raise ValueError(f"{plain} drafts nothing: leave out --{name.replace('_', '-')}")
    for name in ("json", "compare", "prompt", "prompt_file"):
        if args.interactive and getattr(args, name):
            raise ValueError(f"--interactive reads its prompts itself: leave out --{name.replace('_', '-')}")
    if args.interactive and args.html is not None:
        raise ValueError("--html shows one text, --interactive writes many: leave out --html")
    beamcli.check(args)
    for name in ("compare", "interactive", "trace", "html") if args.num_beams == 1 else ():
        if args.num_return_sequences != 1 and getattr(args, name) not in (None, False):
            raise ValueError(f"--num-return-sequences prints several texts: leave out --{name}")
    usual = make_parser().parse_args([])
    for name in ("compare", "interactive", "trace", "warmup", "load_trie", "save_trie", "temperature", "top_k", "top_p",
                 "min_p", "repetition_penalty", "seed", "mode", "budget", "drafter", "draft_model", "no_lookahead",
                 "num_beams", "num_return_sequences", "html"):  # fmt: skip
        if args.search and getattr(args, name) != getattr(usual, name):
            raise ValueError(f"--search goes its own way to one text: leave out --{name.replace('_', '-')}")
    for name in ("reward", "max_nodes"):
        if getattr(args, name) is not None and not args.search:
            raise ValueError(f"--{name.replace('_', '-')} is for a search: add --search mcts")
    if args.trace and args.json:
        raise ValueError("--json prints one object and nothing else: leave out --trace")
    if args.warmup == "-" and (args.interactive or "-" in (args.prompt, args.prompt_file)):
        raise ValueError("standard input can be read once: give the prompt or --warmup another source")
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise ValueError(f"--threads must be 1 to 1024, not {args.threads}")
        torch.set_num_threads(args.threads)
    if args.html == "-":
        raise ValueError("--html writes a file for a browser: give its name")
    if args.html is not None:
        page.check(args.html)
    picker = make_picker(args)
    prompt = read_prompt(args)
    device = check_device(args.device)
    model = GPT.load(args.model, device, DTYPES[args.dtype], PACK[args.pack])
    if args.pack == "on" and model.packed is None:
        note(args, f"packed weights do not exist for {args.dtype} on {args.device}: going on without")
    if args.exact:
        model = Exact(model)
    model = formula_over(args, model)
    tokenizer = Tokenizer.for_model(model)
    trie = make_trie(args, model, tokenizer) if args.drafter in ("trie", "combined") and not args.no_lookahead else None
    drafter = None if args.no_lookahead or args.search else make_drafter(args, model, trie)
    settings = {"picker": picker, "max_new_tokens": args.max_new_tokens, "stop_ids": (tokenizer.eot,)}
    started = trie.outputs.clock if trie is not None else 0
    try:
        if args.interactive:
            return interactive(args, model, tokenizer, drafter, settings)
        return once(args, model, tokenizer, drafter, settings, prompt)
    finally:  # also when Ctrl-C ends a conversation; but a run that failed before its first token changes no file
        if args.save_trie and (trie.outputs.clock > started or args.warmup):
            trie.save(args.save_trie)
            note(args, f"{trie.n_nodes:,} nodes of the trie written to {args.save_trie}")


def once(
    args: argparse.Namespace,
    model: GPT | Exact,
    tokenizer: Tokenizer,
    drafter: Drafter | None,
    settings: dict[str, Any],
    prompt: str | None,
) -> int:
    """One prompt, perhaps compared with plain decoding. Returns the exit code."""
    picker = settings["picker"]
    if prompt is None:
        prompt = PROMPT if args.model in weights.BUNDLED else PROMPT_OTHER
        note(args, f"no --prompt given, so here is an example:\n{prompt}")
    elif args.model in weights.BUNDLED and not prompt.startswith("Question:"):
        note(args, f"{args.model} only knows word problems written as 'Question: ...', a new line, 'Answer:'")
    if "\\n" in prompt and "\n" not in prompt:
        note(args, "the prompt holds a backslash and an n, not a line break; in bash write $'...\\n...'")
    prompt_ids = tokenizer.encode(prompt)
    if args.num_beams != 1:
        return beamcli.run(args, model, tokenizer, drafter, prompt_ids)
    if args.search:
        return searched(args, model, tokenizer, settings, prompt_ids)
    if args.num_return_sequences != 1:
        return many(args, model, tokenizer, drafter, settings, prompt_ids)
    if args.compare:  # the first forwards of a process are slow; neither side should pay for that
        for _ in decode(model, prompt_ids, **settings | {"max_new_tokens": min(8, args.max_new_tokens)}):
            pass
    steps = decode(model, prompt_ids, drafter=drafter, budget=args.budget, **settings)
    recorder = page.Recorder(tokenizer, prompt_ids, about=about(args)) if args.html is not None else None
    generation, first_text = stream(steps, tokenizer, args, recorder.add if recorder is not None else None)
    if recorder is not None:
        recorder.write(args.html)
        note(args, f"{args.html} shows the {len(generation.steps)} steps: open it in a browser")
    if not args.compare:
        if args.json:
            print(json.dumps(as_json(generation, tokenizer)))
        else:
            print_summary(generation, first_text, args, model)
        return 0

    plain, _ = stream(decode(model, prompt_ids, **settings), tokenizer, None)
    ratio = speed(generation) / speed(plain) if plain.tokens else math.nan
    tie = None
    if first_difference(generation.tokens, plain.tokens) is not None:
        # the same rounded weights, sums in float64
        reference = GPT.load(args.model, dtype=model.dtype, pack=False).double()
        reference = formula_over(args, reference)
        tie = near_tie(reference, prompt_ids, generation.tokens, plain.tokens, picker)
    proven = tie is not None and tie.within_rounding(model.dtype)
    if args.json:
        report = as_json(generation, tokenizer) | {
            "plain": as_json(plain, tokenizer),
            "ratio": finite(ratio),
            "identical": tie is None,
            "near_tie": {"position": tie.position, "gap": tie.gap} if proven else None,
        }
        print(json.dumps(report))
    else:
        print_summary(generation, first_text, args, model)
        print_comparison(plain, ratio, tie, proven)
    if tie is not None and not proven:
        print(
            f"lookahead: the texts differ from new token {tie.position} on, by {tie.gap:.3g}: an error", file=sys.stderr
        )
        return 1
    return 0


def about(args: argparse.Namespace) -> str:
    """The run in a line, for the page."""
    parts = [f"{args.model}, {args.device}, {args.dtype}" + (", exact" if args.exact else "")]
    parts += [f"formula {args.formula}"] if args.formula is not None else []
    drafter = f"drafter {args.drafter}" + (f" ({args.draft_model})" if args.draft_model else "")
    parts.append("plain decoding" if args.no_lookahead else f"{drafter}, budget {args.budget}")
    filters = [f"{name.replace('_', '-')} {getattr(args, name)}" for name in ("top_k", "top_p", "min_p", "seed")]
    parts.append(", ".join([f"temperature {args.temperature}", *filters]) if args.temperature else "greedy")
    parts += [f"repetition-penalty {args.repetition_penalty}"] if args.repetition_penalty != 1 else []
    return "; ".join(parts)


def formula_over(args: argparse.Namespace, model: Any) -> Any:
    """--formula over `model`; the model itself without one."""
    if args.formula is None:
        return model
    from formula import parse

    return parse(args.formula, model)


def searched(
    args: argparse.Namespace, model: Any, tokenizer: Tokenizer, settings: dict[str, Any], prompt_ids: list[int]
) -> int:
    """The best text that a tree search finds. Returns the exit code."""
    from mcts import reward_named, search

    limits = {name: settings[name] for name in ("max_new_tokens", "stop_ids")}
    found = search(
        model,
        prompt_ids,
        reward_named(args.reward),
        max_nodes=2048 if args.max_nodes is None else args.max_nodes,
        **limits,
    )
    print(json.dumps(found.as_json()) if args.json else f"{found.text}\n\n{found.summary()}")
    return 0


def many(
    args: argparse.Namespace,
    model: GPT | Exact,
    tokenizer: Tokenizer,
    drafter: Drafter | None,
    settings: dict[str, Any],
    prompt_ids: list[int],
) -> int:
    """Several samples, one after another. Returns the exit code."""
    generations = generate_many(
        model, prompt_ids, args.num_return_sequences, drafter=drafter, budget=args.budget, **settings
    )
    if args.json:
        print(json.dumps({"sequences": [as_json(generation, tokenizer) for generation in generations]}))
        return 0
    for number, generation in enumerate(generations, 1):
        about = f"{len(generation.tokens)} tokens, {generation.tokens_per_step:.2f} per step"
        print(f"--- {number} ({about})\n{as_json(generation, tokenizer)['text']}")
    tokens, seconds = (sum(values) for values in zip(*((len(g.tokens), g.seconds) for g in generations)))
    print(f"\n{len(generations)} samples, {tokens} tokens, {tokens / seconds:.0f} tokens/s, the prompt read once")
    return 0


def make_trie(args: argparse.Namespace, model: GPT | Exact, tokenizer: Tokenizer) -> TokenTrie:
    trie = TokenTrie(model.vocab_size, mode=args.mode or MODES[0])
    if args.load_trie is not None:
        wanted, trie = trie.max_depth, TokenTrie.load(args.load_trie, model.vocab_size)
        if args.mode not in (None, trie.mode):
            if trie.max_depth < wanted:
                note(
                    args,
                    f"{args.load_trie} is {trie.max_depth} tokens deep, mode {args.mode} drafts best with {wanted}",
                )
            trie.mode = args.mode
    if args.save_trie is not None:
        page.check(args.save_trie)
    if args.warmup is not None:
        for response in read_responses(args.warmup):
            trie.insert([*tokenizer.encode(response), tokenizer.eot])
    return trie


def make_drafter(args: argparse.Namespace, model: GPT | Exact, trie: TokenTrie | None) -> Drafter:
    if args.drafter == "jacobi" and args.budget == "auto":
        args.budget = 32  # guesses pay only later, which the automatic budget does not see
        note(args, "jacobi drafts a fixed number of tokens: 32 (--budget N for another)")
    made: list[Drafter] = [trie] if trie is not None else []
    if args.drafter in ("prompt-lookup", "combined"):
        made.append(PromptLookup())
    if args.drafter == "jacobi":
        made.append(Jacobi())
    if args.draft_model is not None:
        small = GPT.load(args.draft_model, model.device, model.dtype, PACK[args.pack])
        if small.vocab_size != model.vocab_size:
            sizes = f"{small.vocab_size} tokens, {args.model} {model.vocab_size}"
            raise ValueError(f"--draft-model {args.draft_model} has a vocabulary of {sizes}: they must be the same")
        made.append(ModelDrafter(small))
    return Combined(made) if len(made) > 1 else made[0]


def interactive(
    args: argparse.Namespace,
    model: GPT | Exact,
    tokenizer: Tokenizer,
    drafter: Drafter | None,
    settings: dict[str, Any],
) -> int:
    """Prompts from standard input, one a line, until an empty line or its end."""
    if sys.stdin is None:
        raise FileNotFoundError("cannot read standard input: it is closed")
    asks = args.model in weights.BUNDLED
    decode(model, [0], drafter=drafter, budget=args.budget, **settings)  # wrong options are refused before any prompt
    note(args, f"one {'question' if asks else 'prompt'} a line; an empty line ends")
    while True:
        if sys.stdin.isatty():
            print("? " if asks else "> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return 0
        prompt = f"Question: {line.removeprefix('Question:').strip()}\nAnswer:" if asks else line
        try:
            steps = decode(model, tokenizer.encode(prompt), drafter=drafter, budget=args.budget, **settings)
        except ValueError as error:  # the prompt is too long: the next one may fit
            print(f"lookahead: {error}", file=sys.stderr)
            continue
        generation, _ = stream(steps, tokenizer, args)
        about = [f"{len(generation.tokens)} tokens", f"{speed(generation):.0f} tokens/s"]
        if generation.steps:
            about.insert(1, f"{generation.tokens_per_step:.2f} per step")
        trie = getattr(drafter, "drafters", [drafter])[0]  # Combined has the trie first
        if isinstance(trie, TokenTrie):
            about.append(f"{trie.n_nodes:,} nodes in the trie")
        print(f"[{', '.join(about)}]\n", flush=True)


def make_picker(args: argparse.Namespace) -> Picker:
    # Made even for greedy decoding, so that a bad --top-p is noticed.
    sampler = Sampler(args.temperature or 1.0, args.top_k, args.top_p, args.seed, args.min_p, args.repetition_penalty)
    return sampler if args.temperature else Greedy(args.repetition_penalty)


def check_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = re.split(r"\. |\n", str(error))[0][:200]
        name = repr(name)
        raise ValueError(f"--device {name} cannot be used here ({reason}); cpu always works") from None
    return device


def read_text(file: str) -> str:
    """The text of a file, or of standard input for "-"."""
    if file == "-" and sys.stdin is None:
        raise FileNotFoundError("cannot read standard input: it is closed")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError:
        raise ValueError(f"{'standard input' if file == '-' else file} is not UTF-8 text") from None
    except OSError as error:
        raise FileNotFoundError(f"cannot read {file}: {error.strerror}") from None


def read_prompt(args: argparse.Namespace) -> str | None:
    if args.prompt is not None and args.prompt_file is not None:
        raise ValueError("give either --prompt or --prompt-file, not both")
    prompt = args.prompt
    if args.prompt_file is not None or prompt == "-":
        prompt = read_text(args.prompt_file or "-").removesuffix("\n").removesuffix("\r")
    if prompt == "":
        raise ValueError("the prompt is empty: give at least one character")
    return prompt


def read_responses(file: str) -> Iterator[str]:
    """JSONL if the first line is a JSON object: its "response" (or "text"); otherwise text with blank lines between."""
    text = read_text(file)
    lines = [line for line in text.split("\n") if line.strip()]  # not splitlines: JSON strings may hold U+2028
    if text.lstrip().startswith("[{"):
        raise ValueError(f"{file} is a JSON array: write one object per line instead (JSONL)")
    if not (lines and lines[0].lstrip().startswith("{")):
        yield from (block for block in text.replace("\r\n", "\n").split("\n\n") if block.strip())
        return
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            response = record["response"] if "response" in record else record["text"]
            if not isinstance(response, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f'{file}: record {number} is no JSON object with a "response" text') from None
        yield response


if __name__ == "__main__":
    raise SystemExit(main())
