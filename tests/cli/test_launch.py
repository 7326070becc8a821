"""`jaxpp launch`: processes, their output, signals, failures and restarts.

test_launch.py COMMAND GRAPHS
"""

import contextlib
import errno
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import tempfile
import time
import unittest

from command import COMMAND, CommandTest, run


def is_running(pid: str) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Terminal:
    """A command with a controlling terminal."""

    def __init__(self, *command: str, **variables: str) -> None:
        self.output = ""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execvpe(command[0], command, {**os.environ, **variables})

    def expect(self, text: str) -> None:
        """Reads until the text appears."""
        while text not in self.output:
            self._read()
        self.output = self.output.partition(text)[2]

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def wait(self) -> int:
        """Reads until the command has ended; returns its exit status."""
        with contextlib.suppress(OSError):
            while True:
                self._read()
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> None:
        if not select.select([self.terminal], [], [], 60)[0]:
            raise AssertionError(f"no output for 60 s after {self.output!r}")
        self.output += os.read(self.terminal, 4096).decode()


class LaunchTest(CommandTest):
    """One test for each documented behaviour of the launcher."""

    def test_launch_numbers_processes_and_their_lines(self) -> None:
        script = (
            'echo "$JPP_PROCESS_ID of $JPP_NUM_PROCESSES, start $JPP_RESTART"; '
            'echo "$JAX_COORDINATOR_ADDRESS" >&2; printf "no end"'
        )
        done = run("launch", "-n", "3", "--", "sh", "-c", script)
        self.assertEqual(done.returncode, 0, done.stderr)
        expected = [f"[{i}] {i} of 3, start 0" for i in range(3)]
        expected += [f"[{i}] no end" for i in range(3)]
        self.assertEqual(sorted(done.stdout.splitlines()), sorted(expected))
        lines = [
            re.fullmatch(r"\[(\d)\] (127\.0\.0\.1:\d+)", x) for x in done.stderr.split("\n")
        ]
        found = [line for line in lines if line]
        self.assertEqual(sorted(line[1] for line in found), ["0", "1", "2"])
        self.assertEqual(len({line[2] for line in found}), 1)
        self.assertEqual(run("launch", "--", "sh", "-c", "echo one").stdout, "[0] one\n")

    def test_launch_passes_long_lines_and_any_bytes(self) -> None:
        long = "x" + "é" * 20000
        script = f"printf '\\377\\n'; printf '%s\\n' {long}; printf '%s' {long[:8192]}"
        done = subprocess.run(
            [COMMAND, "launch", "--", "sh", "-c", script], capture_output=True, check=True
        )
        expected = b"[0] \xff\n" + f"[0] {long}\n[0] {long[:8192]}\n".encode()
        self.assertEqual(done.stdout, expected)

    def test_launch_breaks_a_long_line_for_another_process(self) -> None:
        script = (
            'wait_for() { while [ ! -e "$1" ]; do sleep 0.05; done; }; '
            'if [ $JPP_PROCESS_ID = 0 ]; then printf \'x%s\' "$2"; wait_for "$1/end"; '
            'echo end; else wait_for "$1/other"; echo other; fi'
        )
        with tempfile.TemporaryDirectory() as folder:
            long = "é" * 5000
            launcher = subprocess.Popen(
                [COMMAND, "launch", "-n", "2", "--", "sh", "-c", script, "sh", folder, long],
                stdout=subprocess.PIPE,
            )
            assert launcher.stdout is not None
            first = launcher.stdout.read(4 + 8191).decode()
            pathlib.Path(folder, "other").touch()
            other = launcher.stdout.readline() + launcher.stdout.readline()
            pathlib.Path(folder, "end").touch()
            last = launcher.communicate()[0].decode()
        self.assertEqual(first, "[0] x" + "é" * 4095)
        self.assertEqual(other, b"\n[1] other\n")
        self.assertEqual(last, "[0] " + "é" * 905 + "end\n")

    def test_launch_says_what_it_could_not_write(self) -> None:
        with tempfile.TemporaryDirectory() as folder, open("/dev/full", "w") as full:
            pathlib.Path(folder, "process-0.log").symlink_to("/dev/full")
            flags = ["--log-dir", folder, "--", "sh", "-c", "seq 5000; exit $1", "sh"]
            for status, result in (0, 2), (3, 3):
                done = subprocess.run(
                    [COMMAND, "launch", *flags, str(status)],
                    stdout=full,
                    stderr=subprocess.PIPE,
                    text=True,
                    check=False,
                )
                self.assertEqual(done.returncode, result, done.stderr)
                why = os.strerror(errno.ENOSPC)
                for lost in f"{folder}/process-0.log: {why}", f"standard output: {why}":
                    self.assertEqual(done.stderr.count(lost), 1, done.stderr)
            done = run("launch", *flags, "0")
            self.assertEqual((done.returncode, len(done.stdout.splitlines())), (0, 5000))
            self.assertIn(f"process-0.log: {why}", done.stderr)

    def test_launch_ends_all_when_one_fails(self) -> None:
        wait = "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.1; done"
        ready = 'while [ ! -e "$1/up" ]; do sleep 0.05; done'
        begin = (
            f'if [ $JPP_PROCESS_ID = 0 ]; then touch "$1/up"; {wait}; fi; {ready}; sleep 0.3; '
        )
        for end, result, says in [
            ("exit 3", 3, "failed with exit status 3"),
            ("kill -9 $$", 137, "was ended by signal 9 (Killed)"),
        ]:
            with tempfile.TemporaryDirectory() as folder:
                done = run("launch", "-n", "2", "--", "sh", "-c", begin + end, "sh", folder)
            self.assertEqual(done.returncode, result, done.stderr)
            self.assertEqual(done.stdout, "[0] up\n[0] told\n")
            message = (
                rf"^jaxpp launch: process 1 \(pid \d+\) {re.escape(says)}; ending the others"
            )
            self.assertEqual(
                len(re.findall(message, done.stderr, re.MULTILINE)), 1, done.stderr
            )

    def test_launch_leaves_nothing_behind(self) -> None:
        """Neither processes that ignore SIGTERM nor the children of a process remain."""
        script = (
            "trap '' TERM; sleep 1000 >&- 2>&- & echo $! $$; "
            'if [ $JPP_PROCESS_ID = 0 ]; then touch "$1/up"; wait; fi; '
            'while [ ! -e "$1/up" ]; do sleep 0.05; done; exit 5'
        )
        with tempfile.TemporaryDirectory() as folder:
            done = run("launch", "-n", "2", "--", "sh", "-c", script, "sh", folder)
        self.assertEqual(done.returncode, 5, done.stderr)
        pids = [pid for line in done.stdout.splitlines() for pid in line.split()[1:]]
        self.assertEqual(len(pids), 4, done.stdout)
        for pid in pids:
            self.assertFalse(is_running(pid), pid)

    def test_launch_passes_signals(self) -> None:
        script = "trap 'echo INT; exit 1' INT; trap 'echo TERM; exit 1' TERM; echo $$; "
        script += "while :; do sleep 0.1; done"
        for number in [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]:
            launcher = subprocess.Popen(
                [COMMAND, "launch", "-n", "2", "--restarts=1", "--", "sh", "-c", script],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            assert launcher.stdout is not None
            pids = [launcher.stdout.readline().split()[1] for _ in range(2)]
            launcher.send_signal(number)
            output, errors = launcher.communicate()
            self.assertNotIn("jaxpp", errors)
            if number == signal.SIGKILL:
                self.assertEqual((launcher.returncode, output), (-number, ""))
            else:
                name = number.name.removeprefix("SIG")
                self.assertEqual(launcher.returncode, 128 + number)
                self.assertEqual(sorted(output.splitlines()), [f"[{i}] {name}" for i in (0, 1)])
            deadline = time.monotonic() + 60  # the kernel kills them after the launcher exits
            while any(map(is_running, pids)) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.assertFalse(any(map(is_running, pids)), pids)

    def test_launch_under_nohup(self) -> None:
        """Signals that the launcher's caller ignores end neither it nor its processes."""

        def ignore_signals() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)

        script = 'kill -HUP $$; kill -INT $$; echo up; read line; echo "$line"'
        with subprocess.Popen(
            [COMMAND, "launch", "--", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=ignore_signals,
        ) as launcher:
            assert launcher.stdout is not None
            self.assertEqual(launcher.stdout.readline(), "[0] up\n")
            launcher.send_signal(signal.SIGHUP)
            launcher.send_signal(signal.SIGINT)
            self.assertEqual(launcher.communicate("still here\n")[0], "[0] still here\n")
        self.assertEqual(launcher.returncode, 0)

    def test_launch_lends_the_terminal(self) -> None:
        script = 'stty -g >/dev/null; printf "name? "; read x; echo "hello $x"; read x; read y'
        one = Terminal(COMMAND, "launch", "--restarts=1", "--", "sh", "-c", script)
        one.expect("[0] name? ")
        one.type("A\n")
        one.expect("hello A")
        one.type("\3")
        self.assertEqual(one.wait(), 128 + signal.SIGINT)
        self.assertNotIn("jaxpp launch:", one.output)

    def test_launch_stops_with_the_process_that_has_the_terminal(self) -> None:
        launch = (
            f"{COMMAND} launch -- sh -c 'echo ask; read x; echo got $x; read x; echo end $x'"
        )
        one = Terminal("sh", "-c", f"set -m; {launch}; echo stopped; fg")
        one.expect("[0] ask")
        one.type("A\n")
        one.expect("[0] got A")
        one.type("\x1a")
        one.expect("stopped")
        one.type("B\n")
        one.expect("[0] end B")
        one.wait()

    def test_launch_names_a_process_that_asks_for_the_terminal(self) -> None:
        waits = "set -m; $0 launch -- sh -c 'read x; echo got $x' & read key; fg"
        one = Terminal("sh", "-c", waits, COMMAND)
        one.expect("was stopped (SIGTTIN: it reads the terminal")
        one.type("key\n")
        one.expect("launch")  # the shell prints the command that it brings forward
        one.type("A\n")
        one.expect("[0] got A")
        self.assertEqual(one.wait(), 0)
        script = 'read x; echo "none$x"; [ $JPP_PROCESS_ID = 0 ] || read x </dev/tty; sleep 100'
        two = Terminal(
            COMMAND, "launch", "-n", "2", "--", "sh", "-c", script, JPP_PEER_TIMEOUT="1"
        )
        two.expect("] none")
        two.expect("] none")
        two.expect("process 1 (pid ")
        two.expect("was stopped (SIGTTIN: it reads the terminal")
        self.assertEqual(two.wait(), 128 + signal.SIGKILL)

    def test_launch_that_is_killed_leaves_nothing_behind_a_shell(self) -> None:
        script = "sleep 1000 & echo $!; wait"
        launcher = subprocess.Popen(
            [COMMAND, "launch", "-n", "2", "--", "sh", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert launcher.stdout is not None
        pids = [launcher.stdout.readline().split()[1] for _ in range(2)]
        launcher.kill()
        launcher.communicate()
        deadline = time.monotonic() + 60
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertFalse(any(map(is_running, pids)), pids)

    def test_launch_names_the_process_that_failed(self) -> None:
        """It names neither a survivor that exited earlier because of the failure nor one that
        JAX aborted."""
        tell = 'echo "0 because of 1" >&${JPP_REPORT%:*}'
        report = f"if [ $JPP_PROCESS_ID = 0 ]; then {tell}; exit 1; fi"
        aborted = "if [ $JPP_PROCESS_ID = 1 ]; then kill -ABRT $$; fi"
        for script, culprit, result in [
            (f"{report}; sleep 0.5; exit 3", 1, 3),
            (f"{report}; kill -STOP $$", 1, 128 + signal.SIGKILL),
            (f"{report}; sleep 0.5", 1, 1),
            (f"{aborted}; sleep 0.3; kill -9 $$", 0, 128 + signal.SIGKILL),
        ]:
            done = run("launch", "-n", "2", "--", "sh", "-c", script)
            self.assertEqual(done.returncode, result, done.stderr)
            named = re.findall(r"^jaxpp launch: process (\d) ", done.stderr, re.MULTILINE)
            self.assertEqual(named, [str(culprit)], done.stderr)

    def test_launch_gives_processes_time_to_end(self) -> None:
        script = "trap 'sleep 1; echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done"
        for grace, output in ("5", "[0] up\n[0] saved\n"), ("0.2", "[0] up\n"):
            launcher = subprocess.Popen(
                [COMMAND, "launch", "--grace", grace, "--", "sh", "-c", script],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert launcher.stdout is not None
            first = launcher.stdout.readline()
            launcher.terminate()
            self.assertEqual(first + launcher.communicate()[0], output)
            self.assertEqual(launcher.returncode, 128 + signal.SIGTERM)

    def test_launch_gives_no_more_time_after_a_failure(self) -> None:
        script = (
            'if [ $JPP_PROCESS_ID = 1 ]; then read line <"$1"; exit 3; fi; '
            "trap '' TERM; echo up >\"$1\"; "
            "for i in 1 2 3 4 5 6 7 8; do sleep 0.5; done; echo late"
        )
        with tempfile.TemporaryDirectory() as folder:
            fifo = f"{folder}/fifo"
            os.mkfifo(fifo)
            done = run(
                "launch", "-n", "2", "--grace", "0.2", "--", "sh", "-c", script, "sh", fifo
            )
        self.assertEqual((done.returncode, done.stdout), (3, ""), done.stderr)

    def test_launch_gives_time_also_behind_a_shell(self) -> None:
        """SIGTERM ends the shell at once, but its child may still be saving a checkpoint."""
        saves = "trap 'sleep 1; echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done"
        launcher = subprocess.Popen(
            [COMMAND, "launch", "--", "sh", "-c", 'sh -c "$0"; exit $?', saves],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert launcher.stdout is not None
        first = launcher.stdout.readline()
        launcher.terminate()
        self.assertEqual(first + launcher.communicate()[0], "[0] up\n[0] saved\n")

    def test_launch_shows_progress_bars_now_and_then(self) -> None:
        script = (
            "for i in 1 2 3 4 5; do printf '\\r%s of 5' $i; sleep 0.1; done; echo; echo end"
        )
        with tempfile.TemporaryDirectory() as folder:
            done = run("launch", "-n", "2", "--log-dir", folder, "--", "sh", "-c", script)
            log = pathlib.Path(folder, "process-1.log").read_bytes()
        lines = [x for x in done.stdout.splitlines() if x.startswith("[1] ")]
        self.assertEqual(lines, ["[1] 1 of 5", "[1] 5 of 5", "[1] end"])
        self.assertEqual(log.count(b"\r"), 5)

    def test_launch_on_several_nodes(self) -> None:
        script = (
            "echo $JPP_PROCESS_ID of $JPP_NUM_PROCESSES, here $OMPI_COMM_WORLD_LOCAL_RANK; "
        )
        script += "echo $JAX_COORDINATOR_ADDRESS"
        flags = ["-n", "2", "--nodes", "3", "--node", "2", "--coordinator", "10.0.0.1:77"]
        done = run("launch", *flags, "--", "sh", "-c", script)
        expected = [f"[{4 + i}] {4 + i} of 6, here {i}" for i in (0, 1)]
        expected += [f"[{4 + i}] 10.0.0.1:77" for i in (0, 1)]
        self.assertEqual(sorted(done.stdout.splitlines()), sorted(expected), done.stderr)
        self.assert_refused(2, "expected --coordinator", "launch", "--nodes=2", "--", "true")
        self.assert_refused(2, "below --nodes, 1", "launch", "--node=1", "--", "true")
        for place in ("x", ":80", "x:", "x:80x", "x: 80", "x:+80", "x y:80", "x:0", "x:65536"):
            found = f"found '{place}'"
            self.assert_refused(2, found, "launch", f"--coordinator={place}", "--", "true")
        self.assert_refused(2, "HOST:PORT", "launch", "--coordinator=::1:80", "--", "true")
        self.assertEqual(run("launch", "--coordinator=[::1]:80", "--", "true").returncode, 0)

    def test_launch_divides_cores(self) -> None:
        script = "echo $NPROC $OMP_NUM_THREADS $(nproc)"
        cores = len(os.sched_getaffinity(0))
        set_here = ("NPROC", "OMP_NUM_THREADS")
        environment = {k: v for k, v in os.environ.items() if k not in set_here}
        for flags, expected in ([], f"{max(1, cores // 2)}"), (["--share-cores"], f"{cores}"):
            done = subprocess.run(
                [COMMAND, "launch", "-n", "2", *flags, "--", "sh", "-c", script],
                capture_output=True,
                text=True,
                env=environment,
                check=True,
            )
            for line in done.stdout.splitlines():
                *variables, cores_here = line.split()[1:]
                self.assertEqual(variables, [] if flags else [expected] * 2)
                if cores >= 2:
                    self.assertEqual(cores_here, expected)

    def test_launch_restarts(self) -> None:
        script = "echo start $JPP_RESTART; [ $JPP_RESTART = 2 ]"
        done = run("launch", "--restarts", "2", "--", "sh", "-c", script)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, "[0] start 0\n[0] start 1\n[0] start 2\n")
        self.assertEqual(re.findall(r"again \((.*)\)", done.stderr), ["1 of 2", "2 of 2"])
        self.assertEqual(
            run("launch", "--restarts", "1", "--", "sh", "-c", script).returncode, 1
        )

    def test_launch_refuses_timeouts_that_processes_would_refuse(self) -> None:
        for name in ["PEER_TIMEOUT", "GRACE", "STALL_TIMEOUT", "STEP_TIMEOUT"]:
            done = run("launch", "--", "true", env={f"JPP_{name}": "soon"})
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"error: JPP_{name}='soon': expected seconds", done.stderr)

    def test_launch_refuses(self) -> None:
        self.assert_refused(2, "expected -- COMMAND", "launch")
        self.assert_refused(2, "expected -- COMMAND", "launch", "-n", "2", "--")
        self.assert_refused(2, "'true'", "launch", "true")
        self.assert_refused(2, "found 'x'", "launch", "-n", "x", "--", "true")
        self.assert_refused(2, "at most 4096, found 4097", "launch", "-n", "4097", "--", "true")
        self.assert_refused(2, "--restarts", "launch", "--restarts", "--", "true")
        self.assert_refused(2, "no flag '--ranks=2'", "launch", "--ranks=2", "--", "true")
        done = run("launch", "-n", "1", "--", "/no/such/command")
        self.assertEqual(done.returncode, 127)
        self.assertIn("[0] /no/such/command: No such file or directory\n", done.stderr)


if __name__ == "__main__":
    unittest.main()
