"""vLLM 0.32: where the plugin hooks in, and what it is told there. Everything that knows vLLM's insides is here.

The worker is wrapped: once its model is loaded, each MoE layer's router gets the session's answer in place of its own,
after vLLM's own recorder has seen what the router chose. A step is what `execute_model` runs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from coterie.errors import CheckpointError, ConfigError, CoterieError
from coterie.families import spec_from_config
from coterie.placement.numbering import EXPERT_ORDER_KEY
from coterie.spec import MoESpec
from coterie.vllm_plugin.config import configured
from coterie.vllm_plugin.engine import Engine
from coterie.vllm_plugin.recording import RequestRows
from coterie.vllm_plugin.session import Session

_log = logging.getLogger("vllm.coterie")
_ATTRIBUTE = "_coterie_session"  # of a worker


def install() -> None:
    """Wrap the worker's methods, once in a process; `uninstall` takes it back."""
    if hasattr(Worker, "coterie_report"):
        return
    for name, wrap in (("load_model", _loading), ("execute_model", _stepping), ("shutdown", _ending)):
        setattr(Worker, name, wrap(getattr(Worker, name)))
    Worker.coterie_report = _report


def uninstall() -> None:
    """Leave vLLM as it was, for workers to come; those that have loaded a model keep their routers."""
    if not hasattr(Worker, "coterie_report"):
        return
    for name in ("load_model", "execute_model", "shutdown"):
        setattr(Worker, name, getattr(Worker, name).__wrapped__)
    del Worker.coterie_report


def _loading(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_model(self: Any, **options: Any) -> None:
        load(self, **options)
        try:
            session = _begin(self)
        except CoterieError as error:
            _log.error("coterie: %s", error)
            raise
        setattr(self, _ATTRIBUTE, session)

    return load_model


def _stepping(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        session: Session | None = getattr(self, _ATTRIBUTE, None)
        if session is None:
            return execute(self, scheduler_output)
        with session.step(scheduler_output.total_num_scheduled_tokens):
            result = execute(self, scheduler_output)
            finished = tuple(scheduler_output.finished_req_ids)
            session.end_step(lambda: _rows(self.model_runner, scheduler_output), finished)
        return result

    return execute_model


def _ending(end: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(end)
    def shutdown(self: Any) -> None:
        session: Session | None = getattr(self, _ATTRIBUTE, None)
        try:
            if session is not None:
                session.close()
        finally:
            end(self)

    return shutdown


def _report(self: Any) -> dict[str, Any] | None:
    """For `collective_rpc("coterie_report")`: write the files, and what they say so far; None when inactive."""
    session: Session | None = getattr(self, _ATTRIBUTE, None)
    return None if session is None else session.flush()


def _begin(worker: Any) -> Session | None:
    """The session of a worker whose model is loaded; None when nothing is configured."""
    config = configured()
    if config is None:
        return None
    model = worker.model_runner.get_model()
    layers = sorted((each for each in model.modules() if isinstance(each, MoERunner)), key=lambda each: each.layer_id)
    _refuse_engine(worker.vllm_config, config.record is not None)
    for layer in layers:
        _refuse_layer(layer)
    engine = _engine(worker, layers)
    session = Session(config, engine, worker.device)
    for index, layer in enumerate(layers):
        layer.router.select_experts = _choosing(layer.router.select_experts, session, index)
        if current_platform.is_cpu():  # there Dynamo would trace the hook too; other platforms call this op anyway
            ops = torch.ops.vllm
            layer._forward_entry = ops.moe_forward if layer.shared_experts is None else ops.moe_forward_shared
    (_log.info if engine.rank == 0 else _log.debug)("coterie: %s", session.describe())
    return session


def _choosing(select: Callable[..., tuple[Any, Any]], session: Session, layer: int) -> Callable[..., tuple[Any, Any]]:
    @functools.wraps(select)
    def select_experts(*arguments: Any, **named: Any) -> tuple[Any, Any]:
        weight_TK, ids_TK = select(*arguments, **named)
        return session.route(layer, weight_TK, ids_TK)

    return select_experts


def _refuse_engine(config: Any, records: bool) -> None:
    """Refuse ways to serve in which ids, rows or layers are not what the plugin takes them for."""
    parallel = config.parallel_config
    reasons = {
        "with EPLB, which moves experts while it serves; leave --enable-eplb out": parallel.enable_eplb,
        "with pipeline parallelism; leave --pipeline-parallel-size at 1": parallel.pipeline_parallel_size > 1,
        "with context parallelism of prefill; leave it out": parallel.prefill_context_parallel_size > 1,
        "with dual batch overlap, which splits a step's rows; leave --enable-dbo out": parallel.use_ubatching,
        f"with --expert-placement-strategy {parallel.expert_placement_strategy}; use linear": (
            parallel.enable_expert_parallel and parallel.expert_placement_strategy != "linear"
        ),
        "what speculative decoding only drafts; record without it": records and config.speculative_config is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"the plugin cannot {'record' if reason.startswith('what') else 'work'} {reason}")


def _refuse_layer(layer: Any) -> None:
    if layer.is_monolithic:
        kernel = type(layer._quant_method).__name__
        raise ConfigError(
            f"the kernel of {layer.layer_name} ({kernel}) chooses experts inside itself, where they cannot be pruned "
            "or recorded; choose another --moe-backend, e.g. triton"
        )
    shared = layer.expert_map_manager.num_fused_shared_experts
    if shared or isinstance(layer.router, ZeroExpertRouter):
        raise ConfigError(f"{layer.layer_name} routes to shared or zero experts too, which the plugin does not know")


def _engine(worker: Any, layers: list[Any]) -> Engine:
    """What the session needs to know."""
    config = worker.vllm_config
    parallel, spec = config.parallel_config, _spec(config.model_config, layers)
    moe = layers[0].moe_config.moe_parallel_config
    renormalises = {getattr(layer.router, "renormalize", None) for layer in layers}
    return Engine(
        version=vllm.__version__,
        spec=spec,
        expert_order=getattr(config.model_config.hf_config, EXPERT_ORDER_KEY, None),
        rank=parallel.data_parallel_index * parallel.world_size + worker.rank,
        expert_ranks=moe.ep_size if moe.use_ep else 1,
        expert_rank=moe.ep_rank if moe.use_ep else 0,
        shards=moe.sp_size,
        shard=worker.rank % parallel.tensor_parallel_size if moe.sp_size > 1 else 0,
        attention_ranks=parallel.tensor_parallel_size,
        all_to_all=bool(moe.use_all2all_kernels),
        backend=moe.all2all_backend,
        gathers_first=bool(layers[0].do_naive_dispatch_combine),
        renormalises=renormalises.pop() if len(renormalises) == 1 else None,
        max_tokens=config.scheduler_config.max_num_batched_tokens,
    )


def _spec(model: Any, layers: list[Any]) -> MoESpec:
    """The model's shape by its configuration, which must be what the engine made of it."""
    if not layers:
        raise CheckpointError(f"{model.model} has no MoE layers that vLLM {vllm.__version__} runs by its MoE runner")
    spec = spec_from_config(model.hf_text_config.to_dict(), model.model.rstrip("/").rpartition("/")[2])
    moe = layers[0].moe_config
    found = (tuple(layer.layer_id for layer in layers), moe.num_logical_experts, moe.experts_per_token)
    if found != (spec.layer_ids, spec.num_experts, spec.top_k):
        raise CheckpointError(
            f"{spec.model}'s config tells of {spec.num_layers} MoE layers of {spec.num_experts} experts, "
            f"top-{spec.top_k}; vLLM runs {len(layers)} of {found[1]}, top-{found[2]}; the plugin does not know "
            "this model"
        )
    return spec


def _rows(runner: Any, scheduled: Any) -> list[RequestRows]:
    """Whose tokens the rows of the step are that has just run."""
    state = getattr(runner, "execute_model_state", None)
    batch = getattr(state, "input_batch", None) or runner.input_batch  # of model runner V2, else V1
    cached = scheduled.scheduled_cached_reqs
    start = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    start.update({new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs})
    prompts = _prompt_lengths(runner, scheduled)
    counts = scheduled.num_scheduled_tokens
    return [RequestRows(name, start[name], counts[name], prompts[name]) for name in batch.req_ids if name in counts]


def _prompt_lengths(runner: Any, scheduled: Any) -> dict[str, int]:
    """Tokens of each request's prompt, kept beside the runner while the request is under way."""
    held: dict[str, int] = runner.__dict__.setdefault("_coterie_prompts", {})
    for name in scheduled.finished_req_ids:
        held.pop(name, None)
    for new in scheduled.scheduled_new_reqs:
        held[new.req_id] = len(new.prompt_token_ids or ())
    return held
