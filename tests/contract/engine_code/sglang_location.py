"""Load expert location files with SGLang's own `compute_initial_expert_location_metadata`, on every rank."""

import json

import stand_ins

folder, request = stand_ins.start()
model = stand_ins.Bag(hf_config=stand_ins.Bag(**request["model"]))
answers = []
for case in request["cases"]:
    server = stand_ins.SGLang(folder, case["ep_size"], **case["settings"])
    server.parallel.nnodes = case.get("nodes", 1)
    import sglang.srt.eplb.expert_location as location

    for name in ("get_device", "get_exec", "get_parallel", "get_resources"):  # it took the first case's at its import
        setattr(location, name, getattr(stand_ins.sys.modules["sglang.srt.runtime_context"], name))
    try:
        ranks = [location.compute_initial_expert_location_metadata(model, rank) for rank in range(case["ep_size"])]
    except Exception as error:  # what stops the server is an answer too
        answers.append({"error": f"{type(error).__name__}: {error}"})
        continue
    dispatch = [rank.logical_to_rank_dispatch_physical_map for rank in ranks]
    answers.append({
        "map": ranks[0].physical_to_logical_map.tolist(),
        "slots_per_rank": ranks[0].num_local_physical_experts,
        "num_experts": ranks[0].num_logical_experts,
        "copies": [[[slot for slot in slots if slot >= 0] for slots in layer]
                   for layer in ranks[0].logical_to_all_physical_map.tolist()],
        "dispatch": [None if each is None else each.tolist() for each in dispatch],
    })  # fmt: skip
print(json.dumps(answers))
