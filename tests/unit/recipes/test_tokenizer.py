import base64
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.tokenizer import BUILTIN_FOLDER, TokenizerError, check_vocabulary, load_tokenizer

BYTES = [bytes([byte]) for byte in range(256)]


def write_ranks(file: Path, tokens: list[bytes]) -> str:
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return str(file)


@pytest.fixture(scope="module")
def bpe4k():
    return load_tokenizer("builtin:bpe4k")


@pytest.mark.parametrize(("name", "num_tokens"), [("bpe4k", 4096), ("bpe8k", 8192), ("bpe16k", 16384)])
def test_builtin_vocabulary_is_its_ranks_and_256_special_tokens(name, num_tokens):
    tokenizer = load_tokenizer(f"builtin:{name}")
    assert tokenizer.num_tokens == num_tokens
    assert tokenizer.bos_id == num_tokens - 256
    assert tokenizer.eos_id == num_tokens - 255
    assert tokenizer.decode([tokenizer.bos_id, tokenizer.eos_id]) == "<|begin_of_text|><|end_of_text|>"


@given(st.text())
def test_decoding_gives_the_text_back(bpe4k, text):
    ids = bpe4k.encode(text)
    assert bpe4k.decode(ids) == text
    assert all(0 <= i < bpe4k.bos_id for i in ids)


def test_text_is_compressed_and_not_just_spelt(bpe4k):
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
    assert len(bpe4k.encode(text)) < len(text) / 3


def test_text_that_looks_like_a_special_token_is_ordinary_text(bpe4k):
    ids = bpe4k.encode("<|end_of_text|>")
    assert bpe4k.eos_id not in ids
    assert bpe4k.decode(ids) == "<|end_of_text|>"


def test_a_lone_surrogate_becomes_the_replacement_character(bpe4k):
    assert bpe4k.decode(bpe4k.encode("a\ud800b")) == "a�b"


@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        " " * 1_000_000,
        "\n" * 1_000_000,
        "^-" * 500_000,
        "漢字" * 500_000,
        "ab1" * 333_333 + " and words after it",
        ("y" * 24_999 + " ") * 40,
        "word " * 200_000,
    ],
    ids=["letters", "spaces", "newlines", "marks", "wide", "mixed", "runs below the limit", "words"],
)
def test_a_million_characters_without_a_break_encode_quickly(bpe4k, text):
    start = time.perf_counter()
    ids = bpe4k.encode(text)
    assert time.perf_counter() - start < 20  # linear time takes below one second, quadratic time minutes
    assert bpe4k.decode(ids) == text


def test_a_long_text_of_ordinary_words_is_encoded_as_its_parts_are(bpe4k):
    sentence = "Call me Ishmael. Some years ago, never mind how long precisely.\n"
    text = sentence * 1000
    assert 25_000 < len(text) < 400_000
    assert bpe4k.encode(text) == bpe4k.encode(sentence) * 1000


def test_a_rank_file_of_ones_own(tmp_path):
    tokenizer = load_tokenizer(write_ranks(tmp_path / "own.tiktoken", [*BYTES, b"hi"]))
    assert tokenizer.num_tokens == 257 + 256
    assert tokenizer.encode("hi!") == [256, ord("!")]


def test_a_changed_file_is_read_anew(tmp_path):
    file = tmp_path / "own.tiktoken"
    before = load_tokenizer(write_ranks(file, [*BYTES, b"hi"]))
    after = load_tokenizer(write_ranks(file, [*BYTES, b"ho"]))
    assert (before.encode("hi"), before.encode("ho")) == ([256], [ord("h"), ord("o")])
    assert (after.encode("hi"), after.encode("ho")) == ([ord("h"), ord("i")], [256])
    assert before.fingerprint != after.fingerprint


def test_fingerprint_is_of_the_content_and_not_of_the_path(tmp_path, bpe4k):
    copy = tmp_path / "copy.tiktoken"
    copy.write_bytes((BUILTIN_FOLDER / "bpe4k.tiktoken").read_bytes())
    assert load_tokenizer(str(copy)).fingerprint == bpe4k.fingerprint


def refusal(spec: str) -> str:
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(spec)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_an_unknown_builtin_is_refused_with_the_known_ones():
    assert "builtin:bpe4k, builtin:bpe8k, builtin:bpe16k" in refusal("builtin:bpe5k")


def test_a_missing_file_is_refused_with_its_path_and_the_key_to_set(tmp_path):
    message = refusal(str(tmp_path / "none.tiktoken"))
    assert f"{tmp_path}/none.tiktoken" in message
    assert "No such file" in message
    assert "model.tokenizer_path" in message


def test_a_folder_is_refused(tmp_path):
    assert "Is a directory" in refusal(str(tmp_path))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.tiktoken").touch()
    assert "empty.tiktoken: the tokenizer file is empty" in refusal(str(tmp_path / "empty.tiktoken"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"model": {"type": "BPE"}}', "not '<token in base64> <rank>'"),
        (b"aGk=", "not '<token in base64> <rank>'"),
        (b"aGk= 256 1", "not '<token in base64> <rank>'"),
        (b"aGk 256", "not '<token in base64> <rank>'"),
        (b"a*Gk= 256", "not '<token in base64> <rank>'"),
        (b"aGk= two", "not '<token in base64> <rank>'"),
        (b"\xff\xfe 256", "not '<token in base64> <rank>'"),
        (b"aGk= 7", "rank 7 is there already"),
        (b"AA== 256", "the token is empty or is there already"),
        (b"aGk= 300", "rank 300 of 257 tokens"),
        (b"aGk= -1", "rank -1 of 257 tokens"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(tmp_path, line, reason):
    file = tmp_path / "bad.tiktoken"
    write_ranks(file, BYTES)
    file.write_bytes(file.read_bytes() + line + b"\n")
    message = refusal(str(file))
    assert f"{file}:257: {reason}" in message
    assert "give a tiktoken rank file" in message


def test_a_truncated_file_is_refused_if_some_text_could_not_be_encoded(tmp_path):
    assert "byte 0xc8 is not among the tokens" in refusal(write_ranks(tmp_path / "short.tiktoken", BYTES[:200]))


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_sizes(bpe4k):
    check_vocabulary(bpe4k, 4096)
    with pytest.raises(TokenizerError, match=r"builtin:bpe4k has 4096 tokens and the model's vocabulary only 4095"):
        check_vocabulary(bpe4k, 4095)
