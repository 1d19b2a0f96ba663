"""The program that checks a recipe: what it prints and how it exits."""

from pathlib import Path

import pytest

from recipes.validate import main


@pytest.fixture(autouse=True)
def _no_ngpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NGPU", raising=False)


def test_a_good_recipe_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[training]\nsteps = 100\n")
    assert main([str(path), "--outer.sync_steps", "30", "--parallelism.tensor_parallel_degree", "2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{path}: ok\n")
    assert "1,901,696 parameters" in output
    assert "2 of 2 ranks each: FSDP 1 x TP 2" in output
    assert "100 steps, 4 rounds of 30: 3,276,800 tokens" in output  # 2 groups x 8 samples x 2048 tokens x 100


def test_without_a_file_the_debug_recipe_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--outer.method=diloco"]) == 0
    output = capsys.readouterr().out
    assert "debug.toml: ok" in output
    assert "inner   AdamW, lr 0.002, weight decay 0.1\n" in output
    assert "diloco, lr 0.7, momentum 0.9" in output


def test_a_bad_recipe_is_one_line_and_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[outer]\nsync_step = 5\n")
    assert main([str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"{path}:2: outer.sync_step: no such key; did you mean outer.sync_steps?\n"


def test_a_torchtitan_recipe_is_told_all_that_has_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "llama3_8b.toml"
    path.write_text(
        '[model]\nflavor = "8B"\nhf_assets_path = "./assets"\nconverters = []\n'
        "[fault_tolerance]\nenable = true\nsync_steps = 10\ngroup_size = 2\n[debug]\nseed = 1\n"
    )
    assert main([str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"{path}:").split(":")[0] for line in lines] == ["2", "3", "7", "8", "10"]


def test_ngpu_must_fit_the_degrees(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NGPU", "4")
    assert main(["--parallelism.data_parallel_shard_degree", "-1"]) == 0
    assert "4 ranks each: FSDP 4 x TP 1" in capsys.readouterr().out
    assert main([]) == 2
    assert "there are 4: change NGPU" in capsys.readouterr().err
    monkeypatch.setenv("NGPU", "many")
    assert main([]) == 2
    assert 'NGPU = "many": must be the number of ranks' in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert "--outer.sync_steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (["--optimizer.nesterov", "true"], 'optimizer.nesterov = true has no effect with optimizer.name = "AdamW"'),
        (["--outer.sparsity", "0.5"], 'outer.sparsity = 0.5 has no effect with outer.method = "isoloco"'),
        (["--outer.method", "ties", "--outer.target", "update"], "outer.target"),
        (["--outer.orthogonalizer", "svd", "--outer.coefficients", "muon"], "outer.coefficients"),
        (["--outer.method", "diloco_sgd", "--outer.momentum_kind", "momentum"], "outer.momentum_kind"),
    ],
)
def test_a_key_without_effect_is_noted(flags: list[str], note: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 0
    assert note in capsys.readouterr().out
    assert main(["--optimizer.name", "Muon", "--optimizer.nesterov", "true", "--outer.target", "update"]) == 0
    assert "no effect" not in capsys.readouterr().out
