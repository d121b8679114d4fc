"""The presets have the sizes that their makers publish."""

from __future__ import annotations

import pytest

from estimators.model import PRESETS, preset, preset_name
from estimators.trees import model_tree
from infinity.errors import ConfigError

# Parameters as the checkpoints' own files count them: tied weights once, DeepSeek-V3 without its extra prediction
# layer and without the routers' correction biases, which are buffers.
NUMEL = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "deepseek-v3": 671_026_404_352,
}


def test_every_preset_has_a_known_size():
    assert list(NUMEL) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert model_tree(preset(name), compute_dtype="bf16").numel == NUMEL[name]


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("microsoft/Phi-3-mini-128k-instruct", "phi-3-mini"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        # Other shapes.
        ("Qwen/Qwen2.5-VL-7B-Instruct", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None),
        ("meta-llama/Llama-3.2-8B", None),
    ],
)
def test_an_id_of_the_hub_that_names_a_known_shape_finds_it(identity, name):
    assert preset_name(identity) == name


def test_an_unknown_name_is_answered_with_what_is_near():
    with pytest.raises(ConfigError, match=r"Llama-3.1-80B is neither a file.*Did you mean llama-3.1-8b"):
        preset("Llama-3.1-80B")
