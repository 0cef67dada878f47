"""Where GPT-2 weights come from, and how they look on disk. `model.py` calls this and needs to know none of it.

    resolve("gpt2")       a name, folder or file -> a path on this machine (downloaded if need be)
    read(path)            -> the configuration as a dict, and the tensors under GPT-2's bare names
    write(folder, ...)    config.json + model.safetensors, as on the Hugging Face Hub

Published GPT-2 files differ in small ways, all accepted here. The Hub's own `gpt2` names tensors
`h.0.attn.c_attn.weight` and carries the causal masks as buffers (`h.0.attn.bias`); files saved by transformers put
`transformer.` before every name; some store the tied head a second time as `lm_head.weight`. A safetensors file is a
length, a JSON table of names, types, shapes and offsets, and the raw numbers; it can be mapped into memory as it is
and runs no code, unlike the pickle files that it replaces.
"""

import http.client
import json
import os
import re
import shutil
import socket
import tempfile
import urllib.error
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

BUNDLED = ("tiny", "nano")
HUB = {  # name -> repository on the Hugging Face Hub
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}
MODELS = Path(__file__).resolve().parent / "models"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TIMEOUT = 20.0  # seconds without a byte before a download gives up


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder or .safetensors file that holds a model.

    "tiny" and "nano" lie in models/. The GPT-2 names are looked for in the Hugging Face cache, then in this program's
    own cache, then downloaded. Anything else is a path. Raises FileNotFoundError when there is no such model.
    """
    name = str(name_or_path)
    if name in BUNDLED:
        return MODELS / name
    if name in HUB:
        return _in_hub_cache(name) or _in_own_cache(name) or _download(name)
    path = _expand(name)
    if not path.exists():
        known = ", ".join((*BUNDLED, *HUB))
        raise FileNotFoundError(f"no model {name!r}: give one of {known}, or a folder, or a .safetensors file")
    return path


def _expand(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or no HOME
        raise FileNotFoundError(f"cannot tell which folder ~ is in {path}") from None


def _cache_home() -> Path:
    return _expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


def _whole(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def _in_hub_cache(name: str) -> Path | None:
    """Where huggingface_hub would have put it: <cache>/models--owner--name/snapshots/<revision>/."""
    env = os.environ
    home = Path(env.get("HF_HOME") or _cache_home() / "huggingface")
    cache = _expand(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    for repository in (HUB[name], name):  # files fetched before 2024 lie under the bare name
        base = cache / f"models--{repository.replace('/', '--')}"
        main = base / "refs" / "main"
        revisions = [base / "snapshots" / main.read_text().strip()] if main.is_file() else []
        revisions += sorted((base / "snapshots").glob("*"))
        for folder in revisions:
            if _whole(folder):
                return folder
    return None


def _own_cache(name: str) -> Path:
    return _cache_home() / "lookahead" / name


def _in_own_cache(name: str) -> Path | None:
    folder = _own_cache(name)
    return folder if _whole(folder) else None


def _download(name: str) -> Path:
    """Fetch a model from the Hub (or the mirror in HF_ENDPOINT) into this program's cache, all or nothing.

    Both files go to a temporary folder beside the final one, are opened to see that they are whole (a connection that
    breaks early leaves a short file and no error), and only then the folder gets its name.
    """
    final = _own_cache(name)
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    offline = (
        f"these work offline: {', '.join(BUNDLED)}, a folder or .safetensors file of your own, or any GPT-2 that is "
        "already in the Hugging Face cache"
    )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise FileNotFoundError(f"{name} is not on this machine and HF_HUB_OFFLINE is set; {offline}")
    before = socket.getdefaulttimeout()
    temporary = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
        socket.setdefaulttimeout(TIMEOUT)
        for file in (CONFIG, WEIGHTS):
            torch.hub.download_url_to_file(
                f"{endpoint}/{HUB[name]}/resolve/main/{file}", str(temporary / file), progress=file == WEIGHTS
            )
        read(temporary)
        if final.exists():  # left by somebody else, or half-deleted: the whole one wins
            shutil.rmtree(final)
        os.replace(temporary, final)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", None) or error).split())
        raise FileNotFoundError(f"cannot download {name} from {endpoint} ({reason}); {offline}") from None
    finally:
        socket.setdefaulttimeout(before)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def free_memory() -> int:
    """Bytes of memory that this machine could give to one process now; where that is unknown, 4 GiB."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 4 * 2**30


def read(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """Configuration and tensors of a folder (config.json + model.safetensors) or a bare .safetensors file.

    The tensors are mapped, not copied, and keep the file's dtype. The configuration has GPTConfig's fields; of a bare
    file it is inferred from shapes, with heads of 64 unless the file's metadata names `n_head`.
    Raises FileNotFoundError for a missing file and ValueError for a damaged or foreign one.
    """
    file = path
    if path.is_dir():
        file = path / WEIGHTS
        hints = {
            WEIGHTS: "weights in another format or in several parts must be saved as one safetensors file first",
            CONFIG: "to load the weights without it, give the .safetensors file itself",
        }
        for needed, hint in hints.items():
            if not (path / needed).is_file():
                raise FileNotFoundError(f"{path} has no {needed}; {hint}")
    try:
        file.open("rb").close()  # says "permission denied" where the library would say "no such file"
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {_bare(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        # OSError: unreadable or empty; RuntimeError: shorter than its table says.
        raise ValueError(f"{file} is not a whole safetensors file ({' '.join(str(error).split())})") from None
    # The causal masks that some files carry are not weights; ours are made where they are needed.
    tensors = {k: v for k, v in tensors.items() if not re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", k)}
    head = tensors.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in tensors and not torch.equal(head, tensors["wte.weight"]):
        raise ValueError(f"{file} has a head of its own (lm_head.weight differs from wte.weight): this is not GPT-2")
    odd = sorted({str(t.dtype) for t in tensors.values()} - {f"torch.{n}" for n in FLOATS})
    if odd:
        raise ValueError(f"{file} holds tensors of type {', '.join(odd)}; supported are {', '.join(FLOATS)}")
    config = _read_config(path / CONFIG) if path.is_dir() else _infer_config(file, tensors, metadata)
    return config, tensors


FLOATS = ("float32", "float16", "bfloat16", "float64")


def _bare(name: str) -> str:
    return name.removeprefix("transformer.")


def _read_config(file: Path) -> dict:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from None
    wanted = {  # what makes a GPT-2 a GPT-2: another value would load and compute something else
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "n_inner": (None, 4 * raw["n_embd"] if isinstance(raw.get("n_embd"), int) else None),
    }
    for key, allowed in wanted.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(
                f"{file} says {key} = {raw[key]!r}: only plain GPT-2 is supported ({key} = {allowed[0]!r})"
            )
    if "n_positions" in raw:  # the field that transformers reads; n_ctx is an older name for the same
        raw["n_ctx"] = raw["n_positions"]
    missing = [key for key in ("n_layer", "n_head", "n_embd", "vocab_size", "n_ctx") if key not in raw]
    if missing:
        raise ValueError(f"{file} does not say {', '.join(missing)}")
    config = {key: raw[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size", "n_ctx")}
    if "layer_norm_epsilon" in raw:
        config["layer_norm_epsilon"] = raw["layer_norm_epsilon"]
    return config


def _infer_config(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict:
    layers = [int(name.split(".")[1]) for name in tensors if re.match(r"h\.\d+\.", name)]
    tables = [tensors.get(name) for name in ("wte.weight", "wpe.weight")]
    if not layers or any(table is None or table.ndim != 2 for table in tables):
        raise ValueError(f"{file} is not GPT-2: it needs wte.weight, wpe.weight and at least one layer h.0")
    (vocab_size, n_embd), (n_ctx, _) = (table.shape for table in tables)
    if "n_head" in metadata:
        if not metadata["n_head"].isdecimal():
            raise ValueError(f"{file} says n_head = {metadata['n_head']!r} in its metadata, which is no number")
        n_head = int(metadata["n_head"])
    elif n_embd % 64 == 0:
        n_head = n_embd // 64
    else:
        raise ValueError(
            f"{file} does not tell its number of heads (width {n_embd} is no multiple of 64): put the file in a folder "
            "as model.safetensors with a config.json, or write n_head into its metadata"
        )
    config = {"n_layer": max(layers) + 1, "n_head": n_head, "n_embd": n_embd, "vocab_size": vocab_size, "n_ctx": n_ctx}
    if "layer_norm_epsilon" in metadata:
        try:
            config["layer_norm_epsilon"] = float(metadata["layer_norm_epsilon"])
        except ValueError:
            text = metadata["layer_norm_epsilon"]
            raise ValueError(f"{file} says layer_norm_epsilon = {text!r} in its metadata, which is no number") from None
    return config


def write(folder: str | os.PathLike[str], config: dict, tensors: dict[str, Tensor]) -> None:
    """config.json + model.safetensors in `folder`, which transformers loads as GPT2LMHeadModel.

    Each file is written under a temporary name and renamed, so a reader sees the old file or the new one, whole.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    eot = min(config["vocab_size"], 50257) - 1  # a table padded beyond GPT-2's 50,257 tokens has its end-of-text there
    described = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        **config,
        "n_positions": config["n_ctx"],
        "bos_token_id": eot,
        "eos_token_id": eot,
        "torch_dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
    }
    # "format" is what transformers asks for; the rest lets the bare file be loaded by itself.
    metadata = {"format": "pt", "n_head": str(config["n_head"])}
    metadata["layer_norm_epsilon"] = repr(config["layer_norm_epsilon"])
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as scratch:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, f"{scratch}/{WEIGHTS}", metadata)
        Path(scratch, CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(f"{scratch}/{CONFIG}", f"{scratch}/{WEIGHTS}")  # the library's own default is owner-only
        for file in (WEIGHTS, CONFIG):
            os.replace(f"{scratch}/{file}", target / file)
