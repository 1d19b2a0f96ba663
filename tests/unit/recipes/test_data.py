import base64
import gzip
import hashlib
import json
import random
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from tempfile import NamedTemporaryFile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recipes.data
from recipes.data import (
    DataError,
    PackedSamples,
    RoundBatches,
    build_loader,
    find_files,
    read_documents,
    validation_batches,
)
from recipes.tokenizer import Tokenizer, TokenizerError, load_tokenizer

BUILTIN = Path(recipes.data.__file__).parent / "builtin"


def tokenizer_of(*tokens: bytes) -> Tokenizer:
    """One token a byte, and these."""
    lines = [
        base64.b64encode(token) + b" %d" % rank
        for rank, token in enumerate([*(bytes([i]) for i in range(256)), *tokens])
    ]
    with NamedTemporaryFile() as file:
        file.write(b"\n".join(lines))
        file.flush()
        return load_tokenizer(file.name)


BYTES = tokenizer_of()
END = BYTES.eos_id


def pack(documents, *, seq_len=7, seed=1, vocab_size=512, tokenizer=BYTES, **rest) -> PackedSamples:
    return PackedSamples(documents, tokenizer, seq_len=seq_len, seed=seed, vocab_size=vocab_size, **rest)


def numbered_documents(count: int) -> list[str]:
    """Texts that differ, of 7 tokens each: with end-of-text, exactly one window of seq_len + 1 = 8."""
    return [f"doc{i:04d}" for i in range(count)]


def text_of(sample: torch.Tensor) -> str:
    assert sample[-1] == END
    return BYTES.decode(sample[:-1].tolist())


# --- samples


def test_a_sample_is_a_window_of_seq_len_plus_one_ids():
    samples = pack(numbered_documents(5))
    assert len(samples) == 5
    assert samples[0].shape == (8,)
    assert samples[0].dtype == torch.int64


def test_each_epoch_holds_every_window_once_in_an_order_of_its_own():
    documents = numbered_documents(50)
    samples = pack(documents)
    epochs = [[text_of(samples[epoch * 50 + i]) for i in range(50)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(documents)
    assert documents != epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_documents_lie_end_to_end_with_end_of_text_after_each():
    documents = ["alpha beta", "gamma", "delta epsilon zeta"]
    window = pack(documents, seq_len=sum(map(len, documents)) + 2)[0]
    assert window[-1] == END
    assert sorted(BYTES.decode(window.tolist()).split("<|end_of_text|>")) == ["", *sorted(documents)]


def test_documents_are_shuffled_before_they_are_cut_into_windows():
    documents = numbered_documents(100)
    one_window = pack(documents, seq_len=799)[0]
    order = BYTES.decode(one_window.tolist()).split("<|end_of_text|>")[:-1]
    assert order != documents
    assert sorted(order) == documents


def test_windows_do_not_overlap_and_a_short_remainder_is_left_out():
    text = " ".join(str(i) for i in range(1000))
    stream = [*BYTES.encode(text), END]
    samples = pack([text], seq_len=99)
    assert len(samples) == len(stream) // 100
    assert len(stream) % 100
    windows = sorted(samples[i].tolist() for i in range(len(samples)))
    assert windows == sorted(stream[start : start + 100] for start in range(0, len(stream) - 99, 100))


def test_samples_depend_on_corpus_tokenizer_seq_len_and_seed_and_on_nothing_else(monkeypatch):
    documents = numbered_documents(60)
    expected = pack(documents)

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    monkeypatch.setattr(recipes.data, "_TOKENIZER_THREADS", 1)
    monkeypatch.setattr(recipes.data, "_CHARACTERS_IN_FLIGHT", 1)
    for name in ("RANK", "WORLD_SIZE", "REPLICA_ID"):
        monkeypatch.setenv(name, "3")
    again = pack(iter(documents), min_samples=5, vocab_size=9999, source="another name")
    assert again.fingerprint == expected.fingerprint
    reversed_access = [again[i] for i in reversed(range(120))]
    assert all(torch.equal(expected[i], sample) for i, sample in enumerate(reversed(reversed_access)))

    others = [
        pack(documents[:-1]),
        pack(documents, seed=2),
        pack(documents, seed=1 + (1 << 32)),
        pack(documents, seq_len=6),
        pack(documents, tokenizer=tokenizer_of(b"oc"), vocab_size=513),
    ]
    assert len({other.fingerprint for other in [expected, *others]}) == 6


@pytest.mark.parametrize(
    ("split", "num_samples", "fingerprint"), [("train", 10437, "a9308458204333dc"), ("val", 726, "0815f27195812aec")]
)
def test_the_builtin_corpus_is_numbered_as_it_always_was(split, num_samples, fingerprint):
    samples = pack(
        read_documents("builtin", "", "ignored", split),
        tokenizer=load_tokenizer("builtin:bpe4k"),
        vocab_size=4096,
        seq_len=128,
        seed=42,
    )
    assert (len(samples), samples.fingerprint) == (num_samples, fingerprint)
    assert int(samples[0].max()) < 4096


def test_a_vocabulary_beyond_16_bits_is_kept_whole():
    words = ["".join(letters) for letters in product(ascii_lowercase, repeat=4)][:70_000]
    wide = tokenizer_of(*(word.encode() for word in words))
    sample = pack([words[-1]], seq_len=1, tokenizer=wide, vocab_size=wide.num_tokens)[0]
    assert sample.tolist() == [256 + 69_999, 256 + 70_000 + 1]


# --- what is refused


def refusal(make, error=DataError) -> str:
    with pytest.raises(error) as refused:
        make()
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("documents", [[], [""], [" \n\t", ""]])
def test_an_empty_corpus_is_refused(documents):
    assert "mine.jsonl: there is no text in it" in refusal(lambda: pack(documents, source="mine.jsonl"))


def test_a_corpus_shorter_than_a_batch_is_refused_with_the_numbers():
    pack(numbered_documents(8), min_samples=8)
    message = refusal(lambda: pack(numbered_documents(7), min_samples=8, source="mine.jsonl"))
    assert "mine.jsonl: too short, 56 tokens make 7 samples of 8 tokens and one batch takes 8" in message


def test_a_corpus_shorter_than_a_sample_is_refused():
    assert "make 0 samples of 2049 tokens" in refusal(lambda: pack(["hello"], seq_len=2048))


def test_a_vocabulary_larger_than_the_models_is_refused_before_any_text_is_read():
    def no_documents():
        raise AssertionError("the corpus was read")
        yield

    message = refusal(lambda: pack(no_documents(), vocab_size=511), TokenizerError)
    assert "has 512 tokens and the model's vocabulary only 511" in message


# --- files


def write_lines(file: Path, *texts: str, key: str = "text") -> Path:
    content = "".join(json.dumps({key: text}) + "\n" for text in texts).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def read(path, text_key="text") -> list[str]:
    return list(read_documents("text", str(path), text_key, "train"))


def test_json_lines_plain_and_compressed_and_text_files_in_one_folder_by_name(tmp_path):
    write_lines(tmp_path / "b.jsonl.gz", "three", "four — with ünïcode")
    write_lines(tmp_path / "a.jsonl", "one", "two")
    (tmp_path / "c.txt").write_text("five\nis one document\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.txt").write_text("not data")
    (tmp_path / "subfolder").mkdir()
    everything = ["one", "two", "three", "four — with ünïcode", "five\nis one document\n"]
    assert read(tmp_path) == everything
    assert read(tmp_path / "*") == everything
    assert read(tmp_path / "[ab].json*") == everything[:4]
    assert read(tmp_path / "c.txt") == everything[4:]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    assert read(write_lines(tmp_path / "part[1].jsonl", "found")) == ["found"]


def test_another_text_key_blank_lines_a_byte_order_mark_and_no_last_newline(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"body": "one"}\r\n\n  \n{"body": "two", "id": 3}')
    assert read(file, "body") == ["one", "two"]


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "one\u2028still one"}, ensure_ascii=False), encoding="utf-8")
    assert read(file) == ["one\u2028still one"]


def test_the_builtin_splits_are_there_and_share_nothing():
    train, val = (list(read_documents("builtin", "", "text", split)) for split in ("train", "val"))
    assert (len(train), len(val)) == (1468, 104)
    assert not set(train) & set(val)


def test_the_shipped_files_are_those_whose_origin_is_recorded():
    recorded = dict(
        reversed(line.split()) for line in (BUILTIN / "ORIGIN.md").read_text().splitlines() if "  " in line[64:66]
    )
    shipped = {
        str(file.relative_to(BUILTIN)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in BUILTIN.glob("*/*")
        if file.is_file()
    }
    assert recorded == shipped


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", GOOD + b'{"text": "cut of', ":2: not JSON"),
        ("a.jsonl", GOOD + b"plain text\n", ":2: not JSON"),
        ("a.jsonl", GOOD + b"[" * 200_000, ":2: not JSON"),
        ("a.jsonl", GOOD + b'["text"]\n', ":2: a JSON list"),
        ("a.jsonl", GOOD + b'{"body": "x", "id": 1}\n', ":2: no key 'text' (keys here: 'body', 'id')"),
        ("a.jsonl", GOOD + b'{"text": null}\n', ":2: 'text' is a NoneType"),
        ("a.jsonl", GOOD + b'{"text": "caf\xe9"}\n', ":2: not UTF-8"),
        ("a.jsonl.gz", b"not compressed", "a.jsonl.gz: cannot be read (Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(GOOD * 5000)[:-20], ": cannot be read (Compressed file ended before"),
        ("a.jsonl.gz", gzip.compress(GOOD * 50)[:-8] + b"\0" * 8, ": cannot be read (CRC check failed"),
        ("a.jsonl.gz", gzip.compress(GOOD + b"plain text"), ":2: not JSON"),
        ("a.txt", "ein\nschön\n".encode("latin-1"), ":2: not UTF-8"),
    ],
)
def test_malformed_content_is_refused_with_file_and_line(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    message = refusal(lambda: read(tmp_path))
    assert message.startswith(f"{tmp_path / name}:")
    assert expected in message
    assert ";" in message  # what to do about it


def test_a_file_that_cannot_be_opened_is_refused_with_its_name(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "a.txt"):
        folder = tmp_path / f"folder of {name}"
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / "gone")
        assert f"{folder / name}: cannot be read (No such file" in refusal(lambda folder=folder: read(folder))


def test_missing_and_unsupported_files_are_refused_at_once(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for path in ("none.jsonl", "none/*.jsonl", "a.parquet", "*.parquet", "."):
        message = refusal(lambda path=path: read_documents("text", str(tmp_path / path), "text", "train"))
        assert str(tmp_path) in message
        assert ".jsonl, .jsonl.gz, .txt" in message
    assert "set dataset_path" in refusal(lambda: find_files(""))


def test_an_unknown_dataset_is_refused():
    assert "use 'builtin' or 'text'" in refusal(lambda: read_documents("c4", "", "text", "train"))


# --- batches


def rank_batches(run, *, dp_degree, local_batch_size, global_batch_size) -> list[list[list[int]]]:
    """[rank][micro-batch] -> sample numbers."""
    ranks = []
    for dp_rank in range(dp_degree):
        batches = RoundBatches(
            local_batch_size=local_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_degree=dp_degree,
        )
        batches.assign(run)
        ranks.append(list(batches))
        assert len(ranks[-1]) == len(batches)
    return ranks


@given(
    dp_degree=st.sampled_from([1, 2, 4]),
    local_batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    gap=st.integers(0, 10),
)
def test_a_global_batch_holds_the_same_samples_whatever_the_sharding(
    dp_degree, local_batch_size, accumulation, lengths, gap
):
    global_batch_size = dp_degree * local_batch_size * accumulation
    lengths[-1] += -sum(lengths) % global_batch_size
    run, start = [], 0
    for length in lengths:
        run.append((start, start + length))
        start += length + gap
    expected = [sample for interval in run for sample in range(*interval)]

    ranks = rank_batches(
        run, dp_degree=dp_degree, local_batch_size=local_batch_size, global_batch_size=global_batch_size
    )
    micro_batches = list(zip(*ranks, strict=True))
    assert all(len(samples) == local_batch_size for micro_batch in micro_batches for samples in micro_batch)
    assert [sample for micro_batch in micro_batches for samples in micro_batch for sample in samples] == expected


@pytest.mark.parametrize(("dp_degree", "local_batch_size"), [(1, 8), (1, 4), (1, 1), (2, 4), (2, 2), (4, 2), (4, 1)])
def test_the_tokens_of_each_step_are_the_same_whatever_the_sharding(dp_degree, local_batch_size):
    samples = pack(numbered_documents(20))
    run = [(12, 28)]  # two global batches of 8, across the end of epoch 0
    loaders = []
    for dp_rank in range(dp_degree):
        batches = RoundBatches(
            local_batch_size=local_batch_size, global_batch_size=8, dp_rank=dp_rank, dp_degree=dp_degree
        )
        batches.assign(run)
        loaders.append(build_loader(samples, batches, num_workers=0))
    tokens = torch.cat([torch.cat(micro_batch) for micro_batch in zip(*loaders, strict=True)])
    assert torch.equal(tokens, torch.stack([samples[g] for g in range(12, 28)]))


def test_a_run_that_is_not_whole_global_batches_is_refused():
    batches = RoundBatches(local_batch_size=2, global_batch_size=8, dp_rank=0, dp_degree=2)
    for run in ([(0, 7)], [(8, 0)], [(-8, 0)], [(0, 8), (3, 3)]):
        with pytest.raises(ValueError, match="not a run of whole global batches of 8"):
            batches.assign(run)


@pytest.mark.parametrize(("global_batch_size", "dp_rank"), [(6, 0), (8, 2), (8, -1)])
def test_a_batch_that_the_ranks_cannot_share_is_refused(global_batch_size, dp_rank):
    with pytest.raises(ValueError, match="cannot share a global batch"):
        RoundBatches(local_batch_size=2, global_batch_size=global_batch_size, dp_rank=dp_rank, dp_degree=2)


def make_loader(samples, run=None, *, num_workers=0, local_batch_size=2, dp_rank=0, dp_degree=1):
    batches = RoundBatches(local_batch_size=local_batch_size, global_batch_size=4, dp_rank=dp_rank, dp_degree=dp_degree)
    if run:
        batches.assign(run)
    return build_loader(samples, batches, num_workers), batches


def texts(batches) -> list[list[str]]:
    return [[text_of(sample) for sample in batch] for batch in batches]


@pytest.mark.slow
def test_worker_processes_give_the_same_batches_round_after_round():
    samples = pack(numbered_documents(30))
    alone, alone_batches = make_loader(samples)
    workers, workers_batches = make_loader(samples, num_workers=2)
    processes = set()
    for run in ([(0, 16)], [(16, 24), (40, 44)], [(24, 40)], [(24, 40)]):
        alone_batches.assign(run)
        workers_batches.assign(run)
        expected = texts(alone)
        assert [text for batch in expected for text in batch] == [
            text_of(samples[g]) for interval in run for g in range(*interval)
        ]
        assert texts(workers) == expected
        processes |= {worker.pid for worker in workers._iterator._workers}
    assert len(processes) == 2  # they live through all rounds and still see each new run

    # A run that is left in the middle, with batches fetched ahead, leaks nothing into the next one.
    workers_batches.assign([(0, 16)])
    next(iter(workers))
    workers_batches.assign([(16, 24)])
    alone_batches.assign([(16, 24)])
    assert texts(workers) == texts(alone)


def test_loading_leaves_the_global_random_state_alone():
    loader, batches = make_loader(pack(numbered_documents(30)))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for run in ([(0, 16)], [(16, 32)]):
        batches.assign(run)
        list(loader)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def resumed_twice(samples, num_workers) -> list[list[str]]:
    """8 batches of one run, by three loaders: the second and third each continue from the state of the one before."""
    seen, state = [], None
    for count in (3, 2, 3):
        loader, _ = make_loader(samples, None if state else [(4, 20)], num_workers=num_workers)
        if state:
            loader.load_state_dict(state)
        iterator = iter(loader)
        seen += texts([next(iterator) for _ in range(count)])
        state = loader.state_dict()
    return seen


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_is_continued_from_a_saved_state_and_again_from_the_next(num_workers):
    samples = pack(numbered_documents(30))
    assert resumed_twice(samples, num_workers) == texts(make_loader(samples, [(4, 20)])[0])


def test_a_saved_state_continues_under_another_sharding():
    samples = pack(numbered_documents(30))
    loader, _ = make_loader(samples, [(4, 20)])
    iterator = iter(loader)
    before = texts([next(iterator) for _ in range(2)])
    ranks = []
    for dp_rank in range(2):
        other, _ = make_loader(samples, local_batch_size=1, dp_rank=dp_rank, dp_degree=2)
        other.load_state_dict(loader.state_dict())
        ranks.append(texts(other))
    after = [[first[0], second[0]] for first, second in zip(*ranks, strict=True)]
    assert before + after == texts(make_loader(samples, [(4, 20)])[0])

    next(iterator)  # 6 of the run's samples are used now: inside a micro-batch of two ranks with two each
    other, _ = make_loader(samples, dp_degree=2)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="stands inside a micro-batch"):
        list(other)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_newly_assigned_run_is_not_undone_by_the_state_of_the_run_before(num_workers):
    samples = pack(numbered_documents(30))
    loader, _ = make_loader(samples, [(4, 20)], num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    left_in_the_middle = loader.state_dict()
    finished = [*iterator] and loader.state_dict()

    for state in (left_in_the_middle, finished):
        resumed, batches = make_loader(samples, num_workers=num_workers)
        resumed.load_state_dict(state)
        batches.assign([(20, 28)])
        assert texts(resumed) == texts(make_loader(samples, [(20, 28)])[0])


# --- validation


def test_validation_batches_are_the_first_ones_each_time():
    samples = pack(numbered_documents(11))
    first = list(validation_batches(samples, 2, 4))
    samples[5000]  # a training epoch in between changes nothing
    again = list(validation_batches(samples, 2, 4))
    assert [batch.shape for batch in first] == [(4, 8), (4, 8)]
    assert torch.equal(torch.cat(first), torch.stack([samples[i] for i in range(8)]))
    assert torch.equal(torch.cat(first), torch.cat(again))


@pytest.mark.parametrize("num_batches", [-1, 3, 100])
def test_validation_on_everything_goes_through_each_sample_once(num_batches):
    samples = pack(numbered_documents(11))
    batches = list(validation_batches(samples, num_batches, 4))
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert sorted(text_of(sample) for batch in batches for sample in batch) == numbered_documents(11)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**40), st.integers(1, 9))
def test_any_corpus_gives_a_permutation_in_every_epoch(num_documents, seed, epoch):
    documents = numbered_documents(num_documents)
    samples = pack(documents, seed=seed)
    assert sorted(text_of(samples[epoch * num_documents + i]) for i in range(num_documents)) == documents
