"""lm-eval: a task of log-likelihoods by /v1/completions, beside transformers itself on the same weights."""

import os

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

FOLDER = os.environ["MODEL_FOLDER"]
CLOSE = 0.02  # natural logarithms; both compute in float32


def likelihoods(model: str, arguments: str) -> tuple[float, list[tuple[float, bool]]]:
    """Accuracy, and of every choice of every question its log-likelihood and whether it is the likeliest text."""
    tasks = TaskManager(include_path=os.path.dirname(__file__))
    found = simple_evaluate(model, arguments, tasks=["capitals_likely"], task_manager=tasks, log_samples=True)
    answers = [one for sample in found["samples"]["capitals_likely"] for one in sample["filtered_resps"]]
    return found["results"]["capitals_likely"]["acc,none"], [(float(one[0]), bool(one[1])) for one in answers]


served = f"model={os.environ['MODEL']},base_url={os.environ['OPENAI']}/completions,tokenizer={FOLDER},num_concurrent=2"
ours = likelihoods("local-completions", served)
theirs = likelihoods("hf", f"pretrained={FOLDER},dtype=float32,device=cpu")
furthest = max(abs(a - b) for (a, _), (b, _) in zip(ours[1], theirs[1], strict=True))
assert ours[0] == theirs[0], (ours[0], theirs[0])
assert [likeliest for _, likeliest in ours[1]] == [likeliest for _, likeliest in theirs[1]]
assert furthest < CLOSE, furthest
print(f"acc {ours[0]:.3f} both; {len(ours[1])} log-likelihoods, at most {furthest:.1e} apart")
