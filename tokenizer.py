"""Text to token ids and back: GPT-2's byte-pair encoding, offline.

`assets/gpt2.tiktoken` lists 50,256 byte strings, one per line, in the order in which byte-pair encoding learned
them: the number behind each is the token's *rank* and its id. Encoding merges, again and again, the neighbouring pair
whose merged bytes have the lowest rank. Two consequences are used below:

- A *prefix* of the table is itself a complete byte-pair encoding, with the same ids. The first 256 ranks are the 256
  single bytes, so even the smallest prefix can spell any text. The bundled models use the first 4,095 ranks, which
  keeps their embedding table small: "Question: 3+4" costs a few tokens more than in GPT-2, no new vocabulary is needed.
- Tokens are *bytes*, not characters. "é" is two bytes and may arrive as two tokens, so a program that prints while it
  generates must wait for the second half. `Tokenizer.stream` does that.

End-of-text has the id behind the last rank: 50256 in GPT-2, 4095 in a bundled model with 4,096 ids.
"""

import base64
import codecs
import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import tiktoken

ASSET = Path(__file__).resolve().parent / "assets" / "gpt2.tiktoken"
ASSET_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
EOT_TEXT = "<|endoftext|>"
GPT2_VOCAB_SIZE = 50257

# GPT-2 first cuts the text into chunks that no merge may cross: English contractions, then a run of letters, of digits
# or of other signs, each with at most one space before it, then white space. "It's 48/2" -> "It" "'s" " 48" "/" "2".
CHUNK_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
TOO_BLANK = re.compile(r"\s{100001}")


@functools.lru_cache(maxsize=1)
def _gpt2_ranks() -> list[bytes]:
    """The 50,256 byte strings in rank order. Raises FileNotFoundError, or ValueError if the file was changed."""
    try:
        data = ASSET.read_bytes()
    except OSError:
        raise FileNotFoundError(f"{ASSET} is missing: it holds GPT-2's vocabulary; restore it with git") from None
    if hashlib.sha256(data).hexdigest() != ASSET_SHA256:
        raise ValueError(f"{ASSET} is damaged (its SHA-256 is not GPT-2's vocabulary); restore it with git")
    return [base64.b64decode(line.split()[0]) for line in data.splitlines()]  # the lines are in rank order


class Tokenizer:
    """Byte-pair encoding with the first `vocab_size - 1` ranks of GPT-2 and end-of-text as the last id.

    A model may have *more* rows than GPT-2 has tokens (tables padded to a round number): the ids above 50256 then
    decode to nothing and are never produced by `encode`.

    Raises ValueError when `vocab_size` is below 257, for then not even single bytes could be spelled.
    """

    def __init__(self, vocab_size: int = GPT2_VOCAB_SIZE) -> None:
        if vocab_size < 257:
            raise ValueError(
                f"a vocabulary of {vocab_size} tokens cannot spell text: GPT-2's needs 256 bytes and end-of-text"
            )
        self.vocab_size = vocab_size
        self.eot = min(vocab_size, GPT2_VOCAB_SIZE) - 1
        self._bytes = _gpt2_ranks()[: self.eot]
        self._encoding = tiktoken.Encoding(
            name=f"gpt2-first-{self.eot}",
            pat_str=CHUNK_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self._bytes)},
            special_tokens={EOT_TEXT: self.eot},
        )

    @classmethod
    def for_model(cls, model: object) -> "Tokenizer":
        """The tokenizer of a model or a configuration: anything with an integer `vocab_size`."""
        return _cached(int(model.vocab_size))  # type: ignore[attr-defined]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`.

        "<|endoftext|>" inside the text is ordinary text (thirteen characters), so that no prompt can smuggle in a stop
        token; with `special=True` it becomes the one id `eot`. Raises ValueError for an absurd run of white space.
        """
        if TOO_BLANK.search(text):  # tiktoken would die of it
            raise ValueError("the text holds a run of more than 100,000 white-space characters: shorten it")
        if special:
            return self._encoding.encode(text, allowed_special={EOT_TEXT})
        return self._encoding.encode_ordinary(text)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; end-of-text is spelled out, ids beyond GPT-2's table are empty.

        Raises ValueError for an id that the model itself cannot have produced.
        """
        if 0 <= token < self.eot:
            return self._bytes[token]
        if token == self.eot:
            return EOT_TEXT.encode()
        if self.eot < token < self.vocab_size:
            return b""
        raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8 (a cut character, say) show as U+FFFD, the replacement mark."""
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", errors="replace")

    def stream(self) -> "TextStream":
        """A decoder for tokens that arrive a few at a time."""
        return TextStream(self)


class TextStream:
    """Turns tokens into text as they come, holding back an unfinished character until its last byte is there.

        stream = tokenizer.stream()
        print(stream.push([1, 2]), end="")     # only whole characters
        print(stream.push([3]) + stream.close())

    All pieces joined equal `tokenizer.decode` of all tokens, whatever the portions.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._tokenizer.token_bytes(int(token)) for token in ids))

    @property
    def held(self) -> bytes:
        """The bytes held back: the beginning of a character."""
        return self._utf8.getstate()[0]

    def close(self) -> str:
        """What was held back: a last character that never became whole shows as U+FFFD."""
        return self._utf8.decode(b"", final=True)


@functools.lru_cache(maxsize=8)
def _cached(vocab_size: int) -> Tokenizer:
    return Tokenizer(vocab_size)
