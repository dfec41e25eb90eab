"""One vLLM engine: read `job.json` of the folder that the command line names, write `result.json` there.

Job: `engine` (arguments of `LLM`), `steps`, each `prompts` and `max_tokens`, submitted at once; a prompt is a list of
token ids, or an object with `tokens`, `image` and `audio` (paths). `interpret`: the table's rows for the interpreter.
`own`: vLLM's own Inkling, made runnable, its router's choices to be written to the file named. `follow`: that file, for
this package's router to follow in ties; the result has the `ties`. `drafts`: the file for the logits of all drafts.
`balanced`: vLLM's expert balancer, which it has for GPUs alone, runs here. A step with `adapter`, a folder, runs with
that LoRA adapter.
Result: for each step a list of `tokens` and `cached` (prompt tokens found in the prefix cache), and `metrics`; of a
balanced engine `placements`, behind each step the logical expert in each place, by rank and layer. A step with `scores`
also gets the log-probabilities of the whole vocabulary, in the file that it names: `[tokens, vocabulary]` of the prompt
behind its first token and of what was generated, one tensor a request under its number. A step with `top`, a count,
gets those of the likeliest tokens instead, as `top` of its outputs: by token, for each one generated.
With `refused`, a list of arguments, nothing runs: the result has what each said, and how many tensors it had read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import comparison


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


def scores(output: Any) -> torch.Tensor:
    """Log-probabilities `[prompt - 1 + generated, vocabulary]` of a request that asked for all of them."""
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def told(output: Any, top: bool) -> dict[str, Any]:
    completion = output.outputs[0]
    found: dict[str, Any] = {"tokens": list(completion.token_ids), "cached": output.num_cached_tokens}
    if top:
        found["top"] = [{token: each.logprob for token, each in row.items()} for row in completion.logprobs]
    return found


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
    recorder = follower = None
    if "own" in job:
        from own_inkling import make_runnable

        recorder = comparison.Recorder(make_runnable())
    if "follow" in job:
        follower = comparison.Follower(job["follow"])
    drafts = comparison.Drafts() if "drafts" in job else None
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
    if drafts is not None:
        drafts.logits.clear()  # those of vLLM's rehearsal
    steps, placements = [], []
    for step in job["steps"]:
        everything = -1 if "scores" in step else None
        params = SamplingParams(
            temperature=0, max_tokens=step["max_tokens"], logprobs=step.get("top", everything),
            prompt_logprobs=everything,
        )  # fmt: skip
        adapter = LoRARequest("adapter", 1, step["adapter"]) if "adapter" in step else None
        prompts = [prompt_of(prompt) for prompt in step["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
        if "scores" in step:
            save_file({str(i): scores(output) for i, output in enumerate(outputs)}, step["scores"])
        steps.append([told(output, "top" in step) for output in outputs])
        if job.get("balanced"):
            placements.append(llm.collective_rpc("placement"))
    counted = [] if job["engine"].get("disable_log_stats") else llm.get_metrics()
    metrics = {metric.name: metric.value for metric in counted if hasattr(metric, "value")}
    if recorder is not None:
        recorder.save(job["own"])
    if drafts is not None:
        drafts.save(job["drafts"])
    ties = [] if follower is None else follower.ties
    result = {"steps": steps, "metrics": metrics, "ties": ties, "placements": placements}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
