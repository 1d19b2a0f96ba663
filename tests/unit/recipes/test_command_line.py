"""Options of the programs, and everything else an override of the recipe."""

import socket

import pytest

from recipes.command_line import free_port, parse_command, read_options
from recipes.config import RecipeError


@pytest.mark.parametrize("option", ["fresh", "validate", "debug", "help"])
def test_a_switch_is_on_where_it_is_given_and_off_elsewhere(option):
    assert getattr(read_options([f"--{option}"]), option) is True
    assert read_options([f"--{option}"]).overrides == []
    assert getattr(read_options(["--training.steps", "3"]), option) is False


def test_h_is_help():
    assert read_options(["-h"]).help


@pytest.mark.parametrize("arguments", [["--job.config_file", "a.toml"], ["--job.config_file=a.toml"]])
def test_the_recipes_file(arguments):
    assert read_options(arguments).config_file == "a.toml"
    assert read_options([]).config_file is None


def test_of_several_files_the_last_wins():
    assert read_options(["--job.config_file", "a.toml", "--job.config_file=b.toml"]).config_file == "b.toml"


def test_a_file_without_a_name_is_refused():
    with pytest.raises(RecipeError, match="needs a file name"):
        read_options(["--fresh", "--job.config_file"])


def test_what_is_no_option_is_an_override_with_its_value():
    command = read_options(["--outer.lr", "1.6", "--fresh", "--training.steps=9", "--job.description", "--fresh"])
    assert command.overrides == ["--outer.lr", "1.6", "--training.steps=9", "--job.description", "--fresh"]
    assert command.fresh


def test_the_recipe_comes_with_its_overrides_applied():
    command, recipe = parse_command(["--debug", "--outer.lr", "1.6", "--training.steps=15"])
    assert (command.debug, recipe.outer.lr, recipe.training.steps) == (True, 1.6, 15)


@pytest.mark.parametrize("arguments", [["--fresh=true"], ["fresh"], ["--frehs", "1"]])
def test_a_misspelt_option_is_refused(arguments):
    with pytest.raises(RecipeError, match="command line"):
        parse_command(arguments)


def test_at_a_free_port_one_can_listen():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
