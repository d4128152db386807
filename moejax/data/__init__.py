"""Text to batches: sources, tokenizers, packing, pipeline (level 5)."""

from moejax.data.packing import Documents, PackedRows, tokenize_corpus
from moejax.data.pipeline import (
    EvalBatches,
    TrainIterator,
    make_eval_batches,
    make_train_iterator,
)
from moejax.data.sources import Corpus, load_corpus
from moejax.data.tokenize import (
    ByteTokenizer,
    HfTokenizer,
    Tokenizer,
    get_tokenizer,
    train_bpe,
    training_sample,
)

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "Documents",
    "EvalBatches",
    "HfTokenizer",
    "PackedRows",
    "Tokenizer",
    "TrainIterator",
    "get_tokenizer",
    "load_corpus",
    "make_eval_batches",
    "make_train_iterator",
    "tokenize_corpus",
    "train_bpe",
    "training_sample",
]
