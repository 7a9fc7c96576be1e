"""The directory of a run: its log, its saves, and when it stops."""

from data.stream import check_items
from distributed.disk import from_first_rank
from distributed.groups import close_distributed
from run.log import RunLog, Stop, Stopwatch, machine_metrics
from run.saves import Saves, newest_step


class Run:
    """All ranks construct it and make the same calls. start: steps done before, with --resume."""

    def __init__(self, script, args, problems, items, model, optimizer):
        """script: its file. problems: a HeldOut. items: what it trains on; a resumed run must have
        the same.
        """
        task = problems.task.NAME
        self.start = from_first_rank(lambda: newest_step(args.resume))
        self.log = RunLog(script, args, task, self.start)
        scores = self.log.history(f"eval/{task}")
        pair = model, optimizer
        self.saves = Saves(self.log.run_dir, *pair, problems.tokenizer, args, scores, self.start)
        check_items(items, self.log.run_dir / "config.json")
        self.stop, self.args, self.problems = Stop(getattr(args, "dead_steps", 0)), args, problems
        self.say, self.drawn = self.log.say, ""

    def clock(self):
        return Stopwatch()

    def write(self, step, metrics, clock=None):
        """A row of the log, if there are metrics. clock: of a training step"""
        if metrics:
            self.log.write(step, metrics | (clock | machine_metrics() if clock else {}))

    def samples(self, step, trace, rewards, examples, number):
        """Log the first `number` completions of a rollout."""
        self.drawn, tokenizer = trace.draw(0, self.problems.tokenizer), self.problems.tokenizer
        describe = lambda i: trace.describe(i, tokenizer, rewards[i], examples[i])
        self.log.samples(step, map(describe, range(number)))

    def save(self, step, metrics, advantages=None):
        """Save what is due after a step. -> whether the run stops here"""
        stopped = self.stop.is_set(advantages, metrics)
        self.saves.after_step(step, metrics, stopped)
        if stopped:
            self.say(f"step {step}: {self.stop.reason}; go on with --resume {self.log.run_dir}")
        return stopped

    def end(self):
        """Say what was reached, show a completion, close the log and the process group."""
        name = self.problems.task.NAME
        scores = dict(self.log.history(f"test/{name}"))
        if len(scores) > 1:
            before, *_, after = scores.values()
            facts = f"{name} on {len(self.problems.splits['test'])} held-out problems"
            self.say(f"{facts}: {before:.1%} before, {after:.1%} after")
        if self.drawn:
            self.say(self.drawn)
        self.log.end(self.saves.newest, self.stop.status)
        close_distributed(self.stop.status)
