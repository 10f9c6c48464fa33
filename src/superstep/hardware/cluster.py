"""Cluster: the number of chips, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from superstep.hardware.chip import Chip

Topology = Literal["switched", "torus", "mesh", "cube"]
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRate:
    """A collective's measured rate: ``latency_s``, plus a second for each ``bytes_per_s``.

    The bytes are those of the whole tensor on one rank: of the input of an all-reduce, a reduce-scatter, an all-to-all
    and a send, of the output of an all-gather.
    """

    name: Collective
    ranks: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Chips in fast domains (a node's NVLink, a rack's NVL72, a pod's ICI), and the network between domains.

    Attributes:
        chip: all are of one kind.
        chips: how many.
        domain: chips that the fast links join.
        link_bytes_per_s: of one chip over the fast links, one direction.
        link_latency_s: of one message over them.
        network_bytes_per_s: of one chip between domains, one direction.
        network_latency_s: of one message between domains.
        oversubscription: how many times less the network carries between far domains than its ports together; 1 where
            it is not blocking.
        topology: of a domain: chips at a switch; a torus, where the fast links join neighbours; a mesh, where each chip
            has a link to each other; a cube, where the links are its edges, twice.
        price_per_chip_hour: None where no price is given.
        collectives: as measured; empty where only the links' rates are known.
        disk_read_bytes_per_s, disk_write_bytes_per_s: of one host, as measured; None where they were not.
    """

    chip: Chip
    chips: int
    domain: int
    link_bytes_per_s: float
    link_latency_s: float = 2e-6
    network_bytes_per_s: float
    network_latency_s: float = 6e-6
    oversubscription: float = 1.0
    topology: Topology = "switched"
    price_per_chip_hour: float | None = None
    collectives: tuple[CollectiveRate, ...] = ()
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
