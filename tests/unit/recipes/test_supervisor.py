"""Children are kept alive, heard and ended. They are shell scripts here, which say what a rank would say."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import supervisor as module
from recipes.run_processes import processes_with
from recipes.supervisor import Child, Supervisor

ROOT = Path(__file__).parents[3]
# What scripts may use: say GROUP LEVEL TEXT prints a line as a rank does; starts counts the starts of a child.
PRELUDE = """
say() { group=$1; level=$2; shift 2; echo "12:00:00 group $group $level $*"; }
starts() { echo x >> "$COUNT"; wc -l < "$COUNT" | tr -d ' '; }
await() { while [ ! -e "$1" ]; do sleep 0.02; done; }
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pauses, and the signal handlers of pytest again afterwards."""
    monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(module, "SECONDS_TO_EXIT", 0.5)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def build(tmp_path):
    def build(*scripts, lighthouse=None, **options):
        def child(name, script, environment):
            count = tmp_path / f"{name.replace(' ', '-')}.count"
            command = ["bash", "-c", PRELUDE + script, "bash", "--fresh"]
            return Child(
                name, command, environment | {"COUNT": str(count), "T": str(tmp_path)}, tmp_path / f"{name}.log"
            )

        groups = {g: child(f"group {g}", script, {"REPLICA_ID": str(g)}) for g, script in enumerate(scripts)}
        options = {"max_restarts": 2, "grace_seconds": 1.0} | options
        return Supervisor(groups, child("the lighthouse", lighthouse, {}) if lighthouse else None, **options)

    return build


def starts(tmp_path, name):
    return (tmp_path / f"{name}.count").read_text().count("x")


class TestRestarts:
    def test_a_group_that_fails_is_started_again_and_the_reason_told(self, build, tmp_path, capfd):
        supervisor = build('[ $(starts) = 3 ] || { say 0 ERROR "out of luck"; exit 7; }')
        assert supervisor.run() == 0
        assert supervisor.status == "completed"
        assert supervisor.groups[0].restarts == 2
        assert capfd.readouterr().out.count("group 0 ended (out of luck); starting it again") == 2

    def test_pauses_double_up_to_the_longest(self, build, monkeypatch, capfd):
        monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 3.0)
        supervisor = build("exit 1", max_restarts=9)
        (child,) = supervisor.groups.values()
        for _ in range(4):
            supervisor._failed(child, "it failed")
        assert [line.split()[-2] for line in capfd.readouterr().out.splitlines()] == ["1", "2", "3", "3"]

    def test_the_cap_counts_failures_without_a_commit_in_between(self, build, tmp_path, capfd):
        supervisor = build("starts > /dev/null; exit 3")
        assert supervisor.run() == 1
        assert supervisor.status == "failed"
        assert starts(tmp_path, "group-0") == 3
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        assert "error: group 0 failed 3 times" in error
        assert "fault_tolerance.max_restarts = 2" in error
        assert f"exit status 3, see {tmp_path}/group 0.log" in error

    def test_a_committed_round_resets_the_count(self, build, tmp_path):
        supervisor = build('n=$(starts); say 0 INFO "round $n committed at step 9"; [ $n = 6 ] || exit 1')
        assert supervisor.run() == 0
        assert starts(tmp_path, "group-0") == 6

    def test_the_first_complaint_is_the_reason_but_a_fatal_one_beats_it(self, build, capfd):
        build("say 0 ERROR first; say 0 ERROR second; exit 1").run()
        assert "times without a committed round in between (fault_tolerance.max_restarts = 2): first" in (
            capfd.readouterr().err
        )
        build("say 0 ERROR first; say 0 CRITICAL cause; say 0 CRITICAL echo; exit 1").run()
        assert capfd.readouterr().err == "error: group 0: cause\n"

    def test_starting_over_is_asked_for_until_it_was_done(self, build, tmp_path):
        supervisor = build(
            'echo "$*" >> $T/arguments; case $(starts) in'
            ' 1) exit 1;; 2) say 0 INFO "starting over: all is set aside"; exit 1;; esac'
        )
        assert supervisor.run() == 0
        assert (tmp_path / "arguments").read_text().splitlines() == ["--fresh", "--fresh", ""]

    def test_the_lighthouse_is_started_again_too(self, build, tmp_path):
        supervisor = build(
            "await $T/again",
            lighthouse="[ $(starts) = 1 ] && exit 1; touch $T/again; exec sleep 60",
        )
        assert supervisor.run() == 0
        assert starts(tmp_path, "the-lighthouse") == 2

    def test_a_lighthouse_that_cannot_run_ends_all(self, build, tmp_path, capfd):
        supervisor = build("exec sleep 60", lighthouse="starts > /dev/null; exit 1")
        assert supervisor.run() == 1
        assert starts(tmp_path, "the-lighthouse") == 3
        assert "error: the lighthouse failed 3 times" in capfd.readouterr().err


class TestGivingUp:
    def test_bad_input_is_one_line_for_all_groups_and_never_tried_again(self, build, tmp_path, capfd):
        bad = 'starts > /dev/null; say $REPLICA_ID CRITICAL "no such file"; exit 2'
        supervisor = build(bad, bad)
        assert supervisor.run() == 2
        assert supervisor.refused
        assert supervisor.status == "failed"
        error = capfd.readouterr().err
        assert error in ("error: group 0: no such file\n", "error: group 1: no such file\n")
        assert (
            max(starts(tmp_path, name) for name in ("group-0", "group-1") if (tmp_path / f"{name}.count").exists()) == 1
        )

    def test_before_the_first_commit_no_group_can_be_spared(self, build, capfd):
        supervisor = build("exec sleep 60", "exit 1")
        assert supervisor.run() == 1
        assert capfd.readouterr().err.count("error:") == 1

    def test_later_the_others_go_on(self, build, tmp_path, capfd):
        supervisor = build(
            'say 0 INFO "round 1 committed"; await $T/given-up; say 0 INFO "round 2 committed"',
            'await $T/../go; say 1 CRITICAL "its checkpoint is broken"; exit 2',
        )
        (tmp_path.parent / "go").touch()
        supervisor._hear(supervisor.groups[0], "12:00:00 group 0 INFO round 1 committed at step 1")
        give_up = supervisor._give_up
        supervisor._give_up = lambda *arguments: (give_up(*arguments), (tmp_path / "given-up").touch())
        assert supervisor.run() == 0
        assert supervisor.status == "completed"
        assert not supervisor.refused
        assert [child.completed for child in supervisor.groups.values()] == [True, False]
        assert "error: group 1: its checkpoint is broken" in capfd.readouterr().err

    def test_but_not_below_the_smallest_number(self, build, tmp_path):
        (tmp_path / "go").touch()
        supervisor = build('say 0 INFO "round 1 committed"; exec sleep 60', "exit 1", min_groups=2)
        supervisor._hear(supervisor.groups[0], "12:00:00 group 0 INFO round 1 committed at step 1")
        assert supervisor.run() == 1


class TestCompletion:
    def test_groups_that_hold_the_last_round_finish_their_work(self, build, tmp_path):
        supervisor = build(
            'say 0 INFO "round 4 committed"; touch $T/done; sleep 0.7',
            'say 1 INFO "round 4 committed"; await $T/done',
        )
        assert supervisor.run() == 0
        assert all(child.completed for child in supervisor.groups.values())

    @pytest.mark.parametrize("line", ["restored round 4, step 20", "healed by group 0; goes on from round 4"])
    def test_so_does_one_that_holds_it_from_elsewhere(self, build, line):
        supervisor = build('say 0 INFO "round 4 committed"', f'say 1 INFO "{line}"; sleep 0.7')
        supervisor._hear(supervisor.groups[1], f"12:00:00 group 1 INFO {line}")
        assert supervisor.run() == 0
        assert supervisor.groups[1].completed

    def test_one_that_is_behind_is_ended_and_not_started_again(self, build, tmp_path, capfd):
        supervisor = build(
            'await $T/late; say 0 INFO "round 4 committed"',
            'starts >/dev/null; say 1 INFO "round 3 committed"; touch $T/late; trap "exit 1" TERM; sleep 60 & wait',
        )
        assert supervisor.run() == 0
        assert supervisor.status == "completed"
        assert starts(tmp_path, "group-1") == 1
        assert "group 1 had not come back when the run was completed" in capfd.readouterr().out

    def test_one_that_waits_to_be_started_again_is_left_down(self, build, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 60.0)
        supervisor = build(
            'await $T/crashed; sleep 0.3; say 0 INFO "round 4 committed"',
            'starts >/dev/null; say 1 INFO "round 4 committed"; touch $T/crashed; exit 1',
            max_restarts=9,
        )
        assert supervisor.run() == 0
        assert starts(tmp_path, "group-1") == 1


class TestWhatIsShown:
    def test_lines_of_one_group_and_nothing_that_libraries_print(self, build, capfd):
        build(
            'say 0 INFO "step 1"; echo "W1201 torchrun: noise"; touch $T/spoken; await $T/done',
            'await $T/spoken; say 1 INFO "step 1 of another"; say 1 WARNING "alone"; touch $T/done',
        ).run()
        assert capfd.readouterr().out == "12:00:00 step 1\n12:00:00 group 1 WARNING alone\n"

    def test_everything_if_asked(self, build, capfd):
        build("echo noise", show_everything=True).run()
        assert "noise" in capfd.readouterr().out

    def test_when_the_shown_group_ends_the_next_one_to_speak_is_shown(self, build, capfd):
        build(
            'if [ $(starts) = 1 ]; then say 0 INFO "first"; touch $T/spoken; exit 1; fi;'
            'await $T/other; say 0 INFO "back"; touch $T/done',
            "await $T/group-0.count; await $T/spoken; while [ $(wc -l < $T/group-0.count) -lt 2 ]; do sleep 0.02; done;"
            'say 1 INFO "now me"; touch $T/other; await $T/done',
        ).run()
        shown = [line for line in capfd.readouterr().out.splitlines() if "ended" not in line]
        assert shown == ["12:00:00 first", "12:00:00 now me"]

    def test_lines_of_the_ranks_that_are_asked_for(self, build, capfd):
        script = 'echo "12:00:00 group 0 INFO zero"; echo "12:00:00 group 0 rank 1 INFO one"'
        for asked, shown in {
            (): "12:00:00 zero\n12:00:00 rank 1 one\n",
            (0,): "12:00:00 zero\n",
            (1,): "12:00:00 rank 1 one\n",
        }.items():
            build(script, shown_ranks=asked).run()
            assert capfd.readouterr().out == shown

    def test_commits_are_counted_whoever_says_so_and_whatever_is_shown(self, build):
        supervisor = build('echo "12:00:00 group 0 rank 2 INFO round 7 committed at step 9"', shown_ranks=(0,))
        supervisor.run()
        assert supervisor.groups[0].round == 7

    def test_everything_that_was_printed_is_in_the_log_also_the_last_words(self, build, tmp_path):
        build('say 0 INFO "step 1"; echo noise >&2; printf "cut off"').run()
        assert (tmp_path / "group 0.log").read_text() == "12:00:00 group 0 INFO step 1\nnoise\ncut off"

    def test_a_line_may_come_in_pieces_and_need_not_be_text(self, build, capfd):
        build(r'printf "12:00:00 group 0 IN"; sleep 0.3; printf "FO whole \xff\n"').run()
        assert capfd.readouterr().out == "12:00:00 whole �\n"


class TestStopping:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_ends_all_children_in_order(self, build, tmp_path, number):
        obedient = (
            f'trap "touch $T/told-$REPLICA_ID; exit 75" TERM; say 0 INFO up; kill -{int(number)} $PPID; sleep 60 & wait'
        )
        supervisor = build(
            obedient, 'trap "touch $T/told-1; exit 75" TERM; sleep 60 & wait', lighthouse="exec sleep 60"
        )
        assert supervisor.run() == 75
        assert supervisor.status == "stopped"
        assert (tmp_path / "told-0").exists()

    def test_one_that_does_not_obey_is_killed_within_the_grace(self, build):
        started = time.monotonic()
        supervisor = build('trap "" TERM; kill -TERM $PPID; while :; do sleep 0.1; done', grace_seconds=2.0)
        assert supervisor.run() == 75
        assert time.monotonic() - started < 3.0
        assert supervisor.groups[0].restarts == 0

    def test_asked_twice_it_does_not_wait(self, build):
        started = time.monotonic()
        supervisor = build(
            'trap "" TERM; kill -INT $PPID; sleep 0.5; kill -INT $PPID; while :; do sleep 0.1; done', grace_seconds=60.0
        )
        assert supervisor.run() == 75
        assert time.monotonic() - started < 10.0

    def test_a_hang_up_is_ignored_where_it_was_ignored_before(self, build):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        supervisor = build("kill -HUP $PPID")
        assert supervisor.run() == 0

    def test_what_a_job_leaves_behind_in_a_session_of_its_own_is_ended(self, build):
        supervisor = build("setsid sleep 61 & setsid sleep 62 & true")
        assert supervisor.run() == 0
        assert processes_with({"LAUNCHER_PID": str(os.getpid())}) == []

    def test_children_die_with_a_supervisor_that_is_killed(self, alone):
        launcher = alone("echo 12:00:00 group 0 INFO up; exec sleep 60")
        assert launcher.stdout.readline() == b"12:00:00 up\n"
        mark = {"LAUNCHER_PID": str(launcher.pid)}
        assert len(processes_with(mark)) == 1
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 5
        while processes_with(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert processes_with(mark) == []

    def test_a_run_goes_on_when_nobody_listens_any_more(self, alone, tmp_path):
        launcher = alone(
            f"for n in 1 2 3 4 5; do echo 12:00:00 group 0 INFO $n; sleep 0.1; done; touch {tmp_path}/done"
        )
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.stderr.read() == b""
        assert launcher.wait(timeout=20) == 0
        assert (tmp_path / "done").exists()

    @pytest.fixture
    def alone(self, tmp_path):
        """Start a supervisor of one script in a process of its own."""
        program = (
            "import sys; from pathlib import Path; from recipes.supervisor import Child, Supervisor\n"
            "child = Child('group 0', ['bash', '-c', sys.argv[1]], {'REPLICA_ID': '0'}, Path(sys.argv[2]))\n"
            "sys.exit(Supervisor({0: child}).run())"
        )
        started = []

        def start(script):
            command = [sys.executable, "-c", program, script, str(tmp_path / "log")]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe))
            return started[0]

        yield start
        with started[0] as launcher:
            launcher.kill()
