"""What the launcher starts: read from the environment and the recipe, and refused before anything starts."""

import http.server
import json
import re
import shlex
import socket
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from recipes import launch
from recipes.command_line import Command, free_port
from recipes.config import RecipeError
from recipes.launch import (
    LaunchError,
    changed_keys,
    check_files,
    check_lighthouse,
    check_port,
    find_gpus,
    group_command,
    is_complete,
    make_plan,
    read_place,
    resume_command,
)
from recipes.recipe_file import load_recipe, recipe_to_toml
from recipes.tokenizer import TokenizerError

LIGHTHOUSE = {"TORCHFT_LIGHTHOUSE": "http://hub:29510", "REPLICA_ID": "1"}
TWO_NODES = {"NNODES": "2", "RDZV_ENDPOINT": "first:29400"}
NOTHING_ELSE = Command(config_file=None, overrides=[])


def recipe(*overrides):
    return load_recipe(None, overrides)


ONE_GROUP = recipe("--fault_tolerance.num_replica_groups", "1")


class TestPlace:
    def test_an_empty_environment_is_the_whole_run_on_this_machine(self):
        place = read_place({}, recipe())
        assert (place.only_group, place.lighthouse, place.num_ranks, place.num_nodes) == (None, None, 2, 1)
        assert place.local_address == "127.0.0.1"
        assert place.train_module == "recipes.train"
        assert read_place({"TORCHFT_LIGHTHOUSE": "", "REPLICA_ID": "", "NNODES": "", "NGPU": ""}, recipe()) == place

    @pytest.mark.parametrize("name", ["REPLICA_ID", "ONLY_GROUP"])
    def test_with_a_lighthouse_and_a_number_it_is_that_group_alone(self, name):
        place = read_place({"TORCHFT_LIGHTHOUSE": "http://hub:29510", name: "1"}, recipe())
        assert (place.only_group, place.lighthouse) == (1, "http://hub:29510")
        assert place.local_address is None, "the other groups must be able to reach it"
        assert read_place(LIGHTHOUSE | {"LOCAL_ADDR": "10.0.0.7"}, recipe()).local_address == "10.0.0.7"

    def test_a_run_of_one_group_needs_no_lighthouse(self):
        assert read_place({"REPLICA_ID": "0"}, ONE_GROUP).only_group == 0

    def test_group_zero_is_a_group(self):
        assert read_place(LIGHTHOUSE | {"REPLICA_ID": "0"}, recipe()).only_group == 0

    @pytest.mark.parametrize("node", [0, 1])
    def test_a_node_of_a_group_runs_its_share_of_the_ranks(self, node):
        place = read_place(LIGHTHOUSE | TWO_NODES | {"NGPU": "4", "NODE_RANK": str(node)}, recipe(*FOUR_RANKS))
        assert (place.num_ranks, place.ranks_here, place.num_nodes, place.node_rank) == (4, 2, 2, node)

    def test_a_group_on_several_nodes_is_reached_under_its_host_name(self):
        assert read_place({"REPLICA_ID": "0"} | TWO_NODES, ONE_GROUP).local_address is None

    def test_the_number_of_ranks_follows_from_the_recipe_or_fills_its_degrees(self):
        open_degree = recipe("--parallelism.data_parallel_shard_degree", "-1")
        assert read_place({"NGPU": "3"}, open_degree).num_ranks == 3
        assert read_place({}, open_degree).num_ranks == 1
        assert read_place({"NGPU": "2"}, recipe()).num_ranks == 2

    def test_the_ranks_to_show(self):
        assert read_place({"LOG_RANK": "0,1"}, recipe()).shown_ranks == (0, 1)
        assert read_place({}, recipe()).shown_ranks == (), "whichever speaks"

    @pytest.mark.parametrize(
        ("environment", "named"),
        [
            ({"TORCHFT_LIGHTHOUSE": "http://hub:29510"}, "REPLICA_ID is not"),
            ({"REPLICA_ID": "1"}, "TORCHFT_LIGHTHOUSE is not"),
            ({"REPLICA_ID": "one"}, "REPLICA_ID=one"),
            ({"REPLICA_ID": "-1"}, "REPLICA_ID=-1"),
            ({"NGPU": "0"}, "NGPU=0"),
            ({"NGPU": "2.0"}, "NGPU=2.0"),
            ({"NGPU": "²"}, "NGPU=²"),
            (LIGHTHOUSE | {"NNODES": "0"}, "NNODES=0"),
            ({"NNODES": "2"}, "RDZV_ENDPOINT"),
            (LIGHTHOUSE | {"NNODES": "2"}, "RDZV_ENDPOINT"),
            (TWO_NODES, "REPLICA_ID"),
            (LIGHTHOUSE | {"NNODES": "3", "RDZV_ENDPOINT": "first:29400"}, "NNODES=3"),
            (LIGHTHOUSE | {"NNODES": "2", "RDZV_ENDPOINT": "first"}, "RDZV_ENDPOINT=first"),
            (LIGHTHOUSE | {"NNODES": "2", "RDZV_ENDPOINT": "first:port"}, "RDZV_ENDPOINT=first:port"),
            (LIGHTHOUSE | TWO_NODES | {"NODE_RANK": "2"}, "NODE_RANK=2"),
            (LIGHTHOUSE | {"TORCHFT_LIGHTHOUSE": "hub:29510"}, "TORCHFT_LIGHTHOUSE=hub:29510"),
            (LIGHTHOUSE | {"TORCHFT_LIGHTHOUSE": "http://hub"}, "TORCHFT_LIGHTHOUSE=http://hub"),
            (LIGHTHOUSE | {"TORCHFT_LIGHTHOUSE": "http://hub:port"}, "TORCHFT_LIGHTHOUSE=http://hub:port"),
            ({"LOG_RANK": "all"}, "LOG_RANK=all"),
            ({"TRAIN_FILE": "recipes.trian"}, "TRAIN_FILE=recipes.trian"),
            ({"TRAIN_FILE": "no.such.module"}, "TRAIN_FILE=no.such.module"),
        ],
    )
    def test_what_does_not_go_together_is_refused_and_named(self, environment, named):
        with pytest.raises(LaunchError, match=re.escape(named)) as error:
            read_place(environment, recipe())
        assert "\n" not in str(error.value)

    def test_ranks_that_do_not_fit_the_degrees_are_refused(self):
        with pytest.raises(RecipeError, match="NGPU"):
            read_place({"NGPU": "3"}, recipe())


FOUR_RANKS = ("--parallelism.data_parallel_shard_degree", "4")


class TestCommands:
    def command(self, environment, *overrides, command=NOTHING_ELSE):
        place = read_place(environment, recipe(*overrides))
        return group_command(place, place.only_group or 0, Path("run/config.toml"), command)

    def test_a_group_is_a_torchrun_job_that_does_not_restart_itself(self):
        command = self.command({"TRAIN_FILE": "recipes.validate"})
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        assert pairs(command) >= {
            ("--max-restarts", "0"),
            ("--nproc-per-node", "2"),
            ("--local-addr", "127.0.0.1"),
            ("-m", "recipes.validate"),
            ("--job.config_file", "run/config.toml"),
        }
        assert "--standalone" in command

    def test_each_node_of_a_group_meets_the_others_at_the_rendezvous(self):
        command = self.command(LIGHTHOUSE | TWO_NODES | {"NODE_RANK": "1", "NGPU": "4"}, *FOUR_RANKS)
        assert pairs(command) >= {
            ("--nproc-per-node", "2"),
            ("--nnodes", "2"),
            ("--node-rank", "1"),
            ("--rdzv-endpoint", "first:29400"),
            ("--rdzv-id", "isoloco-1"),
        }
        assert "--standalone" not in command
        assert "--local-addr" not in command

    def test_the_switches_that_concern_a_rank_are_passed_on(self):
        switches = replace(NOTHING_ELSE, fresh=True, debug=True)
        assert self.command({}, command=switches)[-2:] == ["--fresh", "--debug"]
        assert not {"--fresh", "--debug"} & set(self.command({}))

    def test_only_the_processes_of_a_group_carry_its_number(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        plan = make_plan(recipe("--job.dump_folder", str(tmp_path)), read_place({}, recipe()), NOTHING_ELSE)
        assert [child.environment["REPLICA_ID"] for child in plan.groups.values()] == ["0", "1"]
        assert "REPLICA_ID" not in plan.lighthouse.environment
        addresses = {child.environment["TORCHFT_LIGHTHOUSE"] for child in plan.groups.values()}
        bound = plan.lighthouse.command[plan.lighthouse.command.index("--bind") + 1]
        assert addresses == {f"http://{bound}"}
        assert {child.environment["RUN_FOLDER"] for child in plan.groups.values()} == {str(tmp_path)}

    def test_a_group_that_joins_a_run_has_that_runs_lighthouse_and_starts_none(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        plan = make_plan(recipe(), read_place(LIGHTHOUSE, recipe()), NOTHING_ELSE)
        assert plan.lighthouse is None
        assert list(plan.groups) == [1]
        assert plan.groups[1].environment["TORCHFT_LIGHTHOUSE"] == "http://hub:29510"

    def test_a_run_of_one_group_has_no_lighthouse(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        plan = make_plan(ONE_GROUP, read_place({}, ONE_GROUP), NOTHING_ELSE)
        assert plan.lighthouse is None
        assert "TORCHFT_LIGHTHOUSE" not in plan.groups[0].environment

    @pytest.mark.parametrize(
        ("gpus", "device", "shares"),
        [("", "CPU", ["", ""]), ("0,1,2", "CPU", ["", ""]), ("4,5,6,7", "GPU", ["4,5", "6,7"])],
    )
    def test_all_groups_have_gpus_or_none_has(self, monkeypatch, gpus, device, shares):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        plan = make_plan(recipe(), read_place({}, recipe()), NOTHING_ELSE)
        assert plan.device == device
        assert [child.environment["CUDA_VISIBLE_DEVICES"] for child in plan.groups.values()] == shares

    def test_nccl_without_gpus_is_refused(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        nccl = recipe("--fault_tolerance.process_group", "nccl")
        with pytest.raises(LaunchError, match=r"needs a GPU for each of 4 ranks, and there are 1 here"):
            make_plan(nccl, read_place({}, nccl), NOTHING_ELSE)

    def test_gpus_are_taken_as_the_environment_names_them(self):
        assert find_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}) == ["GPU-a", "GPU-b"]
        assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []

    def test_the_command_to_go_on_does_not_start_over(self):
        command = resume_command(
            ["--job.description", "two words", "--fresh"],
            {"ONLY_GROUP": "1", "TORCHFT_LIGHTHOUSE": "http://hub:29510", "NGPU": "", "HOME": "/root"},
        )
        words = shlex.split(command)
        assert words[:2] == ["TORCHFT_LIGHTHOUSE=http://hub:29510", "REPLICA_ID=1"]
        assert words[2].endswith("run_train.sh")
        assert words[3:] == ["--job.description", "two words"]


def pairs(words):
    return set(pairwise(words))


class TestChecks:
    def test_the_debug_recipe_passes(self):
        check_files(recipe())

    @pytest.mark.parametrize("section", ["training", "validation"])
    @pytest.mark.parametrize("path", ["/no/such.jsonl", "/no/*.txt", "~/no-such-folder-here"])
    def test_missing_text_is_refused_with_its_key(self, section, path):
        text = recipe(f"--{section}.dataset", "text", f"--{section}.dataset_path", path)
        with pytest.raises(LaunchError, match=f"{re.escape(path)}: no such file.*{section}.dataset_path"):
            check_files(text)

    @pytest.mark.parametrize("path", ["{}/a.txt", "{}", "{}/*.txt"])
    def test_a_file_a_folder_and_a_pattern_are_found(self, tmp_path, path):
        (tmp_path / "a.txt").write_text("text")
        check_files(recipe("--training.dataset", "text", "--training.dataset_path", path.format(tmp_path)))

    def test_text_to_validate_on_is_not_missed_where_nothing_is_validated(self):
        flags = ("--validation.dataset", "text", "--validation.dataset_path", "/no/such", "--validation.enable=false")
        check_files(recipe(*flags))

    def test_a_missing_tokenizer_is_refused(self):
        with pytest.raises(TokenizerError, match=r"/no/such: the tokenizer file cannot be read"):
            check_files(recipe("--model.tokenizer_path", "/no/such"))

    def test_a_vocabulary_larger_than_the_models_is_refused(self):
        big = Path(launch.__file__).parent / "builtin" / "tokenizer" / "bpe8k.tiktoken"
        with pytest.raises(TokenizerError, match=r"8192 tokens and the model's vocabulary only 4096"):
            check_files(recipe("--model.tokenizer_path", str(big)))

    @pytest.mark.parametrize("address", ["127.0.0.1", "::"])
    def test_a_port_in_use_is_refused(self, address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(LaunchError, match=rf"the key: port {port} cannot be used \(Address already in use\)"):
                check_port(port, "the key")
        check_port(port, "the key")

    def test_a_port_beyond_the_last_is_refused(self):
        with pytest.raises(LaunchError, match="port 99999 cannot be used"):
            check_port(99999, "RDZV_ENDPOINT")


class TestLighthouse:
    @pytest.fixture
    def serve(self):
        servers = []

        def start(page):
            class Page(http.server.BaseHTTPRequestHandler):
                def do_GET(self):
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(page)

                def log_message(self, *_):
                    pass

            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.append(server)
            return f"http://127.0.0.1:{server.server_address[1]}"

        yield start
        for server in servers:
            server.shutdown()
            server.server_close()

    def test_is_found(self, serve):
        check_lighthouse(serve(b"<title>Lighthouse Dashboard - torchft</title>"), seconds=5)

    def test_where_nobody_listens_the_address_the_reason_and_what_to_check_are_named(self):
        address = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(LaunchError, match=r"Connection refused .*; check that torchft_lighthouse runs") as error:
            check_lighthouse(address, seconds=0)
        assert f"no lighthouse at {address}: " in str(error.value)
        assert "\n" not in str(error.value)

    def test_an_unknown_host_is_named(self):
        with pytest.raises(LaunchError, match=r"no lighthouse at http://no-such-host\.invalid:1: "):
            check_lighthouse("http://no-such-host.invalid:1", seconds=0)

    def test_another_server_is_no_lighthouse(self, serve):
        with pytest.raises(LaunchError, match="what answers there is something else"):
            check_lighthouse(serve(b"<title>It works!</title>"), seconds=0)

    def test_a_server_that_does_not_speak_http_is_no_lighthouse(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def greet():
                connection, _ = listener.accept()
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")
                connection.close()

            threading.Thread(target=greet, daemon=True).start()
            with pytest.raises(LaunchError, match="no lighthouse at"):
                check_lighthouse(f"http://127.0.0.1:{listener.getsockname()[1]}", seconds=0)


class TestComplete:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "config.toml").write_text(recipe_to_toml(recipe("--training.steps", "30")))
        (tmp_path / "summary.json").write_text(json.dumps({"status": "completed", "steps": 30}))
        return tmp_path

    def test_a_completed_run_is_complete(self, folder):
        assert is_complete(folder, recipe("--training.steps", "30"))

    def test_more_steps_make_it_incomplete(self, folder):
        assert not is_complete(folder, recipe("--training.steps", "31"))

    def test_another_learning_rate_does_not_make_it_incomplete(self, folder):
        """Nothing would be trained with it, and the files would tell of a value that no round used."""
        assert is_complete(folder, recipe("--training.steps", "30", "--outer.lr", "1"))

    def test_what_has_changed_since_the_last_start_is_told(self, folder):
        changed = recipe("--training.steps", "60", "--outer.lr", "1.0", "--job.description", "other")
        assert changed_keys(folder, changed) == "outer.lr: 1.0 here, 1.8 there"
        assert changed_keys(folder, recipe("--training.steps", "60")) == ""
        (folder / "config.toml").unlink()
        assert changed_keys(folder, changed) == ""

    @pytest.mark.parametrize("status", ["stopped", "failed"])
    def test_a_run_that_ended_otherwise_goes_on(self, folder, status):
        (folder / "summary.json").write_text(json.dumps({"status": status, "steps": 30}))
        assert not is_complete(folder, recipe("--training.steps", "30"))

    @pytest.mark.parametrize("content", [None, "", "{"])
    def test_a_missing_or_spoilt_summary_proves_nothing(self, folder, content):
        if content is None:
            (folder / "summary.json").unlink()
        else:
            (folder / "summary.json").write_text(content)
        assert not is_complete(folder, recipe("--training.steps", "30"))
