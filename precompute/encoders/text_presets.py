"""The text encoders of diffusion models, as their pipelines in diffusers run them. Imports no torch."""

from collections.abc import Mapping
from typing import Any

CLIP = {"max_tokens": 77, "layer": -2}
POOLED = {"max_tokens": 77, "output": "pooled"}
FIRST, SECOND, THIRD = ({"subfolder": f"text_encoder{which}"} for which in ("", "_2", "_3"))

QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""A user's question in Qwen's chat template."""

DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
QWEN_IMAGE = f"<|im_start|>system\n{DESCRIBE}<|im_end|>\n{QUESTION}"
KANDINSKY = f"<|im_start|>system\nYou are a prompt engineer. {DESCRIBE}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>"
HUNYUAN = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
FLUX2 = (
    "[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing on "
    "object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
)
LUMINA = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts. <Prompt Start> {}"
)
SANA = """\
Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for image \
generation. Evaluate the level of detail in the user prompt:
- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial relationships \
to create vivid and concrete scenes.
- If the prompt is already detailed, refine and enhance the existing details slightly without overcomplicating.
Here are examples of how to transform or refine prompts:
- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping peacefully \
on a warm sunny windowsill, surrounded by pots of blooming red flowers.
- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street lamps, a \
diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass skyscrapers.
Please generate only the enhanced description for the prompt below and avoid including any additional commentary or \
evaluations:
User Prompt: {}"""

Preset = Mapping[str, Mapping[str, Any]]
"""Fields of `encoder:`, by name of an encoder."""

PRESETS: Mapping[str, Preset] = {
    "SD": {"clip": {**FIRST, "max_tokens": 77}},
    "SDXL": {"clip": {**FIRST, **CLIP}, "clip-2": {**SECOND, **CLIP}, "pooled": {**SECOND, **POOLED}},
    "SD3": {
        "clip": {**FIRST, **CLIP},
        "clip-2": {**SECOND, **CLIP},
        "pooled": {**FIRST, **POOLED},
        "pooled-2": {**SECOND, **POOLED},
        "t5": {**THIRD, "max_tokens": 256},
    },
    "FLUX.1-dev": {"t5": {**SECOND, "max_tokens": 512}, "pooled": {**FIRST, **POOLED}},
    "FLUX.1-schnell": {"t5": {**SECOND, "max_tokens": 256}, "pooled": {**FIRST, **POOLED}},
    "FLUX.2-dev": {"mistral": {**FIRST, "max_tokens": 512, "layer": [10, 20, 30], "template": FLUX2}},
    "FLUX.2-klein": {
        "qwen": {
            **FIRST,
            "max_tokens": 512,
            "layer": [9, 18, 27],
            "padding": "masked",
            "template": f"{QUESTION}<think>\n\n</think>\n\n",
        }
    },
    "Qwen-Image": {"qwen": {**FIRST, "max_tokens": 512, "drop": 34, "template": QWEN_IMAGE}},
    "Krea-2": {"qwen": {**FIRST, "max_tokens": 512, "drop": 34, "layer": [*range(2, 36, 3)], "template": QWEN_IMAGE}},
    "Z-Image": {"qwen": {**FIRST, "max_tokens": 512, "layer": -2, "template": QUESTION}},
    "SANA": {"gemma": {**FIRST, "max_tokens": 300, "clean": "lower", "drop": "instruction", "template": SANA}},
    "Lumina-2": {"gemma": {**FIRST, "max_tokens": 256, "layer": -2, "template": LUMINA}},
    "PixArt": {"t5": {**FIRST, "max_tokens": 120, "padding": "zero", "clean": "lower"}},
    "AuraFlow": {"umt5": {**FIRST, "max_tokens": 256, "clean": "none"}},
    "Kandinsky-5": {
        "qwen": {**FIRST, "max_tokens": 512, "drop": 40, "clean": "prompt_clean", "template": KANDINSKY},
        "pooled": {**SECOND, **POOLED, "clean": "prompt_clean"},
    },
    "Wan": {"umt5": {**FIRST, "max_tokens": 512}},
    "HunyuanVideo": {
        "llama": {**FIRST, "max_tokens": 256, "layer": -3, "drop": 95, "template": HUNYUAN},
        "pooled": {**SECOND, **POOLED},
    },
    "LTX": {"t5": {**FIRST, "max_tokens": 128, "padding": "seen-zero"}},
    "CogVideoX": {"t5": {**FIRST, "max_tokens": 226}},
    "Mochi": {"t5": {**FIRST, "max_tokens": 256, "padding": "zero"}},
}
"""By model: its encoders, with the fields of `encoder:` that are not their family's defaults."""
