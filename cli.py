"""The command line, `python lookahead.py --prompt "..."`: reads arguments, prints text as it is accepted, sums up."""

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

import weights
from exact import Exact
from lookahead import decode, first_difference, generate_many, near_tie
from model import GPT
from sampling import Greedy, Picker, Sampler
from screen import as_json, finite, note, print_comparison, print_summary, speed, stream
from tokenizer import Tokenizer
from trie import MODES, TokenTrie

PROMPT = (
    "Question: A gardener plants 6 rows of 15 tulips and sells each tulip for 2 dollars. How much does she earn?\n"
    "Answer:"
)
PROMPT_OTHER = "The bakery on the corner opens before sunrise, and the first customers"
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

PACK = {"auto": None, "on": True, "off": False}

DESCRIPTION = """\
Write a continuation of a prompt with GPT-2 and lookahead decoding: a trie of earlier text
guesses several tokens ahead, one forward pass verifies them all, and the text is, token for
token, what plain decoding writes."""
EPILOG = """\
The bundled models, tiny and nano, know grade-school word problems and nothing else:

  python lookahead.py --prompt $'Question: How many eggs are in 5 boxes of 12?\\nAnswer:'

For other text use real weights: --model gpt2 (fetched once), or a folder or file of your own.
Exit codes: 0 done; 1 --compare found a difference that rounding does not explain; 2 bad input."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's page of usage."""
        print(f"lookahead: {message} (--help lists the options)", file=sys.stderr)
        raise SystemExit(2)


def budget(text: str) -> int | str:
    return text if text == "auto" else int(text)


def make_parser() -> Parser:
    parser = Parser(
        prog="lookahead.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", metavar="TEXT", help="what to continue; '-': standard input (default: an example)")
    text.add_argument("--prompt-file", metavar="FILE", help="the prompt's file, or '-'; its last newline is dropped")
    text.add_argument("--interactive", action="store_true", help="read prompts line by line; the trie lives on")
    text.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    text.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default); 1: the model's own"
    )
    text.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens; 0: all")
    text.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest that weigh P; 1: all"
    )
    text.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="sample from tokens P times as likely as the best; 0: all"
    )
    text.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1 what was said becomes less likely"
    )
    text.add_argument(
        "--num-return-sequences",
        type=int,
        default=1,
        metavar="N",
        help="independent samples of one prompt (default: 1)",
    )
    text.add_argument("--seed", type=int, default=0, help="another seed, another sample (default: 0)")
    draft = parser.add_argument_group("lookahead")
    draft.add_argument(
        "--budget", type=budget, default="auto", metavar="N", help="tokens drafted per step (default: auto)"
    )
    draft.add_argument("--mode", choices=MODES, help=f"how the trie drafts (default: {MODES[0]})")
    draft.add_argument("--warmup", metavar="FILE", help="responses to put into the trie first: text with blank "
                       'lines between them, or JSONL of {"response": ...}')  # fmt: skip
    draft.add_argument("--load-trie", metavar="FILE", help="start with a trie that --save-trie wrote")
    draft.add_argument("--save-trie", metavar="FILE", help="write the trie, with all it has learned, at the end")
    draft.add_argument("--trace", action="store_true", help="print every step's draft tree, accepted nodes marked *")
    draft.add_argument("--no-lookahead", action="store_true", help="plain decoding, one token per forward pass")
    draft.add_argument("--compare", action="store_true", help="decode plainly, too, and compare texts and speeds")
    steer = parser.add_argument_group("formulas and search")
    steer.add_argument("--formula", metavar="F", help="a formula over the model with prompts of its own before yours: "
                       "\"M('prompt one') - 0.5*M('prompt two')\" (formula.py)")  # fmt: skip
    steer.add_argument("--search", choices=("mcts",), help="tree search for a text with a high reward (mcts.py)")
    steer.add_argument("--reward", metavar="R", help="calculator, or module:function(text, finished) -> 0 to 1 "
                       "(default: the model's own likelihood)")  # fmt: skip
    steer.add_argument("--max-nodes", type=int, default=512, metavar="N", help="tokens to read in a search (512)")
    machine = parser.add_argument_group("model and machine")
    machine.add_argument("--model", default="tiny", metavar="NAME",
                         help=f"{', '.join(weights.BUNDLED)} (bundled), {', '.join(weights.HUB)}, a folder or a "
                         ".safetensors file (default: tiny)")  # fmt: skip
    machine.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, mps")
    machine.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    machine.add_argument(
        "--pack", choices=PACK, default="auto", help="a second copy of the weights, faster to read (default: auto)"
    )
    machine.add_argument("--exact", action="store_true", help="same bits with and without lookahead; slower (exact.py)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    machine.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


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
    if args.compare and args.no_lookahead:
        raise ValueError("--compare already runs plain decoding beside lookahead: leave out --no-lookahead")
    for name in ("warmup", "load_trie", "save_trie", "trace", "mode"):
        if args.no_lookahead and getattr(args, name):
            raise ValueError(f"--no-lookahead drafts nothing: leave out --{name.replace('_', '-')}")
    for name in ("json", "compare", "prompt", "prompt_file"):
        if args.interactive and getattr(args, name):
            raise ValueError(f"--interactive reads its prompts itself: leave out --{name.replace('_', '-')}")
    for name in ("compare", "interactive", "trace"):
        if args.num_return_sequences != 1 and getattr(args, name):
            raise ValueError(f"--num-return-sequences prints several texts: leave out --{name}")
    for name in ("compare", "interactive", "trace", "warmup", "load_trie", "save_trie", "temperature"):
        if args.search and getattr(args, name):
            raise ValueError(f"--search reads a tree of its own, once: leave out --{name.replace('_', '-')}")
    if args.search and args.num_return_sequences != 1:
        raise ValueError("--search finds one text: leave out --num-return-sequences")
    if args.reward and not args.search:
        raise ValueError("--reward is what a search looks for: add --search mcts")
    if args.trace and args.json:
        raise ValueError("--json prints one object and nothing else: leave out --trace")
    if args.warmup == "-" and (args.interactive or "-" in (args.prompt, args.prompt_file)):
        raise ValueError("standard input can be read once: give the prompt or --warmup another source")
    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise ValueError(f"--threads must be 1 to 1024, not {args.threads}")
        torch.set_num_threads(args.threads)
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
    trie = None if args.no_lookahead else make_trie(args, model, tokenizer)
    settings = {"picker": picker, "max_new_tokens": args.max_new_tokens, "stop_ids": (tokenizer.eot,)}
    started = trie.outputs.clock if trie is not None else 0
    try:
        if args.interactive:
            return interactive(args, model, tokenizer, trie, settings)
        return once(args, model, tokenizer, trie, settings, prompt)
    finally:  # also when Ctrl-C ends a conversation; but a run that failed before its first token changes no file
        if args.save_trie and (trie.outputs.clock > started or args.warmup):
            trie.save(args.save_trie)
            note(args, f"{trie.n_nodes:,} nodes of the trie written to {args.save_trie}")


def once(
    args: argparse.Namespace,
    model: GPT | Exact,
    tokenizer: Tokenizer,
    trie: TokenTrie | None,
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
    if args.search:
        return searched(args, model, tokenizer, settings, prompt_ids)
    if args.num_return_sequences != 1:
        return many(args, model, tokenizer, trie, settings, prompt_ids)
    if args.compare:  # the first forwards of a process are slow; neither side should pay for that
        for _ in decode(model, prompt_ids, **settings | {"max_new_tokens": min(8, args.max_new_tokens)}):
            pass
    steps = decode(model, prompt_ids, drafter=trie, budget=args.budget, **settings)
    generation, first_text = stream(steps, tokenizer, args)
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
    found = search(model, prompt_ids, reward_named(args.reward), max_nodes=args.max_nodes, **limits)
    print(json.dumps(found.as_json()) if args.json else f"{found.text}\n\n{found.summary()}")
    return 0


def many(
    args: argparse.Namespace,
    model: GPT | Exact,
    tokenizer: Tokenizer,
    trie: TokenTrie | None,
    settings: dict[str, Any],
    prompt_ids: list[int],
) -> int:
    """Several samples, one after another. Returns the exit code."""
    generations = generate_many(
        model, prompt_ids, args.num_return_sequences, drafter=trie, budget=args.budget, **settings
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
    if args.save_trie is not None and not Path(args.save_trie).resolve().parent.is_dir():
        raise FileNotFoundError(f"cannot write {args.save_trie}: there is no such folder")
    if args.save_trie is not None and Path(args.save_trie).is_dir():
        raise IsADirectoryError(f"cannot write {args.save_trie}: it is a folder")
    if args.warmup is not None:
        for response in read_responses(args.warmup):
            trie.insert([*tokenizer.encode(response), tokenizer.eot])
    return trie


def interactive(
    args: argparse.Namespace, model: GPT | Exact, tokenizer: Tokenizer, trie: TokenTrie | None, settings: dict[str, Any]
) -> int:
    """Prompts from standard input, one a line, until an empty line or its end."""
    if sys.stdin is None:
        raise FileNotFoundError("cannot read standard input: it is closed")
    asks = args.model in weights.BUNDLED
    decode(model, [0], drafter=trie, budget=args.budget, **settings)  # wrong options are refused before any prompt
    note(args, f"one {'question' if asks else 'prompt'} a line; an empty line ends")
    while True:
        if sys.stdin.isatty():
            print("? " if asks else "> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return 0
        prompt = f"Question: {line.removeprefix('Question:').strip()}\nAnswer:" if asks else line
        try:
            steps = decode(model, tokenizer.encode(prompt), drafter=trie, budget=args.budget, **settings)
        except ValueError as error:  # the prompt is too long: the next one may fit
            print(f"lookahead: {error}", file=sys.stderr)
            continue
        generation, _ = stream(steps, tokenizer, args)
        about = [f"{len(generation.tokens)} tokens", f"{speed(generation):.0f} tokens/s"]
        if generation.steps:
            about.insert(1, f"{generation.tokens_per_step:.2f} per step")
        if trie is not None:
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
