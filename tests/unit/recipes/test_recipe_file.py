"""Recipes from files and flags: what is read, what is refused and how it is said, what is written and compared."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.check_recipe import check_recipe
from recipes.config import KEYS, SECTIONS, Data, Job, LRScheduler, Optimizer, Outer, Recipe, RecipeError
from recipes.recipe_file import (
    config_diff,
    config_hash,
    field_docs,
    hashed_items,
    help_text,
    line_of,
    load_recipe,
    recipe_to_toml,
)
from recipes.torchtitan_keys import TORCHTITAN_KEYS

TRAIN_CONFIGS = Path(__file__).parents[3] / "train_configs"


def write(folder: Path, text: str) -> str:
    path = folder / "recipe.toml"
    path.write_text(text)
    return str(path)


def refusal(config_file: str | None, *overrides: str) -> str:
    """The message with which a recipe is refused, which is one line."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(config_file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message == caught.value.problems[0]
    return message


# --- What is read ---------------------------------------------------------------------------------------------------


def test_without_a_file_the_debug_recipe_is_read() -> None:
    assert load_recipe() == load_recipe(str(TRAIN_CONFIGS / "debug.toml"))
    recipe = load_recipe()
    assert (recipe.model.flavor, recipe.training.steps, recipe.outer.sync_steps) == ("debug", 120, 15)
    assert recipe.checkpoint.interval == recipe.outer.sync_steps


@pytest.mark.parametrize("path", sorted(TRAIN_CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid(path: Path) -> None:
    load_recipe(str(path))


def test_the_shipped_recipes_hold_the_numbers_of_the_paper() -> None:
    small = load_recipe(str(TRAIN_CONFIGS / "llama_178m_isoloco.toml"))
    assert (small.optimizer.lr, small.outer.lr, small.outer.momentum) == (0.00138, 1.8, 0.8)
    assert (small.training.global_batch_size, small.outer.sync_steps, small.training.steps) == (32, 30, 30 * 225)
    diloco = load_recipe(str(TRAIN_CONFIGS / "llama_178m_diloco.toml"))
    assert (diloco.optimizer.lr, diloco.outer.lr, diloco.outer.momentum) == (0.00138, 0.7, 0.9)
    muon = load_recipe(str(TRAIN_CONFIGS / "llama_178m_isoloco_muon.toml"))
    assert muon.optimizer.lr * muon.optimizer.adamw_lr_factor == pytest.approx(small.optimizer.lr)
    assert (muon.outer, muon.training) == (small.outer, small.training)
    large = load_recipe(str(TRAIN_CONFIGS / "llama_512m_isoloco.toml"))
    assert (large.lr_scheduler.total_steps, large.training.steps) == (4886, 30 * 162)
    assert large.training.global_batch_size * large.fault_tolerance.num_replica_groups == 1024


def test_keys_that_are_not_named_keep_their_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "[outer]\nsync_steps = 5\n"))
    assert recipe == Recipe(outer=Outer(sync_steps=5))


def test_an_empty_file_is_the_default_recipe(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "")) == Recipe()


def test_a_whole_number_may_stand_for_a_float(tmp_path: Path) -> None:
    lr = load_recipe(write(tmp_path, "[outer]\nlr = 1\n")).outer.lr
    assert (lr, type(lr)) == (1.0, float)


def test_flags_win_over_the_file_and_the_last_flag_over_the_others(tmp_path: Path) -> None:
    path = write(tmp_path, "[outer]\nlr = 1.0\nsync_steps = 7\n")
    recipe = load_recipe(path, ["--outer.lr", "1.5", "--outer.lr=1.6"])
    assert (recipe.outer.lr, recipe.outer.sync_steps) == (1.6, 7)


def test_flags_take_values_of_every_type() -> None:
    flags = ["--metrics.enable_tensorboard", "false", "--compile.enable=true", "--lr_scheduler.warmup_steps", "-1"]
    flags += ["--job.description", "a = b", "--optimizer.lr", "1e-4", "--training.global_batch_size=-1"]
    recipe = load_recipe(None, flags)
    assert (recipe.metrics.enable_tensorboard, recipe.compile.enable) == (False, True)
    assert (recipe.lr_scheduler.warmup_steps, recipe.training.global_batch_size) == (-1, -1)
    assert (recipe.job.description, recipe.optimizer.lr) == ("a = b", 1e-4)


@pytest.mark.parametrize("text", ['["output.weight", "tok_*"]', "output.weight,tok_*", "output.weight, tok_*"])
def test_a_list_flag_is_json_or_words_with_commas(text: str) -> None:
    assert load_recipe(None, ["--outer.exclude", text]).outer.exclude == ["output.weight", "tok_*"]


def test_an_empty_list_flag_is_an_empty_list() -> None:
    assert load_recipe(None, ["--outer.exclude", ""]).outer.exclude == []


def test_another_method_by_flag_brings_its_own_numbers() -> None:
    outer = load_recipe(None, ["--outer.method", "diloco"]).outer
    assert (outer.lr, outer.momentum) == (0.7, 0.9)


def test_minus_one_brings_back_the_number_of_the_method(tmp_path: Path) -> None:
    path = write(tmp_path, "[outer]\nlr = 0.5\n")
    assert load_recipe(path, ["--outer.lr", "-1"]).outer.lr == 1.8


def test_another_inner_optimizer_brings_its_own_numbers_unless_the_file_has_some() -> None:
    muon = ["--optimizer.name", "Muon"]
    assert load_recipe(None, muon).optimizer.lr == load_recipe().optimizer.lr == 2e-3
    recipe = load_recipe(None, [*muon, "--optimizer.lr", "-1"])
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (0.02, 0.01)


# --- What is refused, and how it is said ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[outer]\nsync_step = 5\n", 2, "outer.sync_step: no such key; did you mean outer.sync_steps?"),
        ("\n[optimiser]\nlr = 1.0\n", 2, "optimiser: no such section; did you mean optimizer?"),
        ("[training]\nlr = 1.0\n", 2, "training.lr: no such key; did you mean optimizer.lr or outer.lr?"),
        ("sync_steps = 5\n", 1, "sync_steps: needs its section; did you mean outer.sync_steps?"),
        ("outer = 5\n", 1, "outer: is a section: write [outer] on a line of its own"),
        ("[[outer]]\nlr = 1.0\n", 1, "outer: is a section: write [outer] on a line of its own"),
        ('[optimizer]\nlr = "1e-3"\n', 2, 'optimizer.lr = "1e-3": must be a number, not a string'),
        ("[training]\nsteps = 1e3\n", 2, "training.steps = 1000.0: must be a whole number"),
        ("[training]\nsteps = true\n", 2, "training.steps = true: must be a whole number"),
        ("[optimizer]\nlr = false\n", 2, "optimizer.lr = false: must be a number"),
        ("[compile]\nenable = 1\n", 2, "compile.enable = 1: must be true or false"),
        ('[compile]\nenable = "true"\n', 2, 'compile.enable = "true": must be true or false, not a string'),
        ("[job]\ndump_folder = 3\n", 2, "job.dump_folder = 3: must be a string"),
        ('[job]\ndump_folder = " "\n', 2, 'job.dump_folder = " ": must be non-empty text'),
        ('[outer]\nexclude = "output"\n', 2, 'outer.exclude = "output": must be a list of strings'),
        ('[outer]\nexclude = [\n  "output",\n  3,\n]\n', 2, 'outer.exclude = ["output", 3]: must be a string'),
        ("[optimizer]\nlr = nan\n", 2, "optimizer.lr = nan: must be a finite number"),
        ("[optimizer]\nlr = inf\n", 2, "optimizer.lr = inf: must be a finite number"),
        ("[optimizer]\nlr = -1e-3\n", 2, "optimizer.lr = -0.001: must be more than 0"),
        ("[optimizer]\nweight_decay = -0.1\n", 2, "must be at least 0, or -1 for the method's default"),
        ('[optimizer]\nname = "muon"\n', 2, 'must be one of "AdamW", "Muon"; did you mean "Muon"?'),
        ("[outer]\nlr = -1.8\n", 2, "outer.lr = -1.8: must be more than 0, or -1 for the method's default"),
        ("[training]\nsteps = 99999999999999999999\n", 2, "99999999999999999999: must be less than 2**63"),
        ("[outer]\nsync_steps = 0\n", 2, "outer.sync_steps = 0: must be at least 1"),
        ("[checkpoint]\nkeep_latest_k = 1\n", 2, "checkpoint.keep_latest_k = 1: must be 0 (keep all) or at least 2"),
        ("[fault_tolerance]\nreplica_id = -1\n", 2, "fault_tolerance.replica_id = -1: must be at least 0"),
        ("[fault_tolerance]\nheartbeat_timeout_seconds = 0\n", 2, "must be more than 0 and at most 1e7"),
        (
            '[outer]\nmethod = "isolocco"\n',
            2,
            'did you mean "isoloco"?',
        ),
        ('[model]\nflavor = "178m"\n', 2, 'did you mean "178M"?'),
        ("[data]\ndata_order = 3\n", 2, 'data.data_order = 3: must be one of "once"'),
        ("[outer]\nlr = 1.0\n[outer]\nlr = 2.0\n", 3, "not valid TOML: Cannot declare ('outer',) twice"),
        ("[outer]\nlr = 1.0\nlr = 2.0\n", 3, "not valid TOML: Cannot overwrite a value"),
        ("[outer]\nlr 1.0\n", 2, "not valid TOML: "),
        ("[outer]\nexclude = [\n", 3, "not valid TOML: "),
    ],
)
def test_a_bad_key_or_value_is_refused_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = write(tmp_path, text)
    refused = refusal(path)
    assert refused.startswith(f"{path}:{line}: ")
    assert message in refused


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[outer]\nsync_steps = 30\n[training]\nsteps = 10\n", 4, "training.steps = 10 is less than outer.sync_steps"),
        ("[outer]\nsync_steps = 20000\n", 2, "training.steps = 10000 is less than outer.sync_steps = 20000"),
        ("[fault_tolerance]\nmin_replica_size = 3\n", 2, "is more than fault_tolerance.num_replica_groups = 2"),
        ("[lr_scheduler]\nwarmup_steps = 20000\n", 2, "is more than the 10000 steps of the schedule"),
        ("[parallelism]\ntensor_parallel_degree = 3\n", 2, "does not divide the 4 attention heads"),
        (
            '[model]\nflavor = "512M"\n[parallelism]\ntensor_parallel_degree = 5\n',
            4,
            "does not divide the 12 attention",
        ),
        (
            "[training]\nseq_len = 130\n[parallelism]\ntensor_parallel_degree = 4\n",
            4,
            "does not divide training.seq_len",
        ),
        (
            "[training]\nglobal_batch_size = 12\n",
            2,
            "is not a multiple of 8, which is training.local_batch_size = 8 x 1",
        ),
        ('[training]\ndataset = "text"\n', 2, 'training.dataset = "text" needs training.dataset_path'),
        ('[training]\ndataset_path = "x"\n', 2, 'is not read with training.dataset = "builtin"'),
        ('[validation]\ndataset = "text"\n', 2, 'validation.dataset = "text" needs validation.dataset_path'),
        ('[outer]\nclip = "high"\n', 2, 'set outer.orthogonalizer = "svd", or leave clip out'),
        ('[outer]\northogonalizer = "svd"\nclip = "high"\n', 3, 'set outer.scale = "mean"'),
        ('[outer]\nmethod = "diloco_sgd"\nmomentum = 0.9\n', 3, 'has none: use method = "diloco"'),
        ('[model]\ntokenizer_path = "builtin:bpe8k"\n', 2, "8192 tokens, but model.flavor"),
        ('[model]\ntokenizer_path = "builtin:bpe4"\n', 2, "no such built-in tokenizer; did you mean builtin:bpe4k?"),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_a_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = write(tmp_path, text)
    refused = refusal(path)
    assert refused.startswith(f"{path}:{line}: ")
    assert message in refused


def test_of_keys_that_do_not_go_together_the_flag_is_blamed(tmp_path: Path) -> None:
    path = write(tmp_path, "[training]\nsteps = 100\n")
    assert refusal(path, "--outer.sync_steps", "200").startswith("command line: training.steps = 100 is less than")


def test_each_of_the_sizes_that_tensor_parallelism_splits_is_checked() -> None:
    recipe = Recipe()
    recipe.model.flavor = "178M"
    for tp in (1, 2, 4, 8):
        recipe.parallelism.tensor_parallel_degree = tp
        check_recipe(recipe)
    recipe.parallelism.tensor_parallel_degree = 16
    with pytest.raises(RecipeError, match="8 attention heads"):
        check_recipe(recipe)


def test_validation_data_is_not_checked_if_there_is_no_validation(tmp_path: Path) -> None:
    load_recipe(write(tmp_path, '[validation]\nenable = false\ndataset = "text"\n'))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--outer.sync_step", "5"], "outer.sync_step: no such key; did you mean outer.sync_steps?"),
        (["--outer.sync-steps=5"], "did you mean outer.sync_steps?"),
        (["--lr", "1"], "lr: needs its section; did you mean optimizer.lr or outer.lr?"),
        (["--outer.lr"], "--outer.lr needs a value"),
        (["--outer.lr", "--training.steps", "30"], "--outer.lr needs a value"),
        (["--compile.enable"], "--compile.enable needs a value (true or false)"),
        (["--compile.enable", "yes"], 'compile.enable = "yes": must be true or false'),
        (["--compile.enable", "True"], 'compile.enable = "True": must be true or false'),
        (["--training.steps", "1e3"], 'training.steps = "1e3": must be a whole number'),
        (["--outer.lr", "fast"], 'outer.lr = "fast": must be a number'),
        (["--outer.lr", "nan"], "outer.lr = nan: must be a finite number"),
        (["--outer.lr", ""], 'outer.lr = "": must be a number'),
        (["--outer.exclude", "[1]"], "outer.exclude = [1]: must be a string"),
        (["--outer.exclude", "[output"], "must be a list of strings"),
        (["--job.description", "\udcff"], "holds bytes that are not UTF-8"),
        (["outer.lr", "1"], 'unexpected argument "outer.lr": an override looks like --outer.lr 1.6'),
        (["-v"], 'unexpected argument "-v"'),
    ],
)
def test_a_bad_flag_is_refused(flags: list[str], message: str) -> None:
    refused = refusal(None, *flags)
    assert refused.startswith("command line: ")
    assert message in refused


def test_all_that_is_wrong_by_itself_is_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "[outer]\nsync_step = 5\nlr = -2\n[optimiser]\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["--training.step", "5"])
    assert [problem.split(": ")[0] for problem in caught.value.problems] == [
        f"{path}:2",
        f"{path}:3",
        f"{path}:4",
        "command line",
    ]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    assert refusal(missing).startswith(f"{missing}: cannot read this recipe: No such file")
    assert "Is a directory" in refusal(str(tmp_path))
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'[job]\ndescription = "caf\xe9"\n')
    assert refusal(str(latin)).startswith(f"{latin}:2: ")
    large = tmp_path / "large.toml"
    large.write_text("# much\n" * 20000)
    assert "larger than" in refusal(str(large))


# --- Keys of torchtitan ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "[fault_tolerance]\nsync_steps = 5\n",
            2,
            "torchtitan's fault_tolerance.sync_steps: use outer.sync_steps here",
        ),
        ('[model]\nhf_assets_path = "x"\n', 2, "use model.tokenizer_path here"),
        ("[training]\ndataloader.num_workers = 2\n", 2, "use data.num_workers here"),
        ("[training]\n[training.dataloader]\nnum_workers = 2\n", 2, "use data.num_workers here"),
        ("[parallelism]\npipeline_parallel_degree = 2\n", 2, "pipeline parallelism is not supported"),
        ("[debug]\nseed = 1\n", 2, "torchtitan's debug.seed: use training.seed here"),
        ('[quantize.linear.float8]\nrecipe_name = "rowwise"\n', 1, "quantised training is not supported"),
    ],
)
def test_torchtitan_keys_are_refused_with_what_to_use(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = write(tmp_path, text)
    refused = refusal(path)
    assert refused.startswith(f"{path}:{line}: torchtitan's ")
    assert message in refused


def test_torchtitan_keys_that_ask_for_nothing_are_accepted(tmp_path: Path) -> None:
    text = "[parallelism]\npipeline_parallel_degree = 1\n[model]\nconverters = []\n[fault_tolerance]\nenable = true\n"
    assert load_recipe(write(tmp_path, text)) == Recipe()


def test_what_torchtitan_keys_point_to_exists() -> None:
    for key, (advice, _) in TORCHTITAN_KEYS.items():
        assert key not in KEYS
        assert key not in SECTIONS
        if advice.startswith("use ") and "[" not in advice:
            assert advice.split()[1] in KEYS


# --- Where a key stands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[outer]\nlr = 1.0\n", 2),
        ("outer.lr = 1.0\n", 1),
        ("# lr = 3\n\nouter = {sync_steps = 3, lr = 1.0}\n", 3),
        ('[job]\ndescription = """\n[outer]\nlr = 1.0\n"""\n[outer]\n"lr" = 1.0\n', 7),
        ("[optimizer]\nlr = 1.0\n[outer]\nexclude = [\n\n]\nlr = 1.0\n", 7),
        ('["outer"]\nexclude = []\n\n\nlr = 1.0', 5),
    ],
)
def test_a_key_is_found_however_it_is_written(text: str, line: int) -> None:
    assert line_of(text, "outer", "lr") == line


# --- Help -----------------------------------------------------------------------------------------------------------


def test_every_key_is_documented_where_it_stands() -> None:
    for cls in SECTIONS.values():
        assert list(field_docs(cls)) == [field.name for field in dataclasses.fields(cls)]
        assert all(doc.endswith((".", "]")) and len(doc) > 5 for doc in field_docs(cls).values())


def test_help_shows_each_flag_with_choices_range_and_default() -> None:
    text = help_text()
    assert all(f"  --{key}  " in text for key in KEYS)
    assert '--outer.momentum_kind  "nesterov" | "momentum" | "heavy_ball" (default "nesterov")' in text
    assert "--outer.sync_steps  int, at least 1 (default 30)\n      Inner steps from one round to the next (H)." in text
    assert max(len(line) for line in text.splitlines()) <= 200


# --- Writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(TRAIN_CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_a_written_recipe_reads_back_equal(tmp_path: Path, path: Path) -> None:
    recipe = load_recipe(str(path), ["--outer.exclude", "output.weight,norm*"])
    assert load_recipe(write(tmp_path, recipe_to_toml(recipe))) == recipe


@settings(max_examples=50, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip),
    names=st.lists(st.sampled_from(["output.weight", "layers.*", "*", "[!a]*"])),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_value_survives_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, text: str, name: str, names: list[str], lr: float, seed: int
) -> None:
    recipe = Recipe(
        job=Job(description=text, dump_folder=name),
        data=Data(text_key=name),
        optimizer=Optimizer(lr=lr),
        outer=Outer(exclude=names),
    )
    recipe.training.seed = seed
    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(recipe_to_toml(recipe), encoding="utf-8", newline="")
    assert load_recipe(path) == recipe


def test_the_written_recipe_holds_numbers_instead_of_the_defaults_of_a_method() -> None:
    text = recipe_to_toml(load_recipe(None, ["--outer.method", "diloco"]))
    assert "\nlr = 0.7\nmomentum = 0.9\n" in text


# --- Comparing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.steps", "240"],
        ["--lr_scheduler.total_steps", "500"],
        ["--job.dump_folder", "elsewhere"],
        ["--metrics.log_freq", "1"],
        ["--profiling.enable_profiling", "true"],
        ["--checkpoint.interval", "30"],
        ["--validation.enable", "false"],
        ["--fault_tolerance.replica_id", "1"],
        ["--fault_tolerance.max_restarts", "1"],
        ["--fault_tolerance.join_timeout_seconds", "9"],
    ],
)
def test_the_hash_leaves_out_what_groups_may_choose(flags: list[str]) -> None:
    assert config_hash(load_recipe(None, flags)) == config_hash(load_recipe())


@pytest.mark.parametrize(
    "flags",
    [
        ["--outer.lr", "1.6"],
        ["--outer.exclude", "output.weight"],
        ["--outer.sync_steps", "30"],
        ["--model.flavor", "178M"],
        ["--training.seed", "1"],
        ["--optimizer.lr", "1e-4"],
        ["--fault_tolerance.num_replica_groups", "3"],
    ],
)
def test_the_hash_holds_what_groups_must_agree_on(flags: list[str]) -> None:
    assert config_hash(load_recipe(None, flags)) != config_hash(load_recipe())


def test_the_hash_is_16_hex_digits_and_does_not_depend_on_how_a_recipe_came_about() -> None:
    recipe = load_recipe(None, ["--outer.lr", "2"])
    made = load_recipe()
    made.outer.lr = 2
    assert config_hash(recipe) == config_hash(made)
    assert len(config_hash(recipe)) == 16
    int(config_hash(recipe), 16)


def test_the_difference_of_two_recipes_is_one_line() -> None:
    here = hashed_items(load_recipe(None, ["--training.seed", "1"]))
    there = hashed_items(load_recipe(None, ["--outer.method", "diloco"]))
    assert config_diff(here, there) == (
        'outer.lr: 1.8 here, 0.7 there; outer.method: "isoloco" here, "diloco" there; '
        "outer.momentum: 0.8 here, 0.9 there; training.seed: 1 here, 42 there"
    )
    assert config_diff(here, here) == ""
    assert config_diff({}, {"outer.new": 1}) == "outer.new: absent here, 1 there"


def test_a_longer_schedule_is_not_another_run() -> None:
    recipe = Recipe(lr_scheduler=LRScheduler(total_steps=100))
    assert "training.steps" not in hashed_items(recipe)
    assert "lr_scheduler.total_steps" not in hashed_items(recipe)
    assert hashed_items(recipe)["lr_scheduler.warmup_steps"] == -1


@pytest.mark.parametrize("key", ["outer.exclude", "optimizer.adamw_parameters"])
def test_a_pattern_that_matches_no_parameter_is_refused_before_anything_starts(key: str) -> None:
    with pytest.raises(RecipeError, match=r"command line: .*\"outptu.weight\" matches no parameter.*output.weight"):
        load_recipe(None, [f"--{key}", "outptu.weight"])
    load_recipe(None, [f"--{key}", "layers.*.attention.*"])
