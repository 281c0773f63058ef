"""Runs jobs in vLLM, no test itself: `vllm_run.py JOBS.json RESULTS.json`, in an environment that has vLLM.

A job: {"model", "config" (a file for COTERIE_CONFIG, or null), "prompts" (token ids), "tokens", "engine" (arguments)}.
A result: {"tokens", "logprobs", "report" (of every rank)} or {"error", "message"}. One engine after the other.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

ENGINE = {
    "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256,
    "max_num_seqs": 8, "disable_log_stats": True,
}  # fmt: skip


def run(job: dict[str, Any]) -> dict[str, Any]:
    import vllm

    os.environ["COTERIE_CONFIG"] = job["config"] or ""
    engine = vllm.LLM(job["model"], **{**ENGINE, **job.get("engine", {})})
    try:
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        greedy = vllm.SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=1)
        made = [output.outputs[0] for output in engine.generate(prompts, greedy, use_tqdm=False)]
        chosen = [
            [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)] for each in made
        ]
        report = engine.collective_rpc("coterie_report") if job["config"] else []
        return {"tokens": [list(each.token_ids) for each in made], "logprobs": chosen, "report": report}
    finally:
        engine.llm_engine.engine_core.shutdown()


def main(jobs: Path, results: Path) -> None:
    done = []
    for job in json.loads(jobs.read_text()):
        try:
            done.append(run(job))
        except Exception as error:  # the test says which are expected
            done.append({"error": type(error).__name__, "message": str(error)})
        gc.collect()
        results.write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
