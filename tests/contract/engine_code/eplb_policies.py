"""Place by load with DeepSeek's EPLB as SGLang carries it, or with vLLM's policy."""

import importlib.util
import json
import sys

import stand_ins
import torch

folder, request = stand_ins.start()


def load(name: str, file: str) -> object:
    """One module by its file, without the package around it."""
    spec = importlib.util.spec_from_file_location(name, folder / file)
    sys.modules[name] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


weight = torch.tensor(request["loads"], dtype=torch.float64)
settings = {"num_replicas": request["slots"], "num_groups": request["groups"], "num_nodes": request["nodes"]}
if request["policy"] == "deepseek":
    module = load("deepseek", "sglang/srt/eplb/eplb_algorithms/deepseek.py")
    hierarchical = request["groups"] % request["nodes"] == 0
    found, _, _ = module.rebalance_experts(weight, num_gpus=request["ranks"], enable_hierarchical=hierarchical,
                                           **settings)  # fmt: skip
else:
    stand_ins.module("policy").__path__ = []
    load("policy.abstract", "vllm/distributed/eplb/policy/abstract.py")
    policy = load("policy.default", "vllm/distributed/eplb/policy/default.py").DefaultEplbPolicy
    found = policy.rebalance_experts(weight, num_ranks=request["ranks"], **settings)
print(json.dumps(found.tolist()))
