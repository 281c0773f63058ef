"""Run SGLang's own recorder over given forward passes, as its server would, and let it dump."""

import contextlib
import json
import os

import stand_ins
import torch
import torch.distributed

folder, request = stand_ins.start()
server = stand_ins.SGLang(folder, request["ep_size"], **request["settings"])
recorders = server.recorder(folder, request["out"])
modes = stand_ins.forward_modes(folder)
from sglang.srt.eplb.expert_location import compute_initial_expert_location_metadata  # noqa: E402 - after the settings
from sglang.srt.eplb.expert_location_dispatch import (  # noqa: E402
    ExpertLocationDispatchInfo,
    topk_ids_logical_to_physical,
)

model = stand_ins.Bag(hf_config=stand_ins.Bag(**request["model"]))
os.environ |= {"MASTER_ADDR": "localhost"}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for rank in range(request["ranks"]):
    where = compute_initial_expert_location_metadata(model, rank)
    resources = stand_ins.sys.modules["sglang.srt.runtime_context"].get_resources()
    resources.expert_location_metadata = where
    recorder = recorders.ExpertDistributionRecorder.init_new(where, rank)
    recorder.start_record()
    for number, batch in enumerate(request["passes"]):
        if rank not in batch.get("ranks", [rank]):
            continue
        described = stand_ins.Bag(
            input_ids=torch.tensor(batch["input_ids"]), positions=torch.tensor(batch["positions"]),
            extend_seq_lens_cpu=batch["lengths"], forward_mode=modes[batch["mode"]],
            extend_num_tokens=len(batch["input_ids"]),
        )  # fmt: skip
        with recorder.with_forward_pass(number, described):
            for layer, ids in batch["experts"].items():
                with recorder.with_current_layer(int(layer)):
                    info = ExpertLocationDispatchInfo.init_new(int(layer))
                    chosen = torch.tensor(ids, dtype=torch.int32)
                    recorder.on_select_experts(topk_ids_logical_to_physical(chosen, info))
    recorder.stop_record()
    recorder.dump_record()
with contextlib.suppress(Exception):
    torch.distributed.destroy_process_group()
print(json.dumps(sorted(os.listdir(request["out"]))))
