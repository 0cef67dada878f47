"""Formulas over language models, with the face of one language model.

    M, N = Prompted(model, "Write for children. "), Prompted(model, "Write for lawyers. ")
    formula = M - 0.5 * N                     more like M, and less like N
    generate(formula, prompt_ids)             decoded like any model: greedily, sampled, with lookahead, beams, a tree

A formula is a weighted sum of terms Q_i, each a distribution over the next token. Its own distribution is the P that
minimises  sum_i w_i KL(P || Q_i):  as near as possible to the terms with positive weight and away from those with a
negative one, each as strongly as its weight says. The minimum has a closed form:

    log P(x) = (1 / W) sum_i w_i log Q_i(x) + constant,        W = sum_i w_i, the *total weight*

An example with two tokens: Q_1 = (0.8, 0.2), Q_2 = (0.5, 0.5), and the formula Q_1 - 0.5 Q_2. Then W = 0.5, and P is in
proportion to (0.8 / 0.5^0.5)^2 = 1.28 and (0.2 / 0.5^0.5)^2 = 0.08: P = (0.94, 0.06), sharper than Q_1.

The fine print:

- W must be above zero. With W < 0 the closed form gives the *worst* P, and with W = 0 nothing holds P back: it runs
  away to a single token. Both are refused.
- `Union` takes for each token the larger of its terms' probabilities, `Intersection` the smaller. In a sum, each counts
  as one distribution of total weight 1: for every token exactly one of the terms has weight 1 and the others 0, so that
  W is the same for all tokens and the closed form stays right. M - 0.9 * Union(M, N) lowers only what N likes *more*
  than M does; where M is the larger, the union is M, and P stays as M says (but for a common factor).
- A `Classifier` C (does the text have a property?) pulls towards what C says by as much as it pulls away from knowing
  nothing, the uniform distribution U:  w (KL(P || C) - KL(P || U)).  Its weights, w and -w, add 0 to W.
- A negative term has a dark side: a token that N finds absurd, log N = -30, gains 30 in M - 0.5 N (15 / W). `TopP` or
  `TopK` on M allows only what M itself finds plausible.
- Such a *gate* is -inf for the tokens that it shuts out, and in a term with a negative weight that would become +inf
  (or NaN, against another gate). So every term carries two things: a finite value for each token, and which tokens it
  allows. Gates of terms with positive weight forbid. A term with a negative weight forbids nothing; a token that its
  gate shuts out counts as if it were as likely as the least likely one let in: not rewarded for being absurd. If gates
  together shut out all tokens, there is nothing to choose from, and for that row they are ignored.

Source: Dekoninck et al., ICLR 2024, arXiv 2311.14479: the optimum, classifiers, union. Our own: what gates mean, and
that a token which a classifier did not look at counts as no news.

Step by step: notebook 07, sections 1 to 3.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composite import TOKENS, FormulaCache, SlotText
from tokenizer import Tokenizer


class Scores(NamedTuple):
    """A distribution for each row: log-probabilities `values` (rows, vocab_size), finite everywhere, and which tokens
    are `allowed` (None: all). The probabilities of those add up to 1; the others have the value of the lowest."""

    values: Tensor
    allowed: Tensor | None


def settle(values: Tensor, allowed: Tensor | None) -> Scores:
    """Scores from any finite values: normalised over what is allowed; where nothing is, over everything."""
    if allowed is None:
        return Scores(values.log_softmax(-1), None)
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    values = values.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    lowest = values.masked_fill(~allowed, torch.inf).amin(-1, keepdim=True)
    return Scores(torch.where(allowed, values, lowest), allowed)


class View(NamedTuple):
    """What the terms of a formula look at: each model's logits, and for classifiers each row's text."""

    logits: dict[tuple, Tensor]  # (rows, vocab_size) for each (model, prompt)
    texts: list[list[int]]


class Term:
    """A part of a formula, and itself a model: everything that a decoder may ask of one is here.

    A subclass has `leaves` (its Prompted models), `weight` (its total weight), `classifies` (whether a classifier is
    in it) and `scores(view) -> Scores`.
    """

    leaves: list["Prompted"]
    weight, classifies = 1.0, False

    def __add__(self, other: Any) -> "Term":
        return Sum([(1.0, self), (1.0, as_term(other))])

    def __radd__(self, other: Any) -> "Term":
        return as_term(other) + self

    def __sub__(self, other: Any) -> "Term":
        return Sum([(1.0, self), (-1.0, as_term(other))])

    def __rsub__(self, other: Any) -> "Term":
        return as_term(other) - self

    def __mul__(self, factor: float) -> "Term":
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not abs(factor) <= 1e6:
            raise ValueError(f"a term can be multiplied by a number up to a million, not by {factor!r}")
        return Sum([(float(factor), self)])

    __rmul__ = __mul__

    # The face of a model.

    @property
    def n_ctx(self) -> int:
        """Tokens of the user's text: the shortest of the models' contexts, less the term's own prompt."""
        return min(leaf.model.n_ctx - len(leaf.prompt) for leaf in checked(self).leaves)

    @property
    def vocab_size(self) -> int:
        return checked(self).leaves[0].model.vocab_size

    @property
    def device(self) -> torch.device:
        return checked(self).leaves[0].model.device

    @property
    def dtype(self) -> torch.dtype:
        dtype = checked(self).leaves[0].model.dtype
        for leaf in self.leaves:
            dtype = torch.promote_types(dtype, leaf.model.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        return sum(model.nbytes for model in {id(leaf.model): leaf.model for leaf in self.leaves}.values())

    @property
    def max_rows(self) -> int:
        """Rows that a pass should have at most (exact.py)."""
        return min(getattr(leaf.model, "max_rows", 1 << 30) for leaf in self.leaves)

    @property
    def packed(self) -> Tensor | None:
        return getattr(self.leaves[0].model, "packed", None)

    def new_cache(self, capacity: int | None = None) -> FormulaCache:
        """A cache of `capacity` slots (n_ctx if None) for the user's text; the terms' own prompts are read at once.

        Raises ValueError for a formula whose total weight is not above 0.
        """
        checked(self)
        capacity = self.n_ctx if capacity is None else capacity
        parts: dict[tuple, Any] = {TOKENS: SlotText(capacity)} if self.classifies else {}
        offsets = {TOKENS: 0}
        for leaf in self.leaves:
            if leaf.key not in parts:
                offsets[leaf.key] = size = len(leaf.prompt)
                parts[leaf.key] = leaf.model.new_cache(size + capacity)
                if size:
                    with torch.no_grad():
                        leaf.model(leaf.prompt, cache=parts[leaf.key], rows=[size - 1])
        return FormulaCache(parts, offsets)

    def __call__(
        self,
        tokens: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor | None = None,
        mask: Tensor | None = None,
        cache: FormulaCache | None = None,
        rows: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """The formula's log-probabilities, (len(rows) or q, vocab_size); -inf where a gate forbids a token.

        Arguments as those of `GPT.forward`; tokens are one flat list, positions and slots are those of the user's text.
        Each model sees its own prompt before it. Raises ValueError as GPT does, for a total weight not above 0 and
        for a cache of another formula; the cache is then as it was.
        """
        checked(self)
        tokens = torch.as_tensor(tokens, dtype=torch.long)
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"a formula needs tokens in one flat list of one or more, not shape {tuple(tokens.shape)}")
        q = len(tokens)
        cache = self.new_cache(q) if cache is None else cache
        wanted = {leaf.key for leaf in self.leaves} | ({TOKENS} if self.classifies else set())
        if not isinstance(cache, FormulaCache) or not wanted <= set(cache.parts):
            raise ValueError("the cache is not one of this formula: use its own new_cache()")
        past = cache.length
        if positions is None:
            positions = torch.arange(past, past + q)
        positions = torch.as_tensor(positions, dtype=torch.long)
        if positions.shape != (q,) or not 0 <= int(positions.min()) <= int(positions.max()) < self.n_ctx:
            raise ValueError(f"{q} tokens need as many positions, all in 0 .. {self.n_ctx - 1} (the formula's context)")
        if past + q > cache.capacity:
            raise ValueError(f"the cache has {cache.capacity} slots, {past} in use: no room for {q} more")
        if mask is not None and mask.shape != (q, past + q):
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected {(q, past + q)}")
        logits, texts = {}, []
        try:
            for leaf in {leaf.key: leaf for leaf in self.leaves}.values():
                size = len(leaf.prompt)
                # Everyone sees the term's own prompt. (Without a mask rows are causal, behind any prompt.)
                own = mask if mask is None else torch.cat([mask.new_ones(q, size), mask], 1)
                logits[leaf.key] = leaf.model(tokens, positions + size, own, cache.parts[leaf.key], rows)
            if self.classifies:
                told, seen = cache.parts[TOKENS], mask
                told.slots += zip(positions.tolist(), tokens.tolist())
                if seen is None:
                    seen = torch.ones(q, past + q, dtype=torch.bool).tril(past)
                texts = [told.text(row) for row in (seen if rows is None else seen[torch.as_tensor(rows)])]
            values, allowed = self.scores(View(logits, texts))
        except BaseException:
            cache.truncate(past)
            raise
        return (values if allowed is None else values.masked_fill(~allowed, -torch.inf)).to(self.dtype)


class Prompted(Term):
    """`model`, with a prompt of its own before the user's text: a text or a list of token ids, "" for none.

    Raises ValueError for something that is no model, or a prompt that fills the model's context.
    """

    def __init__(self, model: Any, prompt: str | Sequence[int] = "") -> None:
        if not all(hasattr(model, name) for name in ("n_ctx", "vocab_size", "new_cache")):
            raise ValueError(f"a formula is made of models, not of {type(model).__name__}: {model!r:.60}")
        self.model, self.said = model, prompt
        if isinstance(prompt, str):
            prompt = Tokenizer.for_model(model).encode(prompt) if prompt else []
        self.prompt = [int(token) for token in prompt]
        if len(self.prompt) >= model.n_ctx:
            raise ValueError(f"{self} has a prompt of {len(self.prompt)} tokens, the model's context is {model.n_ctx}")
        self.leaves, self.key = [self], (id(model), *self.prompt)

    def scores(self, view: View) -> Scores:
        values = view.logits[self.key]
        values = values.float() if values.dtype.itemsize == 2 else values
        allowed = values > -torch.inf  # a model may have gates of its own, a formula inside a formula for one
        return settle(values, None if allowed.all() else allowed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prompted) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"M({self.said!r:.40})"


class Sum(Term):
    """Weighted terms. Sums of sums become one; equal terms are put together, so that 2 * M - M is M."""

    def __init__(self, terms: Sequence[tuple[float, Term]]) -> None:
        together: dict[Term, float] = {}
        for weight, term in terms:
            for inner, part in term.terms.items() if isinstance(term, Sum) else [(term, 1.0)]:
                together[inner] = together.get(inner, 0.0) + weight * part
        self.terms = {term: weight for term, weight in together.items() if weight != 0}
        self.leaves = joined(self.terms)
        self.weight = math.fsum(weight * term.weight for term, weight in self.terms.items())
        self.classifies = any(term.classifies for term in self.terms)

    def scores(self, view: View) -> Scores:
        values, allowed = torch.zeros(()), None
        for term, weight in self.terms.items():
            if not isinstance(term, Classifier):
                logs, lets = term.scores(view)
                values = values.to(logs.device) + weight / self.weight * logs
                if lets is not None and weight > 0:
                    allowed = lets if allowed is None else allowed & lets
        plain = settle(values, allowed)  # what the classifiers choose their candidates from
        values = plain.values
        for term, weight in self.terms.items():
            if isinstance(term, Classifier):
                values = values + weight / self.weight * term.log_probs(plain, view.texts)
        return settle(values, plain.allowed) if self.classifies else plain

    def __str__(self) -> str:
        return " + ".join(f"{weight:g}*{term}" for term, weight in self.terms.items()) or "terms that cancel"


class Union(Term):
    """For each token the largest of its terms' probabilities, normalised. ValueError for fewer than two terms."""

    name, best = "Union", staticmethod(torch.amax)

    def __init__(self, *terms: Any) -> None:
        if len(terms) < 2:
            raise ValueError(f"{self.name} takes two terms or more")
        self.terms = [checked(as_term(term)) for term in terms]
        self.leaves = joined(self.terms)
        self.classifies = any(term.classifies for term in self.terms)

    def scores(self, view: View) -> Scores:
        found = [term.scores(view) for term in self.terms]
        logs = [s.values if s.allowed is None else s.values.masked_fill(~s.allowed, -torch.inf) for s in found]
        values = self.best(torch.stack(logs), 0)
        allowed = values > -torch.inf
        return settle(values.masked_fill(~allowed, 0.0), None if allowed.all() else allowed)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.terms))})"


class Intersection(Union):
    """For each token the smallest of the terms' probabilities, normalised: what all of them find likely."""

    name, best = "Intersection", staticmethod(torch.amin)


class TopK(Term):
    """A gate: only the k most probable tokens of `term` (and those as probable as the k-th).

    Raises ValueError for a k that is not a whole number above 0.
    """

    def __init__(self, term: Any, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"TopK keeps a whole number of tokens, 1 or more, not {k!r}")
        self.term, self.k = checked(as_term(term)), k
        self.leaves, self.classifies = self.term.leaves, self.term.classifies

    def lets(self, logs: Tensor) -> Tensor:
        return logs >= logs.topk(min(self.k, logs.shape[-1])).values[..., -1:]

    def scores(self, view: View) -> Scores:
        values, allowed = self.term.scores(view)
        logs = values if allowed is None else values.masked_fill(~allowed, -torch.inf)
        return settle(values, self.lets(logs) & (logs > -torch.inf))

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.term}, {self.k:g})"


class TopP(TopK):
    """A gate: the smallest set of most probable tokens of `term` that weighs at least p.

    Raises ValueError for a p that is not above 0 and at most 1.
    """

    def __init__(self, term: Any, p: float) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p <= 1:
            raise ValueError(f"TopP keeps a share of the probability, above 0 and at most 1, not {p!r}")
        super().__init__(term, 1)
        self.k = p

    def lets(self, logs: Tensor) -> Tensor:
        probs, order = logs.exp().sort(descending=True)
        kept = probs.cumsum(-1) - probs < self.k  # what is more probable weighs less than p; the first always stays
        return torch.zeros_like(kept).scatter(-1, order, kept)


class Classifier(Term):
    """Pulls towards texts that have a property: w * Classifier(score) adds w / W log C(text and token) to each token,
    W being the total weight of the sum it stands in (4 log C in M - 0.5 * N + 2 * C).

    score  score(ids, candidates) -> (1 + n,): the log-probability that the text `ids` has the property, then that of
           the text followed by each of n candidate tokens. BagOfTokens is one; TextScore makes one of any callable.
    top    only so many candidates are looked at, the most probable by the rest of the formula: judging all of a
           vocabulary would be too slow. Any other token counts as no news: C of the text as it stands.

    It has no models and total weight 0, so it stands in a sum with something else. A row's text is all of the user's
    text that the row sees: the prompt, too, and in a draft tree the row's own branch.
    """

    leaves: list[Prompted] = []  # noqa: RUF012
    weight, classifies = 0.0, True

    def __init__(self, score: Callable[[list[int], list[int]], Tensor], top: int = 50) -> None:
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise ValueError(f"a classifier looks at a whole number of candidates, 1 or more, not {top!r}")
        self.score, self.top = score, top

    def log_probs(self, plain: Scores, texts: list[list[int]]) -> Tensor:
        """(rows, vocab_size), for texts whose next token has the distribution `plain`."""
        logs = plain.values if plain.allowed is None else plain.values.masked_fill(~plain.allowed, -torch.inf)
        best = logs.topk(min(self.top, logs.shape[-1])).indices
        result = torch.zeros_like(logs)
        for row, (ids, candidates) in enumerate(zip(texts, best)):
            scores = torch.as_tensor(self.score(ids, candidates.tolist())).to(logs)
            if scores.shape != (1 + len(candidates),) or not bool((scores <= 1e-6).all()):
                raise ValueError("a classifier must give 1 + n log-probabilities (finite or -inf, at most 0)")
            scores = scores.clamp(min=-1e4)  # probability 0 must not become NaN behind a negative weight
            result[row] = scores[0]
            result[row, candidates] = scores[1:]
        return result

    def __str__(self) -> str:
        return "C"


def as_term(thing: Any) -> Term:
    """A model without a prompt, as a term; terms stay as they are."""
    if isinstance(thing, bool | int | float):
        raise ValueError(f"a formula adds up models, not numbers: {thing} needs a * and a model behind it")
    return thing if isinstance(thing, Term) else Prompted(thing)


def checked(term: Term) -> Term:
    """`term`, if it is a distribution. Raises ValueError if its total weight is not above 0."""
    if not math.isfinite(term.weight) or term.weight > 1e6:
        raise ValueError(f"the weights of {term} are too large: give numbers that add up to less than a million")
    if not term.weight > 1e-9 or not term.leaves:
        raise ValueError(f"the weights of {term} add up to {term.weight:g}: they must be above 0 (a classifier adds 0)")
    return term


def joined(terms: Iterable[Term]) -> list[Prompted]:
    """The models of several terms. Raises ValueError if their vocabularies or devices differ."""
    leaves = [leaf for term in terms for leaf in term.leaves]
    for leaf in leaves[1:]:
        for what in ("vocab_size", "device"):
            ours, theirs = getattr(leaves[0].model, what), getattr(leaf.model, what)
            if ours != theirs:
                raise ValueError(f"{leaves[0]} and {leaf} cannot be added: {what} {ours} and {theirs}")
    return leaves
