"""Text to batches: sources, tokenizers, packing, pipeline (level 5)."""

from moejax.data.build_cache import prepare
from moejax.data.chat_report import ChatFacts, chat_facts
from moejax.data.corpus import Corpus
from moejax.data.evaluation import EvalBatches, make_eval_batches, make_eval_sets
from moejax.data.hf_tokenizer import HfTokenizer
from moejax.data.packing import Documents, PackedRows, tokenize_corpus
from moejax.data.pipeline import TrainIterator, make_train_iterator
from moejax.data.report import Report
from moejax.data.sources import load_corpus
from moejax.data.stream_decode import StreamDecoder
from moejax.data.tiktoken_bpe import TiktokenTokenizer
from moejax.data.tokenize import (
    ByteTokenizer,
    Tokenizer,
    get_tokenizer,
    load_tokenizer,
    train_bpe,
    training_sample,
)

__all__ = [
    "ByteTokenizer",
    "ChatFacts",
    "Corpus",
    "Documents",
    "EvalBatches",
    "HfTokenizer",
    "PackedRows",
    "Report",
    "StreamDecoder",
    "TiktokenTokenizer",
    "Tokenizer",
    "TrainIterator",
    "chat_facts",
    "get_tokenizer",
    "load_corpus",
    "load_tokenizer",
    "make_eval_batches",
    "make_eval_sets",
    "make_train_iterator",
    "prepare",
    "tokenize_corpus",
    "train_bpe",
    "training_sample",
]
