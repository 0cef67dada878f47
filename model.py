"""GPT-2 and its KV cache: one forward pass that serves every decoder in this repository.

A transformer maps token ids to *logits*: for each token, one score per vocabulary entry for what comes next. Nothing
in that needs the tokens to form a line. Each token has a position (an integer) and a set of tokens it may look at, and
both are ours to choose:

    logits = model(tokens, positions, mask, cache, rows)

Say the cache holds the 3 tokens of "the cat sat" and we want to score two possible continuations, "on" and "down",
and behind "on" also "the". That is a tree with 3 nodes, sent as one flat list of q = 3 tokens:

    tokens      on   down  the
    positions    3    3     4         siblings share a position: each *would be* token number 3

                cached slots      new slots 3 4 5
                the  cat  sat  |  on  down  the
    mask  on     x    x    x   |  x                     a row may see the past, itself and its own ancestors
          down   x    x    x   |       x
          the    x    x    x   |  x          x          "the" does not know that "down" exists

Row i of the result is what the model says after "the cat sat" and the path to node i (up to rounding: the numbers are
added in another order). Plain decoding is the case q = 1, reading the prompt ("prefill") is q = len(prompt) under a
causal mask. So there is one forward, and nothing in it knows which decoder called.

Why is it fast? Decoding is waiting for weights: a forward of one row reads each of them once and does two operations
with it. What counts is to read each once, also for eight rows or thirty, and to do little else. In this order (GPT-2's
124M shape, float32, two cores of a server, 256 tokens in the cache; milliseconds for 1 / 8 / 32 rows):

    x @ W as the file stores it                      36 / 86 / 150    a matrix product for big batches, bad at few rows
    W re-laid for the CPU's kernels ("packed")       28 / 29 / 56     packing.py: eight rows for the price of one
    no mask for a single row, else made once for all layers; the head only for the rows that are wanted; keys and values
    written into the cache in one go and read as views                 small each, and together what is left to Python

Why a cache at all: a token's keys and values depend only on what it may see, never on what comes later. They are
computed once, kept, and the next forward pays for its new tokens only.

Source: Radford et al. 2019 (GPT-2); names as in the weights that OpenAI published. Step by step: notebook 01.
"""

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weights
from packing import Packable, apply_packed, packed

Tokens = Sequence[int] | Tensor
Paths = list[Tensor]  # for each row the slots it sees, in the order of their positions: see `exact.py`


@dataclass(frozen=True)
class GPTConfig:
    """The numbers that define a GPT-2: layers, heads, width, vocabulary, context length (in tokens)."""

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    n_ctx: int
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "vocab_size", "n_ctx"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        epsilon = self.layer_norm_epsilon
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < 1:
            raise ValueError(f"layer_norm_epsilon must be a small positive number, not {epsilon!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} cannot be split evenly over n_head {self.n_head} heads")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


class KVCache:
    """Keys and values of the tokens seen so far, one *slot* per token, in memory that is allocated once.

    `k` and `v` have shape (n_layer, n_head, capacity, head_dim), halves of one tensor. Slots 0 .. length - 1 are in
    use. A slot is only a place; which position a token has and who may see it is said by the forward's arguments. That
    is why a rejected branch of a draft tree costs nothing to remove: keep the slots that were accepted, forget the
    rest.

        slots     0    1    2  |  3    4     5
        before   the  cat  sat | on  down  the     length 6
        keep(3, [3, 5])        | on  the           length 5     "down" was rejected

    Capacity counts slots, not positions: a draft tree needs more slots than the text has positions.
    """

    def __init__(
        self, config: GPTConfig, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a KV cache needs at least one slot, not {capacity}")
        shape = (config.n_layer, 2, config.n_head, capacity, config.head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)  # keys and values side by side: written in one go
        self.length = 0

    @property
    def k(self) -> Tensor:
        return self.kv[:, 0]

    @property
    def v(self) -> Tensor:
        return self.kv[:, 1]

    @property
    def capacity(self) -> int:
        return self.kv.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, for keys and values together."""
        return self.kv.numel() * self.kv.element_size()

    @property
    def live_nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self.nbytes // self.capacity * self.length

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Write (2, n_head, q, head_dim), keys and values of q new tokens; return this layer's, length + q slots.

        `length` itself moves in `advance`, when all layers are written: a forward that fails half-way leaves no trace.
        """
        end = self.length + kv.shape[2]
        self.kv[layer, :, :, self.length : end] = kv
        return self.kv[layer, :, :, :end]  # a view: nothing is copied

    def advance(self, q: int) -> None:
        self.length += q

    def truncate(self, length: int) -> None:
        """Forget all slots from `length` on. Raises ValueError when fewer than that are in use."""
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} slots to {length}")
        self.length = length

    def keep(self, start: int, slots: Tokens) -> None:
        """The absolute `slots` (any order) become slots start, start + 1, ...; everything after them is forgotten.

        Raises ValueError if `start` or a slot is outside what is in use, or the result would not fit.
        """
        index = [int(slot) for slot in slots]
        inside = isinstance(start, int) and 0 <= start <= self.length
        if not inside or any(not 0 <= slot < self.length for slot in index):
            raise ValueError(f"keep({start}, {index}) names slots outside the {self.length} in use")
        end = start + len(index)
        if end > self.capacity:
            raise ValueError(f"keep({start}, {len(index)} slots) needs {end} slots, the cache has {self.capacity}")
        # Slots that already lie where they belong need no move: an accepted first child often makes up the whole path.
        moved = next((i for i, slot in enumerate(index) if slot != start + i), len(index))
        if moved < len(index):
            source = torch.tensor(index[moved:], device=self.kv.device)
            # index_select makes a copy before anything is written, so source and target may overlap.
            self.kv[:, :, :, start + moved : end] = self.kv.index_select(3, source)
        self.length = end

    def fork(self) -> "KVCache":
        """A deep copy with the same capacity: what is written to one never shows in the other."""
        other = copy.copy(self)
        other.kv = torch.zeros_like(self.kv)
        other.kv[:, :, :, : self.length] = self.kv[:, :, :, : self.length]  # only live slots are worth copying
        return other

    def to(self, device: torch.device | str) -> "KVCache":
        """Move to `device` in place (to offload to the CPU and to bring back); returns itself."""
        self.kv = self.kv.to(device)
        return self


class Linear(Packable):
    """y = x W + b, with W stored as (n_in, n_out): the layout of GPT-2's files, the transpose of nn.Linear's.

    `packed` is None or a copy of W that is faster to read (see `GPT.pack`).
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:  # (..., n_in) -> (..., n_out)
        if self.packed is not None:
            return apply_packed(x, self.packed, self.bias)
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Multi-head attention: softmax(q k^T / sqrt(head_dim)) v, each row over the slots that its mask row allows.

    Given paths instead of a mask (exact.py), each row goes alone, over the keys of its path in the order of the path.
    So it does the same sums whoever stands beside it.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, mask: Tensor | Paths | None, causal: bool, cache: KVCache | None) -> Tensor:
        q, n_embd = x.shape[-2:]
        # (..., q, 3 n_embd) -> (3, batch, n_head, q, head_dim), where q counts tokens; a flat list is a batch of one
        qkv = self.c_attn(x).view(-1, q, 3, self.n_head, n_embd // self.n_head).permute(2, 0, 3, 1, 4)
        query, kv = qkv[0], qkv[1:]
        if isinstance(mask, list):
            kv = cache.append(self.layer, kv[:, 0, :, : len(mask)])
            y = torch.zeros_like(query)
            for row, path in enumerate(mask):
                k, v = kv.index_select(2, path)[:, None]  # each (1, n_head, len(path), head_dim)
                alone = query[:, :, row : row + 1].clone()  # its own memory, so aligned like any other row's
                y[:, :, row : row + 1] = F.scaled_dot_product_attention(alone, k, v)
            return self.c_proj(y.transpose(1, 2).reshape(x.shape))
        if cache is not None:
            kv = cache.append(self.layer, kv[:, 0])[:, None]  # (2, 1, n_head, length + q, head_dim)
        if q == 1 and x.dtype.itemsize == 2 and x.device.type == "cpu":
            query = query.repeat(1, 1, 2, 1)  # for one row in half precision torch takes twice as long as for two
        y = F.scaled_dot_product_attention(query, kv[0], kv[1], attn_mask=mask, is_causal=causal)[:, :, :q]
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))  # (batch, n_head, q, head_dim) -> (..., q, n_embd)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor, alone: bool = False) -> Tensor:
        x = self.c_fc(x)
        if alone:  # torch's vector tanh and its scalar one, which gets the odd end of a thread's share, differ slightly
            return self.c_proj(torch.stack([F.gelu(row, approximate="tanh") for row in x]))
        return self.c_proj(F.gelu(x, approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): "pre-layernorm", the residual stream itself stays as it is."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Tensor | Paths | None, causal: bool, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, causal, cache)
        return x + self.mlp(self.ln_2(x), alone=isinstance(mask, list))


class GPT(Packable):
    """GPT-2. Attribute names are the tensor names of the published weights (`h.0.attn.c_attn.weight`).

    `packed` is None or a copy of the head's weights that is faster to read (see `pack`).
    """

    def __init__(self, config: GPTConfig) -> None:
        """A model with random weights, ready to be trained. `GPT.load` reads trained ones."""
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # token embedding; its transpose is the head
        self.wpe = nn.Embedding(config.n_ctx, config.n_embd)  # learned position embedding
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # GPT-2's start: normal, standard deviation 0.02; the two projections that write into the residual
                # stream are scaled down so that the stream's variance does not grow with depth.
                scale = math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    @classmethod
    def load(
        cls,
        name_or_path: str | os.PathLike[str],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        pack: bool | None = None,
    ) -> "GPT":
        """A trained model: "tiny", "nano", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", a folder with
        config.json and model.safetensors, or a bare .safetensors file.

        pack  whether to make a second copy of the weights that is faster to read (see `pack`); None: if memory is ample

        Its parameters have requires_grad = False. Raises FileNotFoundError if there is no such model (or no network to
        fetch it), ValueError if the file is damaged or holds something else than this GPT-2.
        """
        path = weights.resolve(name_or_path)
        config, tensors = weights.read(path)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, not {dtype}")
        shape = GPTConfig(**config)
        try:
            if shape.n_layer > len(tensors):
                raise OverflowError
            with torch.device("meta"):  # shapes without memory: the tensors of the file become the parameters
                model = cls(shape)
        except (OverflowError, TypeError, RuntimeError):  # numbers that no tensor can have
            raise ValueError(f"{path}: a configuration of {shape} does not fit {len(tensors)} tensors") from None
        wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        problems = [f"missing {name}" for name in wanted if name not in found]
        problems += [f"unexpected {name}" for name in found if name not in wanted]
        problems += [
            f"{name} has shape {found[name]}, expected {shape}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ]
        if problems:
            raise ValueError(f"{path} does not hold this GPT-2: {'; '.join(problems)}")
        tensors = {k: v.to(device, dtype) for k, v in tensors.items()}
        odd = [name for name, tensor in tensors.items() if not torch.stack(tensor.aminmax()).isfinite().all()]
        if odd:
            raise ValueError(f"{path} holds numbers that are not finite in {dtype}: {', '.join(odd)}")
        model.load_state_dict(tensors, assign=True)
        model.requires_grad_(False).eval()
        if pack or (pack is None and model.nbytes < 0.2 * weights.free_memory()):
            model.pack()
        return model

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters (without a packed copy, which is about as large again)."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def pack(self) -> bool:
        """Make the packed copies, where they exist (float32 and bfloat16 on a CPU); says whether it did.

        Do not train a packed model: no gradient passes through the copies, and they do not notice changes of the
        weights made in place. Moving the model or changing its dtype drops them.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.packed = packed(module.weight.T)
        self.packed = packed(self.wte.weight)
        return self.packed is not None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json and model.safetensors, each atomically; transformers loads them to the same logits."""
        weights.write(folder, asdict(self.config), self.state_dict())

    # What a decoder may ask of any model: these four, `new_cache` and the forward.

    @property
    def n_ctx(self) -> int:
        return self.config.n_ctx

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.wte.weight.dtype

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache of `capacity` slots (n_ctx if None) on the model's device, in its dtype."""
        return KVCache(self.config, self.n_ctx if capacity is None else capacity, self.device, self.dtype)

    def _checked(self, numbers: Tokens, limit: int, what: str) -> Tensor:
        """`numbers` as a tensor on the model's device, all of them in 0 .. limit - 1."""
        numbers = torch.as_tensor(numbers, dtype=torch.long)
        if numbers.device.type == "cpu" and numbers.numel():  # to look at numbers on a GPU is to wait for it
            low, high = (int(number) for number in numbers.aminmax())
            if low < 0 or high >= limit:
                raise ValueError(f"{what} must lie in 0 .. {limit - 1}, not {low if low < 0 else high}")
        return numbers.to(self.device)

    def forward(
        self,
        tokens: Tokens,
        positions: Tokens | None = None,
        mask: Tensor | Paths | None = None,
        cache: KVCache | None = None,
        rows: Tokens | None = None,
    ) -> Tensor:
        """Logits for a flat list of tokens, which are appended to the cache.

        tokens     (q,) ids. Without a cache, leading batch dimensions are allowed: (..., q), for training.
        positions  (q,) each below n_ctx; by default cache.length, cache.length + 1, ...
        mask       (q, cache.length + q) bool: row i, slot j is True if token i may see slot j, its own slot included.
                   By default causal. A row must see something. (exact.py gives paths instead, for the first rows
                   only; the others are idle, and the cache does not get them.)
        cache      a KVCache with room for q more slots, or None.
        rows       which rows' logits are wanted (all, if None). The head is the largest matrix of a small model, and
                   a prefill needs its last row only.
        Returns    (len(rows) or q, vocab_size) in the model's dtype, behind the batch dimensions of `tokens` if any.

        Raises ValueError if there are no tokens, an id or a position is out of range (not looked at if it is on a GPU
        already), the cache is full, or shapes do not match.
        """
        tokens = self._checked(tokens, self.vocab_size, "token ids")
        q = tokens.shape[-1] if tokens.ndim else 0
        new = len(mask) if isinstance(mask, list) else q  # rows that the cache gets
        past = 0 if cache is None else cache.length
        if q == 0:
            raise ValueError("a forward pass needs at least one token")
        if cache is not None:
            if tokens.ndim != 1:
                raise ValueError(f"with a cache, tokens are one flat list, not of shape {tuple(tokens.shape)}")
            if past + new > cache.capacity:
                raise ValueError(f"the cache has {cache.capacity} slots, {past} in use: no room for {new} more")
        if isinstance(mask, Tensor) and mask.shape != (q, past + q):
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected {(q, past + q)}")
        if rows is not None:
            rows = self._checked(rows, q, "rows")
        if positions is None:
            if past + q > self.n_ctx:
                raise ValueError(f"{past + q} tokens do not fit the model's context of {self.n_ctx}")
            positions = torch.arange(past, past + q, device=self.device)
        else:
            positions = self._checked(positions, self.n_ctx, "positions")
            if positions.shape[-1:] != (q,) or (cache is not None and positions.ndim != 1):
                raise ValueError(f"{q} tokens, but positions of shape {tuple(positions.shape)}")
        if isinstance(mask, list):
            mask = [path.to(self.device) for path in mask]
        elif mask is not None:
            mask = mask.to(self.device)
        elif q > 1 and past > 0:  # causal behind a past; torch's own causal flag knows the case past = 0 only
            mask = torch.ones(q, past + q, dtype=torch.bool, device=self.device).tril(past)
        if isinstance(mask, Tensor):  # 0 for a slot that may be seen, else -inf: once, or each layer would convert it
            mask = torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill_(~mask, -torch.inf)
        causal = mask is None and q > 1  # a single row sees everything: no mask at all

        x = self.wte(tokens) + self.wpe(positions)  # (..., q, n_embd)
        for block in self.h:
            x = block(x, mask, causal, cache)
        if cache is not None:
            cache.advance(new)
        if rows is not None:
            x = x[..., rows, :]
        x = self.ln_f(x)
        if self.packed is not None:
            return apply_packed(x, self.packed, None)
        return F.linear(x, self.wte.weight)  # the head is tied to the embedding
