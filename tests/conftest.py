"""What all tests share: a state that no test leaves behind, and folders with data."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if 'PYTEST_XDIST_WORKER' in os.environ:  # before torch: a thread for each worker, and for what it starts
    os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # whatever else runs here

import signal

import pytest
import torch
from common import train, write_toy


@pytest.fixture(autouse=True)
def same_machine_state():
    """Tests may set threads and the precision of matmuls, none sees what another has set. Signals do what
    they do in a terminal, for the processes that tests start too, also where pytest was started to ignore
    them, as by nohup or in a script's background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in {'SIGTERM', 'SIGHUP'} & vars(signal).keys():  # Windows has no SIGHUP
        signal.signal(vars(signal)[name], signal.SIG_DFL)
    threads, precision, state = (torch.get_num_threads(), torch.get_float32_matmul_precision(),
                                 torch.get_rng_state())
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_rng_state(state)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a small prepared dataset, data/toy."""
    monkeypatch.chdir(tmp_path)
    write_toy(tmp_path / 'data' / 'toy')
    return tmp_path


@pytest.fixture
def base(folder):
    """A trained model in out/."""
    train('--out_dir=out', '--max_iters=10')
    return folder
