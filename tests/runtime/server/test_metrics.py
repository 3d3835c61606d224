"""Metrics as Prometheus reads them: each once, with its type; and vLLM's names, all if asked for, those that routers
need always."""

from __future__ import annotations

import re

from icc.runtime.server.api.metrics import Metrics
from icc.runtime.server.engine.engine_pool import EnginePool
from icc.runtime.server.engine.messages import AdapterStats, Ready, Report, Stats

ROUTED_BY = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

# the metrics of vLLM v1 that this server has, too, and their types
VLLM = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
    "num_preemptions_total": "counter", "prompt_tokens_total": "counter", "generation_tokens_total": "counter",
    "prefix_cache_queries_total": "counter", "prefix_cache_hits_total": "counter", "request_success_total": "counter",
    "iteration_tokens_total": "histogram", "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram", "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram", "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram", "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram", "request_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram", "request_params_n": "histogram",
}  # fmt: skip


def families(text: str, prefix: str) -> dict[str, str]:
    """The types of metrics by name; a family that occurs twice is an error."""
    found = re.findall(rf"^# TYPE {prefix}(\S+) (\S+)$", text, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_every_metric_is_there_once_and_named_by_its_kind() -> None:
    text = Metrics("m").exposition().decode()
    assert "_created" not in text and len(text.splitlines()) < 400
    kinds = families(text, "icc:")
    assert kinds["engine_restarts_total"] == "counter" and kinds["iteration_tokens"] == "histogram"
    for name, kind in kinds.items():  # as promtool requires
        assert (kind == "counter") == name.endswith("_total"), name


def test_what_routers_read_stands_under_vllms_names() -> None:
    """The model server protocol of the Gateway API inference extension, with two replicas, one of which is ready."""
    metrics, pool = Metrics("m"), EnginePool([[], []])
    metrics.attach(pool)
    assert families(metrics.exposition().decode(), "vllm:") == dict.fromkeys(ROUTED_BY, "gauge")
    pool.replicas[0].facts = Ready(300, 8, 0.1, (16, 250))
    pool.replicas[0].stats = Stats(running=3, waiting=2, blocks_used=75)
    pool.replicas[0].adapters = AdapterStats(4, ["sql"], ["chat"])
    text = metrics.exposition().decode()
    assert families(text, "vllm:") == dict.fromkeys((*ROUTED_BY, "cache_config_info", "lora_requests_info"), "gauge")
    size = 'block_size="16",engine="0",model_name="m",num_gpu_blocks="250"'
    for line in (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
        f"vllm:cache_config_info{{{size}}} 1.0",
    ):
        assert line in text.splitlines(), text
    pool.replicas[1].facts = Ready(300, 8, 0.1, (16, 250))
    assert 'num_gpu_blocks="500"' in metrics.exposition().decode()


def test_vllms_names_are_those_that_vllm_has() -> None:
    text = Metrics("m", vllm=True).exposition().decode()
    assert families(text, "vllm:") == VLLM
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in text


def test_counters_go_on_when_the_engine_is_started_again() -> None:
    metrics = Metrics("m")
    metrics.attach(EnginePool([[]]))
    for steps in (3, 5, 1):  # the last one is from a new process
        metrics.step(0, Report([], Stats(steps=steps, output_tokens=10 * steps), step_tokens=4, step_s=0.01))
    text = metrics.exposition().decode()
    assert 'icc:engine_steps_total{model_name="m"} 6.0' in text
    assert 'icc:generation_tokens_total{model_name="m"} 60.0' in text
    assert 'icc:iteration_tokens_count{model_name="m"} 3.0' in text


def test_replicas_are_counted_together_and_each_alone() -> None:
    metrics, pool = Metrics("m"), EnginePool([[], []])
    metrics.attach(pool)
    for replica, counts in ((0, (3, 2)), (1, (4, 5))):  # replica 0 has a new process
        for steps in counts:
            pool.replicas[replica].observe(Report([], Stats(steps=steps)))
    text = metrics.exposition().decode()
    assert 'icc:engine_steps_total{model_name="m"} 10.0' in text
    for replica, steps in ((0, 5.0), (1, 5.0)):
        assert f'icc:replica_engine_steps_total{{model_name="m",replica="{replica}"}} {steps}' in text
    kinds = families(text, "icc:")
    assert kinds["replica_engine_ready"] == "gauge" and kinds["replica_engine_steps_total"] == "counter"


def test_an_engine_that_embeds_has_no_metrics_of_sampling() -> None:
    kinds = families(Metrics("m", generates=False).exposition().decode(), "icc:")
    assert "time_to_first_token_seconds" not in kinds and "e2e_request_latency_seconds" in kinds
