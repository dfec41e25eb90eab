"""Registration: what it costs, what it touches, when it leaves vLLM as it is; and the caches that vLLM is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
from vllm.plugins import load_plugins_by_group
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

try:
    from vllm.v1.core.kv_cache_planning import unify_kv_cache_spec_page_size
except ImportError:  # up to vLLM 0.32
    from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size

from inkling_kernels.target import Target
from inkling_portable.config import preset
from inkling_portable.parallel import Rank
from inkling_portable.vllm_plugin import dispatching, model, options, plugin, policy, state
from inkling_portable.vllm_plugin.backend import PortableBackend, PortableMetadata, PortableMetadataBuilder
from inkling_portable.vllm_plugin.state import ConvolutionState, KeysAndValues, LayerCaches

ROOT = Path(__file__).resolve().parent.parent.parent

OURS, THEIRS = "inkling_portable.vllm_plugin.dispatching", "vllm.models.inkling"
BACKEND = "inkling_portable.vllm_plugin.backend.PortableBackend"
NAMES = ("InklingForCausalLM", "InklingForConditionalGeneration", "InklingMTPModel")

# A fresh process of vLLM as it is when plug-ins are loaded, and what registering costs and touches there.
COST = """
import json, sys, time
from vllm.engine.arg_utils import EngineArgs
import torch
from inkling_portable.vllm_plugin.plugin import register
seconds = []
for _ in range(2):
    start = time.perf_counter()
    register()
    seconds.append(time.perf_counter() - start)
model = "inkling_portable.model" in sys.modules
print(json.dumps({"seconds": max(seconds), "cuda": torch.cuda.is_initialized(), "model": model}))
"""


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM without the plug-in, before the test and behind it."""
    monkeypatch.delenv(policy.VARIABLE, raising=False)
    models = {name: _LazyRegisteredModel(THEIRS, name) for name in NAMES}
    monkeypatch.setattr(ModelRegistry, "models", ModelRegistry.models | models)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})


def registered() -> bool:
    """Whether the plug-in answers for Inkling; it never answers for anything else."""
    modules = {ModelRegistry.models[name].module_name for name in NAMES}
    assert modules in ({OURS}, {THEIRS})
    assert ModelRegistry.models["LlamaForCausalLM"].module_name.startswith("vllm.")
    custom = AttentionBackendEnum.CUSTOM
    assert (custom.is_overridden() and custom.get_path() == BACKEND) == (modules == {OURS})
    return modules == {OURS}


def test_registration_is_cheap_and_touches_no_device(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", COST]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["seconds"] < 0.2
    assert not found["cuda"]
    assert not found["model"], "the model is imported when it is built, not before"


@pytest.mark.usefixtures("clean")
def test_vllm_finds_the_entry_point_unless_it_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "inkling_cpu_platform")
    assert "inkling_portable" not in load_plugins_by_group("vllm.general_plugins")
    assert not registered()
    for allowed in ("inkling_cpu_platform,inkling_portable", None):
        if allowed is None:
            monkeypatch.delenv("VLLM_PLUGINS")
        else:
            monkeypatch.setenv("VLLM_PLUGINS", allowed)
        load_plugins_by_group("vllm.general_plugins")["inkling_portable"]()
        assert registered()


@pytest.mark.usefixtures("clean")
def test_vllm_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Switched off; another version; and the name CUSTOM taken by another plug-in. Each is said in the log."""
    monkeypatch.setenv(policy.VARIABLE, "off")
    plugin.register()
    assert not registered()
    assert said.pop() == "INKLING_PORTABLE_VLLM=off: vLLM is left as it is"
    monkeypatch.delenv(policy.VARIABLE)
    with monkeypatch.context() as older:
        older.setattr(vllm, "__version__", "0.28.0")
        plugin.register()
    assert not registered()
    assert "vLLM 0.28.0 is outside the versions that inkling-portable works with, 0.29 to 0.33" in said.pop()
    registry.register_backend(AttentionBackendEnum.CUSTOM, "another.plugin.Backend")
    plugin.register()
    assert not registered()
    assert "another.plugin.Backend of another plug-in" in said.pop()
    assert AttentionBackendEnum.CUSTOM.get_path() == "another.plugin.Backend"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plug-in logs from here on."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(plugin.logger, level, lambda text, *values: lines.append(text % values))
    return lines


def test_vllm_finds_tritons_package_with_this_repository_on_the_path(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """`triton_kernels`, of which vLLM takes four modules, is its own copy: the folder of this name is not it."""
    ask = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from vllm.utils.import_utils import has_triton_kernels\nassert has_triton_kernels()\n"
        "import triton_kernels.swiglu, triton_kernels.matmul_ogs, triton_kernels.tensor, triton_kernels.routing\n"
        "print(triton_kernels.__file__)"
    )
    command = [sys.executable, "-P", "-c", ask]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert not ran.stdout.splitlines()[-1].startswith(str(ROOT / "triton_kernels"))


# -- the choice when a model is built --------------------------------------------------------------------------------


def config(**changes: Any) -> Any:
    """The parts of a `VllmConfig` that the plug-in reads."""
    fields: dict[str, Any] = {
        "block_size": 16, "cache_dtype": "auto", "backend": None, "backend_per_kind": {}, "moe_backend": "auto",
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_eplb": False,
        "eplb_config": types.SimpleNamespace(num_redundant_experts=0), "enable_elastic_ep": False, "quantization": None,
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "enable_expert_parallel": False,
        "speculative": None, "dtype": torch.bfloat16, "max_model_len": 512,
    }  # fmt: skip
    space = types.SimpleNamespace(**(fields | changes))
    return types.SimpleNamespace(
        cache_config=space, attention_config=space, kernel_config=space, parallel_config=space, model_config=space,
        speculative_config=space.speculative, compilation_config=types.SimpleNamespace(static_forward_context={}),
    )  # fmt: skip


@pytest.mark.parametrize(("arch", "ours"), [("sm80", True), ("sm90", False), ("gfx950", False), ("gfx942", True)])
def test_the_class_becomes_the_model_of_the_policy(arch: str, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "current_target", lambda: Target.parse(arch))
    ops = types.SimpleNamespace(choices={})
    build = types.SimpleNamespace(ops=ops, format="bf16")
    monkeypatch.setattr(options.Build, "of", lambda *arguments: build)
    monkeypatch.setattr(model, "PortableForCausalLM", lambda **arguments: "ours")
    made = dispatching.InklingForCausalLM.__new__(dispatching.InklingForCausalLM, vllm_config=config())
    assert made == "ours" if ours else isinstance(made, dispatching.InklingForCausalLM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, r"--dtype is float16, .* use bfloat16 \(float16 overflows in Inkling\)"),
        ({"quantization": "fp8"}, "--quantization is fp8, .* leave the flag out: the checkpoint's experts are in bf16"),
        ({"quantization_config": {"moe": {}}}, "--quantization-config is given, .* use what the checkpoint holds"),
        ({"cache_dtype": "int8"}, "--kv-cache-dtype is int8, .* use auto or fp8"),
        ({"block_size": 24}, "--block-size is 24, .* use a multiple of 16"),
        (
            {"enable_eplb": True, "tensor_parallel_size": 6},
            r"--eplb-config\.num_redundant_experts is 0, .* use 2, so that 6 ranks hold equally many of 256 experts",
        ),
        ({"enable_eplb": True, "enable_elastic_ep": True}, "--enable-elastic-ep is True, .* use --enable-eplb without"),
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "--data-parallel-size is 2"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size is 2, .* use --tensor-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size is 2, .* use --tensor-parallel-size"),
        (
            {"speculative": types.SimpleNamespace(method="mtp", num_speculative_tokens=9)},
            "num_speculative_tokens is 9, .* use at most 8, the model's multi-token-prediction depths",
        ),
        (
            {
                "speculative": types.SimpleNamespace(method="mtp", num_speculative_tokens=1),
                "pipeline_parallel_size": 2,
            },
            "--pipeline-parallel-size with MTP drafts is 2",
        ),
    ],
)
def test_what_the_model_does_not_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    given = config(**changes)
    options.check(config(), config().model_config, preset("inkling"))
    with pytest.raises(ValueError, match=message):
        options.check(given, given.model_config, preset("inkling"))


def test_the_moe_backend_is_a_row_of_the_table() -> None:
    assert options.forced_experts("auto") == {}
    assert options.forced_experts("aiter") == {"moe_experts": "aiter"}
    with pytest.raises(ValueError, match=r"--moe-backend is marlin, .* use auto or one of .*aiter, .*triton"):
        options.forced_experts("marlin")


@pytest.mark.parametrize("block", [16, 32, 48, 64, 128, 256, 512])
def test_the_table_is_asked_for_pages_that_divide_the_block(block: int) -> None:
    page = options.facts_of(config(block_size=block), preset("inkling"), None, "bf16").page_size
    assert block % page == 0
    assert page in PortableBackend.get_supported_kernel_block_sizes()


# -- what vLLM allocates ---------------------------------------------------------------------------------------------


def caches(name: str, size: int, layer: int, vllm_config: Any) -> LayerCaches:
    whole = preset(name)
    spec = Rank(size, 0).config(whole).layer(layer)
    own = whole.hidden_size // size
    return LayerCaches(
        spec,
        layer,
        KeysAndValues(spec, f"model.layers.{layer}.attn", vllm_config),
        ConvolutionState(
            (2 * spec.kv_size, own, own), 4, torch.bfloat16, f"model.layers.{layer}.conv_state", vllm_config
        ),
    )


@pytest.fixture(autouse=True)
def _one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "kv_cache_dtype_str_to_dtype", lambda name, model: torch.bfloat16)


@pytest.mark.parametrize("name", ["inkling", "inkling-small"])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("block", [16, 64, 256])
def test_pages_of_every_kind_can_be_made_equal(name: str, size: int, block: int) -> None:
    """vLLM enlarges blocks until all pages are of one size, which needs sizes that divide each other."""
    vllm_config = config(block_size=block)
    layers = [caches(name, size, layer, vllm_config) for layer in (0, 5)]
    specs = {held.prefix: held.get_kv_cache_spec(vllm_config) for one in layers for held in (one.kv, one.conv)}
    equal = unify_kv_cache_spec_page_size(specs)
    assert len({spec.page_size_bytes for spec in equal.values()}) == 1
    assert all(getattr(spec, "page_size_padded", None) is None for spec in equal.values())
    for prefix, spec in equal.items():
        assert spec.block_size % specs[prefix].block_size == 0


def fp8_caches() -> dict[int, LayerCaches]:
    """Two layers of a model of five and its first prediction depth, all but the second layer's in fp8."""
    vllm_config = config()
    found = {index: caches("inkling-small", 8, index, vllm_config) for index in (0, 3, 5)}
    for index in (0, 5):
        found[index].kv_scales = (torch.ones(1), torch.ones(1))
    return found


def test_calibrated_scales_reach_their_layers(said: list[str]) -> None:
    """Under the names that calibration gives them; those of other stages and of caches in bf16 are passed over."""
    stored = {
        "model.llm.layers.0.attn.wk_dv.k_scale": 0.5, "model.language_model.layers.0.self_attn.v_proj.v_scale": 0.25,
        "model.layers.3.self_attn.k_scale": 7.0, "model.layers.4.self_attn.k_scale": 7.0,
        "model.mtp.layers.0.transformer_block.attn.v_scale": 0.125,
    }  # fmt: skip
    stream = [(name, torch.tensor(scale)) for name, scale in stored.items()]
    other = [("model.llm.layers.0.attn.wk_dv.weight", torch.ones(1)), ("model.layers.0.mlp.k_scale", torch.ones(1))]
    held = fp8_caches()
    assert list(state.without_scales([*stream, *other], held, 5)) == other
    found = {index: [float(scale) for scale in one.kv_scales or ()] for index, one in held.items()}
    assert found == {0: [0.5, 0.25], 3: [], 5: [1, 0.125]}
    assert said == ["fp8 cache of 2 layers: 3 scales from the checkpoint, the others are 1"]


@pytest.mark.parametrize("value", [[0.0], [-1.0], [float("inf")], [float("nan")], [1.0, 1.0]])
def test_a_scale_that_is_none(value: list[float]) -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.k_scale is .*; expected one positive number"):
        list(state.without_scales([("llm.layers.0.attn.k_scale", torch.tensor(value))], fp8_caches(), 5))


def test_a_name_is_taken_once() -> None:
    vllm_config = config()
    caches("inkling", 1, 0, vllm_config)
    with pytest.raises(ValueError, match=r"already has a layer of the name model\.layers\.0\.attn"):
        caches("inkling", 1, 0, vllm_config)


@pytest.mark.parametrize("head_major", [False, True])
def test_views_of_an_allocation_of_any_strides(head_major: bool) -> None:
    one = caches("inkling-small", 8, 0, config())
    heads, dim, pages, page = one.spec.num_kv_heads, one.spec.head_dim, 5, 32
    shape = (pages, heads, page, 2 * dim) if head_major else (pages, page, heads, 2 * dim)
    allocated = torch.zeros(shape)
    one.kv.bind_kv_cache(allocated if head_major else allocated.transpose(1, 2))
    k, v = one.kv.pages()
    assert k.shape == v.shape == (pages, page, heads, dim)
    k[3, 7, heads - 1, dim - 1], v[3, 7, heads - 1, 0] = 1, 2
    row = allocated[3, heads - 1, 7] if head_major else allocated[3, 7, heads - 1]
    assert row[dim - 1] == 1
    assert row[dim] == 2
    width = one.conv.get_kv_cache_spec(config()).head_size
    one.conv.bind_kv_cache(torch.zeros(pages, 1, 8, width))
    streams = one.conv.streams()
    assert [stream.shape for stream in streams] == [(pages, 8, n) for n in one.conv.channels]
    for stream in streams:
        stream += 1
    assert one.conv.kv_cache.max() == 1, "the streams overlap"


def test_padding_of_a_replayed_graph_reaches_the_model_as_such() -> None:
    """Two requests of a graph for four: counts are padded, the buffers passed on as they are, lengths not read."""
    builder = PortableMetadataBuilder(None, [], config(), torch.device("cpu"))
    starts = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    lengths = torch.tensor([9, 4, 0, 0], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=4, num_actual_tokens=4,
        max_query_len=1, max_seq_len=9, block_table_tensor=torch.zeros(8, 6, dtype=torch.int32),
        slot_mapping=torch.tensor([8, 3, -1, -1]),
    )  # fmt: skip
    built = builder.build(0, common)
    assert built.cu_seqlens.data_ptr() == starts.data_ptr()
    assert built.kv_lens.data_ptr() == lengths.data_ptr()
    assert built.table.shape == (4, 6)
    assert (built.max_query_len, built.max_kv_len, built.decode_query_len) == (1, 9, 1)
    assert builder.build_for_cudagraph_capture(common).max_kv_len == 512
    one = caches("inkling-small", 8, 0, config())
    one.kv.bind_kv_cache(torch.zeros(5, one.spec.num_kv_heads, 16, 2 * one.spec.head_dim))
    one.conv.bind_kv_cache(torch.zeros(5, 1, 8, one.conv.get_kv_cache_spec(config()).head_size))
    metadata: dict[str, PortableMetadata] = {one.kv.prefix: built, one.conv.prefix: built}
    batch = one.batch(metadata, 4)
    assert batch.slots.shape == (4, 6)
    assert batch.slot_mapping["sliding"].tolist() == [8, 3, -1, -1]
    assert batch.states is not None
    assert batch.states[0].kv_conv.shape[1] == 8


def test_a_connector_is_waited_for_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disaggregated prefill: both caches of each layer arrive before they are read and leave when they are written."""
    calls: list[tuple[str, ...]] = []
    connector = types.SimpleNamespace(
        has_connector_metadata=lambda: True,
        wait_for_layer_load=lambda name: calls.append(("wait", name)),
        save_kv_layer=lambda name, cache, metadata: calls.append(("save", name, str(cache.shape[0]), metadata)),
    )
    one = caches("inkling-small", 8, 0, config())
    one.kv.bind_kv_cache(torch.zeros(5, 1))
    one.conv.bind_kv_cache(torch.zeros(7, 1))
    context = types.SimpleNamespace(attn_metadata={one.kv.prefix: "kv", one.conv.prefix: "conv"})
    monkeypatch.setattr(state, "get_forward_context", lambda: context)
    with state.transferred([one]):
        calls.append(("run",))
    assert calls == [("run",)], "there is no connector"
    calls.clear()
    monkeypatch.setattr(state, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(state, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(state, "get_kv_transfer_group", lambda: connector)
    with state.transferred([one]):
        calls.append(("run",))
    kv, conv = one.kv.prefix, one.conv.prefix
    assert calls == [("wait", kv), ("wait", conv), ("run",), ("save", kv, "5", "kv"), ("save", conv, "7", "conv")]
    context.attn_metadata, before = None, len(calls)
    with state.transferred([one]):
        pass
    assert len(calls) == before, "vLLM is measuring memory"
