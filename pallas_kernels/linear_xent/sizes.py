"""How many rows and vocabulary entries are handled at once."""

# One block of float32 logits.
_LOGITS_BYTES = 64 * 2**20
_LEAST_ROWS = 256
# Columns of a block whose gradient is formed at once.
PART_COLUMNS = 8192


def chunk_sizes(
    num_rows: int, num_vocab: int, rows_per_chunk: int | None, vocab_per_chunk: int | None
) -> tuple[int, int]:
    """Rows and vocabulary entries of a chunk, each at least 1 and at most all there are.

    A size that is given stands. The vocabulary is whole unless given: cutting it costs a fourth
    product, as its logits are needed twice. Rows then fill 64 MiB of float32 logits, but are at
    least 256, so that reading the weight once per chunk stays cheap beside the product.
    """
    vocab = max(1, min(vocab_per_chunk or num_vocab, num_vocab))
    fitting = max(_LEAST_ROWS, _LOGITS_BYTES // (4 * vocab))
    rows = max(1, min(rows_per_chunk or fitting, num_rows))
    return rows, vocab
