"""What a forward pass costs by its number of rows, and what it would cost at best. `python bench.py cost`.

Step by step: notebook 05, sections 1 and 2.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from model import GPT, GPTConfig, Linear
from packing import apply_packed, packed


def load_model(name: str, dtype: torch.dtype, device: torch.device, pack: bool | None = None) -> GPT:
    """A model by name; "124m" is GPT-2's smallest published shape with random weights."""
    if name != "124m":
        return GPT.load(name, device, dtype, pack)
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, n_ctx=1024))
    model = model.to(device, dtype).requires_grad_(False).eval()
    if pack is not False:
        model.pack()
    return model


def with_plain_linear(model: GPT) -> GPT:
    """The same model, its products computed by F.linear from (n_out, n_in) weights, as most libraries do."""
    other = copy.deepcopy(model)
    other.packed = None
    for module in other.modules():
        if isinstance(module, Linear):
            weight, bias = module.weight.T.contiguous(), module.bias
            module.forward = lambda x, weight=weight, bias=bias: F.linear(x, weight, bias)
    return other


def median_seconds(functions: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Medians, the functions taking turns; the first round is not counted."""
    times: list[list[float]] = [[] for _ in functions]
    for round_number in range(repeats + 1):
        for function, mine in zip(functions, times):
            began = time.perf_counter()
            function()
            if round_number:
                mine.append(time.perf_counter() - began)
    return [statistics.median(mine) for mine in times]


def forward_of(model: GPT, rows: int, prefix: int) -> Callable[[], object]:
    """A forward of `rows` rows as verification makes it, behind `prefix` tokens; repeatable."""
    cache = model.new_cache(prefix + rows)
    tokens = [i * 7919 % model.vocab_size for i in range(prefix + rows)]
    with torch.no_grad():
        model(tokens[:prefix], cache=cache)
    positions = [prefix + min(i, 7) for i in range(rows)]
    mask = torch.ones(rows, prefix + rows, dtype=torch.bool)
    mask[:, prefix:] = torch.eye(rows, dtype=torch.bool)
    mask[:, prefix] = True

    def run() -> None:
        with torch.no_grad():
            model(tokens[prefix:], positions, mask if rows > 1 else None, cache)[-1, 0].item()
        cache.truncate(prefix)

    return run


def bounds(model: GPT, repeats: int) -> tuple[float, float]:
    """(bytes per second, operations per second): the best that this machine shows for reading weights like the model's
    and for multiplying matrices, over a few ways of doing each."""
    dtype, device = model.dtype, model.device
    side = 4096
    count = max(model.nbytes // model.wte.weight.element_size() // side, 256)
    big = torch.ones(count, side, dtype=dtype, device=device)
    vector = torch.ones(side, dtype=dtype, device=device)
    readers = [lambda: big.sum().item(), lambda: big.max().item(), lambda: (big @ vector)[0].item()]
    copy_of = packed(big)
    if copy_of is not None:
        readers.append(lambda: apply_packed(vector[None], copy_of, None)[0, 0].item())
    fastest = min(median_seconds(readers, repeats))
    square = torch.ones(1024, 1024, dtype=dtype, device=device)
    products = [lambda: (square @ square)[0, 0].item(), lambda: F.linear(square, square)[0, 0].item()]
    return big.numel() * big.element_size() / fastest, 2 * 1024**3 / min(median_seconds(products, repeats))


def bytes_read(model: GPT) -> int:
    """What a forward pass has to read of the weights: all but the table of positions."""
    return model.nbytes - model.wpe.weight.numel() * model.wpe.weight.element_size()
