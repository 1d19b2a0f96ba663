"""Text to token ids and back: byte-level BPE from a tiktoken rank file on disk."""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

BUILTIN_FOLDER = Path(__file__).parent / "builtin" / "tokenizer"
BUILTIN_NAMES = ("bpe4k", "bpe8k", "bpe16k")
NUM_SPECIAL_TOKENS = 256  # as Llama 3 has them, so that the vocabulary stays a round number

# How Llama 3 cuts text into words before byte pairs are merged.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tiktoken's word regex gives up on very long texts, and merging takes more than linear time in the length of a run
# without (or of nothing but) white space. Text beyond either limit is cut before tiktoken sees it.
_MAX_CHARACTERS = 400_000
_MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN + 1},}}|(?<!\s)\s{{{_MAX_RUN + 1},}}")


class TokenizerError(ValueError):
    """A tokenizer that cannot be used. The message is one line: which file, what is wrong, what to do."""


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE vocabulary. Any text can be encoded, and decoding gives it back (lone surrogates as U+FFFD).

    The ids of a file with n ranks are 0 to n-1; n is begin-of-text, n+1 end-of-text, and the 254 after them are
    reserved. Text that looks like a special token is encoded as ordinary text.
    """

    source: str  # the spec it was loaded from, for messages
    num_tokens: int  # size of the vocabulary, special tokens included
    bos_id: int
    eos_id: int
    fingerprint: str  # 16 hex digits over the file's content: equal where the same text gives the same ids
    encoding: tiktoken.Encoding

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The narrowest of uint16 and uint32 that holds every id."""
        return np.uint16 if self.num_tokens <= 1 << 16 else np.uint32

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without begin or end of text."""
        return self.encode_to_array(text).tolist()

    def encode_to_array(self, text: str) -> np.ndarray:
        """The ids of ``text`` as an array of ``dtype``, without begin or end of text. Threads may call this at once."""
        pieces = [np.array(self.encoding.encode_ordinary(piece), self.dtype) for piece in _pieces(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(ids)


def _pieces(text: str) -> Iterator[str]:
    """``text`` in pieces that tiktoken encodes in linear time; one piece unless a limit is passed."""
    if len(text) <= _MAX_RUN:
        yield text
        return
    cuts = {start for run in _LONG_RUN.finditer(text) for start in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN)}
    cuts.update(range(0, len(text), _MAX_CHARACTERS), [len(text)])
    for start, stop in pairwise(sorted(cuts)):
        yield text[start:stop]


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that ``spec`` names: ``builtin:bpe4k``, ``builtin:bpe8k``, ``builtin:bpe16k`` or the path of a
    tiktoken rank file (one ``<token in base64> <rank>`` a line, ranks 0 to n-1, all 256 single bytes among the tokens).

    The file is read anew on each call, without tiktoken's cache and without a network.
    Raises TokenizerError if the file is missing, unreadable or malformed.
    """
    if spec.startswith("builtin:"):
        name = spec.removeprefix("builtin:")
        if name not in BUILTIN_NAMES:
            known = ", ".join(f"builtin:{known}" for known in BUILTIN_NAMES)
            raise TokenizerError(f"{spec}: there is no such built-in tokenizer; use one of {known}, or a file's path")
        file = BUILTIN_FOLDER / f"{name}.tiktoken"
    else:
        file = Path(spec).expanduser()

    try:
        content = file.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"{file}: the tokenizer file cannot be read ({error.strerror or error}); "
            "set model.tokenizer_path to a tiktoken rank file or to builtin:bpe4k"
        ) from error
    ranks = _parse_ranks(content, file)

    num_ranks = len(ranks)
    special_tokens = {"<|begin_of_text|>": num_ranks, "<|end_of_text|>": num_ranks + 1}
    for i in range(NUM_SPECIAL_TOKENS - 2):
        special_tokens[f"<|reserved_special_token_{i}|>"] = num_ranks + 2 + i
    return Tokenizer(
        source=spec,
        num_tokens=num_ranks + NUM_SPECIAL_TOKENS,
        bos_id=num_ranks,
        eos_id=num_ranks + 1,
        fingerprint=hashlib.sha256(content).hexdigest()[:16],
        encoding=tiktoken.Encoding(file.stem, pat_str=_WORDS, mergeable_ranks=ranks, special_tokens=special_tokens),
    )


def _parse_ranks(content: bytes, file: Path) -> dict[bytes, int]:
    cure = "give a tiktoken rank file, unchanged"
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        fields = line.split()
        if not fields:
            continue
        try:
            encoded, digits = fields
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except (ValueError, binascii.Error):
            raise TokenizerError(f"{file}:{number}: not '<token in base64> <rank>'; {cure}") from None
        if not token or token in ranks or rank in line_of_rank:
            what = f"rank {rank} is there" if rank in line_of_rank else "the token is empty or is there"
            raise TokenizerError(f"{file}:{number}: {what} already; {cure}")
        ranks[token] = rank
        line_of_rank[rank] = number

    if not ranks:
        raise TokenizerError(f"{file}: the tokenizer file is empty; {cure}")
    for rank, number in line_of_rank.items():
        if not 0 <= rank < len(ranks):
            raise TokenizerError(
                f"{file}:{number}: rank {rank} of {len(ranks)} tokens, so a rank below it is missing; {cure}"
            )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{file}: byte {missing[0]:#04x} is not among the tokens, so some text could not be encoded; {cure}"
        )
    return ranks


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise TokenizerError unless a model with ``vocab_size`` embeddings has one for every id of ``tokenizer``."""
    if tokenizer.num_tokens > vocab_size:
        raise TokenizerError(
            f"the tokenizer {tokenizer.source} has {tokenizer.num_tokens} tokens and the model's vocabulary only "
            f"{vocab_size}; choose a smaller model.tokenizer_path or a model.flavor with a larger vocabulary"
        )
