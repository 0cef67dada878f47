"""Tokens per second, side by side: plain decoding, lookahead with several budgets, transformers where it is installed.

`python bench.py speed` is its command line. Every contender decodes the same problems, all contenders in turn for each
problem, so that a slow minute of the machine hits all alike; then all over again, from the start: in every round each
lookahead contender has a trie of its own that knows the warm responses and nothing else.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lookahead import Step, generate
from model import GPT
from replay import Pair
from trie import TokenTrie

HERE = Path(__file__).resolve().parent


class Recorded:
    """A picker that picks what a recorded text says, whatever the logits: real forwards, known answers."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def pick(self, logits: Tensor, position: int, context: Sequence[int]) -> int:
        return self.text[position]

    def process(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        return logits

    def noise(self, position: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        return None


@dataclass
class Contender:
    """One way to decode. `start` is called before each round, uncounted; what it returns decodes problem i, at most so
    many tokens, and returns how many and the decode steps (none, if it does not tell)."""

    start: Callable[[], Callable[[int, int], tuple[int, list[Step]]]]
    tokens: int = 0  # of this round
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)  # tokens per second of each round, prefill included
    firsts: list[float] = field(default_factory=list)  # seconds to the first token
    decoding: list[float] = field(default_factory=list)  # tokens per second of each round's decode steps, and ...
    free: list[float] = field(default_factory=list)  # ... what they would be if only the forward passes took time
    emitted: int = 0
    drafted: int = 0
    steps: int = 0
    drafting: float = 0.0  # seconds


def ours(
    model: GPT, asked: Sequence[Pair], warm: Sequence[Pair], budget: int | str, replayed: bool, stop: int
) -> Contender:
    """Our own decoding, plain if `budget` is 0."""

    def start() -> Callable[[int, int], tuple[int, list[Step]]]:
        trie = TokenTrie(model.vocab_size) if budget else None
        for _, response in warm if budget else ():
            trie.insert(response)

        def run(i: int, most: int) -> tuple[int, list[Step]]:
            prompt, response = asked[i]
            settings: dict[str, Any] = {"stop_ids": [stop], "max_new_tokens": most}
            if replayed:
                settings = {"picker": Recorded(prompt + response), "max_new_tokens": min(most, len(response))}
            result = generate(model, prompt, drafter=trie, budget=budget, **settings)
            return len(result.tokens), result.steps

        return run

    return Contender(start)


def theirs(model: GPT, asked: Sequence[Pair], replayed: bool, stop: int, **settings: object) -> Contender:
    """Greedy decoding of transformers on the same weights, with its prompt lookup if `settings` say so.

    Raises ImportError where transformers is not installed.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        peer = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()

    def run(i: int, most: int) -> tuple[int, list[Step]]:
        prompt, response = asked[i]
        tokens = torch.tensor([prompt], device=model.device)
        most = min(most, len(response) if replayed else model.n_ctx - len(prompt))
        least = {"min_new_tokens": most, "eos_token_id": None} if replayed else {"eos_token_id": stop}
        with torch.no_grad():
            output = peer.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=most,
                pad_token_id=stop, **least, **settings,
            )  # fmt: skip
        return output.shape[1] - len(prompt), []

    return Contender(lambda: run)


def race(
    contenders: dict[str, Contender], problems: int, max_new_tokens: int, repeat: int
) -> Iterator[tuple[int, dict[str, Contender]]]:
    """All rounds; yields after each, with the results so far."""
    clock = time.perf_counter
    for repetition in range(repeat):
        runs = {name: contender.start() for name, contender in contenders.items()}
        steps: dict[str, list[Step]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender.tokens, contender.seconds = 0, 0.0
        for i in range(problems):
            for name, run in runs.items():
                contender = contenders[name]
                began = clock()
                count, mine = run(i, max_new_tokens)
                contender.seconds += clock() - began
                contender.tokens += count
                steps[name] += mine
                if name in ("plain", "transformers greedy"):
                    began = clock()
                    run(i, 1)
                    contender.firsts.append(clock() - began)
        for name, contender in contenders.items():
            contender.rates.append(contender.tokens / contender.seconds)
            if mine := steps[name]:
                emitted = sum(len(step.tokens) for step in mine)
                contender.decoding.append(emitted / sum(sum(step.seconds) for step in mine))
                contender.free.append(emitted / sum(step.seconds.forward for step in mine))
                contender.emitted += emitted
                contender.drafted += sum(len(step.draft) for step in mine)
                contender.steps += len(mine)
                contender.drafting += sum(step.seconds.draft for step in mine)
        yield repetition + 1, contenders


def compete(
    model: GPT,
    asked: Sequence[Pair],
    warm: Sequence[Pair],
    budgets: Sequence[int | str],
    *,
    replayed: bool,
    stop: int,
    max_new_tokens: int,
    repeat: int,
    progress: Callable[[str], None],
) -> tuple[list[dict], list[str], list[str]]:
    """Rows of the table, remarks about them, and what was skipped and why.

    tokens_per_s  median over rounds, prompts included; times_plain is the median of the ratios to plain in each round
    decode_per_s  the same without prompts: tokens emitted by decode steps, over their time
    if_free       what that would be if drafting, accepting and Python took no time, only the forward passes did
    """
    contenders = {"plain": ours(model, asked, warm, 0, replayed, stop)}
    contenders |= {f"lookahead {budget}": ours(model, asked, warm, budget, replayed, stop) for budget in budgets}
    skipped = []
    try:
        contenders["transformers greedy"] = theirs(model, asked, replayed, stop)
        if replayed:
            skipped.append("transformers' prompt lookup (it cannot follow a recorded text)")
        else:
            contenders["transformers prompt lookup"] = theirs(model, asked, replayed, stop, prompt_lookup_num_tokens=10)
    except ImportError:
        skipped.append("transformers (not installed: pip install transformers)")
    for number, state in race(contenders, len(asked), max_new_tokens, repeat):
        progress(f"round {number} of {repeat}: " + ", ".join(f"{name} {c.rates[-1]:.0f}" for name, c in state.items()))
    plain = contenders["plain"]
    rows = []
    for name, contender in contenders.items():
        row = {"decoder": name, "tokens_per_s": statistics.median(contender.rates),
               "times_plain": over(contender.rates, plain.rates)}  # fmt: skip
        if contender.steps:
            row |= {"decode_per_s": statistics.median(contender.decoding),
                    "if_free": statistics.median(contender.free),
                    "tokens_per_step": contender.emitted / contender.steps,
                    "nodes_per_step": contender.drafted / contender.steps}  # fmt: skip
        if contender.firsts:
            row["first_token_ms"] = 1e3 * statistics.median(contender.firsts)
        rows.append(row)
    return rows, remarks(contenders), skipped


def over(mine: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(mine, others))


def remarks(contenders: dict[str, Contender]) -> list[str]:
    """What the table means."""
    lines = []
    best = max(contenders, key=lambda name: statistics.median(contenders[name].rates))
    for name, contender in contenders.items():
        if name.startswith("transformers"):
            ratios = [f"{over(contenders[mine].rates, contender.rates):.2f} times ({mine})" for mine in ("plain", best)]
            lines.append(f"against {name}: " + ", ".join(dict.fromkeys(ratios)))
    fixed = {name: c for name, c in contenders.items() if name.startswith("lookahead") and not name.endswith("auto")}
    auto = contenders.get("lookahead auto")
    if auto is not None and fixed:
        name = max(fixed, key=lambda name: statistics.median(fixed[name].rates))
        lines.append(
            f"the automatic budget makes {over(auto.rates, fixed[name].rates):.3f} of the best fixed one ({name})"
        )
        name = max(fixed, key=lambda name: statistics.median(fixed[name].free))
        ceiling = over(auto.decoding, fixed[name].free)
        lines.append(
            f"ceiling: {statistics.median(fixed[name].free):.0f} tokens/s ({name}, if only forward passes took time); "
            f"the automatic budget decodes at {ceiling:.3f} of it"
        )
    return lines


def starting(name: str, dtype: str, repeat: int) -> str:
    """From the start of a process to its first text, and (on Linux) its peak memory, beside one that imports torch."""
    arguments = ["--model", name, "--dtype", dtype, "--prompt", "Question: How many", "--max-new-tokens", "1", "--json"]
    statements = {"torch": "import torch", "first": f"import cli; cli.main({arguments})"}
    status = Path("/proc/self/status")
    report = f"\nprint(open('{status}').read())" if status.exists() else ""
    seconds: dict[str, list[float]] = {key: [] for key in statements}
    peaks: dict[str, str] = {}
    for _ in range(repeat):
        for key, statement in statements.items():
            command = [sys.executable, "-c", statement + report]
            began = time.perf_counter()
            output = subprocess.run(command, capture_output=True, check=True, cwd=HERE, text=True).stdout
            seconds[key].append(time.perf_counter() - began)
            peaks[key] = f"{int(output.split('VmHWM:')[1].split()[0]) / 1e3:.0f} MB" if report else "unknown"
    torch_s, first_s = (statistics.median(seconds[key]) for key in statements)
    return (
        f"process start to first text {first_s:.2f} s, importing torch alone {torch_s:.2f} s; "
        f"peak memory {peaks['first']}, importing torch alone {peaks['torch']}"
    )
