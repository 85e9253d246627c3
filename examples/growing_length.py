"""
Training on short sequences first (staged training in Shortformer, arXiv:2012.15832; GrowLength,
arXiv:2310.00576).

    python train.py examples/growing_length.py
    python sample.py --start=def

Each sequence of block_size tokens is cut into pieces, which become separate sequences. The run has
stages of equal length, and each stage has its own number of pieces. A batch has the same tokens as without
this file. Therefore each update reads the same number of tokens, each epoch reads each position of the data
once, and runs resume and use several ranks as usual. The printed mfu is too high for pieces, because it
counts attention over block_size tokens.
"""
from configurator import UserError
from train import read_batches as read_whole_batches

PIECES = (4, 2, 1)  # pieces per sequence, by stage; the last should be 1


def n_pieces(it, config):
    """The number of pieces in iteration `it`. The last stage ends at lr_decay_iters, by default max_iters."""
    end = config['lr_decay_iters'] or config['max_iters']
    return PIECES[min(it * len(PIECES) // end, len(PIECES) - 1)]


def read_batches(run, bins):
    """Yields micro-batches as train.py does, but with sequences of block_size / n_pieces tokens."""
    block_size = run.model.config.block_size
    if any(block_size % n for n in PIECES):
        raise UserError(f"block_size={block_size} must be a multiple of each of PIECES={PIECES}: change one")
    for it, batch in enumerate(read_whole_batches(run, bins), run.iter_num):
        length = block_size // n_pieces(it, run.config)
        for micro in batch:  # (B, T) -> (n B, T / n)
            micro.inputs = micro.inputs.reshape(-1, length)
            micro.targets = micro.targets.reshape(-1, length)
        yield batch


def patch(script):
    """Replaces read_batches of train.py."""
    script.read_batches = read_batches
