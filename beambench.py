"""Beam search, side by side: the strategies of beam.py, and transformers where it is installed.

`python bench.py beam` is its command line. As in speed.py, all contenders take turns at each problem, with the same
weights in one process; every round begins with a fresh trie that knows the warm responses.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from beam import STRATEGIES, Hypothesis, beam_steps
from compare import warmed
from model import GPT
from speed import over
from trie import TokenTrie

USUAL = ("swap", "tree", "lookahead", "lookahead 4", "lookahead 32")

Found = tuple[list[Hypothesis], int, dict[str, float]]  # hypotheses, steps, what it cost


def ours(model: GPT, strategy: str, trie: TokenTrie, **settings: Any) -> Callable[[list[int]], Found]:
    """`strategy` may say more: "swap offload", "lookahead 4" (nodes per beam)."""
    name, more = strategy.partition(" ")[::2]
    if name not in STRATEGIES or not (more == "" or (name, more) == ("swap", "offload") or
                                      (name == "lookahead" and (more == "auto" or more.isdecimal()))):  # fmt: skip
        raise ValueError(f"--strategy {strategy!r} is not one of: {', '.join(STRATEGIES)}, swap offload, lookahead 8")
    if more == "offload":
        settings["offload"] = True
    elif name == "lookahead":
        settings |= {"drafter": trie, "budget": int(more) if more.isdecimal() else "auto"}

    def run(prompt: list[int]) -> Found:
        done = list(beam_steps(model, prompt, strategy=name, **settings))
        ledger = done[-1].ledger
        return done[-1].hypotheses, len(done), {
            "forwards": ledger.forwards, "rows": ledger.rows, "peak": ledger.peak, "used": ledger.peak_used,
            "near": ledger.peak_near, "moved": ledger.copied + ledger.sent,
        }  # fmt: skip

    return run


def theirs(model: GPT, num_beams: int, max_new_tokens: int, stop_ids: Sequence[int]) -> Callable[[list[int]], Found]:
    """transformers' beam search. Its cache is measured as it is at the end, without the copies that reordering makes.

    Raises ImportError where transformers is not installed.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        peer = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()

    def run(prompt: list[int]) -> Found:
        tokens = torch.tensor([prompt], device=model.device)
        with torch.no_grad():
            output = peer.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, num_beams=num_beams, pad_token_id=0,
                max_new_tokens=min(max_new_tokens, model.n_ctx - len(prompt)), eos_token_id=list(stop_ids) or None,
                num_return_sequences=num_beams, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        layers = output.past_key_values.layers
        size = sum(part.numel() * part.element_size() for layer in layers for part in (layer.keys, layer.values))
        steps = output.past_key_values.get_seq_length() - len(prompt) + 1
        found = []
        for sequence, score in zip(output.sequences[:, len(prompt) :].tolist(), output.sequences_scores.tolist()):
            end = next((i + 1 for i, token in enumerate(sequence) if token in stop_ids), len(sequence))
            found.append(Hypothesis(sequence[:end], score))
        return found, steps, {"forwards": steps, "used": size}

    return run


def compete(
    model: GPT, prompts: Sequence[list[int]], warm: Sequence[list[int]], strategies: Sequence[str], *, num_beams: int,
    max_new_tokens: int, stop_ids: Sequence[int], repeat: int, progress: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """Rows of the table, and what was skipped and why.

    steps_per_s      positions generated per second, prompts included (median over rounds); times_transformers:
                     the median of the ratios in each round
    forwards         per step
    peak_mb, used_mb caches allocated at most, and slots in use at most: the largest over all problems
    moved_mb         copied within a memory or sent between two, per problem
    same             share of the problems whose hypotheses are those of the first contender, all and in order. Rounding
                     may part them (float32); in float64 all strategies agree (test_all.py)
    """
    settings = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
    names, peer, skipped = [*strategies], None, []
    try:
        peer = theirs(model, **settings)
        names.append("transformers")
    except ImportError:
        skipped.append("transformers (not installed: pip install transformers)")
    rates: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[dict[str, float]]] = {}
    same: dict[str, list[bool]] = {}
    for number in range(repeat):
        runs = {name: ours(model, name, warmed(model, warm), **settings) for name in strategies}
        if peer is not None:
            runs["transformers"] = peer
        taken, positions = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        costs, same = {name: [] for name in names}, {name: [] for name in names}
        for prompt in prompts:
            first: list[Hypothesis] = []
            for name, run in runs.items():
                began = time.perf_counter()
                found, steps, cost = run(prompt)
                taken[name] += time.perf_counter() - began
                positions[name] += steps
                costs[name].append(cost | {"steps": steps})
                first = first or found
                same[name].append([h.tokens for h in found] == [h.tokens for h in first])
        for name in names:
            rates[name].append(positions[name] / taken[name])
        progress(f"round {number + 1} of {repeat}: " + ", ".join(f"{name} {rates[name][-1]:.1f}" for name in names))
    rows = []
    for name in names:
        mine = costs[name]
        steps = sum(cost["steps"] for cost in mine)
        row = {"strategy": name, "num_beams": num_beams, "steps_per_s": statistics.median(rates[name])}
        if peer is not None:
            row["times_transformers"] = over(rates[name], rates["transformers"])
        row["forwards"] = sum(cost["forwards"] for cost in mine) / steps
        if "rows" in mine[0]:
            row["rows_per_forward"] = sum(c["rows"] for c in mine) / sum(c["forwards"] for c in mine)
            row |= {"peak_mb": max(cost["peak"] for cost in mine) / 1e6,
                    "device_mb": max(cost["near"] for cost in mine) / 1e6}  # fmt: skip
        row["used_mb"] = max(cost["used"] for cost in mine) / 1e6
        if "rows" in mine[0]:
            row["moved_mb"] = sum(cost["moved"] for cost in mine) / len(mine) / 1e6
        row["same"] = sum(same[name]) / len(same[name])
        rows.append(row)
    return rows, skipped
