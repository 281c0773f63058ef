"""Load expert maps with vllm-ascend's own configuration and `init_eplb_config`, and write one and loads as it does."""

import json
import logging
import types

import stand_ins
import torch

folder, request = stand_ins.start()
torch.Tensor.npu = lambda self: self


def _unused(*_: object, **__: object) -> None:
    raise AssertionError("the map's path was not taken")


stand_ins.module("vllm.logger", logger=logging.getLogger("vllm"))
stand_ins.module("vllm.utils.math_utils", cdiv=lambda a, b: -(-a // b))
stand_ins.module("vllm.model_executor.layers.fused_moe.expert_map_manager", determine_expert_map=_unused)
kinds = types.SimpleNamespace(NONE=0, W8A8=1, W4A8=2, MXFP4=3, MXFP8=4, W4A8MXFP=5)
stand_ins.module("vllm_ascend.quantization.quant_type", QuantType=kinds)
from vllm_ascend.ascend_config import EplbConfig  # noqa: E402
from vllm_ascend.eplb.adaptor.vllm_adaptor import VllmEplbAdaptor  # noqa: E402
from vllm_ascend.eplb.core.eplb_utils import init_eplb_config  # noqa: E402

answers = []
for case in request["cases"]:
    try:
        config = EplbConfig(case["config"]["eplb_config"])
        layers = []
        for layer in range(case["layers"]):
            ranks = [
                init_eplb_config(
                    config,
                    layer,
                    stand_ins.Bag(num_experts=case["experts"], ep_size=case["ep_size"], ep_rank=rank),
                    tp_size=case["tp_size"],
                )
                for rank in range(case["ep_size"])
            ]
            layers.append({
                "local": [rank[1].tolist() for rank in ranks], "physical": [rank[2].tolist() for rank in ranks],
                "copies": ranks[0][3], "all": ranks[0][0].tolist(),
            })  # fmt: skip
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
        continue
    answers.append({"layers": layers})
    if "written" in case:  # as its recording mode writes a map
        adaptor = stand_ins.Bag(rank_id=0)
        maps = torch.tensor([layer["all"] for layer in layers])
        VllmEplbAdaptor._export_tensor_to_file(adaptor, maps, case["written"])
if "loads" in request:  # [ranks][layers][slots], gathered as its updater does
    for name, members in {
        "vllm": {"envs": None}, "vllm.envs": {}, "vllm.distributed.parallel_state": {"get_pp_group": None},
        "vllm.v1.utils": {"record_function_or_nullcontext": None},
        "vllm_ascend.distributed.parallel_state": {"get_dynamic_eplb_group": None},
        "vllm_ascend.eplb.core.eplb_device_transfer_loader": {"D2DExpertWeightLoader": None},
        "vllm_ascend.eplb.core.eplb_worker": {"EplbProcess": None},
    }.items():  # fmt: skip
        stand_ins.module(name, __path__=[], **members)
    stand_ins.module("vllm.logger", logger=logging.getLogger("vllm"))
    from vllm_ascend.eplb.eplb_updator import EplbUpdator

    for stages in (False, True):
        ranks = [torch.tensor(load).unsqueeze(1) for load in request["loads"]]  # [layers, 1, slots]
        if stages:  # counts of each iteration stand before the slots
            ranks = [torch.stack([rank, 2 * rank], dim=2) for rank in ranks]
        updater = stand_ins.Bag(
            adaptor=stand_ins.Bag(get_rank_expert_workload=lambda ranks=ranks: ranks[0].squeeze(1)),
            comm_group=stand_ins.Bag(all_gather=lambda _, dim, ranks=ranks: torch.cat(ranks, dim=dim)),
            multi_stage=stages, shared_dict={},
        )  # fmt: skip
        answers.append(EplbUpdator.compute_and_set_moe_load(updater).tolist())
print(json.dumps(answers))
