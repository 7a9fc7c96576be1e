"""The directory of a run: its steps, its log, its saves, and when it stops."""

from time import perf_counter

from data.stream import check_items
from distributed.disk import from_first_rank
from distributed.groups import close_distributed
from rollout import sync_engine, warn
from run.log import RunLog, Stop, Stopwatch, machine_metrics
from run.saves import Saves, newest_step


class Run:
    """All ranks construct it and make the same calls. start: steps done before, with --resume."""

    def __init__(self, script, args, problems, model, optimizer):
        """script: its file. problems: a HeldOut, whose `train` a resumed run must have too."""
        task = problems.task.NAME
        self.start = from_first_rank(lambda: newest_step(args.resume, args))
        self.log = RunLog(script, args, task, self.start)
        scores = self.log.history(f"eval/{task}")
        self.saves = Saves(
            self.log.run_dir, model, optimizer, problems.tokenizer, args, scores, self.start
        )
        check_items(problems.train, self.log.run_dir / "config.json")
        self.stop, self.args, self.problems = Stop(getattr(args, "dead_steps", 0)), args, problems
        self.say = self.log.say
        self.drawn, self.stopped = "", False
        problems.keep = self.keep

    def write(self, step, metrics):
        """Log a row; with a test score also some of the answers. Warn of what a check found."""
        if "error/test" in metrics:
            self.log.append("heldout.jsonl", step, self.problems.answers)
        if metrics.keys() & {"error/test", "probe/distinct_frac"}:
            warn(metrics)
        self.log.write(step, metrics)

    def begin(self, engine, model):
        """Hand the weights to the sampler; a new run has its first scores."""
        self.say(self.problems.facts)
        sync_engine(engine, model, whole=True)
        if not self.start:
            self.write(0, self.problems.check(engine, model))
            self.write(0, self.problems.score(engine, "test", "test"))

    def steps(self):
        """Yield the number of every step that is left, from 0 on, and a Stopwatch for its phases.

        Ends at --max-steps, or where the run stops.
        """
        if self.start:
            self.say(f"goes on from step {self.start}")
        for step in range(self.start, self.args.max_steps):
            self.step, self.clock = step, Stopwatch()
            yield step, self.clock
            if self.stopped:
                return

    def validate(self, engine, model):
        """-> the scores of the step on the validation split, {} if none are due"""
        if not self.args.evaluates(self.step + 1):
            return {}
        with self.clock("eval"):
            return self.problems.validate(engine, model)

    def keep(self):
        """Save the state before the update of this step. -> how to go on, as text. Collective."""
        if not self.step:
            return "; it is the first step: nothing to resume"
        self.saves.save_state(self.step)
        return f"; step {self.step} is saved, go on with --resume {self.log.run_dir}"

    def end_step(self, metrics, batch=None):
        """Log the step and the first group of its rollout, a Batch with rewards; save what is due;
        find out whether the run stops here.
        """
        step, advantages = self.step + 1, None
        if batch:
            trace, tokenizer, advantages = batch.trace, self.problems.tokenizer, batch.advantages
            metrics["speed/tokens_per_s"] = batch.num_tokens / self.clock["time/rollout"]
            self.drawn, n = trace.draw(0, tokenizer), trace.settings["num_samples"]
            facts = range(n), [tokenizer] * n, batch.rewards, batch.examples
            self.log.append("samples.jsonl", step, map(trace.describe, *facts))
        self.write(step, metrics | self.clock | machine_metrics())
        self.stopped = self.stop.is_set(advantages, metrics)
        self.saves.after_step(step, metrics, self.stopped)
        if self.stopped:
            self.say(f"step {step}: {self.stop.reason}; go on with --resume {self.log.run_dir}")

    def end(self, engine, model=None):
        """Score the test split with the engine, unless the run was stopped; say what was reached,
        show a completion, close the log and the process group.
        """
        name = self.problems.task.NAME
        if engine and not self.stopped:
            self.write(self.args.max_steps, self.problems.score(engine, "test", "test", model))
        tests = self.log.history(f"test/{name}", "error/test", "problems/test")
        if tests and tests[-1][0]:
            values = [f"{test[1]:.1%} (se {test[2]:.1%})" for test in tests]
            said = " before, ".join(values[:1] + values[1:][-1:])
            self.say(f"{name}: {said} after on {tests[-1][3]:.0f} distinct held-out problems")
        if self.drawn:
            self.say(self.drawn)
        seconds, report = perf_counter() - self.log.started, self.log.run_dir / "report.html"
        self.say(f"{seconds:.0f} s; report: {report}; weights: {self.saves.newest}")
        self.log.close(self.stop.status)
        close_distributed(self.stop.status)
