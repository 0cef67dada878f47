"""The step-through page: one HTML file in which a decode is walked through, step by step, forward and back.

    python lookahead.py --prompt "..." --html trace.html

The file needs nothing but a browser: no network, no other file. It is the template `assets/page.html` (plain HTML, CSS
and JavaScript, made to be read) with what is its own put in: prompt and text, for readers without JavaScript; a line
about the run; and the *record*, a JSON object that holds what happened. This file makes the record and puts it in.

Logits are large (1 + nodes rows of one number per vocabulary entry), so a record keeps the most probable tokens of each
row only, and makes them as steps come: a decode of 200 steps never has the logits of more than two in memory.

Text that a model writes may hold anything, "</script>" for instance. Whatever goes into the file is escaped on its way
in; and the page never makes HTML out of text, it only sets text.
"""

import html
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lookahead import Generation, Step
from tokenizer import Tokenizer

TEMPLATE = Path(__file__).resolve().parent / "assets" / "page.html"
TOP = 5  # most probable tokens kept for each row


def short(p: float) -> float:
    """Four significant digits: enough to look at, and a third of the bytes. What is below 1 stays so."""
    return min(float(f"{p:.4g}"), 0.9999) if p < 1 else 1.0


def candidates(logits: Tensor, picks: Sequence[int], rows: Sequence[int], top: int = TOP) -> list[list[list]]:
    """For each row of (n, vocab_size) logits its most probable tokens, [[id, probability], ...], the first the best.

    Probabilities are the softmax of the logits as they are, before temperature, filters and penalties. `picks[i]` is
    what was picked from row `rows[i]`: it is added at the end if it is not among the `top` (when sampling, it need not
    be). Tokens that a formula rules out (probability 0) are left out.
    """
    logits = logits.detach().cpu().double()
    values, ids = logits.topk(min(top, logits.shape[-1]))
    total = logits.logsumexp(-1, keepdim=True)
    found = [
        [[token, short(p)] for token, p in zip(*row) if p > 0]
        for row in zip(ids.tolist(), (values - total).exp().tolist())
    ]
    for pick, row in zip(picks, rows):
        if all(token != pick for token, _ in found[row]):
            p = float((logits[row, pick] - total[row]).exp())
            found[row].append([pick, short(p) if p > 0 else 0.0])
    return found


class Recorder:
    """Takes the steps of one decode as they come and keeps what the page shows.

        recorder = Recorder(tokenizer, prompt_ids, about="tiny, greedy")
        for step in decode(model, prompt_ids, ...):
            recorder.add(step)
        recorder.write("trace.html")

    The record (`recorder.record`), of plain lists, numbers and strings:

    about      a line about the run, "" for none
    eot        the id of end-of-text, which is not shown as text
    prompt     {"ids": its tokens, "text": its text}
    names      id (as a string) -> the token's text, or its bytes as a list of numbers where they are no whole UTF-8 (a
               part of a character); for every id that occurs
    tail       what the text ends with if its last character never became whole: U+FFFD, else ""
    steps      a list of objects, the prefill first:
        prefill, position, accepted, tokens, seconds, finish_reason     as in `Step` (lookahead.py)
        draft      {"tokens", "parents", "probs"} as in `DraftTree`, probs None if unknown
        base       tokens in the cache before the pass, and so the root's slot; node i of the draft lies in slot
                   base + 1 + i. 0 in a prefill, where token i of the prompt lies in slot i
        kept       the slots that are kept, in the order of the text; they become slots base, base + 1, ...
        pieces     the text of each of `tokens`; a character comes with the token that completes it
        held       bytes of an unfinished character at the end, as a list of numbers
        top        (1 + nodes) lists of [id, probability], see `candidates`; a prefill has one, its last token's. None
                   if the step came without logits
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, about: str = "") -> None:
        self.tokenizer, self.stream = tokenizer, tokenizer.stream()
        prompt = [int(token) for token in prompt_ids]
        self.context = list(prompt)
        self.record: dict[str, Any] = {
            "about": about,
            "eot": tokenizer.eot,
            "prompt": {"ids": prompt, "text": self.stream.push(prompt)},
            "names": {},
            "tail": "",
            "steps": [],
        }
        self._name(prompt)

    def _name(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            data = self.tokenizer.token_bytes(token)
            try:
                self.record["names"][str(token)] = data.decode()
            except UnicodeDecodeError:
                self.record["names"][str(token)] = list(data)

    def add(self, step: Step) -> None:
        """Keep what is shown of `step`; its logits, (1 + nodes, vocab_size) or None, can go afterwards.

        Raises ValueError if the step does not continue the text so far.
        """
        if step.position != len(self.context) or step.prefill != (not self.record["steps"]):
            raise ValueError(
                f"step {len(self.record['steps'])} begins at token {step.position}, the text so far has "
                f"{len(self.context)}: give all steps of one decode of this prompt, the prefill first"
            )
        base = 0 if step.prefill else step.position - 1
        walk = [0, *(node + 1 for node in step.accepted)] if step.tokens else []  # the rows that were picked from
        top = None if step.logits is None else candidates(step.logits, step.tokens, walk)
        self.record["steps"].append({
            "prefill": step.prefill,
            "position": step.position,
            "draft": {
                "tokens": step.draft.tokens,
                "parents": step.draft.parents,
                "probs": None if step.draft.probs is None else [short(p) for p in step.draft.probs],
            },
            "base": base,
            "accepted": step.accepted,
            "kept": list(range(step.position)) if step.prefill else [base + row for row in walk],
            "tokens": step.tokens,
            "pieces": [self.stream.push([token] if token != self.tokenizer.eot else []) for token in step.tokens],
            "held": list(self.stream.held),
            "top": top,
            "seconds": [float(f"{seconds:.6f}") for seconds in step.seconds],
            "finish_reason": step.finish_reason,
        })  # fmt: skip
        self.context += step.tokens
        self._name(step.draft.tokens)
        self._name(step.tokens)
        self._name(token for row in top or [] for token, _ in row)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """The page, as a file that appears whole or not at all; returns its path. Raises as `check` does, and
        ValueError if there was no step."""
        if not self.record["steps"]:
            raise ValueError("there is no step to show")
        path = check(path)
        self.record["tail"] = "\ufffd" if self.stream.held else ""
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as scratch:
            file = Path(scratch, "page")
            file.write_text(render(self.record), encoding="utf-8", errors="replace", newline="\n")
            if path.exists():
                shutil.copymode(path, file)
            os.replace(file, path)
        return path


def check(path: str | os.PathLike[str]) -> Path:
    """Where the page will be, symbolic links followed. Raises OSError if it cannot be written there: no such folder, a
    folder by that name, something that is no file (a device, say), no right to write."""
    if not str(path):
        raise FileNotFoundError("cannot write a file without a name")
    full = Path(os.path.realpath(path))  # no complaint about links that go round in a circle: the first is replaced
    if not full.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no such folder")
    if full.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    if full.exists() and not full.is_file():
        raise OSError(f"cannot write {path}: it is not a file")
    if not os.access(full.parent, os.W_OK):
        raise PermissionError(f"cannot write {path}: its folder is not yours to write in")
    return full


def render(record: dict[str, Any]) -> str:
    """The page of a record, as text.

    In JSON "<", ">" and "&" become \\u003c and so on, so that neither "</script>" nor "<!--" can occur in it, and
    characters outside ASCII are escaped as well, U+2028 among them.
    """
    data = json.dumps(record, separators=(",", ":"))
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    text = "".join(piece for step in record["steps"] for piece in step["pieces"]) + record["tail"]
    parts = {
        "about": html.escape(record["about"]),
        "prompt": html.escape(record["prompt"]["text"]),
        "text": html.escape(text),
        "record": data,
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)  # in one go: parts may hold "{{text}}"


def write(
    path: str | os.PathLike[str],
    steps: Iterable[Step] | Generation,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    about: str = "",
) -> Path:
    """Write the page of a decode to `path` (HTML, UTF-8); returns the path.

        page.write("trace.html", decode(model, prompt_ids, drafter=trie), tokenizer, prompt_ids)

    steps       all steps of one decode of `prompt_ids`, the prefill first: `decode(...)` itself, which is then run
                step by step, or a list of them; each with logits of shape (1 + nodes, vocab_size), or None, and then
                the page shows no probabilities. Or a Generation, whose steps have none
    tokenizer   the model's
    prompt_ids  (n,) ids
    about       a line about the run: model, drafter, picker

    Raises OSError if `path` cannot be written (see `check`; before the first step is run), ValueError if the steps are
    none or do not continue one another.
    """
    check(path)
    recorder = Recorder(tokenizer, prompt_ids, about=about)
    for step in [steps.prefill, *steps.steps] if isinstance(steps, Generation) else steps:
        recorder.add(step)
    return recorder.write(path)
