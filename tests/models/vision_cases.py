"""Towers and images of tests: published tiny towers with their weights, patches in buffers."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from moejax.checkpoint.key_map import KeyMap
from moejax.config import ModelConfig, VisionConfig
from moejax.data.patches import PatchedImage, buffers, grouped_order
from moejax.layers.vision.images import Patches
from moejax.models.hf_keys import KIMI_K3
from moejax.models.hf_vision import read_vision
from moejax.models.parts import ModelParts, model_parts
from tests.models.published import FOLDER


def tower_parts(folder: str = "k3_vision", **changes: Any) -> ModelParts:
    """A model of one small layer with the tower of a `config.json`."""
    raw = json.loads((FOLDER / folder / "config.json").read_text())
    vision = VisionConfig(**read_vision(raw, 32)).replace(pad_token=0, **changes)
    return model_parts(ModelConfig(dim=32, num_layers=1, attn_res_block=0, vision=vision))


def tower_tree(parts: ModelParts, folder: str = "k3_vision", file: str = "model") -> dict:
    """The tower's parameters (or "grads": its gradients) from a folder, in our tree."""
    keys = KeyMap(parts, KIMI_K3)
    tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parts.params["vision"])
    for name, array in load_file(FOLDER / folder / f"{file}.safetensors").items():
        if name.startswith(("vision_tower.", "mm_projector.")):
            for piece in keys.to_ours(name, array):
                _, *path, last = piece.leaf.split("/")
                node = tree
                for word in path:
                    node = node[word]
                node[last][piece.at] = piece.array
    return tree


def split_rows(pixels: np.ndarray, grids: np.ndarray) -> list[PatchedImage]:
    """Images from patches that count by frames, rows and columns, one image after the other."""
    images, start = [], 0
    for grid in grids.tolist():
        order = grouped_order(tuple(grid))
        images.append(PatchedImage(pixels[start : start + len(order)][order], tuple(grid)))
        start += len(order)
    return images


def in_buffers(images: Sequence[PatchedImage], **options: Any) -> tuple[Patches, list[int]]:
    """Float patches in buffers; by default one, 20 patches longer than needed."""
    total = sum(image.num_patches for image in images)
    patch = images[0].pixels.shape[-1] if images else 4
    dtype = images[0].pixels.dtype if images else np.float32
    given = {"num_buffers": 1, "size": total + 20, "patch": patch, "dtype": dtype}
    return buffers(images, **given | options)


def of_images(features_BzD: np.ndarray, images: Sequence[PatchedImage], starts) -> np.ndarray:
    """The features of all images, one image after the other."""
    flat = np.asarray(features_BzD).reshape(-1, features_BzD.shape[-1])
    return np.concatenate(
        [
            flat[start : start + image.num_tokens]
            for image, start in zip(images, starts, strict=True)
        ]
    )
