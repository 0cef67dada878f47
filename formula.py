"""Formulas as text, "M('Be brief. ') - 0.5*M('Be polite. ')", and a classifier that works out of the box.

The text is parsed with Python's own grammar, and then only what is listed here is understood; nothing is evaluated, so
a formula from a stranger can do no harm beyond taking time.

Step by step: notebook 07, sections 1 and 3.
"""

import ast
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arithmetic import Classifier, Intersection, Prompted, Term, TopK, TopP, Union
from forest import forest
from sampling import Sampler
from tokenizer import Tokenizer


class TextScore:
    """Makes a classifier's score of any callable: judge(text) -> the log-probability that the text has a property."""

    def __init__(self, judge: Callable[[str], float], tokenizer: Tokenizer) -> None:
        self.judge, self.tokenizer = judge, tokenizer

    def __call__(self, ids: list[int], candidates: list[int]) -> Tensor:
        texts = [ids, *([*ids, token] for token in candidates)]
        return torch.tensor([float(self.judge(self.tokenizer.decode(text))) for text in texts])


class BagOfTokens:
    """A classifier's score: logistic regression on which tokens occur in the text, in whatever order.

        log C(text) = log sigmoid(bias + sum of the weights of the different tokens in the text)

    bias     a number: how usual the property is
    weights  (vocab_size,): what a token's presence adds to the log-odds that the text has it
    """

    def __init__(self, bias: float, weights: Tensor) -> None:
        self.bias, self.weights = float(bias), weights.detach().double().cpu()

    @classmethod
    def fit(cls, yes: Sequence[Sequence[int]], no: Sequence[Sequence[int]], vocab_size: int) -> "BagOfTokens":
        """Trained on texts that have the property and texts that do not, lists of token ids. A second will do.

        Minimises the mean cross-entropy plus |weights|^2 / number of texts, which is convex: no seed, one optimum. Of
        every text its beginnings count, too (a quarter, a half ...), since unfinished texts are what it will judge.
        Raises ValueError if one of the two is empty.
        """
        if not yes or not no:
            raise ValueError("a classifier learns from texts with the property and from texts without: give both")
        pieces = [(text[: math.ceil(len(text) * part / 4)], side) for side, texts in ((1.0, yes), (0.0, no))
                  for text in texts for part in (1, 2, 3, 4)]  # fmt: skip
        bags = torch.zeros(len(pieces), vocab_size)
        for row, (text, _) in enumerate(pieces):
            bags[row, list(text)] = 1.0
        known = bags.any(0).nonzero()[:, 0]  # a token that was never seen keeps weight 0
        bags, truth = bags[:, known], torch.tensor([side for _, side in pieces])
        weights, bias = torch.zeros(len(known), requires_grad=True), torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.LBFGS([weights, bias], max_iter=100, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = F.binary_cross_entropy_with_logits(bags @ weights + bias, truth)
            value = value + weights.square().sum() / len(pieces)
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        return cls(float(bias.detach()), torch.zeros(vocab_size).index_copy(0, known, weights.detach()))

    @classmethod
    def between(
        cls, model: Any, yes: Sequence[int], no: Sequence[int], count: int = 24, length: int = 64, seed: int = 0
    ) -> "BagOfTokens":
        """Tells what `model` writes after prompt `yes` from what it writes after `no`: samples both, then learns."""
        drawn = [Sampler(seed=seed).sample(number) for number in range(count)]
        texts = [forest(model, prompt, drawn, length) for prompt in (yes, no)]
        return cls.fit(*texts, model.vocab_size)

    def __call__(self, ids: Sequence[int], candidates: Sequence[int]) -> Tensor:
        seen = sorted(set(ids))
        odds = self.bias + self.weights[seen].sum()
        new = torch.tensor(candidates, dtype=torch.long)
        more = self.weights[new].masked_fill(torch.isin(new, torch.tensor(seen, dtype=torch.long)), 0.0)
        return F.logsigmoid(torch.cat([odds[None], odds + more]))


HELP = (
    "M('prompt'), C('yes prompt', 'no prompt'), Union(a, b), Intersection(a, b), TopK(a, 40), TopP(a, 0.9), numbers, "
    "+ - * / and brackets"
)


def parse(text: str, model: Any) -> Term:
    """The term that `text` describes, over one model.

        M('prompt')    the model with that prompt before the user's text; M('') or M without one
        C('yes', 'no') a classifier: tells what the model writes after one prompt from what it writes after the other
        Union(a, b), Intersection(a, b), TopK(a, 40), TopP(a, 0.9), 2 * a, a / 2, a + b, a - b, -a, (a)

    Strings are written as in Python: '\\n' is a line break. Raises ValueError for anything else, in one line.
    """
    tokenizer = Tokenizer.for_model(model)

    def prompts(*texts: Any) -> list[list[int]]:
        if not all(isinstance(each, str) for each in texts):
            raise ValueError("M and C take prompts in quotes: M('Write for children. ')")
        return [tokenizer.encode(each) for each in texts]

    def classifier(yes: Any, no: Any) -> Term:
        if not all(found := prompts(yes, no)):
            raise ValueError("C compares two prompts: C('yes prompt', 'no prompt'), neither empty")
        return Classifier(BagOfTokens.between(model, *found))

    def prompted(prompt: Any = "") -> Term:
        prompts(prompt)
        return Prompted(model, prompt)

    makers: dict[str, tuple[Callable[..., Term], Sequence[int]]] = {  # and how many arguments each takes
        "M": (prompted, (0, 1)),
        "C": (classifier, (2,)),
        "Union": (Union, range(2, 99)),
        "Intersection": (Intersection, range(2, 99)),
        "TopK": (TopK, (2,)),
        "TopP": (TopP, (2,)),
    }

    def build(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, str):
            return node.value
        if isinstance(node, ast.Name) and node.id == "M":
            return prompted()
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = build(node.operand)
            return times(value, -1) if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            left, right = build(node.left), build(node.right)
            if isinstance(node.op, ast.Mult):
                return times(left, right)
            if isinstance(node.op, ast.Div):
                if not isinstance(right, int | float) or right == 0:
                    raise ValueError("a formula can be divided by a number that is not 0, and by nothing else")
                return times(left, 1 / right)
            if not isinstance(left, Term) or not isinstance(right, Term):
                raise ValueError("+ and - stand between terms such as M('prompt'); a number needs a * before a term")
            return left + right if isinstance(node.op, ast.Add) else left - right
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            make, counts = makers.get(node.func.id, (None, ()))
            if make is not None and len(node.args) in counts:
                return make(*(build(argument) for argument in node.args))
        raise ValueError(f"{ast.unparse(node)[:60]!r} is not understood; a formula is made of {HELP}")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own, about odd escapes in strings
            tree = ast.parse(text.strip(), mode="eval")
        term = build(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"--formula {text[:60]!r} cannot be read; a formula is made of {HELP}") from None
    except OverflowError:
        raise ValueError(f"--formula {text[:60]!r} holds a number that is too large") from None
    if not isinstance(term, Term):
        raise ValueError(f"--formula {text[:60]!r} holds no model: it needs a term such as M('prompt')")
    term.n_ctx  # noqa: B018  (refuses a total weight that is not above 0)
    return term


def times(left: Any, right: Any) -> Any:
    """A product of numbers, or of a number and a term."""
    if isinstance(left, str) or isinstance(right, str) or (isinstance(left, Term) and isinstance(right, Term)):
        raise ValueError("* stands between numbers, or between a number and a term such as M('prompt')")
    return right * left if isinstance(right, Term) else left * right
