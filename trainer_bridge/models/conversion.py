"""Conversion of a GGUF file to a model folder for the transformers library, with float32 weights."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers

from envkit.errors import UsageError
from envkit.runs.display import Display


def convert(file: Path, folder: Path, display: Display) -> None:
    """Write the model and the tokenizer of a GGUF file into the existing `folder`.

    Raises:
        UsageError: transformers cannot read the file: it is not GGUF, or has an unsupported architecture.
    """
    silence_transformers()
    display.phase(f"convert {file.name}", 3)
    source, name = str(file.parent), file.name
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, gguf_file=name)
        display.advance(1)
        with redirect_stderr(StringIO()):  # hide a progress bar of transformers that no option turns off
            loaded = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    except ImportError:
        raise
    except Exception as error:  # damaged files raise errors of many classes
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(f"{file}: transformers cannot read this GGUF file: {reason}; use a model folder") from error
    display.advance(1)
    # transformers refuses to save the loaded model, which is marked as quantized although its weights are float32.
    # Copy the weights into a new model without the mark.
    config: Any = loaded.config
    del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    display.advance(1)


def silence_transformers() -> None:
    """Turn off the progress bars and notices of transformers, which would garble the display."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
