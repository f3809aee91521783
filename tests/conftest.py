"""A tiny target and drafter with one tokenizer, made once per session from a seed: real folders that load like any model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():                       # kernels for a GPU are interpreted, here but not in processes that tests start
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            import triton
            from triton import language
            from triton.runtime import interpreter

            triton.knobs.runtime.interpret = True
            langs, patched = (language, language.core), interpreter._patch_lang
            # Whatever a kernel calls has the language patched once more, to no effect and for a third of an interpreted kernel's time.
            interpreter._patch_lang = lambda fn: patched(fn) if any(
                each is lang for lang in langs if language.core.is_builtin(lang.load) for each in fn.__globals__.values()
            ) else interpreter._LangPatchScope()
        except ImportError:
            pass

TEXT = """def add(left, right):
    return left + right

def total(values):
    result = 0
    for value in values:
        result = add(result, value)
    return result

class Counter:
    def __init__(self, start=0):
        self.value = start

    def step(self, by=1):
        self.value += by
        return self.value

The quick brown fox jumps over the lazy dog. {"name": "fox", "age": 3}, {"name": "dog", "age": 7}
""" * 4

CHAT_TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def make_model(folder: Path, tokenizer: object, hidden: int, layers: int, seed: int) -> Path:
    """A random float32 Llama with the given tokenizer, saved as safetensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(tokenizer)  # type: ignore[arg-type]
    config = LlamaConfig(vocab_size=size, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=None,
                         eos_token_id=0, pad_token_id=None, initializer_range=0.3, dtype="float32")
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


def make_tokenizer(special: tuple[str, ...] = ("<|end|>", "<|user|>", "<|assistant|>"), vocab_size: int = 300) -> object:
    """A byte-level BPE trained on the text above, wrapped for transformers, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special), show_progress=False,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target folder, draft folder): random Llamas over one tokenizer of about 300 tokens, float32, token 0 ends a text."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tokenizer()
    return make_model(folder / "target", tokenizer, 64, 2, seed=1), make_model(folder / "draft", tokenizer, 32, 1, seed=2)
