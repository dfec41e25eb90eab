"""One vLLM engine: read `job.json` of the folder that the command line names, write `result.json` there.

Job: `engine` (arguments of `LLM`), `steps`, each `prompts` and `max_tokens`, submitted at once; a prompt is a list of
token ids, or an object with `tokens`, `image` and `audio` (paths). `interpret`: the table's rows for the interpreter.
A step with `adapter`, a folder, runs with that LoRA adapter. `balanced`: vLLM's expert balancer, which it has for GPUs
alone, runs here.
Result: for each step a list of `tokens` and `cached` (prompt tokens found in the prefix cache), and `metrics`; of a
balanced engine `placements`, behind each step the logical expert in each place, by rank and layer.
With `refused`, a list of arguments, nothing runs: the result has what each said, and how many tensors it had read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))


def prompt_of(prompt: list[int] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    media: dict[str, Any] = {}
    if "image" in prompt:
        from PIL import Image

        media["image"] = Image.open(prompt["image"])
    if "audio" in prompt:
        import soundfile

        media["audio"] = soundfile.read(prompt["audio"])
    return {"prompt_token_ids": prompt["tokens"], "multi_modal_data": media}


def interpret() -> None:
    """Take this machine for the interpreter: our kernels, as a GPU would run them."""
    from triton_interpreter import repair

    from inkling_kernels.target import Target
    from inkling_portable.vllm_plugin import dispatching

    repair()
    dispatching.current_target = lambda: Target.parse("interpret")


def allow_balancing() -> None:
    """Have vLLM take `enable_eplb` on this machine; `balance_worker` brings the rest of it to the workers."""
    from types import SimpleNamespace

    from vllm.config import parallel

    here = parallel.current_platform
    parallel.current_platform = SimpleNamespace(
        is_cuda_alike=lambda: True, is_xpu=here.is_xpu, is_tpu=here.is_tpu, is_cuda=here.is_cuda,
        use_custom_allreduce=here.use_custom_allreduce,
    )  # fmt: skip


def refusal(arguments: dict[str, Any]) -> str:
    """What `LLM` says to arguments that it cannot serve; weights must not have been asked for."""
    from vllm import LLM
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def reading(*arguments: object) -> None:
        raise RuntimeError("weights were read")

    DefaultModelLoader.load_weights = reading
    try:
        LLM(**arguments)
    except (ValueError, RuntimeError) as error:
        return f"{error} {error.__cause__ or error.__context__ or ''}"
    return "accepted"


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    if job.get("interpret"):
        interpret()
    if job.get("balanced"):
        allow_balancing()
        job["engine"]["worker_extension_cls"] = "balance_worker.Extension"
    if "refused" in job:
        said = [refusal(job["engine"] | arguments) for arguments in job["refused"]]
        (folder / "result.json").write_text(json.dumps({"refused": said}))
        return
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(**job["engine"])
    steps, placements = [], []
    for step in job["steps"]:
        params = SamplingParams(temperature=0, max_tokens=step["max_tokens"])
        adapter = LoRARequest("adapter", 1, step["adapter"]) if "adapter" in step else None
        prompts = [prompt_of(prompt) for prompt in step["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        steps.append([{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs])
        if job.get("balanced"):
            placements.append(llm.collective_rpc("placement"))
    counted = [] if job["engine"].get("disable_log_stats") else llm.get_metrics()
    metrics = {metric.name: metric.value for metric in counted if hasattr(metric, "value")}
    (folder / "result.json").write_text(json.dumps({"steps": steps, "metrics": metrics, "placements": placements}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
