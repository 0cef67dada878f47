"""The options of the command line."""

import argparse
import sys
from typing import NoReturn

import torch

import beamcli
import weights
from trie import MODES

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

PACK = {"auto": None, "on": True, "off": False}
DRAFTERS = ("trie", "prompt-lookup", "jacobi", "model", "combined", "none")

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
        name = self.prog.split()[0].removesuffix(".py")
        print(f"{name}: {message} (--help lists the options)", file=sys.stderr)
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
        help="independent samples of one prompt, or hypotheses (default: 1)",
    )
    text.add_argument("--seed", type=int, default=0, help="another seed, another sample (default: 0)")
    draft = parser.add_argument_group("lookahead")
    draft.add_argument(
        "--budget", type=budget, default="auto", metavar="N", help="tokens drafted per step (default: auto)"
    )
    draft.add_argument(
        "--drafter", choices=DRAFTERS, default="trie",
        help="where guesses come from: a trie of earlier text (default), the text itself (prompt-lookup), what the "
        "model said too early (jacobi), a smaller model, trie + text + smaller model if any (combined), nowhere (none)",
    )  # fmt: skip
    draft.add_argument(
        "--draft-model", metavar="NAME", help="the smaller model, same vocabulary (default for tiny: nano)"
    )
    draft.add_argument("--mode", choices=MODES, help=f"how the trie drafts (default: {MODES[0]})")
    draft.add_argument("--warmup", metavar="FILE", help="responses to put into the trie first: text with blank "
                       'lines between them, or JSONL of {"response": ...}')  # fmt: skip
    draft.add_argument("--load-trie", metavar="FILE", help="start with a trie that --save-trie wrote")
    draft.add_argument("--save-trie", metavar="FILE", help="write the trie, with all it has learned, at the end")
    draft.add_argument("--trace", action="store_true", help="print every step's draft tree, accepted nodes marked *")
    draft.add_argument(
        "--html", metavar="FILE", help="write a page to step through the decode, for any browser (page.py)"
    )
    draft.add_argument("--no-lookahead", action="store_true", help="plain decoding; the same as --drafter none")
    draft.add_argument("--compare", action="store_true", help="decode plainly, too, and compare texts and speeds")
    beamcli.add_options(parser)
    steer = parser.add_argument_group("formulas and search")
    steer.add_argument("--formula", metavar="F", help="a formula over the model with prompts of its own before yours: "
                       "\"M('prompt one') - 0.5*M('prompt two')\" (formula.py; if it begins with a minus, "
                       "--formula=-...)")  # fmt: skip
    steer.add_argument("--search", choices=("mcts",), help="tree search for a text with a high reward (mcts.py)")
    steer.add_argument("--reward", metavar="R", help="calculator, or module:function(text, finished) -> 0 to 1 "
                       "(default: the model's own likelihood)")  # fmt: skip
    steer.add_argument("--max-nodes", type=int, metavar="N", help="tokens to read in a search (default: 2048)")
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
