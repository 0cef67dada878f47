"""Monte-Carlo tree search over tokens: spend forward passes where a reward is in sight.

A language model says what is likely, a *reward* says what is good: `reward(text, finished)`, a number from 0 to 1,
where `text` is the new text without the prompt. Sampling n texts and keeping the best (best-of-n) asks the reward last,
and starts each text from scratch. A search keeps all that it read, as a tree in one KV cache, and grows where it pays:

    prompt -- She -- has -- 4 -- 8 ...  <<48/2=  -- 25    lost: no row is ever spent below
                 `-- gives ...                   `-- 24 -- >> ... a finished text, reward 1

A *simulation* goes down from the root:

1. select   At a node whose children are known, take the child with the largest

                Q(child) + exploration * P(child) * sqrt(N(node)) / (1 + N(child))                            (PUCT)

            P: the model's probability; N: simulations that came by; Q: the mean value of those that came by the child,
            or its parent's as long as there were none. Much visited children must earn their visits, likely ones get
            their first one early.
2. judge    A new child is shown to the reward *before* it is forwarded. Reward 0 for a text that is not finished means
            that it is lost, whatever comes: the child is cut off, no row is spent on it, and the next best child is
            taken. A node whose children are (nearly) all cut off is cut off itself, and the simulation ends with 0. (A
            finished text with reward 0 is cut off, too, once it was counted: it is known.)
3. expand   One row of a forward pass: the node sees the prompt, its ancestors and itself, and its logits say which
            children it has.
4. play out Without a playout, the value is the reward of the unfinished text. With one, go on from child to child,
            judging each, until the text is finished or lost; the nodes stay in the tree, so that no row is wasted.
5. back up  The value is added to all nodes on the way to the root.

`batch` simulations are in flight at the same time, each giving one row to every forward pass: to the model that is one
more tree under one more mask. They see each other's visits at once and the values later, which drives them apart.

What is counted is rows forwarded, the prompt's included: that is what best-of-n pays for, too.

Sources: Kocsis and Szepesvari 2006 (UCT); Rosin 2011 and Silver et al. 2017 (PUCT, with a prior and visits in flight
that count as losses). For search over tokens: Chaffin et al. 2022, arXiv 2109.13582.

Step by step: notebook 07, sections 4 to 6.
"""

import importlib
import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sampling import hash_uniform, mix64
from tokenizer import Tokenizer

Reward = Callable[[str, bool], float]
LARGEST = 100_000  # the cache gets a slot for each node, so a mistyped number must not ask for all memory
PLAYOUTS = ("greedy", "sample", "none")


class Node:
    """A token behind those of its ancestors; the root stands for the prompt.

    prior     the model's probability of the token here; `logp`: the sum of log priors from the root to here
    slot      where it lies in the cache; None until it was forwarded
    children  None until it was forwarded; then the most probable tokens, in this order
    visits    simulations that came by; `total` is the sum of their values
    reward    what the reward said of the text that ends here; None until it was asked
    finished  whether the text ends here for good
    lost      cut off: nothing good can come
    pending   in flight: being forwarded
    """

    def __init__(self, parent: "Node | None", token: int, prior: float) -> None:
        self.parent, self.token, self.prior = parent, token, prior
        self.depth = 0 if parent is None else parent.depth + 1
        self.logp = 0.0 if parent is None else parent.logp + math.log(prior)
        self.slot: int | None = None
        self.children: list[Node] | None = None
        self.visits, self.total = 0, 0.0
        self.reward: float | None = None
        self.finished = self.lost = self.pending = False

    @property
    def value(self) -> float:
        """The mean value of the simulations that came by; nan without any."""
        return self.total / self.visits if self.visits else math.nan

    def path(self) -> list["Node"]:
        """The nodes from below the root down to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass
class Found:
    """tokens: the new ones, a stop token included; text: without it; reward: of this text, and 0 if the search was over
    before it was `finished`; rows: forwarded, the prompt's included; tree: the Search, to look around in."""

    tokens: list[int]
    text: str
    reward: float
    finished: bool
    rows: int
    simulations: int
    tree: "Search"

    def as_json(self) -> dict[str, Any]:
        known = {key: value for key, value in vars(self).items() if key != "tree"}
        return known if self.tree.judged else known | {"reward": None}

    def summary(self) -> str:
        if self.finished:
            stopped = not self.tree.stop_ids or self.tokens[-1] in self.tree.stop_ids
            best = "the best text that was finished" if stopped else "cut short by --max-new-tokens, which counts as 0"
        elif self.tree.root.lost:
            best = "every way on was cut off: nothing gets a reward"
        else:
            best = "NOT FINISHED: --max-nodes were too few"
        simulations = f"{self.simulations} simulation{'s' * (self.simulations != 1)}"
        reward = f"reward {self.reward:.2f}" if self.tree.judged else "no reward, likelihood only"
        return f"{reward}, {self.rows} rows forwarded, {simulations}; {best}"


def reward_named(name: str | None) -> Reward | None:
    """The reward that the command line calls "calculator" or "module:function"; None stays None (likelihood only).

    The module may lie in the current folder. Raises ValueError if there is no such function.
    """
    if name is None:
        return None
    module, _, function = ("calculator:calculator" if name == "calculator" else name).partition(":")
    sys.path.append(os.getcwd())
    try:
        reward = getattr(importlib.import_module(module), function)
        float(reward("", False))  # a function of something else shows here
    except Exception as error:  # whatever somebody's module does when it is imported or asked
        wanted = "give calculator, or module:function with function(text, finished) -> 0 to 1"
        raise ValueError(f"--reward {name!r} cannot be used ({in_a_line(error)}): {wanted}") from None
    finally:
        sys.path.pop()
    return reward


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def search(model: Any, prompt_ids: Sequence[int], reward: Reward | None, **settings: Any) -> Found:
    """The best text that a search finds. Deterministic: the same arguments, the same text.

    reward          reward(text, finished) -> 0 to 1; 0 for an unfinished text cuts it off. None: likelihood only
    max_nodes       rows to spend behind the prompt (512). A tree that is read to its end stops at 8 times as many
                    simulations
    max_new_tokens  of a text (128). With stop_ids, a text cut short by this or by the context gets reward 0
    stop_ids        tokens that finish a text (none: texts finish at max_new_tokens)
    playout         "greedy": the most probable children that are not lost; "sample": drawn by probability; "none"
    exploration     how much PUCT cares for untried children (1.0)
    width           children of a node: its most probable tokens (32)
    least           a node is lost when its children that are not lost weigh less than this together (0.01)
    likelihood      the share of the text's likelihood (geometric mean per token) in a value; the rest is reward (0)
    goal            stop at the first finished text with this reward (1.0); None: spend all of max_nodes
    batch           rows of a forward pass (1)
    seed            for playout="sample" (0)
    decode          ids -> text; the model's own tokenizer if None

    Raises ValueError for impossible settings, an empty or too long prompt, and a reward outside 0 .. 1.
    """
    tree = Search(model, prompt_ids, reward, **settings)
    tree.run()
    return tree.found()


class Search:
    """A tree that grows; arguments as for `search`. `nodes` are the forwarded ones, in order."""

    def __init__(
        self,
        model: Any,
        prompt_ids: Sequence[int],
        reward: Reward | None,
        *,
        max_nodes: int = 512,
        max_new_tokens: int = 128,
        stop_ids: Collection[int] = (),
        playout: str = "greedy",
        exploration: float = 1.0,
        width: int = 32,
        least: float = 0.01,
        likelihood: float = 0.0,
        goal: float | None = 1.0,
        batch: int = 1,
        seed: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.prompt = [operator.index(token) for token in prompt_ids]
        if not self.prompt or len(self.prompt) >= model.n_ctx:
            raise ValueError(
                f"a search needs a prompt, and room behind it: it has {len(self.prompt)} tokens, the model's context "
                f"{model.n_ctx}"
            )
        counts = {"max_nodes": max_nodes, "max_new_tokens": max_new_tokens, "width": width, "batch": batch}
        for name, number in counts.items():
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= LARGEST:
                raise ValueError(f"{name} must be a whole number, 1 to {LARGEST}, not {number!r}")
        if not (math.isfinite(exploration) and exploration >= 0):
            raise ValueError(f"exploration must be 0 or more, not {exploration!r}")
        if not 0 <= least <= 1 or not 0 <= likelihood <= 1:
            raise ValueError(f"least and likelihood must be 0 to 1, not {least!r} and {likelihood!r}")
        if playout not in PLAYOUTS:
            raise ValueError(f"playout must be one of {', '.join(PLAYOUTS)}, not {playout!r}")
        self.model, self.stop_ids, self.playout, self.seed = model, frozenset(stop_ids), playout, seed
        self.judged = reward is not None
        self.reward = reward or (lambda text, finished: 1.0)
        self.likelihood = likelihood if reward else 1.0
        self.max_nodes, self.batch, self.width, self.least = max_nodes, batch, width, least
        self.exploration, self.goal = exploration, goal if reward else None
        self.decode = decode or Tokenizer.for_model(model).decode
        self.deepest = min(max_new_tokens, model.n_ctx - len(self.prompt))
        self.root, self.best, self.simulations, self.blocked = Node(None, -1, 1.0), None, 0, False
        self.nodes: list[Node] = []
        self.cache = model.new_cache(len(self.prompt) + max_nodes)
        with torch.no_grad():
            logits = model(self.prompt, cache=self.cache, rows=[len(self.prompt) - 1])
        self._grow(self.root, logits[0])

    @property
    def rows(self) -> int:
        return len(self.prompt) + len(self.nodes)

    def run(self) -> None:
        """Simulate until the goal is reached, max_nodes are spent, or everything is lost or known."""
        flying: list[tuple[Iterator[Node], Node]] = []  # simulations, each waiting for a node's logits
        while not self._over():
            room = self.max_nodes - len(self.nodes)
            self.blocked = False
            for _ in range(min(self.batch, room) - len(flying)):
                if self.blocked or self._over():
                    break
                simulation = self._simulate()
                if (node := next(simulation, None)) is not None:  # None: it was over without a row
                    flying.append((simulation, node))
            if flying:
                self._forward([node for _, node in flying[:room]])
                flying = [(simulation, node) for simulation, _ in flying[:room] if (node := next(simulation, None))]
        # What is in flight when the rows are spent is dropped; its visits have brought nothing, as they say.

    def _over(self) -> bool:
        done = self.best is not None and self.goal is not None and self.best.reward >= self.goal
        # The second bound is for small trees: when all is read, simulations cost no rows and would never end.
        return done or self.root.lost or len(self.nodes) >= self.max_nodes or self.simulations >= 8 * self.max_nodes

    def _simulate(self) -> Iterator[Node]:
        """One simulation. Yields each node that must be forwarded; when it goes on, the node has children."""
        self.simulations += 1
        number, selecting, way = self.simulations, True, [self.root]
        self.root.visits += 1  # at once: simulations in flight count as visits that brought nothing
        while not way[-1].finished:
            node = way[-1]
            if node.children is None:
                node.pending = True
                yield node
                node.pending = selecting = False  # from here on it is a playout
                if self.playout == "none":
                    break
            children = [child for child in node.children if not child.lost and not child.pending]
            if not children and not node.lost:  # all of them are in flight: come back later
                for each in way:
                    each.visits -= 1
                self.simulations, self.blocked = self.simulations - 1, True
                return
            if node.lost:
                break
            child = self._select(node, children) if selecting else self._play(children, number)
            if child.reward is None:
                self._judge(child)
            if not child.lost:
                child.visits += 1
                way.append(child)
        last = way[-1]
        value = 0.0 if last.lost else self.worth(last)
        for each in way:
            each.total += value
        if last.finished:
            reached = self.goal is not None and last.reward >= self.goal
            if self.best is None or reached or value > self.worth(self.best):
                self.best = last  # a text that reaches the goal ends the search, whatever its likelihood
            if last.reward <= 0:
                self._cut(last)  # known, and worth nothing: no second visit

    def worth(self, node: Node) -> float:
        """What a simulation that ends here brings."""
        return (1 - self.likelihood) * node.reward + self.likelihood * math.exp(node.logp / node.depth)

    def _select(self, node: Node, children: list[Node]) -> Node:
        unknown, scale = node.value, self.exploration * math.sqrt(node.visits)

        def score(child: Node) -> float:
            return (child.value if child.visits else unknown) + scale * child.prior / (1 + child.visits)

        return max(children, key=score)  # the first, and so the most probable, of equals

    def _play(self, children: list[Node], number: int) -> Node:
        if self.playout == "greedy":
            return children[0]
        uniform = hash_uniform(mix64(self.seed) + number, children[0].depth, len(children)).tolist()  # Gumbel-max
        noisy = [math.log(child.prior) - math.log(-math.log(u)) for child, u in zip(children, uniform)]
        return children[noisy.index(max(noisy))]

    def _judge(self, node: Node) -> None:
        """Ask the reward about a node's text; cut the node off if it is lost."""
        stopped = node.token in self.stop_ids
        node.finished = stopped or node.depth == self.deepest
        tokens = [each.token for each in node.path()]
        text = self.decode(tokens[:-1] if stopped else tokens)
        try:
            reward = float(self.reward(text, node.finished))
        except Exception as error:  # somebody else's function
            raise ValueError(f"the reward failed on {text[-40:]!r} ({in_a_line(error)})") from None
        if not 0 <= reward <= 1:
            raise ValueError(f"a reward must be a number from 0 to 1, not {reward} (for {text[-40:]!r})")
        node.reward = 0.0 if node.finished and self.stop_ids and not stopped else reward
        if not node.finished and reward == 0:
            self._cut(node)

    def _cut(self, node: Node | None) -> None:
        """Mark as lost, and so its ancestors as far as they have (nearly) no other children."""
        while node is not None:
            node.lost, node = True, node.parent
            alive = [child.prior for child in node.children if not child.lost] if node else []
            if alive and sum(alive) >= self.least:
                return

    def _forward(self, nodes: list[Node]) -> None:
        """One forward pass over new nodes."""
        start, base = len(self.prompt), self.cache.length
        mask = torch.zeros(len(nodes), base + len(nodes), dtype=torch.bool)
        mask[:, :start] = True
        for row, node in enumerate(nodes):
            node.slot = base + row
            mask[row, [each.slot for each in node.path()]] = True
        positions = [start + node.depth - 1 for node in nodes]
        with torch.no_grad():
            logits = self.model([node.token for node in nodes], positions, mask, self.cache)
        for node, row in zip(nodes, logits):
            self._grow(node, row)
        self.nodes += nodes

    def _grow(self, node: Node, logits: Tensor) -> None:
        probs, tokens = logits.float().softmax(-1).topk(min(self.width, len(logits)))
        if not bool(probs[0] > 0):
            raise ValueError("the model's logits are not numbers: nothing to choose from")
        node.children = [Node(node, token, p) for token, p in zip(tokens.tolist(), probs.tolist()) if p > 0]

    def found(self) -> Found:
        """The best finished text; without one, the text along the most visited children that are not lost."""
        node = self.best
        if node is None:
            node = self.root
            while known := [child for child in node.children or () if child.visits and not child.lost]:
                node = max(known, key=lambda child: child.visits)
        tokens = [each.token for each in node.path()]
        text = self.decode(tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens)
        reward = node.reward if node.finished else 0.0
        return Found(tokens, text, reward, node.finished, self.rows, self.simulations, self)

    def expected(self) -> tuple[float, float]:
        """Bounds on the reward that a text sampled from the model would have on average, from all that is known.

        A finished text is worth its reward, one that is cut off 0, and what was never read anything from 0 to 1, each
        weighted by its probability. The bounds meet when everything was read and every finished text was judged.
        """
        bounds: dict[Node, tuple[float, float]] = {}
        for node in [*reversed(self.nodes), self.root]:  # children come after their parents
            low, high, rest = 0.0, 0.0, 1.0
            for child in node.children:
                known = (child.reward, child.reward) if child.finished else (0.0, 0.0) if child.lost else (0.0, 1.0)
                below, above = bounds.get(child, known)
                low, high, rest = low + child.prior * below, high + child.prior * above, rest - child.prior
            bounds[node] = (low, high + max(rest, 0.0))
        return bounds[self.root]
