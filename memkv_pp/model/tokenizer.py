"""Text to token ids and back, by the tokenizer the model itself carries.

A GGUF file states its vocabulary as metadata; transformers knows how to rebuild the tokenizer
from it, and our own header reader is what makes that quick.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from memkv_pp.errors import ModelError
from memkv_pp.model.gguf_header import read_header

# Instruction models end a turn with one of these whatever their end-of-sequence token is.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")

# Names under `tokenizer.ggml.` and what transformers' conversion calls them.
_CONVERTED = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "precompiled_charsmap": "precompiled_charsmap",
    "add_space_prefix": "add_prefix_space",
}
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """A model's tokenizer. ``end_ids`` are the tokens after which nothing follows."""

    def __init__(self, backend: Any, end_ids: frozenset[int], path: Path) -> None:
        self._backend = backend
        self._path = path
        self.end_ids = end_ids

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with the beginning-of-sequence token if the model wants one."""
        return self._backend.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation (``role`` and ``content`` each) that asks for the next turn.

        Uses the model's own template; ModelError naming ``--chat`` when it has none.
        """
        if not self._backend.chat_template:
            raise ModelError(
                f"--chat: {self._path} carries no chat template", "give the prompt as plain text"
            )
        return self._backend.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file; no network.

    Raises ModelError naming the file when it carries none, or one of an unknown kind.
    """
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_folder(folder: Path) -> Tokenizer:
    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: no tokenizer can be read: {error}") from error
    stated: list[Any] = [backend.eos_token_id]
    if (folder / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        stated += ends if isinstance(ends, list) else [ends]
    return Tokenizer(backend, _end_ids(backend, stated), folder)


def _from_gguf(path: Path) -> Tokenizer:
    metadata: Mapping[str, Any] = read_header(path, want=("tokenizer.",)).metadata
    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    tokens = ggml.get("tokens")
    if not tokens:
        raise ModelError(f"{path}: tokenizer.ggml.tokens is missing", "use a complete GGUF file")
    converted = {new: ggml[old] for old, new in _CONVERTED.items() if old in ggml}
    try:
        backend, _ = convert_gguf_tokenizer(str(metadata.get("general.architecture")), converted)
        specials = {name: tokens[ggml[key]] for name, key in _SPECIAL.items() if key in ggml}
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{path}: no tokenizer can be built: {error}") from error
    if backend.get_vocab_size(with_added_tokens=True) > len(tokens):
        backend = _without_added(backend, len(tokens))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        # Files without the flag: a sentencepiece vocabulary starts with a beginning-of-sequence.
        add_bos_token=ggml.get("add_bos_token", ggml.get("model") == "llama"),
        add_eos_token=ggml.get("add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **specials,
    )
    return Tokenizer(fast, _end_ids(fast, [ggml.get(key) for key in _ENDS]), path)


def _without_added(backend: Backend, num_tokens: int) -> Backend:
    """The tokenizer less the tokens that the conversion added to the file's own.

    The model has no embedding for them; a prompt that spells one must fall into plain tokens.
    """
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < num_tokens]
    return Backend.from_str(json.dumps(state))


def _end_ids(backend: Any, stated: Sequence[int | None]) -> frozenset[int]:
    vocabulary = backend.get_vocab()
    turn_ends = [vocabulary[token] for token in _TURN_ENDS if token in vocabulary]
    return frozenset(turn_ends) | {token for token in stated if token is not None}
