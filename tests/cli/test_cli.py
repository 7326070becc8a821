"""The jaxpp command: its output, and its errors for invalid input.

test_cli.py COMMAND GRAPHS
"""

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree

from command import COMMAND, ROOT, CommandTest, graph, run

# Environment variables that other launchers set for the processes of a job.
LAUNCHERS = {"JAX_COORDINATOR_ADDRESS", "NNODES", "NODE_RANK", "SLURM_JOB_ID"}


class CliTest(CommandTest):
    """One test for each documented behaviour of the command."""

    def test_help_names_every_command_and_flag(self) -> None:
        self.assertIn(".svg, .html or .json", run("plot", "--help").stdout)
        for command in ["plan", "run", "schedule list", "schedule show", "verify"]:
            self.assertIn(f"jaxpp {command}", run("--help").stdout)
            done = run(*command.split(), "--help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("--help", done.stdout)
        for flag in ["--after", "--json", "--schedule", "--ranks", "--stages"]:
            self.assertIn(flag, run("plan", "--help").stdout)
        self.assertRegex(run("--version").stdout, r"^jaxpp \d+\.\d+\.\d+\n$")

    def test_what_is_no_plan_file_is_not_run(self) -> None:
        self.assert_refused(2, "plan file /nowhere: cannot be read: No such", "run", "/nowhere")
        text = "expected a file that begins with"
        self.assert_refused(2, text, "run", graph("mlp4"))
        self.assert_refused(2, "it is not a regular file", "run", "/dev/null")
        self.assert_refused(2, "--steps: expected a whole number", "run", "x", "--steps=0")

    def test_summary(self) -> None:
        done = run("plan", graph("mlp4"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("schedule 1f1b, 4 stages, 6 microbatches", done.stdout)
        self.assertRegex(done.stdout, r"\n +3 +3 +64 +128 +27%\n")
        self.assertIn("  0 -> 1         6          192\n", done.stdout)

    def test_simulated_streams_and_channels(self) -> None:
        def simulate(*flags: str) -> dict[str, object]:
            sizes = ["--stages=4", "--microbatches=8", "--json"]
            done = run("simulate", "zb-h1", *sizes, *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)

        one = simulate()
        self.assertEqual(simulate("--streams", "1"), one)
        self.assertEqual(simulate("--streams=2").keys(), one.keys())
        self.assertLess(simulate("--streams=2")["makespan"], one["makespan"])
        sent = simulate("--transfer", "2")
        self.assertEqual(simulate("--message-bytes=1KiB", "--bandwidth=512"), sent)
        waits = simulate("--transfer=2", "--no-overlap")
        self.assertGreater(waits["makespan"], sent["makespan"])
        self.assertEqual(simulate("--transfer=2", "--no-overlap", "--overlap"), sent)
        sizes = ["simulate", "1f1b", "--stages=4", "--microbatches=8"]
        self.assert_refused(2, "--message-bytes with --bandwidth", *sizes, "--bandwidth=2")
        self.assert_refused(2, "at most 64 streams", *sizes, "--streams=65")

    def test_memory_by_kind(self) -> None:
        printed = run("plan", graph("mlp4")).stdout
        self.assertRegex(printed, "rank +weights +gradients +optimizer state +activations")
        self.assertIn("508 bytes  1\n", printed)
        for fits in ["508", "0.5KiB", "1MiB"]:
            self.assertEqual(run("plan", graph("mlp4"), "--memory-limit", fits).returncode, 0)
        self.assert_refused(1, "at most 507 bytes", "plan", graph("mlp4"), "--memory-limit=507")
        self.assert_refused(2, "found '1Ki'", "plan", graph("mlp4"), "--memory-limit=1Ki")
        checked = run("plan", graph("mlp4"), "--after", "check", "--json").stdout
        actor = json.loads(checked)["actors"][0]
        curve = [sum(point) for point in zip(*actor["curve"].values(), strict=True)]
        self.assertEqual(max(curve), actor["peak_bytes"])
        self.assertEqual(curve[actor["peak_instruction"] + 1], actor["peak_bytes"])

    def test_each_part_as_text_and_json(self) -> None:
        begins = {"graph": "graph", "schedule": "schedule", "partition": "staged"}
        begins |= {"program": "plan", "check": "check"}
        for part, word in begins.items():
            done = run("plan", graph("tied"), "--after", part)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(done.stdout.startswith(word), done.stdout)
            json.loads(run("plan", graph("tied"), f"--after={part}", "--json").stdout)

    def test_json_holds_all_parts(self) -> None:
        parts = json.loads(run("plan", graph("tied"), "--json").stdout)
        self.assertEqual(sorted(parts), ["check", "graph", "partition", "program", "schedule"])
        self.assertEqual(len(parts["graph"]["args"]), 5)
        self.assertEqual(parts["schedule"][0]["stage_rank"], [0, 1])
        for program, check in zip(
            parts["program"]["actors"], parts["check"]["actors"], strict=True
        ):
            self.assertEqual(program["peak_bytes"], check["peak_bytes"])
            self.assertEqual(sum(check["bytes_at_peak"].values()), check["peak_bytes"])

    def test_graph_text_is_read_back(self) -> None:
        printed = run("plan", graph("aux"), "--after", "graph").stdout
        self.assertEqual(run("plan", "-", "--after", "graph", text=printed).stdout, printed)

    def test_flags_replace_what_the_file_says(self) -> None:
        done = run("plan", graph("interleaved"), "--ranks", "4", "--schedule", "zb-h1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"\n +3 +3 +64 +128 +27%\n")

    def test_plan_takes_a_schedule_as_csv(self) -> None:
        sizes = ["--stages", "4", "--ranks", "4", "--microbatches", "6"]
        mlp4 = graph("mlp4")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "mine.csv")
            file.write_text(run("schedule", "show", "zb-h1", *sizes, "--csv").stdout)
            for after in ("partition", "program", "check"):
                given = run("plan", mlp4, "--schedule", str(file), "--after", after)
                built = run("plan", mlp4, "--schedule", "zb-h1", "--after", after)
                self.assertEqual((given.returncode, given.stdout), (0, built.stdout))
            short = file.read_text().replace("0F5,", ",")
            file.write_text(short)
            self.assert_refused(1, "mine.csv:1: stage 0", "plan", mlp4, "--schedule", str(file))
            self.assert_refused(2, "No such file", "plan", mlp4, "--schedule", "./none.csv")

    def test_a_file_without_a_schedule_says_which_flag_to_give(self) -> None:
        text = pathlib.Path(graph("mlp2")).read_text().replace(' schedule "1f1b"', "")
        self.assert_refused(2, "--schedule NAME", "plan", "-", text=text)
        done = run("plan", "-", "--schedule", "gpipe", text=text)
        self.assertEqual(done.returncode, 0, done.stderr)
        text = text.replace(" stages 2", "").replace(" ranks 2", "")
        self.assert_refused(2, "--ranks N", "plan", "-", "--schedule=1f1b", text=text)
        self.assert_refused(
            2, "--stages N", "plan", "-", "--schedule=1f1b", "--ranks=2", text=text
        )

    def test_bad_flags(self) -> None:
        self.assert_refused(2, "unknown command 'plant'", "plant")
        self.assert_refused(2, "no flag '--fast'", "plan", "x", "--fast")
        self.assert_refused(2, "expected FILE", "plan")
        self.assert_refused(2, "found 'b' after it", "plan", "a", "b")
        self.assert_refused(2, "--ranks: expected N", "plan", "a", "--ranks")
        self.assert_refused(2, "found '-1'", "plan", "a", "--ranks", "-1")
        self.assert_refused(2, "found '2x'", "plan", "a", "--ranks=2x")
        self.assert_refused(2, "--json takes no value", "plan", "a", "--json=1")
        self.assert_refused(2, "found 'all'", "plan", graph("mlp2"), "--after", "all")
        self.assert_refused(2, "No such file", "plan", "/nonexistent")
        self.assert_refused(2, "Is a directory", "plan", "/")
        self.assert_refused(2, "found 'extra'", "--version", "extra")
        self.assert_refused(2, "found '0x10'", "plan", "a", "--memory-limit", "0x10")
        self.assert_refused(2, "found '0x1'", "simulate", "1f1b", "--latency", "0x1")

    def test_flags_that_would_be_ignored(self) -> None:
        sizes = ["--stages=2", "--microbatches=2"]
        shown = ["schedule", "show", "1f1b", *sizes]
        search = ["schedule", "search", *sizes, "--ranks=2", "--costs=x"]
        with tempfile.TemporaryDirectory() as folder:
            trace = f"{folder}/a.json"
            self.assertEqual(run("plot", "1f1b", *sizes, "-o", trace).returncode, 0)
            for flag, what, *words in (
                ("--stages", "traces", "plot", trace, "--stages=2"),
                ("--no-overlap", "traces", "plot", trace, "--no-overlap"),
                ("--color", "-o", "plot", trace, "--color", "-o", trace),
                ("--trace", "--spmd", "simulate", "1f1b", *sizes, "--spmd", "--trace"),
                ("--json", "--trace", "simulate", "1f1b", *sizes, "--trace", "--json"),
                ("--json", "--trace", "predict", "x", trace, "--trace", "--json"),
                ("--json", "--csv", *shown, "--csv", "--json"),
                ("--json", "--csv", *search, "--csv", "--json"),
            ):
                self.assert_refused(2, f"{flag} does not apply to {what}\n", *words)
        self.assert_refused(2, "--comms is for --csv", *search, "--comms")
        self.assert_refused(2, "--cost does not apply", *search, "--cost=1,1,1")
        self.assert_refused(2, "--fuse does not apply", *search, "--fuse")

    def test_what_can_not_run(self) -> None:
        self.assert_refused(1, "expected 4 stage marks", "plan", graph("wrong_marks"))
        self.assert_refused(2, ".jpp:4:1: ", "plan", graph("zero_microbatches"))
        self.assert_refused(
            2, "for 2 stages expected a mesh", "plan", graph("mlp2"), "--ranks=3"
        )

    def test_schedules(self) -> None:
        names = [row["name"] for row in json.loads(run("schedule", "list", "--json").stdout)]
        self.assertIn("zb-h1", names)
        for name in names:
            self.assertIn(name, run("schedule", "list").stdout)
            sizes = ["--stages=4", "--microbatches=8"]
            sizes += (
                ["--ranks=2"] if "inter" in name or name[0] in "kdbv" or name == "zb-v" else []
            )
            self.assertIn("units of time", run("schedule", "show", name, *sizes).stdout)
            rows = json.loads(run("schedule", "show", name, *sizes, "--json").stdout)
            self.assertIn(len(rows), [2, 4])
            self.assertEqual(run("verify", name, *sizes).returncode, 0)
        self.assert_refused(
            2, "neither a built-in schedule", "verify", "x", "--stages=1", "--microbatches=1"
        )

    def test_simulate(self) -> None:
        sizes = ["--stages=8", "--ranks=4", "--microbatches=8"]
        found = json.loads(
            run("simulate", "interleaved-1f1b", *sizes, "--cost=2,3,1", "--json").stdout
        )
        self.assertEqual(found["bubble_global"], 9)
        self.assertEqual(len(found["peak_microbatches"]), 4)
        for key in ["makespan", "bubble_span", "utilisation"]:
            self.assertIn(key, found)
        self.assertIn("bubble 4.5", run("simulate", "interleaved-1f1b", *sizes).stdout)
        trace = json.loads(run("simulate", "zb-v", *sizes, "--trace").stdout)
        self.assertIn("bwd_i_7__0", [e["name"] for e in trace["traceEvents"]])
        bad = "--cost=1,2"
        self.assert_refused(2, "--cost: expected", "simulate", "zb-v", *sizes, bad)
        self.assert_refused(2, "--latency", "simulate", "zb-v", *sizes, "--latency=-1")

    def test_simulate_activations(self) -> None:
        sizes = ["simulate", "1f1b", "--stages=8", "--microbatches=32", "--json"]
        limit = ["--memory-limit=40", "--activation-bytes=10"]
        offload = ["--offload", *limit, "--host-bandwidth=3.4"]
        found = json.loads(run(*sizes, *offload).stdout)
        self.assertEqual(found["makespan"], json.loads(run(*sizes).stdout)["makespan"])
        self.assertEqual(found["activations"], ["offloaded"] * 4 + ["kept"] * 4)
        self.assertEqual(found["host_peak_microbatches"], [7, 6, 5, 4, 0, 0, 0, 0])
        self.assertEqual(max(found["peak_microbatches"]), 4)
        text = run(*sizes[:-1], *offload).stdout
        self.assertIn("offloaded, at most 7 on the host\n", text)
        again = json.loads(run(*sizes, "--recompute", *limit, "--input-bytes=1").stdout)
        self.assertEqual(again["peak_microbatches"][0], 1.7)
        self.assert_refused(2, "exclude each other", *sizes, "--offload", "--recompute")
        self.assert_refused(2, "are for --offload or --recompute", *sizes, *limit)
        self.assert_refused(2, "--host-bandwidth", *sizes, "--host-bandwidth=-1")
        small = ["--offload", "--memory-limit=1", "--activation-bytes=2"]
        self.assert_refused(1, "the limit holds 0 stage activations", *sizes, *small)

    def test_csv_files_in_place_of_names(self) -> None:
        sizes = ["--stages=8", "--ranks=4", "--microbatches=8"]
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/zbv.csv"
            text = run("schedule", "show", "zb-v", *sizes, "--csv", "--comms").stdout
            pathlib.Path(file).write_text(text, newline="")
            self.assertIn("slots a channel", run("verify", file).stdout)
            self.assert_refused(1, "2 slots a channel", "verify", file, "--slots=1")
            self.assertEqual(
                run("simulate", file, "--json").stdout,
                run("simulate", "zb-v", *sizes, "--json").stdout,
            )
            self.assert_refused(2, "--ranks 3: the schedule", "verify", file, "--ranks=3")
            pathlib.Path(file).write_text(text.replace("1RECV_F0,", "", 1))
            self.assert_refused(1, "zbv.csv:2: cell", "verify", file)
            pathlib.Path(file).write_text("0F0,x\n")
            self.assert_refused(2, "zbv.csv:1: cell 2, 'x'", "verify", file)
        self.assert_refused(2, "No such file", "verify", "/nonexistent.csv")

    def test_sums_take_their_microbatches_in_order(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "x.csv")
            file.write_text("0F0,0F1,0B1,0B0\n")
            message = "schedule x.csv: rank 0 runs bwd_0__1 (entry 2) where bwd_0__0 is due"
            self.assert_refused(1, message, "verify", str(file))
            file.write_text("0F1,0F0\n")
            done = run("verify", str(file))
            self.assertEqual(done.returncode, 0)
            self.assertIn("\nonly for a loop without a sum: rank 0 runs fwd_0__1", done.stdout)

    def test_plot_and_drift(self) -> None:
        sizes = ["--stages=4", "--microbatches=6"]
        with tempfile.TemporaryDirectory() as folder:
            files = {"a.svg": "<svg", "a.html": "<!doctype", "a.json": "{"}
            for name, start in files.items():
                done = run("plot", "zb-h1", *sizes, "-o", f"{folder}/{name}")
                self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
                text = pathlib.Path(folder, name).read_text()
                self.assertTrue(text.startswith(start))
            run("plot", "zb-h1", *sizes, "--cost=1,2,1", "-o", f"{folder}/b.json")
            done = run("drift", f"{folder}/a.json", f"{folder}/b.json")
            self.assertIn("72 of 72 predicted tasks", done.stdout)
            self.assertRegex(done.stdout, r"bwd_i_\d__\d +\d +1.000 +2.000 +\+1.000")
            self.assert_refused(2, "a.svg:1: ", "drift", f"{folder}/a.svg", "x")
            costs = ["--costs", f"{folder}/b.json"]
            self.assertEqual(
                run("simulate", "zb-h1", *sizes, *costs, "--json").stdout,
                run("simulate", "zb-h1", *sizes, "--cost=1,2,1", "--json").stdout,
            )
        self.assertIn("rank   3", run("plot", "zb-h1", *sizes).stdout)
        self.assert_refused(2, "ends in .svg", "plot", "zb-h1", *sizes, "-o", "x.png")

    def test_parts_of_tasks_are_measured_together(self) -> None:
        """A plan may divide a task, join the last forward with its backward, and have loops
        with more stages."""

        def span(name: str, stage: int, at: int, took: int) -> dict[str, object]:
            where = {"ph": "X", "cat": "x", "pid": 0, "tid": stage % 2}
            args = {"microbatch": int(name[-1]), "stage": stage}
            return {"name": name, "ts": at, "dur": took * 1000, "args": args, **where}

        spans = [span("loop1_fwd_7__0", 7, 0, 5)]
        for m in range(2):
            spans += [span(f"fwd_0__{m}", 0, 0, 10), span(f"fwd_0_part2__{m}", 0, 0, 30)]
            spans += [span(f"bwd_1__{m}", 1, 0, 60), span(f"bwd_0__{m}", 0, 0, 60)]
        whole = [span(f"fwd_0__{m}", 0, 0, 40) for m in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            for name, events in {"a": whole, "b": spans}.items():
                text = json.dumps({"traceEvents": events})
                pathlib.Path(folder, f"{name}.json").write_text(text)
            pathlib.Path(folder, "costs").write_text("0 40 30 30\n1 0 30 30\n")
            sizes = ["simulate", "1f1b", "--stages=2", "--microbatches=2", "--costs"]
            self.assertEqual(
                run(*sizes, f"{folder}/b.json").stdout, run(*sizes, f"{folder}/costs").stdout
            )
            drift = run("drift", f"{folder}/a.json", f"{folder}/b.json").stdout
            self.assertRegex(drift, r"fwd_0__0 +0 +40.000 +40.000 +\+0.000")

    def test_one_program_keeps_its_activations(self) -> None:
        sizes = ["simulate", "gpipe", "--stages=4", "--microbatches=8", "--spmd"]
        self.assertEqual(run(*sizes).returncode, 0)
        self.assert_refused(2, "of rank 0 are recomputed", *sizes, "--recompute")

    def test_search(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            costs = pathlib.Path(folder, "costs")
            costs.write_text("# stage F B W\n0 2 2 2\n1 1 1 1\n2 1 1 1\n3 3 3 3\n")
            sizes = ["--stages=4", "--ranks=2", "--microbatches=4", "--costs", str(costs)]
            done = run("schedule", "search", *sizes, "--seconds=0.2", "--json")
            found = json.loads(done.stdout)
            self.assertGreaterEqual(found["makespan"], found["bound"] - 1e-9)
            self.assertLessEqual(found["makespan"], found["built_in_makespan"])
            done = run("schedule", "search", *sizes, "--seconds=0.1", "--csv")
            pathlib.Path(folder, "found.csv").write_text(done.stdout)
            self.assertEqual(run("verify", f"{folder}/found.csv").returncode, 0)
            limit = ["--memory-limit=1"]
            self.assert_refused(1, "fits", "schedule", "search", *sizes, *limit)
            limit = ["--memory-limit=2", "--host-bandwidth=100", "--seconds=0.2"]
            done = run("schedule", "search", *sizes, *limit, "--json")
            found = json.loads(done.stdout)
            self.assertEqual(found["makespans"][found["activations"]], found["makespan"])
            done = run("schedule", "search", *sizes, *limit)
            self.assertRegex(done.stdout, r"activations \w+.*; makespan if they are kept ")
            costs.write_text("0 0.1 0.2 0.3\n")  # sums of these are rounded
            sizes = ["--stages=1", "--ranks=1", "--microbatches=3", "--costs", str(costs)]
            done = run("schedule", "search", *sizes, "--seconds=0.02")
            self.assertIn(", 0.0% over the lower bound", done.stdout)
            costs.write_text("0 1 1 1\n9 1 1 1\n")
            self.assert_refused(2, "costs:2: expected", "schedule", "search", *sizes)
        self.assert_refused(2, "--costs FILE", "schedule", "search", "--stages=2")

    def test_costs_are_whole_and_numbers(self) -> None:
        sizes = ["--stages=2", "--microbatches=2"]
        refused = {
            b"0 1 1 1\n": "costs:1: the file ends without costs of stage 1",
            b"": "costs:1: the file ends without costs of stage 0",
            b"0 1 1 1\n\n1 1 1 1\n0 2 2 2\n": "costs:4: stage 0 has its costs in line 1",
            b"0 1 1 1\n2 1 1 1\n": "costs:2: expected 'STAGE F B W' with a stage below 2",
            b"0 1 1 1\n1 1 1\n": "costs:2: expected",
            b"0 1 1 1\n1 1 1 1 1\n": "costs:2: expected",
            b"0 1 1 1\n1 nan 1 1\n": "costs:2: expected",
            b"0 1 1 1\n1 1 inf 1\n": "costs:2: expected",
            b"0 1 1 1\n1 -1 1 1\n": "costs:2: expected",
            b"0 1 1 1\n-1 1 1 1\n": "costs:2: expected",
            b"4294967296 1 1 1\n1 1 1 1\n": "costs:1: expected",
            b"0 1 1 1\n1 1 1 1\0 and more\n": "costs:2: expected text, found a NUL byte",
            b"0 1e308 1e308 1e308\n1 1 1 1\n": "of 1e-100 to 1e+100 where they are not 0",
            b"0 5e-324 1 1\n1 1 1 1\n": "of 1e-100 to 1e+100 where they are not 0",
            b"{\n}": "costs:1: expected traceEvents",
            b"{\n": "costs:2: ",
        }
        with tempfile.TemporaryDirectory() as folder:
            costs = pathlib.Path(folder, "costs")
            for data, message in refused.items():
                costs.write_bytes(data)
                for command in ["simulate", "plot"]:
                    flags = [*sizes, "--costs", str(costs)]
                    self.assert_refused(2, message, command, "1f1b", *flags)
            expected = run("simulate", "1f1b", *sizes, "--json").stdout
            for data in [
                b"0 1 1 1\n1 1 1 1",
                b"\xef\xbb\xbf1 1 1 1\r\n0 1 1 1 # first\r\n",
                b"# caf\xe9\n\n\t0  1.0 1e0 1 \n1 1 1 1\n",
            ]:
                costs.write_bytes(data)
                done = run("simulate", "1f1b", *sizes, "--costs", str(costs), "--json")
                self.assertEqual((done.stdout, done.stderr), (expected, ""))

    def test_a_trace_with_whole_backwards_says_what_is_assumed(self) -> None:
        sizes = ["--stages=2", "--microbatches=3"]
        with tempfile.TemporaryDirectory() as folder:
            whole, split = f"{folder}/whole.json", f"{folder}/split.json"
            run("plot", "1f1b", *sizes, "-o", whole)
            run("plot", "zb-h1", *sizes, "-o", split)
            done = run("simulate", "zb-h1", *sizes, "--costs", whole, "--json")
            self.assertIn("whole.json has whole backwards only; assumed that half", done.stderr)
            again = run("simulate", "zb-h1", *sizes, "--costs", split, "--json")
            self.assertEqual((again.stdout, again.stderr), (done.stdout, ""))
            more = ["--stages=1", "--microbatches=3", "--costs", whole]
            self.assert_refused(2, "the trace has stage 1", "simulate", "1f1b", *more)

    def test_plot_draws_a_trace(self) -> None:
        sizes = ["--stages=4", "--microbatches=6"]
        with tempfile.TemporaryDirectory() as folder:
            trace, picture = f"{folder}/a.json", pathlib.Path(folder, "a.svg")
            run("plot", "zb-h1", *sizes, "-o", trace)
            done = run("plot", trace)
            self.assertIn("72 task runs", done.stdout)
            for rank in range(4):
                self.assertRegex(done.stdout, rf"rank +{rank}  \S+ ")
            self.assertIn("\x1b[34m", run("plot", trace, "--color").stdout)
            self.assertEqual(run("plot", trace, "-o", str(picture)).returncode, 0)
            page = str(pathlib.Path(folder, "a.html"))
            self.assertEqual(run("plot", trace, "-o", page).returncode, 0)
            self.assertTrue(pathlib.Path(page).read_text().startswith("<!doctype html>"))
            root = xml.etree.ElementTree.parse(picture).getroot()
            titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
            self.assertEqual(len(titles), 72)
            self.assertTrue(any(t.startswith("bwd_w_3__5: rank 3") for t in titles))
            again = f"{folder}/again.json"
            run("plot", trace, "-o", again)
            self.assertEqual(run("plot", again).stdout, done.stdout)
            self.assert_refused(2, "ends in .svg", "plot", trace, "-o", f"{folder}/a.png")
            self.assert_refused(2, "a.json:1: expected step and clock_ns", "plot", trace, trace)
            self.assert_refused(2, "expected one schedule", "plot", "zb-h1", trace, *sizes)
            self.assert_refused(2, "gone.json: ", "plot", trace, f"{folder}/gone.json")
            self.assert_refused(2, "found JSON: a trace is for", "verify", trace)
            # Events from other programs: odd names, invalid thread ids, no duration.
            odd = pathlib.Path(folder, "odd.json")
            event = {"ph": "X", "name": "<a & b>\u0001", "tid": 4294967294, "ts": 5, "dur": 0}
            odd.write_text(json.dumps([event]))
            self.assertIn("rank 4294967294", run("plot", str(odd)).stdout)
            run("plot", str(odd), "-o", str(picture))
            xml.etree.ElementTree.parse(picture)
            for bad in [{"tid": -1}, {"tid": "1"}, {"dur": -1}, {"ts": 1e300}, {"dur": 1e16}]:
                odd.write_text(json.dumps({"traceEvents": [event, event | bad]}))
                self.assert_refused(2, "odd.json:1: traceEvents[1]", "plot", str(odd))

    def test_drift_takes_any_ranks(self) -> None:
        events = [
            {"ph": "X", "name": f"fwd_0__{i}", "tid": i * 1000, "ts": i, "dur": 1}
            for i in range(1000)
        ]
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "a.json")
            file.write_text(json.dumps({"traceEvents": events}))
            done = run("drift", str(file), str(file))
        self.assertIn("1000 of 1000 predicted tasks", done.stdout)
        self.assertIn("... and 936 more ranks", done.stdout)
        self.assertLess(len(done.stdout), 10000)

    def test_drift_takes_one_step(self) -> None:
        event = {"ph": "X", "name": "fwd_0__0", "tid": 1, "ts": 0, "dur": 1}
        with tempfile.TemporaryDirectory() as folder:
            one, two = pathlib.Path(folder, "one.json"), pathlib.Path(folder, "two.json")
            one.write_text(json.dumps({"traceEvents": [event, event | {"tid": 0}]}))
            two.write_text(json.dumps({"traceEvents": [event, event | {"ts": 5}]}))
            self.assertIn("1 of 1 predicted", run("drift", str(one), str(one)).stdout)
            reason = "MEASURED: rank 1 runs fwd_0__0 twice; expected the trace of one step"
            self.assert_refused(2, reason, "drift", str(one), str(two))

    def test_groups_and_what_is_missing(self) -> None:
        for words in [["schedule"], ["schedule", "--help"], ["schedule", "-h"]]:
            done = run(*words)
            self.assertEqual(done.returncode, 0)
            for command in ["list", "show", "search"]:
                self.assertIn(f"jaxpp schedule {command}", done.stdout)
        self.assert_refused(2, "expected one of list, show, search", "schedule", "1f1b")
        self.assertEqual(run("plan", "-h").stdout, run("plan", "--help").stdout)
        sizes = ["--stages=2", "--ranks=2", "--microbatches=2", "--costs=x"]
        for i, flag in enumerate(
            ["--stages N", "--ranks N", "--microbatches N", "--costs FILE"]
        ):
            given = sizes[:i] + sizes[i + 1 :]
            message = f"schedule search: expected {flag}\n"
            self.assert_refused(2, message, "schedule", "search", *given)
        self.assert_refused(2, "expected --stages N (and", "verify", "gpipe", sizes[2])
        self.assert_refused(2, "expected --microbatches N (and", "verify", "gpipe", sizes[0])
        self.assert_refused(2, "nor a file; jaxpp schedule list", "verify", "nofile")
        self.assertIn("--message-bytes BYTES    of a", run("simulate", "--help").stdout)

    def test_names_are_any_bytes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = os.fsencode(folder) + b"/caf\xe9<&.csv"
            with open(file, "wb") as out:
                out.write(b"\xef\xbb\xbf0F0,0B0\r\n")
            picture = pathlib.Path(folder, "picture.svg")
            flags = {b"simulate": b"--trace", b"plot": b"-o=" + os.fsencode(picture)}
            for command, flag in flags.items():
                done = subprocess.run(
                    [os.fsencode(COMMAND), command, file, flag],
                    capture_output=True,
                    check=True,
                )
                if command == b"simulate":
                    json.loads(done.stdout.decode())
            xml.etree.ElementTree.parse(picture)

    def test_errors_are_utf8_whatever_a_file_holds(self) -> None:
        texts = ["0F0,0B0".encode("utf-16"), b"\xff\xfe\xfd", "0F0,\U0001f600".encode()[:-1]]
        texts += [bytes(range(256)), b"0F0," + b"\xc3\xa9" * 40]
        with tempfile.TemporaryDirectory() as folder:
            file = os.fsencode(folder) + b"/caf\xe9.csv"
            for text in texts:
                with open(file, "wb") as out:
                    out.write(text)
                for command in ["verify", "plan", "plot"]:
                    done = subprocess.run(
                        [os.fsencode(COMMAND), command.encode(), file],
                        capture_output=True,
                        check=False,
                    )
                    self.assertEqual(done.returncode, 2, (text, done.stderr))
                    self.assertIn(".csv:1", done.stderr.decode())
            os.remove(file)
            done = subprocess.run(
                [os.fsencode(COMMAND), b"verify", file], capture_output=True, check=False
            )
            self.assertIn("caf\ufffd.csv: No such file", done.stderr.decode())

    def test_a_file_without_an_end_is_an_error(self) -> None:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))

        sanitized = b"__asan_init" in pathlib.Path(COMMAND).read_bytes()
        if sanitized or b"__tsan_init" in pathlib.Path(COMMAND).read_bytes():
            return  # sanitizers reserve terabytes of address space
        for command in [["verify"], ["plan"], ["plot"]]:
            done = subprocess.run(
                [COMMAND, *command, "/dev/zero"],
                capture_output=True,
                text=True,
                check=False,
                preexec_fn=limit,
            )
            self.assertIn("/dev/zero: host memory", done.stderr)
            self.assertEqual(done.returncode, 1)

    def test_files_of_torch_are_read(self) -> None:
        for file in pathlib.Path("../shared/torch_csv").glob("*.csv"):
            self.assertEqual(run("verify", str(file)).returncode, 0)

    def test_output_that_nobody_can_read(self) -> None:
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(
                [COMMAND, "--help"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        self.assertEqual(done.returncode, 2)
        self.assertIn("standard output: No space left", done.stderr)
        for action in [signal.SIG_IGN, signal.SIG_DFL]:
            with subprocess.Popen(
                [COMMAND, "plan", graph("mlp4"), "--json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda how=action: signal.signal(signal.SIGPIPE, how),
            ) as process:
                process.stdout.close()
                self.assertEqual(process.stderr.read(), b"")

    def test_the_log_says_what_was_decided(self) -> None:
        silent = run("plan", graph("mlp4"))
        self.assertEqual(silent.stderr, "")
        for level, said in [
            ("info", "schedule 1f1b, 4 stages"),
            ("debug", "after_loop_1_3 on rank 3: 2 of 4"),
        ]:
            done = run("plan", graph("mlp4"), env={"JPP_LOG": level})
            self.assertEqual(done.stdout, silent.stdout)
            self.assertIn(said, done.stderr)
            for line in done.stderr.splitlines():
                self.assertRegex(line, r"^[-\d]+ [\d:.]+ (info|debug) [\w/.]+:\d+: \w")
        done = run("plan", graph("mlp4"), env={"JPP_LOG": "loud"})
        self.assertEqual((done.stdout, done.returncode), (silent.stdout, 0))
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("JPP_LOG=loud: expected error, warning", done.stderr)

    def test_options_are_those_of_the_docs(self) -> None:
        shown = run("options").stdout
        page = (ROOT / "docs/options.md").read_text()
        self.assertIn(f"```text\n{shown}```\n", page, "copy what `jaxpp options` prints")
        for option in json.loads(run("options", "--json").stdout):
            self.assertIn(f"{option['name']}={option['values']}\n", shown)

    def test_misspelt_options_are_named(self) -> None:
        done = run("schedule", "list", env={"JPP_LOGG": "info", "JPP_DUMPP": "x"})
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.stderr.count("\n"), 1)
        for part in ["JPP_LOGG (is JPP_LOG meant?)", "JPP_DUMPP (is JPP_DUMP meant?)"]:
            self.assertIn(part, done.stderr)

    def test_nothing_reads_the_environment_beside_the_table(self) -> None:
        known = {option["name"] for option in json.loads(run("options", "--json").stdout)}
        reads = re.compile(r"\b(?:secure_)?getenv\(|\benviron\b")
        for file in [*(ROOT / "src").rglob("*.[ch]"), *(ROOT / "python").rglob("*.py")]:
            for number, line in enumerate(file.read_text().splitlines(), 1):
                place = f"{file.relative_to(ROOT)}:{number}"
                if file.suffix == ".py" and re.search(r"\bos\.(environ|getenv)\b", line):
                    named = re.findall(r"environ\.(?:setdefault|get)\(\"(\w+)\"", line)
                    allowed = known | LAUNCHERS
                    self.assertTrue(named and {*named} <= allowed, f"{place}: {line}")
                elif file.suffix != ".py" and reads.search(line.split("//")[0]):
                    self.assertEqual(file.name, "option.c", f"{place}: {line}")
        known |= set(re.findall(r"`(JPP_\w+)=", (ROOT / "CONTRIBUTING.md").read_text()))
        for file in [*(ROOT / "tests").rglob("*.[ch]"), *(ROOT / "tests").rglob("*.py")]:
            text = file.read_text()
            reads = r"(?:environ[^\n]*?|getenv\(|test_variable\()\"(JPP_\w+)\""
            unknown = {*re.findall(reads, text)} - known
            self.assertFalse(unknown, f"{file.relative_to(ROOT)}")


if __name__ == "__main__":
    unittest.main()
