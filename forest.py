"""Several texts from one prompt, side by side: a batch is a forest.

The prompt is read once. Then every pass has one row for each text that still goes on; a row sees the prompt and its own
text, never its neighbours:

                 prompt      step 1   step 2           three texts; the second ended after its first token, so
                 .  .  .  |  a  b  c  a' c'            the second pass has two rows
        a'       x  x  x  |  x        x
        c'       x  x  x  |        x     x

Nothing is padded and nothing moves in the cache; what ended stays where it is and is no longer seen.

Step by step: notebook 07, section 6.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from sampling import Picker


def forest(
    model: Any,
    prompt_ids: Sequence[int],
    pickers: Sequence[Picker],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> list[list[int]]:
    """One text for each picker, as plain decoding with that picker writes it (up to rounding); a stop token is kept.

    Rows forwarded: the prompt's, and for each text its tokens but the last, whose logits nobody needs.

    Raises ValueError if the prompt is empty or prompt and text do not fit the model's context.
    """
    prompt = list(prompt_ids)
    if not prompt or len(prompt) + max_new_tokens > model.n_ctx:
        raise ValueError(
            f"{len(prompt)} tokens of prompt and {max_new_tokens} new ones: the prompt must not be empty and both "
            f"must fit the context of {model.n_ctx}"
        )
    start, texts = len(prompt), [[] for _ in pickers]
    slots: list[list[int]] = [[] for _ in pickers]  # where each text's tokens lie in the cache
    cache = model.new_cache(start + len(pickers) * max_new_tokens)
    with torch.no_grad():
        logits = model(prompt, cache=cache, rows=[start - 1]).expand(len(pickers), -1)
    live = list(range(len(pickers))) if max_new_tokens > 0 else []
    while live:
        for row, i in enumerate(live):
            texts[i].append(pickers[i].pick(logits[row], start + len(texts[i]), prompt + texts[i]))
        live = [i for i in live if texts[i][-1] not in stop_ids and len(texts[i]) < max_new_tokens]
        if live:
            base = cache.length
            mask = torch.zeros(len(live), base + len(live), dtype=torch.bool)
            mask[:, :start] = True
            for row, i in enumerate(live):
                slots[i].append(base + row)
                mask[row, slots[i]] = True
            positions = [start + len(texts[i]) - 1 for i in live]
            with torch.no_grad():
                logits = model([texts[i][-1] for i in live], positions, mask, cache)
    return texts
