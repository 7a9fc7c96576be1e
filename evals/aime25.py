r"""AIME 2025: evals/aime24.py has it.

python evals/aime25.py --model sdar-8b --temperature 1.0 --samples 8
python evals/aime25.py --completions FILE.jsonl --data test_aime2025.parquet
"""

if __name__ == "__main__":
    import command  # noqa: F401

from evals.aime24 import aime25 as task  # noqa: F401
