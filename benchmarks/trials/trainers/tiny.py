"""A tiny decoder and a tokenizer of single letters, made here: nothing is downloaded."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def tokenizer() -> PreTrainedTokenizerFast:
    """Return letters, the end of a text, and padding."""
    ids = {token: n for n, token in enumerate(["<pad>", "</s>", "<unk>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


def decoder() -> LlamaForCausalLM:
    """Return two layers, as initialised by the library."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def sentences(count: int = 256) -> list[str]:
    """Return short texts of differing length, in which letters follow each other in their order."""
    return [" ".join(LETTERS[n % 20 : n % 20 + 2 + (n + k) % 5] for k in range(2 + n % 4)) for n in range(count)]
