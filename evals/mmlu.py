"""MMLU: 57 subjects, four options, 14,042 questions (validation 1,531).

    python evals/mmlu.py --model llada-8b  cais/mmlu, test
    python evals/mmlu.py --model sdar-8b --data cot --gen-length 4096 --denoising-steps 4
    python evals/mmlu.py --completions FILE.jsonl --data rows.jsonl@cot

There are two prompts. The default shows five examples of the subject (dev rows 0-4) as chat turns
and expects a letter: OpenCompass' mmlu_gen_a484b3, which DARE uses for LLaDA, Dream (128 tokens)
and LLaDA2 (256). Its last question says Q and A, its examples Question and Answer. "cot" (--data
cot) is simple-evals' prompt without examples, used in DARE's lmdeploy runs of SDAR (4,096 tokens;
its transformers runs use the default with Question and Answer throughout). result.json has the mean
over all questions, as lm-eval weights them, and macro_accuracy, the plain mean of the 57 subjects,
which OpenCompass and DARE's table print. The worked examples of a file are the hub's. DARE's table:
LLaDA-8B-Instruct 65.24, Dream-7B-Instruct 66.83, SDAR-8B-Chat 77.23, LLaDA2.0-mini 72.54. Always
answering A scores 22.95 %, always D 26.89 %.
"""

if __name__ == "__main__":
    import command  # noqa: F401

from evals.choices import LETTERS, Choices, Form

HINT = (
    "There is a single choice question about {topic}. Answer the question by replying A, B, C or D."
)
COT = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'ANSWER: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering."
)


class Mmlu(Choices):
    HUB, parts = "cais/mmlu", ("all",)
    needs = "question, subject, four choices and answer (index of one)"
    PRESETS = {"cot": "cot"}
    heading = "The following are multiple choice questions (with answers) about {topic}.\n\n"
    forms = {
        "": Form(  # OpenCompass mmlu_gen_a484b3
            HINT + "\nQ: {question}\n{options}\nA: ",
            shot=(HINT + "\nQuestion: {question}\n{options}\nAnswer: ", "{gold}\n"),
        ),
        "cot": Form(  # simple-evals
            COT + "\n\n{question}\n\n{options}",
            option="{}) {}",
            answer="ANSWER: {gold}",
        ),
    }

    def read(self, row):
        return {
            "question": row["question"],
            "options": row["choices"],
            "gold": LETTERS[row["answer"]],
            "subject": row["subject"],
        }


task = Mmlu()
