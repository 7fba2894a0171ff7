"""A tiny tokenizer and a corpus for torchtitan, made in a second: `assets.py FOLDER` writes `tokenizer/` and `corpus/`.

The same bytes at every call.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def write(folder: Path) -> None:
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randint(2, 8))) for _ in range(300)]
    texts = [" ".join(draws.choices(words, k=draws.randint(50, 400))) for _ in range(400)]
    for name in ("corpus", "tokenizer"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "corpus" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[BEGIN, END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts[:100], trainer)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
