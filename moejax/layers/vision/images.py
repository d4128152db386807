"""What the model gets of images: fixed buffers of patches, whatever the sizes of the images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.partitioning import batch_local, constrain


class Patches(NamedTuple):
    """Buffers of Z patches each, every one with whole images one behind the other.

    The patches of an image come in groups of 2 x 2 that become one token, groups by rows, and row
    by row inside a group; those of a clip frame by frame. NumPy arrays where they are filled, jax's
    in a step.

    Attributes:
      pixels: [B, Z, 3, p, p]; uint8, or floats that are normalised already.
      image_ids: int32 [B, Z], 1, 2, ... along a buffer; 0 = padding, all of it in front.
      places: int32 [B, Z, 4], row and column of the patch, rows and columns of its image.
      frames: int32 [B, Z], frame of a clip, -1 in a still image; None where no buffer has a clip.
      tokens: int32 [B, Z/4], place among the buffer's features of each group's token, the same for
        all frames of a clip; -1 = padding. None where no buffer has a clip: group i is feature i.
    """

    pixels: Any
    image_ids: Any
    places: Any
    frames: Any = None
    tokens: Any = None


class Images(NamedTuple):
    """Patches, and where their features stand in the text.

    Attributes:
      patches: the buffers; the tower makes [B, Z/4, D] features of them.
      feature_at: int32, one for each token of the text: which of the B * Z/4 features it is,
        -1 = none: an ordinary token.
    """

    patches: Patches
    feature_at: Any


class RowImages(NamedTuple):
    """Patches where every row of the text has a buffer of its own, and lies with it.

    What training uses: no feature leaves its device.

    Attributes:
      patches: as many buffers as rows.
      feature_at: int32, one for each token of the text: which of the Z/4 features of its row's
        buffer it is, -1 = none: an ordinary token.
    """

    patches: Patches
    feature_at: Any


def images_of(batch: Mapping[str, Any]) -> RowImages | None:
    """The images of a batch, None in one that has no buffers for them.

    Args:
      batch: of rows: `pixels`, `image_ids` and `places` as in `Patches`, and `feature_at`.
    """
    if "feature_at" not in batch:
        return None
    patches = Patches(batch["pixels"], batch["image_ids"], batch["places"])
    return RowImages(patches, batch["feature_at"])


def with_features(
    x_BTD: jax.Array, features_BzD: jax.Array, images: Images | RowImages
) -> jax.Array:
    """Embeddings with the features of images in their places."""
    place = place_own_features if isinstance(images, RowImages) else place_features
    return place(x_BTD, features_BzD, images.feature_at)


def place_own_features(
    x_BTD: jax.Array, features_BzD: jax.Array, feature_at_BT: jax.Array
) -> jax.Array:
    """`place_features` of rows that have their images with them: each device has what it needs.

    Args:
      x_BTD: embeddings of all tokens.
      features_BzD: features of the rows' buffers.
      feature_at_BT: int32 number of the feature in the row's buffer, -1 = keep the embedding.
    """

    def local(x_BTD, features_BzD, at_BT):
        own_BTD = jnp.take_along_axis(features_BzD, jnp.maximum(at_BT, 0)[..., None], 1)
        return jnp.where(at_BT[..., None] >= 0, own_BTD, x_BTD)

    return batch_local(local, (0, 0, 0))(x_BTD, features_BzD, feature_at_BT)


def place_features(
    x_BTD: jax.Array, features_BzD: jax.Array, feature_at_BT: jax.Array
) -> jax.Array:
    """Embeddings with the features of images in their places, one to one.

    Images may lie on other devices than their text: the features are sent to all.

    Args:
      x_BTD: embeddings of all tokens.
      features_BzD: features of all buffers, as many buffers as there are, not as rows of text.
      feature_at_BT: int32 number of the feature among all, -1 = keep the embedding.
    """
    features_MD = constrain(features_BzD.reshape(-1, features_BzD.shape[-1]), (None, None))
    rows = batch_local(lambda at_BT, features_MD: features_MD[jnp.maximum(at_BT, 0)], (0,))
    return jnp.where(feature_at_BT[..., None] >= 0, rows(feature_at_BT, features_MD), x_BTD)
