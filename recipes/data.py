"""From text files to batches of token ids.

Samples are numbered before any sharding, from the corpus, the tokenizer, ``seq_len`` and the seed alone. Who trains on
which samples is decided elsewhere and arrives here as intervals of sample numbers.
"""

import glob
import gzip
import hashlib
import json
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from recipes.tokenizer import Tokenizer, check_vocabulary

BUILTIN_FOLDER = Path(__file__).parent / "builtin" / "corpus"
SUFFIXES = (".jsonl", ".jsonl.gz", ".txt")

_TOKENIZER_THREADS = 2  # several ranks tokenise on one machine at the same time
_CHARACTERS_IN_FLIGHT = 1 << 20  # of text that waits for the tokenizer: bounds memory, keeps the threads busy


class DataError(ValueError):
    """Text that cannot be trained on. The message is one line: which file and line, what is wrong, what to do."""


# --- documents


def read_documents(dataset: str, path: str, text_key: str, split: str) -> Iterator[str]:
    """The documents of a corpus, in the order of its files.

    ``dataset``: "builtin" (the English corpus that ships with the package; ``split`` is "train" or "val") or "text"
    (``path`` as in ``find_files``). A .jsonl or .jsonl.gz file holds one JSON object a line with the document under
    ``text_key``; a .txt file is one document. Text is UTF-8.
    Raises DataError: at once if there is no such file, while iterating if one is unreadable or malformed.
    """
    if dataset == "builtin":
        files, text_key = [BUILTIN_FOLDER / f"english_small.{split}.jsonl.gz"], "text"
    elif dataset == "text":
        files = find_files(path)
    else:
        raise DataError(f"there is no dataset {dataset!r}; use 'builtin' or 'text'")
    return chain.from_iterable(
        _read_text(file) if file.name.lower().endswith(".txt") else _read_json_lines(file, text_key) for file in files
    )


def find_files(path: str) -> list[Path]:
    """The .jsonl, .jsonl.gz and .txt files that ``path`` names, sorted by name: a file, a folder (the files in it, not
    in its subfolders) or a glob pattern. Raises DataError if there are none."""
    wanted = f"files that end in {', '.join(SUFFIXES)}"
    if not path:
        raise DataError(f"no path to the text is given; set dataset_path to {wanted}")
    root = Path(path).expanduser()
    try:
        if root.is_dir():
            found = [file for file in root.iterdir() if not file.is_dir() and not file.name.startswith(".")]
        elif root.exists():
            found = [root]
        elif glob.has_magic(path):
            found = [Path(file) for file in glob.glob(str(root), recursive=True) if not Path(file).is_dir()]
        else:
            raise DataError(f"{path}: no such file or folder; set dataset_path to {wanted}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from error
    files = sorted(file for file in found if file.name.lower().endswith(SUFFIXES))
    if not files:
        raise DataError(f"{path}: holds no text that can be read; set dataset_path to {wanted}")
    return files


def _read_text(file: Path) -> Iterator[str]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from error
    try:
        yield content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{line}: not UTF-8 ({error.reason}); convert the file to UTF-8") from None


def _read_json_lines(file: Path, text_key: str) -> Iterator[str]:
    number = 0
    try:
        with cast(BinaryIO, gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb")) as lines:
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    yield _text_of(line, text_key, f"{file}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        where = f"{file}:{number + 1}" if number else f"{file}"
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{where}: cannot be read ({reason}); check that the file is whole and readable") from error


def _text_of(line: bytes, text_key: str, where: str) -> str:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason}); convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}; each line must be one JSON object")
    if text_key not in row:
        keys = ", ".join(map(repr, sorted(row)[:8])) or "none"
        raise DataError(f"{where}: no key {text_key!r} (keys here: {keys}); set data.text_key to the one with the text")
    text = row[text_key]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: {text_key!r} is a {type(text).__name__}, not a string; set data.text_key to the text"
        )
    return text


# --- samples


class PackedSamples(Dataset[torch.Tensor]):
    """A corpus as windows of ``seq_len + 1`` token ids, numbered.

    The documents, each followed by end-of-text, are laid end to end in a shuffled order and cut into N windows that do
    not overlap (a remainder shorter than a window is left out; empty documents are too). Each epoch goes through the
    windows in an order of its own: sample g is window ``order(g // N)[g % N]``, so sample numbers never end. Documents
    may attend to each other inside a window.

    documents: texts. tokenizer: what encodes them. seq_len: in tokens. seed: decides the order of documents and
    windows, nothing else does. vocab_size: of the model. min_samples: refuse a corpus with fewer windows; pass the
    global batch, so that no sample is twice in a batch. source: the corpus's name in messages.

    Raises DataError for a corpus that is empty or too short, TokenizerError if the tokenizer has more tokens than the
    model. ``len()`` is N. ``fingerprint`` is 16 hex digits: equal where the same number means the same sample.
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        seed: int,
        vocab_size: int,
        min_samples: int = 1,
        source: str = "the corpus",
    ) -> None:
        check_vocabulary(tokenizer, vocab_size)
        self.seq_len = seq_len
        self.seed = seed
        stream = _shuffled_stream(_tokenize(documents, tokenizer), tokenizer, seed)
        if not len(stream):
            raise DataError(f"{source}: there is no text in it; give at least one document that is not empty")
        num_windows = len(stream) // (seq_len + 1)
        if num_windows < max(min_samples, 1):
            raise DataError(
                f"{source}: too short, {len(stream)} tokens make {num_windows} samples of {seq_len + 1} tokens and one "
                f"batch takes {max(min_samples, 1)}; give more text, or lower training.seq_len or the batch size"
            )
        self._windows = stream[: num_windows * (seq_len + 1)].reshape(num_windows, seq_len + 1)  # (N, seq_len + 1)
        digest = hashlib.sha256(f"{seq_len} {seed} {self._windows.dtype.name}\n".encode())
        digest.update(self._windows.data)
        self.fingerprint = digest.hexdigest()[:16]
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, sample: int) -> torch.Tensor:
        """Sample number ``sample`` (0 or more, of any epoch): int64 (seq_len + 1,)."""
        assert sample >= 0
        epoch, position = divmod(sample, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _permutation(len(self), self.seed, 1 + epoch)
        return torch.from_numpy(self._windows[self._order[position]].astype(np.int64))


def _permutation(length: int, *key: int) -> np.ndarray:
    # NumPy promises the stream of its legacy generator for good, so sites with other versions number samples alike.
    words = [word for value in key for word in (value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF)]
    return np.random.RandomState(words).permutation(length)


def _tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The ids of each document that is not empty."""
    tokenized: list[np.ndarray] = []
    waiting: list[str] = []
    num_characters = 0
    with ThreadPoolExecutor(_TOKENIZER_THREADS) as pool:
        for text in documents:
            if not text or text.isspace():
                continue
            waiting.append(text)
            num_characters += len(text)
            if num_characters >= _CHARACTERS_IN_FLIGHT:
                tokenized.extend(pool.map(tokenizer.encode_to_array, waiting))
                waiting, num_characters = [], 0
        tokenized.extend(pool.map(tokenizer.encode_to_array, waiting))
    return tokenized


def _shuffled_stream(tokenized: list[np.ndarray], tokenizer: Tokenizer, seed: int) -> np.ndarray:
    """All documents in a shuffled order, each followed by end-of-text: (tokens,)."""
    stream = np.full(sum(map(len, tokenized)) + len(tokenized), tokenizer.eos_id, tokenizer.dtype)
    start = 0
    for i in _permutation(len(tokenized), seed, 0):
        stop = start + len(tokenized[i])
        stream[start:stop] = tokenized[i]
        start = stop + 1
    return stream


# --- batches


class RoundBatches(Sampler[list[int]]):
    """The sample numbers of each micro-batch that one data-parallel rank trains on in a round.

    ``assign`` gives the run of samples for a round. Global batch j is samples [j * global_batch_size, ...) of the run;
    its micro-batch m is cut into ``dp_degree`` slices of ``local_batch_size``, one for each rank. So a global batch
    holds the same samples in whatever way the group is sharded.

    A state taken from the loader in the middle of a run (``StatefulDataLoader.state_dict``) continues there, also with
    another ``dp_degree`` or ``local_batch_size``. A run that was assigned stays when a state of another run is loaded.
    """

    def __init__(self, *, local_batch_size: int, global_batch_size: int, dp_rank: int, dp_degree: int) -> None:
        if global_batch_size % (local_batch_size * dp_degree) or not 0 <= dp_rank < dp_degree:
            raise ValueError(
                f"rank {dp_rank} of {dp_degree} with {local_batch_size} samples each cannot share a global batch of "
                f"{global_batch_size}; it must be a multiple of local_batch_size times the data-parallel degree"
            )
        self.local_batch_size = local_batch_size
        self.global_batch_size = global_batch_size
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self._intervals: list[list[int]] = []

    def assign(self, intervals: Sequence[Sequence[int]]) -> None:
        """Take the samples [start, stop) of each interval, in this order, as the run that the next iteration goes
        through. Raises ValueError unless they make whole global batches."""
        run = [[int(start), int(stop)] for start, stop in intervals]
        num_samples = sum(stop - start for start, stop in run)
        if any(not 0 <= start < stop for start, stop in run) or num_samples % self.global_batch_size:
            raise ValueError(f"{run} is not a run of whole global batches of {self.global_batch_size} samples")
        self._intervals = run

    def __len__(self) -> int:
        """Micro-batches of this rank in the run."""
        num_samples = sum(stop - start for start, stop in self._intervals)
        return num_samples // (self.local_batch_size * self.dp_degree)

    def __iter__(self) -> "_RunIterator":
        return _RunIterator(self)

    def state_dict(self) -> dict[str, Any]:
        return {"intervals": self._intervals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The loader loads late, at the start of the next iteration: a run that was assigned by then is the newer one.
        if not self._intervals:
            self.assign(state["intervals"])


class _RunIterator(Iterator[list[int]]):
    """One pass over a run. Holds the position, since with worker processes the loader asks ahead of what it yields."""

    def __init__(self, batches: RoundBatches) -> None:
        self._intervals = batches._intervals
        self._samples = np.concatenate([np.arange(0), *(np.arange(*interval) for interval in self._intervals)])
        self._local_batch_size = batches.local_batch_size
        self._offset = batches.dp_rank * batches.local_batch_size
        self._stride = batches.dp_degree * batches.local_batch_size
        self._consumed = 0  # samples of the run, over all ranks of the group

    def __next__(self) -> list[int]:
        if self._consumed >= len(self._samples):
            raise StopIteration
        start = self._consumed + self._offset
        self._consumed += self._stride
        return self._samples[start : start + self._local_batch_size].tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"intervals": self._intervals, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if [list(interval) for interval in state["intervals"]] == self._intervals:
            if state["consumed"] % self._stride:
                raise ValueError(
                    f"the data state stands inside a micro-batch of this layout ({state['consumed']} samples consumed, "
                    f"{self._stride} a micro-batch); resume from a round boundary"
                )
            self._consumed = state["consumed"]


def build_loader(samples: PackedSamples, batches: RoundBatches, num_workers: int) -> StatefulDataLoader:
    """A loader that yields int64 (local_batch_size, seq_len + 1), one for each micro-batch of the assigned run.

    Iterate it once a round, after ``batches.assign``. ``num_workers`` processes fetch ahead; each has a copy of the
    samples and lives as long as the loader. The state of torch's global random generator is left alone.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's call, nothing to act on
        return StatefulDataLoader(
            samples,
            batch_sampler=batches,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            # A fork would copy the threads' locks and the accelerator's handles of the trainer.
            multiprocessing_context="spawn" if num_workers else None,
            # Otherwise each iteration draws a seed from the global generator, and the training would depend on it.
            generator=torch.Generator().manual_seed(0),
        )


def validation_batches(samples: PackedSamples, num_batches: int, batch_size: int) -> Iterator[torch.Tensor]:
    """The first ``num_batches`` batches of epoch 0, int64 (batch_size, seq_len + 1): the same ones on each call.

    -1 is all samples, each once; so is any number beyond what is there. The last batch may then be smaller.
    """
    stop = len(samples) if num_batches < 0 else min(num_batches * batch_size, len(samples))
    for start in range(0, stop, batch_size):
        yield torch.stack([samples[i] for i in range(start, min(start + batch_size, stop))])
