"""How the bundled models were made: GPT-2 trained from scratch on grade-school word problems.

    python train.py --data gsm8k_train.jsonl --test gsm8k_test.jsonl --preset tiny --out models/tiny
    python train.py --respond assets/responses.jsonl --out models/tiny      what a trained model answers, to warm a trie

Every document is `Question: ...\\nAnswer: ...<|endoftext|>` and starts at position 0, as a user's prompt will. One
epoch is about 1.5 million tokens, so a model of 9 million parameters sees everything several times and would learn it
by heart; most choices below are about getting the most out of few tokens and two CPU cores:

- *Muon* (Jordan et al. 2024) for the matrices: the momentum of each matrix is replaced by the nearest (semi-)orthogonal
  one before it is applied, so that rare directions are learned as fast as common ones. It needs clearly fewer tokens
  than AdamW for the same loss. torch has a Muon too, but it works in bfloat16, which is slow on most CPUs.
- AdamW for the embeddings and the vectors (biases, layer norms).
- Dropout on what attention and MLP write, and weight decay, against learning by heart.
- Documents of like length share a batch, so that hardly any computation goes into padding.
- A constant learning rate that falls to zero over the last part of the run ("warmup-stable-decay"): the length of a run
  can be changed while it goes on, by resuming with another --steps.

A checkpoint is written every few minutes (to a temporary name, then renamed) and picked up by `--resume`.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lookahead import generate
from model import GPT, GPTConfig
from tokenizer import Tokenizer

VOCAB_SIZE, N_CTX = 4096, 512
PRESETS = {
    "tiny": GPTConfig(n_layer=4, n_head=6, n_embd=384, vocab_size=VOCAB_SIZE, n_ctx=N_CTX),  # 8.9 million parameters
    "nano": GPTConfig(n_layer=3, n_head=2, n_embd=128, vocab_size=VOCAB_SIZE, n_ctx=N_CTX),  # 1.2 million
}
ADAM_SHARE = 0.6  # AdamW's learning rate as a share of Muon's
VALIDATION = 128  # the last documents of the training file are held out to watch the run; the test file is for the end


NAMES = ("Ada", "Boris", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Mona")
THINGS = ("apples", "candles", "cards", "coins", "cookies", "hats", "lemons", "marbles", "muffins", "pencils", "stamps")
TEMPLATES = (
    "{a} has {x} {things}. {b} has {y} times as many {things} as {a}. How many {things} do they have together?",
    "{a} buys {x} boxes with {y} {things} in each box and gives {z} {things} to {b}. How many {things} are left?",
    "A shop sells {things} for ${y} each. {a} sells {x} of them in the morning and {z} in the afternoon. How much "
    "money does {a} make?",
    "{a} makes {x} {things} a day for {y} days. {b} makes {z} {things} in all. How many more {things} does {a} make?",
    "{a} reads {x} pages a day. How many pages does {a} read in {y} weeks?",
    "{a} saves ${x} a week. After {y} weeks {a} buys {things} for ${z}. How many dollars does {a} have left?",
    "There are {x} rows of {things} with {y} in each row. {a} takes half of them and {b} takes {z} more. How many "
    "{things} remain?",
    "{a} works {y} hours a day and earns ${x} an hour. How much does {a} earn in {w} days?",
    "{a} drives {x} miles every morning and {z} miles every evening. How many miles does {a} drive in {y} days?",
    "{a} had {x} {things} and found {z} more. Then {a} shared all of them equally with {b}. How many did each get?",
)


def problems(count: int, seed: int = 0) -> list[str]:
    """`count` different prompts of the kind the bundled models know, made from templates, ending in "Answer:"."""
    rng = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        a, b = rng.sample(NAMES, 2)
        numbers = {"x": 2 * rng.randint(5, 40), "y": rng.randint(2, 9), "z": rng.randint(3, 9), "w": rng.randint(2, 6)}
        question = rng.choice(TEMPLATES).format(a=a, b=b, things=rng.choice(THINGS), **numbers)
        made[f"Question: {question}\nAnswer:"] = None
    return list(made)


def read_documents(path: str, tokenizer: Tokenizer) -> list[list[int]]:
    """One token list per problem, ended by end-of-text."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line.strip()]
    text = "Question: {question}\nAnswer: {answer}"
    return [[*tokenizer.encode(text.format(**record)), tokenizer.eot] for record in records]


def batches(documents: list[list[int]], tokens_per_batch: int, seed: int) -> list[list[list[int]]]:
    """One epoch: every document once, cut to n_ctx + 1 tokens, grouped by length, groups in random order.

    One document in ten is joined to another, so that later positions are trained and a prompt may hold two problems.
    """
    rng = random.Random(seed)
    order = rng.sample(documents, len(documents))
    joined = len(order) // 10
    order = [a + b for a, b in zip(order[:joined], order[joined : 2 * joined])] + order[2 * joined :]
    order = sorted((document[: N_CTX + 1] for document in order), key=lambda d: len(d) + 8 * rng.random())
    groups, group, longest = [], [], 0
    for document in order:
        longest = max(longest, len(document))
        if group and (len(group) + 1) * longest > tokens_per_batch:
            groups.append(group)
            group, longest = [], len(document)
        group.append(document)
    groups.append(group)
    rng.shuffle(groups)
    return groups


def pad(group: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (documents, longest - 1); -100 marks targets that do not count."""
    longest = max(map(len, group))
    tokens = torch.zeros(len(group), longest, dtype=torch.long)
    targets = torch.full((len(group), longest), -100)
    for row, document in enumerate(group):
        tokens[row, : len(document)] = targets[row, : len(document)] = torch.tensor(document)
    return tokens[:, :-1], targets[:, 1:]


@torch.no_grad()
def evaluate(model: GPT, documents: list[list[int]], answer: list[int] | None = None) -> dict[str, float]:
    """Mean loss in nats per predicted token (all but a document's first), and apart for questions and answers.

    `answer` are the tokens that open the answer (those of "\\nAnswer:"); what follows their first occurrence is the
    answer.
    """
    sums = {"all": [0.0, 0], "question": [0.0, 0], "answer": [0.0, 0]}
    for group in batches_in_order(documents):
        tokens, targets = pad(group)
        loss = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")  # (documents, longest - 1)
        for row, document in zip(loss.tolist(), group):
            row = row[: len(document) - 1]
            parts = {"all": row}
            if answer is not None:
                width = len(answer)
                start = next(i for i in range(len(document)) if document[i : i + width] == answer) + width - 1
                parts |= {"question": row[:start], "answer": row[start:]}
            for name, part in parts.items():
                sums[name][0] += sum(part)
                sums[name][1] += len(part)
    return {name: total / count for name, (total, count) in sums.items() if count}


def batches_in_order(documents: list[list[int]], size: int = 32) -> Iterator[list[list[int]]]:
    order = sorted((document[: N_CTX + 1] for document in documents), key=len)
    return (order[i : i + size] for i in range(0, len(order), size))


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (Jordan et al. 2024, "Muon: an optimizer for hidden layers").

    For a matrix with momentum M = U S V^T the update is U V^T: all singular values become about 1. A quintic polynomial
    p(S) = a S + b S^3 + c S^5 applied five times does that with matrix products only. The fused matrix of attention is
    three matrices side by side and treated as such.
    """

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(m, group["momentum"])  # Nesterov: look one step ahead
                pieces = update.split(p.shape[0], dim=1) if p.shape[1] == 3 * p.shape[0] else (update,)
                update = torch.cat([orthogonal(piece) for piece in pieces], dim=1)
                scale = 0.2 * math.sqrt(max(p.shape[0], p.shape[1] // len(pieces)))  # the size of an AdamW update
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonal(m: Tensor, steps: int = 5) -> Tensor:
    """A matrix with the shape and singular vectors of m and singular values near 1, by Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m.T if m.shape[0] > m.shape[1] else m
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if m.shape[0] > m.shape[1] else x


def learning_rate(step: int, steps: int, warmup: int = 40, decay: float = 0.5) -> float:
    """The factor on the peak rate: up over `warmup` steps, flat, then linearly to zero over the last `decay` share."""
    return min((step + 1) / warmup, 1.0, (steps - step) / (decay * steps))


def train(args: argparse.Namespace) -> GPT:
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer(VOCAB_SIZE)
    documents = read_documents(args.data, tokenizer)
    documents, validation = documents[:-VALIDATION], documents[-VALIDATION:]
    model = GPT(PRESETS[args.preset])
    drop = torch.nn.Dropout(args.dropout)
    for block in model.h:  # dropout belongs to training, so the model itself need not know of it
        for part in (block.attn, block.mlp):
            part.register_forward_hook(lambda module, _, output: drop(output))

    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.startswith("h.") and p.ndim == 2]
    tables = [named["wte.weight"], named["wpe.weight"]]
    vectors = [p for p in named.values() if p.ndim == 1]
    adam_groups = [{"params": tables, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers = [
        Muon(matrices, lr=args.lr, weight_decay=args.weight_decay),
        torch.optim.AdamW(adam_groups, lr=ADAM_SHARE * args.lr, betas=(0.9, 0.95), fused=True),
    ]
    print(
        f"{args.preset}: {sum(p.numel() for p in named.values()):,} parameters, {len(documents)} documents", flush=True
    )

    checkpoint = Path(args.checkpoint)
    step, seconds, seen = 0, 0.0, 0
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            decays = [group["weight_decay"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, weight_decay in zip(optimizer.param_groups, decays):
                group["weight_decay"] = weight_decay  # the command line wins over the checkpoint
        step, seconds, seen = saved["step"], saved["seconds"], saved["seen"]
        print(f"resumed at step {step}", flush=True)

    def save_checkpoint() -> None:
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        state |= {"step": step, "seconds": seconds, "seen": seen}
        torch.save(state, f"{checkpoint}.partial")
        os.replace(f"{checkpoint}.partial", checkpoint)

    epoch, plan, started, losses = -1, [], time.monotonic(), []
    per_epoch = len(batches(documents, args.batch_tokens, 0))
    saved_at = time.monotonic()
    while step < args.steps:
        if step // per_epoch != epoch:  # the plan is a function of the epoch: a resumed run continues where it was
            epoch = step // per_epoch
            plan = batches(documents, args.batch_tokens, args.seed + epoch)
        tokens, targets = pad(plan[step % per_epoch % len(plan)])
        factor = learning_rate(step, args.steps)
        drop.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            logits = model(tokens)  # (documents, longest - 1, vocab)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            share = 1.0 if isinstance(optimizer, Muon) else ADAM_SHARE
            for group in optimizer.param_groups:
                group["lr"] = args.lr * share * factor
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):  # Muon's matrix products
                optimizer.step()
            optimizer.zero_grad()
        step += 1
        seen += int((targets >= 0).sum())
        losses.append(loss.item())
        now = time.monotonic()
        seconds, started = seconds + now - started, now
        if step % 20 == 0:
            recent, rate = sum(losses[-20:]) / len(losses[-20:]), seen / seconds
            done = f"step {step}/{args.steps} epoch {step / per_epoch:.2f} {seconds / 60:.1f} min {rate:.0f} tokens/s"
            print(f"{done} loss {recent:.3f}", flush=True)
        if step % 200 == 0 or step == args.steps:
            drop.eval()
            print(f"step {step} held-out loss {evaluate(model, validation)['all']:.4f}", flush=True)
        if now - saved_at > 240 or step == args.steps:
            save_checkpoint()
            saved_at = now
    drop.eval()
    print(f"trained on {seen:,} tokens in {seconds / 60:.0f} minutes", flush=True)
    return model


def respond(model: GPT, count: int, max_new_tokens: int = 200) -> Iterator[dict[str, str]]:
    """The model's own greedy answers to `count` generated problems, as {"prompt", "response"}."""
    tokenizer = Tokenizer.for_model(model)
    for prompt in problems(count, seed=2026):
        arguments = {"max_new_tokens": max_new_tokens, "stop_ids": (tokenizer.eot,)}
        tokens = generate(model, tokenizer.encode(prompt), **arguments).tokens
        yield {"prompt": prompt, "response": tokenizer.decode(t for t in tokens if t != tokenizer.eot)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train one of the bundled models from scratch (two hours on two cores)."
    )
    parser.add_argument("--data", help='JSONL of {"question", "answer"}')
    parser.add_argument("--test", help="the same, held out: its loss is printed at the end")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--out", required=True, help="the model's folder: config.json and model.safetensors")
    parser.add_argument("--respond", metavar="FILE", help="train nothing; write 200 answers of the model in --out")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--batch-tokens", type=int, default=6144, help="tokens per batch, padding included")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--weight-decay", type=float, default=0.2)
    parser.add_argument("--bfloat16", action="store_true", help="autocast: fast on CPUs with AVX512-BF16 or AMX only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint if there is one")
    args = parser.parse_args()
    if args.respond:
        lines = [json.dumps(record) + "\n" for record in respond(GPT.load(args.out), 200)]
        Path(f"{args.respond}.partial").write_text("".join(lines), encoding="utf-8")
        os.replace(f"{args.respond}.partial", args.respond)
        return
    if not args.data:
        parser.error("--data is needed to train: JSONL of questions and answers")
    train(args).half().save(args.out)
    if args.test:
        tokenizer = Tokenizer(VOCAB_SIZE)
        losses = evaluate(GPT.load(args.out), read_documents(args.test, tokenizer), tokenizer.encode("\nAnswer:"))
        print("test loss, nats per token:", json.dumps({name: round(value, 4) for name, value in losses.items()}))


if __name__ == "__main__":
    main()
