"""The byte tokenizer: token id = byte value, plus four special tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tiny.settings import BOS, EOS, PAD, UNK

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] }}: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The form of the chats in the training text: `user: ...`, then `assistant: ...</s>`, one turn a line."""

_SPECIAL = {"<s>": BOS, "</s>": EOS, "<pad>": PAD, "<unk>": UNK}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make a fast tokenizer with no merges: every UTF-8 byte is one token, and nothing is added in front."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | _SPECIAL, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(text: str) -> list[int]:
    """Token ids of a document in which `</s>` is the end token; the same as the tokenizer's, without its cost."""
    ids: list[int] = []
    for i, part in enumerate(text.split("</s>")):
        if i:
            ids.append(EOS)
        ids.extend(part.encode())
    return ids


def save_tokenizer(directory: Path) -> None:
    build_tokenizer().save_pretrained(directory)
