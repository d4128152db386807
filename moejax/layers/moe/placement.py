"""Which device holds which expert: placements that even the devices' load, found from counts.

Experts keep their numbers everywhere (router, loads, balancing, checkpoints); a placement only says
in which slot an expert's weights lie. Slots count through the devices along ``expert``, each with
as many experts as any other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from moejax.typing import Float, Int

MAX_PLACES = 16  # devices that one expert may be on


class Spread(NamedTuple):
    """Over how many devices experts are spread, and how many copies each may hold beside its own.

    Copies are of experts that another device owns: extra places to compute, no extra weights.
    """

    devices: int
    copies: int = 0

    @property
    def columns(self) -> int:
        """Width of a table of places: the place; with copies the number of places, then these."""
        return 1 + MAX_PLACES if self.copies else 1

    def num_places(self, num_experts: int) -> int:
        """Slots and places of copies together: what the exchange counts as experts."""
        return num_experts + self.devices * self.copies


class Placement(NamedTuple):
    """Where the experts of some layers lie.

    Attributes:
      slots_LE: int32, the slot of each expert's weights, a permutation for every layer.
      copies_LPc: int32, the expert that each device's places for copies repeat; E for none.
    """

    slots_LE: Int[np.ndarray, "L E"]
    copies_LPc: Int[np.ndarray, "L P c"]

    @property
    def spread(self) -> Spread:
        """Devices and copies that it is made for."""
        return Spread(*self.copies_LPc.shape[1:])


def canonical(num_layers: int, num_experts: int, spread: Spread) -> Placement:
    """Expert i in slot i, and no copy: how weights lie without a placement, and in checkpoints."""
    slots = np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
    return Placement(slots, np.full((num_layers, *spread), num_experts, np.int32))


def device_loads(load_LE: np.ndarray, placement: Placement) -> Float[np.ndarray, "L P"]:
    """Tokens of every device: an expert with n places leaves 1/n of its load at each of them."""
    load_LE = np.asarray(load_LE, np.float64)
    layers = zip(load_LE, placement.slots_LE, placement.copies_LPc, strict=True)
    return np.stack([_device_loads(*layer) for layer in layers])


def _device_loads(load_E, slots_E, copies_Pc) -> np.ndarray:
    E, P = len(load_E), len(copies_Pc)
    share_E = load_E / (1 + np.bincount(copies_Pc.reshape(-1), minlength=E + 1)[:E])
    own_P = np.bincount(slots_E // (E // P), share_E, P)
    return own_P + np.append(share_E, 0)[copies_Pc].sum(-1)


def imbalance(load_LP: np.ndarray) -> Float[np.ndarray, " L"]:
    """Largest load of a device over the mean, per layer; 1 where there is no load at all."""
    mean = np.asarray(load_LP, np.float64).mean(-1)
    return np.where(mean > 0, np.max(load_LP, -1) / np.where(mean > 0, mean, 1), 1.0)


def place(load_LE: np.ndarray, spread: Spread, current: Placement | None = None) -> Placement:
    """A placement under which the devices' loads are as even as the search finds.

    Per layer: the heaviest expert first, each to the device with the least load that has a slot
    left; then swaps of two experts as long as the fullest device gains. With copies, the experts
    above the mean load are repeated first, the one with the largest share of load a place before
    any other. Ties go to the lowest number, so the result depends on nothing but the arguments. It
    is never worse than the order of the experts' numbers, than fewer copies, nor than `current`,
    which stays where nothing better was found.

    Args:
      load_LE: tokens of every expert in every layer.
      spread: devices along ``expert``, and copies.
      current: the placement in force.
    """
    load_LE = np.asarray(load_LE, np.float64)
    (L, E), P = load_LE.shape, spread.devices
    plain = canonical(L, E, spread)
    current = current or plain
    slots_LE, copies_LPc = np.empty_like(plain.slots_LE), np.empty_like(plain.copies_LPc)
    for layer, load_E in enumerate(load_LE):
        found = [_searched(load_E, Spread(P, c), spread.copies) for c in range(spread.copies + 1)]
        candidates = [_layer(current, layer), *found, _layer(plain, layer)]
        fullest = [_device_loads(load_E, *candidate).max() for candidate in candidates]
        slots_LE[layer], copies_LPc[layer] = candidates[int(np.argmin(fullest))]
    return Placement(slots_LE, copies_LPc)


def _layer(placement: Placement, layer: int) -> tuple[np.ndarray, np.ndarray]:
    return placement.slots_LE[layer], placement.copies_LPc[layer]


def _searched(
    load_E: np.ndarray, spread: Spread, num_columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """(slots_E, copies_Pc) of one layer, with columns for `num_columns` copies a device."""
    E, P = len(load_E), spread.devices
    repeats_E = _repeats(load_E, P, P * spread.copies)
    slots_Pe, copies_Pc = _assigned(load_E, repeats_E, spread)
    places_E = 1 + np.bincount(copies_Pc.reshape(-1), minlength=E + 1)[:E]
    held_PS = np.concatenate([slots_Pe, copies_Pc], 1)
    _swap(np.append(load_E / places_E, 0), held_PS, E // P)
    device_E = np.empty(E, np.int64)
    device_E[held_PS[:, : E // P]] = np.arange(P)[:, None]
    slots_E = np.empty(E, np.int64)
    slots_E[np.argsort(device_E, kind="stable")] = np.arange(E)
    copies_Pc = np.sort(held_PS[:, E // P :], 1)
    unused = num_columns - spread.copies
    return slots_E, np.pad(copies_Pc, ((0, 0), (0, unused)), constant_values=E)


def _repeats(load_E: np.ndarray, num_devices: int, num_copies: int) -> np.ndarray:
    """How many copies each expert is to have, `num_copies` in all at most."""
    repeats_E = np.zeros(len(load_E), np.int64)
    most = min(MAX_PLACES, num_devices) - 1
    for _ in range(num_copies):
        share_E = np.where(repeats_E < most, load_E / (1 + repeats_E), 0)
        hottest = int(np.argmax(share_E))
        if share_E[hottest] <= load_E.mean():
            break
        repeats_E[hottest] += 1
    return repeats_E


def _assigned(
    load_E: np.ndarray, repeats_E: np.ndarray, spread: Spread
) -> tuple[np.ndarray, np.ndarray]:
    """Experts in the slots [P, e] and in the places for copies [P, c] of every device.

    The heaviest share first, each to the least loaded device that has room for it.
    """
    (E,), (P, num_columns) = load_E.shape, spread
    share_E = load_E / (1 + repeats_E)
    slots: list[list[int]] = [[] for _ in range(P)]
    copies: list[list[int]] = [[] for _ in range(P)]
    owner_E, total_P = np.full(E, -1), np.zeros(P)
    wanted = np.repeat(np.arange(E), 1 + repeats_E)
    for expert in wanted[np.argsort(-share_E[wanted], kind="stable")].tolist():
        is_copy = owner_E[expert] >= 0
        lists, room = (copies, num_columns) if is_copy else (slots, E // P)
        is_open = [len(of) < room and expert not in of for of in lists]
        if is_copy:
            is_open[owner_E[expert]] = False
            if not any(is_open):
                continue
        device = int(np.argmin(np.where(is_open, total_P, np.inf)))
        lists[device].append(expert)
        total_P[device] += share_E[expert]
        if not is_copy:
            owner_E[expert] = device
    filled = [of + [E] * (num_columns - len(of)) for of in copies]
    return np.array(slots), np.array(filled, np.int64).reshape(P, num_columns)


def _swap(share_E: np.ndarray, held_PS: np.ndarray, num_slots: int) -> None:
    """Swaps what the fullest device holds against what others hold, the best swap first.

    Slots against slots and copies against copies. A swap must leave both devices below what the
    fullest had, and no device with one expert twice.

    Args:
      share_E: load of one place of each expert, and 0 for none.
      held_PS: expert in each place, first a device's `num_slots` slots; changed in place.
    """
    P, S = held_PS.shape
    none = len(share_E) - 1
    same_kind_SS = np.equal.outer(np.arange(S) < num_slots, np.arange(S) < num_slots)
    for _ in range(4 * none):
        total_P = share_E[held_PS].sum(-1)
        full = int(np.argmax(total_P))
        gain_SPS = share_E[held_PS[full]][:, None, None] - share_E[held_PS]
        after_SPS = np.maximum(total_P[full] - gain_SPS, total_P[:, None] + gain_SPS)
        holds_PE = np.zeros((P, none + 1), bool)
        holds_PE[np.arange(P)[:, None], held_PS] = True
        holds_PE[:, none] = False
        after_SPS[~np.broadcast_to(same_kind_SS[:, None], after_SPS.shape)] = np.inf
        after_SPS[holds_PE[:, held_PS[full]].T] = np.inf  # its own device among them
        after_SPS[:, holds_PE[full][held_PS]] = np.inf
        after_SPS[:, full] = np.inf
        best = int(np.argmin(after_SPS))
        if not after_SPS.flat[best] < total_P[full]:
            return
        i, device, j = np.unravel_index(best, after_SPS.shape)
        held_PS[full, i], held_PS[device, j] = held_PS[device, j], held_PS[full, i]


def place_tables(placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    """What the layers read of a placement.

    Places are numbered through the devices: a device's slots, then its copies.

    Returns:
      int32 [L, E, columns]: the place of each expert; with copies, how many places it has, and
      then these, of which token m takes the one with number m modulo their number. And int32
      [L, P c]: the slot that each place for a copy repeats, E for none.
    """
    slots_LE, copies_LPc = placement
    (L, E), (_, P, c) = slots_LE.shape, copies_LPc.shape
    e = E // P
    own_LE = slots_LE + slots_LE // e * c
    sources = np.full((L, P * c), E, np.int32)
    if not c:
        return own_LE[:, :, None].astype(np.int32), sources
    tables = np.zeros((L, E, placement.spread.columns), np.int32)
    tables[:, :, 0], tables[:, :, 1] = 1, own_LE
    for layer in range(L):
        for at, expert in enumerate(copies_LPc[layer].reshape(-1).tolist()):
            if expert < E:
                device, column = divmod(at, c)
                tables[layer, expert, 0] += 1
                tables[layer, expert, tables[layer, expert, 0]] = device * (e + c) + e + column
                sources[layer, at] = slots_LE[layer, expert]
    return tables, sources


def look_up(ids: jax.Array, turn: jax.Array, table_EK: jax.Array) -> jax.Array:
    """Places of experts in a table of :func:`place_tables`.

    Args:
      ids: int32 [..., A], experts.
      turn: int32 [...], a number of each token, by which tokens are spread over copies.
      table_EK: int32, of one layer.
    """
    if table_EK.shape[1] == 1:
        return table_EK[ids, 0]
    return table_EK[ids, 1 + turn[..., None] % table_EK[ids, 0]]
