"""Two questions, measured: which drafter is worth what, and how often rounding shows.

`python bench.py drafters` lets every source of drafts decode the same problems: tokens per step, nodes, the time that
drafting takes, tokens per second. When sampling, the trie and the draft model (as a chain, as a tree) run twice, with
the noise of future positions and without.

`python bench.py parting` decodes each problem plainly and with lookahead and counts how often the texts part, in
ordinary and in exact mode (exact.py). Where they do, it asks a float64 model how close a call it was (`near_tie`).
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from drafters import Combined, Jacobi, ModelDrafter, PromptLookup
from exact import Exact
from lookahead import Drafter, Session, Step, generate, near_tie
from model import GPT
from replay import Pair
from sampling import Greedy, Picker, Sampler
from speed import Contender, over, race
from trie import TokenTrie


class Blind:
    """A drafter that is not shown the noise (and gets no picks: not for Jacobi)."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def open(self, prompt_ids: Sequence[int]) -> "BlindSession":
        return BlindSession(self.drafter.open(prompt_ids))


class BlindSession:
    def __init__(self, session: Session) -> None:
        self.session, self.observe, self.close = session, session.observe, session.close

    def draft(self, budget: int, picker: Picker | None = None) -> Any:
        return self.session.draft(budget)


def warmed(model: Any, texts: Sequence[Sequence[int]]) -> TokenTrie:
    """A trie that has seen these texts."""
    trie = TokenTrie(model.vocab_size)
    for text in texts:
        trie.insert(text)
    return trie


def compare_drafters(
    model: GPT,
    small: GPT | None,
    asked: Sequence[Pair],
    warm: Sequence[Sequence[int]],
    budget: int | str,
    *,
    temperature: float,
    stop: int,
    max_new_tokens: int,
    repeat: int,
    progress: Callable[[str], None],
) -> tuple[list[dict], list[str]]:
    """Rows of the table, and remarks. `small` is the draft model, or None; `asked` are (prompt, anything) ids, `warm`
    texts for the tries, `stop` the token that ends a text, `repeat` the number of rounds.

    tokens_per_s, times_plain   as in speed.py
    draft_ms                    mean time that a step spends on drafting
    """
    makers: dict[str, Callable[[], Drafter | None]] = {
        "plain": lambda: None,
        "trie": lambda: warmed(model, warm),
        "prompt lookup": PromptLookup,
        "Jacobi": Jacobi,
    }
    if small is not None:
        makers |= {
            "draft model, chain": lambda: ModelDrafter(small, chain=True),
            "draft model, tree": lambda: ModelDrafter(small),
            "combined": lambda: Combined([warmed(model, warm), PromptLookup(), ModelDrafter(small)]),
        }
    else:
        makers["combined"] = lambda: Combined([warmed(model, warm), PromptLookup()])
    if temperature:
        blind = [name for name in ("trie", "draft model, chain", "draft model, tree") if name in makers]
        makers |= {f"{name}, noise unseen": lambda make=makers[name]: Blind(make()) for name in blind}

    def contender(make: Callable[[], Drafter | None]) -> Contender:
        def start() -> Callable[[int, int], tuple[int, list[Step]]]:
            drafter = make()

            def run(i: int, most: int) -> tuple[int, list[Step]]:
                picker = Sampler(temperature, seed=i) if temperature else Greedy()
                result = generate(model, asked[i][0], drafter=drafter, picker=picker, budget=budget,
                                  max_new_tokens=most, stop_ids=[stop])  # fmt: skip
                return len(result.tokens), result.steps

            return run

        return Contender(start)

    contenders = {name: contender(make) for name, make in makers.items()}
    for number, state in race(contenders, len(asked), max_new_tokens, repeat):
        progress(f"round {number} of {repeat}: " + ", ".join(f"{name} {c.rates[-1]:.0f}" for name, c in state.items()))
    rows = [
        {
            "drafter": name,
            "tokens_per_step": each.emitted / each.steps,
            "nodes_per_step": each.drafted / each.steps,
            "draft_ms": 1e3 * each.drafting / each.steps,
            "tokens_per_s": statistics.median(each.rates),
            "times_plain": over(each.rates, contenders["plain"].rates),
        }
        for name, each in contenders.items()
        if each.steps
    ]
    found = {row["drafter"]: row["tokens_per_step"] for row in rows}
    remarks = [
        f"{name}: seeing the noise makes {found[name] / found[f'{name}, noise unseen']:.2f} times the tokens per step"
        for name in found
        if f"{name}, noise unseen" in found
    ]
    return rows, remarks


def parting(
    model: GPT,
    reference: GPT,
    asked: Sequence[Pair],
    *,
    budget: int,
    temperature: float,
    stop: int,
    max_new_tokens: int,
    progress: Callable[[str], None],
) -> tuple[list[dict], list[str]]:
    """How often the plain text and the one with lookahead part. `reference` is the same model in float64.

    parted                  texts that part
    least_gap, largest_gap  the smallest and the largest `near_tie` gap among them
    largest_unit            the largest in units of eps * the largest |logit|; up to lookahead.ROUNDING it is rounding

    Raises ArithmeticError if a difference is more than rounding.
    """
    rows, remarks = [], []
    modes = {"ordinary": model}
    try:
        modes["exact"] = Exact(model)
    except ValueError as error:
        remarks.append(f"exact mode was left out: {error}")
    for mode, each in modes.items():
        trie, ties, tokens = TokenTrie(model.vocab_size), [], 0
        for i, (prompt, _) in enumerate(asked):
            settings = {
                "picker": Sampler(temperature, seed=i) if temperature else Greedy(),
                "max_new_tokens": max_new_tokens,
                "stop_ids": [stop],
            }
            plain = generate(each, prompt, **settings).tokens
            fast = generate(each, prompt, drafter=trie, budget=budget, **settings).tokens
            tokens += len(plain)
            tie = near_tie(reference, prompt, fast, plain, settings["picker"])
            if tie is not None:
                ties.append(tie)
                if not tie.within_rounding(model.dtype):
                    raise ArithmeticError(f"problem {i} parts by {tie.gap:.3g} at token {tie.position}: an error")
            if i % 10 == 9:
                progress(f"{mode}: {len(ties)} of {i + 1} texts part")
        row = {"mode": mode, "texts": len(asked), "tokens": tokens, "parted": len(ties)}
        if ties:
            eps = torch.finfo(model.dtype).eps
            row |= {
                "least_gap": min(tie.gap for tie in ties),
                "largest_gap": max(tie.gap for tie in ties),
                "largest_unit": max(tie.gap / (eps * tie.scale) for tie in ties),
            }
        rows.append(row)
    return rows, remarks
