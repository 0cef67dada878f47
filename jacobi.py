"""Lookahead *Decoding* (Fu et al. 2024, arXiv 2402.02057, section 3): the model guesses its own future, all at once.

(Same name, other method: the rest of this repository follows Zhao et al. 2024. Here it is one more drafter; notebook
02, section 6, compares them.)

Suppose we do not know the next W tokens and put in junk, any tokens of the text. One forward gives the model's choice
behind each of them: the first is right (it follows the true text), the others follow junk. Put those choices in place
of the junk and do it again: now the second is right, too, and after W rounds all are (Jacobi's iteration for W
equations at once). That saves nothing by itself; but on the way the model utters n-grams that are right for another
place, or too early. They are collected in a pool, and those that begin with the last token of the text are verified.

So a draft has two kinds of branches, all in one tree under one mask. With W = 3 columns and n-grams of N = 4 tokens
(letters: the place, a being the next token; digits: the round in which it was guessed, 0 the oldest):

    (root) -- a0 -- b0 -- c0        the oldest guesses: a line into the future
               |     |     `-- d1 -- e2        from each place in it leads a branch: what the model said after it
               |     `-- c1 -- d2              one round later, two rounds later ...
               `-- b1 -- c2
    (root) -- x -- y -- z           an n-gram from the pool that begins with the root's token, to be verified

The picks at the ends of the branches, after e2, d2 and c2, are new. Each completes an n-gram for the pool, a0 b1 c2
and the pick behind it among them, and the oldest guesses are dropped: next round's line is b1 c1 d1. If the text
advanced by more than one token, the columns that it passed go, and new junk comes in on the right.

Half of the budget goes to each kind. Sampling works as greedy decoding does, since a pick with keyed noise is a
function of the text (sampling.py). Guesses pay in later steps only, which budget="auto" does not know: give a
number, 2 (N - 1) or more for room for both (with less the branches are cut, and nothing is learned from them).
"""

import random
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from sampling import Picker
from tree import DraftTree


class Jacobi:
    """The drafter. It learns nothing from one query for the next.

    ngram  N, tokens of an n-gram, 2 or more
    keep   n-grams that the pool keeps for each first token, the latest; it begins with those of the prompt
    """

    def __init__(self, ngram: int = 4, keep: int = 16) -> None:
        if not isinstance(ngram, int) or not isinstance(keep, int) or ngram < 2 or keep < 1:
            raise ValueError(f"ngram must be 2 or more and keep 1 or more, not {ngram!r} and {keep!r}")
        self.ngram, self.keep = ngram, keep

    def open(self, prompt_ids: Iterable[int]) -> "JacobiSession":
        return JacobiSession(self, prompt_ids)


class JacobiSession:
    """One query.

    levels  N - 1 lists of guesses, the oldest first: levels[j][c] is column c's guess for the (c + j + 1)-th token to
            come. So levels[0] is the line, and column c's branch is levels[1][c], levels[2][c], ...
    pool    first token -> the N - 1 tokens after it, the latest last
    """

    wants_picks = True

    def __init__(self, drafter: Jacobi, prompt_ids: Iterable[int]) -> None:
        self.n, self.text = drafter.ngram, []
        self.levels: list[list[int]] = [[] for _ in range(self.n - 1)]
        self.pool: defaultdict[int, deque] = defaultdict(lambda: deque(maxlen=drafter.keep))
        self.rng = random.Random(0)
        self.observe(prompt_ids)

    def _guesses(self) -> list[list[int]]:
        """Each column's path: the line up to it, and its branch."""
        line, *later = self.levels
        return [line[: c + 1] + [level[c] for level in later] for c in range(len(line))]

    def draft(self, budget: int, picker: Picker | None = None) -> DraftTree:
        branch = self.n - 1  # nodes of an n-gram behind the root, and of a column
        columns = max(1, budget // 2 // branch)
        for level in self.levels:
            level += [self.rng.choice(self.text) for _ in range(columns - len(level))]
            del level[columns:]
        known = list(self.pool.get(self.text[-1], ()))[::-1]  # the latest first
        return DraftTree.of([*known[: max(1, budget // branch - columns)], *self._guesses()], budget)

    def observe(
        self, tokens: Iterable[int], draft: DraftTree | None = None, picks: Sequence[int] | None = None
    ) -> None:
        tokens = list(tokens)
        if draft is not None and picks is not None:
            new = []
            for path in self._guesses():
                nodes = draft.walk(path)
                if len(nodes) == len(path):
                    new.append(picks[nodes[-1] + 1])
                    self._remember([*path[1 - self.n :], new[-1]])
                else:  # cut off
                    new.append(self.rng.choice(self.text))
            passed = len(tokens) - 1
            self.levels = [level[passed:] for level in (*self.levels[1:], new)]
        for token in tokens:
            self.text.append(token)
            self._remember(self.text[-self.n :])

    def _remember(self, ngram: list[int]) -> None:
        if len(ngram) == self.n:
            known, rest = self.pool[ngram[0]], tuple(ngram[1:])
            if rest in known:
                known.remove(rest)
            known.append(rest)

    def close(self) -> None:
        self.pool.clear()
