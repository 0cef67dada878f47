"""Where draft tokens come from: a trie of everything that was said before, and a blend of guesses out of it.

Text repeats itself. Names come back, an answer quotes its question, and a service answers similar questions all day. A
trie (counts.py) counts which tokens followed which. The question here is how to turn its counts into the best draft: a
tree of N nodes of which as many as possible will be accepted. (Verification costs nearly the same for any tree of N
nodes, lookahead.py.) A walk through the whole of it, with words for tokens. Five outputs were inserted,

    the dog sees the cat    the dog sees a bird    a cat sees the bird    the cat sleeps    a dog sleeps

and now a query's text is "a dog sings . a dog". What comes next?

1. *Match.* Several suffixes of the text were seen before, in two tries: the outputs of all queries, and this query's
own text, prompt and output, which often repeats itself and vanishes when the query ends. From the longest down
(max_depth 3, so suffixes of 2 tokens; the own text goes first among equals):

    level  suffix   in        followed by
      3    a dog    own       sings 1
      2    a dog    outputs   sleeps 1
      1    dog      own       sings 1
      0    dog      outputs   sees 2, sleeps 1

2. *Blend.* Long suffixes predict well but know little; short ones know more, less surely. From the longest down, each
level hands out a share lambda of what the levels before it left over (interpolation; Jelinek and Mercer 1980):

    P_k(token) = lambda_k n_k(token) / n_k + (1 - lambda_k) P_(k-1)(token)

n_k(token) is how often the token followed suffix k, n_k the sum over all tokens (not how often the suffix was seen: the
end of the text has no follower yet). A suffix that nothing followed passes everything on. P_(-1) is nothing when a
draft is made; a token that no level knows counts as 1e-5 when the blend learns.

How far to trust a level depends on how often its suffix was continued and by how many different tokens, so there is one
lambda for each level and class of node (blend.py). It starts as n / (n + 2 d) for n continuations by d different tokens
(after Witten and Bell 1991: new tokens follow where many different ones did) and learns from every token that is
emitted. All four start at 1/3 here (3 continuations are in the class of 2 to 3, which starts as for 2):

    sings   1/3 + 1/3 (2/3)^2                = 0.481
    sleeps  1/3 (2/3) + 1/3 (2/3)^3 (1/3)    = 0.255
    sees    1/3 (2/3)^3 (2/3)                = 0.066      and 0.198 for words that never followed

3. *Best first.* The expected number of accepted nodes of a draft tree is the sum over its nodes of the probability that
the node is on the accepted path, which is the product of the P along its path. So the best tree of N nodes is simply
the N most probable nodes, and as no child is more probable than its parent, they are found by taking, N times, the most
probable node whose parent was taken. With N = 3:

    candidates                                    taken
    sings 0.481, sleeps 0.255, sees 0.066         sings
    "sings ." 0.267, sleeps 0.255                 "sings ."     two places were left, so "sees" is no candidate now
    sleeps 0.255                                  sleeps        one place: "sings . a" would have 0.149

where "sings ." has 0.481 times what P says of "." after "dog sings", 1/3 + (2/3) (1/3) = 0.556.

4. *Calibrate.* Picking what looks best also picks what was overestimated. How often nodes with a given estimate were
accepted is counted, and a curve corrects the estimates (blend.py): they start at 0.87 of what they were, so this
tree carries 0.42, 0.23 and 0.22.

Measured (bench.py replay, 200 responses of a 6-billion-parameter model to word problems, after 660): 2.62 tokens per
step with a budget of 38, where the paper's hierarchical mode makes 2.38. The small numbers here and in blend.py (1e-5,
1/11, 0.4%, 0.87 ...) were chosen on such replays; none of them is delicate.

Step by step: notebook 02, sections 3 to 5.
"""

import json
import math
import operator
import os
import shutil
import tempfile
import zlib
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from blend import BITS, CELLS, Blend, Calibration
from counts import EMPTY, Counts, Node, Writer
from tree import DraftTree

LARGEST = 2**31  # token ids are below it
MODES = ("best-first", "hierarchical", "parallel", "single")


class TokenTrie:
    """The drafter: memory of all outputs, shared by all queries, and what was learned about trusting it.

    vocab_size  of the model it drafts for, or None: not checked, and drafts do not foresee the noise of sampling.py
    max_depth   longest path, in tokens: a suffix of max_depth - 1 tokens and what followed. None: 5 in best-first
                mode, where drafts run deeper than the trie, 8 in the paper's
    max_nodes   never exceeded: when it is reached, what is worth least is forgotten (counts.py). About 200 bytes each
    mode        "best-first", or one of the paper's, "hierarchical", "parallel" and "single" (paper.py)

    An open query has a private trie beside the shared one, with the same bounds; `n_nodes` and `nbytes` are about the
    shared one. All methods that take tokens raise ValueError for ids that are negative or outside the vocabulary. Not
    safe for use from several threads.

    Raises ValueError for an unknown mode and impossible numbers.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        max_depth: int | None = None,
        max_nodes: int = 1_000_000,
        mode: str = "best-first",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if vocab_size is not None and (not isinstance(vocab_size, int) or not 1 <= vocab_size <= LARGEST):
            raise ValueError(f"vocab_size must be a positive whole number or None, not {vocab_size!r}")
        if max_depth is None:
            max_depth = 5 if mode == "best-first" else 8
        if not isinstance(max_depth, int) or not 2 <= max_depth <= 64:
            raise ValueError(f"max_depth must be a whole number, 2 to 64, not {max_depth!r}")
        if not isinstance(max_nodes, int) or max_nodes < 8 * max_depth:
            raise ValueError(f"max_nodes must be a whole number, at least 8 * max_depth, not {max_nodes!r}")
        self.vocab_size, self.max_depth, self.max_nodes, self.mode = vocab_size, max_depth, max_nodes, mode
        self.outputs = Counts(max_depth, max_nodes)
        self.blend = Blend(max_depth - 1)
        self.calibration, self.foresight = Calibration(), Calibration()  # without and with known noise

    @property
    def n_nodes(self) -> int:
        return self.outputs.n_nodes

    @property
    def nbytes(self) -> int:
        return self.outputs.nbytes

    def insert(self, tokens: Iterable[int]) -> None:
        """Remember an output seen earlier (token ids, end-of-text included if it ended so)."""
        writer = Writer(self.outputs)
        for token in [self.check(token) for token in tokens]:  # all are checked before the first is counted
            writer.write(token)

    def check(self, token: int) -> int:
        """The token id as a plain int."""
        try:
            token = operator.index(token)
        except TypeError:
            raise ValueError(f"token ids must be whole numbers, not {token!r}") from None
        if not 0 <= token < (self.vocab_size or LARGEST):
            raise ValueError(f"token id {token} is outside the trie's vocabulary of {self.vocab_size or LARGEST}")
        return token

    def count(self, tokens: Iterable[int]) -> int:
        """How often this path was seen in outputs; 0 if never (or forgotten)."""
        return self.outputs.find(tokens).count

    def open(self, prompt_ids: Iterable[int]) -> "TrieSession":
        """A query begins."""
        if self.mode == "best-first":
            return TrieSession(self, prompt_ids)
        from paper import PaperSession  # paper.py imports this file, so it is loaded only when asked for

        return PaperSession(self, prompt_ids)

    FORMAT, VERSION = "lookahead-trie", "3"
    LEARNED = (
        ("blend", "weights"), ("blend", "trained"), ("calibration", "estimated"), ("calibration", "accepted"),
        ("foresight", "estimated"), ("foresight", "accepted"),
    )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file, about 10 bytes a node; open sessions' own texts are not in it.

        It is written under a temporary name and renamed, so a reader sees the old file or the new one, whole. Raises
        OSError (FileNotFoundError for a missing folder) if that is impossible.
        """
        learned = {f"{part}.{name}": np.array(getattr(getattr(self, part), name)) for part, name in self.LEARNED}
        numbers = {name: getattr(self, name) for name in ("vocab_size", "max_depth", "max_nodes", "mode")}
        numbers |= {"clock": self.outputs.clock, "bar": self.outputs.bar}
        arrays, numbers = self.outputs.pack() | learned, json.dumps(numbers)
        header = {"format": self.FORMAT, "version": self.VERSION, "trie": numbers}
        header["crc32"] = self._checksum(arrays, numbers)
        path = Path(os.path.realpath(path))  # through a symbolic link to the file itself
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no such folder")
        if path.is_dir():
            raise IsADirectoryError(f"cannot write {path}: it is a folder")
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as scratch:
            save_file(arrays, f"{scratch}/trie", header)
            Path(scratch, "mode").touch()  # has the rights that a new file gets; the library's default is owner-only
            shutil.copymode(path if path.exists() else f"{scratch}/mode", f"{scratch}/trie")
            os.replace(f"{scratch}/trie", path)

    @staticmethod
    def _checksum(arrays: dict[str, np.ndarray], numbers: str) -> str:
        """So that a damaged file is noticed wherever the damage is. (Whoever forges one, forges this, too.)"""
        crc = zlib.crc32(numbers.encode())
        for name in sorted(arrays):
            crc = zlib.crc32(arrays[name].tobytes(), zlib.crc32(name.encode(), crc))
        return str(crc)

    @classmethod
    def load(cls, path: str | os.PathLike[str], vocab_size: int | None = None) -> "TokenTrie":
        """What `save` wrote. Raises FileNotFoundError if there is no such file, ValueError if it is damaged, something
        else, of another version, or was made for another vocabulary than `vocab_size`.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no trie file {path}")
        try:
            open(path, "rb").close()  # says "permission denied" where the library would say "no such file"
            with safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
                if header.get("format") != cls.FORMAT:
                    raise ValueError(f"{path} holds something else than a trie: --save-trie writes such files")
                if header.get("version") != cls.VERSION:
                    found = header.get("version")
                    raise ValueError(f"{path} is a trie of version {found}, this program reads {cls.VERSION}")
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a whole trie file ({' '.join(str(error).split())})") from None
        try:
            if header["crc32"] != cls._checksum(arrays, header["trie"]):
                raise ValueError("its checksum is wrong")
            numbers = json.loads(header["trie"])
            clock, bar = numbers.pop("clock"), numbers.pop("bar")
            trie = cls(**numbers)
            trie.outputs.unpack(arrays, clock, bar)
            for part, name in cls.LEARNED:
                old, new = getattr(getattr(trie, part), name), arrays[f"{part}.{name}"].tolist()
                if len(new) != len(old):
                    raise ValueError(f"{part}.{name} has {len(new)} entries instead of {len(old)}")
                setattr(getattr(trie, part), name, new)
            highest = int(arrays["tokens"].max(initial=0))
            if trie.vocab_size is not None and highest >= trie.vocab_size:
                raise ValueError(f"token {highest} is outside its own vocabulary of {trie.vocab_size}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is a damaged trie file ({error})") from None
        made_for = trie.vocab_size or highest + 1
        if vocab_size is not None and (made_for > vocab_size or trie.vocab_size not in (None, vocab_size)):
            raise ValueError(f"{path} was made for a vocabulary of {made_for} tokens, the model has {vocab_size}")
        trie.vocab_size = vocab_size or trie.vocab_size
        return trie


class TrieSession:
    """One query, drafting best-first: reads the shared trie and a private one, and tells both what was emitted.

    The private trie holds this query's prompt and output, and vanishes with it; the shared one gets the output.
    """

    def __init__(self, trie: TokenTrie, prompt_ids: Iterable[int]) -> None:
        self.trie = trie
        tokens = [trie.check(token) for token in prompt_ids]
        self.own = Counts(trie.max_depth, trie.max_nodes)
        self._own_writer, self._writer = Writer(self.own), Writer(trie.outputs)
        for token in tokens:
            self._own_writer.write(token)
        self._recent = deque(tokens, maxlen=trie.max_depth - 1)
        self._length = len(tokens)  # of the text so far: the position of the next token
        self._last = DraftTree([], [])  # the last draft, and its estimates, uncorrected
        self._estimates: list[float] = []
        self._steps = 0
        self._curve = trie.calibration
        self._curve.refresh()
        self._look_up()

    def _look_up(self) -> None:
        """The state: for each suffix of the text, shortest first, its node in the outputs and its node in the query.

        After "... the dog" with max_depth 3 these are the nodes of dog (outputs), dog (own), the dog (outputs), the dog
        (own). From then on the state moves along: the suffix "the dog" plus "sat" is a child of "the dog" and so on.
        """
        recent = list(self._recent)
        self.state = []
        for length in range(1, self.trie.max_depth):
            suffix = recent[-length:] if length <= len(recent) else None
            self.state += [counts.find(suffix) if suffix else EMPTY for counts in (self.trie.outputs, self.own)]
        self._time = self.trie.outputs.clock + self.own.clock

    def _current(self) -> list[Node]:
        if self._time != self.trie.outputs.clock + self.own.clock:  # somebody else wrote
            self._look_up()
        return self.state

    def guess(self, recent: Sequence[int]) -> dict[int, float]:
        """What may follow any text that ends with the tokens `recent` (max_depth - 1 of them count), with estimated
        probabilities. Nothing is learned: beam search asks for many texts at once, none of them written yet."""
        state: list[Node] = []
        for length in range(1, self.trie.max_depth):
            suffix = recent[-length:] if length <= len(recent) else ()
            state += [counts.find(suffix) if suffix else EMPTY for counts in (self.trie.outputs, self.own)]
        return self._expand(state, 1.0, self.ENOUGH / 32)

    def _after(self, state: list[Node], token: int) -> list[Node]:
        """The state one token further: each suffix grows into the next longer one, the longest pair drops out.

        EMPTY has no children, so what was never seen stays so.
        """
        return [node.get(token, EMPTY) for node in (self.trie.outputs.root, self.own.root, *state[:-2])]

    def observe(
        self, tokens: Iterable[int], draft: DraftTree | None = None, picks: Sequence[int] | None = None
    ) -> None:
        """These tokens were emitted. Their n-grams are in the trie from now on, for this query and all others."""
        tokens = [self.trie.check(token) for token in tokens]
        if tokens and draft and draft.begins(self._last):  # cut otherwise, nodes have other numbers: no lesson
            self._curve.learn(self._estimates[: len(draft)], draft.walk(tokens))
            self._steps += 1
            if self._steps % 8 == 0:  # now and then is often enough for a curve of hundreds of steps
                self._curve.refresh()
        for token in tokens:
            state = self._current()
            self.trie.blend.train(state, token)
            self._writer.write(token)
            self._own_writer.write(token)
            self.state = self._after(state, token)
            self._recent.append(token)
            self._length += 1
            self._time += 2

    def close(self) -> None:
        """The query ends: its text is forgotten."""
        self.own = Counts(self.trie.max_depth, self.trie.max_nodes)
        self._own_writer = Writer(self.own)
        self._recent.clear()
        self._look_up()

    ENOUGH = 0.6  # once what is left to hand out is below ENOUGH / budget, shorter suffixes are not asked

    def draft(self, budget: int, picker: object = None) -> DraftTree:
        """The `budget` most probable nodes (fewer, if less is known), most probable first, with their probabilities.

        Best-first search, as told above. Candidates beyond the budget can never be taken and are dropped at once, and a
        node below the worst candidate need not be expanded. Probabilities are those of `_expand`. A `picker` with noise
        lets it look ahead (`_foresee`).
        """
        size = self.trie.vocab_size
        foresees = size is not None and picker is not None and picker.noise(self._length, size) is not None
        self._curve = self.trie.foresight if foresees else self.trie.calibration
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        estimates: list[float] = []
        # (p, -parent, -token, state of the parent), sorted, best last; among equals the earlier parent, then the
        # smaller token is better. No two have the same parent and token, so states are never compared.
        candidates: list[tuple] = []
        node, p, state = -1, 1.0, self._current()
        while (left := budget - len(tokens)) > 0:
            if len(candidates) < left or p > candidates[0][0]:
                if tokens:
                    state = self._after(state, tokens[-1])
                if foresees and p >= self.NEAR:
                    noise = picker.noise(self._length + (depths[node] if tokens else 0), size)
                    shares = self._foresee(self._expand(state, 1.0, self.ENOUGH / (budget * p)), p, noise)
                else:
                    shares = self._expand(state, p, self.ENOUGH / budget)
                for token, q in shares.items():
                    if len(candidates) < left or q >= candidates[0][0]:
                        insort(candidates, (q, -node, -token, state))
                        if len(candidates) > left:
                            del candidates[0]
            if not candidates:
                break
            p, minus_parent, minus_token, state = candidates.pop()
            node = len(tokens)
            tokens.append(-minus_token)
            parents.append(-minus_parent)
            depths.append(1 + (depths[-minus_parent] if minus_parent < 1 else 0))
            estimates.append(p)
        self._estimates = estimates
        self._last = DraftTree(tokens, parents, [self._curve(p) for p in estimates])
        return self._last

    TRUST, NEAR = 0.3, 0.1  # chosen by measurement; below nodes less probable than NEAR, looking is not worth the time

    def _foresee(self, shares: dict[int, float], p: float, noise: Tensor) -> dict[int, float]:
        """The children of a node of probability `p`, given what `_expand` says of them, when their noise is known.

        A sampled token is the largest of log probability + noise (sampling.py), and the noise of a position is a
        function of the seed: whoever drafts may look at it. Were our estimates q the model's own probabilities, the
        largest log q + noise would win for certain. If instead the model is sure of one token and q only says how
        likely it is to be this or that one, the noise decides nothing. The truth lies between:

            P(token) = (1 - TRUST) q(token) + TRUST w(token) / sum of all w,        w(token) = q(token) exp(noise)

        Two tokens with q = 0.5 and 0.3 and noise -1 and 1, and 0.2 left over for tokens that we do not know of, whose
        noise counts as the mean of a Gumbel variable, 0.577: w = 0.184, 0.815 and 0.356, so P = 0.391 and 0.390.
        """
        gumbels = noise.numpy().take(list(shares)).tolist() if shares else []
        weights = [q * math.exp(g) for q, g in zip(shares.values(), gumbels)]
        rest = max(1.0 - sum(shares.values()), 0.0)
        blind, seeing = p * (1 - self.TRUST), p * self.TRUST / (sum(weights) + rest * math.exp(0.577) + 1e-300)
        return {token: blind * q + seeing * weight for (token, q), weight in zip(shares.items(), weights)}

    def _expand(self, state: list[Node], p: float, enough: float) -> dict[int, float]:
        """The children of a node of probability `p`: token -> probability.

        From the longest suffix down, each level hands out its share lambda of what the levels before it left over, to
        all its tokens (of more than WIDE, to those of the WIDE most frequent that get a fifth of `enough`), until less
        than `enough` is left.
        `enough` is measured as `p` is: behind a node of probability 0.1, p = 0.1 and enough = 0.02 hand out as p = 1
        and enough = 0.2 would, only a tenth of it (`_foresee` needs the latter).
        """
        weights = self.trie.blend.weights
        shares: dict[int, float] = {}
        crumb = enough / 5
        for level in range(len(state) - 1, -1, -1):
            node = state[level]
            total = node.total
            if total:
                distinct = len(node)  # the next line has `cell(node)` written out: this is the innermost loop
                kind = 5 * (BITS[total] if total < 256 else 8) + (BITS[distinct] if distinct < 16 else 4)
                share = p * weights[CELLS * level + kind]
                p -= share
                share /= total
                if node.top is None:
                    for token, child in node.items():
                        part = share * child.count
                        shares[token] = shares[token] + part if token in shares else part
                else:
                    for token, count in zip(*node.top):
                        part = share * count
                        if part < crumb:
                            break
                        shares[token] = shares[token] + part if token in shares else part
                if p < enough:
                    break
        return shares
